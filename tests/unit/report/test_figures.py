"""Each figure shows what its run did: held against computations of its own."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hpczero.comm.grid import Grid
from hpczero.comm.trace import SPAN, Event
from hpczero.planner.composed import Pipeline
from hpczero.report import (
    bars,
    course,
    layout,
    learning,
    memory,
    overlay,
    pipeline,
    ranks,
    speed,
    traces,
)
from hpczero.report.contents import Text
from hpczero.report.marks import Area, Cells, Drawing, Rectangle, Words
from hpczero.runs import rank_times
from hpczero.runs.goodput import goodput_of
from hpczero.runs.record import Run, read_run
from hpczero.spec.schema import Parallel
from hpczero.train import trace_file
from tests.support import run_folders
from tests.support.run_folders import BYTES, COMM, COMPUTE, DATA, RANKS, STEP
from tests.support.trace_events import operation, span, wait
from tests.support.traced_steps import Known, traced
from tests.support.traced_steps import course as known_course


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read_run(run_folders.made(tmp_path))


def rectangles(drawing: Drawing, words: str = "") -> list[Rectangle]:
    return [one for one in drawing.marks if isinstance(one, Rectangle) and words in one.tip]


# ------------------------------------------------------------------------------ time of steps


def test_parts_of_a_step_add_up_to_it(run: Run) -> None:
    for points in (300, 7):
        steps, parts = speed.parts_of_steps(run, points)
        assert sum(parts.values()) == pytest.approx(np.full(len(steps), STEP))
        assert parts["computing"] == pytest.approx(COMPUTE)
        assert parts["waiting for others"] == pytest.approx(COMM)
        assert parts["waiting for data"] == pytest.approx(DATA)


def test_a_bar_is_as_wide_as_its_amount() -> None:
    figure = bars.stacked_bar("a", "A", {"x": (3.0, "blue"), "y": (1.0, "green")}, "")
    assert figure
    first, second = rectangles(figure.drawing, ":")
    assert (first.width + 1) / (second.width + 1) == pytest.approx(3)
    assert second.x == pytest.approx(first.x + first.width + 1)
    assert figure.table
    assert [row[2] for row in figure.table.rows] == ["75.0 %", "25.0 %"]
    assert bars.stacked_bar("a", "A", {"x": (0.0, "blue")}, "") is None


def test_goodput_is_the_time_that_the_ranks_had(run: Run) -> None:
    booked = goodput_of(run).of_kind
    had = sum((job.ended - job.began) * len(job.ranks) for job in run.jobs)
    assert sum(booked.values()) == pytest.approx(had)
    computed = run_folders.COMPUTE + 0.1 / run_folders.RANKS  # one of them takes longer
    assert booked["computing"] / booked["data"] == pytest.approx(computed / run_folders.DATA)
    figure = course.goodput(booked)
    assert figure
    assert f"{had:.1f} s in all" in figure.caption


# ----------------------------------------------------------------------------------- learning


def test_loss_lies_where_its_steps_and_values_are(run: Run) -> None:
    figure = learning.loss(run)
    assert figure
    losses = [5.0 - 0.05 * step - 0.1 for step in range(1, 41)]
    dots = [one for one in figure.drawing.marks if getattr(one, "tip", "").startswith("training")]
    x, y = np.array([(dot.x, dot.y) for dot in dots]).T
    assert np.corrcoef(x, np.arange(1, 41))[0, 1] == pytest.approx(1)
    assert np.corrcoef(y, losses)[0, 1] == pytest.approx(-1)
    assert "validation: from 4.60 at 10 to 3.10 at 40" in figure.drawing.description


def test_sources_are_shown_each(run: Run) -> None:
    figure = next(one for one in learning.section(run).figures if "source" in one.name)
    assert "books: from 4.50 at 10 to 3.00 at 40" in figure.drawing.description
    assert "web: from 4.70 at 10 to 3.20 at 40" in figure.drawing.description


# -------------------------------------------------------------------------------------- ranks


def test_the_slow_rank_stands_out(run: Run) -> None:
    section = ranks.section(rank_times.read(run.path))
    work = next(figure for figure in section.figures if figure.name == "work-of-ranks")
    cells = {mark.fill: mark.places for mark in work.drawing.marks if isinstance(mark, Cells)}
    assert set(cells) == {"level0", "level9"}
    assert len(cells["level9"]) == 1
    rows = sorted({place[1] for places in cells.values() for place in places})
    assert rows.index(cells["level9"][0][1]) == run_folders.SLOW
    assert "The largest mean is that of rank 2, 0.420 s" in work.drawing.description
    table = section.blocks[-1]
    assert table.rows[0][0] == "2"


def test_ranks_that_are_alike_are_no_pattern() -> None:
    values = np.full((3, 5), 0.5) + 1e-9 * np.arange(5)
    drawing = bars.heat("a", ["0", "1", "2"], np.arange(5.0), values, "s", "step")
    assert len([mark for mark in drawing.marks if isinstance(mark, Cells)]) == 1


def test_a_cell_lies_at_its_row_and_its_columns() -> None:
    values = np.zeros((2, 10))
    values[1, 4:7] = 1.0
    drawing = bars.heat("a", ["0", "1"], np.arange(10.0), values, "s", "step")
    cells = {mark.fill: mark.places for mark in drawing.marks if isinstance(mark, Cells)}
    assert len(cells["level0"]) == 3
    first, last = min(cells["level0"])[0], max(x + width for x, _, width, _ in cells["level0"])
    ((x, y, width, _),) = cells["level9"]
    assert (x - first) / (last - first) == pytest.approx(0.4)
    assert width / (last - first) == pytest.approx(0.3)
    assert y == max(top for _, top, _, _ in cells["level0"])


def test_many_ranks_are_grouped_by_the_largest() -> None:
    values = np.zeros((2, 1000))
    values[1, 777] = 5.0
    names, rows = ranks.grouped(values)
    assert len(names) == len(rows) == 64
    assert rows.max() == 5.0
    first, last = names[int(rows[:, 1].argmax())].removeprefix("ranks ").split("-")
    assert int(first) <= 777 <= int(last)


def test_columns_of_a_map_touch() -> None:
    assert bars.edges_of(np.array([1.0, 3.0, 7.0])).tolist() == [0.0, 2.0, 5.0, 9.0]
    assert bars.runs_of(["a", "a", "", "b", "a"]) == [(0, 2, "a"), (3, 4, "b"), (4, 5, "a")]


# ----------------------------------------------------------------------------------- pipeline


def test_every_moment_belongs_to_the_innermost_event() -> None:
    events = [
        span("step", 0, 100, 1),
        span("forward", 10, 40),
        wait("tensor", 15, 25),
        operation("tensor", 5, 30),
        span("backward", 40, 80),
        span("optimizer step", 85, 95),
        wait("data", 85, 90),
    ]
    found = pipeline.pieces(events)
    assert [(one.begin * 1e6, one.end * 1e6, one.kind) for one in found] == [
        (0, 10, "other"),
        (10, 15, "forward"),
        (15, 25, "waiting"),
        (25, 40, "forward"),
        (40, 80, "backward"),
        (80, 85, "other"),
        (85, 90, "waiting"),
        (90, 95, "optimizer"),
        (95, 100, "other"),
    ]
    same_seconds(events)


def same_seconds(events: Sequence[Event]) -> None:
    """The pieces take as long as the trace's own figures say."""
    sums = dict.fromkeys(pipeline.COLOURS, 0.0)
    for one in pipeline.pieces(events):
        sums[one.kind] += (one.end - one.begin) / 1e3
    expected = dict.fromkeys(pipeline.COLOURS, 0.0)
    names = {"forward": "forward", "backward": "backward", "optimizer step": "optimizer"}
    for name, seconds in trace_file.exclusive_seconds(events).items():
        is_wait = name.startswith(("wait ", "advance "))
        expected["waiting" if is_wait else names.get(name, "other")] += seconds
    assert sums == pytest.approx(expected)


