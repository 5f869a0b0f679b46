"""Bytes that ranks and nodes need, by kind, and what a node has (pure)."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from hpczero.parallel.states import KINDS_ON_HOST

# Kinds that stay in the computer's memory when the others are on a GPU.
ON_HOST = frozenset(
    ("checkpoint copy", "data", "runtime", "activations on the host", *KINDS_ON_HOST)
)
FILES = "files"  # an account: of states that are in files
OF_CUDA = 1_000_000_000  # bytes of a GPU: its context, and the buffers of its libraries
MARGIN = {"device": 0.10, "host": 0.05, "all": 0.05, FILES: 0.0}  # for what allocators lose


def at_most(size: int, account: str) -> int:
    """Return the bytes that so many of an account may come to."""
    return int(size * (1 + MARGIN[account])) + (OF_CUDA if account == "device" else 0)


@dataclass(frozen=True)
class Hardware:
    """A node as a site's profile describes it. 0: not known; for `gpus` also: none."""

    memory_gb: float = 0
    gpus: int = 0
    gpu_memory_gb: float = 0
    files_gb: float = 0  # of storage for states in files

    def completed(self, other: "Hardware") -> "Hardware":
        """Return it with the other's values for what is not known of this one."""
        unknown = {name: value for name, value in vars(other).items() if not getattr(self, name)}
        return replace(self, **unknown)

    def ranks_on_gpu(self, ranks: int) -> int:
        """Return how many of a node's ranks share a GPU; 1 if the number of GPUs is unknown."""
        return -(-ranks // self.gpus) if self.gpus else 1


@dataclass(frozen=True)
class Need:
    """Bytes by kind of the ranks of one node that have the same part of the model."""

    ranks: int
    each: dict[str, int]  # private to each of these ranks
    together: dict[str, int]  # held once for all of them
    windows: int  # of all this, in shared windows
    files: int = 0  # not in memory: of each of these ranks, in the folder of zero.offload
    # in a step, between the computer's memory and each of these ranks' device, in both directions
    over_bus: int = 0

    @property
    def rank(self) -> dict[str, int]:
        """Bytes of one rank, with an equal part of what they share.

        The owner of a shard is the first to touch it, so its pages count as the owner's.
        """
        shares = self.together
        return {kind: size + shares.get(kind, 0) // self.ranks for kind, size in self.each.items()}

    @property
    def node(self) -> dict[str, int]:
        shared = self.together
        return {kind: size * self.ranks + shared.get(kind, 0) for kind, size in self.each.items()}

    @cached_property
    def _each_in(self) -> dict[str, int]:
        return _accounts(self.each)

    @cached_property
    def rank_in(self) -> dict[str, int]:
        """Bytes of one rank in each account."""
        return _accounts(self.rank) if self.together else self._each_in

    @cached_property
    def node_in(self) -> dict[str, int]:
        """Bytes of all these ranks in each account."""
        shared = _accounts(self.together)
        return {name: size * self.ranks + shared[name] for name, size in self._each_in.items()}


@dataclass(frozen=True)
class NodeNeed:
    """The need of one node: one entry for each part of the model that its ranks have."""

    parts: tuple[Need, ...]

    @property
    def ranks(self) -> int:
        return sum(part.ranks for part in self.parts)

    @property
    def rank(self) -> dict[str, int]:
        """Bytes by kind of a rank that needs the most."""
        return max((part.rank for part in self.parts), key=lambda kinds: sum(kinds.values()))

    @property
    def node(self) -> dict[str, int]:
        return dict(sum((Counter(part.node) for part in self.parts), Counter[str]()))

    @property
    def windows(self) -> int:
        return sum(part.windows for part in self.parts)

    @property
    def files(self) -> int:
        return sum(part.files * part.ranks for part in self.parts)

    def fullest(self, account: str) -> dict[str, int]:
        """Return the bytes of the rank with the most in this account ("all", "host", "device")."""
        counts = [of_account(part.rank, account) for part in self.parts]
        return max(counts, key=lambda kinds: sum(kinds.values()))

    def of(self, ranks: int, account: str = "all") -> int:
        """Return the bytes of so many of the node's ranks in an account.

        All ranks share the computer's memory, so each counts as the mean. Few share a GPU: they may
        be the ones that need the most.
        """
        if account == FILES:
            return self.files * ranks // self.ranks
        if account != "device":
            return sum(part.node_in[account] for part in self.parts) * ranks // self.ranks
        total = 0
        left = ranks
        sizes = [(part.rank_in[account], part.ranks) for part in self.parts]
        for size, count in sorted(sizes, reverse=True):
            total += size * min(count, left)
            left -= min(count, left)
        return total


def _accounts(kinds: Mapping[str, int]) -> dict[str, int]:
    host = sum(size for kind, size in kinds.items() if kind in ON_HOST)
    everything = sum(kinds.values())
    return {"all": everything, "host": host, "device": everything - host}


def of_account(kinds: Mapping[str, int], account: str) -> dict[str, int]:
    """Return the kinds of an account: "all", those on the "host", or those on the "device"."""
    if account == "all":
        return dict(kinds)
    return {kind: size for kind, size in kinds.items() if (kind in ON_HOST) == (account == "host")}
