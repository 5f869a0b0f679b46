"""The local half of a reduction: parts that have arrived, combined in rank order (so the result never depends on arrival)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 16  # elements: accumulator and parts stay in the cache
_HALF = (torch.float16, torch.bfloat16)
_OPERATIONS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def check(op: str, output: Tensor, dtype: torch.dtype) -> None:
    assert op in _OPERATIONS, f"reduction '{op}' is unknown; there are {', '.join(_OPERATIONS)}"
    assert not (op == "sum" and dtype is torch.bool), 'booleans have no sum: reduce with "max" (any) or "min" (all)'
    fits = output.dtype is dtype or (dtype in _HALF and output.dtype is torch.float32)
    assert fits, f"a reduction of {dtype} cannot be written to {output.dtype}"


def combine(output: Tensor, parts: Sequence[Tensor], op: str) -> None:
    """output = parts[0] op parts[1] op ..., from left to right. Half precision accumulates in fp32 and is rounded once, when it is
    written (not at all into an fp32 output); integers wrap; NaN stays NaN. `output` may be one of the parts.
    """
    operation = _OPERATIONS[op]
    dtype = parts[0].dtype
    if len(parts) == 2 and output.dtype is dtype:  # torch adds two half-precision numbers in fp32 and rounds once
        operation(parts[0], parts[1], out=output)
        return
    length = max(1, min(_BLOCK, output.numel()) if output.device.type == "cpu" else output.numel())
    accumulator = torch.empty(length, dtype=torch.float32 if dtype in _HALF else dtype, device=output.device)
    for begin in range(0, output.numel(), length):
        block = slice(begin, begin + length)
        total = accumulator[: output[block].numel()].copy_(parts[0][block])
        for part in parts[1:]:
            operation(total, part[block], out=total)
        output[block].copy_(total)
