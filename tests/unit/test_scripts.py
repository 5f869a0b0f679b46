"""The shell behind scripts/quickstart.sh and scripts/test.sh, tried without installing anything."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch import CHECKOUT


def bash(code: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": path or os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    script = f"set -euo pipefail\nsource scripts/environment.sh\n{code}"
    return subprocess.run(
        [shutil.which("bash") or "bash", "-c", script],
        cwd=CHECKOUT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for PATH with the tools that the scripts need, but no Python."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("basename", "cat", "cksum", "dirname", "flock", "rm", "mkdir"):
        (folder / name).symlink_to(shutil.which(name) or "")
    return folder


def program(path: Path, code: str) -> None:
    path.write_text(f"#!{shutil.which('bash')}\n{code}\n")
    path.chmod(0o755)


def test_a_python_that_is_too_old_is_named(tools: Path) -> None:
    program(tools / "python3", 'if [ "$1" = --version ]; then echo Python 3.9.2; else exit 1; fi')
    result = bash("find_python", str(tools))
    assert result.returncode == 1
    assert "needs Python 3.11 or newer" in result.stderr
    assert "python3 is Python 3.9.2" in result.stderr


def test_no_python_at_all_is_said(tools: Path) -> None:
    result = bash("find_python", str(tools))
    assert result.returncode == 1
    assert "found none" in result.stderr


def test_a_python_without_venv_is_named(tools: Path) -> None:
    program(tools / "python3.12", 'case "$2" in *%d*) echo python3.12-venv;; *venv*) exit 1;; esac')
    result = bash("find_python", str(tools))
    assert result.returncode == 1
    assert "python3.12 has no venv (Debian and Ubuntu: install python3.12-venv)" in result.stderr


def test_a_newer_python_beside_an_old_one_is_found(tools: Path) -> None:
    program(tools / "python3", "exit 1")
    (tools / "python3.11").symlink_to(sys.executable)
    assert bash("find_python", str(tools)).stdout == "python3.11\n"


def test_the_users_python_comes_first(tools: Path) -> None:
    (tools / "python3").symlink_to(sys.executable)
    (tools / "my own").symlink_to(sys.executable)
    assert bash("HPCZERO_PYTHON='my own'; find_python", str(tools)).stdout == "my own\n"


def test_a_folder_of_somebody_else_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    result = bash(f"make_environment {tmp_path} train")
    assert result.returncode == 1
    assert "was not made by this script" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_half_made_environment_is_made_again_and_a_finished_one_kept(
    tools: Path, tmp_path: Path
) -> None:
    """A Python that makes fake environments; its pip fails the first time."""
    log, venv = tmp_path / "log", tmp_path / "venv"
    pip = f"case $2 in pip) echo pip >>{log}; [ $(cat {log} | wc -l) -gt 1 ];; esac"
    make = f"case $2 in venv) mkdir -p $3/bin; cp {tmp_path}/pip $3/bin/python;; esac"
    for name in ("wc", "cp"):
        (tools / name).symlink_to(shutil.which(name) or "")
    program(tmp_path / "pip", pip)
    program(tools / "python3", make)
    first, second, third = (bash(f"make_environment {venv} train", str(tools)) for _ in range(3))
    assert first.returncode == 1
    assert "run this again" in first.stderr
    assert second.returncode == 0
    assert third.returncode == 0
    assert log.read_text() == "pip\npip\n"


def test_of_two_that_make_an_environment_at_once_one_does(tools: Path, tmp_path: Path) -> None:
    log, venv = tmp_path / "log", tmp_path / "venv"
    for name in ("sleep", "cp"):
        (tools / name).symlink_to(shutil.which(name) or "")
    program(tmp_path / "pip", f"case $2 in pip) sleep 1; echo pip >>{log};; esac")
    make = f"case $2 in venv) mkdir -p $3/bin; cp {tmp_path}/pip $3/bin/python;; esac"
    program(tools / "python3", make)
    make = f"make_environment {venv} train"
    both = bash(f"{make} & {make}; wait $!", str(tools))
    assert (both.returncode, log.read_text()) == (0, "pip\n"), both


def test_an_environment_is_also_made_where_files_cannot_be_locked(
    tools: Path, tmp_path: Path
) -> None:
    (tools / "flock").unlink()
    program(tools / "flock", "echo 'flock: 9: Function not implemented' >&2; exit 69")
    (tools / "cp").symlink_to(shutil.which("cp") or "")
    program(tmp_path / "pip", "exit 0")
    make = f"case $2 in venv) mkdir -p $3/bin; cp {tmp_path}/pip $3/bin/python;; esac"
    program(tools / "python3", make)
    made = bash(f"make_environment {tmp_path}/venv train", str(tools))
    assert (made.returncode, made.stderr) == (0, "")


def parts(code: str) -> subprocess.CompletedProcess[str]:
    return bash(f'source scripts/parts.sh\n{code}\ncat "$results/parts"')


def test_a_part_enters_its_exit_code() -> None:
    lines = parts("part good 60 true; part bad 60 bash -c 'exit 3'").stdout.splitlines()
    assert [line.split("\t")[:3] for line in lines[-2:]] == [["good", "0", "0"], ["bad", "3", "0"]]


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_that_of_the_last_command(code: int) -> None:
    """With parts one after the other, and at the same time."""
    assert bash(f"source scripts/parts.sh; part one 60 true; exit {code}").returncode == code
    assert (
        bash(
            f"source scripts/parts.sh; one() {{ part one 60 true; }}; at_once one; bash -c "
            f"'exit {code}'"
        ).returncode
        == code
    )


def test_parts_at_the_same_time_are_told_apart() -> None:
    """A process that one lane leaves is not another one's, and ends with its part."""
    lanes = (
        "one() { part a 60 sleep 1; part b 60 false; }; two() { part c 60 bash -c 'setsid sleep "
        "300 & sleep 0.2; echo said'; }"
    )
    done = parts(f"{lanes}; at_once one two")
    assert "said" in done.stdout
    assert sorted(line.split("\t")[:3] for line in done.stdout.splitlines()[-3:]) == [
        ["a", "0", "0"],
        ["b", "1", "0"],
        ["c", "0", "1"],
    ]


