"""The page: it needs nothing else, holds every plot, and does nothing that a run's files say."""

import json
import re
from pathlib import Path

import pytest

from hpczero.report import build, page
from hpczero.report.contents import Table, Text
from hpczero.runs.record import Run, read_run
from tests.support import run_folders
from tests.support.pages import Page, taken_apart

HOSTILE = "<script>alert(1)</script>\x1b[31m\"'><img src=x onerror=alert(2)>\u202e{{ 7*7 }}"
OF_A_RUN = {
    *("Loss", "Validation loss by source", "Gradient norm", "Learning rate", "Throughput"),
    *("Utilisation", "Where a step's time goes", "A traced step, by what the ranks were doing"),
    *("Seconds of a step, by rank", "Seconds of a step in which a rank did not wait"),
    *("Seconds of a step in which a rank waited for others", "Step 3 as it ran"),
    *("The schedule as planned (1f1b)", "Memory of the fullest rank", "The same without runtime"),
    *("Memory of rank 1 at step 37, by kind", "The most that each rank held"),
    *("Ranks on nodes, axes in colour", "Bytes by axis, of all ranks"),
    *("Jobs, checkpoints and evaluations on the clock", "Goodput"),
}


def shown(*runs: Run) -> tuple[Page, str]:
    text = page.html(build.report_of(runs))
    return taken_apart(text), text


def is_sound(found: Page) -> None:
    """Nothing is loaded, nothing can run, every plot has marks and words, ids are unique."""
    assert found.wrongly_closed == []
    assert found.open_elements == []
    assert not {"script", "iframe", "object", "embed", "img", "form", "base"} & {
        tag for tag, _ in found.elements
    }
    for tag, attributes in found.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "srcdoc", "xlink:href", "action"), (tag, name, value)
            assert "url(" not in (value or ""), (tag, value)
            assert tag == "link" or name != "href", (tag, value)
    assert [one["href"] for one in found.all_of("link")] == ["data:,"]
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert found.marks
    assert all(found.marks)
    for one in found.all_of("svg"):
        assert one["role"] == "img"
        assert set((one["aria-labelledby"] or "").split()) <= set(ids)
    assert len(found.all_of("desc")) == len(found.all_of("svg"))


def test_a_run_of_a_pipeline_shows_everything(tmp_path: Path) -> None:
    run = read_run(run_folders.made(tmp_path))
    report = build.report_of([run])
    assert {figure.drawing.title for _, figure in report.named_figures()} == OF_A_RUN
    assert not [
        block.words
        for section in report.chapters[0].sections
        for block in section.blocks
        if isinstance(block, Text) and block.warns
    ]
    found, text = shown(run)
    is_sound(found)
    assert len(found.all_of("svg")) == len(OF_A_RUN)
    assert len(text) < 300_000
    assert "default-src 'none'" in text


def test_restarts_are_marked(tmp_path: Path) -> None:
    run = read_run(run_folders.made(tmp_path, jobs=[0, 10, 30]))
    found, text = shown(run)
    is_sound(found)
    assert text.count("<title>job 2 goes on after step 10</title>") >= 3
    assert text.count("<title>job 3 goes on after step 30</title>") >= 3
    _, text = shown(read_run(run_folders.made(tmp_path / "once")))
    assert "restarts" not in text
    assert "3 jobs, so 2 restarts" in found.text


def test_six_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    rates = [1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3]
    runs = [read_run(run_folders.made(tmp_path, f"run{at}", lr=lr)) for at, lr in enumerate(rates)]
    found, text = shown(*runs)
    is_sound(found)
    assert len(text) < 3_000_000
    together = build.report_of(runs).chapters[0]
    loss = next(figure for figure in together.figures if figure.name == "training-steps")
    for run in runs:
        assert f"{run.name}: from" in loss.drawing.description
    differs, figures = (one for one in together.sections[0].blocks if isinstance(one, Table))
    for table in (differs, figures):
        assert [row[0] for row in table.rows] == [f"run{at}" for at in (5, 4, 3, 2, 1, 0)]
    assert [row[differs.head.index("optimizer.lr")] for row in differs.rows] == [
        str(rate) for rate in reversed(rates)
    ]


def test_a_run_that_stopped_at_step_0(tmp_path: Path) -> None:
    found, text = shown(read_run(run_folders.stopped_at_once(tmp_path)))
    is_sound(found)
    assert "did not finish a step" in text
    assert "stopped: SIGTERM" in text


