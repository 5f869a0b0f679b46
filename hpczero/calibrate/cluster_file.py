"""A calibration's findings as a cluster file: the planner's numbers, and how sure they are (pure).

How each number follows from what was measured:

- On CPUs a device is a core: a rank's rates are divided by its share of the cores. `peak_tflops` is
  what ever larger products come to; where a shipped cluster has the device, it is the data sheet's.
- Passes are held against the bandwidth that the planner gives a rank: that of its cores alone, or
  its part of the node's, whichever is less.
- `link_gb_s` is the rate of the fastest operation, `link_reached` what all come to, by their mean
  time; the latency is the median of theirs, of the two parts of an all_reduce each for itself.
- `hidden` is 1 less what computing takes longer beside exchanges, by these alone.
- Of several nodes one rank each says how many adapters all of them together are worth.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpczero.calibrate.findings import (
    AttentionTiming,
    Beside,
    Findings,
    ProductTiming,
    Sending,
    Timing,
)
from hpczero.calibrate.fits import (
    LineFit,
    fit_curve,
    fit_line,
    fit_products,
    latency,
    mean_rate,
    share,
)
from hpczero.planner.cluster import Device
from hpczero.spec.load import toml_value
from hpczero.text import printable

_BY_MEMORY = 0.7  # of a product's time: then memory sets its pace
_FEWEST_PRODUCTS = 6  # that are fitted, of those that memory does not slow down
_OF_BLOCK = {"norm": 2, "gelu": 4, "cross_entropy": 1}  # kernels, by how much passes through them
_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6


@dataclass(frozen=True)
class Origin:
    """What the file says of where its numbers are from."""

    description: str
    sources: Sequence[str]
    sheet: Device | None = None  # the device of a shipped cluster


def text(findings: Findings, origin: Origin) -> str:
    """Return the file; all numbers are in the ranges that `planner.cluster` reads."""
    sources = [f"    {_line(source)}," for source in origin.sources]
    lines = [
        "# Measured by hpczero calibrate: docs/calibrate.md says how. Comments: the quartiles of",
        "# the turns by their median, and the root mean square error of the fits.",
        *(f"# {printable(note)}" for note in findings.notes),
        f"description = {_line(origin.description)}",
        "sources = [",
        *sources,
        "]",
        *_device(findings, origin.sheet),
        *_node(findings),
        *_network(findings),
        *_files(findings),
    ]
    return "\n".join(lines) + "\n"


def _device(findings: Findings, sheet: Device | None) -> Iterator[str]:
    machine, alone = findings.machine, findings.alone
    assert alone
    assert findings.launch
    bandwidth = sheet.bandwidth_gb_s if sheet else alone.rate / _GIGA
    given = _bandwidth(findings, bandwidth)
    known = sheet.products.items() if sheet else ()
    peaks = {str(precision): products.peak_tflops for precision, products in known}
    yield from ("", "[device]", f"name = {_line(machine.device)}", f'kind = "{machine.kind}"')
    if machine.device_memory:
        yield f"memory_gb = {_number(machine.device_memory / _GIGA)}"
    measured = f"{_number(alone.rate / _GIGA)} measured; " if sheet else ""
    yield f"bandwidth_gb_s = {_number(bandwidth)}  # {measured}{_noise(alone.timing)}"
    if reached := _of_block(findings, given):
        yield f"bandwidth_reached = {_number(share(reached))}  # by the passes of a block"
    launch = findings.launch
    yield f"launch_us = {_number(launch.median / _MICRO)}  # {_noise(launch)}"
    if findings.bus:
        bus = findings.bus
        yield f"bus_gb_s = {_number(bus.rate / _GIGA)}  # {_noise(bus.timing)}"
    for precision, timed in findings.products.items():
        yield from _products(findings, precision, timed, peaks.get(precision, 0.0), given)
    for precision in dict.fromkeys(one.precision for one in findings.kernels):
        yield from ("", f"[device.passes.{precision}]")
        for one in findings.kernels:
            if one.precision == precision:
                rate = f"{_number(one.moved.rate / _GIGA)} GB/s; {_noise(one.moved.timing)}"
                yield f"{one.kernel} = {_number(share(one.moved.rate / given))}  # {rate}"


def _bandwidth(findings: Findings, alone: float) -> float:
    """Return the bytes a second that the planner gives a rank, before what is reached of them."""
    machine = findings.machine
    assert findings.at_once
    if machine.kind == "cuda":
        return alone * _GIGA
    return min(alone * _GIGA * machine.devices / machine.ranks_on_node, findings.at_once.rate)


def _of_block(findings: Findings, given: float) -> float:
    """Return the share that a block's kernels reach, by their time in all precisions; 0: none."""
    kernels = [one for one in findings.kernels if one.kernel in _OF_BLOCK]
    weight = sum(_OF_BLOCK[one.kernel] for one in kernels)
    by_time = sum(_OF_BLOCK[one.kernel] * given / one.moved.rate for one in kernels)
    return weight / by_time if kernels else 0.0


