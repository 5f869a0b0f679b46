"""The tables of docs/foresight.md: published, predicted, error."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import mean, median

from tests.support import published_deepspeed as deepspeed
from tests.support import published_memory as memory
from tests.support.figures import head, row, table
from tests.support.published_steps import Measured, korthikanti, mosaic, zero

_GIGA = 1e9


def tables() -> Iterator[str]:
    """Yield the lines of all tables, in the order of the page."""
    for lines in (
        _by_row(korthikanti()),
        _by_row(zero()),
        _by_group(mosaic()),
        of_deepspeed(),
        of_memory(),
    ):
        yield from lines
        yield ""


def of_deepspeed() -> Iterator[str]:
    """Yield the tables of steps that nothing was fitted to."""
    largest = "largest causes"
    rate = "TFLOP/s"
    yield from table("64 GPUs", "samples/s", deepspeed.on_64(), largest)
    yield ""
    yield from table("stage 1, 400 GPUs", rate, deepspeed.stage_1(), "layout", largest)
    yield ""
    alone = deepspeed.without_tensor_parallelism()
    yield from table("stage 2, 128 GPUs", rate, alone, "layout", largest)
    yield ""
    falls = "samples a GPU", "kB sent", "kB updated"
    yield from table("60B, stage 2", rate, deepspeed.superlinear(), *falls)
    yield ""
    yield from table("400 GPUs, stage 2", rate, deepspeed.from_100b(), "PFLOP/s of all")
    yield ""
    yield from table("three axes, 800 GPUs", rate, [deepspeed.trillion()], "GB needed", largest)
    yield ""
    yield from table("offload, 10B on 1 GPU", "s", deepspeed.offload())
    yield ""
    yield from table(
        "BERT-Large", "", [*deepspeed.bert_on_one(), *deepspeed.bert_in_all()], largest
    )
    yield ""
    yield from table("claim", "", deepspeed.claims())


def of_memory() -> Iterator[str]:
    """Yield the tables of memory."""
    yield from table("model states", "GB", memory.states_of_zero(), "slots besides, GB")
    yield ""
    yield from table("states alone fill 32 GB", "10^9", memory.largest_in_theory())
    yield ""
    limits = memory.largest_measured()
    yield from table("largest that ran", "10^9", limits, "may fit", "shape")
    yield ""
    yield from head("step that ran", "needed GB of 34", "hpczero's verdict")
    for step, fit in memory.needs_of_zero():
        yield row(step.name, f"{fit.first.size / _GIGA:.1f}", fit.verdict)
    yield ""
    yield from table("a GPU's memory", "GiB", memory.memory_of_korthikanti(), "hpczero's own")
    yield ""
    yield from table("kept of a layer", "s b h", memory.activations_of_a_block(), "hpczero's own")


def _by_row(rows: Iterable[Measured]) -> Iterator[str]:
    yield "| step | published s | predicted s | error | largest causes |"
    yield "|---|---|---|---|---|"
    errors = []
    for each in rows:
        step = each.predicted()
        error = step.seconds / each.seconds - 1
        errors.append(abs(error))
        causes = ", ".join(f"{cause} {share:.0%}" for cause, share, _ in step.largest())
        yield (
            f"| {each.name} | {each.seconds:.2f} | {step.seconds:.2f} | {error:+.1%} | {causes} |"
        )
    yield f"| mean of {len(errors)} | | | {mean(errors):.1%} | |"


def _by_group(rows: Iterable[Measured]) -> Iterator[str]:
    yield "| model | rows | error, mean | of its size, median | worst |"
    yield "|---|---|---|---|---|"
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for each in rows:
        error = each.predicted().seconds / each.seconds - 1
        groups[each.group].append(error)
        groups["all"].append(error)
    whole = groups.pop("all")
    for name, errors in [*groups.items(), ("all", whole)]:
        off = [abs(error) for error in errors]
        yield (
            f"| {name} | {len(off)} | {mean(errors):+.1%} | {median(off):.1%} | {max(off):.1%} |"
        )
