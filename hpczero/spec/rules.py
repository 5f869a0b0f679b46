"""Values that are each allowed, but not together: pure rules over a whole spec."""

from collections.abc import Callable, Iterator

from hpczero.errors import InputError
from hpczero.model.families import known, layer_count, layers
from hpczero.spec.keys import Contradiction
from hpczero.spec.rules_of_data import RULES as OF_DATA
from hpczero.spec.rules_of_families import RULES as OF_FAMILIES
from hpczero.spec.rules_of_families import unused_by_llama
from hpczero.spec.rules_of_optimizers import RULES as OF_OPTIMIZERS
from hpczero.spec.rules_of_optimizers import without_effect_of_optimizers, without_parameters
from hpczero.spec.rules_of_replicas import RULES as OF_REPLICAS
from hpczero.spec.rules_of_replicas import without_effect_of_replicas
from hpczero.spec.rules_of_sequences import RULES as OF_SEQUENCES
from hpczero.spec.rules_of_sequences import without_effect_of_sequences
from hpczero.spec.schema import Parallel, Spec
from hpczero.text import join_words, toml_repr

# Every axis but "data" is a key of [parallel]; "data" takes the ranks that the others leave.
AXES = ("tensor", "data", "pipeline")
_SHOWN = 4  # choices written out before a list is cut short


def contradictions(spec: Spec) -> list[Contradiction]:
    return [contradiction for rule in _RULES for contradiction in rule(spec)]


def unavailable(spec: Spec) -> list[str]:
    """Return the settings that the spec may have, but that cannot be run: not yet, or not with
    this model.
    """
    if known(spec.model):
        return _without_parameters(spec)
    if spec.parallel.tensor == 1:
        return []
    return [
        f"parallel.tensor = {spec.parallel.tensor} with model.family = "
        f'"{spec.model.family}": nothing says how the layers of a model of one\'s own are shared '
        "out; set it to 1 (parallel.pipeline and zero.stage cut it up too)"
    ]


def _without_parameters(spec: Spec) -> list[str]:
    if spec.optimizer.not_muon == type(spec.optimizer)().not_muon:
        return []
    names = [parameter.name for layer in layers(spec.model) for parameter in layer.parameters]
    return without_parameters(spec.optimizer, names)


def without_effect(spec: Spec) -> list[str]:
    """Return the settings that are allowed, and change nothing next to the others."""
    train = spec.train
    parallel = spec.parallel
    notes = []
    if train.precision != "fp16" and train.loss_scale != type(train)().loss_scale:
        notes.append(
            f"train.loss_scale = {toml_repr(train.loss_scale)} has no effect with "
            f"train.precision = {toml_repr(train.precision)}"
        )
    if parallel.sequence_parallel and parallel.tensor == 1:
        notes.append(
            "parallel.sequence_parallel = true has no effect with parallel.tensor = 1: "
            "there is nobody to share the sequence with"
        )
    if spec.zero.offload == "cpu" and train.device == "cpu":
        notes.append(
            'zero.offload = "cpu" has no effect with train.device = "cpu": the states are in the '
            'computer\'s memory; "nvme:FOLDER" puts them in files'
        )
    memory = spec.memory
    if memory.recompute_every > 1 and memory.recompute == "none":
        notes.append(
            f"memory.recompute_every = {memory.recompute_every} has no effect with "
            'memory.recompute = "none"'
        )
    recomputes = memory.recompute in ("block", "auto")
    replicated = parallel.tensor > 1 and not parallel.sequence_parallel
    if memory.partition_activations and not (recomputes and replicated):
        notes.append(
            "memory.partition_activations = true has no effect without parallel.tensor > 1, "
            'parallel.sequence_parallel = false and memory.recompute = "block": tensor ranks keep '
            "nothing else alike"
        )
    if memory.offload_activations == "cpu" and train.device == "cpu":
        notes.append(
            'memory.offload_activations = "cpu" has no effect with train.device = "cpu": '
            "activations are in the computer's memory"
        )
    if parallel.schedule != type(parallel)().schedule and parallel.pipeline == 1:
        notes.append(
            f"parallel.schedule = {toml_repr(parallel.schedule)} has no effect with "
            "parallel.pipeline = 1: there is one stage"
        )
    notes += without_effect_of_optimizers(spec) + without_effect_of_replicas(spec)
    notes += without_effect_of_sequences(spec)
    return notes + (unused_by_llama(spec.model) if spec.model.family == "llama" else [])


