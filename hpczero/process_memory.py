"""What memory a run really takes, beside what was predicted and what the engine counts.

Pages that several processes share count in equal parts (the proportional set size), so that the sum over a node's ranks is what they take
from the node: each shared window once. Files' pages, which the kernel gives back when asked, are left out.
"""

import ctypes
import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpczero import env
from hpczero.comm.world import World

_OWN = Path("/proc/self/smaps_rollup")


def held(rollup: Path = _OWN) -> int:
    """Bytes that this process holds now (7 to 14 ms a call); 0 where the kernel does not tell."""
    try:
        text = rollup.read_text()
    except OSError:
        return 0
    sizes = {
        name: int(size) * 1024
        for name, size in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)
    }
    if "Pss_Anon" in sizes:
        return sizes["Pss_Anon"] + sizes["Pss_Shmem"] + sizes.get("SwapPss", 0)
    return sizes.get("Pss", 0) + sizes.get("SwapPss", 0)  # before Linux 5.4: with files


def held_on_nodes(world: World) -> list[int] | None:
    """The sum over the ranks of each node, on rank 0: of what their tensors hold on a GPU, if that is where they live. Collective: all read at the
    same time, as pages are divided among their users.
    """
    give_back_free_memory()
    world.broadcast_object(
        world.gather_objects(0)
    )  # everybody is here: nobody allocates any more, or already
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
    """For summary.json, on rank 0; collective. Of every rank what was predicted and what is allocated, by kind (of what it shares, its
    part); of every node how much more its ranks held after some steps than before the engine.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    on_device = world.device.memory()
    own = (
        {} if on_device is None else {"device": {"peak": on_device.peak, "total": on_device.total}}
    )
    ranks = world.gather_objects(
        {"predicted": predicted, "allocated": allocated, "peak_resident": peak} | own
    )
    if ranks is None or growth is None:
        return None
    nodes = []
    for node, measured in enumerate(growth):
        here = [
            of_rank
            for of_rank, place in zip(ranks, world.node_of_rank, strict=True)
            if place == node
        ]
        total = sum(sum(of_rank["allocated"].values()) for of_rank in here)
        nodes.append({"ranks": len(here), "allocated": total, "measured": measured})
    return {"ranks": ranks, "nodes": nodes}


def growth(before: list[int] | None, after: list[int] | None) -> list[int] | None:
    return (
        [late - early for early, late in zip(before, after, strict=True)]
        if before is not None and after is not None
        else None
    )


# What the C library does with memory that was freed; where it cannot be told, it does what it likes.
_LARGEST = (1 << 31) - 1
_KEEP = {
    "M_MMAP_THRESHOLD": (-3, 1 << 30),
    "M_TRIM_THRESHOLD": (-1, _LARGEST),
    "M_TOP_PAD": (-2, 64 << 20),
}  # names and numbers of glibc
_OLDER = 32 << 20  # older versions take no larger threshold


def keep_free_memory() -> dict[str, int]:
    """It stays for the next step, which needs as much: the kernel would clear it, page by page, every time. With what was accepted; nothing is
    changed where the environment says what malloc is to do.
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
    """To the kernel: it belongs to nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
