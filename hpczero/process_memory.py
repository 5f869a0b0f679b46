"""Memory that a run really takes, beside what was predicted and what the engine counts.

Pages that several processes share count in equal parts (the proportional set size), so that the sum
over a node's ranks is what they take from the node: each shared window once. Pages of files, which
the kernel gives back when asked, are left out.
"""

import ctypes
import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpczero import env
from hpczero.comm.world import World

_ROLLUP = Path("/proc/self/smaps_rollup")


def held(rollup: Path = _ROLLUP) -> int:
    """Return the bytes that this process holds now; 0 if unknown. A call takes 7 to 14 ms."""
    try:
        text = rollup.read_text()
    except OSError:
        return 0
    lines = re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)
    sizes = {name: int(size) * 1024 for name, size in lines}
    if "Pss_Anon" in sizes:
        return sizes["Pss_Anon"] + sizes["Pss_Shmem"] + sizes.get("SwapPss", 0)
    return sizes.get("Pss", 0) + sizes.get("SwapPss", 0)  # before Linux 5.4: including files


def held_on_nodes(world: World) -> list[int] | None:
    """Return the bytes that the ranks of each node hold, on rank 0. Collective.

    For tensors on a GPU it is what they hold there. All ranks read at the same time, as pages are
    divided among their users.
    """
    give_back_free_memory()
    world.all_gather_objects(0)  # a barrier: no rank is allocating now
    on_device = world.device.memory()
    of_ranks = world.gather_objects(on_device.held if on_device else held())
    if of_ranks is None:
        return None
    sums = [0] * (max(world.node_of_rank) + 1)
    for node, size in zip(world.node_of_rank, of_ranks, strict=True):
        sums[node] += size
    return sums


def summary(
    world: World,
    predicted: Mapping[str, int],
    allocated: Mapping[str, int],
    growth: list[int] | None,
) -> dict[str, Any] | None:
    """Return the memory figures for summary.json, on rank 0. Collective.

    For every rank they are the bytes predicted and allocated, by kind (its part of what it shares).
    For every node it is how much more its ranks held after some steps than before the engine.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures: dict[str, Any] = {
        "predicted": predicted,
        "allocated": allocated,
        "peak_resident": peak,
    }
    if on_device := world.device.memory():
        figures["device"] = {"peak": on_device.peak, "total": on_device.total}
    ranks = world.gather_objects(figures)
    if ranks is None or growth is None:
        return None
    nodes = [{"ranks": 0, "allocated": 0, "measured": measured} for measured in growth]
    for node, of_rank in zip(world.node_of_rank, ranks, strict=True):
        nodes[node]["ranks"] += 1
        nodes[node]["allocated"] += sum(of_rank["allocated"].values())
    return {"ranks": ranks, "nodes": nodes}


def growth(before: list[int] | None, after: list[int] | None) -> list[int] | None:
    """Return the bytes that each node's ranks took between two readings, on rank 0."""
    if before is None or after is None:
        return None
    return [late - early for early, late in zip(before, after, strict=True)]


# --------------------------------------------------- memory that the C library keeps when freed

_LARGEST = (1 << 31) - 1
_KEEP = {  # glibc's parameter -> its number, the value to set
    "M_MMAP_THRESHOLD": (-3, 1 << 30),
    "M_TRIM_THRESHOLD": (-1, _LARGEST),
    "M_TOP_PAD": (-2, 64 << 20),
}
_OLDER = 32 << 20  # older versions take no larger threshold


def keep_free_memory() -> dict[str, int]:
    """Keep freed memory for the next step, which needs as much; return the parameters accepted.

    If it went back to the kernel, the kernel would clear it again, page by page, every time.
    Nothing is changed if the environment configures malloc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if not mallopt or env.tells_malloc():
        return {}
    accepted = {}
    for name, (parameter, value) in _KEEP.items():
        smaller = next((size for size in (value, _OLDER) if mallopt(parameter, size)), None)
        if smaller is not None:
            accepted[name] = smaller
    return accepted


def give_back_free_memory() -> None:
    """Return freed memory to the kernel."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
