"""W&B and MLflow behind a pipe: what they write, and what the pipe tells of their failures."""

import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from hpczero.errors import HpczeroError
from hpczero.track.item import Item
from hpczero.track.lane import Lane
from hpczero.track.process import InProcess
from tests.support.launch import launch
from tests.support.tracked import begin, event, facts, line, wandb_server

KEY = "0123456789abcdef" * 2 + "01234567"  # as W&B's are


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no settings of this user matter; a key is in the environment, as in a job."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_API_KEY", KEY)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def write_directory(run: Path, steps: range, loss: float) -> None:
    """Write what a run directory has after these steps, each step once."""
    path = run / "metrics.jsonl"
    old = path.read_text().splitlines() if path.exists() else []
    kept = [one for one in old if json.loads(one)["step"] < steps.start]
    when = "2026-01-01T00:00:00.000+00:00"
    new = [json.dumps({"time": when, "step": step, "loss": loss, "tokens": 64}) for step in steps]
    path.write_text("".join(f"{one}\n" for one in [*kept, *new]))


def job(name: str, run: Path, steps: range, loss: float, state: str = "finished") -> None:
    """Run one job of a run; without a state it ends as one that was killed."""
    tracker = InProcess(name, facts(run))
    items = [begin(steps.start), event("start", 0, time.time(), what=f"loss {loss}")]
    items += [line(step, loss) for step in steps]
    tracker.write(items)
    write_directory(run, steps, loss)
    with (run / "events.jsonl").open("a") as file:
        when = "2026-01-01T00:00:00.000+00:00"
        file.write(json.dumps({"time": when, "event": "start", "what": f"loss {loss}"}) + "\n")
    if state:
        tracker.write([event("stop", steps.stop - 1, state=state)])
    tracker.close()


def files_with(folder: Path, content: bytes) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if content in path.read_bytes()]


def test_wandb_syncs_one_run_without_a_step_twice(run: Path) -> None:
    pytest.importorskip("wandb", reason="W&B is not installed")
    job("wandb", run, range(1, 9), 5.0, state="")
    job("wandb", run, range(6, 11), 4.0)
    (folder,) = (run / "wandb").glob("offline-run-*")
    assert files_with(run, KEY.encode()) == []
    with wandb_server() as server:
        command = [sys.executable, "-m", "wandb", "sync", str(folder)]
        done = launch(command, 120, run, {"WANDB_BASE_URL": server.url})
    assert done.code == 0, done.err
    ((name, files),) = server.runs.items()
    history = server.history(name)
    assert [(row["_step"], row["loss"]) for row in history] == [
        *((step, 5.0) for step in range(1, 6)),
        *((step, 4.0) for step in range(6, 11)),
    ]
    assert [row["tokens"] for row in history] == [64 * step for step in range(1, 11)]
    assert history[0]["_timestamp"] == 1767225600
    assert server.configs[name]["train"]["value"]["steps"] == 100
    said = [one for one in files["output.log"] if "start: loss" in one]
    assert ["5.0" in said[0], "4.0" in said[1], len(said)] == [True, True, 2]


def test_mlflow_has_one_run_without_a_step_twice(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    job("mlflow", run, range(1, 9), 5.0, state="")
    job("mlflow", run, range(6, 11), 4.0)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=(run / "mlflow").as_uri())
    (experiment,) = client.search_experiments()
    (found,) = client.search_runs([experiment.experiment_id])
    assert (experiment.name, found.info.run_name, found.info.status) == (
        *("hpczero", "tiny", "FINISHED"),
    )
    history = client.get_metric_history(found.info.run_id, "loss")
    assert sorted((one.step, one.value) for one in history) == [
        *((step, 5.0) for step in range(1, 6)),
        *((step, 4.0) for step in range(6, 11)),
    ]
    assert found.data.params == {"name": "tiny"}
    assert "loss 4.0" in found.data.tags["mlflow.note.content"]
    assert [one.path for one in client.list_artifacts(found.info.run_id)] == ["spec.toml"]


# -- failures --------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that stands for W&B's."""
    monkeypatch.syspath_prepend(tmp_path / "library")
    (tmp_path / "library").mkdir()
    return tmp_path / "library" / "wandb.py"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('no such server')", "RuntimeError: no such server"),
        ("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
        ("import sys; sys.exit('enough')", "SystemExit: enough"),
        ("import os; os._exit(7)", r"its process has ended \(7\)"),
        ("import os; os.kill(os.getpid(), 11)", r"its process has ended \(-11\)"),
        ("print('hello')", "AttributeError: module 'wandb' has no attribute 'Settings'"),
    ],
)
def test_a_library_s_failure_is_told(library: Path, run: Path, code: str, said: str) -> None:
    library.write_text(code + "\n")
    with pytest.raises(HpczeroError, match=f"^{said}"):
        InProcess("wandb", facts(run)).write([begin(1), line(1, 1.0)])


def test_a_library_that_hangs_is_killed_at_the_end(
    library: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.write_text(
        "import subprocess, time\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "open('hangs', 'w').close()\n"
        "time.sleep(600)\n"
    )
    monkeypatch.chdir(run)
    lane = Lane("wandb", lambda: InProcess("wandb", facts(run)))
    lane.put(line(1, 1.0))
    begun = time.monotonic()
    while not (run / "hangs").exists():
        assert time.monotonic() - begun < 60
        time.sleep(0.05)
    children = psutil.Process().children(recursive=True)
    assert len(children) == 2
    lane.end()
    (said,) = lane.wait(time.monotonic())
    assert said == "wandb was not done in time at the end of this run: given up"
    assert psutil.wait_procs(children, timeout=30)[1] == []


def test_a_process_ends_what_it_writes_when_its_rank_is_gone(library: Path, run: Path) -> None:
    library.write_text(
        "class Settings:\n    def __init__(self, **settings): ...\n"
        "class Run:\n    id = 'x'; dir = 'a/b'\n"
        "    def log(self, *a, **b): ...\n"
        "    def finish(self, exit_code): open('finished', 'w').write(str(exit_code))\n"
        "def init(**facts): return Run()\n"
    )
    code = (
        "import os, sys; from pathlib import Path\n"
        "from hpczero.track.process import InProcess\n"
        "from tests.support.tracked import *\n"
        "it = InProcess('wandb', facts(Path.cwd())); it.write([begin(1), line(1, 1.0)])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = {"PYTHONPATH": os.pathsep.join(map(str, [library.parent, *sys.path]))}
    done = launch([sys.executable, "-c", code], 60, run, path)
    assert done.code == -9
    begun = time.monotonic()
    while not (run / "finished").exists() or not (run / "finished").read_text():
        assert time.monotonic() - begun < 60
        time.sleep(0.05)
    assert (run / "finished").read_text() == "1"


def test_items_survive_the_pipe() -> None:
    item = line(3, float("nan"), where="ü\n")
    assert str(Item(**json.loads(json.dumps(vars(item))))) == str(item)
