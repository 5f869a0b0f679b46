"""The average of a unit's owned elements over the replicas.

Tensor ranks hold some parameters in common, which must stay equal to the bit. A block's scale would
depend on what else lies in the block, so their elements are sent a second time, in fp32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hpczero.parallel.replicas.codecs import codec_of
from hpczero.parallel.replicas.exchange import Errors, Exchange
from hpczero.parallel.replicas.sizes import FORMS, part_of
from hpczero.parallel.zero.data_axis import Replicas
from hpczero.parallel.zero.unit import Unit
from hpczero.parallel.zero.weights import Weights

_EXACT = codec_of(FORMS["fp32"])


class Exchanger:
    """Starts exchanges of units' elements in one form."""

    def __init__(self, weights: Weights, replicas: Replicas, form: str) -> None:
        self.replicas = replicas
        self.codec = codec_of(FORMS[form], weights.pool)
        self._units = weights.units
        self._may_part = weights.tensor is not None and self.codec.form.block > 0
        self._exact_of: dict[Unit, list[slice]] = {}

    def no_errors(self) -> dict[Unit, Errors]:
        """Return what is left out so far, of all owned elements: nothing. Floats keep no errors."""
        if not self.codec.form.block:
            return {unit: Errors() for unit in self._units}
        found = {}
        for unit in self._units:
            part = self.part(unit.master.numel(), self.replicas.number)
            sent = torch.zeros_like(unit.master)
            found[unit] = Errors(sent, sent.new_zeros(part.stop - part.start))
        return found

    def part(self, elements: int, replica: int) -> slice:
        """Return the elements, of so many, of which a replica makes the average."""
        return part_of(self.codec.form, elements, self.replicas.count, replica)

    def start(
        self, unit: Unit, values: Tensor, errors: Errors, variance: Tensor | None = None
    ) -> "UnitExchange":
        """Start the exchange of `values`, one for each element of this rank's shard, or of all.

        The values are undefined then.
        """
        exact = self._exact(unit, values.numel()) if self._may_part else []
        if not exact:
            exchange = Exchange(self.replicas, self.codec, values, errors, variance)
            return UnitExchange(exchange, None, [])
        joined = torch.cat([values[part] for part in exact]).float()
        living = None if variance is None else variance.clone()
        for part in exact:  # zeros are sent as zeros, and leave no error
            values[part] = 0
            if living is not None:
                living[part] = 0
        exchange = Exchange(self.replicas, self.codec, values, errors, living)
        return UnitExchange(exchange, Exchange(self.replicas, _EXACT, joined, Errors()), exact)

    def _exact(self, unit: Unit, elements: int) -> list[slice]:
        """Return the elements, of the shard's or of all, that tensor ranks hold in common."""
        if unit not in self._exact_of:
            first = 0 if elements == unit.layout.size else unit.shard.start
            self._exact_of[unit] = [
                slice(part.start - first, part.stop - first)
                for part in unit.layout.held_by_all(first, first + elements)
            ]
        return self._exact_of[unit]


class UnitExchange:
    def __init__(self, exchange: Exchange, exact: Exchange | None, parts: Sequence[slice]) -> None:
        """`exact`: of the elements in these parts, one after the other."""
        self._exchanges = [exchange] if exact is None else [exchange, exact]
        self._parts = parts

    def poll(self) -> bool:
        """Move on what can move on; return True once all is here."""
        return all(exchange.poll() for exchange in self._exchanges)

    def wait(self) -> None:
        for exchange in self._exchanges:
            exchange.wait()

    def decode(self, values: Tensor) -> None:
        """Write the averages, of any precision, to `values`."""
        self._exchanges[0].decode(values)
        if self._parts:
            lengths = [part.stop - part.start for part in self._parts]
            exact = values.new_empty(sum(lengths), dtype=torch.float32)
            self._exchanges[1].decode(exact)
            for part, own in zip(self._parts, exact.split(lengths), strict=True):
                values[part] = own
