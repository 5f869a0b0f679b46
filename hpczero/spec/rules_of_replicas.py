"""Rules of replicas: who has copies of the states, and what is sent between these, and how.

A replica is a copy of the states; the data ranks that share one are a worker. Local steps and
one_bit_adam are the two ways in which workers send less than the sum of all gradients.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpczero.spec.keys import Contradiction
from hpczero.spec.optimizer import Outer
from hpczero.spec.schema import Spec
from hpczero.spec.table import LARGEST
from hpczero.text import join_words, toml_repr


@dataclass(frozen=True)
class _Way:
    """A way to send less than the sum of all gradients in every step."""

    key: str
    setting: str
    without: str  # the setting that ends it
    compresses: str  # by which key or rule


def _ways(spec: Spec) -> list[_Way]:
    ways = []
    every = spec.optimizer.outer.every
    if spec.optimizer.name == "one_bit_adam":
        setting = 'optimizer.name = "one_bit_adam"'
        ways.append(_Way("optimizer.name", setting, 'optimizer.name = "adamw"', "sign bits"))
    if every:
        setting = f"optimizer.outer.every = {every}"
        end = "optimizer.outer.every = 0"
        ways.append(_Way("optimizer.outer.every", setting, end, "optimizer.outer.precision"))
    return ways


def _one_way(spec: Spec) -> Iterator[Contradiction]:
    ways = _ways(spec)
    if len(ways) > 1:
        yield Contradiction(
            tuple(way.key for way in reversed(ways)),
            f"{_settings(ways)} are two ways to send less between replicas: choose one, by "
            f"{_without(ways)}",
        )


def _not_with_a_way(spec: Spec) -> Iterator[Contradiction]:
    """What neither way can do."""
    ways = _ways(spec)
    if not ways:
        return
    keys = tuple(way.key for way in ways)
    if spec.zero.shard_ranks == "all":
        yield Contradiction(
            ("zero.shard_ranks", *keys),
            'zero.shard_ranks = "all" makes all data ranks one worker with one replica, and '
            f"{_settings(ways)} is for several: zero.shard_ranks = "
            '"node" (the data ranks of a node are a worker) or a number (so many are one)',
        )
    if spec.zero.stage == 0 and spec.zero.shard_ranks != 1:
        yield Contradiction(
            ("zero.stage", *keys),
            f"zero.stage = 0 keeps whole states on each rank, and with {_settings(ways)} each rank "
            "sends the part of the states that it owns: zero.stage = 1 gives the same numbers",
        )
    if spec.zero.offload != "none":
        yield Contradiction(
            ("zero.offload", *keys),
            f"zero.offload = {toml_repr(spec.zero.offload)} is not supported with "
            f"{_settings(ways)}: the states of replicas stay in memory: "
            f'zero.offload = "none", or {_without(ways)}',
        )
    if spec.comm.compress == "int8":
        by = join_words([way.compresses for way in ways])
        yield Contradiction(
            ("comm.compress", *keys),
            'comm.compress = "int8" is for gradients of every step; what is sent with '
            f"{_settings(ways)} is compressed already ({by}): "
            f'comm.compress = "none", or {_without(ways)}',
        )


def _settings(ways: list[_Way]) -> str:
    return join_words([way.setting for way in ways])


def _without(ways: list[_Way]) -> str:
    return join_words([way.without for way in ways], "or")


def _freeze(spec: Spec) -> Iterator[Contradiction]:
    freeze = spec.optimizer.freeze
    steps = spec.train.steps
    if spec.optimizer.name == "one_bit_adam" and freeze >= steps:
        yield Contradiction(
            ("optimizer.freeze", "train.steps"),
            f"optimizer.freeze = {freeze} of train.steps = {steps} leaves no step that sends "
            f"signs: at most {steps - 1} (0: found by itself), or at least train.steps = "
            f"{freeze + 1}",
        )


def _outer_steps(spec: Spec) -> Iterator[Contradiction]:
    outer = spec.optimizer.outer
    every = outer.every
    if not every:
        return
    if outer.fragments > every:
        yield Contradiction(
            ("optimizer.outer.fragments", "optimizer.outer.every"),
            f"optimizer.outer.fragments = {outer.fragments} is more than optimizer.outer.every = "
            f"{every}, and each fragment has a step of its own: at most {every} fragments, or "
            f"every = {outer.fragments} or more",
        )
    saved = spec.checkpoint.every
    if saved > 0 and saved % every:
        below = saved - saved % every
        fitting = [str(steps) for steps in (below, below + every) if 0 < steps <= LARGEST]
        yield Contradiction(
            ("checkpoint.every", "optimizer.outer.every"),
            f"checkpoint.every = {saved} is no multiple of optimizer.outer.every = {every}, and "
            "checkpoints are taken at outer steps: "
            f"checkpoint.every = {join_words([*fitting, '0 (when the run ends)'], 'or')}",
        )


RULES: tuple[Callable[[Spec], Iterator[Contradiction]], ...] = (
    _one_way,
    _not_with_a_way,
    _freeze,
    _outer_steps,
)


def without_effect_of_replicas(spec: Spec) -> list[str]:
    """Return the settings of replicas that change nothing next to the others."""
    optimizer = spec.optimizer
    zero = spec.zero
    notes = []
    if optimizer.freeze and optimizer.name != "one_bit_adam":
        notes.append(
            f"optimizer.freeze = {optimizer.freeze} has no effect with "
            f"optimizer.name = {toml_repr(optimizer.name)}: only one_bit_adam freezes a moment"
        )
    if not optimizer.outer.every:
        notes += [
            f"optimizer.outer.{key} = {toml_repr(value)} has no effect with "
            "optimizer.outer.every = 0: there are no outer steps"
            for key, value in optimizer.outer
            if value != getattr(Outer(), key)
        ]
    if spec.comm.compress == "int8" and zero.shard_ranks == "all" and not spec.compresses_gathers:
        causes = {
            f"zero.stage = {zero.stage}": zero.stage == 0,
            f"zero.offload = {toml_repr(zero.offload)}": zero.offload != "none",
            'train.precision = "fp32"': spec.train.precision == "fp32",
        }
        with_ = [cause for cause, is_one in causes.items() if is_one]
        notes.append(
            'comm.compress = "int8" has no effect with zero.shard_ranks = "all", where there are '
            f"no replicas, and {join_words(with_)}: weights are not gathered in 8 bits"
        )
    if zero.shard_ranks == 1 and zero.stage:
        notes.append(
            f"zero.stage = {zero.stage} has no effect with zero.shard_ranks = 1: "
            "each rank has all states"
        )
    return notes
