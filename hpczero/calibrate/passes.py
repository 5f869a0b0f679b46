"""Measured memory: streaming passes of ranks alone and at once, and hpczero's kernels as passes.

A pass counts the bytes that its kernel reads and writes once, as the planner counts them: forward
and backward together for a model's operations.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpczero.calibrate.compute import DTYPES
from hpczero.calibrate.findings import KernelTiming, Moved
from hpczero.calibrate.turns import Action, Turns
from hpczero_kernels.adamw import AdamWBuffers, AdamWScalars, adamw, scalars_of_step
from hpczero_kernels.cpu import INLINE, pool_of_torch
from hpczero_kernels.dispatch import kernel_operations
from hpczero_kernels.operations import AUTO
from hpczero_kernels.reduce import sum_pieces

_ARRAY = 48 << 20  # bytes of each array of a streaming pass on a CPU: no cache has three of them
_ON_GPU = 256 << 20
_COLUMNS = 1024
_ROWS_ON_CPU, _ROWS_ON_GPU = 2048, 32768
_PIECES = 2  # that are summed
_LOSS_IN_HALF, _LOSS_IN_FP32 = 32, 20  # bytes of PyTorch's operations for each logit

Made = tuple[Action, int]  # what to time, and the bytes that it reads and writes


def streaming(turns: Turns, device: torch.device) -> Made:
    """Return a pass that adds an array to another one, in place as an update does."""
    array, total = (
        torch.ones(_elements(turns, device), dtype=torch.float32, device=device) for _ in range(2)
    )
    return (lambda: total.add_(array)), 3 * total.nbytes


def _elements(turns: Turns, device: torch.device) -> int:
    """Return the length of an fp32 array that no cache holds, of several that memory has room for.

    The largest kernel has five of them.
    """
    return max(1 << 14, min(_ARRAY if device.type == "cpu" else _ON_GPU, turns.memory // 5) // 4)


def over_bus(turns: Turns) -> Made:
    """Return copies to a GPU and back; both ways one after the other."""
    device = turns.world.device
    on_host = device.pinned(_ON_GPU // 4)
    on_device = torch.empty_like(on_host, dtype=torch.float32, device=device.torch)

    def action() -> None:
        on_device.copy_(on_host, non_blocking=True)
        on_host.copy_(on_device, non_blocking=True)

    return action, 2 * on_host.nbytes


def kernels(turns: Turns, precision: str) -> list[KernelTiming]:
    """Time hpczero's kernels, all ranks at once. Collective."""
    found: list[KernelTiming] = []
    for name, make in _KERNELS.items():
        if turns.is_over() and found:
            break
        action, size = make(turns, DTYPES[precision])
        found.append(KernelTiming(name, precision, Moved(size, turns.of(action))))
    return found


def _tensor(turns: Turns, dtype: torch.dtype, columns: int = _COLUMNS) -> Tensor:
    device = turns.world.device
    rows = _ROWS_ON_CPU if device.kind == "cpu" else _ROWS_ON_GPU
    shape = rows * _COLUMNS // columns, columns
    return torch.randn(shape, dtype=torch.float32, device=device.torch).to(dtype).requires_grad_()


def _both_ways(operation: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Action:
    gradient = torch.ones_like(operation())

    def action() -> None:
        torch.autograd.grad(operation(), inputs, gradient)

    return action


def _norm(turns: Turns, dtype: torch.dtype) -> Made:
    x = _tensor(turns, dtype)
    weight, bias = (torch.ones_like(x[0]).detach().requires_grad_() for _ in range(2))
    action = _both_ways(lambda: AUTO.layer_norm(x, weight, bias), (x, weight, bias))
    return action, 5 * x.nbytes


def _rms_norm(turns: Turns, dtype: torch.dtype) -> Made:
    x = _tensor(turns, dtype)
    weight = torch.ones_like(x[0]).detach().requires_grad_()
    return _both_ways(lambda: AUTO.rms_norm(x, weight), (x, weight)), 5 * x.nbytes


def _gelu(turns: Turns, dtype: torch.dtype) -> Made:
    x = _tensor(turns, dtype)
    return _both_ways(lambda: AUTO.gelu(x), (x,)), 5 * x.nbytes


def _glu(turns: Turns, dtype: torch.dtype) -> Made:
    x = _tensor(turns, dtype).detach().view(-1, 2, _COLUMNS // 2).requires_grad_()
    return _both_ways(lambda: AUTO.glu(x, "silu"), (x,)), 4 * x.nbytes


def _cross_entropy(turns: Turns, dtype: torch.dtype) -> Made:
    """Go both ways; a kernel's gradient takes the logits' place, so it gets a copy of them."""
    logits = _tensor(turns, dtype, 8 * _COLUMNS).detach()
    targets = torch.arange(len(logits), dtype=torch.int64, device=logits.device)
    by_kernel = "cross_entropy" in kernel_operations(logits.device.type, dtype)

    def action() -> None:
        x = (logits.clone() if by_kernel else logits.detach()).requires_grad_()
        torch.autograd.grad(AUTO.cross_entropy(x, targets), (x,))

    of_pytorch = _LOSS_IN_HALF if logits.itemsize < 4 else _LOSS_IN_FP32
    return action, 5 * logits.nbytes if by_kernel else of_pytorch * logits.numel()


def _sum(turns: Turns, dtype: torch.dtype) -> Made:
    device = turns.world.device.torch
    count = _elements(turns, device)
    pieces = [torch.ones(count, dtype=dtype, device=device) for _ in range(_PIECES)]
    out = torch.empty_like(pieces[0], dtype=torch.float32)
    pool = pool_of_torch() if device.type == "cpu" else INLINE

    def action() -> None:
        sum_pieces(pieces, out, False, None, pool)

    return action, _PIECES * pieces[0].nbytes + out.nbytes


def _adamw(turns: Turns, dtype: torch.dtype) -> Made:
    device = turns.world.device.torch
    weights = torch.ones(_elements(turns, device), dtype=dtype, device=device)
    gradient = torch.zeros_like(weights)
    master, moment1, moment2 = (torch.zeros_like(weights, dtype=torch.float32) for _ in range(3))
    half = None if dtype is torch.float32 else weights
    buffers = AdamWBuffers(master, moment1, moment2, gradient, half)
    values = scalars_of_step(1, 1e-4, (0.9, 0.95), 1e-8).values
    scalars = AdamWScalars(values.to(device))
    pool = pool_of_torch() if device.type == "cpu" else INLINE

    def action() -> None:
        adamw(buffers, 0.1, scalars, pool)

    moved = 6 * master.nbytes + gradient.nbytes
    return action, moved + (0 if half is None else half.nbytes)


_KERNELS: dict[str, Callable[[Turns, torch.dtype], Made]] = {
    "norm": _norm,
    "gelu": _gelu,
    "adamw": _adamw,
    "cross_entropy": _cross_entropy,
    "rms_norm": _rms_norm,
    "glu": _glu,
    "sum": _sum,
}
