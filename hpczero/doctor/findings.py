"""Judging the facts of all ranks: findings with a verdict, what was found, and the fix (pure)."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpczero import env
from hpczero.doctor.facts import Report, by_node, table
from hpczero.text import format_binary, format_count
from hpczero_kernels.table import MIN_CAPABILITY

OK, WARN, FAIL = "ok", "WARN", "FAIL"
_MIB, _GIB = 1 << 20, 1 << 30
# Bytes that the MPIs themselves take in /dev/shm (Open MPI: 16 MiB a rank), and as much again.
_SHM_PER_RANK = 32 * _MIB
_LEAST_MEMORY = _GIB // 2  # a rank with torch loaded, and little else
_LARGEST_SKEW = 1.0  # seconds between the nodes' clocks
_MUST_AGREE = ("python", "hpczero", "torch", "mpi4py")
_NODES_SHOWN = 8
_UNBIND = "(--bind-to none with Open MPI, -bind-to none with MPICH, --cpus-per-task with srun)"
_CUDA_AWARE = {
    True: "is CUDA-aware",
    False: "is not CUDA-aware",
    None: "does not say whether it is CUDA-aware",
}


@dataclass(frozen=True)
class Finding:
    topic: str
    verdict: str
    what: str
    fix: str = ""


Findings = Iterator[tuple[str, ...]]  # verdict, what, and maybe a fix


def judge(reports: Sequence[Report]) -> list[Finding]:
    """Return all findings about these ranks, by topic."""
    topics: dict[str, Callable[[Sequence[Report]], Findings]] = {
        "Software": _software,
        "MPI": _mpi,
        "Ranks": _ranks,
        "Cores": _cores,
        "Memory": _memory,
        "Shared memory": _shared_memory,
        "GPUs": _gpus,
        "Files": _files,
    }
    return [
        Finding(topic, *finding) for topic, judged in topics.items() for finding in judged(reports)
    ]


def _software(reports: Sequence[Report]) -> Findings:
    first = reports[0]
    installed = {"python": first.python} | {
        name: version for name, version in first.packages.items() if version
    }
    yield OK, ", ".join(f"{name} {version}" for name, version in installed.items())
    missing = [name for name in ("torch", "mpi4py", "numba") if not first.packages[name]]
    if missing:
        verdict = FAIL if first.under_a_launcher else WARN
        needed = "needed to train, not to write, check and submit specs"
        yield verdict, f"missing: {', '.join(missing)}; {needed}", _install(first, "train")
    for name in installed:
        if where := _differences(reports, partial(_version, name)):
            verdict = FAIL if name in _MUST_AGREE else WARN
            what = f"{name} is not the same everywhere: {where}"
            yield verdict, what, "use one environment on all nodes"
    if first.packages["numba"]:
        nvidia = first.packages["numba-cuda"]
        used = f"NVIDIA's numba-cuda {nvidia}" if nvidia else "numba's built-in, deprecated one"
        what = f"kernels' CUDA target: {used}"
        if not nvidia and any(report.gpus and not _too_old(report) for report in reports):
            yield WARN, what, _install(first, "cuda")
        else:
            yield OK, what
    yield OK, "; ".join(_kernels(first))


def _differences(reports: Sequence[Report], value: Callable[[Report], str | None]) -> str:
    """Return each value with the first rank that has it; "" if all ranks have the same."""
    first_with = {value(report): report for report in reversed(reports)}
    if len(first_with) < 2:
        return ""
    return ", ".join(
        f"{value} on {report.host} (rank {report.rank})" for value, report in first_with.items()
    )


def _kernels(report: Report) -> Iterator[str]:
    for device, title in (("cpu", "kernels on CPUs"), ("cuda", "on GPUs")):
        by: dict[str, list[str]] = {}
        for operation, implementation in report.kernels[device].items():
            by.setdefault(implementation, []).append(operation)
        parts = [f"{' '.join(operations)} by {name}" for name, operations in by.items()]
        yield f"{title}: {', '.join(parts)}"


def _version(name: str, report: Report) -> str | None:
    return report.python if name == "python" else report.packages.get(name)


def _library_path(report: Report) -> str | None:
    return report.library.path if report.library else None


def _install(report: Report, extra: str) -> str:
    return env.install_command(report.executable, report.source, extra)


def _mpi(reports: Sequence[Report]) -> Findings:
    first = reports[0]
    if len(first.wheels) > 1:
        wheels = " and ".join(first.wheels)
        what = f"this Python environment holds {wheels}, which overwrite each other's files"
        yield FAIL, what, "make a new virtual environment with one of them alone"
    library = first.library
    if library is None:
        if first.packages["mpi4py"]:
            verdict = FAIL if first.under_a_launcher else WARN
            fix = f"load the site's MPI module, or take PyPI's: {_install(first, 'mpi')}"
            yield verdict, f"no MPI could be started: {first.library_error}", fix
        return
    major, minor = library.standard
    yield OK, f"{library.name} (MPI {major}.{minor}): {library.path}\n{library.why}"
    started = [report for report in reports if report.library]
    if where := _differences(started, _library_path):
        what = f"not the same library everywhere: {where}"
        yield FAIL, what, "load the same module on all nodes"
    if first.library_error:
        fix = "load the module that this library belongs to, and use its mpirun"
        if library.mpirun:
            fix = f"{library.mpirun} -n N hpczero ..."
        yield FAIL, first.library_error, fix
        return
    yield from _launch(first)
    verdict = OK if library.threads in ("serialized", "multiple") else FAIL
    yield verdict, f"thread level: {library.threads}"
    if major < 4:
        pieces = "hpczero sends what is larger than 2^31 elements in pieces"
        yield OK, f"MPI {major} has no large counts: {pieces}"


def _launch(report: Report) -> Findings:
    """Judge the mpirun in use, or the one that would be used: it must belong to the library."""
    library = report.library
    launcher = report.launcher
    command = launcher.command if launcher else report.mpirun_on_path
    if library is None or library.mpirun is None:
        return
    if command is None:
        yield OK, f"its mpirun: {library.mpirun}"
        return
    used = Path(command)
    wanted = Path(library.mpirun)
    if used.parent.resolve() == wanted.parent.resolve() or used.name == "srun":
        yield OK, f"its mpirun is the one {'in use' if launcher else 'on the PATH'}: {command}"
    else:
        role = "the launcher in use" if launcher else "the mpirun on the PATH"
        fix = f"{library.mpirun} -n N hpczero ..."
        yield WARN, f"{role}, {command}, is not this library's", fix


def _ranks(reports: Sequence[Report]) -> Findings:
    first = reports[0]
    nodes = by_node(reports)
    job = f"{format_count(len(reports), 'rank')} on {format_count(len(nodes), 'node')}"
    if first.library_error and first.under_a_launcher:
        job = "this process only; the other ranks cannot be reached"
    yield OK, "\n".join([job, *table(nodes, _NODES_SHOWN)])
    last = max(reports, key=lambda report: abs(report.skew))
    if abs(last.skew) > _LARGEST_SKEW:
        what = f"the clocks of {first.host} and {last.host} differ by {abs(last.skew):.1f} s"
        yield WARN, what, "ask for time synchronisation (NTP) on the nodes"


def _each_node(
    reports: Sequence[Report], judged: Callable[[Sequence[Report]], Findings]
) -> Findings:
    """Yield the findings about each node.

    Of many nodes only those with complaints are shown, a few of them, and the number of the others.
    """
    nodes = [list(judged(node)) for node in by_node(reports)]
    if len(nodes) > _NODES_SHOWN:
        nodes = [node for node in nodes if any(finding[0] != OK for finding in node)] or nodes
    for node in nodes[:_NODES_SHOWN]:
        yield from node
    more = [finding for node in nodes[_NODES_SHOWN:] for finding in node]
    if more:
        verdict, _, *fix = max(more, key=lambda finding: (OK, WARN, FAIL).index(finding[0]))
        others = format_count(len(nodes) - _NODES_SHOWN, "more node")
        yield verdict, f"... and the same kind of finding on {others}", *fix


def _cores(reports: Sequence[Report]) -> Findings:
    findings = list(_each_node(reports, _cores_of))
    yield from findings or [(OK, "each rank has cores of its own")]


def _cores_of(node: Sequence[Report]) -> Findings:
    first = node[0]
    ranks = len(node)
    cores = len({core for report in node for core in report.cores})
    room = cores if first.quota is None else min(cores, first.quota)
    given = first.launcher.cores if first.launcher else 0
    if ranks > room:
        quota = "" if first.quota is None else f" and a CPU quota of {first.quota:g}"
        fix = f"start at most {format_count(max(1, int(room)), 'rank')} on such a node"
        if given > cores:
            fix = f"let the ranks use all cores {_UNBIND}"
        limit = f"{format_count(cores, 'core')}{quota}"
        yield WARN, f"{first.host}: {ranks} ranks share {limit}: they wait for each other", fix
    elif first.quota is not None and first.quota < cores:
        allowed = f"of which the cgroup's CPU quota allows {first.quota:g}"
        yield OK, f"{first.host}: {cores} cores, {allowed}"
    if given > cores and ranks <= room and first.under_a_launcher:
        bound = f"the ranks are bound to {cores} of {given} cores; {given - cores} idle"
        yield WARN, f"{first.host}: {bound}", f"more ranks, or let them use all cores {_UNBIND}"


def _memory(reports: Sequence[Report]) -> Findings:
    return _each_node(reports, _memory_of)


def _memory_of(node: Sequence[Report]) -> Findings:
    first = node[0]
    limit = "no cgroup limit"
    if first.memory_limit is not None:
        limit = f"of which the cgroups allow {first.memory_limit / _GIB:.1f}"
    free = f"{first.usable / _GIB:.1f} GiB free for {format_count(len(node), 'rank')}"
    what = f"{first.host}: {first.physical / _GIB:.1f} GiB, {limit}; {free}"
    if first.usable < len(node) * _LEAST_MEMORY:
        fix = "end what else runs on the node, ask for more memory, or start fewer ranks"
        yield WARN, what, fix
    else:
        yield OK, what


def _shared_memory(reports: Sequence[Report]) -> Findings:
    return _each_node(reports, _shared_memory_of)


def _shared_memory_of(node: Sequence[Report]) -> Findings:
    first = node[0]
    needed = len(node) * _SHM_PER_RANK
    if first.shm is None:
        fix = "mount a tmpfs there (docker: --shm-size=8g)"
        yield FAIL, f"{first.host}: there is no /dev/shm", fix
        return
    size, free = first.shm
    what = f"{first.host}: /dev/shm has {format_binary(free)} free of {format_binary(size)}"
    if free < needed:
        larger = "make it larger (docker: --shm-size=8g; else mount -o remount,size=8g /dev/shm)"
        yield (
            WARN,
            f"{what}; {format_count(len(node), 'rank')} may need {format_binary(needed)}",
            larger,
        )
    else:
        yield OK, what
    yield from _segments(first)


def _segments(report: Report) -> Findings:
    if report.removed:
        yield OK, f"{report.host}: removed {_summary(report.removed)} that nobody used any more"
    if not report.stale:
        return
    stale = f"{report.host}: {_summary(report.stale)}"
    if report.sees_all:
        what = f"{stale} left behind by processes that have ended"
        yield WARN, what, "hpczero doctor --clean"
    else:
        unseen = "this container shares /dev/shm with processes that it cannot see"
        yield OK, f"{stale} may be stale, but {unseen}: run `hpczero doctor --clean` outside"


def _summary(segments: Sequence[tuple[str, int, str]]) -> str:
    makers = " and ".join(sorted({maker for _, _, maker in segments}))
    size = format_binary(sum(size for _, size, _ in segments))
    return f"{format_count(len(segments), 'segment')} of {makers} ({size})"


def _too_old(report: Report) -> bool:
    return bool(report.gpus) and tuple(report.gpu_capability) < MIN_CAPABILITY


def _gpus(reports: Sequence[Report]) -> Findings:
    broken = next((report for report in reports if report.gpu_driver and not report.gpus), None)
    if broken:
        why = broken.gpu_error or "no GPU is visible to this rank"
        what = f"{broken.host} (rank {broken.rank}) has a GPU driver, but {why}"
        offered = "`nvidia-smi` says which CUDA it offers"
        yield WARN, what, f"install a torch that fits the driver ({offered}), or load the site's"
    elif not any(report.gpus for report in reports):
        yield OK, "none"
        return
    for first, *_ in by_node(reports)[:_NODES_SHOWN]:
        if first.gpus:
            names = ", ".join(sorted(set(first.gpus)))
            yield OK, f"{first.host}: {names} ({len(first.gpus)} visible to a rank)"
    old = next(filter(_too_old, reports), None)
    if old:
        actual, needed = (".".join(map(str, pair)) for pair in (old.gpu_capability, MIN_CAPABILITY))
        what = f"a GPU of {old.host} has compute capability {actual}, and the kernels need {needed}"
        fix = "nodes with newer GPUs, where the site has them"
        yield WARN, f"{what}: PyTorch's operations are taken there", fix
    library = reports[0].library
    if library and any(report.gpus for report in reports):
        what = f"{library.name} {_CUDA_AWARE[library.cuda_aware]}"
        if library.cuda_aware:
            yield OK, what
        else:
            fix = "an MPI built with CUDA support (the site's module, usually)"
            yield WARN, f"{what}: GPU buffers go through the host", fix


def _files(reports: Sequence[Report]) -> Findings:
    storage = reports[0].storage
    if storage.hdf5 is None:
        python = shlex.quote(reports[0].executable)
        yield FAIL, "h5py cannot be imported", f"{python} -m pip install h5py"
        return
    hdf5 = f"HDF5 {storage.hdf5}"
    if storage.locking:
        hdf5 += f", HDF5_USE_FILE_LOCKING={storage.locking}"
    where = f"{storage.directory} ({storage.file_system or 'unknown file system'})"
    if not storage.lock_error:
        yield OK, f"{hdf5}; file locks work in {where}"
    elif (storage.locking or "").upper() in ("FALSE", "0", "BEST_EFFORT"):
        yield OK, f"{hdf5}; no file locks in {where}, and HDF5 does not ask for them"
    else:
        what = f"{hdf5}; no file locks in {where}: {storage.lock_error}"
        yield WARN, what, "export HDF5_USE_FILE_LOCKING=FALSE"