def axes_in_order(parallel: Parallel) -> tuple[str, ...] | None:
    """Return the axes from innermost to outermost; None for "auto".

    Axes that `order` leaves out come last; only axes of size 1 may be left out.
    """
    if parallel.order == "auto":
        return None
    named = [name.strip() for name in parallel.order.split(",")]
    needed = {"data"} | {axis for axis in AXES if axis != "data" and getattr(parallel, axis) > 1}
    if len(set(named)) < len(named) or not needed <= set(named) <= set(AXES):
        raise InputError(
            f"parallel.order = {toml_repr(parallel.order)}: must name each axis once, from the "
            "innermost to the outermost, separated by commas; "
            f'the axes are {", ".join(AXES)}; or "auto"'
        )
    return tuple(named) + tuple(axis for axis in AXES if axis not in named)


def _schedule(spec: Spec) -> Iterator[Contradiction]:
    schedule = spec.schedule
    steps = spec.train.steps
    lr = spec.optimizer.lr
    warmup = schedule.warmup_steps
    decay = schedule.decay_steps
    name = schedule.name
    if warmup > steps:
        yield Contradiction(
            ("schedule.warmup_steps", "train.steps"),
            f"schedule.warmup_steps = {warmup} is more than train.steps = {steps}: "
            f"at most {steps}, or more steps",
        )
    elif name == "wsd" and warmup + decay > steps:
        yield Contradiction(
            ("schedule.decay_steps", "schedule.warmup_steps", "train.steps"),
            f"schedule.warmup_steps = {warmup} and schedule.decay_steps = {decay} make "
            f"{warmup + decay}, more than train.steps = {steps}",
        )
    if decay and name != "wsd":
        yield Contradiction(
            ("schedule.decay_steps", "schedule.name"),
            f'schedule.decay_steps = {decay} is for "wsd" only, '
            f"and schedule.name = {toml_repr(name)}: "
            "set it to 0",
        )
    if schedule.min_lr > lr:
        yield Contradiction(
            ("schedule.min_lr", "optimizer.lr"),
            f"schedule.min_lr = {schedule.min_lr} is more than optimizer.lr = {lr}, "
            "the learning rate at its highest",
        )
    if schedule.min_lr and name == "constant":
        yield Contradiction(
            ("schedule.min_lr", "schedule.name"),
            f'schedule.min_lr = {schedule.min_lr}, but schedule.name = "constant" never gets '
            "there: set it to 0, or take another",
        )


def _evaluation(spec: Spec) -> Iterator[Contradiction]:
    train = spec.train
    if train.eval_every and not train.eval_batches:
        yield Contradiction(
            ("train.eval_batches", "train.eval_every"),
            f"train.eval_batches = 0 means no evaluation, train.eval_every = {train.eval_every} "
            "asks for some: set eval_every to 0",
        )


def _model(spec: Spec) -> Iterator[Contradiction]:
    model = spec.model
    if model.heads > model.hidden and not model.head_dim:
        yield Contradiction(
            ("model.heads", "model.hidden"),
            f"model.heads = {model.heads} is more than model.hidden = {model.hidden}: "
            "fewer heads, or say their width with model.head_dim",
        )
    if spec.seq_len > model.seq_len:
        yield Contradiction(
            ("data.seq_len", "model.seq_len"),
            f"data.seq_len = {spec.seq_len} is more than model.seq_len = {model.seq_len}, the most "
            "that the model takes: shorter sequences, or a model of longer ones",
        )


def _order(spec: Spec) -> Iterator[Contradiction]:
    try:
        axes_in_order(spec.parallel)
    except InputError as error:
        yield Contradiction(("parallel.order",), str(error))


def _tensor(spec: Spec) -> Iterator[Contradiction]:
    """Every tensor rank has at least one head, and with sequence_parallel one position."""
    ranks = spec.parallel.tensor
    model = spec.model
    if ranks > model.heads and known(model):
        yield Contradiction(
            ("parallel.tensor", "model.heads"),
            f"parallel.tensor = {ranks} is more than model.heads = {model.heads}, and every tensor "
            f"rank needs a head: {_smaller('parallel.tensor', ranks, model.heads)}, "
            f"or at least model.heads = {ranks}",
        )
    length, positions = spec.shortest
    if ranks > positions and spec.parallel.sequence_parallel:
        yield Contradiction(
            ("parallel.tensor", length, "parallel.sequence_parallel"),
            f"parallel.tensor = {ranks} ranks cannot share the {positions} positions of {length} "
            "(parallel.sequence_parallel = true): "
            f"{_smaller('parallel.tensor', ranks, positions)}, "
            "or parallel.sequence_parallel = false",
        )


