"""Values that are each allowed, but not together: pure rules over a whole spec."""

from dataclasses import dataclass

from hpczero.spec.schema import Spec
from hpczero.spec.show import shown

AXES = ("tensor", "data", "pipeline")


@dataclass(frozen=True)
class Contradiction:
    keys: tuple[str, ...]  # the first is the one that most likely wants changing
    text: str


def contradictions(spec: Spec) -> list[Contradiction]:
    return [found for rule in (_schedule, _evaluation, _model, _parallel) for found in rule(spec)]


def unavailable(spec: Spec) -> list[str]:
    """What the spec may say, but this version cannot run yet."""
    asked = [
        f"parallel.{axis} = {size}" for axis, size in (("tensor", spec.parallel.tensor), ("pipeline", spec.parallel.pipeline)) if size > 1
    ]
    return [f"{setting}: this version trains with data parallelism only; set it to 1 to run" for setting in asked]


def without_effect(spec: Spec) -> list[str]:
    """Settings that are allowed, and change nothing next to the others."""
    if spec.train.precision != "fp16" and spec.train.loss_scale != type(spec.train)().loss_scale:
        return [f"train.loss_scale = {shown(spec.train.loss_scale)} has no effect with train.precision = {shown(spec.train.precision)}"]
    return []


def _schedule(spec: Spec) -> list[Contradiction]:
    schedule, steps, lr, found = spec.schedule, spec.train.steps, spec.optimizer.lr, []
    if schedule.warmup_steps > steps:
        text = f"schedule.warmup_steps = {schedule.warmup_steps} is more than train.steps = {steps}: at most {steps}, or more steps"
        found.append(Contradiction(("schedule.warmup_steps", "train.steps"), text))
    elif schedule.name == "wsd" and schedule.warmup_steps + schedule.decay_steps > steps:
        sizes = f"schedule.warmup_steps = {schedule.warmup_steps} and schedule.decay_steps = {schedule.decay_steps}"
        text = f"{sizes} make {schedule.warmup_steps + schedule.decay_steps}, more than train.steps = {steps}"
        found.append(Contradiction(("schedule.decay_steps", "schedule.warmup_steps", "train.steps"), text))
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
        text = (
            f"model.heads = {model.heads} is more than model.hidden = {model.hidden}: fewer heads, or say their width with model.head_dim"
        )
        return [Contradiction(("model.heads", "model.hidden"), text)]
    return []


def _parallel(spec: Spec) -> list[Contradiction]:
    parallel = spec.parallel
    named = [axis.strip() for axis in parallel.order.split(",")]
    needed = {"data"} | {axis for axis in ("tensor", "pipeline") if getattr(parallel, axis) > 1}
    if len(set(named)) == len(named) and needed <= set(named) <= set(AXES):
        return []
    text = f'parallel.order = {shown(parallel.order)}: must name each axis once, as in "{",".join(AXES)}"'
    return [Contradiction(("parallel.order",), text)]
