"""The trackers of a run directory: what they get, and what the directory says of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpczero.spec.batch import Batch
from hpczero.spec.schema import Spec
from hpczero.spec.track import Track
from hpczero.track.item import Item, figures, plain_name, text
from hpczero.track.needs import missing
from hpczero.track.tracking import Tracking, facts_of
from hpczero.train.run_directory import RunDirectory
from tests.support.runs import lines_of
from tests.support.tracked import event, line


class Recorder:
    def __init__(self) -> None:
        self.items: list[Item] = []

    def write(self, items: Sequence[Item]) -> None:
        self.items += items

    def close(self) -> None: ...

    def give_up(self) -> None: ...


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def tracking(recorder: Recorder, tmp_path: Path) -> Tracking:
    return Tracking(Spec(), tmp_path, {"it": lambda: recorder})


def test_trackers_learn_first_where_a_run_goes_on(tracking: Tracking, recorder: Recorder) -> None:
    tracking.add("event", {"event": "start"})
    tracking.go_on_from(41, 1000)
    tracking.add("event", {"event": "resume", "step": 40})
    tracking.add("metrics", {"step": 41, "tokens": 25})
    tracking.add("event", {"event": "WARN", "what": "this"})
    tracking.add("metrics", {"step": 42, "tokens": 25})
    tracking.go_on_from(42, 1025)
    assert tracking.close() == []
    found = [(item.kind, item.event, item.step, item.tokens) for item in recorder.items]
    assert found == [
        ("from", "", 41, 0),
        ("event", "start", 40, 0),
        ("event", "resume", 40, 1000),
        ("metrics", "", 41, 1025),
        ("event", "WARN", 41, 1025),
        ("metrics", "", 42, 1050),
        ("from", "", 42, 0),
    ]


def test_a_run_that_ends_before_its_place_is_known_changes_nothing(
    tracking: Tracking, recorder: Recorder
) -> None:
    tracking.add("event", {"event": "start"})
    assert tracking.close() == []
    assert recorder.items == []


def test_the_batch_job_is_not_told() -> None:
    batch = Batch(env={"TOKEN": "secret"}, mail="me@secret", setup=("export KEY=secret",))
    facts = facts_of(Spec(name="tiny", batch=batch), Path("/runs/tiny"))
    assert "secret" not in json.dumps(vars(facts), default=str)
    assert facts.changed == {"name": "tiny"}
    assert facts.tables["train"]["steps"] == 100
    assert "[train]" in facts.toml
    assert "[paths]" in facts.toml


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("web", "web"),
        ("/data/../x", "data_.._x"),
        ("../..", "_"),
        ("", "_"),
        ("<b>\x1b[1mé", "b_1m"),
        ("a" * 300, "a" * 100),
    ],
)
def test_names_of_sources_become_names_of_figures(name: str, plain: str) -> None:
    assert plain_name(name) == plain
    values = figures(line(1, 1.0, validation_losses={name: 2.0}))
    assert values[f"validation/{plain}"] == 2.0


def test_what_is_no_number_is_no_figure() -> None:
    odd: dict[str, Any] = {"lr": None, "grad_norm": "3", "skipped": True, "comm_seconds": False}
    assert figures(line(2, 1.0, **odd)) == {"loss": 1.0, "tokens": 128.0}
    assert figures(event("save", 2)) == {}
    memory = Item("memory", 2, 0.0, {"step": 2, "held": 10})
    assert figures(memory) == {"memory/held_bytes": 10.0}


def test_events_in_words() -> None:
    assert text(event("WARN", 1, what="two\nlines")) == "WARN: two lines"
    assert text(event("save", 2, bytes=9, ranks=[1])) == "save: bytes 9, ranks [1]"
    assert len(text(event("start", 0, what="x" * 9000))) == 2000


def test_a_callback_gets_the_lines_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "lines = []\ndef see(line):\n    lines.append(dict(line))\n    line.clear()\n"
    (tmp_path / "of_mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    spec = Spec(name="tiny", output=str(tmp_path / "runs"), track=Track(callback="of_mine:see"))
    directory = RunDirectory.claim(spec, resume=False, fresh=False)
    directory.event("start", ranks=2)
    directory.keep_metrics_before(1)
    for step in (1, 2):
        directory.metrics({"step": step, "loss": 1.0 / step})
    directory.event("stop", state="finished")
    directory.close()
    import of_mine

    for one in of_mine.lines:
        assert one.pop("time")
    written = [*lines_of(directory.path / "events.jsonl")]
    written[1:1] = lines_of(directory.path / "metrics.jsonl")
    for one in written:
        del one["time"]
    assert of_mine.lines == written


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (None, "of_mine cannot be imported (No module named 'of_mine'); is it installed"),
        ("raise KeyError('mine')", "KeyError: 'mine'"),
        ("", "of_mine has no function see"),
        ("def see(line):\n    raise SystemExit('enough')", "SystemExit: enough"),
    ],
)
def test_a_callback_that_fails_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str | None, said: str
) -> None:
    monkeypatch.delitem(__import__("sys").modules, "of_mine", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    if code is not None:
        (tmp_path / "of_mine.py").write_text(code)
    spec = Spec(name="tiny", output=str(tmp_path / "runs"), track=Track(callback="of_mine:see"))
    directory = RunDirectory.claim(spec, resume=False, fresh=False)
    directory.keep_metrics_before(1)
    for step in range(1, 50):
        directory.metrics({"step": step, "loss": 1.0})
    directory.close()
    (warning,) = lines_of(directory.path / "events.jsonl")
    assert warning["event"] == "WARN"
    start = "track.callback = of_mine:see gets no more of this run: "
    assert warning["what"].startswith(start + said)
    assert len(lines_of(directory.path / "metrics.jsonl")) == 49


def test_check_says_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpczero.env.has_package", lambda name: name == "mlflow")
    track = Track(to=("tensorboard", "wandb", "mlflow"), callback="not_there.at_all:see")
    packages, callback = missing(track)
    assert "pip install wandb" in packages
    assert "not_there is not found here" in callback
    assert missing(Track(to=("tensorboard", "mlflow"), callback="json:dumps")) == []
