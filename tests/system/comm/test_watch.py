"""Ranks that do not come together: the job ends in time, with an error that names operation,
axis and ranks, whatever went wrong.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from hpczero import env
from tests.support.launch import CHECKOUT, Finished, launch, mpirun

SECONDS = 2.0
START = 60  # seconds for the launch itself, on a busy machine

PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
from hpczero.comm.shared_memory import NodeWindow
from hpczero.comm.world import World
from hpczero.device import CPU
from tests.support.queued import Queued

torch.set_num_threads(1)
case, seconds, folder, ranks_per_node = sys.argv[1:5]
seconds = float(seconds)
ranks_per_node = int(ranks_per_node)


def stuck_here():
    while True:
        pass


with World.start(ranks_per_node) as world:
    world.watch(seconds, Path(folder) if folder else None)
    means = sys.argv[5]
    world.use(Queued() if means == "queued" else CPU, "gloo" if means == "gloo" else "mpi")
    everyone = range(world.size)
    data, tensor = world.group("data", everyone), world.group("tensor", everyone)
    large, small = torch.ones(100_000), torch.ones(10)
    data.all_reduce(large)
    world.status.at_step(12)
    odd = world.rank == world.size - 1
    if case == "well":
        end = time.monotonic() + 2 * seconds
        while not data.stack(torch.tensor([time.monotonic() > end])).any():
            for tensors in (large, small):
                data.all_reduce(tensors)
                tensor.all_reduce(tensors)
            tensor.barrier()
            time.sleep(seconds / 4)
    elif case == "absent":
        if odd:
            stuck_here()
        data.all_reduce(large)
    elif case == "started":
        work = data.start_all_reduce(large)
        if odd:
            stuck_here()
        work.wait()
    elif case == "stopped":
        if odd:
            os.kill(os.getpid(), 19)
        data.all_reduce(large)
    elif case == "killed":
        if odd:
            os.kill(os.getpid(), 9)
        data.all_reduce(large)
    elif case == "left":
        if odd:
            sys.exit(0)
        data.all_reduce(large)
    elif case == "closed":
        if not odd:
            data.all_reduce(large)
    elif case == "operations":
        data.all_gather(torch.empty(100_000 * world.size), large) if odd else data.all_reduce(large)
    elif case == "sizes":
        data.all_reduce(torch.ones(100_000 if odd else 99_999))
    elif case == "small sizes":
        data.all_reduce(torch.ones(10 if odd else 11))
    elif case == "crossed":
        for group in (data, tensor) if odd else (tensor, data):
            group.all_reduce(large)
    elif case == "message":
        if odd:
            data.receive(large, 0)
    elif case == "many":
        if odd:
            stuck_here()
        for work in [data.start_all_reduce(large) for _ in range(100)]:
            work.wait()
    elif case == "watchdog fails":
        from hpczero.comm import verdict
        verdict.judge = lambda question, states: states["nobody"]
        if odd:
            stuck_here()
        data.all_reduce(large)
    elif case == "words fail":
        from hpczero.comm import verdict
        verdict.headline = lambda judged, seconds: judged["nobody"]
        if odd:
            stuck_here()
        data.all_reduce(large)
    elif case == "counter":
        window = NodeWindow.allocate(world, everyone, 0, name="weights")
        if odd:
            stuck_here()
        window.post(3, 7)
        window.wait(3, 7)
    elif case == "window ends":
        window = NodeWindow.allocate(world, everyone, 0, name="weights")
        if odd:
            stuck_here()
        window.close()
    elif case == "group":
        if odd:
            stuck_here()
        world.group("late", everyone)
    elif case == "share":
        world.gather_objects(1) if odd else world.broadcast_object(1)
"""