@pytest.fixture
def cores() -> Iterator[list[int]]:
    """All cores that this process may have, however few the part that it runs in keeps to."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    yield sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, before)


def test_parts_at_the_same_time_share_the_cores_in_equal_parts(cores: list[int]) -> None:
    shown = f"{sys.executable} -c 'import os; print(sorted(os.sched_getaffinity(0)))'"
    lanes = f"one() {{ part a 60 {shown}; }}; two() {{ part b 60 {shown}; }}"
    done = parts(f"{lanes}; at_once one two; part c 60 {shown}")
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    half = len(cores) // 2
    apart = [cores[:half], cores[half:]] if half else [cores, cores]  # one core is for all
    assert found == [*apart, cores]


def test_a_part_past_its_limit_leaves_no_process(tmp_path: Path) -> None:
    """Not even one that ignores the signal, in a session of its own."""
    stubborn = f'trap "" TERM; echo $$ >{tmp_path}/stubborn; sleep 300'
    program(
        tmp_path / "part",
        f"setsid bash -c '{stubborn}' &\necho $$ >{tmp_path}/parent\nexec sleep 300",
    )
    name, code, left, *_ = (
        parts(f"part stuck 1 {tmp_path}/part").stdout.splitlines()[-1].split("\t")
    )
    assert (name, code) == ("stuck", "124")
    assert int(left) >= 1
    assert not [file for file in ("stubborn", "parent") if runs(int((tmp_path / file).read_text()))]


def runs(pid: int) -> bool:
    """A process that has ended may stay as a zombie until its parent, here the machine's first
    process, takes note.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


CASES = "<testcase/>" + "".join(
    f"<testcase><{kind}/></testcase>" for kind in ("skipped", "failure", "error")
)


