"""`hpczero ckpt ls`, `show`, `stats`, `diff`, `verify`, `prune` as a user types them."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpczero.checkpoint
from hpczero.cli import main
from tests.support.checkpoints import BUFFERS, Grid, Wanted, make, parameters


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: "a" with three checkpoints, one set aside and one that is incomplete; "b" like
    a's newest one, in another layout.
    """
    folder = tmp_path_factory.mktemp("runs")
    for step in (100, 200, 300):
        made = make(
            folder / "a" / "checkpoints", Grid(tensor=2, data=3), Wanted(step=step, seed=step)
        )
    made.rename(made.with_name("step-00000300.20260101T000000"))
    make(made.parent, Grid(tensor=2, data=3), Wanted(step=300, seed=300))
    (made.parent / "step-00000400").mkdir()
    (made.parent / "step-00000400" / "shard-00000.h5.new").write_bytes(b"some of it")
    make(
        folder / "b" / "checkpoints",
        Grid(tensor=4, data=2, pipeline=2, per_file=3),
        Wanted(step=300, seed=300),
    )
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main(["ckpt", *map(str, arguments)]) == code
    found = capsys.readouterr()
    return found.err if code == 2 else found.out


def data(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    return json.loads(said(capsys, *arguments, "--json", code=code))


def test_ls_lists_runs_and_what_state_their_checkpoints_are_in(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = data(capsys, "ls", output)
    assert [(Path(one["run"]).name, one["step"], one["state"]) for one in found] == [
        ("a", 100, "complete"),
        ("a", 200, "complete"),
        ("a", 300, "complete"),
        ("a", 300, "set aside"),
        ("a", 400, "incomplete"),
        ("b", 300, "complete"),
    ]
    assert found[0]["grid"] == {"pipeline": 1, "data": 3, "tensor": 2}
    assert found[0]["size"] == sum(path.stat().st_size for path in Path(found[0]["path"]).iterdir())
    assert (
        data(capsys, "ls", output / "a")
        == found[:5]
        == data(capsys, "ls", output / "a" / "checkpoints")
    )
    lines = said(capsys, "ls", output).splitlines()
    assert len(lines) == 8
    assert "data 3 x tensor 2" in lines[1]


def test_ls_sees_a_file_that_is_missing_or_too_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (
        make(tmp_path / "run" / "checkpoints", Grid(2, 2), Wanted(step=step)) for step in (1, 2)
    )
    (first / "shard-00001.h5").unlink()
    (second / "shard-00000.h5").write_bytes((second / "shard-00000.h5").read_bytes()[:-1])
    assert [(one["state"], one["problem"].split()[0]) for one in data(capsys, "ls", tmp_path)] == [
        ("damaged", "shard-00001.h5:"),
        ("damaged", "shard-00000.h5"),
    ]


def test_show_says_who_holds_what(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, "show", output / "b")
    assert found["grid"] == {"pipeline": 2, "data": 2, "tensor": 4}
    assert [len(file["ranks"]) for file in found["files"]] == [3, 3, 3, 3, 3, 1]
    assert {one["name"]: one["shape"] for one in found["buffers"]} == {
        name: list(values.shape) for name, values in BUFFERS.items()
    }
    wanted = {name: list(values.shape) for name, values in Wanted().values[0].items()}
    assert {one["name"]: one["shape"] for one in found["tensors"]} == wanted
    for one in found["tensors"]:
        assert sum(
            math.prod(b - a for a, b in zip(p["start"], p["stop"], strict=True))
            for p in one["pieces"]
        ) == math.prod(one["shape"])
        assert all(
            p["rank"] in found["files"][int(p["file"][6:11])]["ranks"] for p in one["pieces"]
        )
    text = said(capsys, "show", output / "b", "blocks.*.qkv.*", "--pieces")
    assert "blocks.2.attention.qkv.bias" in text
    assert "[0:3, 20:24]" in text
    assert "embedding" not in text


def test_stats_are_those_of_the_numbers_whatever_the_layout(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = data(capsys, "stats", output / "a", "--slot", "all")
    assert found == data(capsys, "stats", output / "b", "--slot", "all")
    values = Wanted(seed=300).values
    for one in found:
        exact = values[["model", "optimizer/moment1", "optimizer/moment2"].index(one["slot"])][
            one["name"]
        ].astype(np.float64)
        wanted = {
            "norm": np.linalg.norm(exact),
            "mean": exact.mean(),
            "std": exact.std(),
            "min": exact.min(),
            "max": exact.max(),
        }
        assert {key: one[key] for key in wanted} == pytest.approx(wanted, rel=1e-12)
        assert (one["nan"], one["inf"], one["elements"]) == (0, 0, exact.size)
    assert len(said(capsys, "stats", output / "a", "head.norm").splitlines()) == 3


def test_stats_count_what_is_not_finite_and_leave_it_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = Wanted(layers=parameters(some=(4, 3), none=(2,), nothing=(0, 5), one=()), buffers={})
    wanted.values[0]["some"][:2] = [[np.nan, np.inf, -np.inf], [1e5, 1e5, 1e5 + 1]]
    wanted.values[0]["some"][2:] = 1e5
    wanted.values[0]["none"][:] = np.nan
    make(tmp_path, Grid(data=3), wanted)
    some, none, nothing, one = data(capsys, "stats", tmp_path)
    assert (some["nan"], some["inf"], some["max"]) == (1, 2, 1e5 + 1)
    assert some["std"] == pytest.approx(
        np.std([0] * 8 + [1]), rel=1e-9
    )  # no digits are lost at a mean that is large
    assert (none["nan"], none["mean"], nothing["norm"], nothing["elements"]) == (2, None, None, 0)
    assert one["mean"] == wanted.values[0]["one"]


def test_a_tensor_is_read_in_stretches_that_do_not_depend_on_the_layout(output: Path) -> None:
    for run in ("a", "b"):
        with hpczero.checkpoint.open(output / run) as checkpoint:
            for name, values in Wanted(seed=300).values[1].items():
                parts = list(checkpoint[f"/optimizer/moment1/{name}"].stretches(100))
                assert [len(part) for part in parts[:-1]] == [100] * (len(parts) - 1)
                assert np.array_equal(np.concatenate(parts), values.reshape(-1))


def test_diff_compares_across_layouts(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "diff", output / "a", output / "b") == "equal: 40 tensors\n"
    found = data(
        capsys,
        "diff",
        output / "a" / "checkpoints" / "step-00000200",
        output / "b",
        "--slot",
        "model",
        code=1,
    )
    assert len(found) == 40
    mine, other = (
        Wanted(seed=seed).values[0]["embedding.lookup.tokens"].astype(np.float64)
        for seed in (200, 300)
    )
    assert found[0]["tensor"] == "/model/embedding.lookup.tokens"
    assert found[0]["max_abs"] == np.abs(mine - other).max()
    assert found[0]["relative"] == pytest.approx(
        np.linalg.norm(mine - other) / np.linalg.norm(other), rel=1e-12
    )
    assert said(
        capsys,
        "diff",
        output / "a" / "checkpoints" / "step-00000200",
        output / "b",
        "--tolerance",
        10,
    ).startswith("equal")


def test_diff_finds_one_number_a_shape_a_tensor_and_a_buffer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = Wanted(
        layers=parameters(x=(9, 7), same=(5,), shape=(4,), mine=(2,)),
        buffers={"seen": np.array(1), "only": np.array(0)},
    )
    b = Wanted(
        layers=parameters(x=(9, 7), same=(5,), shape=(2, 2), other=(2,)),
        buffers={"seen": np.array(2)},
    )
    for slot in range(3):
        for name in ("x", "same"):
            b.values[slot][name][:] = a.values[slot][name]
    b.values[2]["x"][4, 4] += 1
    a.values[0]["same"][:] = b.values[0]["same"][:] = np.nan
    make(tmp_path / "a", Grid(data=2), a)
    make(tmp_path / "b", Grid(tensor=3), b)
    found = data(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1)
    assert [one["tensor"] for one in found] == [
        "/model/shape",
        "/model/mine",
        "/model/other",
        "/optimizer/moment2/x",
        "/buffers/only",
        "/buffers/seen",
    ]
    assert found[3]["elements"] == 1
    assert found[3]["max_abs"] == pytest.approx(1, abs=1e-6)
    assert found[1]["shape_b"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "{output}/none"], "does not exist"),
        (["show", "{output}/a/checkpoints/step-00000400"], "did not come to its end"),
        (["show", "{output}/a", "--step", "250"], "there are 300, 200, 100"),
        (
            ["show", "{output}/a/checkpoints/step-00000100", "--step", "200"],
            "is a checkpoint itself",
        ),
        (["stats", "{output}/a", "nothing.like.it"], "no tensor"),
        (["show", "{output}"], "no complete checkpoint"),
        (["diff", "{output}/a", "{output}/b", "--tolerance", "nan"], "--tolerance"),
        (["prune", "{output}/a"], "--keep"),
        (["prune", "{output}/a", "--keep", "0"], "always kept"),
        (["prune", "{output}", "--keep", "1"], "no checkpoints"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    output: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    text = said(capsys, *[argument.format(output=output) for argument in arguments], code=2)
    assert words in text
    assert text.count("\n") == 1


def test_verify_of_what_is_good(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [one["damages"] for one in data(capsys, "verify", output / "a", output / "b")] == [
        [],
        [],
    ]
    assert "good" in said(capsys, "verify", output / "a", "--step", 100)


def test_prune_keeps_what_is_asked_for_and_always_the_newest_complete_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    made = {step: make(checkpoints, None, Wanted(step=step)) for step in (1, 2, 3, 4, 5)}
    (made[5] / "shard-00000.h5").unlink()  # damaged: it does not count
    (checkpoints / "step-00000006").mkdir()
    made[1].rename(checkpoints / "step-00000001.20260101T000000")
    make(checkpoints, None, Wanted(step=1))

    def left() -> list[str]:
        return sorted(path.name.removeprefix("step-0000000") for path in checkpoints.iterdir())

    whole = left()
    assert "would remove" in said(
        capsys,
        "prune",
        tmp_path / "run",
        "--keep",
        1,
        "--incomplete",
        "--set-aside",
        "--damaged",
        "--dry-run",
    )
    assert left() == whole
    said(capsys, "prune", tmp_path / "run", "--keep", 1, "--keep-every", 2)
    assert left() == ["1.20260101T000000", "2", "4", "5", "6"]
    said(capsys, "prune", tmp_path / "run", "--incomplete", "--set-aside", "--damaged")
    assert left() == ["2", "4"]
    said(capsys, "prune", checkpoints, "--keep", 1)
    assert left() == ["4"]


INSIDE = {".": "run/checkpoints", "..": "run/checkpoints/step-00000001"}
PATHS_TO_A_RUN = INSIDE | dict.fromkeys(("run", "run/../run/checkpoints", "link", "named"), ".")


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("path", PATHS_TO_A_RUN)
def test_prune_leaves_a_run_alone_that_is_going_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    path: str,
    moved: bool,
) -> None:
    """However its checkpoints are named, and wherever they lie."""
    from hpczero.lock import RunLock

    make(tmp_path / "run" / "checkpoints", None, Wanted(step=1))
    (tmp_path / "run" / "spec.toml").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "run" / "checkpoints")
    (tmp_path / "named").symlink_to(tmp_path / "run")
    if moved and path in ("run", "named"):
        (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
        (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / PATHS_TO_A_RUN[path])
    with RunLock(tmp_path / "run"):
        assert "in use" in said(capsys, "prune", path, "--keep", 1, "--incomplete", code=2)
    said(capsys, "prune", path, "--keep", 1, "--incomplete")


def test_all_verbs_work_without_torch_and_mpi4py(output: Path, tmp_path: Path) -> None:
    blocked = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'mpi4py', 'numba'))); from "
        "hpczero.cli import main\n"
    )
    script = f"""
for arguments in (
    ["ls", "{output}"], ["show", "{output}/a"], ["stats", "{output}/a"],
    ["diff", "{output}/a", "{output}/b"], ["verify", "{output}/a"],
    ["export", "{output}/a", "{tmp_path}/x.safetensors"],
    ["import", "{tmp_path}/x.safetensors", "--spec", "{tmp_path}/spec.toml",
     "-o", "{tmp_path}/run"],
    ["prune", "{tmp_path}/run", "--keep", "1"],
):
    assert main(["ckpt", *arguments]) == 0, arguments
import hpczero.checkpoint
print(hpczero.checkpoint.open("{output}/a")["/model/head.norm.bias"].numpy().shape)
"""
    (tmp_path / "spec.toml").write_text(
        'name = "x"\n[model]\nlayers = 3\nhidden = 24\nheads = 6\nseq_len = 33\nvocab = 257\n'
    )
    done = subprocess.run(
        [sys.executable, "-c", blocked + script],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("(24,)\n")
