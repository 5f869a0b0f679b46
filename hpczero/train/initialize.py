"""`hpczero.initialize`: training of any module, in a training loop of the user's own."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpczero import machine
from hpczero.comm.world import World, is_stop, leave
from hpczero.errors import HpczeroError, InputError
from hpczero.model.shapes import Layer
from hpczero.optim.elementwise import Make
from hpczero.optim.groups import first_matches
from hpczero.optim.learning_rate import learning_rate
from hpczero.parallel.parallelize import CutModule, EngineContext, build_engine
from hpczero.parallel.tensor.heads import Column
from hpczero.parallel.tensor.user_plan import Cuts, TensorPlan, cuts_of, described
from hpczero.parallel.user_module import layers_of, refuse_modules_that_differ
from hpczero.parallel.zero.engine import Engine, StepResult
from hpczero.parallel.zero.update_plan import EMPTY, UpdatePlan, UpdateWanted, plan_update
from hpczero.parallel.zero.weights import DTYPES
from hpczero.spec.load import from_dict, load
from hpczero.spec.rules import memory_of_blocks
from hpczero.spec.schema import Spec
from hpczero.text import toml_repr
from hpczero.train import preflight, setup
from hpczero.train.arguments import rate_of, refuse_what_differs
from hpczero.train.loop_state import Position
from hpczero.train.memory_account import expect
from hpczero.train.own_run import OwnRun
from hpczero.train.rank_states import Generators

__all__ = ["Column", "Training", "initialize"]


def initialize(
    module: nn.Module,
    spec: Spec | str | Path | Mapping[str, Any],
    world: World | None = None,
    accumulates: bool = True,
    optimizer: str | Make | None = None,
    optimizer_options: Mapping[str, Any] = EMPTY,
    groups: Mapping[str, Mapping[str, Any]] = EMPTY,
    average: float | None = None,
    tensor_plan: TensorPlan | None = None,
) -> "Training":
    """Hand a module's parameters to an engine. Collective: every rank passes the same module.

    From now on the parameters lie in hpczero's memory, in `train.precision`, sharded by
    `zero.stage`, with rank 0's values. The spec is rank 0's; its tables model and data are ignored.

    Without `world`, MPI is started here and ended by `close`; a program started without mpirun has
    one rank. A `world` must have all ranks, and the watchdog watches it from now on.
    `accumulates=False` saves memory where every step has one backward.

    `optimizer`: a class of torch.optim, its name, or a function (groups, lr=...) that makes one;
    `optimizer_options` are its arguments; None: AdamW as the spec says. `groups`: pattern of names
    -> options of these parameters, the first match counts. `average`: the decay of a moving average
    of the weights. `tensor_plan`: roles of modules among tensor ranks (docs/tensor-plans.md).
    """
    started = world or World.start()
    spec = spec_of_all(spec, started)
    wanted = started.run_on_all(lambda: UpdateWanted(optimizer, optimizer_options, groups, average))
    _refuse_what_differs(started, wanted, accumulates, tensor_plan)
    if problems := _problems(spec, tensor_plan is not None):
        raise InputError("; ".join(problems))
    inner = world or setup.training_world(started, spec)
    if not started.is_watched:
        started.watch(spec.comm.timeout_s)
    spec, grid = setup.prepare(inner, spec)
    preflight.check_folder(inner, spec)
    layers = inner.run_on_all(lambda: layers_of(module))
    refuse_modules_that_differ(module, inner)
    cuts = None if tensor_plan is None else _cuts(tensor_plan, module, spec, inner)
    layers = cuts.apply(layers) if cuts else layers
    parameters = [layer for _, layer in layers]
    update = _planned(wanted, spec, parameters, inner)
    counted = _counted(spec, grid.size("data"), accumulates)
    preflight.fit_to_memory(inner, counted, parameters, module, update.memory)
    threads = setup.share_cores(inner, grid.sharing_layers(inner.rank))
    context = EngineContext(spec, inner, grid, accumulates, threads, update)
    engine, cut = build_engine(module, layers, context, cuts)
    run = OwnRun(spec, inner, grid, engine, expect(inner, counted, grid, parameters, update.memory))
    return Training(engine, run, () if world else (inner, started), cut)


class Training:
    """A module in training: call it, then `backward` (once or more), then `step`, on every rank.

    `rank` and `size`: of this process among those that have samples of their own (a group of tensor
    ranks has one number); `is_first`: on one process of all. `dtype` and `device`: of the
    parameters (the module's inputs must be on this device); `steps`: done so far.
    """

    def __init__(
        self, engine: Engine, run: OwnRun, worlds: tuple[World, ...], cut: CutModule | None = None
    ) -> None:
        """`worlds` are closed by `close`, in this order."""
        self.engine = engine
        self.spec = spec = run.spec
        self.module = engine.module
        self.rank = engine.axis.group.rank
        self.size = engine.axis.group.size
        self.is_first = run.world.rank == 0
        self.dtype = DTYPES[spec.train.precision]
        self.device = engine.device.torch
        self.steps = 0
        self.run = run
        self._worlds = worlds
        self._cut = cut
        self._open = True

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._opened()(*arguments, **named)

    def checkpoint(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a function of the module, whose activations are computed again in backward.

        Its inputs alone are kept. Random numbers are drawn alike (dropout); it must compute the
        same both times.
        """
        self._opened()
        return checkpoint(function, *arguments, use_reentrant=False, **named)

    def backward(self, loss: torch.Tensor, last: bool = False) -> None:
        """Add the gradient of this rank's `loss`.

        A step follows the *sum* over all backwards and all ranks: for a mean, divide the loss.
        With `last` for the last backward of a step, stages 0 and 1 reduce gradients during it.
        """
        self._opened().backward(loss, last)

    def step(self, lr: float | Mapping[str, float] | None = None) -> StepResult:
        """Clip the gradients and update the parameters; `lr` defaults to the spec's for this step.

        Groups with a rate of their own follow: it is scaled as `lr` is to `optimizer.lr`. A mapping
        gives parameters by pattern their rates of this step, and the others follow the spec.
        A step whose gradient is not finite updates nothing: the result says where it was.
        """
        engine = self._opened()
        own_lr: Mapping[str, float] = EMPTY
        if isinstance(lr, Mapping):
            matches = first_matches(lr, engine.names, "step(lr=...)")
            own_lr = {name: rate_of(lr[pattern]) for name, pattern in matches.items()}
        if lr is None or isinstance(lr, Mapping):
            lr = learning_rate(self.spec, self.steps)
        lr = rate_of(lr)
        result = engine.finish_step(lr, own_lr)
        engine.wait_for_weights()
        self.steps += 1
        self.run.changes += 1
        self.run.stepped(self.steps, lr, result)
        return result

    # -- checkpoints (docs/your-loop.md)

    def resume(self, random: Generators | None = None) -> Position:
        """Go on from the run's newest checkpoint, or from the one that the spec names.

        The run is `<output>/<name>` of the spec. Return what was saved as `extra`, and the step
        (`self.steps`); it is 0 where the run begins. `random`: generators, by the names under which
        they were saved; on the same grid of ranks they get their states back.
        """
        self._opened()
        position = self.run.resume(random)
        self.steps = position.step
        return position

    def load(
        self, path: str | Path, weights_only: bool = False, random: Generators | None = None
    ) -> Position:
        """Load a checkpoint, of any grid, or the newest one in a run's directory.

        With `weights_only` moments and counters begin anew; the step is 0. After an error the
        engine's states are undefined: load another one, or end.
        """
        self._opened()
        position = self.run.load(path, weights_only, random)
        self.steps = position.step
        return position

    def save(
        self,
        extra: Mapping[str, Any] | None = None,
        random: Generators | None = None,
        folder: str | Path | None = None,
        step: int | None = None,
        wait: bool = False,
    ) -> None:
        """Save a checkpoint of this step (default: `self.steps`) in the run's directory.

        `extra`: rank 0's numbers, text, tensors, and lists and tables of them. `random`: generators
        by name, of which the state on each rank is saved. The spec's [checkpoint] says how many are
        kept, and if this returns as soon as there is a copy of the states; with `wait`, or in
        another `folder`, it returns when all is on the disk.
        """
        self._opened()
        self.run.save(self.steps if step is None else step, extra, random, folder, wait)

    def is_due(self) -> bool:
        """Return True if `checkpoint.every` of the spec asks for a checkpoint of this step."""
        every = self.spec.checkpoint.every
        return every > 0 and self.steps > 0 and self.steps % every == 0

    def should_stop(self) -> str:
        """Return why the loop is to end now ("" if it is not), on all ranks alike.

        SIGTERM, SIGINT, SIGUSR2, a file `stop` in the run's directory, or the end of the job's time
        is near. The first call begins to listen.
        """
        self._opened()
        return self.run.should_stop()

    def stop(
        self, extra: Mapping[str, Any] | None = None, random: Generators | None = None
    ) -> NoReturn:
        """Save a checkpoint, unless there is one of this step and values, close, and leave.

        The program's exit code is 75: a job that is to be continued. Where the checkpoint could not
        be saved (checkpoint.on_error = "continue") it ends with an HpczeroError.
        """
        reason = self.should_stop() or "the loop asked for it"
        if not self.run.save_at_end(self.steps, extra, random):
            problem = f"no checkpoint of step {self.steps} could be saved at the end ({reason})"
            self.run.end(self.steps, "failed", problem)
            raise HpczeroError(problem)
        self._close("stopped", reason)
        leave()

    def zero_grad(self) -> None:
        """Drop the gradients that the backwards since the last step have added, on all ranks.

        Call it to leave out a batch, and always after a backward that raised.
        """
        self._opened().zero_grad()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the module's state_dict where `is_first`: whole tensors, parameters in fp32.

        It is empty on the other ranks.
        """
        return self._opened().full_state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load rank 0's parameters and buffers, which must be all of them.

        The optimizer's moments stay as they are; an average of the weights begins anew.
        """
        self.run.changes += 1
        self._opened().load_state_dict(state)

    def come_together(self) -> None:
        """Give replicas that train apart (optimizer.outer) the mean of theirs, at a loop's end."""
        self.run.changes += 1
        self._opened().come_together()

    def gathered(
        self, parameters: Iterable[torch.Tensor], modify: bool = False
    ) -> AbstractContextManager[None]:
        """Gather these parameters: inside the context they can be read as a whole, at every stage.

        With `modify`, all ranks get rank 0's changes at the end; other ranks' changes are dropped.
        """
        self.run.changes += modify
        return self._opened().gathered(parameters, modify)

    def averaged(self) -> AbstractContextManager[None]:
        """Have the moving average of the weights for the weights inside the context.

        Forwards, `gathered` and `full_state_dict` see it; `backward`, `step` and what writes
        weights are errors inside.
        """
        return self._opened().averaged()

    def close(self) -> None:
        """End the training; the module is an ordinary one again.

        Its parameters are gone, and raise an error when read, if they were sharded (stage 3) or the
        node has no room for a copy on every rank: call `full_state_dict` before.
        """
        self._close("finished")

    def _close(self, state: str, reason: str = "") -> None:
        if self._open:
            self._open = False
            with ExitStack() as closing:  # all is closed also where a save or a step has failed
                for world in reversed(self._worlds):
                    closing.callback(world.close)
                closing.callback(self.run.let_go)
                closing.callback(self.engine.close, machine.memory().usable)
                if self._cut:
                    closing.callback(self._cut.close)
                self.run.end(self.steps, state, reason)

    def refuse_closed(self) -> None:
        """Raise HpczeroError if the engine is closed."""
        if not self._open:
            raise HpczeroError("this engine is closed: call its methods before close()")

    def _opened(self) -> Engine:
        self.refuse_closed()
        self.engine.update.refuse_after_failure()
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
        if error is None or is_stop(error):
            self._close("finished" if error is None else "stopped")
        elif self._worlds and self._open:
            self._worlds[-1].__exit__(kind, error, trace)


def spec_of_all(spec: Spec | str | Path | Mapping[str, Any], world: World) -> Spec:
    """Return rank 0's spec, on all ranks. Collective."""

    def read() -> Spec:
        if isinstance(spec, Mapping):
            return from_dict(spec).spec
        return spec if isinstance(spec, Spec) else load(spec).spec

    return setup.agree_on_spec(world, read)


def _refuse_what_differs(
    world: World, wanted: UpdateWanted, accumulates: bool, plan: TensorPlan | None
) -> None:
    words = world.run_on_all(lambda: "None" if plan is None else described(plan))
    given = {"accumulates": str(accumulates), "tensor_plan": words} | wanted.described()
    refuse_what_differs(world, "hpczero.initialize", given)


def _cuts(plan: TensorPlan, module: nn.Module, spec: Spec, world: World) -> Cuts:
    """Return how the plan cuts the module; InputError on all ranks where it cannot. Collective."""
    tensor, sequence = spec.parallel.tensor, spec.parallel.sequence_parallel
    return world.run_on_all(lambda: cuts_of(module, plan, tensor, sequence))


def _problems(spec: Spec, has_plan: bool) -> list[str]:
    family = 'with model.family = "package.module:factory"'
    tensor, pipeline = spec.parallel.tensor, spec.parallel.pipeline
    problems = []
    if tensor > 1 and not has_plan:
        problems.append(
            f"parallel.tensor = {tensor}: nothing says how the layers of this module are shared "
            "out; give hpczero.initialize a tensor_plan (docs/tensor-plans.md), or set it to 1"
        )
    if pipeline > 1:
        problems.append(
            f"parallel.pipeline = {pipeline}: a loop of your own runs the whole module, not the "
            f"stages of a pipeline; set it to 1, or train by `hpczero run` {family} "
            "(docs/any-model.md)"
        )
    problems += [
        f"memory.{key} = {toml_repr(getattr(spec.memory, key))}: nothing is known of this module's"
        " blocks; leave it out, and run parts of it by engine.checkpoint"
        for key in memory_of_blocks(spec)
    ]
    if spec.train.trace:
        problems.append(
            f"train.trace = true: traces are of the steps of `hpczero run` ({family}); "
            "set it to false in a loop of your own"
        )
    return problems


def _planned(wanted: UpdateWanted, spec: Spec, layers: Sequence[Layer], world: World) -> UpdatePlan:
    """Plan the update; InputError on all ranks where it cannot be. Collective."""
    parameters = [parameter for layer in layers for parameter in layer.parameters]
    device = world.device.torch
    return world.run_on_all(lambda: plan_update(wanted, spec.optimizer, parameters, device))


def _counted(spec: Spec, ranks: int, accumulates: bool) -> Spec:
    """Return the spec by which memory is counted: nothing is known of the loop's data.

    `ranks`: of the data axis. Its micro-batches stand for a step's backwards, one or several.
    """
    unknown = spec.model.model_copy(update={"family": "module:factory", "seq_len": 1})
    train = spec.train.model_copy(
        update={"micro_batch": 1, "global_batch": (1 + accumulates) * ranks}
    )
    never = spec.checkpoint.model_copy(update={"every": -1})  # it saves nothing by itself
    return spec.model_copy(update={"model": unknown, "train": train, "checkpoint": never})
