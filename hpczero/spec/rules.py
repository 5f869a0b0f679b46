"""Values that are each allowed, but not together: pure rules over a whole spec."""

from dataclasses import dataclass

from hpczero.errors import InputError
from hpczero.model.shapes import known, layer_count
from hpczero.spec.schema import Parallel, Spec
from hpczero.text import listed, shown

AXES = (
    "tensor",
    "data",
    "pipeline",
)  # "data" is what remains; every other axis is a key of [parallel]
_SHOWN = 4  # choices written out before a list is cut short


@dataclass(frozen=True)
class Contradiction:
    keys: tuple[str, ...]  # the first is the one that most likely wants changing
    text: str


def contradictions(spec: Spec) -> list[Contradiction]:
    return [
        found
        for rule in (
            _schedule,
            _evaluation,
            _model,
            _order,
            _tensor,
            _pipeline,
            _checkpoint,
            _device,
        )
        for found in rule(spec)
    ]


def unavailable(spec: Spec) -> list[str]:
    """What the spec may say, but this version cannot run yet."""
    missing = []
    if spec.parallel.tensor > 1 and not known(spec.model):
        plan = "nothing says how the layers of a model of one's own are shared out; set it to 1 (parallel.pipeline and zero.stage cut it up too)"
        missing.append(
            f'parallel.tensor = {spec.parallel.tensor} with model.family = "{spec.model.family}": {plan}'
        )
    return missing


def without_effect(spec: Spec) -> list[str]:
    """Settings that are allowed, and change nothing next to the others."""
    train, parallel, found = spec.train, spec.parallel, []
    if train.precision != "fp16" and train.loss_scale != type(train)().loss_scale:
        found.append(
            f"train.loss_scale = {shown(train.loss_scale)} has no effect with train.precision = {shown(train.precision)}"
        )
    if parallel.sequence_parallel and parallel.tensor == 1:
        found.append(
            "parallel.sequence_parallel = true has no effect with parallel.tensor = 1: there is nobody to share the sequence with"
        )
    if parallel.schedule != type(parallel)().schedule and parallel.pipeline == 1:
        found.append(
            f"parallel.schedule = {shown(parallel.schedule)} has no effect with parallel.pipeline = 1: there is one stage"
        )
    return found


def axes_in_order(parallel: Parallel) -> tuple[str, ...] | None:
    """The axes from innermost to outermost; those that `order` leaves out come last, which is allowed only where they have size 1. None: "auto"."""
    if parallel.order == "auto":
        return None
    named = [name.strip() for name in parallel.order.split(",")]
    needed = {"data"} | {axis for axis in AXES if axis != "data" and getattr(parallel, axis) > 1}
    if len(set(named)) < len(named) or not needed <= set(named) <= set(AXES):
        raise InputError(
            f"parallel.order = {shown(parallel.order)}: must name each axis once, from the innermost to the outermost, separated by commas; "
            f'the axes are {", ".join(AXES)}; or "auto"'
        )
    return tuple(named) + tuple(axis for axis in AXES if axis not in named)


def _schedule(spec: Spec) -> list[Contradiction]:
    schedule, steps, lr, found = spec.schedule, spec.train.steps, spec.optimizer.lr, []
    if schedule.warmup_steps > steps:
        text = f"schedule.warmup_steps = {schedule.warmup_steps} is more than train.steps = {steps}: at most {steps}, or more steps"
        found.append(Contradiction(("schedule.warmup_steps", "train.steps"), text))
    elif schedule.name == "wsd" and schedule.warmup_steps + schedule.decay_steps > steps:
        sizes = f"schedule.warmup_steps = {schedule.warmup_steps} and schedule.decay_steps = {schedule.decay_steps}"
        text = f"{sizes} make {schedule.warmup_steps + schedule.decay_steps}, more than train.steps = {steps}"
        found.append(
            Contradiction(("schedule.decay_steps", "schedule.warmup_steps", "train.steps"), text)
        )
    if schedule.decay_steps and schedule.name != "wsd":
        text = f'schedule.decay_steps = {schedule.decay_steps} is for "wsd" only, and schedule.name = {shown(schedule.name)}: set it to 0'
        found.append(Contradiction(("schedule.decay_steps", "schedule.name"), text))
    if schedule.min_lr > lr:
        text = f"schedule.min_lr = {schedule.min_lr} is more than optimizer.lr = {lr}, the learning rate at its highest"
        found.append(Contradiction(("schedule.min_lr", "optimizer.lr"), text))
    if schedule.min_lr and schedule.name == "constant":
        text = f'schedule.min_lr = {schedule.min_lr}, but schedule.name = "constant" never gets there: set it to 0, or take another'
        found.append(Contradiction(("schedule.min_lr", "schedule.name"), text))
    return found


def _device(spec: Spec) -> list[Contradiction]:
    device, backend, found = spec.train.device, spec.comm.backend, []
    for name, needed in (("nccl", "cuda"), ("gloo", "cpu")):
        if backend == name and device not in ("auto", needed):
            text = f'comm.backend = "{name}" carries tensors on {needed}, and train.device = "{device}": take another of the two'
            found.append(Contradiction(("comm.backend", "train.device"), text))
    if device == "cuda" and spec.zero.node_shared is True:
        text = 'zero.node_shared = true keeps weights in the memory of the node\'s CPUs, and train.device = "cuda": set it to "auto" or false'
        found.append(Contradiction(("zero.node_shared", "train.device"), text))
    return found


