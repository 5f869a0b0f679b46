"""`hpczero report` and `hpczero plot` as a user types them."""

import sys
from pathlib import Path

import pytest

from tests.support import run_folders
from tests.support.launch import hpczero, launch
from tests.support.pages import taken_apart

HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m"


def test_a_run_gets_a_page(tmp_path: Path) -> None:
    run = run_folders.made(tmp_path)
    done = launch(hpczero("report", str(run)), 60, tmp_path)
    assert (done.code, done.out, done.err) == (0, f"{run}/report.html\n", "")
    assert min(taken_apart((run / "report.html").read_text()).marks) > 0


def test_several_runs_get_a_page_here_or_where_it_is_asked_for(tmp_path: Path) -> None:
    runs = [str(run_folders.made(tmp_path, name)) for name in ("a", "b")]
    done = launch(hpczero("report", *runs), 60, tmp_path)
    assert (done.code, done.out) == (0, "report.html\n"), done.err
    done = launch(hpczero("report", *runs, "-o", "other.html"), 60, tmp_path)
    assert (done.code, done.out) == (0, "other.html\n"), done.err
    assert (tmp_path / "report.html").read_text() == (tmp_path / "other.html").read_text()
    assert "All together" in (tmp_path / "other.html").read_text()


@pytest.mark.slow
def test_slides_and_a_lab_book(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image", reason="slides need Pillow")
    run = run_folders.made(tmp_path)
    done = launch(hpczero("report", str(run), "--png", "slides", "--md", "book.md"), 200, tmp_path)
    assert done.code == 0, done.err
    names = {path.stem for path in (tmp_path / "slides").iterdir()}
    assert names >= {"loss", "layout", "pipeline-ran", "memory"}
    assert names == {path.stem for path in (tmp_path / "book_figures").iterdir()}
    assert done.out.splitlines()[-1] == "book.md"
    assert not (run / "report.html").exists()


def test_a_curve_in_the_terminal_and_as_a_drawing(tmp_path: Path) -> None:
    run = run_folders.made(tmp_path).rename(tmp_path / HOSTILE)
    done = launch(hpczero("plot", str(run), "--svg", "loss.svg"), 60, tmp_path)
    assert done.code == 0, done.err
    assert "\x1b" not in done.out
    assert "4.8500 at first, 2.9000 at the end" in done.out
    assert "<script" not in (tmp_path / "loss.svg").read_text()


def test_a_hostile_name_is_only_shown(tmp_path: Path) -> None:
    run = run_folders.made(tmp_path).rename(tmp_path / HOSTILE)
    done = launch(hpczero("report", str(run)), 60, tmp_path)
    assert done.code == 0, done.err
    assert "\x1b" not in done.out
    page = taken_apart((run / "report.html").read_text())
    assert not page.all_of("img")


def test_a_report_in_the_place_of_a_link_replaces_the_link(tmp_path: Path) -> None:
    run = run_folders.made(tmp_path)
    (tmp_path / "precious").write_text("mine")
    (run / "report.html").symlink_to(tmp_path / "precious")
    assert launch(hpczero("report", str(run)), 60, tmp_path).code == 0
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("verb", ["report", "plot"])
def test_what_is_no_run_is_refused(tmp_path: Path, verb: str) -> None:
    (tmp_path / "empty").mkdir()
    done = launch(hpczero(verb, str(tmp_path / "empty")), 60, tmp_path)
    assert done.code == 2
    assert done.err.startswith("hpczero: ")
    assert "\n" not in done.err.strip()


def test_neither_needs_torch(tmp_path: Path) -> None:
    run = run_folders.made(tmp_path)
    script = (
        "import sys; from hpczero import cli; cli.main(['report', sys.argv[1]]); "
        "sys.exit(bool({'torch', 'mpi4py', 'numba'} & set(sys.modules)))"
    )
    done = launch([sys.executable, "-c", script, str(run)], 60, tmp_path)
    assert done.code == 0, done.out + done.err
