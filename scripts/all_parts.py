"""The parts of `scripts/test.sh --all`: what each runs, and which of them a change calls for.

python scripts/all_parts.py                names, minutes and contents
python scripts/all_parts.py names
python scripts/all_parts.py runs NAME      arguments of `tests` in scripts/test.sh, a line each
python scripts/all_parts.py due NUMBER MINUTES [FILE...]
    the parts to run after a change of these files, in so many minutes: those whose rooms it
    touches, then the others; NUMBER, another one for every change, says whose turn it is
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    minutes: int  # on 2 cores of a machine on which `scripts/test.sh` takes ten
    rooms: tuple[str, ...]  # a change below these paths, or of what it runs, touches it
    runs: tuple[str, ...]


GRIDS = "tests/mpi/parallel/test_grids.py"
ZERO = "tests/mpi/parallel/zero"
ACTIVATIONS, OFFLOAD = (f"tests/mpi/parallel/{room}" for room in ("activations", "offload"))
PARALLEL = " ".join(
    ("tests/mpi/parallel", *(f"--ignore={one}" for one in (GRIDS, ZERO, ACTIVATIONS, OFFLOAD)))
)
RANKS = " ".join(
    f"tests/mpi/{room}" for room in ("comm", "checkpoint", "train", "inference", "calibrate")
)
PLANNER = "tests/mpi/planner"
ENGINE = ("hpczero/parallel", "hpczero/model", "hpczero/optim", "numba_cuda")
DEVICES = "tests/mpi/comm " + " ".join(
    f"{ZERO}/test_{kind}.py" for kind in ("data_parallel", "zero", "other_optimizers")
)
SIMULATED = " ".join(
    f"tests/kernels/test_{kind}.py"
    for kind in ("operators", "passes", "signs", "quantised", "frozen_adamw", "lamb", "lion")
)
OPENMPI = "--library openmpi"

PARTS = {
    "unit": Part(15, ("hpczero", "scripts", "setup.cfg"), ("tests/unit",)),
    "kernels": Part(
        5,
        ("numba_cuda",),
        ("tests/kernels", f"--simulator {SIMULATED}"),
    ),
    "commands": Part(
        18,
        tuple(
            f"hpczero/{room}"
            for room in ("calibrate", "commands", "data", "doctor", "spec", "planner", "runs")
        ),
        tuple(
            f"tests/system/{room}"
            for room in ("calibrate", "data", "doctor", "planner", "runs", "scripts", "spec")
        ),
    ),
    "runs": Part(
        19,
        ("hpczero/train", "hpczero/track"),
        ("tests/system/train tests/system/track",),
    ),
    "checkpoints": Part(6, ("hpczero/checkpoint", "hpczero/hdf5"), ("tests/system/checkpoint",)),
    "reports": Part(
        2,
        ("hpczero/report", "hpczero/runs", "templates/report.html.j2"),
        ("tests/system/report",),
    ),
    "jobs": Part(17, ("hpczero/batch", "sites", "templates"), ("tests/system/batch",)),
    "faults": Part(12, ("hpczero/comm",), ("tests/system/comm",)),
    "grids": Part(9, ENGINE, (f"-n 8 {GRIDS}",)),
    "zero": Part(14, ENGINE, (f"-n 8 {ZERO}",)),
    "parallel": Part(16, ENGINE, (f"-n 8 {PARALLEL}",)),
    "activations": Part(20, ENGINE, (f"-n 8 {ACTIVATIONS}",)),
    "offload": Part(9, ENGINE, (f"-n 8 {OFFLOAD}",)),
    "ranks": Part(
        15,
        tuple(
            f"hpczero/{room}" for room in ("comm", "checkpoint", "train", "inference", "calibrate")
        ),
        (f"-n 8 {RANKS}",),
    ),
    "planner": Part(18, ("hpczero/planner", "hpczero/parallel"), (f"-n 8 {PLANNER}",)),
    "devices": Part(
        8,
        ("hpczero/device.py", "hpczero/comm/torch_backend.py"),
        tuple(f"-n 3 --means {means} {DEVICES}" for means in ("gloo", "queued"))
        + tuple(f"-n 2 --means {means} {GRIDS}" for means in ("gloo", "queued")),
    ),
    "openmpi-grids": Part(7, ("hpczero/comm",), (f"-n 8 {OPENMPI} {GRIDS}",)),
    "openmpi-zero": Part(14, ("hpczero/comm",), (f"-n 8 {OPENMPI} {ZERO}",)),
    "openmpi-parallel": Part(15, ("hpczero/comm",), (f"-n 8 {OPENMPI} {PARALLEL}",)),
    "openmpi-activations": Part(17, ("hpczero/comm",), (f"-n 8 {OPENMPI} {ACTIVATIONS}",)),
    "openmpi-offload": Part(9, ("hpczero/comm",), (f"-n 8 {OPENMPI} {OFFLOAD}",)),
    "openmpi-ranks": Part(12, ("hpczero/comm",), (f"-n 8 {OPENMPI} {RANKS}",)),
    "openmpi-planner": Part(14, ("hpczero/comm",), (f"-n 8 {OPENMPI} {PLANNER}",)),
    "many": Part(14, ("hpczero/comm",), ("-n 32 tests/mpi", f"-n 32 {OPENMPI} tests/mpi")),
}


def due(number: int, minutes: float, files: Sequence[str]) -> list[str]:
    """Return the names of the parts that fit into the minutes; the order turns with the number."""
    names = list(PARTS)
    turn = number % len(names)
    names = names[turn:] + names[:turn]
    touched = [name for name in names if touches(files, PARTS[name])]
    found = []
    for name in touched + [name for name in names if name not in touched]:
        if PARTS[name].minutes <= minutes:
            minutes -= PARTS[name].minutes
            found.append(name)
    return found


def touches(files: Sequence[str], part: Part) -> bool:
    runs = [word for line in part.runs for word in line.split() if word.startswith("tests/")]
    rooms = [*part.rooms, *runs]
    return any(file == room or file.startswith(f"{room}/") for file in files for room in rooms)


def main(words: Sequence[str]) -> int:
    match words:
        case []:
            for name, part in PARTS.items():
                print(f"{name:20}{part.minutes:3} min   {'; '.join(part.runs)}")
        case ["names"]:
            print(*PARTS, sep="\n")
        case ["runs", name] if name in PARTS:
            print(*PARTS[name].runs, sep="\n")
        case ["runs", name]:
            print(f"--part {name}: there are {', '.join(PARTS)}", file=sys.stderr)
            return 2
        case ["due", number, minutes, *files]:
            for name in due(int(number), float(minutes), files):
                print(name)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
