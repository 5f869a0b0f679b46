"""The reduce pass: gradients are summed over the data ranks while backward goes on (design 8).

`gradient_ready(parameter)`, the only entry from backward, adds a parameter's gradient to its unit. Where gradients are sharded every backward
is reduced, else the last one of a step: a unit whose parameters are all there is summed over the data ranks. Units start in one order on every
rank, whatever gradients came or did not come there: in the first step the reverse order of the model, from then on the order in which
they were complete on the first rank.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from hpczero.comm.group import Group, Work
from hpczero.errors import HpczeroError
from hpczero.parallel.states import Sharded
from hpczero.parallel.zero.data_axis import DataAxis
from hpczero.parallel.zero.parameters import gradient_left, leave_gradient
from hpczero.parallel.zero.unit import Unit
from hpczero.text import first_few
from hpczero_kernels.cpu import Pool
from hpczero_kernels.reduce import BLOCK, sum_pieces


@dataclass(frozen=True)
class BadGradient:
    """The first tensor, from the loss backwards, whose gradient was not finite on some rank; no tensor: only the sum over ranks was not; no rank:
    it is not known which.
    """

    tensor: str | None
    data_rank: int | None

    def __str__(self) -> str:
        if self.tensor is None:
            return "only the sum over the ranks"
        return f"first in {self.tensor}" + (
            "" if self.data_rank is None else f" of data rank {self.data_rank}"
        )


_UNKNOWN = -1  # a rank
_AT_THE_END = 1 << 30  # gradients that never come


class Reduction:
    """For each backward `begin` and `end`; then `finish`, after which every unit has its sum.

    A backward that raises ends with `fail`; what it has left behind only `discard` removes.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        axis: DataAxis,
        sharded: Sharded,
        slots: Sequence[torch.Tensor],
        pool: Pool,
        names_backwards: Sequence[str],
        tied: Mapping[Unit, Group],
    ) -> None:
        """`slots`: where gradients are sharded, what the units gather them in, in turns.

        `names_backwards`: all parameters of the model. `tied`: units that other pipeline stages
        have too, whose sums are added up.
        """
        self.names_backwards, self.tied = names_backwards, tied
        self.axis, self.sharded, self.pool = axis, sharded, pool
        self.looks_at_once = (
            not axis.device.has_queues
        )  # whether a sum is finite: else the host would have to wait for the device
        self.on_all_there: Callable[[Unit], None] = lambda unit: (
            None
        )  # is told of each unit whose gradients are all there
        self._slots = slots
        self._slot_of: dict[Unit, int] = {}
        self._everyone = list(reversed(units))  # in the order in which they start
        self._order, self._place_in_order = _ordered(self._everyone)  # of those of this backward
        self._in_flight: deque[tuple[Unit, Work]] = deque()
        self._read_by_others: set[Unit] = set()  # whose sum is under way
        self._started = 0  # units whose sum has been started in this backward
        self._sums = 0  # the same since the beginning
        self._reduced: set[Unit] = set()  # that have sums of this step already
        self._reducing = False
        self.is_open = False  # between begin and end: gradients may come
        self._failed = False  # a backward of this step has raised
        self._elsewhere: set[tuple[Unit, int]] = (
            set()
        )  # parameters whose gradients of this backward wait in `parameter.grad`
        self._completed: list[Unit] | None = []  # in the first step, as they come
        self._bad: list[
            tuple[int, int]
        ] = []  # (place of the tensor from the loss backwards, data rank)
        self._place_of: dict[torch.Tensor, tuple[Unit, int]] = {}
        for unit in units:
            self._place_of |= {
                parameter: (unit, index) for index, parameter in enumerate(unit.parameters)
            }

    def begin(self, last: bool, units: Collection[Unit] | None = None) -> None:
        """`units`: those that this backward is about, if not all."""
        chosen = (
            self._everyone if units is None else [unit for unit in self._everyone if unit in units]
        )
        if not self.sharded.gradients and self._reduced.intersection(chosen):
            raise HpczeroError(
                "a backward after the one that was said to be the last of the step: say last=True only then, or leave it out"
            )
        self.is_open = True
        self._reducing = last or self.sharded.gradients
        self._order, self._place_in_order = _ordered(chosen)
        self._started = 0
        self._elsewhere.clear()
        for unit in self._order:
            unit.missing = sum(parameter.requires_grad for parameter in unit.parameters)

    def end(self) -> None:
        """All gradients of this backward are there; what has not been started is started now."""
        if self._reducing:
            self._start_rest()
        self._reducing = self.is_open = False

    def fail(self) -> None:
        """The backward has raised. Other ranks may not know, so nothing is exchanged here."""
        self.is_open, self._failed = False, True

    def refuse_after_failure(self) -> None:
        if self._failed:
            raise HpczeroError(
                "a backward of this step raised an error, and part of its gradient is here: engine.zero_grad(),"
                " called on every rank, drops the gradients of this step; then training can go on"
            )

    def discard(self) -> None:
        """Collective. Drop the gradients of this step: those of a failed backward, and all others.

        The sums of a failed backward are brought to their end, as other ranks may have started them.
        """
        if self._reducing:
            self._start_rest()
        while self._in_flight:
            self._collect(wait=True)
        for unit in self._everyone:
            unit.drop_gradients()
        self._reducing = self._failed = False
        self._reduced.clear()
        self._elsewhere.clear()
        self._bad.clear()
        if self._completed is not None:
            self._completed = []

    def gradient_ready(self, parameter: torch.Tensor, may_be_last: bool = True) -> None:
        """`may_be_last`: no further gradient of the parameter comes in this backward; else its unit waits for the end of it."""
        unit, index = self._place_of[parameter]
        gradient = gradient_left(parameter)
        if gradient is None:  # the parameter has been frozen since the forward
            return
        if self._reducing and self._place_in_order.get(unit, self._started) < self._started:
            raise HpczeroError(
                f"a gradient of {self.name_of(parameter)} came when the sum of its unit had begun: of a backward inside this one, as"
                " checkpoint(..., use_reentrant=True) makes it, for what is used outside of the checkpoint too. Give use_reentrant=False"
            )
        if self._has_buffer(unit):
            unit.add_gradient(index, gradient)
            leave_gradient(parameter, None)
        unit.missing = unit.missing - 1 if may_be_last else _AT_THE_END
        if self._completed is not None and unit.missing == 0:
            self._completed.append(unit)
        if self._reducing:
            if unit.missing == 0:
                self.on_all_there(
                    unit
                )  # here, and not when there is a slot for it: what is gathered next follows from it, on all ranks alike
            self._collect()
            while (
                self._started < len(self._order)
                and self._order[self._started].missing == 0
                and self._has_buffer(self._order[self._started])
            ):
                self._start(
                    self._order[self._started]
                )  # without waiting for another rank, which may wait for what follows here
                self._collect()

    def name_of(self, parameter: torch.Tensor) -> str:
        unit, index = self._place_of[parameter]
        return unit.layout.slots[index].parameter.name

    def write(self, parameter: torch.Tensor, into: Callable[[torch.Tensor], None]) -> bool:
        """Lets `into` write the gradient of one use of a parameter, in a tensor of its shape, and adds it up where it is summed over the ranks. While
        there is no place for it, that is `parameter.grad`, for all gradients of this backward, so that their order does not depend on when there is
        one. False where they gather in another precision: it is autograd's then. `gradient_ready` follows in either case.
        """
        unit, index = self._place_of[parameter]
        place = self._place_for(unit, index)
        if place is not None and place.dtype != parameter.dtype:
            return False
        if place is not None and index not in unit.arrived:
            into(place)
            unit.arrived.add(index)
            return True
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        into(made)
        if place is not None:
            place.add_(made)
        else:
            _let_wait(parameter, made)
        return True

    def add(self, parameter: torch.Tensor, rows: torch.Tensor) -> None:
        """As `write`, of a gradient of which some rows have been made (sparse)."""
        unit, index = self._place_of[parameter]
        if self._place_for(unit, index) is not None:
            unit.add_gradient(index, rows)
        else:
            _let_wait(parameter, rows)

    def _place_for(self, unit: Unit, index: int) -> torch.Tensor | None:
        if (unit, index) in self._elsewhere or not self._has_buffer(unit):
            self._elsewhere.add((unit, index))
            return None
        return unit.gradient_of(index)

    def _has_buffer(self, unit: Unit) -> bool:
        if unit.buffer is None:
            self._lend_slot(unit)
        return unit.buffer is not None and unit not in self._read_by_others

    def finish(self) -> None:
        self._order, self._place_in_order = _ordered(
            [unit for unit in self._everyone if unit not in self._reduced]
        )
        self._started = 0
        self._start_rest()
        while self._in_flight:
            self._collect(wait=True)
        for unit, group in self.tied.items():
            group.all_reduce(unit.reduced_shard)
            sum_pieces([unit.reduced_shard], unit.reduced_shard, False, unit.squares, self.pool)
        if not self.sharded.optimizer:
            for work in [
                self.axis.gather(unit.send_buffer, copies=True) for unit in self._everyone
            ]:
                work.wait()
        self._reduced.clear()
        if self._completed is not None:
            self._keep_order(list(dict.fromkeys(self._completed)))
            self._completed = None

    def first_bad(self, others: Sequence[Group] = ()) -> BadGradient:
        """Collective: who made a sum of this step infinite or NaN, on any rank of the data axis and these."""
        nothing = len(self.names_backwards), 0
        if not self.looks_at_once:
            self._bad += self._found_in_sums()
        own = torch.tensor(min(self._bad, default=nothing), dtype=torch.int64)
        place, rank = min(map(tuple, self.axis.all_gather(own).tolist()))
        for group in others:
            found = torch.tensor([place, rank], dtype=torch.int64)
            place, rank = min(map(tuple, group.stack(found).tolist()))
        self._bad.clear()
        return (
            BadGradient(None, None)
            if place == nothing[0]
            else BadGradient(self.names_backwards[place], None if rank == _UNKNOWN else rank)
        )

    def _found_in_sums(self) -> list[tuple[int, int]]:
        """As `note_bad`, from what is left of it in the own shard: which rank was to blame, nothing tells any more."""
        found = []
        for unit in self._everyone:
            for place, part in unit.layout.stretches(unit.shard.start, unit.shard.stop):
                if (
                    not unit.reduced_shard[
                        part.start - unit.shard.start : part.stop - unit.shard.start
                    ]
                    .isfinite()
                    .all()
                ):
                    found.append((self.names_backwards.index(place.parameter.name), _UNKNOWN))
        return found

    def note_bad(
        self,
        unit: Unit,
        first: int,
        parts: list[torch.Tensor],
        ranks: Sequence[int],
        out: torch.Tensor,
    ) -> None:
        """A sum is not finite: which tensor of which rank made it so? (An earlier sum of the step that was already bad has been noted.) Where the
        sum was written over one of its parts, that one is to blame if no other is.
        """
        for place, elements in unit.layout.stretches(first, first + out.numel()):
            within = slice(elements.start - first, elements.stop - first)
            bad = [
                (rank, part)
                for rank, part in zip(ranks, parts, strict=True)
                if not part[within].isfinite().all()
            ]
            sure = [(rank, part) for rank, part in bad if part.data_ptr() != out.data_ptr()]
            self._bad += [
                (self.names_backwards.index(place.parameter.name), rank) for rank, _ in sure or bad
            ]

    def _start_rest(self) -> None:
        for unit in self._order[self._started :]:
            self._start(unit)

    def _lend_slot(self, unit: Unit) -> None:
        """Units take turns, so that a unit lies in the same slot on every rank; what comes before its unit's turn waits in `parameter.grad`."""
        if not self._slots:
            return
        if unit not in self._place_in_order:
            names = first_few([place.parameter.name for place in unit.layout.slots])
            raise HpczeroError(
                f"a gradient of {names} came in the backward of a part that does not hold it"
            )
        place = self._place_in_order[unit]
        slot = (self._sums + place - self._started) % len(self._slots)
        if (
            self._started <= place < self._started + len(self._slots)
            and slot not in self._slot_of.values()
        ):
            unit.buffer = unit.send_buffer = self._slots[slot][: unit.layout.size]
            self._slot_of[unit] = slot

    def _start(self, unit: Unit) -> None:
        while unit in self._read_by_others:  # its sum of the backward before
            self._collect(wait=True)
        while unit.buffer is None:
            self._lend_slot(unit)
            if unit.buffer is None:
                self._collect(wait=True)
        self._started += 1
        self._sums += 1
        if unit.missing:
            self.on_all_there(unit)
        unit.complete()
        self._read_by_others.add(unit)
        accumulate = self.sharded.gradients and unit in self._reduced
        self._reduced.add(unit)
        self._in_flight.append(
            (unit, self.axis.reduce(unit.send_buffer, GradientSum(self, unit, accumulate)))
        )

    def _collect(self, wait: bool = False) -> None:
        """Moves the sums under way, and takes back the slots of those that are done; `wait`: at least of the oldest."""
        while self._in_flight:
            unit, work = self._in_flight[0]
            if wait:
                work.wait()
            elif not work.poll():
                return
            self._in_flight.popleft()
            self._read_by_others.discard(unit)
            wait = False
            if self.sharded.gradients:
                del self._slot_of[unit]
                unit.buffer = None

    def _keep_order(self, completed: list[Unit]) -> None:
        """Units start in the order in which they were complete on the first rank; those that were not come last."""
        rest = [unit for unit in self._everyone if unit not in completed]
        places = torch.tensor(
            [self._everyone.index(unit) for unit in completed + rest], dtype=torch.int64
        )
        self._everyone = [
            self._everyone[place] for place in self.axis.all_gather(places)[0].tolist()
        ]


