"""A Slurm of its own for a test module: scripts/slurm_testbed.sh, up before and down after."""

import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.support.launch import CHECKOUT, Finished, launch

SCRIPT = str(CHECKOUT / "scripts" / "slurm_testbed.sh")
CANNOT = 3  # the script's exit code where the machine lacks what it needs


def the_script(verb: str, name: str, path: str | None = None) -> Finished:
    return launch(
        [SCRIPT, verb, "--name", name], seconds=200, environment={"PATH": path} if path else None
    )


def new_name() -> str:
    return "t" + uuid.uuid4().hex[:8]


@contextmanager
def running() -> Iterator[dict[str, str]]:
    """The variables that lead to a new testbed; skips the test, with the reason, where there can
    be none.
    """
    name = new_name()
    # not by `launch`, which would end the daemons with the script
    up = subprocess.run(
        [SCRIPT, "up", "--name", name], capture_output=True, text=True, timeout=200, check=False
    )
    if up.returncode == CANNOT and "not found" in up.stderr:
        pytest.skip(up.stderr.strip())
    assert up.returncode == 0, up.stderr
    try:
        yield {"SLURM_CONF": up.stdout.partition("=")[2].strip()}
    finally:
        down = the_script("down", name)
        assert (down.code, down.left) == (0, []), down.err


def await_that(
    condition: Callable[[], object], seconds: float, what: str, look_every: float = 0.3
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(look_every)
