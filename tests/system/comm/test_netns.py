"""scripts/netns_testbed.sh: hosts that are network namespaces, and hpczero across them. Needs
root and MPICH; skipped, with the reason, elsewhere.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch import CHECKOUT, Finished, hpczero, launch, mpirun, start
from tests.support.slurm import new_name

SCRIPT = str(CHECKOUT / "scripts" / "netns_testbed.sh")
CANNOT = 3  # the script's exit code where the machine does not allow it
PATH = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
NAMESPACES, STATES = Path("/run/netns"), Path("/run/hpczero-netns")
SMALL = [
    *(
        "--set",
        "model.layers=2",
        "--set",
        "model.hidden=48",
        "--set",
        "model.heads=4",
        "--set",
        "model.seq_len=32",
        "--set",
        "train.steps=4",
    ),
    *(
        "--set",
        "train.global_batch=8",
        "--set",
        "train.micro_batch=2",
        "--set",
        "data.source='synthetic'",
    ),
]
WHERE = """
import socket
from hpczero.comm.world import World
with World.start() as world:
    places = world.gather_objects([socket.gethostname(), world.node, world.local_size])
    if world.rank == 0:
        print(places)
"""
SPEED = """
import time, torch
from hpczero.comm.world import World
with World.start() as world:
    tensor = torch.ones(1 << 19)  # 2 MiB
    world.everyone.all_reduce(tensor)
    began = time.perf_counter()
    world.everyone.all_reduce(tensor)
    if world.rank == 0:
        print(time.perf_counter() - began)
"""


def testbed(*arguments: str) -> Finished:
    return launch([SCRIPT, *arguments], seconds=120, environment=PATH)


testbed.__test__ = False  # type: ignore[attr-defined]


def remains(name: str) -> list[str]:
    return [str(path) for path in [*NAMESPACES.glob(f"{name}-*"), *STATES.glob(name)]]


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    tried = testbed("run", "--hosts", "1", "--ranks-per-host", "1", "--name", new_name(), "true")
    if tried.code == CANNOT:
        pytest.skip(tried.err.strip())
    assert tried.code == 0, tried.err


@pytest.fixture
def name() -> Iterator[str]:
    """Name of a testbed for this test; nothing of it may remain."""
    one = new_name()
    yield one
    left = remains(one)
    testbed("down", "--name", one)
    assert not left


@pytest.mark.slow
def test_a_host_is_a_node(name: str) -> None:
    done = testbed(
        "run", "--name", name, "--hosts", "2", "--ranks-per-host", "2", sys.executable, "-c", WHERE
    )
    assert done.code == 0, done.err
    expected = [[f"{name}-{host}", host - 1, 2] for host in (1, 1, 2, 2)]
    assert str(expected) in done.out


@pytest.mark.slow
def test_the_link_limits_the_speed(name: str) -> None:
    """An all_reduce of 2 MiB over 2 hosts sends 2 MiB from each: at 40 Mbit/s that cannot take
    less than 0.4 s, however fast the machine.
    """
    done = testbed(
        "run",
        "--name",
        name,
        "--rate",
        "40mbit",
        "--ranks-per-host",
        "1",
        sys.executable,
        "-c",
        SPEED,
    )
    assert done.code == 0, done.err
    assert (
        float(done.out) > 0.9 * ((1 << 21) - 2 * 262144) / 5e6
    )  # what each end lets pass at once comes on top


@pytest.mark.slow
def test_training_over_hosts_is_training_on_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text('name = "run"\n')
    common = ["run", str(tmp_path / "spec.toml"), *SMALL]
    across = testbed(
        "run", "--name", name, *hpczero(*common, "--set", f"output='{tmp_path}/across'")
    )
    assert across.code == 0, across.err
    same_layout = [
        "--set",
        "comm.ranks_per_node=2",
        "--set",
        f"output='{tmp_path}/alone'",
    ]  # sums are rounded once in a node and once between them
    alone = launch([*mpirun(4), *hpczero(*common, *same_layout)], seconds=120)
    assert alone.code == 0, alone.err
    hosts = {
        rank["host"]
        for rank in json.loads((tmp_path / "across/run/events.jsonl").read_text().splitlines()[0])[
            "ranks"
        ]
    }
    assert hosts == {f"{name}-1", f"{name}-2"}
    assert losses(tmp_path / "across") == losses(tmp_path / "alone")


def losses(output: Path) -> list[float]:
    return [
        json.loads(line)["loss"]
        for line in (output / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def test_a_command_that_fails_is_reported_and_everything_removed(name: str) -> None:
    assert testbed("run", "--name", name, "sh", "-c", "exit 7").code == 7


def test_a_signal_removes_everything(name: str) -> None:
    # in one go: an unbuffered print writes the end of its line after another rank's
    busy = "import os, time; os.write(1, b'up\\n'); time.sleep(600)"
    process = start([SCRIPT, "run", "--name", name, sys.executable, "-c", busy], environment=PATH)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert (process.returncode, remains(name)) == (130, [])


def test_one_that_is_up_stays_for_several_runs_until_it_is_taken_down(name: str) -> None:
    assert testbed("up", "--name", name, "--rate", "100mbit").code == 0
    assert "is a testbed" in testbed("up", "--name", name).err
    for _ in range(2):
        done = testbed("run", "--name", name, "--ranks-per-host", "1", "hostname")
        assert (done.code, sorted(done.out.split())) == (0, [f"{name}-1", f"{name}-2"]), done.err
    assert "2 hosts, links of 100mbit" in testbed("status", "--name", name).out
    assert testbed("down", "--name", name).code == 0
    assert testbed("status", "--name", name).code == 1


@pytest.mark.parametrize(
    "arguments",
    ["up --hosts 0", "up --rate fast", "up --name ../x", "up --rate", "up now", "run", "sideways"],
)
def test_wrong_arguments_are_refused_before_anything_is_made(arguments: str) -> None:
    done = testbed(*arguments.split())
    assert done.code == 2
    assert "netns_testbed.sh: " in done.err