def _chunks(spec: Spec) -> Iterator[Contradiction]:
    """Only the interleaved schedule has several parts of the model on a stage."""
    chunks = spec.parallel.chunks
    schedule = spec.parallel.schedule
    if chunks > 1 and schedule != "interleaved":
        yield Contradiction(
            ("parallel.chunks", "parallel.schedule"),
            f'parallel.chunks = {chunks} is for "interleaved" only, and '
            f"parallel.schedule = {toml_repr(schedule)}: set it to 1, or take that schedule",
        )
    if chunks == 1 and schedule == "interleaved" and spec.parallel.pipeline > 1:
        yield Contradiction(
            ("parallel.schedule", "parallel.chunks"),
            'parallel.schedule = "interleaved" is for several parallel.chunks on a stage, and '
            'there is 1: set it to 2 or more, or take "1f1b"',
        )


def _pipeline(spec: Spec) -> Iterator[Contradiction]:
    """Every part of a stage has at least one layer."""
    model = spec.model
    stages = spec.parallel.pipeline
    chunks = spec.parallel.chunks
    parts = stages * chunks
    layers = layer_count(model) if known(model) else parts
    if parts <= layers:
        return
    said = f"parallel.pipeline = {stages} is"
    fixes = []
    if chunks <= layers:
        fixes.append(_smaller("parallel.pipeline", stages, layers // chunks))
    if chunks > 1:
        said = f"parallel.pipeline = {stages} x parallel.chunks = {chunks} makes {parts} parts,"
        if layers >= 2 * stages:
            fixes.append(f"parallel.chunks = {layers // stages} or less")
    fixes.append(f"at least model.layers = {model.layers + parts - layers}")
    yield Contradiction(
        ("parallel.pipeline", "parallel.chunks", "model.layers"),
        f"{said} more than the {layers} layers of the model (model.layers = {model.layers}, "
        f"and those before and after them): {', or '.join(fixes)}",
    )


def _smaller(key: str, asked: int, most: int) -> str:
    """Return sizes up to `most` that divide the size asked for, so that the ranks still fit."""
    fitting = [str(size) for size in range(most, 0, -1) if asked % size == 0][:_SHOWN]
    return f"{key} = {join_words(fitting, 'or')} (for the same ranks), at most {most}"


def _checkpoint(spec: Spec) -> Iterator[Contradiction]:
    resume = spec.checkpoint.resume
    if spec.checkpoint.weights_only and resume in ("auto", "never"):
        yield Contradiction(
            ("checkpoint.weights_only", "checkpoint.resume"),
            f"checkpoint.weights_only = true, and checkpoint.resume = {toml_repr(resume)} names no "
            "checkpoint: name its folder there",
        )


def _device(spec: Spec) -> Iterator[Contradiction]:
    device = spec.train.device
    backend = spec.comm.backend
    for name, needed in (("nccl", "cuda"), ("gloo", "cpu")):
        if backend == name and device not in ("auto", needed):
            yield Contradiction(
                ("comm.backend", "train.device"),
                f'comm.backend = "{name}" carries tensors on {needed}, and '
                f'train.device = "{device}": take another of the two',
            )
    if device == "cuda" and spec.zero.node_shared is True:
        yield Contradiction(
            ("zero.node_shared", "train.device"),
            "zero.node_shared = true keeps weights in the memory of the node's CPUs, and "
            'train.device = "cuda": set it to "auto" or false',
        )


_OF_BLOCKS = ("recompute", "partition_activations", "offload_activations", "loss_chunk")


def memory_of_blocks(spec: Spec) -> list[str]:
    """Return the keys of [memory] that are set, and need to know a model's blocks and head."""
    default = type(spec.memory)()
    return [key for key in _OF_BLOCKS if getattr(spec.memory, key) != getattr(default, key)]


def _memory(spec: Spec) -> Iterator[Contradiction]:
    for key in [] if known(spec.model) else memory_of_blocks(spec):
        default = getattr(type(spec.memory)(), key)
        yield Contradiction(
            (f"memory.{key}", "model.family"),
            f"memory.{key} = {toml_repr(getattr(spec.memory, key))} is for hpczero's own families, "
            f"and model.family = {toml_repr(spec.model.family)}: set it to {toml_repr(default)}; "
            "the module's parts may be called by torch.utils.checkpoint (use_reentrant=False)",
        )


_RULES: tuple[Callable[[Spec], Iterator[Contradiction]], ...] = (
    *(
        _schedule,
        _evaluation,
        _model,
        _order,
        _tensor,
        _chunks,
        _pipeline,
        _checkpoint,
        _device,
        _memory,
        *OF_DATA,
        *OF_FAMILIES,
        *OF_OPTIMIZERS,
        *OF_SEQUENCES,
        *OF_REPLICAS,
    ),
)
