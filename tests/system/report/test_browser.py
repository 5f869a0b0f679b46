"""Reports of real runs in Chromium: nothing complains, every plot shows, axe-core finds nothing.

The screenshots stay in the checkout's folder `.screenshots`, to be looked at.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import run_folders
from tests.support.browser import Browser, browser, executable
from tests.support.launch import CHECKOUT, hpczero, launch
from tests.support.runs import lines_of, steps_done, wait_for
from tests.support.tiny_run import SPEC, command, train

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not executable(), reason="there is no Chromium: apt-get install chromium"),
]

HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m"
GRID = "[parallel]\ntensor = 2\npipeline = 2\n"
SWEEP = """
[sweep]
seeds = 2
[sweep.grid]
"optimizer.lr" = [1e-3, 1e-2, 1e-1]
"""
SWEPT = [f"lr{rate}-seed{seed}" for rate in ("0.001", "0.01", "0.1") for seed in (1, 2)]
WIDTHS = (1280, 390)
MARKS = """[...document.querySelectorAll("svg")].map(drawing =>
    [...drawing.querySelectorAll("rect,path,polyline,polygon,circle")].filter(mark => {
        const box = mark.getBBox();
        return box.width > 0 || box.height > 0;
    }).length)"""
AXE = """axe.run().then(found => found.violations
    .filter(one => one.impact === "serious" || one.impact === "critical")
    .map(one => one.id + ": " + one.nodes[0].html))"""


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, from the registry of npm."""
    if not shutil.which("npm"):
        pytest.skip("there is no npm to get axe-core with: apt-get install npm")
    folder = tmp_path_factory.mktemp("axe")
    done = subprocess.run(
        ["npm", "pack", "axe-core@4"], cwd=folder, capture_output=True, text=True, timeout=200
    )
    if done.returncode:
        pytest.skip(f"npm cannot get axe-core: {done.stderr[-300:]}")
    shutil.unpack_archive(next(folder.glob("*.tgz")), folder)
    return (folder / "package" / "axe.min.js").read_text()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def looks_right(chromium: Browser, axe: str, page: Path, name: str) -> None:
    kept = CHECKOUT / ".screenshots"
    kept.mkdir(exist_ok=True)
    for width in WIDTHS:
        for dark in (False, True):
            chromium.open(page.as_uri(), width, dark=dark)
            chromium.run('document.querySelectorAll("details").forEach(one => one.open = true)')
            marks = chromium.run(MARKS)
            assert marks
            assert min(marks) > 0, marks
            assert chromium.run("document.documentElement.scrollWidth") <= width
            chromium.run(axe + ";0")
            assert chromium.run(AXE) == []
            assert chromium.complaints == []
            assert [url for url in chromium.requests if not url.startswith("data:")] == [
                page.as_uri()
            ]
            chromium.open(page.as_uri(), width, dark=dark)
            chromium.screenshot(kept / f"{name}-{width}{'-dark' if dark else ''}.png")


def reported(folder: Path, *runs: Path) -> Path:
    done = launch(hpczero("report", *map(str, runs), "-o", "report.html"), 120, folder)
    assert done.code == 0, done.err
    assert (folder / "report.html").stat().st_size < 3_000_000
    return folder / "report.html"


def test_a_real_run_on_a_grid(tmp_path: Path, chromium: Browser, axe: str) -> None:
    (tmp_path / "spec.toml").write_text(SPEC + GRID)
    settings = ["train.steps=20", "train.trace=true", "train.eval_every=5", "checkpoint.every=10"]
    done = train(tmp_path, 4, *(word for one in settings for word in ("--set", one)))
    assert done.code == 0, done.err
    page = reported(tmp_path, tmp_path / "runs" / "tiny")
    assert "as it ran" in page.read_text()
    looks_right(chromium, axe, page, "grid")


