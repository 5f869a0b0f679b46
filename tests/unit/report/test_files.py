"""Files beside the page: pictures for slides, a lab book, a curve in a terminal."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from hpczero.errors import InputError
from hpczero.report import as_png, as_svg, build, learning, notebook, terminal
from hpczero.report.marks import COLOURS, Cells, Drawing, Line, Rectangle, Words
from hpczero.runs.curves import curve
from hpczero.runs.record import Run, read_run
from hpczero.text import format_loss
from tests.support import run_folders


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read_run(run_folders.made(tmp_path))


def test_a_picture_has_its_marks_where_they_are(tmp_path: Path) -> None:
    image_of = pytest.importorskip("PIL.Image", reason="slides need Pillow")
    marks = [
        Rectangle(10, 10, 20, 20, "blue"),
        Cells([(60, 10, 10, 10)], "green"),
        Line([(0, 80), (100, 80)], "vermillion", 4),
        Words(50, 60, "<b>\x1b[31m", "middle"),
    ]
    (tmp_path / "a.png").write_bytes(as_png.png(Drawing("a", 100, 100, "", marks)))
    image = image_of.open(tmp_path / "a.png").convert("RGB")
    assert image.size == (1920, 1920)

    def colour(x: float, y: float) -> str:
        return "#{:02x}{:02x}{:02x}".format(*image.getpixel((round(x * 19.2), round(y * 19.2))))

    assert colour(20, 20) == COLOURS["blue"][0]
    assert colour(65, 15) == COLOURS["green"][0]
    assert colour(40, 80) == COLOURS["vermillion"][0]
    assert colour(90, 90) == "#ffffff"
    assert np.asarray(image)[900:1160, 700:1200].min() < 100  # the words are there


def test_every_figure_can_be_a_picture(run: Run) -> None:
    pytest.importorskip("PIL.Image", reason="slides need Pillow")
    report = build.report_of([run])
    names = [name for name, _ in report.named_figures()]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z-]+", name) for name in names)
    for _, figure in list(report.named_figures())[::5]:
        assert as_png.png(figure.drawing).startswith(b"\x89PNG")


def test_without_pillow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(InputError, match=r"pip install 'hpczero\[report\]'"):
        as_png.refuse_without_pillow()


def test_a_drawing_is_a_file_of_its_own(run: Run) -> None:
    figure = learning.loss(run)
    assert figure
    text = as_svg.whole_file(figure.drawing)
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"href|<script|url\(", text)


def test_a_lab_book_has_all_figures_and_no_meaning_of_strangers(tmp_path: Path, run: Run) -> None:
    report = build.report_of([run])
    notebook.write(report, tmp_path / "book.md")
    text = (tmp_path / "book.md").read_text()
    named = re.findall(r"!\[[^\n]*\]\(<(book_figures/[a-z-]+\.svg)>\)", text)
    assert len(named) == len(list(report.named_figures()))
    for path in named:
        ElementTree.parse(tmp_path / path)
    assert notebook.plain("<b>[x](y)|\x1b[31m") == r"\<b\>\[x\](y)\|\\x1b\[31m"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_curve_of_letters(run: Run, encoding: str) -> None:
    drawn = list(terminal.loss(run, encoding))
    assert len(drawn) == terminal.ROWS + 3
    assert all(len(line) <= 100 for line in drawn)
    for line in drawn:
        line.encode(encoding)
    assert drawn[-1] == "4.8500 at first, 2.9000 at the end, lowest 2.9000; validation 3.1000"
    assert drawn[1].strip().startswith("4.8500")
    assert drawn[-2].split() == ["step", "1", "40"]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_points_that_lie_apart_are_joined(encoding: str) -> None:
    shown = curve(np.array([1.0, 5.0, 9.0]), np.array([3.0, 1.0, 2.0]), 100)
    lines = [line[12:] for line in terminal.chart(shown, (1, 9), 62, 5, encoding)][:-1]
    assert all(any(line[at : at + 1].strip() for line in lines) for at in range(50))


@pytest.mark.parametrize("losses", [[1.5e308, -1.5e308, 1.0], [1e308] * 300 + [-1e308], [5e-324]])
def test_the_largest_and_smallest_numbers_are_drawn(losses: list[float]) -> None:
    steps = np.arange(float(len(losses)))
    shown = curve(steps, np.array(losses), terminal.points(60, "utf-8"))
    first, *_, last, _ = terminal.chart(shown, (0, 1), 60, 4, "utf-8")
    assert first.split()[0] == format_loss(max(losses))
    assert len(losses) == 1 or last.split()[0] == format_loss(min(losses))


def test_a_canvas_goes_through_every_column_and_reaches_the_extremes() -> None:
    y = np.linspace(5, 1, 50)
    y[20] = 9.0
    dots = np.array(terminal.canvas(curve(np.arange(50.0), y, 50), 50, 32))
    assert dots.any(axis=0).all()
    assert dots[0].nonzero()[0].tolist() == [20]
    assert dots[-1, -1]
    assert np.diff(dots[:, 30:].argmax(axis=0)).min() >= 0  # falls
