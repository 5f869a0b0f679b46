"""`hpczero.initialize`: training of any module, in a training loop of the user's own."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from hpczero import machine
from hpczero.comm.world import World
from hpczero.errors import HpczeroError, InputError
from hpczero.optim.learning_rate import learning_rate
from hpczero.parallel.parallelize import CutModule, EngineContext, build_engine
from hpczero.parallel.tensor.heads import Column
from hpczero.parallel.tensor.user_plan import TensorPlan, cuts_of
from hpczero.parallel.user_module import layers_of, refuse_modules_that_differ
from hpczero.parallel.zero.engine import Engine, StepResult
from hpczero.parallel.zero.weights import DTYPES
from hpczero.spec.load import from_dict, load
from hpczero.spec.schema import Spec
from hpczero.train import setup

__all__ = ["Column", "Training", "initialize"]


def initialize(
    module: nn.Module,
    spec: Spec | str | Path | Mapping[str, Any],
    world: World | None = None,
    accumulates: bool = True,
    tensor_plan: TensorPlan | None = None,
) -> "Training":
    """Hand a module's parameters to an engine. Collective: every rank passes the same module.

    From now on the parameters lie in hpczero's memory, in `train.precision`, sharded by
    `zero.stage`, with rank 0's values. The spec is rank 0's; its tables model and data are ignored.

    Without `world`, MPI is started here and ended by `close`; a program started without mpirun has
    one rank. A `world` must have all ranks, and the watchdog watches it from now on.
    `accumulates=False` saves memory where every step has one backward. `tensor_plan`: the roles of
    the modules that `parallel.tensor` ranks share (docs/tensor-plans.md).
    """
    started = world or World.start()
    spec = _agreed(spec, started, tensor_plan is not None)
    created = None if world else setup.training_world(started, spec)
    if not started.is_watched:
        started.watch(spec.comm.timeout_s)
    inner = created or started
    spec, grid = setup.prepare(inner, spec)
    layers = inner.run_on_all(lambda: layers_of(module))
    refuse_modules_that_differ(module, inner)
    cuts = None
    if tensor_plan is not None:
        plan, parallel = tensor_plan, spec.parallel
        _refuse_plans_that_differ(plan, inner)
        cuts = inner.run_on_all(
            lambda: cuts_of(module, plan, parallel.tensor, parallel.sequence_parallel)
        )
        layers = cuts.apply(layers)
    counted = _counted(spec, grid.size("data"), accumulates)
    setup.fit_to_memory(inner, counted, [layer for _, layer in layers], module)
    context = EngineContext(spec, inner, grid, accumulates, setup.share_cores(inner))
    engine, cut = build_engine(module, context, cuts)
    return Training(engine, spec, (created, started) if created else (), cut)


class Training:
    """A module in training: call it, then `backward` (once or more), then `step`.

    All methods are collective: every rank calls the same.

    `rank` and `size`: of this process among those that train together; `dtype` and `device`: of the
    parameters (the module's inputs must be on this device); `steps`: done so far.
    """

    def __init__(
        self,
        engine: Engine,
        spec: Spec,
        worlds: tuple[World, ...],
        cut: CutModule | None = None,
    ) -> None:
        """`worlds` are closed by `close`, in this order."""
        self.engine = engine
        self.spec = spec
        self.module = engine.module
        self.rank = engine.axis.rank
        self.size = engine.axis.size
        self.dtype = DTYPES[spec.train.precision]
        self.device = engine.device.torch
        self.steps = 0
        self._worlds = worlds
        self._cut = cut
        self._open = True

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._opened()(*arguments, **named)

    def backward(self, loss: torch.Tensor, last: bool = False) -> None:
        """Add the gradient of this rank's `loss`.

        A step follows the *sum* over all backwards and all ranks: for a mean, divide the loss.
        With `last` for the last backward of a step, stages 0 and 1 reduce gradients during it.
        """
        self._opened().backward(loss, last)

    def step(self, lr: float | None = None) -> StepResult:
        """Clip the gradients and update the parameters; `lr` defaults to the spec's for this step.

        A step whose gradient is not finite updates nothing: the result says where it was.
        """
        lr = learning_rate(self.spec, self.steps) if lr is None else lr
        result = self._opened().finish_step(lr)
        self.engine.wait_for_weights()
        self.steps += 1
        return result

    def zero_grad(self) -> None:
        """Drop the gradients that the backwards since the last step have added, on all ranks.

        Call it to leave out a batch, and always after a backward that raised.
        """
        self._opened().zero_grad()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the module's state_dict on rank 0: whole tensors, parameters in fp32.

        It is empty on the other ranks.
        """
        return self._opened().full_state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load rank 0's parameters and buffers, which must be all of them.

        The optimizer's moments stay as they are.
        """
        self._opened().load_state_dict(state)

    def gathered(
        self, parameters: Iterable[torch.Tensor], modify: bool = False
    ) -> AbstractContextManager[None]:
        """Gather these parameters: inside the context they can be read as a whole, at every stage.

        With `modify`, all ranks get rank 0's changes at the end; other ranks' changes are dropped.
        """
        return self._opened().gathered(parameters, modify)

    def close(self) -> None:
        """End the training; the module is an ordinary one again.

        Its parameters are gone, and raise an error when read, if they were sharded (stage 3) or the
        node has no room for a copy on every rank: call `full_state_dict` before.
        """
        if self._open:
            self._open = False
            if self._cut:
                self._cut.close()
            self.engine.close(machine.memory().usable)
            for world in self._worlds:
                world.close()

    def _opened(self) -> Engine:
        if not self._open:
            raise HpczeroError("this engine is closed: call its methods before close()")
        return self.engine

    def __enter__(self) -> "Training":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; after an error on this rank, end the job if `initialize` started MPI.

        Other ranks may be waiting for this one.
        """
        if error is None:
            self.close()
        elif self._worlds:
            self._worlds[-1].__exit__(kind, error, trace)


def _agreed(spec: Spec | str | Path | Mapping[str, Any], world: World, has_plan: bool) -> Spec:
    """Return rank 0's spec; InputError on all ranks where a loop of one's own cannot follow it."""

    def read() -> Spec:
        if isinstance(spec, Mapping):
            return from_dict(spec).spec
        return spec if isinstance(spec, Spec) else load(spec).spec

    agreed = setup.agree_on_spec(world, read)
    if problems := _problems(agreed, has_plan):
        raise InputError("; ".join(problems))
    return agreed


def _refuse_plans_that_differ(plan: TensorPlan, world: World) -> None:
    """Raise InputError on all ranks unless they have the same plan. Collective."""
    plans = world.all_gather_objects([[pattern, str(how)] for pattern, how in plan.items()])
    for rank, other in enumerate(plans):
        if other != plans[0]:
            raise InputError(f"tensor_plan is not the same on rank 0 and on rank {rank}")


def _problems(spec: Spec, has_plan: bool) -> list[str]:
    family = 'with model.family = "package.module:factory"'
    tensor, pipeline = spec.parallel.tensor, spec.parallel.pipeline
    problems = []
    if tensor > 1 and not has_plan:
        problems.append(
            f"parallel.tensor = {tensor}: nothing says how the layers of this module are "
            "shared out; give hpczero.initialize a tensor_plan (docs/tensor-plans.md), or set it "
            "to 1"
        )
    if pipeline > 1:
        problems.append(
            f"parallel.pipeline = {pipeline}: a loop of your own runs the whole module, not the "
            "stages of a pipeline; set it to 1, or "
            f"train by `hpczero run` {family} (docs/any-model.md)"
        )
    if spec.train.trace:
        problems.append(
            f"train.trace = true: traces are of the steps of `hpczero run` ({family}); "
            "set it to false in a loop of your own"
        )
    return problems


def _counted(spec: Spec, ranks: int, accumulates: bool) -> Spec:
    """Return the spec by which memory is counted: nothing is known of the loop's data.

    `ranks`: of the data axis. Its micro-batches stand for the backwards of a step, one or several,
    which decide what memory the gradients take.
    """
    unknown = spec.model.model_copy(update={"family": "module:factory", "seq_len": 1})
    train = spec.train.model_copy(
        update={"micro_batch": 1, "global_batch": (1 + accumulates) * ranks}
    )
    never = spec.checkpoint.model_copy(update={"every": -1})  # it saves nothing by itself
    return spec.model_copy(update={"model": unknown, "train": train, "checkpoint": never})
