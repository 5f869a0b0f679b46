"""Measured rates of a rank's own work: products, attention, passes through memory, launches.

All ranks of a node compute at once, each on its share of the cores, as they do when they train. A
case that does not fit into the time left is left out; cases of all sizes come early.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hpczero.calibrate.findings import AttentionTiming, ProductTiming, Timing
from hpczero.calibrate.fits import TimedProduct
from hpczero.calibrate.turns import Action, Turns
from hpczero.device import Device
from hpczero_kernels.operations import AUTO

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHAPES = (  # m, n, k of forward products, by 64 on CPUs and by 512 on GPUs
    *((8, 8, 8), (1, 1, 1), (4, 4, 4), (2, 16, 16), (16, 16, 1), (2, 2, 2), (16, 1, 16)),
    *((8, 32, 8), (8, 8, 32), (16, 16, 16), (1, 16, 16), (2, 2, 16), (8, 1, 1), (1, 8, 8)),
)
_HEAD_DIM, _HEADS = 64, 8
_KEYS = (256, 1024, 512, 128, 2048)
_LAUNCHES = 5  # of a link of the chain: a product and an activation, and three in backward
_CHAIN = 8


def precisions(device: Device) -> tuple[str, ...]:
    """Return the precisions to measure: fp16 of a CPU is not one that models are trained in."""
    if device.kind == "cpu":
        return ("bf16", "fp32")
    return ("bf16", "fp16", "fp32") if torch.cuda.is_bf16_supported() else ("fp16", "fp32")


def products(turns: Turns, precision: str) -> list[ProductTiming]:
    """Time products and both products of their backward. Collective.

    What a call takes on nearly nothing is subtracted on CPUs, as it is counted as a launch; a
    product in which it is more than half is left out.
    """
    device = turns.world.device
    unit = 64 if device.kind == "cpu" else 512
    call = turns.of(_multiply(8, 8, 8, device, DTYPES[precision])[0]).median
    found: list[ProductTiming] = []
    for m, n, k in ((unit * a, unit * b, unit * c) for a, b, c in _SHAPES):
        if turns.is_over() and found:
            break
        sizes = ((m, n, k), (m, k, n), (k, n, m))
        actions = _multiply(m, n, k, device, DTYPES[precision])
        for shape, action in zip(sizes, actions, strict=True):
            timing = turns.of(action)
            if timing.median > 2 * call or not found:
                own = timing.median - (call if device.kind == "cpu" else 0.0)
                product = TimedProduct(*shape, max(own, timing.median / 2))
                found.append(ProductTiming(product, timing))
    return found


def _multiply(m: int, n: int, k: int, device: Device, dtype: torch.dtype) -> tuple[Action, ...]:
    """Return forward's product as a linear layer makes it, and the two of its backward."""
    x, weight, gradient = (
        torch.randn(shape, dtype=torch.float32, device=device.torch).to(dtype)
        for shape in ((m, k), (n, k), (m, n))
    )
    y, to_x, to_weight = torch.empty_like(gradient), torch.empty_like(x), torch.empty_like(weight)
    return (
        lambda: torch.mm(x, weight.t(), out=y),
        lambda: torch.mm(gradient, weight, out=to_x),
        lambda: torch.mm(gradient.t(), x, out=to_weight),
    )


def attention(turns: Turns, precision: str) -> list[AttentionTiming]:
    """Time causal attention forward and backward, by the kernels that models use. Collective."""
    device = turns.world.device
    tokens = 1024 if device.kind == "cpu" else 16384
    found: list[AttentionTiming] = []
    for keys in _KEYS:
        if turns.is_over() and found:
            break
        samples = max(1, tokens // keys)
        shape = samples, _HEADS, keys, _HEAD_DIM
        inputs = [
            torch.randn(shape, dtype=torch.float32, device=device.torch)
            .to(DTYPES[precision])
            .requires_grad_()
            for _ in range(3)
        ]
        visible = (keys + 1) / 2
        operations = 4 * samples * _HEADS * keys * visible * _HEAD_DIM
        result = AUTO.attention(*inputs)
        gradient = torch.ones_like(result)

        def forward(inputs: Sequence[Tensor] = inputs) -> None:
            AUTO.attention(*inputs)

        def backward(
            result: Tensor = result, inputs: Sequence[Tensor] = inputs, out: Tensor = gradient
        ) -> None:
            torch.autograd.grad(result, inputs, out, retain_graph=True)

        found.append(AttentionTiming(keys, "forward", operations, turns.of(forward)))
        found.append(AttentionTiming(keys, "backward", 2.5 * operations, turns.of(backward)))
    return found


def launch(turns: Turns) -> Timing:
    """Time an operation on nearly nothing, as the host starts it in a model. Collective."""
    device = turns.world.device
    x = torch.randn(4, 16, dtype=torch.float32, device=device.torch, requires_grad=True)
    weight = torch.randn(16, 16, dtype=torch.float32, device=device.torch, requires_grad=True)

    def chain() -> None:
        stream = x
        for _ in range(_CHAIN):
            stream = AUTO.gelu(torch.nn.functional.linear(stream, weight))
        torch.autograd.grad(stream.sum(), (x, weight))

    whole = turns.of(chain, by_host=True)
    count = _CHAIN * _LAUNCHES
    return Timing(whole.low / count, whole.median / count, whole.high / count, whole.turns)