def watched(
    tmp_path: Path,
    case: str,
    ranks: int = 2,
    folder: Path | None = None,
    ranks_per_node: int = 0,
    means: str = "mpi",
) -> Finished:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    arguments = [str(program), case, str(SECONDS), str(folder or ""), str(ranks_per_node), means]
    path = {
        "PYTHONPATH": f"{CHECKOUT}:{env.variable('PYTHONPATH') or ''}"
    }  # for tests.support.queued
    ended = launch(
        [*mpirun(ranks), sys.executable, *arguments], SECONDS + 10 + START, tmp_path, path
    )
    assert ended.left == []
    return ended


def failed(tmp_path: Path, case: str, *expected: str, means: str = "mpi") -> str:
    ended = watched(tmp_path, case, means=means)
    assert ended.code not in (0, None), ended
    for text in expected:
        assert re.search(text, ended.err), ended.err
    return ended.err


@pytest.mark.slow
def test_ranks_that_come_are_left_alone(tmp_path: Path) -> None:
    """For longer than the time allowed for one wait."""
    ended = watched(tmp_path, "well", folder=tmp_path / "watch")
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    assert [path.name for path in (tmp_path / "watch").iterdir()] == ["asked"]  # of who looks on


def test_a_rank_that_does_not_come_is_named_and_both_show_their_stacks(tmp_path: Path) -> None:
    said = failed(
        tmp_path,
        "absent",
        (
            r"rank 0 on \S+: all_reduce sum of 400000 bytes of float32 \(number 2 along data\): "
            r"after 2\.\d s a rank did not come"
        ),
        r"waiting in it: rank 0\n",
        (
            r"not come: rank 1 on \S+: step 12; in no operation for \d\.\d s; started last along "
            r"data: all_reduce .* \(number 1\)"
        ),
        r"stacks of rank 0 on \S+:\n(.*\n)*.* in all_reduce\n(.*\n)*.*program.py",
        r"stacks of rank 1 on \S+:\n.*\n.*program.py\", line \d+ in stuck_here",
    )
    assert said.count("hpczero: rank") == 1


@pytest.mark.slow
def test_a_rank_that_has_started_many_operations_waits_for_the_first(tmp_path: Path) -> None:
    failed(
        tmp_path,
        "many",
        r"number 2 along data\): after 2\.\d s a rank did not come",
        r"not come: rank 1 on \S+: step 12; in no operation for .* \(number 1\)",
        "in stuck_here",
    )


@pytest.mark.parametrize("case", ["watchdog fails", "words fail"])
@pytest.mark.slow
def test_an_error_of_the_watchdog_ends_the_job_with_that_error(tmp_path: Path, case: str) -> None:
    failed(tmp_path, case, r"hpczero: rank 0 on \S+: .*the watchdog failed", "KeyError: 'nobody'")


@pytest.mark.slow
def test_a_rank_that_leaves_an_operation_under_way(tmp_path: Path) -> None:
    failed(
        tmp_path,
        "started",
        "all have come, but it does not end",
        r"has started it.*: rank 1 on .*: step 12; in no operation",
        "in stuck_here",
    )


@pytest.mark.slow
def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    failed(tmp_path, "stopped", r"not come: rank 1 on \S+: step 12; its process is stopped")


@pytest.mark.parametrize("case", ["killed", "left"])
@pytest.mark.slow
def test_a_rank_that_ends_takes_the_job_with_it(tmp_path: Path, case: str) -> None:
    ended = watched(tmp_path, case)
    assert ended.code not in (0, None)


@pytest.mark.slow
def test_a_rank_that_closes_early(tmp_path: Path) -> None:
    failed(
        tmp_path,
        "closed",
        r"not come: rank \d on .*waits since \d\.\d s in (close|all_reduce)",
        r"close \(number \d along world\)",
    )