def summed_up(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/count_tests.py", str(folder), "9"]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("line", "results", "expected", "exit_code"),
    [
        ("unit\t0\t0\t5\t7.5", "<testcase/><testcase/>", "2 passed, 0 failed, 0 skipped", 0),
        ("unit\t1\t0\t5\t7.5", CASES, "1 passed, 2 failed, 1 skipped", 1),
        ("ruff\t0\t0\t5\t7.5", None, "1 passed, 0 failed, 0 skipped", 0),
        ("ruff\t1\t0\t5\t7.5", None, "0 passed, 1 failed, 0 skipped", 1),
        ("crash\t139\t0\t5\t7.5", None, "0 passed, 1 failed, 0 skipped", 1),
        ("other rank failed\t1\t0\t5\t7.5", "<testcase/>", "1 passed, 1 failed, 0 skipped", 1),
        ("orphans\t0\t2\t5\t7.5", "<testcase/>", "1 passed, 1 failed, 0 skipped", 1),
        ("cut off\t0\t0\t5\t7.5", "<testcase/><testca", "0 passed, 1 failed, 0 skipped", 1),
        ("nothing ran\t0\t0\t5\t7.5", "", "0 passed, 0 failed, 0 skipped", 1),
    ],
)
def test_the_parts_are_summed_up(
    line: str, results: str | None, expected: str, exit_code: int, tmp_path: Path
) -> None:
    (tmp_path / "parts").write_text(line + "\n")
    if results is not None:
        (tmp_path / f"{line.split(chr(9))[0]}.xml").write_text(
            f"<testsuites><testsuite>{results}</testsuite></testsuites>"
        )
    result = summed_up(tmp_path)
    assert result.stdout.splitlines()[-1] == expected
    assert "8 processor-seconds, installation apart; 9 s by the clock" in result.stdout
    assert result.returncode == exit_code


def test_the_files_whose_tests_take_longest_are_named(tmp_path: Path) -> None:
    (tmp_path / "parts").write_text("unit\t0\t0\t90\t80\nmpich\t0\t0\t90\t80\n")
    for part, seconds in (("unit", (3, 18, 15)), ("mpich", (40, 0.5, 2))):
        files = zip(("tests.a", "tests.b", "tests.b"), seconds, strict=True)
        results = [f'<testcase classname="{file}" time="{time}"/>' for file, time in files]
        (tmp_path / f"{part}.xml").write_text(f"<testsuite>{''.join(results)}</testsuite>")
    result = summed_up(tmp_path)
    longest = [line for line in result.stdout.splitlines() if " tests." in line]
    assert longest == ["mpich            tests.a: 40 s", "unit             tests.b: 33 s"]


def test_the_processor_time_is_that_of_all_processes_also_of_daemons(tmp_path: Path) -> None:
    """A process counts that has left its parent and ends before the command."""
    burn = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\n"
    burn += "while time.process_time() < 1: pass"
    daemon = f"setsid -f {sys.executable} -c {shlex.quote(burn)}"
    until = "until [ -s pid ] && [ ! -e /proc/$(cat pid) ]; do sleep .1; done"
    command = f"{daemon}; {until}"
    script = [sys.executable, str(CHECKOUT / "scripts" / "measured.py"), "seconds", "0/1"]
    done = subprocess.run(
        [*script, "bash", "-c", f"{command}; exit 3"], cwd=tmp_path, timeout=60, check=False
    )
    assert done.returncode == 3
    assert 1 <= float((tmp_path / "seconds").read_text()) < 10


def all_parts(*words: str) -> list[str]:
    command = [sys.executable, "scripts/all_parts.py", *words]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_every_test_folder_belongs_to_a_part() -> None:
    runs = [
        word
        for name in all_parts("names")
        for line in all_parts("runs", name)
        for word in line.split()
    ]
    named = {CHECKOUT / word for word in runs if word.startswith("tests/")}
    for test in (CHECKOUT / "tests").rglob("test_*.py"):
        assert named & {test, *test.parents}, test


def test_a_change_of_tests_brings_the_part_that_runs_them() -> None:
    for room, part in (("planner", "planner"), ("comm", "ranks")):
        assert part in all_parts("due", "0", "45", f"tests/mpi/{room}/test_any.py")[:3]


def test_a_lane_that_stops_is_a_failure() -> None:
    lines = parts("one() { part a 60 true; exit 7; }; at_once one").stdout.splitlines()
    assert [line.split("\t")[:2] for line in lines[-2:]] == [["a", "0"], ["one", "7"]]


def test_a_change_brings_the_parts_of_its_rooms_and_others_by_turns() -> None:
    names = all_parts("names")
    assert all_parts("due", "0", "1000", "hpczero/batch/pbs.py")[:2] == ["unit", "jobs"]
    assert all_parts("due", "0", "1000") == names
    assert all_parts("due", str(len(names) + 3), "1000") == names[3:] + names[:3]
    assert {name for turn in names for name in all_parts("due", str(names.index(turn)), "25")} == {
        *names
    }
    assert not all_parts("due", "0", "0")
