"""The output of a run: lines for files, a live panel for terminals, and the choice between them."""

import io
import re
import sys
from pathlib import Path

import pytest

from hpczero.text import format_duration, format_number, log_line, log_value
from hpczero.train import console
from hpczero.train.console import Lines
from hpczero.train.summary import Pace, shares
from tests.support.launch import on_a_terminal

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
METRICS = {
    "loss": 3.25,
    "grad_norm": 0.5,
    "lr": 3e-4,
    "tokens": 2048,
    "step_seconds": 0.5,
    "data_seconds": 0.05,
    "comm_seconds": 0.1,
    "compute_seconds": 0.3,
}
PROGRAM = """
from hpczero.train import console
import sys
out = console.choose_output(sys.argv[1], 3, 1)
out.event("start", name="demo")
for step in range(1, 4):
    out.step(step, {"loss": 3.25, "tokens": 10, "step_seconds": 0.1})
out.event("eval", step=3, loss=2.5)
out.close()
print("the end")
"""


def lines_of(steps: int, log_every: int, until: int) -> list[str]:
    stream = io.StringIO()
    lines = Lines(steps, log_every, stream)
    for step in range(1, until + 1):
        lines.step(step, METRICS)
    return stream.getvalue().splitlines()


def test_a_line_is_time_event_and_values() -> None:
    text = log_line("start", {"name": "demo", "ranks": 4, "node_shared": False, "path": None})
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ start name=demo ranks=4 node_shared=false path=none", text
    )


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("a b", '"a b"'),
        ("", '""'),
        ("a=b", '"a=b"'),
        ('say "x"', r'"say \"x\""'),
        ("two\nlines\x1b[31m", r"two\nlines\x1b[31m"),
        ("\x9b1m\u202eabc\ud800", r"\x9b1m\u202eabc\ud800"),
        ("back\\slash", "back\\\\slash"),
        ("Größe", "Größe"),
        (0.1 + 0.2, "0.3"),
        (12345678, "12345678"),
        (Path("/a b"), '"/a b"'),
        ([1, 2], "1,2"),
        ({"data": 2, "tensor": 1}, "data:2,tensor:1"),
    ],
)
def test_values_stay_on_their_line(item: object, text: str) -> None:
    assert log_value(item) == text
    assert not CONTROL.search(log_value(item))


FIGURES = {
    "0.000": 0,
    "0.500": 0.5,
    "0.0123": 0.0123,
    "3.00e-04": 3e-4,
    "4.57": 4.567,
    "12.3": 12.34,
    "100": 99.97,
    "999": 999.4,
    "1.00k": 999.7,
    "18.2k": 18234,
    "1.20M": 1_200_000,
    "7.50G": 7.5e9,
    "-1.50k": -1500,
    "nan": float("nan"),
    "inf": float("inf"),
    "?": None,
}


@pytest.mark.parametrize(("text", "figure"), FIGURES.items())
def test_numbers_have_three_digits(text: str, figure: float | None) -> None:
    assert format_number(figure) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (61.6, "0:01:02"), (3599.9, "1:00:00"), (100 * 3600, "100:00:00")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_steps_are_said_every_so_often_and_at_the_end() -> None:
    said = lines_of(steps=25, log_every=10, until=25)
    assert [re.search(r"step=(\S+)", text)[1] for text in said] == ["10/25", "20/25", "25/25"]  # type: ignore[index]
    assert (
        "loss=3.2500 grad_norm=0.500 lr=3.00e-04 tokens/s=4.10k compute=60% "
        "communication=20% data=10% other=10% left=0:00:00"
    ) in said[-1]


def test_figures_that_are_missing_are_said_to_be() -> None:
    stream = io.StringIO()
    Lines(1, 1, stream).step(1, {})
    assert "loss=? grad_norm=? lr=? tokens/s=? left=?" in stream.getvalue()


def test_speed_is_that_of_the_steps_since_the_last_line() -> None:
    stream = io.StringIO()
    lines = Lines(4, 2, stream)
    for step, seconds in enumerate((1.0, 3.0, 0.25, 0.25), start=1):
        lines.step(step, {"tokens": 100, "step_seconds": seconds})
    assert re.findall(r"tokens/s=(\S+)", stream.getvalue()) == ["50.0", "400"]


def test_shares_add_up() -> None:
    assert sum(shares([METRICS, METRICS]).values()) == pytest.approx(1)
    assert shares([]) == {}


def test_time_left_follows_the_clock() -> None:
    pace = Pace(100)
    pace.step(10, now=1000.0)
    assert pace.left() == "?"
    pace.step(20, now=1020.0)
    assert pace.left() == "0:02:40"
    pace.step(100, now=1200.0)
    assert pace.left() == "0:00:00"


def test_an_encoding_that_lacks_letters_gets_them_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Lines(1, 1, stream).event("start", name="Größe")
    assert raw.getvalue().endswith(b"name=Gr\\xf6\\xdfe\n")


class Broken(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


def test_a_full_disk_does_not_stop_the_run_but_a_closed_pipe_does() -> None:
    Lines(1, 1, Broken(OSError(28, "No space left on device"))).event("start")
    with pytest.raises(BrokenPipeError):
        Lines(1, 1, Broken(BrokenPipeError())).event("start")


def test_a_file_gets_lines_even_if_live_is_asked_for(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as file:
        console.choose_output("live", 1, 1, file).event("start")
        console.choose_output("auto", 1, 1, file).event("start")
        file.seek(0)
        warning, *rest = file.read().splitlines()
    assert " WARN what=" in warning
    assert [text.split()[1] for text in rest] == ["start", "start"]


def test_a_terminal_gets_the_live_panel() -> None:
    said = on_a_terminal(
        [sys.executable, "-c", PROGRAM, "auto"], {"TERM": "xterm-256color", "NO_COLOR": ""}
    )
    assert "step 3/3" in said
    assert "\x1b[2K" in said
    assert re.search(
        r"^\S*Z start name=demo", re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", said), re.MULTILINE
    )
    assert said.rstrip().endswith("the end")
    assert "─" * 98 in said
    assert "─" * 99 not in said
    assert said.rfind("\x1b[?25h") > said.rfind("\x1b[?25l"), "the cursor is visible at the end"


def test_no_colour_and_dumb_terminals_are_respected() -> None:
    plain = on_a_terminal(
        [sys.executable, "-c", PROGRAM, "auto"], {"TERM": "xterm-256color", "NO_COLOR": "1"}
    )
    assert "step 3/3" in plain
    assert not re.search(r"\x1b\[[0-9;]*[39][0-7]m", plain)
    assert "\x1b" not in on_a_terminal([sys.executable, "-c", PROGRAM, "auto"], {"TERM": "dumb"})
    assert "\x1b" not in on_a_terminal([sys.executable, "-c", PROGRAM, "lines"], {"TERM": "xterm"})


def test_a_pipe_from_a_terminal_gets_lines() -> None:
    said = on_a_terminal(
        ["sh", "-c", '"$0" -c "$1" auto | cat', sys.executable, PROGRAM], {"TERM": "xterm"}
    )
    assert "\x1b" not in said
    assert " step step=3/3 " in said


@pytest.mark.parametrize(
    "option", ["--output", "-outfile-pattern=x", "--tag-output", "-l", "-prepend-rank"]
)
def test_a_launcher_that_rewrites_the_output_is_no_terminal(option: str) -> None:
    assert console._redirects(["mpirun", option, "-n", "2", "python"])
    assert not console._redirects(
        ["mpirun", "-n", "2", "-launcher", "ssh", "--oversubscribe", "python"]
    )