def test_a_step_as_it_ran_is_that_of_the_trace(run: Run) -> None:
    found = traces.layout_of(run)
    assert found
    step = traces.traced_step(run, found)
    assert step.number == 3  # of equal ones
    for events in step.stages:
        same_seconds(events)
    section = pipeline.section(traces.plan_of(run, found), step)
    ran, planned = section.figures
    assert len(rectangles(ran.drawing, "forward")) == 2 * run_folders.MICRO_BATCHES
    assert len(rectangles(planned.drawing, "forward of")) == 2 * run_folders.MICRO_BATCHES
    of = Pipeline("1f1b", 2, 1, run_folders.MICRO_BATCHES)
    known = Known([3_000_000, 4_000_000], [6_000_000, 7_000_000])
    makespan = known_course(of, known).makespan / 1e6
    last = max(rectangles(planned.drawing, " of "), key=lambda one: one.x + one.width)
    assert (last.x + last.width - 92) / (980 - 92 - 16) * makespan == pytest.approx(makespan, 0.01)
    idle = 1 - 4 * (9 + 11) / 2 / makespan
    assert f"idle {100 * idle:.1f} %" in planned.caption


def test_interleaved_chunks_are_drawn(run: Run) -> None:
    plan = pipeline.Plan("interleaved", 2, 2, 4)
    (figure,) = pipeline.section(plan, None, "no trace").figures
    assert len(rectangles(figure.drawing, "forward of")) == 2 * 2 * 4


