"""From the facts of all ranks to findings: a verdict, what was found, and the fix. Pure."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpczero import env, machine
from hpczero.doctor.facts import Report
from hpczero_kernels.table import OLDEST

OK, WARN, FAIL = "ok", "WARN", "FAIL"
_MIB, _GIB = 1 << 20, 1 << 30
_SHM_PER_RANK = (
    32 * _MIB
)  # what the MPIs themselves take in /dev/shm (Open MPI: 16 MiB a rank), and as much again
_LEAST_MEMORY = _GIB // 2  # a rank with torch loaded, and little else
_LARGEST_SKEW = 1.0  # seconds between the nodes' clocks
_MUST_AGREE = ("python", "hpczero", "torch", "mpi4py")
_NODES_SHOWN = 8


@dataclass(frozen=True)
class Finding:
    topic: str
    verdict: str
    what: str
    fix: str = ""


Found = Iterator[tuple[str, str, str]]  # verdict, what, fix


def judge(reports: Sequence[Report]) -> list[Finding]:
    """All findings about these ranks, by topic."""
    topics: dict[str, Callable[[Sequence[Report]], Found]] = {
        "Software": _software,
        "MPI": _mpi,
        "Ranks": _ranks,
        "Cores": _cores,
        "Memory": _memory,
        "Shared memory": _shared_memory,
        "GPUs": _gpus,
        "Files": _files,
    }
    return [Finding(topic, *found) for topic, judged in topics.items() for found in judged(reports)]


def _software(reports: Sequence[Report]) -> Found:
    first = reports[0]
    present = {"python": first.python} | {
        name: version for name, version in first.packages.items() if version
    }
    yield OK, ", ".join(f"{name} {version}" for name, version in present.items()), ""
    missing = [name for name in ("torch", "mpi4py", "numba") if not first.packages[name]]
    if missing:
        verdict = FAIL if first.under_a_launcher else WARN
        yield (
            verdict,
            f"missing: {', '.join(missing)}; needed to train, not to write, check and submit specs",
            _install(first, "train"),
        )
    for name in present:
        versions = {_version(report, name): report for report in reversed(reports)}
        if len(versions) > 1:
            where = ", ".join(
                f"{version} on {report.host} (rank {report.rank})"
                for version, report in versions.items()
            )
            yield (
                (FAIL if name in _MUST_AGREE else WARN),
                f"{name} is not the same everywhere: {where}",
                "use one environment on all nodes",
            )
    if first.packages["numba"]:
        target = (
            f"NVIDIA's numba-cuda {first.packages['numba-cuda']}"
            if first.packages["numba-cuda"]
            else "numba's built-in, deprecated one"
        )
        needed = (
            any(report.gpus and not _too_old(report) for report in reports)
            and not first.packages["numba-cuda"]
        )
        yield (
            (WARN if needed else OK),
            f"kernels' CUDA target: {target}",
            _install(first, "cuda") if needed else "",
        )
    yield OK, "; ".join(_kernels(first)), ""


def _kernels(report: Report) -> Iterator[str]:
    for device, title in (("cpu", "kernels on CPUs"), ("cuda", "on GPUs")):
        by: dict[str, list[str]] = {}
        for operation, implementation in report.kernels[device].items():
            by.setdefault(implementation, []).append(operation)
        yield f"{title}: " + ", ".join(
            f"{' '.join(operations)} by {implementation}"
            for implementation, operations in by.items()
        )


def _version(report: Report, name: str) -> str | None:
    return report.python if name == "python" else report.packages.get(name)


def _install(report: Report, extra: str) -> str:
    return env.install_command(report.executable, report.source, extra)


def _mpi(reports: Sequence[Report]) -> Found:
    first = reports[0]
    if len(first.wheels) > 1:
        fix = "make a new virtual environment with one of them alone"
        yield (
            FAIL,
            f"this Python environment holds {' and '.join(first.wheels)}, which overwrite each other's files",
            fix,
        )
    if first.library is None:
        if first.packages["mpi4py"]:
            verdict = FAIL if first.under_a_launcher else WARN
            fix = f"load the site's MPI module, or take PyPI's: {_install(first, 'mpi')}"
            yield verdict, f"no MPI could be started: {first.library_error}", fix
        return
    library = first.library
    yield (
        OK,
        f"{library.name} (MPI {library.standard[0]}.{library.standard[1]}): {library.path}\n{library.why}",
        "",
    )
    others = {report.library.path: report for report in reversed(reports) if report.library}
    if len(others) > 1:
        where = ", ".join(
            f"{path} on {report.host} (rank {report.rank})" for path, report in others.items()
        )
        yield FAIL, f"not the same library everywhere: {where}", "load the same module on all nodes"
    if first.library_error:
        fix = (
            f"{library.mpirun} -n N hpczero ..."
            if library.mpirun
            else "load the module that this library belongs to, and use its mpirun"
        )
        yield FAIL, first.library_error, fix
        return
    yield from _launch(first)
    yield (
        (OK if library.threads in ("serialized", "multiple") else FAIL),
        f"thread level: {library.threads}",
        "",
    )
    if library.standard[0] < 4:
        yield (
            OK,
            f"MPI {library.standard[0]} has no large counts: hpczero sends what is larger than 2^31 elements in pieces",
            "",
        )


def _launch(report: Report) -> Found:
    """Whether the mpirun in use, or the one that would be used, belongs to the library."""
    library, command = (
        report.library,
        report.launcher.command if report.launcher else report.mpirun_on_path,
    )
    if library is None or library.mpirun is None:
        return
    if command is None:
        yield OK, f"its mpirun: {library.mpirun}", ""
    elif (
        Path(command).parent.resolve() == Path(library.mpirun).parent.resolve()
        or Path(command).name == "srun"
    ):
        yield (
            OK,
            f"its mpirun is the one {'in use' if report.launcher else 'on the PATH'}: {command}",
            "",
        )
    else:
        role = "the launcher in use" if report.launcher else "the mpirun on the PATH"
        yield (
            WARN,
            f"{role}, {command}, is not this library's",
            f"{library.mpirun} -n N hpczero ...",
        )


def _ranks(reports: Sequence[Report]) -> Found:
    nodes = _by_node(reports)
    whole = f"{_count(len(reports), 'rank')} on {_count(len(nodes), 'node')}"
    if reports[0].library_error and reports[0].under_a_launcher:
        whole = "this process only; the other ranks cannot be reached"
    yield OK, f"{whole}\n" + "\n".join(_table(nodes)), ""
    skew = max(reports, key=lambda report: abs(report.skew))
    if abs(skew.skew) > _LARGEST_SKEW:
        yield (
            WARN,
            f"the clocks of {reports[0].host} and {skew.host} differ by {abs(skew.skew):.1f} s",
            "ask for time synchronisation (NTP) on the nodes",
        )


def _by_node(reports: Sequence[Report]) -> list[list[Report]]:
    nodes: dict[int, list[Report]] = {}
    for report in reports:
        nodes.setdefault(report.node, []).append(report)
    return list(nodes.values())


def _table(nodes: Sequence[Sequence[Report]]) -> Iterator[str]:
    rows = [("node", "host", "ranks", "cores", "threads a rank", "memory a rank", "GPUs a rank")]
    for node in nodes[:_NODES_SHOWN]:
        cores = len({core for report in node for core in report.cores})
        memory = f"{node[0].usable / len(node) / _GIB:.1f} GiB"
        gpus = _span([len(report.gpus) for report in node])
        rows.append(
            (
                str(node[0].node),
                node[0].host,
                _ranges([report.rank for report in node]),
                str(cores),
                _span(_threads(node)),
                memory,
                gpus,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if len(nodes) > _NODES_SHOWN:
        yield f"... and {len(nodes) - _NODES_SHOWN} more nodes"


def _threads(node: Sequence[Report]) -> list[int]:
    return machine.threads_per_rank([set(report.cores) for report in node], node[0].quota)


def _span(numbers: Sequence[int]) -> str:
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)}-{max(numbers)}"


def _ranges(ranks: Sequence[int]) -> str:
    """0-3,8 for 0, 1, 2, 3, 8"""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _each_node(reports: Sequence[Report], judged: Callable[[Sequence[Report]], Found]) -> Found:
    """The findings about each node; of many nodes the complaints about the first few, and how many more there are."""
    found = [list(judged(node)) for node in _by_node(reports)]
    if len(found) > _NODES_SHOWN:
        found = [
            of_node for of_node in found if any(verdict != OK for verdict, _, _ in of_node)
        ] or found
    for of_node in found[:_NODES_SHOWN]:
        yield from of_node
    more = [finding for of_node in found[_NODES_SHOWN:] for finding in of_node]
    if more:
        verdict, _, fix = max(more, key=lambda finding: (OK, WARN, FAIL).index(finding[0]))
        yield (
            verdict,
            f"... and the same kind of finding on {_count(len(found) - _NODES_SHOWN, 'more node')}",
            fix,
        )


def _cores(reports: Sequence[Report]) -> Found:
    found = list(_each_node(reports, _cores_of))
    yield from found or [(OK, "each rank has cores of its own", "")]


def _cores_of(node: Sequence[Report]) -> Found:
    first, ranks = node[0], len(node)
    cores = {core for report in node for core in report.cores}
    room = min(len(cores), first.quota) if first.quota is not None else len(cores)
    if ranks > room:
        limit = _count(len(cores), "core") + (
            f" and a CPU quota of {first.quota:g}" if first.quota is not None else ""
        )
        given = first.launcher.cores if first.launcher else len(cores)
        fix = f"start at most {_count(max(1, int(room)), 'rank')} on such a node"
        if given > len(cores):
            fix = "let the ranks use all cores (--bind-to none with Open MPI, -bind-to none with MPICH, --cpus-per-task with srun)"
        yield WARN, f"{first.host}: {ranks} ranks share {limit}: they wait for each other", fix
    elif first.quota is not None and first.quota < len(cores):
        yield (
            OK,
            f"{first.host}: {len(cores)} cores, of which the cgroup's CPU quota allows {first.quota:g}",
            "",
        )
    idle = (first.launcher.cores if first.launcher else 0) - len(cores)
    if idle > 0 and ranks <= room and first.under_a_launcher:
        fix = "more ranks, or let them use all cores (--bind-to none with Open MPI, -bind-to none with MPICH, --cpus-per-task with srun)"
        yield (
            WARN,
            f"{first.host}: the ranks are bound to {len(cores)} of {len(cores) + idle} cores; {idle} idle",
            fix,
        )


def _memory(reports: Sequence[Report]) -> Found:
    return _each_node(reports, _memory_of)


def _memory_of(node: Sequence[Report]) -> Found:
    first = node[0]
    limit = (
        f", of which the cgroups allow {first.memory_limit / _GIB:.1f}"
        if first.memory_limit is not None
        else ", no cgroup limit"
    )
    free = f"{first.usable / _GIB:.1f} GiB free for {_count(len(node), 'rank')}"
    verdict = WARN if first.usable < len(node) * _LEAST_MEMORY else OK
    fix = (
        "end what else runs on the node, ask for more memory, or start fewer ranks"
        if verdict == WARN
        else ""
    )
    yield verdict, f"{first.host}: {first.physical / _GIB:.1f} GiB{limit}; {free}", fix


def _shared_memory(reports: Sequence[Report]) -> Found:
    return _each_node(reports, _shared_memory_of)


def _shared_memory_of(node: Sequence[Report]) -> Found:
    first, need = node[0], len(node) * _SHM_PER_RANK
    if first.shm is None:
        yield (
            FAIL,
            f"{first.host}: there is no /dev/shm",
            "mount a tmpfs there (docker: --shm-size=8g)",
        )
        return
    size, free = first.shm
    what = f"{first.host}: /dev/shm has {_bytes(free)} free of {_bytes(size)}"
    if free < need:
        larger = "make it larger (docker: --shm-size=8g; else mount -o remount,size=8g /dev/shm)"
        yield WARN, f"{what}; {_count(len(node), 'rank')} may need {_bytes(need)}", larger
    else:
        yield OK, what, ""
    yield from _segments(first)


def _segments(report: Report) -> Found:
    if report.removed:
        yield OK, f"{report.host}: removed {_summary(report.removed)} that nobody used any more", ""
    if report.stale and not report.sees_all:
        unseen = "this container shares /dev/shm with processes that it cannot see: run `hpczero doctor --clean` outside"
        yield OK, f"{report.host}: {_summary(report.stale)} may be stale, but {unseen}", ""
    elif report.stale:
        yield (
            WARN,
            f"{report.host}: {_summary(report.stale)} left behind by processes that have ended",
            "hpczero doctor --clean",
        )


def _summary(segments: Sequence[tuple[str, int, str]]) -> str:
    makers = " and ".join(sorted({maker for _, _, maker in segments}))
    return f"{_count(len(segments), 'segment')} of {makers} ({_bytes(sum(size for _, size, _ in segments))})"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _bytes(number: int) -> str:
    return f"{number / _GIB:.1f} GiB" if number >= _GIB else f"{number / _MIB:.1f} MiB"


def _too_old(report: Report) -> bool:
    return bool(report.gpus) and tuple(report.gpu_capability) < OLDEST


def _gpus(reports: Sequence[Report]) -> Found:
    broken = next((report for report in reports if report.gpu_driver and not report.gpus), None)
    if broken:
        fix = "install a torch that fits the driver (`nvidia-smi` says which CUDA it offers), or load the site's"
        yield (
            WARN,
            f"{broken.host} (rank {broken.rank}) has a GPU driver, but {broken.gpu_error or 'no GPU is visible to this rank'}",
            fix,
        )
    elif not any(report.gpus for report in reports):
        yield OK, "none", ""
        return
    for node in _by_node(reports)[:_NODES_SHOWN]:
        if node[0].gpus:
            yield (
                OK,
                f"{node[0].host}: {', '.join(sorted(set(node[0].gpus)))} ({len(node[0].gpus)} visible to a rank)",
                "",
            )
    old = next(filter(_too_old, reports), None)
    if old:
        needed, there = (
            ".".join(map(str, capability)) for capability in (OLDEST, old.gpu_capability)
        )
        what = f"a GPU of {old.host} has compute capability {there}, and the kernels need {needed}: PyTorch's operations are taken there"
        yield WARN, what, "nodes with newer GPUs, where the site has them"
    library = reports[0].library
    if library and any(report.gpus for report in reports):
        aware = {
            True: "is CUDA-aware",
            False: "is not CUDA-aware",
            None: "does not say whether it is CUDA-aware",
        }[library.cuda_aware]
        note = "" if library.cuda_aware else ": GPU buffers go through the host"
        fix = (
            ""
            if library.cuda_aware
            else "an MPI built with CUDA support (the site's module, usually)"
        )
        yield (OK if library.cuda_aware else WARN), f"{library.name} {aware}{note}", fix


def _files(reports: Sequence[Report]) -> Found:
    storage = reports[0].storage
    if storage.hdf5 is None:
        yield (
            FAIL,
            "h5py cannot be imported",
            f"{shlex.quote(reports[0].executable)} -m pip install h5py",
        )
        return
    hdf5 = f"HDF5 {storage.hdf5}" + (
        f", HDF5_USE_FILE_LOCKING={storage.locking}" if storage.locking else ""
    )
    where = f"{storage.directory} ({storage.file_system or 'unknown file system'})"
    if not storage.lock_error:
        yield OK, f"{hdf5}; file locks work in {where}", ""
    elif (storage.locking or "").upper() in ("FALSE", "0", "BEST_EFFORT"):
        yield OK, f"{hdf5}; no file locks in {where}, and HDF5 does not ask for them", ""
    else:
        yield (
            WARN,
            f"{hdf5}; no file locks in {where}: {storage.lock_error}",
            "export HDF5_USE_FILE_LOCKING=FALSE",
        )
