"""`hpczero.initialize`: what trains any module in a training loop of one's own."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from hpczero import machine
from hpczero.comm.grid import Grid
from hpczero.comm.progress import Limits
from hpczero.comm.world import World
from hpczero.errors import HpczeroError, InputError
from hpczero.optim.learning_rate import learning_rate
from hpczero.parallel.parallelize import build_engine
from hpczero.parallel.user_module import layers_of, refuse_modules_that_differ
from hpczero.parallel.zero.engine import Engine, StepResult
from hpczero.parallel.zero.weights import DTYPES
from hpczero.planner.memory import bucket_bytes
from hpczero.planner.volumes import resolved
from hpczero.process_memory import keep_free_memory
from hpczero.spec.load import from_dict, load
from hpczero.spec.schema import Spec
from hpczero.train import setup
from hpczero.train.setup import select_device


def initialize(
    module: nn.Module,
    spec: Spec | str | Path | Mapping[str, Any],
    world: World | None = None,
    accumulates: bool = True,
) -> "Training":
    """Takes over the module's parameters: they lie in hpczero's memory from now on, in `train.precision`, cut as `zero.stage` says. Collective:
    every rank calls it with the same module; the values are rank 0's. Of the spec (rank 0's too) the tables model and data do not matter.

    Without `world` MPI is started, and ended by `close`; started without mpirun there is one rank. A `world` of all ranks is watched from now on,
    if it is not yet. `accumulates=False` saves memory where every step has one backward.
    """
    whole = world or World.start()
    spec = _agreed(spec, whole)
    own = (
        None
        if world
        else whole.part(
            range(whole.size),
            spec.comm.ranks_per_node,
            Limits(staging=bucket_bytes(spec.zero, "cpu")),
        )
    )
    if not whole.is_watched:
        whole.watch(spec.comm.timeout_s)
    inner = own or whole
    setup.use_kernels(inner)
    keep_free_memory()
    spec = select_device(inner, spec)
    grid = Grid.build(resolved(spec, inner.node_of_rank), inner.node_of_rank)
    layers = inner.run_on_all(lambda: [layer for _, layer in layers_of(module)])
    refuse_modules_that_differ(module, inner)
    given = sum(own.nbytes for own in module.parameters() if not own.is_meta)
    setup.refuse_what_does_not_fit(inner, _counted(spec, inner.size, accumulates), layers, given)
    engine = build_engine(module, spec, inner, grid, accumulates, setup.use_threads(inner))
    return Training(engine, spec, (own, whole) if own else ())


class Training:
    """A module in training: call it, then `backward` (once or more), then `step`. All of it is collective: every rank does the same.

    `rank` and `size`: the place of this process among those that train together; `dtype`: of the parameters; `device`: where they are, and
    the module's inputs must be; `steps` so far.
    """

    def __init__(self, engine: Engine, spec: Spec, worlds: tuple[World, ...]) -> None:
        """`worlds` end with it, in this order."""
        self.engine, self.spec, self.module = engine, spec, engine.module
        self.rank, self.size, self.dtype = (
            engine.axis.rank,
            engine.axis.size,
            DTYPES[spec.train.precision],
        )
        self.device = engine.device.torch
        self.steps = 0
        self._worlds = worlds
        self._open = True

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._opened()(*arguments, **named)

    def backward(self, loss: torch.Tensor, last: bool = False) -> None:
        """Adds the gradient of this rank's `loss`. A step follows the *sum* over all backwards and all ranks: for a mean, divide the loss. If
        the caller says which backward is the `last` of a step, stages 0 and 1 reduce while it goes on.
        """
        self._opened().backward(loss, last)

    def step(self, lr: float | None = None) -> StepResult:
        """Clips, and updates the parameters, at the spec's learning rate for this step if none is given. A gradient that is not finite is left
        out: the result says where it was.
        """
        result = self._opened().finish_step(
            learning_rate(self.spec, self.steps) if lr is None else lr
        )
        self.engine.weights_here()
        self.steps += 1
        return result

    def zero_grad(self) -> None:
        """Drop what the backwards since the last step have added, on all ranks.

        A batch can so be left out; after a backward that raised, training goes on with this alone.
        """
        self._opened().zero_grad()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """On rank 0 what the module's state_dict would be, whole tensors, parameters in fp32; empty on the other ranks."""
        return self._opened().full_state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Parameters and buffers become those that rank 0 gives, which must be all; the optimizer's moments stay as they are."""
        self._opened().load_state_dict(state)

    def gathered(
        self, parameters: Iterable[torch.Tensor], modify: bool = False
    ) -> AbstractContextManager[None]:
        """Inside, these parameters can be read as a whole, at every stage. With `modify`, what rank 0 has changed in them becomes everyone's at
        the end; what other ranks have changed is dropped.
        """
        return self._opened().gathered(parameters, modify)

    def close(self) -> None:
        """The end. The module is an ordinary one again; where the ranks had its parameters in parts (stage 3), or the
        node has no room for a copy on every rank, they are gone, and an error when they are read: take home before
        what is wanted of it (full_state_dict).
        """
        if self._open:
            self._open = False
            self.engine.close(machine.memory().usable)
            for world in self._worlds:
                world.close()

    def _opened(self) -> Engine:
        if not self._open:
            raise HpczeroError(
                "this engine is closed: all that it is asked for comes before close()"
            )
        return self.engine

    def __enter__(self) -> "Training":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """An error on one rank ends the job, as others may be waiting for it, where the world is this object's own."""
        if error is None:
            self.close()
        elif self._worlds:
            self._worlds[-1].__exit__(kind, error, trace)


def _agreed(spec: Spec | str | Path | Mapping[str, Any], world: World) -> Spec:
    """Rank 0's."""

    def read() -> str:
        if world.rank:
            return ""
        if isinstance(spec, Mapping):
            return from_dict(spec).spec.model_dump_json()
        return (spec if isinstance(spec, Spec) else load(spec).spec).model_dump_json()

    agreed = Spec.model_validate_json(world.broadcast_object(world.run_on_all(read)))
    parallel, family = agreed.parallel, 'with model.family = "package.module:factory"'
    problems = []
    if parallel.tensor > 1:
        problems.append(
            f"parallel.tensor = {parallel.tensor}: nothing says how the layers of this module are shared out; set it to 1"
        )
    if parallel.pipeline > 1:
        whole = "a loop of one's own runs the whole module, and a pipeline its stages, many micro-batches at a time"
        problems.append(
            f"parallel.pipeline = {parallel.pipeline}: {whole}; set it to 1, or train by `hpczero run` {family} (docs/any-model.md)"
        )
    if agreed.train.trace:
        problems.append(
            f"train.trace = true: traces are of the steps of `hpczero run` ({family}); set it to false in a loop of one's own"
        )
    if problems:
        raise InputError("; ".join(problems))
    return agreed


def _counted(spec: Spec, ranks: int, accumulates: bool) -> Spec:
    """As many micro-batches as the loop has backwards in a step, one or several: so its gradients are counted. Nothing more is known of its data."""
    unknown = spec.model.model_copy(update={"family": "module:factory", "seq_len": 1})
    train = spec.train.model_copy(
        update={"micro_batch": 1, "global_batch": (1 + accumulates) * ranks}
    )
    never = spec.checkpoint.model_copy(update={"every": -1})  # it saves nothing by itself
    return spec.model_copy(update={"model": unknown, "train": train, "checkpoint": never})