def _products(
    findings: Findings, precision: str, timed: Sequence[ProductTiming], known: float, given: float
) -> Iterator[str]:
    machine = findings.machine
    width = 4 if precision == "fp32" else 2
    of_device = machine.ranks_on_node / machine.devices if machine.kind == "cpu" else 1.0
    by_compute = [one for one in timed if _memory_time(one, width, given) < _BY_MEMORY]
    fitted = by_compute if len(by_compute) >= _FEWEST_PRODUCTS else timed
    fit = fit_products([one.product for one in fitted])
    best = max(one.product.rate for one in fitted)
    rate = fit.rate * of_device / _TERA
    peak = max(known, rate)
    spread = statistics.median(one.timing.spread for one in fitted)
    yield from ("", f"[device.products.{precision}]")
    yield (
        f"peak_tflops = {_number(peak)}  # {len(fitted)} products, error {fit.error:.1%}, "
        f"quartiles {spread:.1%} apart; the best reached {_number(best * of_device / _TERA)}"
    )
    yield f"reached = {_number(share(rate / peak))}"
    yield f"half_outer = {_number(fit.half_outer)}"
    yield f"half_inner = {_number(fit.half_inner)}"
    yield from _attention(findings.attention.get(precision, ()), peak * _TERA / of_device)


def _memory_time(one: ProductTiming, width: int, given: float) -> float:
    """Return the share of a product's time that its matrices take through memory."""
    of = one.product
    return (of.m * of.k + of.k * of.n + of.m * of.n) * width / given / of.seconds


def _attention(timed: Sequence[AttentionTiming], peak: float) -> Iterator[str]:
    if not timed:
        return
    fit = fit_curve([(one.direction, float(one.keys), one.rate) for one in timed])
    shares = {name: share(rate / peak) for name, rate in fit.rates.items()}
    yield f"attention = {_number(shares['forward'])}  # error {fit.error:.1%}"
    yield f"attention_backward = {_number(shares['backward'])}"
    yield f"attention_half = {_number(fit.half)}"


def _node(findings: Findings) -> Iterator[str]:
    machine, at_once = findings.machine, findings.at_once
    assert at_once
    ranks = f"{machine.ranks_on_node} ranks of {machine.threads} threads"
    yield from ("", "[node]", f"devices = {machine.devices}")
    yield f"memory_gb = {_number(machine.node_memory / _GIGA)}"
    total = at_once.rate * machine.ranks_on_node / _GIGA
    yield f"bandwidth_gb_s = {_number(total)}  # {ranks}; {_noise(at_once.timing)}"
    fits = fit_operations(findings.inside)
    if fits:
        best = max(fit.rate for fit in fits.values())
        yield f"link_gb_s = {_number(best / _GIGA)}"
        yield f"link_reached = {_number(share(mean_rate(fits) / best))}"
        yield f"link_us = {_number(latency(fits) / _MICRO)}"
        yield f"# {_size_range(findings.inside)}"
    if findings.pair_alone and findings.pairs_at_once:
        slower = findings.pairs_at_once.median / findings.pair_alone.median
        yield f"# pairs of ranks at once take {_number(slower)} times as long as a pair alone"
    if findings.window:
        window = findings.window
        yield f"window_gb_s = {_number(window.rate / _GIGA)}  # {_noise(window.timing)}"
    yield from _hidden(findings.beside_inside)
    yield from _operations("node", fits, findings.inside)


