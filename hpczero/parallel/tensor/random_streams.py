"""Random numbers of PyTorch's own, where tensor ranks run one module together.

Outside of cut regions all tensor ranks have to draw the same numbers (dropout of the residual
stream), inside of them others (dropout of each rank's own heads), and as many as they like. So the
ranks begin with one state; entering a region draws one number, the same on all ranks, that seeds
the region's numbers together with the rank; leaving it brings the state back. What is recomputed in
backward begins with the state of its forward (torch.utils.checkpoint), and so draws the same.
"""

import torch

from hpczero.comm.group import Group
from hpczero_kernels.random import key_of

_SEEDS = 1 << 63


class RandomStreams:
    """Random numbers of this rank; `enter` and `leave` stand around a region."""

    def __init__(self, group: Group, device: torch.device) -> None:
        """Take the first rank's state. Collective."""
        self._rank = group.rank
        self._device = device if device.type == "cuda" else None
        self._outside: tuple[torch.Tensor, torch.Tensor | None] | None = None
        state = torch.get_rng_state()
        group.broadcast(state)
        torch.set_rng_state(state)
        if self._device:
            seed = torch.randint(_SEEDS - 1, (), dtype=torch.int64)
            torch.cuda.manual_seed(int(seed))

    def enter(self) -> None:
        if self._outside is not None:
            return
        draw = int(torch.randint(_SEEDS - 1, (), dtype=torch.int64, device="cpu"))
        on_device = torch.cuda.get_rng_state(self._device) if self._device else None
        self._outside = torch.get_rng_state(), on_device
        torch.manual_seed(key_of(draw, "tensor rank", self._rank) % _SEEDS)

    def leave(self) -> None:
        if self._outside is None:
            return
        state, on_device = self._outside
        self._outside = None
        torch.set_rng_state(state)
        if on_device is not None:
            assert self._device
            torch.cuda.set_rng_state(on_device, self._device)

    def forget(self) -> None:
        """Begin a region anew: one that was not left has ended by an error.

        torch.utils.checkpoint ends what it recomputes so, and brings the state back itself.
        """
        self._outside = None