def test_a_run_with_two_restarts(tmp_path: Path, chromium: Browser, axe: str) -> None:
    """One after a kill, one after a request to stop."""
    (tmp_path / "spec.toml").write_text(SPEC)
    run = tmp_path / "runs" / "tiny"
    settings = ["train.steps=100000", "checkpoint.every=20", "train.log_every=10"]
    words = [word for one in settings for word in ("--set", one)]
    for number, what in enumerate((signal.SIGKILL, signal.SIGTERM), 1):
        process = subprocess.Popen(command(0, *words), cwd=tmp_path, stdout=subprocess.DEVNULL)
        before = steps_done(tmp_path)
        wait_for(lambda before=before: steps_done(tmp_path) > before + 50, process, 120)
        pids = [one["ranks"][0]["pid"] for one in lines_of(run / "events.jsonl") if "ranks" in one]
        assert len(pids) == number
        os.kill(pids[-1], what)
        process.wait(60)
    words[1] = f"train.steps={steps_done(tmp_path) + 30}"
    assert train(tmp_path, 0, *words).code == 0
    page = reported(tmp_path, run)
    assert "3 jobs, so 2 restarts" in page.read_text()
    looks_right(chromium, axe, page, "restarts")


def test_a_sweep_of_six(tmp_path: Path, chromium: Browser, axe: str) -> None:
    """Three rates with two seeds: three lines, each with a band."""
    (tmp_path / "spec.toml").write_text(SPEC + SWEEP)
    for name in SWEPT:
        assert train(tmp_path, 0, "--set", f"sweep.run={name}").code == 0
    page = reported(tmp_path, *sorted((tmp_path / "runs" / "tiny").iterdir()))
    text = page.read_text()
    assert "best: tiny-lr" in text
    assert text.count("optimizer.lr") >= 3
    looks_right(chromium, axe, page, "sweep")


def test_a_run_that_stopped_at_step_0(tmp_path: Path, chromium: Browser, axe: str) -> None:
    """It is killed once it has said that it starts, in a step of 200,000 micro-batches."""
    (tmp_path / "spec.toml").write_text(SPEC)
    run = tmp_path / "runs" / "tiny"
    words = ["--set", "train.global_batch=400000"]
    process = subprocess.Popen(command(0, *words), cwd=tmp_path, stdout=subprocess.DEVNULL)
    events = run / "events.jsonl"
    wait_for(lambda: events.exists() and bool(lines_of(events)), process, 120)
    process.kill()
    process.wait(60)
    assert not steps_done(tmp_path)
    looks_right(chromium, axe, reported(tmp_path, run), "stopped")


def test_hostile_names_run_nothing(tmp_path: Path, chromium: Browser, axe: str) -> None:
    run = run_folders.made(tmp_path)
    events = lines_of(run / "events.jsonl")
    events[0]["mpi"] = "<script>document.title = 'mine'</script>"
    events.append({"event": HOSTILE, HOSTILE: HOSTILE})
    run_folders.write_lines(run / "events.jsonl", events)
    summary = json.loads((run / "summary.json").read_text())
    summary["goodput"] = {HOSTILE: 1.0}
    (run / "summary.json").write_text(json.dumps(summary))
    page = reported(tmp_path, run.rename(tmp_path / HOSTILE))
    looks_right(chromium, axe, page, "hostile")
    assert chromium.run("document.title").startswith("Run <img src=x")
    assert chromium.run('document.querySelectorAll("img, script").length') == 0


def test_a_complaint_would_be_seen(tmp_path: Path, chromium: Browser) -> None:
    """Scripts that fail, and files that lack, are complaints of the page."""
    page = tmp_path / "page.html"
    page.write_text("<img src='missing.png'><script>nothing()</script><svg></svg>")
    chromium.open(page.as_uri(), 1280)
    chromium.run("0")
    assert any("nothing is not defined" in one for one in chromium.complaints)
    assert chromium.run(MARKS) == [0]
