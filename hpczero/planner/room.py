"""The memory of layouts on a cluster's nodes: what fits, and what is too close to call (pure).

The bytes are those of `planner.memory`. Of what ranks hold on a GPU the planner knows nothing of
CUDA's own share (`OF_CUDA`), nor of what the allocator loses between tensors, which measured runs
put below `MARGIN`: between the two a layout is too close to call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from hpczero.comm.grid import Grid
from hpczero.model.shapes import Layer
from hpczero.planner.allocation import Allocation
from hpczero.planner.memory import Parts
from hpczero.planner.needs import FILES, Hardware, Need, NodeNeed, at_most
from hpczero.planner.placement import Placement, placements
from hpczero.planner.platform import Platform, as_run
from hpczero.spec.schema import Spec

_GB = 10**9


@dataclass(frozen=True)
class Account:
    """Bytes of the fullest device, or node, and how many there are (0: unknown)."""

    name: str  # "device", "host", "all" or "files"
    size: int
    available: int

    @property
    def most(self) -> int:
        """The bytes that it may come to."""
        return at_most(self.size, self.name)

    @property
    def exceeds(self) -> bool:
        return 0 < self.available < self.size

    @property
    def may_exceed(self) -> bool:
        return 0 < self.available < self.most


@dataclass(frozen=True)
class Fit:
    """The memory of a layout in each account."""

    accounts: tuple[Account, ...]

    @property
    def verdict(self) -> str:
        """Return "fits", "too close to call" or "does not fit"."""
        if any(account.exceeds for account in self.accounts):
            return "does not fit"
        close = any(account.may_exceed for account in self.accounts)
        return "too close to call" if close else "fits"

    @property
    def first(self) -> Account:
        """The account of the device that ranks compute on."""
        return self.accounts[0]


@dataclass(frozen=True)
class _Kinds:
    """The placements of ranks that differ, and which of them each kind of node has.

    The first and the last stage come first: they tend to be the fullest.
    """

    places: tuple[Placement, ...]
    nodes: tuple[tuple[int, ...], ...]


class Room:
    """The memory of any layouts of one job on equal nodes."""

    def __init__(
        self, layers: Sequence[Layer], platform: Platform, node: Hardware, nodes: Allocation
    ) -> None:
        self.platform = platform
        self.node = node
        self.nodes = nodes
        self._parts = Parts(layers, platform)
        self._grids: dict[object, Grid] = {}
        self._places: dict[object, _Kinds] = {}
        self._kinds: dict[object, _Kinds] = {}

    def fit(self, spec: Spec) -> Fit:
        """Return the memory of a spec whose axes have a definite order."""
        spec = as_run(spec, self.platform.device)
        kinds = self._kinds_of_nodes(spec)
        return self._fit(spec, kinds, [self._parts.need(spec, place) for place in kinds.places])

    def may_fit(self, spec: Spec) -> Fit | None:
        """Return the memory of a spec; None if one rank alone exceeds its device, or its node."""
        spec = as_run(spec, self.platform.device)
        kinds = self._kinds_of_nodes(spec)
        name = self._names(spec)[0]
        available = self._available(name)
        needs = []
        for place in kinds.places:
            need = self._parts.need(spec, place)
            if need.rank_in[name] > available > 0:
                return None
            needs.append(need)
        return self._fit(spec, kinds, needs)

    def _fit(self, spec: Spec, kinds: _Kinds, needs: Sequence[Need]) -> Fit:
        nodes = [NodeNeed(tuple(needs[index] for index in kind)) for kind in kinds.nodes]
        return Fit(tuple(self._account(name, nodes) for name in self._names(spec)))

    def fullest(self, spec: Spec, account: str) -> tuple[Placement, dict[str, int]]:
        """Return where the rank with the most in an account is, and its bytes by kind."""
        spec = as_run(spec, self.platform.device)
        needs = [
            (place, self._parts.need(spec, place)) for place in self._kinds_of_nodes(spec).places
        ]
        place, need = max(needs, key=lambda each: each[1].rank_in[account])
        return place, NodeNeed((need,)).fullest(account)

    def _names(self, spec: Spec) -> list[str]:
        files = [FILES] if spec.zero.offload.startswith("nvme") else []
        return [*(("device", "host") if self.platform.on_gpus else ("all",)), *files]

    def _account(self, name: str, nodes: Sequence[NodeNeed]) -> Account:
        ranks = self.nodes.ranks_per_node
        counted = self.node.ranks_on_gpu(ranks) if name == "device" else ranks
        return Account(name, max(node.of(counted, name) for node in nodes), self._available(name))

    def _available(self, account: str) -> int:
        sizes = {"device": self.node.gpu_memory_gb, FILES: self.node.files_gb}
        return int(sizes.get(account, self.node.memory_gb) * _GB)

    def _kinds_of_nodes(self, spec: Spec) -> _Kinds:
        parallel, zero = spec.parallel, spec.zero
        grid = parallel.tensor, parallel.pipeline, parallel.order
        alike = parallel.chunks, parallel.sequence_parallel, spec.memory.recompute_every
        key = grid, alike, zero.stage == 3, zero.node_shared, zero.shard_ranks
        if key not in self._kinds:
            self._kinds[key] = self._count_kinds(spec)
        return self._kinds[key]

    def _placed(self, spec: Spec, grid: object) -> _Kinds:
        """Return the placements on each kind of node, one for each rank that shares nothing."""
        zero = spec.zero
        key = grid, zero.stage == 3, zero.node_shared, zero.shard_ranks
        if key not in self._places:
            if grid not in self._grids:
                self._grids[grid] = Grid.build(spec.parallel, self.nodes.node_of_rank)
            nodes = placements(spec, self._grids[grid]).values()
            index: dict[Placement, int] = {}
            numbered = [
                tuple(
                    index.setdefault(one, len(index))
                    for one in chain.from_iterable(map(_one_by_one, places))
                )
                for places in dict.fromkeys(map(tuple, nodes))
            ]
            self._places[key] = _Kinds(tuple(index), tuple(dict.fromkeys(numbered)))
        return self._places[key]

    def _count_kinds(self, spec: Spec) -> _Kinds:
        """Return the kinds of nodes; of those that are alike the one that needs the most.

        Nodes come in the order of the stages, and the first of alike stages needs the most.
        """
        parallel = spec.parallel
        last = parallel.pipeline - 1
        ranks, stages = self._parts.alike_ranks(spec), self._parts.alike_stages(spec)
        placed = self._placed(spec, (parallel.tensor, parallel.pipeline, parallel.order))
        own = [replace(place, tensor_rank=ranks[place.tensor_rank]) for place in placed.places]
        first: dict[Placement, int] = {}
        alike = [
            first.setdefault(replace(place, stage=stages[place.stage]), len(first)) for place in own
        ]
        nodes: dict[tuple[int, ...], tuple[int, ...]] = {}
        for on_node in placed.nodes:
            nodes.setdefault(tuple(alike[index] for index in on_node), on_node)
        wanted = {own[index] for on_node in nodes.values() for index in on_node}
        distinct = sorted(wanted, key=lambda place: (0 < place.stage < last, place.stage))
        number = {place: index for index, place in enumerate(distinct)}
        return _Kinds(
            tuple(distinct),
            tuple(tuple(number[own[index]] for index in on_node) for on_node in nodes.values()),
        )


def _one_by_one(place: Placement) -> list[Placement]:
    """Return a placement of each rank, where none has to do with the others of its node."""
    return [place] if place.shared else [replace(place, on_node=1)] * place.on_node
