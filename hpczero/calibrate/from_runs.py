"""A cluster file from the traces of finished runs, over the numbers of a base if one is given.

Runs show what is reached, not the curve by which smaller sizes reach less. With a base its curves
stay: `reached` becomes what a typical product of the runs' blocks says. Without one, rates hold for
the runs' own sizes. Of several runs the medians count, and their collectives together.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from hpczero.calibrate.fits import LineFit, fit_line, latency, mean_rate, reached, share
from hpczero.calibrate.traced_run import TracedRun, read
from hpczero.errors import InputError
from hpczero.planner.cluster import Cluster, OperationName, Products
from hpczero.spec.load import toml_value
from hpczero.text import format_count

_LAUNCH_US = 5.0  # where neither a run nor a base says it
_SENDS = 0.1  # of the latency: what the bytes of the largest operation take at least
_LARGE = 1 << 16  # bytes: smaller messages say nothing of bandwidth
_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6


def text(runs: Sequence[Path], base: Cluster | None) -> str:
    """Return the file; InputError where a run has no trace, or runs had different devices."""
    traced = [read(run) for run in runs]
    kinds = sorted({run.device for run in traced})
    if len(kinds) > 1:
        raise InputError(f"these runs had different devices: {', '.join(kinds)}")
    if base and base.device.kind != traced[0].kind:
        raise InputError(f"the base's devices are {base.device.kind}, the runs' {traced[0].kind}")
    if not base and traced[0].kind != "cpu":
        raise InputError(
            "a trace does not show the memory and the bus of a node with GPUs: --base CLUSTER "
            "names a cluster that does (hpczero cluster list)"
        )
    tree = base.model_dump(exclude_unset=True, mode="json") if base else _bare(traced)
    tree["sources"] = [*tree["sources"], *map(_source, traced)]
    tree["device"]["step_us"] = statistics.median(run.step_seconds for run in traced) / _MICRO
    for precision in sorted({run.precision for run in traced}):
        of_precision = [run for run in traced if run.precision == precision]
        products = tree["device"]["products"]
        products[precision] = _products(of_precision, base, products.get(precision))
    _links(tree, traced)
    head = "# Of the traces of runs, by hpczero calibrate --from: docs/calibrate.md says how."
    return "\n".join([head, *_lines(tree, "")]) + "\n"


def _bare(traced: Sequence[TracedRun]) -> dict[str, Any]:
    """Return what has to be there, from the runs alone."""
    first = traced[0]
    bandwidth = statistics.median(run.bandwidth for run in traced)
    return {
        "description": f"{first.device}, as runs show it: {first.ranks_on_node} ranks on a node",
        "sources": [],
        "device": {
            "name": f"a core of {first.device}",
            "kind": first.kind,
            "bandwidth_gb_s": bandwidth / first.threads / _GIGA,
            "bandwidth_reached": 1.0,
            "launch_us": _LAUNCH_US,
            "products": {},
        },
        "node": {
            "devices": first.ranks_on_node * first.threads,
            "bandwidth_gb_s": bandwidth * first.ranks_on_node / _GIGA,
        },
    }


def _source(run: TracedRun) -> str:
    ranks = format_count(run.ranks, "rank")
    return f"trace of the run {run.name}: steps {run.steps} on {ranks}, {run.ranks_on_node} a node"


def _products(
    runs: Sequence[TracedRun], base: Cluster | None, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    if base is None or given is None:
        rate = statistics.median(run.rate / _devices(run, base) for run in runs)
        return {"peak_tflops": rate / _TERA, "reached": 1.0}
    products = Products.model_validate(given)
    shares = []
    for run in runs:
        m, n, k = run.product
        curve = reached(m, products.half_outer) * reached(n, products.half_outer)
        curve *= reached(k, products.half_inner)
        peak = products.peak_tflops * _TERA * _devices(run, base)
        shares.append(run.rate / peak / curve)
    return dict(given) | {"reached": share(statistics.median(shares))}


def _devices(run: TracedRun, base: Cluster | None) -> float:
    """Return the devices that a rank has: cores of a CPU."""
    if run.kind == "cuda":
        return 1.0
    return base.node.devices / run.ranks_on_node if base else float(run.threads)


def _links(tree: dict[str, Any], traced: Sequence[TracedRun]) -> None:
    inside = _fits([run.inside for run in traced])
    if inside:
        tree["node"] |= {
            "link_gb_s": mean_rate(inside) / _GIGA,
            "link_reached": 1.0,
            "link_us": latency(inside) / _MICRO,
            "operations": _operations(inside),
        }
        tree["node"].pop("hidden", None)  # it was measured at another rate
    network = tree.get("network", {})
    between = _fits([_by_adapter(run, network.get("adapters", 1)) for run in traced])
    if between:
        network |= {
            "adapter_gb_s": mean_rate(between) / _GIGA,
            "reached": 1.0,
            "latency_us": latency(between) / _MICRO,
        }
        alone = [run.between for run in traced if run.ranks_on_node == 1]
        network["operations"] = _operations(_fits(alone))  # of one rank of each node
        network.pop("hidden", None)  # it was measured at another rate
        tree["network"] = network


def _by_adapter(run: TracedRun, adapters: int) -> dict[str, list[tuple[float, float]]]:
    """Return the collectives as each adapter of a node sees them, whose ranks send at once."""
    share = run.ranks_on_node / adapters
    return {
        name: [(size * share, seconds) for size, seconds in of] for name, of in run.between.items()
    }


def _fits(runs: Sequence[Mapping[str, Sequence[tuple[float, float]]]]) -> dict[str, LineFit]:
    """Return operation -> fit, of those that were large; one size is taken for all bandwidth.

    Operations that take no longer with more bytes are left out: they wait for something else.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        for operation, of_run in run.items():
            points.setdefault(operation, []).extend(of_run)
    fits = {}
    for name in get_args(OperationName):
        largest = max((size for size, _ in points.get(name, ())), default=0)
        if largest >= _LARGE:
            fit = fit_line(points[name])
            if largest / fit.rate > _SENDS * fit.seconds:
                fits[name] = fit
    return fits


def _operations(fits: Mapping[str, LineFit]) -> dict[str, Any]:
    return {
        name: {"us": fit.seconds / _MICRO, "gb_s": fit.rate / _GIGA} for name, fit in fits.items()
    }


def _lines(tree: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield a table as TOML: its values, then the tables in it."""
    tables = {key: value for key, value in tree.items() if isinstance(value, dict)}
    if name and len(tables) < len(tree):
        yield from ("", f"[{name}]")
    for key, value in tree.items():
        if key not in tables and value is not None:
            yield f"{key} = {_value(value)}"
    for key, table in tables.items():
        yield from _lines(table, f"{name}.{key}" if name else key)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(["[", *(f"    {toml_value(each)}," for each in value), "]"])
    return f"{value:.4g}" if isinstance(value, float) else toml_value(value)
