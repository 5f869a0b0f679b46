"""Faults of one rank while it trains, and how the job ends: at every stage, with few and many
units.

`python -m tests.support.faults` tries all of them and says how many ended in time and named the
right rank;
`--kinds stop sleep`, `--units 6` and so on choose. `tests/system/comm/test_faults.py` tries some.
"""

import argparse
import itertools
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.launch import Finished, launch, mpirun

SECONDS = 5.0  # comm.timeout_s
START = 60  # seconds for the launch itself, on a busy machine
RANKS = 3
ODD = RANKS - 1  # the rank with the fault, unless it is said to be rank 0

FINE, SAID, WATCHED, LAUNCHER = (
    "ends well",
    "says so itself",
    "is named",
    "is ended by the launcher",
)

# What a fault leads to at stages 0 to 3.
KINDS: dict[str, tuple[str, str, str, str]] = {
    "sleep": (WATCHED,) * 4,
    "given_world": (WATCHED,) * 4,
    "short_sleep": (FINE,) * 4,
    "stop": (WATCHED,) * 4,
    "gil": (WATCHED,) * 4,
    "exit0": (LAUNCHER,) * 4,
    "kill": (LAUNCHER,) * 4,
    "segv": (LAUNCHER,) * 4,
    "sysexit": (SAID,) * 4,
    "sysexit_one": (SAID,) * 4,
    "raise": (SAID,) * 4,
    "kbd": (SAID,) * 4,
    "return": (WATCHED,) * 4,
    "skip_backward": (SAID,) * 4,
    "backward_twice": (FINE, FINE, WATCHED, WATCHED),
    "skip_step": (WATCHED,) * 4,
    "step_twice": (SAID,) * 4,
    "step_sd": (FINE, WATCHED, WATCHED, WATCHED),
    "gathered_one": (FINE, FINE, FINE, WATCHED),
    "modify_one": (WATCHED,) * 4,
    "eval_one": (FINE, FINE, FINE, WATCHED),
}

# Where the ranks of a node share all weights, these need nobody else.
LOCAL = ("gathered_one", "eval_one")

# MPICH's mpirun ends the others then, and with 0 in three of eight tries: no rank has failed.
SILENT = ("exit0",)

PROGRAM = """
import ctypes, os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
import hpczero

torch.set_num_threads(1)
kind, stage, shared, units = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1", int(sys.argv[4])
seconds, moment = float(sys.argv[5]), Path(sys.argv[6])
width = 16
net = nn.Sequential(*(nn.Linear(width, width) for _ in range(units)))
spec = {
    "train": {"precision": "fp32", "steps": 50},
    "zero": {"stage": stage, "node_shared": shared},
    "comm": {"timeout_s": seconds},
}


def befall():
    if kind in ("sleep", "given_world"):
        time.sleep(6 * seconds)
    elif kind == "short_sleep":
        time.sleep(seconds / 2)
    elif kind == "gil":
        ctypes.PyDLL(None).sleep(int(6 * seconds))
    elif kind in ("stop", "kill", "segv"):
        os.kill(os.getpid(), {"stop": 19, "kill": 9, "segv": 11}[kind])
    elif kind == "exit0":
        os._exit(0)
    elif kind == "sysexit":
        sys.exit(0)
    elif kind == "sysexit_one":
        sys.exit(3)
    elif kind == "raise":
        raise RuntimeError("on purpose")
    elif kind == "kbd":
        raise KeyboardInterrupt


world = hpczero.World.start() if kind == "given_world" else None
with hpczero.initialize(net, spec, world) as engine:
    def loss():
        return engine(torch.ones(2, width)).square().sum()

    for step in range(6):
        odd = step == 3 and engine.rank == (0 if kind == "eval_one" else engine.size - 1)
        if odd:
            moment.write_text(str(time.time()))
            befall()
            if kind == "return":
                break
        value = loss()
        if not (kind == "skip_backward" and odd):
            engine.backward(value)
        if kind == "backward_twice" and odd:
            engine.backward(loss())
        if not (kind == "skip_step" and odd):
            engine.step()
        if kind == "step_twice" and odd:
            engine.step()
        if kind == "step_sd" and odd:
            engine.full_state_dict()
        if kind in ("gathered_one", "modify_one") and odd:
            with engine.gathered(engine.module[0].parameters(), modify=kind == "modify_one"):
                pass
        if kind == "eval_one" and odd:
            with torch.no_grad():
                loss()
print("the end", flush=True)
"""


