"""Messages between replicas: numbers of one form, as bytes.

A message of a form with blocks has the blocks' scales first. What the numbers of a message cannot
say is left in the `error`, and is added to the next message. A number that is not finite makes its
block NaN, so that no message turns it into a number.
"""

from typing import Protocol

import torch
from torch import Tensor

from hpczero.parallel.replicas.sizes import Form
from hpczero_kernels.cpu import INLINE, Pool
from hpczero_kernels.quantised import average_quantised, quantise, restore
from hpczero_kernels.signs import average_signs, pack_signs, unpack_signs

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Codec(Protocol):
    """Tensors are flat; `message` has `form.message(elements)` bytes.

    `variance`: where it is 0, an element takes no part, and is 0 when read (signs only).
    """

    form: Form

    def encode(
        self, values: Tensor, error: Tensor | None, variance: Tensor | None, message: Tensor
    ) -> None:
        """Write the values and the error left so far, if one is kept, to the message."""

    def average(self, messages: Tensor, average: Tensor) -> None:
        """Set `average` (fp32) to the mean of what the messages [replicas, bytes] say."""

    def decode(self, message: Tensor, variance: Tensor | None, values: Tensor) -> None:
        """Read a message."""


def codec_of(form: Form, pool: Pool = INLINE) -> Codec:
    if form.name == "1bit":
        return Signs(form, pool)
    return Integers(form, pool) if form.block else Floats(form)


class _Apart:
    """The parts of messages: of one, or of several as rows."""

    def __init__(self, form: Form, elements: int, message: Tensor) -> None:
        first = 4 * form.scales(elements)
        self.scales = message[..., :first].view(torch.float32)
        self.packed = message[..., first : form.message(elements)]


class Signs:
    """The sign of each element, and one magnitude for each block."""

    def __init__(self, form: Form, pool: Pool) -> None:
        self.form = form
        self._pool = pool

    def encode(
        self, values: Tensor, error: Tensor | None, variance: Tensor | None, message: Tensor
    ) -> None:
        assert error is not None, "signs alone are too little"
        to = _Apart(self.form, values.numel(), message)
        pack_signs(values, error, variance, to.packed, to.scales, self._pool)

    def average(self, messages: Tensor, average: Tensor) -> None:
        of = _Apart(self.form, average.numel(), messages)
        average_signs(of.packed, of.scales, average, self._pool)

    def decode(self, message: Tensor, variance: Tensor | None, values: Tensor) -> None:
        of = _Apart(self.form, values.numel(), message)
        unpack_signs(of.packed, of.scales, variance, values, self._pool)


class Integers:
    """Integers of 8 or 4 bits, and what 1 is for each block."""

    def __init__(self, form: Form, pool: Pool) -> None:
        self.form = form
        self._pool = pool

    def encode(
        self, values: Tensor, error: Tensor | None, variance: Tensor | None, message: Tensor
    ) -> None:
        to = _Apart(self.form, values.numel(), message)
        quantise(values, error, to.packed, to.scales, self.form.bits, self._pool)

    def average(self, messages: Tensor, average: Tensor) -> None:
        of = _Apart(self.form, average.numel(), messages)
        average_quantised(of.packed, of.scales, average, self.form.bits, self._pool)

    def decode(self, message: Tensor, variance: Tensor | None, values: Tensor) -> None:
        of = _Apart(self.form, values.numel(), message)
        restore(of.packed, of.scales, values, self.form.bits, self._pool)


class Floats:
    """The values in one of PyTorch's precisions; no error is kept."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self._dtype = _PRECISIONS[form.name]

    def encode(
        self, values: Tensor, error: Tensor | None, variance: Tensor | None, message: Tensor
    ) -> None:
        message.view(self._dtype).copy_(values)

    def average(self, messages: Tensor, average: Tensor) -> None:
        average.zero_()
        for message in messages:
            average.add_(message.view(self._dtype))
        average.mul_(1 / len(messages))

    def decode(self, message: Tensor, variance: Tensor | None, values: Tensor) -> None:
        values.copy_(message[: self.form.message(values.numel())].view(self._dtype))
