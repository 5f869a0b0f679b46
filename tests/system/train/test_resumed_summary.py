"""The words of a run at the end of its second job."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.launch import hpczero, launch

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

SPEC = """
name = "tiny"
[model]
layers = 1
hidden = 32
seq_len = 16
[data]
source = "synthetic"
[train]
steps = 4
global_batch = 4
eval_batches = 2
"""


@pytest.mark.slow
def test_a_resumed_run_keeps_its_own_figures_apart_from_its_last_job(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(SPEC)
    run = tmp_path / "runs" / "tiny"
    assert launch(hpczero("run", "spec.toml"), 120, tmp_path).code == 0
    second = ("train.steps=6", "train.global_batch=8", "train.eval_batches=0")
    done = launch(
        hpczero("run", "spec.toml", *(word for one in second for word in ("--set", one))),
        120,
        tmp_path,
    )
    assert done.code == 0, done
    summary, metrics = (
        json.loads((run / "summary.json").read_text()),
        [json.loads(line) for line in (run / "metrics.jsonl").open()],
    )
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert summary["first_loss"] == metrics[0]["loss"]
    assert summary["tokens"] == (4 * 4 + 2 * 8) * 16
    job = summary["last_job"]
    assert (job["first_step"], job["steps"], job["first_loss"], job["tokens"]) == (
        5,
        2,
        metrics[4]["loss"],
        2 * 8 * 16,
    )
    assert summary["seconds"] == pytest.approx(
        job["seconds"] + sum(line["step_seconds"] for line in metrics[:4])
    )
    assert summary["tokens_per_second"] == pytest.approx(summary["tokens"] / summary["seconds"])
    assert (summary["validation_loss"], summary["validation_step"]) == (
        metrics[3]["validation_loss"],
        4,
    )
    assert "last job:   steps 5 to 6, 256 tokens (" in done.out
    assert (
        f"loss:       {metrics[0]['loss']:.4f} at the first step, {metrics[5]['loss']:.4f} "
        f"at the last"
    ) in done.out
    assert "after step 4; the text's unigram entropy" in done.out


COUNTED = """
import sys
from hpczero.cli import main
from hpczero.model import build
make, made = build.initial_values, []
def counted(parameter, *rest):
    made.append(parameter.name)
    make(parameter, *rest)
build.initial_values = counted
code = main()
print("made", len(made), "for", len(set(made)))
sys.exit(code)
"""


@pytest.mark.slow
def test_initial_values_are_made_once_and_only_where_no_checkpoint_has_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "spec.toml").write_text(SPEC)
    (tmp_path / "counted.py").write_text(COUNTED)

    def made(*options: str) -> tuple[str, ...]:
        done = launch([sys.executable, "counted.py", "run", "spec.toml", *options], 120, tmp_path)
        assert done.code == 0, done
        return tuple(done.out.splitlines()[-1].split()[1::2])

    once, for_parameters = made()
    assert once == for_parameters != "0"
    assert made("--set", "train.steps=6") == ("0", "0")
    assert made("--fresh") == (once, once)
