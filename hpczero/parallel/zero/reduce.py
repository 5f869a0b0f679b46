"""The reduce pass: gradients are summed over the data ranks while backward goes on.

`gradient_ready(parameter)`, the only entry from backward, adds a parameter's gradient to its unit.
A unit whose gradients are all there is summed over the data ranks: in every backward where
gradients are sharded, else in the last one of a step. Units start in one order on every rank,
whatever gradients came or did not come there. In the first step that is the reverse order of the
model, from then on the order in which they were complete on the first rank.

Where states have replicas, the sums so far are those of this replica's ranks. Once in a step, when
a unit's last one is done, they are summed over the replicas, each unit as soon as it can be.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpczero.comm.group import Group, Work
from hpczero.errors import HpczeroError
from hpczero.parallel.states import Sharded
from hpczero.parallel.zero.bad_gradients import BadGradients
from hpczero.parallel.zero.data_axis import DataAxis
from hpczero.parallel.zero.parameters import gradient_left, leave_gradient
from hpczero.parallel.zero.replica_sums import ReplicaSums
from hpczero.parallel.zero.unit import Unit
from hpczero.text import first_few
from hpczero_kernels.cpu import Pool
from hpczero_kernels.reduce import BLOCK, sum_pieces

_AT_THE_END = 1 << 30  # gradients that never come


class Reduction:
    """For each backward `begin` and `end`; then `finish`, after which every unit has its sum.

    A backward that raises ends with `fail`; only `discard` removes what it has left behind.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        axis: DataAxis,
        sharded: Sharded,
        gradient_slots: Sequence[Tensor],
        pool: Pool,
        names_backwards: Sequence[str],
        tied: Mapping[Unit, Group],
    ) -> None:
        """`gradient_slots`: buffers that units gather gradients in, in turns; none unless sharded.

        `names_backwards`: all parameters of the model. `tied`: units that other pipeline stages
        have too, whose sums are added up.
        """
        self.bad = BadGradients(units, axis, names_backwards)
        self.replicas = ReplicaSums(axis.replicas, pool, self._have_sum)
        self.tied = tied
        self.axis = axis
        self.sharded = sharded
        self.pool = pool
        self.on_complete: Callable[[Unit], None] = lambda unit: None  # told of complete units
        self.on_summed: Callable[[Unit], None] = lambda unit: None  # told when a sum is done
        self._gradient_slots = gradient_slots
        self._gradient_slot_of: dict[Unit, int] = {}
        self._units = list(reversed(units))  # in the order in which they start
        self._set_order(self._units)
        self._in_flight: dict[Unit, Work] = {}  # sums, oldest first
        self.joins_at_end = False  # sums over replicas start in `finish`, however backwards end
        self._is_last = False  # no further sum of the units comes in this step
        self._last_sums: set[Unit] = set()  # units whose last sum of the step has been started
        self._sums_started = 0  # since the beginning
        self._reduced: set[Unit] = set()  # that have sums of this step already
        self._reducing = False
        self.is_open = False  # between begin and end: gradients may come
        self._failed = False  # a backward of this step has raised
        self._deferred: set[tuple[Unit, int]] = set()  # gradients that wait in `parameter.grad`
        self._completed: list[Unit] | None = []  # in the first step, as they come
        self._index_of: dict[Tensor, tuple[Unit, int]] = {}
        for unit in units:
            for index, parameter in enumerate(unit.parameters):
                self._index_of[parameter] = unit, index

    def _set_order(self, units: list[Unit]) -> None:
        """Begin a pass in which the sums of these units start, in this order."""
        self._order = units
        self._turn_of = {unit: turn for turn, unit in enumerate(units)}
        self._started = 0  # units whose sums have been started in this pass

    def begin(self, last: bool, units: Collection[Unit] | None = None) -> None:
        """Begin a backward; `units`: those that it is about, if not all."""
        chosen = self._units
        if units is not None:
            chosen = [unit for unit in chosen if unit in units]
        done = self._reduced
        if self.sharded.gradients:
            done = self._last_sums if self.replicas.are_summed else set()
        if done.intersection(chosen):
            raise HpczeroError(
                "a backward after the one that was said to be the last of the step: say last=True"
                " only then, or leave it out"
            )
        self.is_open = True
        self._reducing = last or self.sharded.gradients
        self._is_last = last and not self.joins_at_end
        self._set_order(chosen)
        self._deferred.clear()
        for unit in self._order:
            unit.missing = sum(parameter.requires_grad for parameter in unit.parameters)

    def end(self) -> None:
        """End a backward: start the sums that have not been started."""
        if self._reducing:
            self._start_remaining()
        self._reducing = self.is_open = False

    def fail(self) -> None:
        """End a backward that raised. Other ranks may not know, so nothing is exchanged here."""
        self.is_open = False
        self._failed = True

    def refuse_after_failure(self) -> None:
        if self._failed:
            raise HpczeroError(
                "a backward of this step raised an error, and part of its gradient is here:"
                " engine.zero_grad(), called on every rank, drops the gradients of this step; then"
                " training can go on"
            )

    def discard(self) -> None:
        """Drop the gradients of this step, those of a failed backward included. Collective.

        The sums of a failed backward are completed, as other ranks may have started them.
        """
        if self._reducing:
            self._start_remaining()
        while self._in_flight:
            self._collect(wait=True)
        self.replicas.finish([])
        self._last_sums.clear()
        for unit in self._units:
            unit.drop_gradients()
        self._reducing = self._failed = False
        self._reduced.clear()
        self._deferred.clear()
        self.bad.clear()
        if self._completed is not None:
            self._completed = []

    def gradient_ready(self, parameter: Tensor, may_be_last: bool = True) -> None:
        """Take the gradient in `parameter.grad`.

        `may_be_last`: no further gradient of the parameter comes in this backward; else its unit
        waits for the end of the backward.
        """
        unit, index = self._index_of[parameter]
        gradient = gradient_left(parameter)
        if gradient is None:  # the parameter has been frozen since the forward
            return
        if self._reducing and self._turn_of.get(unit, self._started) < self._started:
            raise HpczeroError(
                f"a gradient of {self.name_of(parameter)} came when the sum of its unit had begun:"
                " of a backward inside this one, which checkpoint(..., use_reentrant=True) makes,"
                " for a parameter used outside of the checkpoint too. Give use_reentrant=False"
            )
        if self._has_buffer(unit):
            unit.add_gradient(index, gradient)
            leave_gradient(parameter, None)
        unit.missing = unit.missing - 1 if may_be_last else _AT_THE_END
        if self._completed is not None and unit.missing == 0:
            self._completed.append(unit)
        if not self._reducing:
            return
        if unit.missing == 0:
            # Now, not when there is a slot: the next gathers follow from it, alike on all ranks.
            self.on_complete(unit)
        self._collect()
        # Without waiting for another rank, which may wait for what follows here.
        while self._started < len(self._order):
            following = self._order[self._started]
            if following.missing or not self._has_buffer(following):
                break
            self._start(following)
            self._collect()

    def name_of(self, parameter: Tensor) -> str:
        unit, index = self._index_of[parameter]
        return unit.layout.slots[index].parameter.name

    def write(self, parameter: Tensor, into: Callable[[Tensor], None]) -> bool:
        """Let `into` write the gradient of one use of a parameter, in a tensor of its shape.

        It is added up in the buffer. While there is none, it is added up in `parameter.grad`, with
        all later ones of this backward: their order does not depend on when there is a buffer.
        Return False if the buffer's dtype differs: autograd makes the gradient. `gradient_ready`
        follows in either case.
        """
        unit, index = self._index_of[parameter]
        buffer = self._buffer_for(unit, index)
        if buffer is not None and buffer.dtype != parameter.dtype:
            return False
        if buffer is not None and index not in unit.arrived:
            into(buffer)
            unit.arrived.add(index)
            return True
        gradient = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        into(gradient)
        if buffer is not None:
            buffer.add_(gradient)
        else:
            _defer(parameter, gradient)
        return True

    def add(self, parameter: Tensor, rows: Tensor) -> None:
        """Add a gradient of which some rows have been made (sparse), where `write` would."""
        unit, index = self._index_of[parameter]
        if self._buffer_for(unit, index) is not None:
            unit.add_gradient(index, rows)
        else:
            _defer(parameter, rows)

    def _buffer_for(self, unit: Unit, index: int) -> Tensor | None:
        if (unit, index) in self._deferred or not self._has_buffer(unit):
            self._deferred.add((unit, index))
            return None
        return unit.gradient_of(index)

    def _has_buffer(self, unit: Unit) -> bool:
        if unit.buffer is None:
            self._lend_gradient_slot(unit)
        return unit.buffer is not None and unit not in self._in_flight

    def finish(self) -> None:
        """Complete all sums of the step. Collective."""
        self._set_order([unit for unit in self._units if unit not in self._reduced])
        self._is_last = True
        self._start_remaining()
        while self._in_flight:
            self._collect(wait=True)
        self.replicas.finish(self._units)
        self._last_sums.clear()
        for unit, group in self.tied.items():
            group.all_reduce(unit.reduced_shard)
            sum_pieces([unit.reduced_shard], unit.reduced_shard, False, unit.squares, self.pool)
        if not self.sharded.optimizer:
            gathers = [self.axis.gather(unit.send_buffer, per_rank=True) for unit in self._units]
            for work in gathers:
                work.wait()
        self._reduced.clear()
        if self._completed is not None:
            self._keep_order(list(dict.fromkeys(self._completed)))
            self._completed = None

    def _start_remaining(self) -> None:
        for unit in self._order[self._started :]:
            self._start(unit)

    def _lend_gradient_slot(self, unit: Unit) -> None:
        """Lend the unit its slot, if it is free and the unit's turn is near.

        Units take turns, so that a unit lies in the same slot on every rank; gradients that come
        before their unit's turn wait in `parameter.grad`.
        """
        if not self._gradient_slots:
            return
        if unit not in self._turn_of:
            names = first_few([slot.parameter.name for slot in unit.layout.slots])
            raise HpczeroError(
                f"a gradient of {names} came in the backward of a part that does not hold it"
            )
        turns_to_come = self._turn_of[unit] - self._started
        number = (self._sums_started + turns_to_come) % len(self._gradient_slots)
        if (
            0 <= turns_to_come < len(self._gradient_slots)
            and number not in self._gradient_slot_of.values()
        ):
            unit.buffer = unit.send_buffer = self._gradient_slots[number][: unit.layout.size]
            self._gradient_slot_of[unit] = number

    def _start(self, unit: Unit) -> None:
        while unit in self._in_flight:  # its sum of the backward before
            self._collect(wait=True)
        while unit.buffer is None:
            self._lend_gradient_slot(unit)
            if unit.buffer is None:
                self._collect(wait=True)
        self._started += 1
        self._sums_started += 1
        if unit.missing:
            self.on_complete(unit)
        unit.complete()
        accumulate = self.sharded.gradients and unit in self._reduced
        self._reduced.add(unit)
        if self._is_last:
            self._last_sums.add(unit)
        sums = GradientSum(self, unit, accumulate)
        self._in_flight[unit] = self.axis.reduce(unit.send_buffer, sums)

    def _collect(self, wait: bool = False) -> None:
        """Make progress with sums in flight, and take back the slots of those that are done.

        `wait`: until the oldest is done.
        """
        while self._in_flight:
            unit, work = next(iter(self._in_flight.items()))
            if wait:
                work.wait()
            elif not work.poll():
                return
            del self._in_flight[unit]
            wait = False
            if self.sharded.gradients:
                del self._gradient_slot_of[unit]
                unit.buffer = None
            if unit in self._last_sums or not self.replicas.are_summed:
                self.replicas.start(unit)
        if self.replicas.in_flight:
            self.replicas.poll()

    def _have_sum(self, unit: Unit) -> None:
        self.on_summed(unit)

    def _keep_order(self, completed: list[Unit]) -> None:
        """Start units from now on in the order in which they were complete on the first rank.

        Units that were not complete come last.
        """
        incomplete = [unit for unit in self._units if unit not in completed]
        order = [self._units.index(unit) for unit in completed + incomplete]
        orders = self.axis.group.stack(torch.tensor(order, dtype=torch.int64))
        self._units = [self._units[index] for index in orders[0].tolist()]