def _let_wait(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Adds up as it would in the buffer. The rows of an embedding stay sparse while nothing else comes."""
    waiting = gradient_left(parameter)
    if waiting is None:
        leave_gradient(parameter, gradient)
    else:
        leave_gradient(
            parameter, waiting.to_dense().add_(gradient)
        )  # the same tensor, if it is dense


def _ordered(units: list[Unit]) -> tuple[list[Unit], dict[Unit, int]]:
    return units, {unit: place for place, unit in enumerate(units)}


@dataclass(frozen=True)
class GradientSum:
    """The arithmetic of one unit's reduction: fp32, rounded once to the weights' precision, unless several sums are accumulated."""

    reduction: Reduction
    unit: Unit
    accumulate: bool

    def into_shard(self, window: slice, parts: list[torch.Tensor], ranks: Sequence[int]) -> None:
        squares = self.unit.squares[window.start // BLOCK : -(-window.stop // BLOCK)]
        out = self.unit.reduced_shard[window]
        sum_pieces(parts, out, self.accumulate, squares, self.reduction.pool)
        if self.reduction.looks_at_once and not squares.isfinite().all():
            self.reduction.note_bad(
                self.unit, self.unit.shard.start + window.start, parts, ranks, out
            )

    def of_node(
        self, first: int, parts: list[torch.Tensor], ranks: Sequence[int], out: torch.Tensor
    ) -> None:
        squares = torch.empty(-(-out.numel() // BLOCK), dtype=torch.float32)
        sum_pieces(parts, out, False, squares, self.reduction.pool)
        if not squares.isfinite().all():
            self.reduction.note_bad(self.unit, first, parts, ranks, out)
