"""Who takes part in bench_step.py: the same model, batch, clipping and AdamW, trained by each
library as its documentation says.

Every contender begins with the same weights. fp32 master weights and bf16 arithmetic, unless its
name says otherwise. All but ours talk through torch.distributed with gloo.
"""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import nn

from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.model import build, families
from hpczero.model.batch import MicroBatch
from hpczero.parallel.parallelize import assemble
from hpczero.spec.schema import Spec


@dataclass(frozen=True)
class Job:
    spec: Spec
    world: World
    batch: MicroBatch

    @property
    def tokens(self) -> int:
        """Tokens of this rank in a step."""
        return self.batch.token_count


class Contender(Protocol):
    def step(self) -> float:
        """One training step on the job's batch; the mean loss of this rank's tokens before it."""

    def close(self) -> None:
        """Frees what garbage collection would not."""


@dataclass(frozen=True)
class Entry:
    """`peer`: needs torch.distributed. `trains`: its loss must follow the others'. `missing`:
    why it cannot take part here.
    """

    build: Callable[[Job], Contender]
    peer: bool = True
    trains: bool = True
    missing: str = ""


def entries() -> dict[str, Entry]:
    deepspeed = "" if find_spec("deepspeed") else "not installed (pip install deepspeed)"
    return {
        "floor": Entry(partial(Floor, "auto"), peer=False, trains=False),
        "floor-torch": Entry(partial(Floor, "torch"), peer=False, trains=False),
        "floor-memory": Entry(FloorAndMemory, peer=False, trains=False),
        **{f"ours-{stage}": Entry(partial(Ours, stage, False), peer=False) for stage in range(4)},
        **{
            f"ours-{stage}-shared": Entry(partial(Ours, stage, True), peer=False)
            for stage in range(4)
        },
        "ddp-autocast": Entry(partial(DistributedDataParallel, torch.float32)),
        "ddp-bf16": Entry(partial(DistributedDataParallel, torch.bfloat16)),
        "fsdp2": Entry(FullySharded),
        **{
            f"deepspeed-{stage}": Entry(partial(DeepSpeed, stage, False), missing=deepspeed)
            for stage in (1, 2, 3)
        },
        **{
            f"deepspeed-{stage}-own": Entry(partial(DeepSpeed, stage, True), missing=deepspeed)
            for stage in (1, 2, 3)
        },
    }


def materialised(spec: Spec, dtype: torch.dtype, kernels: str = "torch") -> nn.Module:
    """The model with its initial values, in plain memory of its own."""
    module = build.on_meta(spec.model.model_copy(update={"kernels": kernels}))
    parameters = {}
    for layer in families.layers(spec.model):
        for parameter in layer.parameters:
            values = torch.empty(parameter.shape, dtype=dtype)
            build.initial_values(parameter, spec.seed, 0, values)
            parameters[parameter.name] = nn.Parameter(values)
    build.install_parameters(module, parameters)
    return module


class Floor:
    """Forward and backward alone: each gradient is dropped as soon as it has been made. With
    hpczero's kernels, or PyTorch's as the peers.
    """

    def __init__(self, kernels: str, job: Job) -> None:
        self.job, self.module = job, materialised(job.spec, torch.bfloat16, kernels)
        for parameter in self.module.parameters():
            parameter.register_post_accumulate_grad_hook(drop)

    def step(self) -> float:
        loss = self.module(self.job.batch) / self.job.tokens
        loss.backward()
        return loss.item()

    def close(self) -> None:
        pass


class FloorAndMemory(Floor):
    """And after it, what any step with bf16 gradients and fp32 states must read and write, moved by
    PyTorch's plainest operations. Of the rank's share: two pieces of the gradient are read and
    their sum is written; it is read, the weights are written; master weights and both moments are
    read and written.
    """

    def __init__(self, job: Job) -> None:
        super().__init__("auto", job)
        own = (
            sum(parameter.numel() for parameter in self.module.parameters())
            // job.world.size
            // 4
            * 4
        )
        self.sum, self.piece, self.weights = (
            torch.zeros(own, dtype=torch.bfloat16).view(torch.int64) for _ in range(3)
        )
        self.states = [torch.zeros(own) for _ in range(3)]

    def step(self) -> float:
        loss = super().step()
        torch.bitwise_or(self.sum, self.piece, out=self.sum)
        for state in self.states:
            state.neg_()
        self.weights.copy_(self.sum)
        return loss


def drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


class Ours:
    def __init__(self, stage: int, shared: bool, job: Job) -> None:
        """InputError on every rank where the ranks do not allow it."""
        zero = job.spec.zero.model_copy(update={"stage": stage, "node_shared": shared})
        spec = job.spec.model_copy(update={"zero": zero})
        self.job = job
        self.engine = assemble(
            spec, job.world, Grid.build(spec.parallel, job.world.node_of_rank), accumulates=False
        ).engine

    def step(self) -> float:
        loss = self.engine(self.job.batch)
        self.engine.backward(loss / (self.job.tokens * self.job.world.size), last=True)
        self.engine.finish_step(self.job.spec.optimizer.lr)
        return loss.item() / self.job.tokens

    def close(self) -> None:
        self.engine.close()


class Peer:
    """The common part of the peers on torch's own optimizer: AdamW in its fused form, clipping
    by the global norm.
    """

    def __init__(self, job: Job, model: nn.Module) -> None:
        optimizer = job.spec.optimizer
        self.job, self.model = job, model
        options = {
            "lr": optimizer.lr,
            "betas": optimizer.betas,
            "eps": optimizer.eps,
            "fused": True,
        }
        self.optimizer = torch.optim.AdamW(decay_groups(model, optimizer.weight_decay), **options)

    def step(self) -> float:
        with self.precision():
            loss = self.model(self.job.batch) / self.job.tokens
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.job.spec.train.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def precision(self) -> Any:
        return nullcontext()

    def close(self) -> None:
        pass


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay is for matrices."""
    parameters = list(model.parameters())
    return [
        {
            "params": [parameter for parameter in parameters if parameter.dim() > 1],
            "weight_decay": weight_decay,
        },
        {
            "params": [parameter for parameter in parameters if parameter.dim() <= 1],
            "weight_decay": 0.0,
        },
    ]


class DistributedDataParallel(Peer):
    """Weights in `dtype`: fp32 with bf16 autocast, or bf16 alone (no master weights: half the
    states, and small updates are lost).
    """

    def __init__(self, dtype: torch.dtype, job: Job) -> None:
        from torch.nn.parallel import DistributedDataParallel as Wrapped

        self.autocast = dtype == torch.float32
        super().__init__(job, Wrapped(materialised(job.spec, dtype), gradient_as_bucket_view=True))

    def precision(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)


class FullySharded(Peer):
    """FSDP2 (`fully_shard`), a unit for each block; the tied embedding belongs to the root's."""

    def __init__(self, job: Job) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = materialised(job.spec, torch.float32)
        options = {
            "mesh": init_device_mesh("cpu", (job.world.size,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        }
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        super().__init__(job, model)


class DeepSpeed:
    """With torch's fused AdamW as all peers, or with the AdamW that it makes itself of its
    configuration.
    """

    def __init__(self, stage: int, own: bool, job: Job) -> None:
        import deepspeed

        deepspeed.logger.setLevel("ERROR")
        optimizer = job.spec.optimizer
        model = materialised(job.spec, torch.float32)
        groups = decay_groups(model, optimizer.weight_decay)
        settings = {"lr": optimizer.lr, "betas": optimizer.betas, "eps": optimizer.eps}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": job.spec.train.micro_batch,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": job.spec.train.grad_clip,
        }
        if own:
            config["optimizer"] = {"type": "AdamW", "params": settings}
        given = (
            {"model_parameters": groups}
            if own
            else {"optimizer": torch.optim.AdamW(groups, fused=True, **settings)}
        )
        self.job = job
        self.engine, *_ = deepspeed.initialize(
            model=model, config=config, dist_init_required=False, **given
        )

    def step(self) -> float:
        loss = self.engine(self.job.batch) / self.job.tokens
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def close(self) -> None:
        self.engine.destroy()


@contextmanager
def built(entry: Entry, job: Job) -> Iterator[Contender]:
    """The contender exists inside the block only; its memory is free for the next one."""
    contender = entry.build(job)
    try:
        with warnings.catch_warnings(
            action="ignore", category=FutureWarning
        ):  # torch's, of how peers call it: printed in every step
            yield contender
    finally:
        contender.close()
        del contender
        gc.collect()
