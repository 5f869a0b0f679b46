"""Operations that scripts/bench_kernels.py runs: each operation with its bytes, by hpczero and
by others.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from bench_kernels import Run, Setting, Work
from torch import Tensor

from hpczero_kernels import dispatch, operations
from hpczero_kernels.adamw import AdamWBuffers, adamw, scalars_of_step
from hpczero_kernels.cpu import BLOCK
from hpczero_kernels.lamb import (
    block_count,
    lamb_moments,
    lamb_moments_reference,
    lamb_step,
    lamb_step_reference,
)
from hpczero_kernels.lion import LionBuffers, lion, lion_reference
from hpczero_kernels.reduce import sum_pieces
from hpczero_kernels.rotary import angles

BETAS, EPS, DECAY, LR = (0.9, 0.95), 1e-8, 0.1, 1e-3


def works() -> dict[str, Callable[[Setting], Work]]:
    """By name, made when they are wanted: their data takes memory."""
    own, theirs = operations.AUTO, operations.PYTORCH
    made: dict[str, Callable[[Setting], Work]] = {
        "sum": _sum,
        "adamw_fp32": _adamw_fp32,
        "adamw_mixed": _adamw_mixed,
        "lamb_mixed": _lamb_mixed,
        "lion_mixed": _lion_mixed,
    }
    for name, inputs in {
        "layer_norm": "xcc",
        "rms_norm": "xc",
        "add_layer_norm": "xxcc",
        "gelu": "xc",
    }.items():
        for direction in ("forward", "backward"):
            made[f"{name}_{direction}"] = _layer(
                name, getattr(own, name), getattr(theirs, name), inputs, direction
            )
    for activation in ("silu", "gelu", "gelu_exact"):
        for direction in ("forward", "backward"):
            made[f"glu_{activation}_{direction}"] = _layer(
                f"glu {activation}",
                partial(own.glu, activation=activation),
                partial(theirs.glu, activation=activation),
                "b",
                direction,
            )
    for direction in ("forward", "backward"):
        made[f"soft_cap_{direction}"] = _layer(
            "soft_cap", partial(own.soft_cap, cap=30.0), partial(theirs.soft_cap, cap=30.0), "x",
            direction,
        )  # fmt: skip
        made[f"rotary_{direction}"] = _layer(
            "rotary", _turning(own.rotary), _turning(theirs.rotary), "h", direction
        )
        made[f"dropout_{direction}"] = _layer(
            "dropout",
            _dropping(own.dropout),
            lambda x, r: r + torch.dropout(x, 0.1, True),
            "xx",
            direction,
        )
    made["cross_entropy_both"] = _cross_entropy
    return made


def _sum(setting: Setting) -> Work:
    """Two pieces, and the squares."""
    pieces = [setting.drawn(setting.elements) for _ in range(2)]
    out = setting.drawn(setting.elements)
    squares = torch.empty(-(-setting.elements // BLOCK), device=setting.device)

    def torchs(number: int) -> None:
        total = pieces[0][number].float() + pieces[1][number]
        out[number].copy_(total)
        torch.linalg.vector_norm(out[number].float())

    def own(number: int) -> None:
        sum_pieces([piece[number] for piece in pieces], out[number], False, squares)

    return Work(
        "sum of two pieces, with squares",
        3 * setting.elements * setting.dtype.itemsize,
        _compared(setting, own, torchs),
    )


def _states(
    setting: Setting, gradient: torch.dtype, weights: torch.dtype | None
) -> list[AdamWBuffers]:
    count, wide = setting.elements, torch.float32
    moments = [
        setting.drawn(count, dtype=wide),
        [moment.square_() for moment in setting.drawn(count, dtype=wide)],
    ]
    written = [None] * setting.sets if weights is None else setting.drawn(count, dtype=weights)
    return [
        AdamWBuffers(*each)
        for each in zip(
            setting.drawn(count, dtype=wide),
            *moments,
            setting.drawn(count, dtype=gradient),
            written,
            strict=True,
        )
    ]


def _steps(setting: Setting, states: Sequence[AdamWBuffers]) -> tuple[Run, list[tuple[Any, Any]]]:
    scalars = scalars_of_step(3, LR, BETAS, EPS, 1.0)
    on_device = type(scalars)(scalars.values.to(setting.device))
    masters = [torch.nn.Parameter(state.master.clone()) for state in states]
    optimizers = [
        torch.optim.AdamW([master], LR, BETAS, EPS, DECAY, fused=True) for master in masters
    ]
    return lambda number: adamw(states[number], DECAY, on_device), list(
        zip(masters, optimizers, strict=True)
    )


def _adamw_fp32(setting: Setting) -> Work:
    states = _states(setting, torch.float32, None)
    own, pairs = _steps(setting, states)
    for (master, _), state in zip(pairs, states, strict=True):
        master.grad = state.gradient.clone()
    return Work(
        "AdamW, all in fp32",
        28 * setting.elements,
        {"hpczero": own, "torch fused": lambda number: pairs[number][1].step()},
    )


def _adamw_mixed(setting: Setting) -> Work:
    """Gradient and weights in half precision: PyTorch's optimizer wants the gradient in fp32,
    and somebody has to write the weights.
    """
    states = _states(setting, setting.dtype, setting.dtype)
    own, pairs = _steps(setting, states)

    def torchs(number: int) -> None:
        (master, optimizer), state = pairs[number], states[number]
        master.grad = state.gradient.float()
        optimizer.step()
        assert state.weights is not None
        state.weights.copy_(master.detach())

    name = f"AdamW, gradient and weights in {str(setting.dtype).removeprefix('torch.')}"
    return Work(
        name,
        (24 + 2 * setting.dtype.itemsize) * setting.elements,
        {"hpczero": own, "torch fused + casts": torchs},
    )


def _lamb_mixed(setting: Setting) -> Work:
    """Both passes; PyTorch has no LAMB, so that its operations one by one are the other way."""
    states = _states(setting, setting.dtype, setting.dtype)
    scalars = scalars_of_step(3, LR, BETAS, EPS, 1.0)
    on_device = type(scalars)(scalars.values.to(setting.device))
    rows = block_count(states[0].master.numel())
    squares = torch.empty(rows, 2, dtype=torch.float32, device=setting.device)
    ratio = torch.ones(1, dtype=torch.float32, device=setting.device)

    def step(first: Callable[..., None], second: Callable[..., None], number: int) -> None:
        first(states[number], DECAY, on_device, squares)
        second(states[number], DECAY, on_device, ratio)

    return Work(
        f"LAMB, both passes, gradient and weights in {str(setting.dtype).removeprefix('torch.')}",
        (36 + 2 * setting.dtype.itemsize) * setting.elements,
        {
            "hpczero": partial(step, lamb_moments, lamb_step),
            "torch": partial(step, lamb_moments_reference, lamb_step_reference),
        },
    )


def _lion_mixed(setting: Setting) -> Work:
    adam = _states(setting, setting.dtype, setting.dtype)
    states = [LionBuffers(one.master, one.moment1, one.gradient, one.weights) for one in adam]
    scalars = scalars_of_step(3, LR, BETAS, EPS, 1.0)
    on_device = type(scalars)(scalars.values.to(setting.device))
    return Work(
        f"Lion, gradient and weights in {str(setting.dtype).removeprefix('torch.')}",
        (16 + 2 * setting.dtype.itemsize) * setting.elements,
        {
            "hpczero": lambda number: lion(states[number], DECAY, on_device),
            "torch": lambda number: lion_reference(states[number], DECAY, on_device),
        },
    )


def _layer(
    name: str, own: Callable[..., Any], theirs: Callable[..., Any], inputs: str, direction: str
) -> Callable[[Setting], Work]:
    """`inputs`: x [samples, rows, columns], c [columns], b [samples, rows, 2, columns], h
    [samples, rows, heads, 128].
    """

    def make(setting: Setting) -> Work:
        samples, rows, columns = setting.shape
        shapes = {
            "x": (samples, rows, columns),
            "c": (columns,),
            "b": (samples, rows, 2, columns),
            "h": (samples, rows, -(-columns // 128), 128),
        }
        given = [
            [each.requires_grad_() for each in setting.drawn(*shapes[kind])] for kind in inputs
        ]
        of = [list(each) for each in zip(*given, strict=True)]
        outputs = _listed(theirs(*of[0]))
        read, written = (
            sum(tensor.nbytes for tensor in of[0]),
            sum(tensor.nbytes for tensor in outputs),
        )
        if direction == "forward":
            runs = {
                kind: _forward(function, of)
                for kind, function in _contenders(setting, own, theirs).items()
            }
            return Work(f"{name}, forward", read + written, _ours_if_any(name, setting, runs))
        above = [[torch.randn_like(out) for out in outputs] for _ in range(setting.sets)]
        saved = (
            of[0][0].nbytes if name not in ("dropout", "rotary") else 0
        )  # what there is of forward that backward needs
        bytes_ = written + saved + sum(tensor.nbytes for tensor in of[0][:1])
        runs = {
            kind: _backward(function, of, above)
            for kind, function in _contenders(setting, own, theirs).items()
        }
        return Work(f"{name}, backward", bytes_, _ours_if_any(name, setting, runs))

    return make


def _listed(made: Any) -> list[Tensor]:
    return list(made) if isinstance(made, tuple) else [made]


def _forward(function: Callable[..., Any], of: list[list[Tensor]]) -> Run:
    def run(number: int) -> None:
        with torch.no_grad():
            function(*of[number])

    return run


def _backward(
    function: Callable[..., Any], of: list[list[Tensor]], above: list[list[Tensor]]
) -> Run:
    outputs = [_listed(function(*each)) for each in of]
    return lambda number: torch.autograd.grad(
        outputs[number], of[number], above[number], retain_graph=True
    )


def _contenders(
    setting: Setting, own: Callable[..., Any], theirs: Callable[..., Any]
) -> dict[str, Callable[..., Any]]:
    compiled = {"torch.compile": torch.compile(theirs, dynamic=False)} if setting.compiles else {}
    return {"hpczero": own, "torch": theirs, **compiled}


def _compared(setting: Setting, own: Run, torchs: Run) -> dict[str, Run]:
    compiled = {"torch.compile": torch.compile(torchs, dynamic=False)} if setting.compiles else {}
    return {"hpczero": own, "torch": torchs, **compiled}


def _ours_if_any(operation: str, setting: Setting, runs: dict[str, Run]) -> dict[str, Run]:
    """Without ours where it is PyTorch's."""
    key = "norm" if "layer_norm" in operation else operation.partition(" ")[0]
    ours = dispatch.choose(key, torch.empty(0, dtype=setting.dtype, device=setting.device))
    return {name: run for name, run in runs.items() if name != "hpczero" or ours != dispatch.TORCH}