def test_chunks_are_as_long_as_their_stages_actions() -> None:
    times = [(span("forward", 0, of), span("backward", of, 3 * of)) for of in (10, 30)]
    plan = pipeline.Plan("interleaved", 2, 2, 4)
    _, planned = pipeline.section(plan, pipeline.Traced(1, times)).figures
    widths: dict[float, list[float]] = {}
    for one in rectangles(planned.drawing, "forward of"):
        widths.setdefault(one.y, []).append(one.width)
    first, second = widths.values()
    assert first == pytest.approx([first[0]] * 8)
    assert second == pytest.approx([3 * first[0]] * 8, rel=0.05)  # less the gaps between them


def test_the_step_of_the_median_time_is_drawn() -> None:
    assert pipeline.chosen([4, 5, 6], {4: 3.0, 5: 1.0, 6: 2.0}) == 6
    trace = traced(Pipeline("1f1b", 2, 1, 4), Known([3, 4], [6, 7]))
    assert {event.what.kind for event in trace.events[0]} >= {SPAN}


# ------------------------------------------------------------------------------------- memory


def test_memory_is_stacked_to_what_was_held(run: Run) -> None:
    accounts = list(memory.accounts_of(run))
    steps, columns, predicted = memory.over_steps(accounts, 40.0)
    assert sum(columns.values())[::2].tolist() == [one.held for one in accounts]
    assert (steps[0], steps[-1]) == (2, 40)
    assert (np.diff(steps) >= 0).all()
    assert predicted.tolist() == [sum(BYTES.values()) + 3000] * len(steps)


def test_kinds_are_added_up_not_left_out() -> None:
    amounts = {f"kind{at}": float(at) for at in range(12)} | {"runtime": 5.0}
    few = memory.few_kinds(amounts)
    assert sum(few.values()) == sum(amounts.values())
    assert list(few)[-2:] == ["other kinds", "runtime"]


def test_the_fullest_of_many_accounts_is_kept() -> None:
    accounts = [
        memory.Account(step, 0, 9e9 if step == 4321 else 1.0, {}, {"weights": 1.0})
        for step in range(1, 10_000)
    ]
    steps, *_ = memory.over_steps(accounts, 10_000.0)
    assert len(steps) <= 600
    assert 4321 in steps


# ------------------------------------------------------------------------- layout and messages


