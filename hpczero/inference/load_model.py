"""A model with a checkpoint's weights and nothing else: no gradients, no optimizer states."""

import socket
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpczero import device, kernel_cache, machine
from hpczero.checkpoint.directory import checkpoint_at
from hpczero.checkpoint.load import Checkpoint
from hpczero.comm.group import Group
from hpczero.device import Cuda, Device
from hpczero.errors import InputError
from hpczero.model import build, families
from hpczero.model.shapes import head_dim, kv_heads
from hpczero.parallel.layout import Slices, tensor_part
from hpczero.parallel.parallelize import apply_plan
from hpczero.parallel.tensor.linear import Residual
from hpczero.parallel.zero.weights import DTYPES
from hpczero.spec.model import Model
from hpczero.text import format_bytes, printable


def open_checkpoint(path: str, step: int | None) -> Checkpoint:
    """Open a checkpoint of one of hpczero's own families."""
    checkpoint = Checkpoint.open(checkpoint_at(Path(path), step))
    try:
        model = checkpoint.model()
        if not families.known(model):
            raise InputError(
                f"{printable(path)} is of model.family = {printable(model.family, 100)}: only "
                "hpczero's own families can be built from a checkpoint alone; `hpczero ckpt "
                "export` writes the weights for other programs"
            )
        if model.masks:
            raise InputError(
                f"{printable(path)} is of model.family = {printable(model.family)}, which does not "
                "predict next tokens: `hpczero run` evaluates it as it trains, and `hpczero ckpt "
                "export --hf` writes it for other programs"
            )
    except InputError:
        checkpoint.close()
        raise
    return checkpoint


def device_of_process(wanted: str) -> Device:
    """Return the device of a process that is alone: `wanted` as in train.device."""
    seen = device.visible() if wanted != "cpu" else 0
    kind = device.choose_kind(wanted, [seen], [socket.gethostname()])
    chosen = device.device_of_rank(kind, 0, 1)
    if isinstance(chosen, Cuda):
        kernel_cache.load_gpu_kernels(chosen.capability)
    return chosen


def precision_of(checkpoint: Checkpoint, wanted: str | None, on: Device) -> torch.dtype:
    """Return the number format that is wanted, or that of the run; CPUs take fp32 for fp16."""
    train = checkpoint.content.spec.get("train")
    of_run = train.get("precision") if isinstance(train, dict) else None
    name = wanted or (of_run if of_run in DTYPES else "bf16")
    return DTYPES["fp32" if name == "fp16" and on.kind == "cpu" and not wanted else name]


def cache_bytes(model: Model, tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of so many tokens."""
    return 2 * model.layers * kv_heads(model) * head_dim(model) * tokens * dtype.itemsize


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    on: Device,
    tensor: Group | None = None,
    beside: int = 0,
    neighbours: int = 1,
) -> Any:
    """Build the model with the checkpoint's weights, one tensor at a time.

    `tensor`: the ranks that share it; each reads its own part. `beside`: bytes that are needed
    besides. `neighbours`: processes that do the same in this computer's memory.
    """
    model = checkpoint.model()
    module: nn.Module = build.on_meta(model)
    described = families.layers(model)
    if tensor:
        layers = list(zip(module.layers(), described, strict=True))  # type: ignore[operator]
        apply_plan(layers, families.family(model), Residual(tensor, sequence_parallel=False))
    ranks, rank = (tensor.size, tensor.rank) if tensor else (1, 0)
    parts = {
        parameter.name: tensor_part(parameter, ranks, rank)
        for layer in described
        for parameter in layer.parameters
    }
    _refuse_without_room(parts, dtype, on, beside, neighbours)
    loaded = {}
    for name, held in parts.items():
        values = torch.from_numpy(checkpoint.read(0, name, held))
        loaded[name] = nn.Parameter(values.to(on.torch, dtype), requires_grad=False)
    build.install_parameters(module, loaded)
    return module.eval()


def _refuse_without_room(
    parts: dict[str, Slices], dtype: torch.dtype, on: Device, beside: int, neighbours: int
) -> None:
    sizes = [prod(part.stop - part.start for part in held) for held in parts.values()]
    weights = sum(sizes) * dtype.itemsize
    memory = on.memory()
    if memory:
        free, place = memory.free, on.name
    else:
        weights += max(sizes) * 4  # as it is read
        free, place = machine.memory().usable // neighbours, "this computer's memory"
        place += f" for each of {neighbours} ranks" if neighbours > 1 else ""
    if weights + beside > free:
        raise InputError(
            f"the weights need {format_bytes(weights)}, what is computed with them "
            f"{format_bytes(beside)}, and {format_bytes(free)} are free in {place}: a smaller "
            "--batch needs less, and --precision bf16 half of fp32"
        )
