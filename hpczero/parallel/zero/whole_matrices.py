"""Parameters that one rank each has whole for a moment: gathered from shards, and dealt back.

`matrix_places` says who owns which, and the way there.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hpczero.comm.group import Group
from hpczero.model.shapes import Parameter
from hpczero.parallel.layout import ParameterSlot, Slices
from hpczero.parallel.zero.matrix_places import Place, Ranks, places, size
from hpczero.parallel.zero.unit import Unit
from hpczero.parallel.zero.weights import Weights

PieceOf = Callable[[ParameterSlot, slice], Tensor]


class WholeMatrices:
    """All methods are collective among data and tensor ranks."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        """`dtype`: in which they travel."""
        axis = weights.axis
        self._data = axis.group
        self._tensor = weights.tensor
        self._ranks = Ranks(
            self._data.size,
            axis.size,
            self._tensor.size if self._tensor else 1,
            weights.sharded.optimizer,
        )
        self._dtype = dtype
        self._device = weights.device.torch
        layouts = [unit.layout for unit in weights.units]
        found = places(layouts, weights.settings.optimizer, self._ranks)
        self._places = dict(zip(weights.units, found, strict=True))

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Name -> parameter, of all that are gathered."""
        return {
            place.name: place.slot.parameter for found in self._places.values() for place in found
        }

    def gather(self, unit: Unit, piece_of: PieceOf) -> dict[str, Tensor]:
        """Return those parameters of a unit that this rank owns, whole, in the shape `divided`.

        `piece_of` returns elements, of the unit's buffer, that this rank steps.
        """
        ranks, found, me = self._ranks, self._places[unit], self._data.rank
        pieces = {
            place.name: piece_of(place.slot, ranks.piece(unit.layout, place.slot, me))
            for place in found
        }
        inputs = [
            [pieces[place.name] for place in found if place.data == rank and ranks.sends(me, rank)]
            for rank in range(ranks.data)
        ]
        mine = [place for place in found if place.data == me]
        sizes = [
            [
                ranks.length(unit.layout, place.slot, rank) if ranks.sends(rank, me) else 0
                for place in mine
            ]
            for rank in range(ranks.data)
        ]
        arrived = self._exchanged(self._data, inputs, sizes)
        parts = [torch.cat(of_place) for of_place in zip(*arrived, strict=True)]
        if self._tensor is None:
            return {
                place.name: part.view(place.slot.parameter.divided)
                for place, part in zip(mine, parts, strict=True)
            }
        return self._of_tensor_parts(self._tensor, mine, parts)

    def _of_tensor_parts(
        self, group: Group, mine: Sequence[Place], parts: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Return the parameters that this rank owns; `parts`: of all that its data rank owns."""
        me, numbers = group.rank, range(group.size)
        inputs = [
            [
                part
                for place, part in zip(mine, parts, strict=True)
                if place.tensor == rank and (place.slot.is_split or rank == me)
            ]
            for rank in numbers
        ]
        own = [place for place in mine if place.tensor == me]
        held = [[place.held(group.size, rank) for place in own] for rank in numbers]
        sizes = [
            [
                size(part) if place.slot.is_split or rank == me else 0
                for place, part in zip(own, held[rank], strict=True)
            ]
            for rank in numbers
        ]
        arrived = self._exchanged(group, inputs, sizes)
        found = {}
        for number, place in enumerate(own):
            whole = self._empty(place.slot.parameter.size).view(place.slot.parameter.divided)
            for rank in numbers:
                if sizes[rank][number]:
                    part = held[rank][number]
                    whole[part] = arrived[rank][number].view(_shape(part))
            found[place.name] = whole
        return found

    def scatter(self, unit: Unit, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return, of what owners have made of a unit's parameters, the elements of this rank."""
        ranks, found, me = self._ranks, self._places[unit], self._data.rank
        mine = [place for place in found if place.data == me]
        parts = self._tensor_parts(mine, made)
        inputs = [
            [
                part[_within(place, ranks.piece(unit.layout, place.slot, rank))]
                for place, part in zip(mine, parts, strict=True)
            ]
            for rank in range(ranks.data)
        ]
        of_ranks = [[place for place in found if place.data == rank] for rank in range(ranks.data)]
        sizes = [
            [ranks.length(unit.layout, place.slot, me) for place in of_rank] for of_rank in of_ranks
        ]
        arrived = self._exchanged(self._data, inputs, sizes)
        return {
            place.name: piece
            for of_rank, pieces in zip(of_ranks, arrived, strict=True)
            for place, piece in zip(of_rank, pieces, strict=True)
        }

    def _tensor_parts(self, mine: Sequence[Place], made: Mapping[str, Tensor]) -> list[Tensor]:
        """Return this tensor rank's parts of what its data rank owns, each in a row."""
        if self._tensor is None:
            return [made[place.name].reshape(-1) for place in mine]
        group = self._tensor
        own = [place for place in mine if place.tensor == group.rank]
        inputs = [
            [made[place.name][place.held(group.size, rank)].reshape(-1) for place in own]
            for rank in range(group.size)
        ]
        sizes = [
            [place.slot.stop - place.slot.offset for place in mine if place.tensor == rank]
            for rank in range(group.size)
        ]
        pieces = [iter(of_rank) for of_rank in self._exchanged(group, inputs, sizes)]
        return [next(pieces[place.tensor]) for place in mine]

    def _exchanged(
        self, group: Group, inputs: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]
    ) -> list[list[Tensor]]:
        """Send tensors to each rank; return what comes from each, in pieces of these sizes."""
        joined: dict[tuple[tuple[int, int], ...], Tensor] = {}  # what several ranks get, once
        sent = []
        for tensors in inputs:
            key = tuple((tensor.data_ptr(), tensor.numel()) for tensor in tensors)
            if key not in joined:
                joined[key] = self._joined(tensors)
            sent.append(joined[key])
        arrived = [self._empty(sum(of_rank)) for of_rank in sizes]
        arrived[group.rank] = sent[group.rank]
        if group.size > 1:
            group.all_to_all(arrived, sent)
        return [
            list(whole.split(list(of_rank))) if of_rank else []
            for whole, of_rank in zip(arrived, sizes, strict=True)
        ]

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        if not tensors:
            return self._empty(0)
        return torch.cat([tensor.to(self._dtype) for tensor in tensors])

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, dtype=self._dtype, device=self._device)


def _within(place: Place, piece: slice) -> slice:
    return slice(piece.start - place.slot.offset, piece.stop - place.slot.offset)


def _shape(held: Slices) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in held)