def _defer(parameter: Tensor, gradient: Tensor) -> None:
    """Add the gradient up in `parameter.grad`, as it would be in the buffer.

    The rows of an embedding stay sparse while nothing else comes.
    """
    waiting = gradient_left(parameter)
    if waiting is not None:
        gradient = waiting.to_dense().add_(gradient)  # in place, if it is dense
    leave_gradient(parameter, gradient)


@dataclass(frozen=True)
class GradientSum:
    """Arithmetic of one unit's reduction: fp32, rounded once to the weights' precision.

    Not rounded where several sums are accumulated.
    """

    reduction: Reduction
    unit: Unit
    accumulate: bool

    def into_shard(self, window: slice, parts: list[Tensor], ranks: Sequence[int]) -> None:
        squares = self.unit.squares[window.start // BLOCK : -(-window.stop // BLOCK)]
        out = self.unit.reduced_shard[window]
        sum_pieces(parts, out, self.accumulate, squares, self.reduction.pool)
        bad = self.reduction.bad
        if bad.noted_on_host and not squares.isfinite().all():
            first = self.unit.shard.start + window.start
            bad.note(self.unit, first, parts, ranks, out)

    def of_node(self, first: int, parts: list[Tensor], ranks: Sequence[int], out: Tensor) -> None:
        squares = torch.empty(-(-out.numel() // BLOCK), dtype=torch.float32)
        sum_pieces(parts, out, False, squares, self.reduction.pool)
        if not squares.isfinite().all():
            self.reduction.bad.note(self.unit, first, parts, ranks, out)