def _turning(rotary: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    def turned(x: Tensor) -> Tensor:
        return rotary(x, *_angles(x.shape[1], x.shape[-1], x.device))

    return turned


@lru_cache
def _angles(positions: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return angles(torch.arange(positions, device=device), head_dim)


def _dropping(dropout: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def dropped(x: Tensor, residual: Tensor) -> Tensor:
        return dropout(
            x,
            0.1,
            1234,
            torch.zeros(x.shape[0], dtype=torch.int64, device=x.device),
            None,
            residual,
        )

    return dropped


def _cross_entropy(setting: Setting) -> Work:
    """Forward and backward at once, as the gradient takes the logits' place; it serves as logits
    the next time.
    """
    columns = 12 * setting.columns + 1
    rows = max(1, setting.elements // columns)
    logits = [each.requires_grad_() for each in setting.drawn(rows, columns)]
    targets = torch.randint(columns, (rows,), device=setting.device)

    def both(function: Callable[..., Tensor]) -> Run:
        return lambda number: torch.autograd.grad(function(logits[number], targets), logits[number])

    own, theirs = operations.AUTO.cross_entropy, operations.PYTORCH.cross_entropy
    runs = {name: both(function) for name, function in _contenders(setting, own, theirs).items()}
    bytes_ = 3 * rows * columns * setting.dtype.itemsize
    return Work(
        "cross-entropy, forward and backward", bytes_, _ours_if_any("cross_entropy", setting, runs)
    )
