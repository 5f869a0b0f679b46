"""Refusing a job that does not fit into its nodes, and finding settings that would (pure)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, product
from math import prod

from hpczero.comm.grid import Grid
from hpczero.model.families import known, layer_count
from hpczero.model.shapes import Layer
from hpczero.planner.memory import needs_of_nodes, saves_behind
from hpczero.planner.needs import FILES, Hardware, NodeNeed, at_most, of_account
from hpczero.planner.placement import nodes_of_ranks, placements
from hpczero.planner.platform import CPUS, Platform
from hpczero.planner.volumes import resolved
from hpczero.spec.rules import contradictions
from hpczero.spec.schema import Spec
from hpczero.text import format_count, format_memory

RECOMPUTE = ("none", "selective", "block")  # the fastest first
_MOST_NODES = 64  # times as many as there are: more help nobody
_WORTH_SAYING = 50_000  # bytes of a kind that a message names
_KEPT_FREE = 2.5  # times the bytes that come and go in a step: measured, at most 2.1
_GB = 10**9


@dataclass(frozen=True)
class Bound:
    """`free` bytes for some ranks of some nodes together (node -> number of its ranks).

    `windows`: only their shared windows count. `memory`: only that of the "host" or "device" does,
    or only "files": the states that zero.offload puts there. `everywhere`: all ranks of all nodes
    share it, however many there are: a server's file system.
    """

    ranks: Mapping[int, int]
    free: int
    place: str  # "on n1", "in the cgroup /job on n1", "in /dev/shm of n1"
    windows: bool = False
    memory: str = "all"
    everywhere: bool = False


@dataclass(frozen=True)
class NodeLimits:
    """The number of ranks on each node, their bounds, and the kind of device they run on."""

    ranks_on_nodes: Mapping[int, int]
    bounds: tuple[Bound, ...]
    platform: Platform = CPUS

    @classmethod
    def planned(
        cls, ranks_on_nodes: Mapping[int, int], node: Hardware, platform: Platform
    ) -> "NodeLimits":
        """Return equal nodes, with a bound for each memory whose size is known: maybe none.

        The ranks of a node share its GPUs; if their number is unknown, each rank has its own.
        """
        bounds = []
        if platform.on_gpus and node.gpu_memory_gb:
            free = int(node.gpu_memory_gb * _GB)
            bounds += [
                Bound({one: node.ranks_on_gpu(count)}, free, "on a GPU", memory="device")
                for one, count in ranks_on_nodes.items()
            ]
        if node.memory_gb:
            memory, what = ("host", "in the memory of") if platform.on_gpus else ("all", "on")
            free = int(node.memory_gb * _GB)
            bounds += [
                Bound({one: count}, free, f"{what} a node", memory=memory)
                for one, count in ranks_on_nodes.items()
            ]
        return cls(ranks_on_nodes, tuple(bounds), platform)


@dataclass(frozen=True)
class Alternative:
    words: str
    spec: Spec
    limits: NodeLimits


@dataclass(frozen=True)
class Load:
    """The bytes that count against a bound."""

    bound: Bound
    size: int

    @property
    def fits(self) -> bool:
        return self.size <= self.bound.free


def refusal(spec: Spec, layers: Sequence[Layer], limits: NodeLimits) -> str | None:
    """Return why the job does not fit, and settings with which it would; None if it fits."""
    if not limits.bounds:
        return None
    heaviest = _heaviest(spec, layers, limits)
    if heaviest.fits:
        return None
    # Contradictions that the job itself has: the stand-in for a module of one's own may.
    already = {one.keys for one in contradictions(spec)}
    first_of_each = partial(_first_of_each, layers=layers, already=already)
    fitting = first_of_each(_sharding(spec, limits))
    stages = range(spec.zero.stage + 1, 4)
    if not any(
        _heaviest(_with(spec, "zero", stage=stage), layers, limits).fits for stage in stages
    ):
        one_axis = first_of_each(_one_axis(spec, limits))
        fitting += one_axis or first_of_each([_both_axes(spec, limits)])
    fitting += first_of_each([_fewer_ranks(spec, limits), _more_nodes(spec, limits)])
    fitting = fitting or first_of_each([_strongest(spec, limits)])
    way_out = (
        "nothing that can be set would fit here: use nodes with more memory, or a smaller model"
    )
    if fitting:
        way_out = f"would fit: {'; '.join(fitting)}"
    return f"{_complaint(spec, layers, limits, heaviest)}; {way_out}"


def ways_to_run(spec: Spec) -> Iterator[Spec]:
    """Yield what a spec leaves to be decided, as it may be decided, the fastest way first.

    A run may save without a copy of the states, while training waits; with memory.recompute =
    "auto" it may compute activations again.
    """
    decided = spec.memory.recompute
    for recompute in RECOMPUTE if decided == "auto" else (decided,):
        way = _with(spec, "memory", recompute=recompute)
        yield way
        if saves_behind(way):
            yield _with(way, "checkpoint", asynchronous=False)


def as_it_fits(spec: Spec, layers: Sequence[Layer], limits: NodeLimits) -> tuple[Spec, str | None]:
    """Return the first of the `ways_to_run` that is not refused, or the last one and why it is."""
    for way in ways_to_run(spec):
        problem = refusal(way, layers, limits)
        if problem is None:
            break
    return way, problem


def close_calls(spec: Spec, layers: Sequence[Layer], limits: NodeLimits) -> list[str]:
    """Return where the job fits by its own bytes, and may not by what allocators lose."""
    needs = needs_of_nodes(spec, layers, limits.ranks_on_nodes, limits.platform)
    calls = []
    for bound in limits.bounds:
        size = _load(bound, needs)
        most = size if bound.windows else at_most(size, bound.memory)
        if size <= bound.free < most:
            calls.append(
                f"{format_memory(size)} of {format_memory(bound.free)} {bound.place} are too close "
                f"to call: it may come to {format_memory(most)}"
            )
    return sorted(set(calls))


def is_tight(spec: Spec, layers: Sequence[Layer], limits: NodeLimits) -> bool:
    """Return True if a node might have no room for what malloc keeps free between tensors."""
    needs = needs_of_nodes(spec, layers, limits.ranks_on_nodes, limits.platform)
    return any(
        bound.free - _load(bound, needs) < _KEPT_FREE * _passing(bound, needs)
        for bound in limits.bounds
        if bound.memory in ("all", "host") and not bound.windows
    )


def _passing(bound: Bound, needs: Mapping[int, NodeNeed]) -> int:
    """Return the bytes of tensors that come and go in a step."""
    return sum(
        of_account(needs[node].node, bound.memory).get(kind, 0) * count // needs[node].ranks
        for node, count in bound.ranks.items()
        for kind in ("activations", "workspace")
    )


def kinds_in_words(sizes: Mapping[str, int]) -> str:
    """weights 1.2 GB, master 2.4 GB, ...: the largest first, without the negligible ones."""
    return ", ".join(
        f"{kind} {format_memory(size)}"
        for kind, size in sorted(sizes.items(), key=lambda item: -item[1])
        if size >= _WORTH_SAYING
    )


def _heaviest(spec: Spec, layers: Sequence[Layer], limits: NodeLimits) -> Load:
    """Return the load of the bound that is exceeded the most, or closest to being exceeded."""
    needs = needs_of_nodes(spec, layers, limits.ranks_on_nodes, limits.platform)
    loads = [Load(bound, _load(bound, needs)) for bound in limits.bounds]
    return max(loads, key=lambda load: load.size / max(1, load.bound.free))


def _load(bound: Bound, needs: Mapping[int, NodeNeed]) -> int:
    if bound.windows:
        return sum(needs[node].windows for node in bound.ranks)
    if bound.everywhere:
        return sum(need.of(need.ranks, bound.memory) for need in needs.values())
    return sum(needs[node].of(count, bound.memory) for node, count in bound.ranks.items())


def _complaint(spec: Spec, layers: Sequence[Layer], limits: NodeLimits, load: Load) -> str:
    bound = load.bound
    ranks = sum(load.bound.ranks.values())
    needed = (
        f"needs {format_memory(load.size)} {bound.place} ({format_count(ranks, 'rank')}), "
        f"where {format_memory(bound.free)} are available"
    )
    if bound.windows:
        gib = -(-load.size // (1 << 30)) + 1
        remount = f"mount -o remount,size={gib}g /dev/shm"
        larger = f"make it larger (docker: --shm-size={gib}g; else {remount})"
        return f"zero.node_shared {needed}: {larger}"
    if bound.memory == FILES:
        return f"zero.offload {needed}: name a folder with more room, or free some"
    node = next(iter(bound.ranks))
    needs = needs_of_nodes(spec, layers, limits.ranks_on_nodes, limits.platform)
    kinds = kinds_in_words(needs[node].fullest(bound.memory))
    return f"zero.stage = {spec.zero.stage} {needed} (each rank: {kinds})"


def _first_of_each(
    kinds: Iterable[Iterator[Alternative]], layers: Sequence[Layer], already: set[tuple[str, ...]]
) -> list[str]:
    """Return the first alternative of each kind that fits; each yields the mildest change first."""
    possible = (filter(partial(_is_possible, already=already), kind) for kind in kinds)
    return [words for kind in possible for words in islice(_fitting(kind, layers), 1)]


def _is_possible(alternative: Alternative, already: set[tuple[str, ...]]) -> bool:
    """Return False for a spec that the rules refuse, or that so many ranks cannot run.

    `already`: keys of contradictions that the job has without it.
    """
    spec = alternative.spec
    ranks = sum(alternative.limits.ranks_on_nodes.values())
    data, shards = ranks // (spec.parallel.tensor * spec.parallel.pipeline), spec.zero.shard_ranks
    divides = not isinstance(shards, int) or data % shards == 0
    return divides and already.issuperset(one.keys for one in contradictions(spec))


def _fitting(alternatives: Iterator[Alternative], layers: Sequence[Layer]) -> Iterator[str]:
    for alternative in alternatives:
        load = _heaviest(alternative.spec, layers, alternative.limits)
        if load.fits:
            yield f"{alternative.words} ({format_memory(load.size)})"


def _sharding(spec: Spec, limits: NodeLimits) -> Iterator[Iterator[Alternative]]:
    yield _sharing(spec, limits)
    yield _recomputing(spec, limits)
    yield _by_pieces(spec, limits)
    yield _offloading(spec, limits)
    for stage in range(spec.zero.stage, 4):
        yield _at_stage(spec, limits, stage)


def _one_axis(spec: Spec, limits: NodeLimits) -> Iterator[Iterator[Alternative]]:
    """Trade data ranks for tensor ranks, or for pipeline stages."""
    tensor = spec.parallel.tensor
    pipeline = spec.parallel.pipeline
    larger_tensor, larger_pipeline = _larger(spec, limits)
    yield _on_grids(spec, limits, [(size, pipeline) for size in larger_tensor])
    yield _on_grids(spec, limits, [(tensor, size) for size in larger_pipeline])


def _both_axes(spec: Spec, limits: NodeLimits) -> Iterator[Alternative]:
    return _on_grids(spec, limits, sorted(product(*_larger(spec, limits)), key=prod))


def _larger(spec: Spec, limits: NodeLimits) -> tuple[range, range]:
    """Return larger sizes of the tensor axis, whose ranks stay on a node, and of the pipeline."""
    if not known(spec.model):
        return range(0), range(0)
    tensor = range(spec.parallel.tensor + 1, max(limits.ranks_on_nodes.values()) + 1)
    return tensor, range(spec.parallel.pipeline + 1, layer_count(spec.model) + 1)


def _on_grids(
    spec: Spec, limits: NodeLimits, sizes: Iterable[tuple[int, int]]
) -> Iterator[Alternative]:
    """Yield the (tensor, pipeline) sizes that ranks and model allow, each at every ZeRO stage.

    With fewer data ranks the buffers of a high stage may take more than it saves.
    """
    ranks = sum(limits.ranks_on_nodes.values())
    for tensor, pipeline in (grid for grid in sizes if ranks % prod(grid) == 0):
        changed = _with(spec, "parallel", tensor=tensor, pipeline=pipeline)
        grid = {"tensor": tensor, "pipeline": pipeline}
        words = [
            f"parallel.{axis} = {size}"
            for axis, size in grid.items()
            if size != getattr(spec.parallel, axis)
        ]
        for stage in (*range(spec.zero.stage, 4), *range(spec.zero.stage)):
            also = [f"zero.stage = {stage}"] if stage != spec.zero.stage else []
            yield Alternative(
                " and ".join(words + also), _with(changed, "zero", stage=stage), limits
            )


def _strongest(spec: Spec, limits: NodeLimits) -> Iterator[Alternative]:
    """Yield several changes at once, from few to many."""
    small = _with(spec, "train", micro_batch=1)
    for stage in range(spec.zero.stage, 4):
        words = f"zero.stage = {stage}, train.micro_batch = 1"
        smallest = _with(small, "zero", stage=stage)
        for choice in _sharing(smallest, limits):
            yield replace(choice, words=f"{words} and {choice.words}")
    for choice in chain(*_one_axis(small, limits), _both_axes(small, limits)):
        yield replace(choice, words=f"train.micro_batch = 1 and {choice.words}")
    for choice in chain(_fewer_ranks(smallest, limits), _more_nodes(smallest, limits)):
        yield replace(choice, words=f"{words} and {choice.words}")


def _sharing(spec: Spec, limits: NodeLimits) -> Iterator[Alternative]:
    """Yield the other value of zero.node_shared, if it makes a difference."""
    node_of_rank = nodes_of_ranks(limits.ranks_on_nodes)
    grid = Grid.build(resolved(spec, node_of_rank), node_of_rank)
    places = list(chain.from_iterable(placements(spec, grid).values()))
    if not limits.platform.on_gpus and any(place.on_node > 1 for place in places):
        shared = not any(place.shared for place in places)
        changed = _with(spec, "zero", node_shared=shared)
        yield Alternative(f"zero.node_shared = {str(shared).lower()}", changed, limits)


def _recomputing(spec: Spec, limits: NodeLimits) -> Iterator[Alternative]:
    if known(spec.model):
        for recompute in RECOMPUTE[RECOMPUTE.index(spec.memory.recompute) + 1 :]:
            changed = _with(spec, "memory", recompute=recompute)
            yield Alternative(f'memory.recompute = "{recompute}"', changed, limits)


def _by_pieces(spec: Spec, limits: NodeLimits) -> Iterator[Alternative]:
    if known(spec.model) and not spec.memory.loss_chunk:
        words = 'memory.loss_chunk = "auto"'
        yield Alternative(words, _with(spec, "memory", loss_chunk="auto"), limits)


def _offloading(spec: Spec, limits: NodeLimits) -> Iterator[Alternative]:
    if not limits.platform.on_gpus and spec.zero.offload == "none":
        words = 'zero.offload = "nvme:FOLDER", master weights and moments in files'
        yield Alternative(words, _with(spec, "zero", offload="nvme:FOLDER"), limits)


def _at_stage(spec: Spec, limits: NodeLimits, stage: int) -> Iterator[Alternative]:
    """Yield the stage with the whole micro-batch, half of it, a quarter, ..."""
    sharded = _with(spec, "zero", stage=stage)
    size = spec.train.micro_batch
    words = [f"zero.stage = {stage}"] if stage != spec.zero.stage else []
    while size:
        smaller = [f"train.micro_batch = {size}"] if size != spec.train.micro_batch else []
        if words + smaller:
            changed = _with(sharded, "train", micro_batch=size)
            yield Alternative(" and ".join(words + smaller), changed, limits)
        size //= 2


def _fewer_ranks(spec: Spec, limits: NodeLimits) -> Iterator[Alternative]:
    """Yield half of the ranks on every node, a quarter, ..."""
    while max(limits.ranks_on_nodes.values()) > 1:
        bounds = tuple(replace(bound, ranks=_half(bound.ranks)) for bound in limits.bounds)
        limits = replace(limits, ranks_on_nodes=_half(limits.ranks_on_nodes), bounds=bounds)
        ranks = sum(limits.ranks_on_nodes.values())
        nodes = len(limits.ranks_on_nodes)
        if ranks % (spec.parallel.tensor * spec.parallel.pipeline) == 0:
            where = f" on the same {nodes} nodes" if nodes > 1 else ""
            yield Alternative(f"mpirun -n {ranks}{where}", spec, limits)


def _half(ranks: Mapping[int, int]) -> Mapping[int, int]:
    return {node: -(-count // 2) for node, count in ranks.items()}


def _more_nodes(spec: Spec, limits: NodeLimits) -> Iterator[Alternative]:
    """Yield twice as many such nodes, four times, ..."""
    nodes = len(limits.ranks_on_nodes)
    times = 2
    while times <= _MOST_NODES:
        more = {
            node + copy * nodes: count
            for node, count in limits.ranks_on_nodes.items()
            for copy in range(times)
        }
        words = f"{len(more)} such nodes with {sum(more.values())} ranks"
        yield Alternative(words, spec, replace(limits, ranks_on_nodes=more))
        times *= 2


def _with(spec: Spec, table: str, **changes: object) -> Spec:
    return spec.model_copy(update={table: getattr(spec, table).model_copy(update=changes)})