@dataclass(frozen=True)
class Case:
    kind: str
    stage: int
    shared: bool
    units: int

    @property
    def expected(self) -> str:
        if self.shared and self.kind in LOCAL:
            return FINE
        if self.kind == "eval_one" and self.units == 2:
            return FINE  # two units stay gathered from a step to the next: nobody else is needed
        return KINDS[self.kind][self.stage]

    @property
    def odd(self) -> int:
        return 0 if self.kind == "eval_one" else ODD

    def __str__(self) -> str:
        where = "shared" if self.shared else "own"
        return f"{self.kind}-stage{self.stage}-{where}-{self.units}units"


@dataclass(frozen=True)
class Outcome:
    """`seconds` from the fault to the end of the job."""

    finished: Finished
    seconds: float
    named: bool

    def complaint(self, case: Case) -> str:
        """Return what is wrong with how the job ended; "" if nothing is."""
        ended = self.finished
        if ended.code is None:
            return "it hangs"
        if ended.left:
            return f"processes are left: {ended.left}"
        if "the watchdog failed" in ended.err or "IndexError" in ended.err:
            return "the watchdog failed"
        if case.expected == FINE:
            return "" if ended.code == 0 and ended.out.count("the end") == RANKS else "it fails"
        if "the end" in ended.out or (ended.code == 0 and case.kind not in SILENT):
            return "it ends as if all were well"
        return "" if self.named or case.expected == LAUNCHER else "the right rank is not named"


def try_out(case: Case, folder: Path, seconds: float = SECONDS) -> Outcome:
    """`seconds`: that a rank waits for the others."""
    program, moment = folder / "program.py", folder / "moment"
    program.write_text(PROGRAM)
    moment.unlink(missing_ok=True)
    facts = [case.kind, case.stage, int(case.shared), case.units, seconds, moment]
    command = [*mpirun(RANKS), sys.executable, str(program), *map(str, facts)]
    ended = launch(command, START + 2 * seconds, folder)
    since = time.time() - float(moment.read_text()) if moment.exists() else float("nan")
    return Outcome(ended, since, named(case, ended.err))


def named(case: Case, text: str) -> bool:
    """By itself or, as the only one, by another rank."""
    if case.expected == SAID:
        return f"hpczero: rank {case.odd} on " in text
    blamed = re.search(r"most likely the cause: ranks? ([\d ]+) on ", text)
    return bool(blamed) and blamed[1].split() == [str(case.odd)]  # type: ignore[index]


def product(kinds: Sequence[str], stages: Sequence[int], units: Sequence[int]) -> list[Case]:
    chosen = itertools.product(kinds, stages, (False, True), units)
    return [Case(kind, stage, shared, count) for kind, stage, shared, count in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--units", nargs="+", type=int, default=[2, 6, 40])
    options = parser.parse_args()
    cases = product(options.kinds, options.stages, options.units)
    wrong, late = [], []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            outcome = try_out(case, Path(folder))
            complaint = outcome.complaint(case)
            print(f"{case}: {outcome.seconds:.1f} s {complaint or 'well'}", flush=True)
            if complaint:
                wrong.append(case)
                print(outcome.finished.err, flush=True)
            if case.expected != FINE and not outcome.seconds < 2 * SECONDS:
                late.append(case)
    print(
        f"{len(cases)} faults: {len(cases) - len(wrong)} ended as they should, with the right rank"
    )
    print(
        f"{len(late)} of them later than {2 * SECONDS:.0f} s after the fault: "
        f"{list(map(str, late))}"
    )


if __name__ == "__main__":
    main()