def _evaluation(spec: Spec) -> list[Contradiction]:
    train, data, found = spec.train, spec.data, []
    if train.eval_every and not train.eval_batches:
        text = f"train.eval_batches = 0 means no evaluation, train.eval_every = {train.eval_every} asks for some: set eval_every to 0"
        found.append(Contradiction(("train.eval_batches", "train.eval_every"), text))
    if train.eval_batches and data.source == "stdlib" and data.validation_fraction == 0:
        text = f"data.validation_fraction = 0 leaves no text for train.eval_batches = {train.eval_batches}: set that to 0"
        found.append(Contradiction(("data.validation_fraction", "train.eval_batches"), text))
    return found


def _model(spec: Spec) -> list[Contradiction]:
    model = spec.model
    if model.heads > model.hidden and not model.head_dim:
        text = f"model.heads = {model.heads} is more than model.hidden = {model.hidden}: fewer heads, or say their width with model.head_dim"
        return [Contradiction(("model.heads", "model.hidden"), text)]
    return []


def _order(spec: Spec) -> list[Contradiction]:
    try:
        axes_in_order(spec.parallel)
    except InputError as error:
        return [Contradiction(("parallel.order",), str(error))]
    return []


def _tensor(spec: Spec) -> list[Contradiction]:
    """Every tensor rank has a head at least, and with sequence_parallel a position."""
    ranks, model, found = spec.parallel.tensor, spec.model, []
    if ranks > model.heads and known(model):
        fixes = (
            f"{_smaller('parallel.tensor', ranks, model.heads)}, or at least model.heads = {ranks}"
        )
        text = f"parallel.tensor = {ranks} is more than model.heads = {model.heads}, and every tensor rank needs a head: {fixes}"
        found.append(Contradiction(("parallel.tensor", "model.heads"), text))
    if ranks > model.seq_len and spec.parallel.sequence_parallel:
        fixes = f"{_smaller('parallel.tensor', ranks, model.seq_len)}, or parallel.sequence_parallel = false"
        text = f"parallel.tensor = {ranks} ranks cannot share model.seq_len = {model.seq_len} positions (parallel.sequence_parallel = true): {fixes}"
        found.append(
            Contradiction(("parallel.tensor", "model.seq_len", "parallel.sequence_parallel"), text)
        )
    return found


def _pipeline(spec: Spec) -> list[Contradiction]:
    """Every part of a stage has a layer at least; several parts are for the interleaved schedule, and it is for several parts."""
    parallel, model, found = spec.parallel, spec.model, []
    stages, chunks, schedule = parallel.pipeline, parallel.chunks, parallel.schedule
    if chunks > 1 and schedule != "interleaved":
        text = f'parallel.chunks = {chunks} is for "interleaved" only, and parallel.schedule = {shown(schedule)}: set it to 1, or take that schedule'
        found.append(Contradiction(("parallel.chunks", "parallel.schedule"), text))
    if chunks == 1 and schedule == "interleaved" and stages > 1:
        text = 'parallel.schedule = "interleaved" is for several parallel.chunks on a stage, and there is 1: set it to 2 or more, or take "1f1b"'
        found.append(Contradiction(("parallel.schedule", "parallel.chunks"), text))
    layers = layer_count(model) if known(model) else stages * chunks
    if stages * chunks > layers:
        parts = f"parallel.pipeline = {stages}" + (
            f" x parallel.chunks = {chunks} makes {stages * chunks} parts," if chunks > 1 else " is"
        )
        have = f"{layers} layers of the model (model.layers = {model.layers}, and those before and after them)"
        fixes = (
            [_smaller("parallel.pipeline", stages, layers // chunks)] if chunks <= layers else []
        )
        fixes += (
            [f"parallel.chunks = {layers // stages} or less"]
            if chunks > 1 and layers >= 2 * stages
            else []
        )
        fixes.append(f"at least model.layers = {model.layers + stages * chunks - layers}")
        text = f"{parts} more than the {have}: {', or '.join(fixes)}"
        found.append(Contradiction(("parallel.pipeline", "parallel.chunks", "model.layers"), text))
    return found


def _smaller(key: str, asked: int, most: int) -> str:
    """What fits the numbers of ranks that the size asked for does, and what is possible at all."""
    fitting = [str(size) for size in range(most, 0, -1) if asked % size == 0][:_SHOWN]
    return f"{key} = {listed(fitting, 'or')} (for the same ranks), at most {most}"


def _checkpoint(spec: Spec) -> list[Contradiction]:
    if not spec.checkpoint.weights_only or spec.checkpoint.resume not in ("auto", "never"):
        return []
    text = f"checkpoint.weights_only = true, and checkpoint.resume = {shown(spec.checkpoint.resume)} names no checkpoint: name its folder there"
    return [Contradiction(("checkpoint.weights_only", "checkpoint.resume"), text)]