def test_a_run_of_nothing_but_a_spec(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text("")
    found, _ = shown(read_run(tmp_path))
    assert found.wrongly_closed == []
    assert "no summary" in found.text


def hostile(folder: Path) -> Path:
    """Make a run in whose files every name and text is hostile."""
    run = run_folders.made(folder, "plain")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[9]["validation_losses"] = {HOSTILE: 3.0, "b": 2.0}
    lines[9][HOSTILE] = 1.0
    run_folders.write_lines(run / "metrics.jsonl", lines)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    events[0] |= {"mpi": HOSTILE, "packages": {HOSTILE: HOSTILE}, "git": {HOSTILE: HOSTILE}}
    for rank in events[0]["ranks"]:
        rank |= {"host": HOSTILE, "device": HOSTILE}
    events += [{"event": HOSTILE, "time": HOSTILE, HOSTILE: HOSTILE}]
    events += [{"event": "WARN", "time": run_folders.moment(5), "what": HOSTILE}]
    events += [{"event": "save", "time": HOSTILE, "step": HOSTILE, "path": HOSTILE}]
    events[-4] |= {"state": HOSTILE, "reason": HOSTILE}
    run_folders.write_lines(run / "events.jsonl", events)
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"state": HOSTILE, "kernels": {HOSTILE: HOSTILE}, "goodput": {HOSTILE: 4.0}}
    summary["comm"] = [{HOSTILE: {HOSTILE: {"bytes": 5, "inside": 5, "count": HOSTILE}}}]
    summary["trace"]["mean_step"]["seconds"] = {HOSTILE: 1.0}
    (run / "summary.json").write_text(json.dumps(summary))
    memory = json.loads((run / "memory.jsonl").read_text().splitlines()[0])
    memory["measured"] = {HOSTILE: 5000}
    run_folders.write_lines(run / "memory.jsonl", [memory])
    return run.rename(folder / HOSTILE.replace("/", "∕"))


def test_hostile_names_do_nothing(tmp_path: Path) -> None:
    found, text = shown(read_run(hostile(tmp_path)))
    is_sound(found)
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "{{ 7*7 }}" in text
    assert found.text.count("<script>alert(1)") > 8  # as words
    assert len(found.all_of("title")) == text.count("<title")


@pytest.mark.parametrize("file", ["metrics", "events", "memory", "summary", "spec"])
@pytest.mark.parametrize("content", [b"", b"\xff\x00\n{", b'[1]\n"a"\n{}\n', b'{"step": {}}\n'])
def test_damaged_files_are_gaps(tmp_path: Path, file: str, content: bytes) -> None:
    run = run_folders.made(tmp_path)
    ending = {"summary": "json", "spec": "toml"}.get(file, "jsonl")
    (run / f"{file}.{ending}").write_bytes(content)
    is_sound(shown(read_run(run))[0])


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "value", [None, True, -1, 1e300, "nan", [], {}, [[1]], {"a": {"b": [None]}}]
)
def test_nonsense_in_events_and_summary_is_a_gap(tmp_path: Path, value: object) -> None:
    """Each value of these files in turn, and each one inside of it."""
    run = run_folders.made(tmp_path)
    (run / "trace.json.gz").unlink()
    for name in ("events.jsonl", "summary.json", "memory.jsonl"):
        text = (run / name).read_text()
        lines = text.splitlines() if name.endswith("l") else [text]
        objects = [json.loads(line) for line in lines]
        for key in sorted({key for one in objects for key in one}):
            changed = [one | ({key: value} if key in one else {}) for one in objects]
            (run / name).write_text("\n".join(map(json.dumps, changed)) + "\n")
            build.report_of([read_run(run)])
        (run / name).write_text(text)


def test_a_long_run_stays_small_and_keeps_its_extremes(tmp_path: Path) -> None:
    run = run_folders.made(tmp_path, steps=40)
    lines = [
        {"step": step, "loss": 3.0 + (step == 7_777) - 2.5 * (step == 15_000)}
        for step in range(1, 20_001)
    ]
    run_folders.write_lines(run / "metrics.jsonl", lines)
    run_folders.write_rank_times(run, 20_000, ranks=64)
    report = build.report_of([read_run(run)])
    assert len(page.html(report)) < 1_500_000
    loss = dict(report.named_figures())["loss"]
    assert "from 3.00 at 1 to 3.00 at 20,000" in loss.drawing.description
    assert re.search(r"lowest 0\.500 near 1[45],\d+", loss.drawing.description)
    assert re.search(r"highest 4\.00 near 7,7\d\d", loss.drawing.description)
