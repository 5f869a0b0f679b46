"""Values that are each allowed, but not together: pure rules over a whole spec."""

from collections.abc import Callable, Iterator

from hpczero.errors import InputError
from hpczero.model.families import known, layer_count
from hpczero.model.shapes import head_dim, keys_without_effect
from hpczero.spec.keys import Contradiction
from hpczero.spec.model import OF_LLAMA, Model
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
    """Return the settings that the spec may have, but that this version cannot run yet."""
    if spec.parallel.tensor == 1 or known(spec.model):
        return []
    return [
        f"parallel.tensor = {spec.parallel.tensor} with model.family = "
        f'"{spec.model.family}": nothing says how the layers of a model of one\'s own are shared '
        "out; set it to 1 (parallel.pipeline and zero.stage cut it up too)"
    ]


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
    notes += without_effect_of_replicas(spec) + without_effect_of_sequences(spec)
    return notes + (_unused_by_llama(spec.model) if spec.model.family == "llama" else [])


def _unused_by_llama(model: Model) -> list[str]:
    default = type(model)()
    return [
        f"model.{key} = {toml_repr(getattr(model, key))} has no effect with "
        f"model.rope_scaling = {toml_repr(model.rope_scaling)} and model.window = {model.window}"
        for key in sorted(keys_without_effect(model))
        if getattr(model, key) != getattr(default, key)
    ]


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
    data = spec.data
    if train.eval_every and not train.eval_batches:
        yield Contradiction(
            ("train.eval_batches", "train.eval_every"),
            f"train.eval_batches = 0 means no evaluation, train.eval_every = {train.eval_every} "
            "asks for some: set eval_every to 0",
        )
    if train.eval_batches and data.source == "stdlib" and data.validation_fraction == 0:
        yield Contradiction(
            ("data.validation_fraction", "train.eval_batches"),
            "data.validation_fraction = 0 leaves no text for "
            f"train.eval_batches = {train.eval_batches}: set that to 0",
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


def _llama(spec: Spec) -> Iterator[Contradiction]:
    """Keys of llama mean nothing to gpt; a factory may read them."""
    model = spec.model
    if model.family == "gpt":
        default = type(model)()
        for name in OF_LLAMA:
            if getattr(model, name) != getattr(default, name):
                yield Contradiction(
                    (f"model.{name}", "model.family"),
                    f"model.{name} = {toml_repr(getattr(model, name))} is for "
                    'model.family = "llama", and it is "gpt": leave it out, or take the other',
                )
    if model.family != "llama":
        return
    if model.kv_heads and model.heads % model.kv_heads:
        yield Contradiction(
            ("model.kv_heads", "model.heads"),
            f"model.kv_heads = {model.kv_heads} does not divide model.heads = {model.heads}: each "
            "head of keys serves as many queries: take a divisor, or 0 for as many as heads",
        )
    width = int(head_dim(model) * model.rope_fraction)
    if width < 2:
        yield Contradiction(
            ("model.rope_fraction", "model.head_dim", "model.hidden", "model.heads"),
            f"{width} of the {head_dim(model)} elements of a head would be rotated by its position "
            f"(model.rope_fraction = {model.rope_fraction}), and there is no pair of them: wider "
            "heads, or a larger share",
        )
    if model.window_pattern and not model.window:
        yield Contradiction(
            ("model.window", "model.window_pattern"),
            f"model.window_pattern = {model.window_pattern} says which layers have no window, and "
            "model.window = 0 gives none to any: set it, or leave the pattern out",
        )
    if model.window and model.window_pattern == 1:
        yield Contradiction(
            ("model.window_pattern", "model.window"),
            f"model.window_pattern = 1 leaves no layer the window of {model.window} keys: set both "
            "to 0, or a pattern of 2 or more",
        )
    yield from _stretched(model)


def _stretched(model: Model) -> Iterator[Contradiction]:
    stretched = model.rope_scaling in ("llama3", "yarn")
    if stretched and not model.rope_original:
        yield Contradiction(
            ("model.rope_original", "model.rope_scaling"),
            f'model.rope_scaling = "{model.rope_scaling}" needs model.rope_original: the tokens '
            "in a sequence of the model before it was stretched",
        )
    if model.rope_scaling == "llama3" and model.rope_high <= model.rope_low:
        yield Contradiction(
            ("model.rope_high", "model.rope_low"),
            f"model.rope_high = {model.rope_high} is not more than model.rope_low = "
            f"{model.rope_low}: frequencies in between are stretched in part",
        )
    if model.rope_scaling == "yarn" and model.rope_fast <= model.rope_slow:
        yield Contradiction(
            ("model.rope_fast", "model.rope_slow"),
            f"model.rope_fast = {model.rope_fast} is not more than model.rope_slow = "
            f"{model.rope_slow}: frequencies in between are stretched in part",
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
    if ranks > spec.seq_len and spec.parallel.sequence_parallel:
        length = "data.seq_len" if spec.data.seq_len else "model.seq_len"
        yield Contradiction(
            ("parallel.tensor", length, "parallel.sequence_parallel"),
            f"parallel.tensor = {ranks} ranks cannot share {length} = {spec.seq_len} "
            "positions (parallel.sequence_parallel = true): "
            f"{_smaller('parallel.tensor', ranks, spec.seq_len)}, "
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
        _llama,
        _order,
        _tensor,
        _chunks,
        _pipeline,
        _checkpoint,
        _device,
        _memory,
        *OF_SEQUENCES,
        *OF_REPLICAS,
    ),
)