def _network(findings: Findings) -> Iterator[str]:
    fits = fit_operations(findings.between)
    if not fits:
        return
    alone = mean_rate(fits)
    each = mean_rate(fit_operations(findings.between_at_once) or fits)
    total = max(alone, each * findings.machine.ranks_on_node)
    adapters = max(1, round(total / alone))
    yield from ("", "[network]")
    yield f"adapters = {adapters}  # a rank alone has {_number(alone / _GIGA)} GB/s"
    yield f"adapter_gb_s = {_number(total / adapters / _GIGA)}  # of all ranks of a node at once"
    yield "reached = 1"
    yield f"latency_us = {_number(latency(fits) / _MICRO)}"
    yield from _hidden(findings.beside_between)
    yield from _operations("network", fits, findings.between)


def _hidden(found: Sequence[Beside]) -> Iterator[str]:
    """Yield the share of all of the operations' seconds that is hidden."""
    certain = [one for one in found if one.noise < 1]
    if found and not certain:
        yield "# hidden: too noisy, quartiles lie further apart than an exchange is long"
    if not certain:
        return
    shown, alone = sum(one.shown for one in certain), sum(one.alone.median for one in certain)
    hidden = min(1.0, max(0.0, 1 - shown / alone))
    shares = (f"{1 - one.shown / one.alone.median:.0%} of {one.operation}" for one in certain)
    noise = max((one.both for one in certain), key=lambda both: both.spread)
    yield f"hidden = {_number(hidden)}  # {', '.join(shares)}; {_noise(noise)}"


def _files(findings: Findings) -> Iterator[str]:
    disk, together = findings.disk, findings.disks_at_once
    if not disk:
        return
    how = "past the page cache" if disk.direct else "through the page cache, flushed"
    size = f"{disk.bytes / _GIGA:.2g} GB"
    yield from ("", "[files]")
    yield (
        f"node_gb_s = {_number(disk.write / _GIGA)}  # {size} written to "
        f"{printable(findings.machine.file_system)}, {how}"
    )
    if together:
        yield f"all_gb_s = {_number(sum(one.write for one in together) / _GIGA)}"
    yield f"read_gb_s = {_number(disk.read / _GIGA)}"


# ------------------------------------------------------------------------------- operations


def fit_operations(sendings: Sequence[Sending]) -> dict[str, LineFit]:
    """Return operation -> latency and bytes sent a second."""
    points: dict[str, list[tuple[float, float]]] = {}
    for one in sendings:
        points.setdefault(one.operation, []).append((one.sent, one.timing.median))
    return {name: fit_line(of) for name, of in points.items() if len(of) > 1}


def _operations(
    table: str, fits: Mapping[str, LineFit], sendings: Sequence[Sending]
) -> Iterator[str]:
    for name, fit in fits.items():
        spread = max(
            (one.timing for one in sendings if one.operation == name), key=lambda each: each.spread
        )
        yield from ("", f"[{table}.operations.{name}]  # error {fit.error:.1%}; {_noise(spread)}")
        yield f"us = {_number(fit.seconds / _MICRO)}"
        yield f"gb_s = {_number(fit.rate / _GIGA)}"


def _size_range(sendings: Sequence[Sending]) -> str:
    sizes = [one.bytes for one in sendings]
    return f"operations on {min(sizes):,} to {max(sizes):,} bytes"


# ----------------------------------------------------------------------------------- values


def _number(value: float) -> str:
    """Return four significant digits, as TOML writes a float or a whole number."""
    return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


def _noise(timing: Timing) -> str:
    low, high = timing.low / timing.median, timing.high / timing.median
    return f"quartiles {low:.2f} to {high:.2f}, {timing.turns} turns"


def _line(words: str) -> str:
    """Return a text of the file; names of hosts and devices may hold anything."""
    return toml_value(printable(words))
