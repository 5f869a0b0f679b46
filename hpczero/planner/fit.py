"""Whether a job fits into its nodes, and which settings would (pure)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from math import prod

from hpczero.comm.grid import Grid
from hpczero.model.shapes import Layer, known, layer_count
from hpczero.planner.memory import (
    CPUS,
    Hardware,
    NodeNeed,
    Platform,
    needs_of_nodes,
    placements,
    saves_behind,
)
from hpczero.planner.volumes import resolved
from hpczero.spec.rules import contradictions
from hpczero.spec.schema import Spec

_MOST_NODES = 64  # times as many as there are: more help nobody

_WORTH_SAYING = 50_000  # bytes
_GB = 10**9


@dataclass(frozen=True)
class Bound:
    """`free` bytes for these ranks together (node -> how many of its ranks). `windows`: for their shared windows alone; `part`: for "all" that they
    hold, or what is on the "host" or the "device" where these differ.
    """

    ranks: Mapping[int, int]
    free: int
    place: str  # "on n1", "in the cgroup /job on n1", "in /dev/shm of n1"
    windows: bool = False
    part: str = "all"


@dataclass(frozen=True)
class Site:
    """How many ranks each node has, what they must keep within, and on what kind of device they run."""

    ranks_on_nodes: Mapping[int, int]
    bounds: tuple[Bound, ...]
    platform: Platform = CPUS

    @classmethod
    def planned(
        cls, ranks_on_nodes: Mapping[int, int], node: Hardware, platform: Platform
    ) -> "Site":
        """Return alike nodes, with a bound for each memory whose size is known: maybe none.

        The ranks of a node are dealt out over its GPUs; of an unknown number each has one of its own.
        """
        bounds = []
        if platform.on_gpus and node.gpu_memory_gb:
            free = int(node.gpu_memory_gb * _GB)
            bounds += [
                Bound({one: node.ranks_on_gpu(count)}, free, "on a GPU", part="device")
                for one, count in ranks_on_nodes.items()
            ]
        if node.memory_gb:
            part, what = ("host", "in the memory of") if platform.on_gpus else ("all", "on")
            free = int(node.memory_gb * _GB)
            bounds += [
                Bound({one: count}, free, f"{what} a node", part=part)
                for one, count in ranks_on_nodes.items()
            ]
        return cls(ranks_on_nodes, tuple(bounds), platform)


@dataclass(frozen=True)
class Alternative:
    words: str
    spec: Spec
    site: Site


@dataclass(frozen=True)
class Load:
    """What a bound has to carry."""

    bound: Bound
    size: int

    @property
    def fits(self) -> bool:
        return self.size <= self.bound.free


def refusal(spec: Spec, layers: Sequence[Layer], site: Site) -> str | None:
    """Why the job does not fit, with all numbers and what would; None if it fits, or nothing binds it."""
    if not site.bounds:
        return None
    heaviest = _heaviest(spec, layers, site)
    if heaviest.fits:
        return None
    fitting = _first_of_each(_sharding(spec, site), layers)
    if not any(
        _heaviest(_with(spec, "zero", stage=stage), layers, site).fits
        for stage in range(spec.zero.stage + 1, 4)
    ):
        fitting += _first_of_each(_one_axis(spec, site), layers) or _first_of_each(
            [_both_axes(spec, site)], layers
        )
    fitting += _first_of_each([_fewer_ranks(spec, site), _more_nodes(spec, site)], layers)
    fitting = fitting or _first_of_each([_strongest(spec, site)], layers)
    nothing = (
        "nothing that can be set would fit here: use nodes with more memory, or a smaller model"
    )
    way_out = f"would fit: {'; '.join(fitting)}" if fitting else nothing
    return f"{_complaint(spec, layers, site, heaviest)}; {way_out}"


def final_refusal(spec: Spec, layers: Sequence[Layer], site: Site) -> str | None:
    """Return the `refusal` of a run that saves without a copy, while training waits, if it must."""
    refused = refusal(spec, layers, site)
    if refused and saves_behind(spec):
        return refusal(_with(spec, "checkpoint", asynchronous=False), layers, site)
    return refused


def in_words(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 10**9 else f"{size / 1e6:.1f} MB"


def kinds_in_words(sizes: Mapping[str, int]) -> str:
    """weights 1.2 GB, master 2.4 GB, ...: the largest first, without the kinds that there are none of."""
    return ", ".join(
        f"{kind} {in_words(size)}"
        for kind, size in sorted(sizes.items(), key=lambda item: -item[1])
        if size >= _WORTH_SAYING
    )


def _heaviest(spec: Spec, layers: Sequence[Layer], site: Site) -> Load:
    """The load of the bound that is exceeded the most, or nearest to it."""
    needs = needs_of_nodes(spec, layers, site.ranks_on_nodes, site.platform)
    loads = [Load(bound, _load(bound, needs)) for bound in site.bounds]
    return max(loads, key=lambda load: load.size / max(1, load.bound.free))


def _load(bound: Bound, needs: Mapping[int, NodeNeed]) -> int:
    return sum(
        needs[node].windows if bound.windows else needs[node].of(count, bound.part)
        for node, count in bound.ranks.items()
    )


def _complaint(spec: Spec, layers: Sequence[Layer], site: Site, load: Load) -> str:
    bound, ranks = load.bound, sum(load.bound.ranks.values())
    who, free = (
        (f"{ranks} ranks" if ranks > 1 else "1 rank"),
        f"{in_words(bound.free)} are available",
    )
    if bound.windows:
        gib = -(-load.size // (1 << 30)) + 1
        larger = f"make it larger (docker: --shm-size={gib}g; else mount -o remount,size={gib}g /dev/shm)"
        return f"zero.node_shared needs {in_words(load.size)} {bound.place} ({who}), where {free}: {larger}"
    node = next(iter(bound.ranks))
    needs = needs_of_nodes(spec, layers, site.ranks_on_nodes, site.platform)
    kinds = kinds_in_words(needs[node].fullest(bound.part))
    return f"zero.stage = {spec.zero.stage} needs {in_words(load.size)} {bound.place} ({who}), where {free} (each rank: {kinds})"


def _fitting(alternatives: Iterator[Alternative], layers: Sequence[Layer]) -> Iterator[str]:
    for alternative in alternatives:
        load = _heaviest(alternative.spec, layers, alternative.site)
        if load.fits:
            yield f"{alternative.words} ({in_words(load.size)})"


def _first_of_each(kinds: Iterable[Iterator[Alternative]], layers: Sequence[Layer]) -> list[str]:
    """What can be changed. Of each kind the first that fits is worth saying, so the mildest comes first."""
    return [words for alternatives in kinds for words in islice(_fitting(alternatives, layers), 1)]


def _sharding(spec: Spec, site: Site) -> Iterator[Iterator[Alternative]]:
    yield _sharing(spec, site)
    for stage in range(spec.zero.stage, 4):
        yield _at_stage(spec, site, stage)


def _one_axis(spec: Spec, site: Site) -> Iterator[Iterator[Alternative]]:
    """More tensor ranks, or more stages of a pipeline, in place of data ranks."""
    tensor, pipeline = spec.parallel.tensor, spec.parallel.pipeline
    larger_tensor, larger_pipeline = _larger(spec, site)
    yield _on_grids(spec, site, [(size, pipeline) for size in larger_tensor])
    yield _on_grids(spec, site, [(tensor, size) for size in larger_pipeline])


def _both_axes(spec: Spec, site: Site) -> Iterator[Alternative]:
    return _on_grids(spec, site, sorted(product(*_larger(spec, site)), key=prod))


def _larger(spec: Spec, site: Site) -> tuple[range, range]:
    """Sizes of tensor, whose ranks stay on a node, and of pipeline."""
    tensor, pipeline = spec.parallel.tensor, spec.parallel.pipeline
    if not known(spec.model):
        return range(0), range(0)
    return range(tensor + 1, max(site.ranks_on_nodes.values()) + 1), range(
        pipeline + 1, layer_count(spec.model) + 1
    )


def _on_grids(spec: Spec, site: Site, sizes: Iterable[tuple[int, int]]) -> Iterator[Alternative]:
    """Of these sizes of tensor and pipeline those that the ranks and the model allow, each at every stage: with fewer data ranks the buffers of a
    high one may take more than it saves.
    """
    ranks = sum(site.ranks_on_nodes.values())
    for tensor, pipeline in (grid for grid in sizes if ranks % prod(grid) == 0):
        changed = _with(spec, "parallel", tensor=tensor, pipeline=pipeline)
        if contradictions(changed):
            continue
        grid = {"tensor": tensor, "pipeline": pipeline}
        words = [
            f"parallel.{axis} = {size}"
            for axis, size in grid.items()
            if size != getattr(spec.parallel, axis)
        ]
        for stage in (*range(spec.zero.stage, 4), *range(spec.zero.stage)):
            also = [f"zero.stage = {stage}"] if stage != spec.zero.stage else []
            yield Alternative(" and ".join(words + also), _with(changed, "zero", stage=stage), site)


def _strongest(spec: Spec, site: Site) -> Iterator[Alternative]:
    """Several changes at once, from few to many."""
    for stage in range(spec.zero.stage, 4):
        words, smallest = (
            f"zero.stage = {stage}, train.micro_batch = 1",
            _with(_with(spec, "zero", stage=stage), "train", micro_batch=1),
        )
        for choice in _sharing(smallest, site):
            yield replace(choice, words=f"{words} and {choice.words}")
    small = _with(spec, "train", micro_batch=1)
    for choice in chain(*_one_axis(small, site), _both_axes(small, site)):
        yield replace(choice, words=f"train.micro_batch = 1 and {choice.words}")
    for choice in chain(_fewer_ranks(smallest, site), _more_nodes(smallest, site)):
        yield replace(choice, words=f"{words} and {choice.words}")


def _sharing(spec: Spec, site: Site) -> Iterator[Alternative]:
    node_of_rank = [
        node for node, count in sorted(site.ranks_on_nodes.items()) for _ in range(count)
    ]
    places = [
        place
        for found in placements(
            spec, Grid.build(resolved(spec, node_of_rank), node_of_rank)
        ).values()
        for place in found
    ]
    if not site.platform.on_gpus and any(place.on_node > 1 for place in places):
        shared = not any(place.shared for place in places)
        yield Alternative(
            f"zero.node_shared = {str(shared).lower()}",
            _with(spec, "zero", node_shared=shared),
            site,
        )


def _at_stage(spec: Spec, site: Site, stage: int) -> Iterator[Alternative]:
    """The stage as it is, with half the micro-batch, a quarter, ..."""
    sharded, size = _with(spec, "zero", stage=stage), spec.train.micro_batch
    words = [f"zero.stage = {stage}"] if stage != spec.zero.stage else []
    while size:
        smaller = [f"train.micro_batch = {size}"] if size != spec.train.micro_batch else []
        if words + smaller:
            yield Alternative(
                " and ".join(words + smaller), _with(sharded, "train", micro_batch=size), site
            )
        size //= 2


def _fewer_ranks(spec: Spec, site: Site) -> Iterator[Alternative]:
    """Half of the ranks on every node, a quarter, ..."""
    while max(site.ranks_on_nodes.values()) > 1:
        bounds = tuple(replace(bound, ranks=_half(bound.ranks)) for bound in site.bounds)
        site = replace(site, ranks_on_nodes=_half(site.ranks_on_nodes), bounds=bounds)
        ranks, nodes = sum(site.ranks_on_nodes.values()), len(site.ranks_on_nodes)
        if ranks % (spec.parallel.tensor * spec.parallel.pipeline) == 0:
            yield Alternative(
                f"mpirun -n {ranks}" + (f" on the same {nodes} nodes" if nodes > 1 else ""),
                spec,
                site,
            )


def _half(ranks: Mapping[int, int]) -> Mapping[int, int]:
    return {node: -(-count // 2) for node, count in ranks.items()}


def _more_nodes(spec: Spec, site: Site) -> Iterator[Alternative]:
    """Twice as many such nodes, four times, ..."""
    nodes, times = len(site.ranks_on_nodes), 2
    while times <= _MOST_NODES:
        more = {
            node + copy * nodes: count
            for node, count in site.ranks_on_nodes.items()
            for copy in range(times)
        }
        words = f"{len(more)} such nodes with {sum(more.values())} ranks"
        yield Alternative(words, spec, replace(site, ranks_on_nodes=more))
        times *= 2


def _with(spec: Spec, table: str, **changes: object) -> Spec:
    return spec.model_copy(update={table: getattr(spec, table).model_copy(update=changes)})