@pytest.mark.slow
@pytest.mark.parametrize("means", ["gloo", "queued"])
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("well", ""),
        (
            "absent",
            (
                r"all_reduce sum of 400000 bytes of float32 \(number 2 along data\): after 2\.\d "
                r"s (.*\n)*.*not come: rank 1 on \S+: step 12"
            ),
        ),
        ("started", r"has started it.*: rank 1 on .*: step 12; in no operation"),
        (
            "operations",
            (
                r"number 2 along data is (all_gather of 800000|all_reduce sum of 400000) bytes "
                r"of float32 there, all_\w+ .*here"
            ),
        ),
        ("group", "not come: rank 1 on"),
    ],
)
def test_the_same_whatever_carries_the_collectives(
    tmp_path: Path, case: str, said: str, means: str
) -> None:
    ended = watched(tmp_path, case, means=means)
    assert (ended.code == 0) == (case == "well"), ended
    assert re.search(said, ended.err), ended.err


@pytest.mark.slow
def test_different_operations(tmp_path: Path) -> None:
    there_and_here = (
        r"number 2 along data is (all_gather of 800000|all_reduce sum of 400000) bytes of "
        r"float32 there, all_\w+ .*here"
    )
    failed(
        tmp_path,
        "operations",
        "not all ranks are in the same operation",
        r"in a different operation: rank \d",
        there_and_here,
    )


@pytest.mark.parametrize(
    ("case", "one", "other"), [("sizes", 400000, 399996), ("small sizes", 40, 44)]
)
@pytest.mark.slow
def test_different_sizes(tmp_path: Path, case: str, one: int, other: int) -> None:
    failed(
        tmp_path,
        case,
        "not with the same size",
        rf"all_reduce sum of ({one}|{other}) bytes of float32 there",
    )


@pytest.mark.slow
def test_operations_on_two_axes_crossed(tmp_path: Path) -> None:
    said = failed(
        tmp_path,
        "crossed",
        r"after 2\.\d s a rank did not come",
        r"not come: rank \d .*waits since \d\.\d s in all_reduce",
    )
    assert "(number 1 along tensor)" in said
    assert "(number 2 along data)" in said


@pytest.mark.slow
def test_a_message_that_nobody_sends(tmp_path: Path) -> None:
    failed(
        tmp_path, "message", r"receive 1 of 400000 bytes from rank 0 along data", "not come: rank"
    )


@pytest.mark.slow
def test_a_counter_that_is_not_posted(tmp_path: Path) -> None:
    failed(
        tmp_path,
        "counter",
        r"rank 0 on \S+: counter 3 of window weights to reach 7: after 2\.\d s",
        "not come: rank 1 on",
        "in stuck_here",
    )


@pytest.mark.slow
def test_a_window_that_is_not_closed_by_all(tmp_path: Path) -> None:
    failed(
        tmp_path,
        "window ends",
        r"the end of a window: after 2\.\d s a rank did not come",
        "not come: rank 1 on",
    )


@pytest.mark.slow
def test_a_group_that_is_not_made_by_all(tmp_path: Path) -> None:
    failed(
        tmp_path,
        "group",
        r"making group late: after 2\.\d s a rank did not come",
        "not come: rank 1 on",
    )


@pytest.mark.slow
def test_calls_of_the_world_that_do_not_fit(tmp_path: Path) -> None:
    failed(
        tmp_path,
        "share",
        "not all ranks are in the same operation",
        (
            r"number \d along world is (broadcast|gather)_objects? there, "
            r"(broadcast|gather)_objects? here"
        ),
    )


@pytest.mark.slow
def test_ranks_of_other_nodes_are_told_about_in_the_folder(tmp_path: Path) -> None:
    """Two tried-out nodes of one rank each, which do not see each other's slots."""
    folder = tmp_path / "run" / "watch"
    ended = watched(tmp_path, "absent", ranks=2, folder=folder, ranks_per_node=1)
    assert ended.code not in (0, None)
    assert re.search(
        r"not come: rank 1 on \S+: step 12; in no operation for \d\.\d s", ended.err
    ), ended.err
    assert re.search(r"stacks of rank 1 on \S+:\n(.*\n)*.*in stuck_here", ended.err), ended.err
    assert json.loads((folder / "node-0001.json").read_text())["states"]["1"]["step"] == 12
    assert "waiting in it: rank 0" in (folder / "node-0000.txt").read_text()
