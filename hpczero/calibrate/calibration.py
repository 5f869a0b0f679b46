"""A calibration: its parts in order, each within its share of the seconds. Collective."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from hpczero import machine, processors
from hpczero.calibrate import compute, disk, links, passes
from hpczero.calibrate.findings import Findings, Machine, Moved
from hpczero.calibrate.turns import Turns
from hpczero.comm.world import World
from hpczero.device import CPU
from hpczero.spec.schema import Spec
from hpczero.train import setup

# part -> share of the seconds, and cases that the share is for
_PARTS = {
    "memory": (0.08, 3),
    "products": (0.34, 45),
    "attention": (0.1, 10),
    "kernels": (0.14, 7),
    "launch": (0.02, 1),
    "links": (0.12, 31),
    "network": (0.1, 20),
    "disk": (0.1, 2),
}

_BESIDE = 9  # measurements of exchanges beside computing
_NOISY = 0.15  # of a product's time

Report = Callable[[str], None]
Found = TypeVar("Found")


class Calibration:
    """Measures this machine: `run` is collective, and `findings` fill up meanwhile."""

    def __init__(self, world: World, folder: Path, seconds: float, report: Report) -> None:
        """Choose device and threads, before any group is made. Collective.

        `report` is told on rank 0 what is being measured. InputError on all ranks where the folder
        takes no files.
        """
        world.run_on_all(lambda: disk.check(folder) if world.local_rank == 0 else None)
        setup.use_kernels(world)
        setup.select_device(world, Spec(name="calibrate"))
        self._threads = setup.share_cores(world)
        self._world = world
        self._folder = folder
        self._turns = Turns(world)
        crowded = world.progress.is_crowded
        self._turns.core_of_its_own = world.device is CPU and self._threads == 1 and not crowded
        self._report = report
        absent = {"links", "network"} if world.size == 1 else set[str]()
        absent |= set() if links.has_network(world) else {"network"}
        self._end = time.perf_counter() + seconds
        self._left = sum(share for name, (share, _) in _PARTS.items() if name not in absent)
        self._precisions = compute.precisions(world.device)
        self.findings = Findings(machine_of(world, folder, self._threads))

    def run(self) -> None:
        findings = self.findings
        self._memory()
        findings.products = self._of_precisions("products", compute.products)
        findings.attention = self._of_precisions("attention", compute.attention)
        kernels = self._of_precisions("kernels", passes.kernels)
        findings.kernels = [timing for timings in kernels.values() for timing in timings]
        with self._part("launch"):
            findings.launch = compute.launch(self._turns)
        self._links()
        self._disk()
        timings = [one.timing for timed in findings.products.values() for one in timed]
        spread = statistics.median(timing.spread for timing in timings)
        if spread > _NOISY:
            findings.notes.append(
                f"noisy: the quartiles of a product's turns are {spread:.0%} apart: other programs "
                "use this machine, or ranks share cores"
            )

    @contextmanager
    def _part(self, name: str) -> Iterator[float]:
        """Begin a part, and yield its seconds: its share of what is left for it and later ones."""
        share, cases = _PARTS[name]
        seconds = max(0.0, self._end - time.perf_counter()) * share / self._left
        self._left -= share
        self._report(f"{name} (at most {seconds:.1f} s)")
        began = time.perf_counter()
        self._turns.begin(seconds, cases)
        yield seconds
        self.findings.seconds[name] = round(time.perf_counter() - began, 3)

    def _of_precisions(self, name: str, measure: Callable[[Turns, str], Found]) -> dict[str, Found]:
        """Measure with each precision, for equal parts of the time."""
        found = {}
        with self._part(name) as seconds:
            for precision in self._precisions:
                each = seconds / len(self._precisions)
                self._turns.begin(each, _PARTS[name][1])
                found[precision] = measure(self._turns, precision)
        return found

    def _memory(self) -> None:
        world, turns, findings = self._world, self._turns, self.findings
        with self._part("memory"):
            action, size = passes.streaming(turns, world.device.torch)
            torch.set_num_threads(1)
            findings.alone = Moved(size, turns.of(action, [0]))
            torch.set_num_threads(self._threads)
            action, size = passes.streaming(turns, CPU.torch)
            findings.at_once = Moved(size, turns.of(action, by_host=True))
            if world.device.has_queues:
                action, size = passes.over_bus(turns)
                findings.bus = Moved(size, turns.of(action))

    def _links(self) -> None:
        world, turns, findings = self._world, self._turns, self.findings
        dtype = compute.DTYPES[self._precisions[0]]
        if world.size == 1:
            findings.notes.append("one rank: links and network are not measured")
            return
        with self._part("links"):
            findings.inside = links.inside(turns, dtype)
            findings.beside_inside = links.beside_inside(turns, dtype)
            pairs = links.pairs(turns, dtype)
            if pairs:
                findings.pair_alone, findings.pairs_at_once = pairs
            findings.window = links.window(turns)
        if not findings.inside:
            findings.notes.append("a node has one rank: links in a node are not measured")
        if links.has_network(world):
            with self._part("network") as seconds:
                each = seconds / 3
                turns.begin(each, _PARTS["network"][1])
                findings.between = links.between(turns, dtype, at_once=False)
                turns.begin(each, _PARTS["network"][1])
                findings.between_at_once = links.between(turns, dtype, at_once=True)
                turns.begin(each, _BESIDE)
                findings.beside_between = links.beside_between(turns, dtype)
        elif links.is_simulated(world):
            findings.notes.append(
                "nodes are parts of one host (ranks_per_node): there is no network to measure"
            )
        else:
            findings.notes.append("one node: the network is not measured")

    def _disk(self) -> None:
        world, findings, folder = self._world, self.findings, self._folder
        nodes = max(world.node_of_rank) + 1
        with self._part("disk") as seconds:
            each = seconds / (2 if nodes > 1 else 1)
            findings.disk = world.run_on_all(
                lambda: disk.measure(folder, each) if world.rank == 0 else None
            )
            if nodes > 1:
                mine = world.run_on_all(
                    lambda: disk.measure(folder, each) if world.local_rank == 0 else None
                )
                rates = mine and (mine.write, mine.read, mine.direct, mine.bytes)
                found = world.all_gather_objects(rates)
                findings.disks_at_once = [disk.DiskRates(*one) for one in found if one]
        if world.rank == 0 and findings.disk is None:
            findings.notes.append("there is no room in the folder: disk is not measured")


def machine_of(world: World, folder: Path, threads: int) -> Machine:
    """Return where this is, by the first node. Collective.

    Hosts may be parts of one computer: each has its part of the cores.
    """
    memory = machine.memory()
    on_device = world.device.memory()
    facts = [machine.cpu_quota(), setup.computer_of(world), world.device.identity]
    found = world.all_gather_objects([world.node, sorted(processors.usable_cores()), *facts])
    of_node = [one for one in found if one[0] == found[0][0]]
    cores = len({core for _, usable, *_ in of_node for core in usable})
    quota = of_node[0][2] or math.inf
    parts = len({node for node, _, _, computer, _ in found if computer == found[0][3]})
    gpus = len({identity for *_, identity in of_node})
    return Machine(
        device=world.device.name if on_device else f"a core of {processors.processor()}",
        kind=world.device.kind,
        device_memory=on_device.total if on_device else 0,
        devices=gpus if on_device else max(1, int(min(quota, cores) / parts)),
        node_memory=min(memory.physical, memory.limit.limit if memory.limit else memory.physical),
        ranks=world.size,
        ranks_on_node=len(of_node),
        nodes=max(world.node_of_rank) + 1,
        threads=threads,
        folder=str(folder),
        file_system=disk.file_system(folder),
        simulated=links.is_simulated(world),
    )
