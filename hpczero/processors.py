"""Facts about the processors of this computer: its cores, their name, and what they can do."""

import contextlib
import os
import re
import threading
from collections import Counter
from collections.abc import Sequence, Set
from fractions import Fraction
from pathlib import Path

from hpczero.machine import ROOT, text_of


def usable_cores(root: Path = ROOT) -> set[int]:
    """Return the cores that this process may run on, each named by its first hardware thread.

    Two threads of one core count once.
    """
    return {_first_thread(cpu, root) for cpu in os.sched_getaffinity(0)}


def _first_thread(cpu: int, root: Path) -> int:
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    first = re.match(r"\d+", text_of(topology / "thread_siblings_list"))
    return int(first[0]) if first else cpu


def processor(root: Path = ROOT) -> str:
    """Return the processor's name, as in "AMD EPYC 7763 64-Core Processor"."""
    named = re.search(r"^model name\s*:\s*(\S.*)$", text_of(root / "proc/cpuinfo"), re.MULTILINE)
    return named[1] if named else f"a processor ({os.uname().machine})"


# the kernel's names of processors' features, on x86 and Arm
_PRODUCTS = {
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}


def has_products(precision: str, root: Path = ROOT) -> bool:
    """Return False if the processor is known to have no products of these numbers."""
    info = text_of(root / "proc/cpuinfo")
    found = re.search(r"^(?:flags|Features)\s*:\s*(\S.*)$", info, re.MULTILINE)
    wanted = _PRODUCTS.get(precision)
    return not found or not wanted or not wanted.isdisjoint(found[1].split())


def waited_for_core(root: Path = ROOT) -> float:
    """Return the seconds that this thread could have run and had no core; 0 if unknown (Linux)."""
    return _waited(f"{root}/proc/thread-self")


def helpers_waited_for_core(root: Path = ROOT) -> float:
    """Return the seconds of all other threads of this process that are alive."""
    own = str(threading.get_native_id())
    with contextlib.suppress(OSError):
        folder = f"{root}/proc/self/task"
        return sum(_waited(f"{folder}/{thread}") for thread in os.listdir(folder) if thread != own)
    return 0.0


def _waited(thread: str) -> float:
    """Return the seconds; read without a buffer and a Path, as it is for every step."""
    try:
        with open(f"{thread}/schedstat", "rb", buffering=0) as file:
            return int(file.read(100).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def threads_per_rank(affinities: Sequence[Set[int]], quota: float | None = None) -> list[int]:
    """Return the number of threads, at least one, for each rank of a node.

    `affinities` are the cores that each rank may use, `quota` the cores' worth of time that the
    cgroups allow all of them. A core that n ranks may use counts one n-th for each: bound ranks
    keep their cores, unbound ranks share.
    """
    ranks_on = Counter(core for cores in affinities for core in cores)
    shares = [
        sum((Fraction(1, ranks_on[core]) for core in cores), Fraction()) for cores in affinities
    ]
    allowed = Fraction(len(ranks_on))
    if quota is not None:
        allowed = Fraction(quota).limit_denominator(10**6)
    total = sum(shares, Fraction())
    if total > allowed:
        shares = [share * allowed / total for share in shares]
    return [max(1, int(share)) for share in shares]