@pytest.mark.parametrize(("ranks_", "nodes"), [(8, 2), (64, 8), (4096, 512)])
def test_every_rank_is_drawn_in_the_colour_of_its_place(ranks_: int, nodes: int) -> None:
    parallel = Parallel(tensor=2, pipeline=2, order="tensor,data,pipeline")
    grid = Grid.build(parallel, [rank * nodes // ranks_ for rank in range(ranks_)])
    figure = layout.layout_map(grid, ["host"] * ranks_)
    cells = [mark for mark in figure.drawing.marks if isinstance(mark, Cells)]
    assert sum(len(mark.places) for mark in cells) == 3 * ranks_
    tensor = cells[:2]
    assert [len(mark.places) for mark in tensor] == [ranks_ // 2] * 2
    assert max(x + width for mark in cells for x, _, width, _ in mark.places) <= 980
    assert max(y + high for mark in cells for _, y, _, high in mark.places) < figure.drawing.height
    boxes = rectangles(figure.drawing, "node")
    assert len(boxes) == 3 * nodes
    for x, y, width, high in (place for mark in cells for place in mark.places):
        assert any(
            box.x <= x
            and x + width <= box.x + box.width + 0.01
            and box.y <= y
            and y + high <= box.y + box.height + 0.01
            for box in boxes
        )


def test_bytes_are_the_sums_over_ranks(run: Run) -> None:
    sums = layout.totals(run.summary["comm"])
    assert sums["data"]["all_reduce"]["inside"] == 600 * RANKS
    section = layout.section(None, [], run.summary)
    drawing = next(section.figures).drawing
    (inside,) = rectangles(drawing, "data, to ranks of the same node")
    (between,) = rectangles(drawing, "data, to other nodes")
    assert (inside.width + 0.6) / (between.width + 0.6) == pytest.approx(6)


# --------------------------------------------------------------------------------- the course


def test_jobs_lie_where_they_were_on_the_clock(tmp_path: Path) -> None:
    run = read_run(run_folders.made(tmp_path, jobs=[0, 10, 30]))
    figure = course.timeline(run)
    assert figure
    jobs = rectangles(figure.drawing, "job ")
    width = jobs[-1].x + jobs[-1].width - jobs[0].x
    whole = run.jobs[-1].ended - run.jobs[0].began
    for drawn, job in zip(jobs, run.jobs, strict=True):
        share = (job.began - run.jobs[0].began) / whole
        assert (drawn.x - jobs[0].x) / width == pytest.approx(share, abs=0.002)
        assert (drawn.width + 0.4) / width == pytest.approx(
            (job.ended - job.began) / whole, abs=0.002
        )
    assert len(rectangles(figure.drawing, "saving, step")) == 4
    [table] = [one for one in course.section(run).blocks if getattr(one, "caption", "") == "Jobs"]
    assert [row[3] for row in table.rows] == ["1", "11", "31"]


def test_steps_that_were_done_again_are_counted(tmp_path: Path) -> None:
    run = run_folders.made(tmp_path, jobs=[0, 10])
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    late = {"time": run_folders.moment(14), "event": "eval", "step": 17}
    at = next(at for at, one in enumerate(events) if one["event"] == "start" and at > 0)
    run_folders.write_lines(run / "events.jsonl", [*events[:at], late, *events[at:]])
    assert course.steps_done_again(read_run(run)) == 7


# ------------------------------------------------------------------------------- several runs


def test_runs_of_several_seeds_are_a_line_with_a_band(tmp_path: Path) -> None:
    """Three seeds of one setting, and one run of another; losses as they were made."""
    folders = [
        run_folders.made(tmp_path, name, lr=lr, seed=seed)
        for name, lr, seed in (("a-1", 1e-3, 1), ("a-2", 1e-3, 2), ("b", 2e-3, 1))
    ]
    shift_losses(folders[1], 0.5)
    chapter = overlay.chapter(list(map(read_run, folders)), ["finished"] * 3)
    figure = next(one for one in chapter.figures if one.name == "training-steps")
    names = [one.text for one in figure.drawing.marks if isinstance(one, Words)]
    assert {"a", "b"} <= set(names)
    (band,) = (one for one in figure.drawing.marks if isinstance(one, Area))
    ends = sorted(band.points)[-2:]
    assert ends[0][0] == ends[1][0]
    scale = y_scale(figure.drawing)
    assert abs(ends[0][1] - ends[1][1]) == pytest.approx(0.5 * scale, rel=0.01)
    words = " ".join(one.words for one in chapter.sections[0].blocks if isinstance(one, Text))
    assert words.startswith("best: b, by ")


def shift_losses(run: Path, by: float) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["loss"] += by
        if "validation_loss" in line:
            line["validation_loss"] += by
    run_folders.write_lines(run / "metrics.jsonl", lines)


def y_scale(drawing: Drawing) -> float:
    """Return how far apart two values are that differ by one, from the written ticks."""
    left = [one for one in drawing.marks if isinstance(one, Words) and one.anchor == "end"]
    ticks = [(float(one.text), one.y) for one in left if re.fullmatch(r"[\d.]+", one.text)]
    (low, y_low), *_, (high, y_high) = ticks
    return abs((y_high - y_low) / (high - low))
