"""Weights that stand for the model in place of those that are stepped: an average of them.

That is the moving average of `initialize(..., average=)`, or, where replicas train by themselves,
the outer weights, which all of them have in common.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from hpczero.errors import HpczeroError
from hpczero.parallel.zero import state_dict
from hpczero.parallel.zero.unit import Unit
from hpczero.parallel.zero.update import Update
from hpczero.parallel.zero.weights import Weights


class AveragedWeights(Weights):
    """An engine's weights, with its `update`, and `_had_backward`: units with gradients."""

    update: Update
    _had_backward: set[Unit]
    _is_averaged = False  # the weights are the average

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the average of the weights for the weights inside. Collective.

        An error that leaves the context may be this rank's alone, so nothing is exchanged then:
        the weights stay the average until a next `averaged` ends.
        """
        if not self.update.has_average:
            raise HpczeroError(
                "averaged: this engine keeps no average: give initialize(..., average=0.999)"
            )
        if self._had_backward:
            raise HpczeroError("averaged: gradients of the weights wait for their step")
        if not self._is_averaged:
            self.complete_exchanges()
            self.renew(self.update.swap_average)
        self._is_averaged = True
        yield
        self._end_averaged()

    def _end_averaged(self) -> None:
        if self._is_averaged:
            self.renew(self.update.swap_average)
            self._is_averaged = False

    def refuse_averaged(self, what: str) -> None:
        """Raise HpczeroError inside `averaged`."""
        if self._is_averaged:
            raise HpczeroError(
                f"{what}: the weights are their average inside `with engine.averaged()`. After an "
                "error there they still are: `with engine.averaged(): pass`, on every rank, ends it"
            )

    def complete_exchanges(self) -> None:
        """Complete what replicas have begun to exchange, so that states may be read. Collective."""
        if self.update.is_exchanging:
            self.wait_for_weights()
            self.axis.node_barrier().wait()  # nobody reads any more what is written now
            for unit in self.update.take_over():
                self._start_arriving(unit)
            self.wait_for_weights()

    def come_together(self) -> None:
        """Give replicas that train by themselves the mean of their weights. Collective."""
        if self.update.trains_apart:
            self.complete_exchanges()
            self.renew(self.update.come_together)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the module's state_dict, the parameters in fp32, on the first rank; {} elsewhere.

        Collective. Of replicas that train by themselves it has the outer weights.
        """
        assert self.is_whole, "other ranks have the rest"
        self.complete_exchanges()
        self.wait_for_weights()
        weights = self.update.common_weights if not self._is_averaged else _master
        return state_dict.state_dict(
            self.module, self.units, self.axis, weights, self.tensor, self.file
        )

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take parameters and buffers from data rank 0. Collective.

        The average begins anew with them; the moments stay.
        """
        self.refuse_averaged("load_state_dict")
        self.complete_exchanges()
        super().load_state_dict(state)
        self.update.begin_average()

    @contextmanager
    def gathered(self, parameters: Iterable[torch.Tensor], modify: bool = False) -> Iterator[None]:
        if modify:
            self.refuse_averaged("gathered(modify=True)")
            if self.update.trains_apart:
                raise HpczeroError(
                    "gathered(modify=True): with optimizer.outer each replica has weights of its"
                    " own between outer steps; engine.load_state_dict(state) sets those of all"
                )
        with super().gathered(parameters, modify):
            yield


def _master(unit: Unit) -> torch.Tensor:
    return unit.master
