"""The memory that a job will need, device and host apart, for people and as data (pure)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpczero.comm.grid import Grid
from hpczero.model.shapes import Layer
from hpczero.planner.fit import Site, final_refusal, in_words, kinds_in_words
from hpczero.planner.memory import NodeNeed, needs_on_grid, of_account
from hpczero.planner.platform import Hardware, Platform
from hpczero.spec.schema import Spec
from hpczero.text import counted


@dataclass(frozen=True)
class Forecast:
    """A job on nodes of which some facts are known."""

    spec: Spec
    grid: Grid
    node: Hardware
    platform: Platform

    def memory(self, layers: Sequence[Layer]) -> dict[str, Any]:
        """Return bytes by kind on the fullest node: of a rank, of all its ranks, in shared windows.

        On GPUs the accounts are apart: "device" has the fullest rank of all, "host" the fullest node.
        `available` is 0 where a size is not known.
        """
        needs = needs_on_grid(self.spec, layers, self.grid, self.platform).values()
        fullest = max(needs, key=lambda need: need.of(need.ranks))
        found: dict[str, Any] = {
            "ranks_on_node": fullest.ranks,
            "rank": fullest.rank,
            "node": fullest.node,
            "windows": fullest.windows,
            "on": self.platform.device,
        }
        if self.platform.on_gpus:
            found |= self._accounts(list(needs), fullest)
            found["kernels"] = bool(self.platform.kernels)
        return found

    def refusal(self, layers: Sequence[Layer]) -> str:
        """Return why the job does not fit into what is known of the nodes; "" where it does."""
        site = Site.planned(Counter(self.grid.node_of_rank), self.node, self.platform)
        return final_refusal(self.spec, layers, site) or ""

    def _accounts(self, needs: list[NodeNeed], fullest: NodeNeed) -> dict[str, Any]:
        of_devices = [need.fullest("device") for need in needs]
        host = max(needs, key=lambda need: need.of(need.ranks, "host"))
        return {
            "device": {
                "rank": max(of_devices, key=lambda kinds: sum(kinds.values())),
                "ranks_on_gpu": self.node.ranks_on_gpu(fullest.ranks),
                "available": int(self.node.gpu_memory_gb * 1e9),
            },
            "host": {
                "rank": host.fullest("host"),
                "node": of_account(host.node, "host"),
                "available": int(self.node.memory_gb * 1e9),
            },
        }


def in_lines(memory: dict[str, Any]) -> list[str]:
    """Say what `Forecast.memory` has found."""
    ranks = counted(memory["ranks_on_node"], "rank")
    if memory["on"] == "cpu":
        of_node, of_rank = (in_words(sum(memory[part].values())) for part in ("node", "rank"))
        windows = f" ({in_words(memory['windows'])} of it in shared windows)" if memory["windows"] else ""
        first = f"about {of_node} on a node of {ranks}{windows}, {of_rank} a rank:"
        return [first, kinds_in_words(memory["rank"])]
    device, host = memory["device"], memory["host"]
    sharing = device["ranks_on_gpu"]
    size = in_words(device["available"]) if device["available"] else ""
    each = f", {sharing} of which share a GPU" if sharing > 1 else ""
    by_whom = "hpczero's kernels" if memory["kernels"] else "PyTorch's operations"
    of_gpu = f"of the {size} of a GPU" if size else "; how much a GPU has is not known (batch.site)"
    of_node = f" of {in_words(host['available'])}" if host["available"] else ""
    on_host = in_words(sum(host["node"].values()))
    return [
        f"on GPUs about {in_words(sum(device['rank'].values()))} a rank{each}{' ' if size else ''}{of_gpu}:",
        kinds_in_words(device["rank"]),
        f"and about {on_host}{of_node} of the memory of a node of {ranks}; a rank has:",
        kinds_in_words(host["rank"]),
        f"(activations are those of {by_whom}; CUDA's own share of a GPU is not counted)",
    ]
