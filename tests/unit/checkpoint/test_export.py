"""`hpczero ckpt export` and `import`, held against the package `safetensors`."""

import json
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

import hpczero.checkpoint
from hpczero.checkpoint.safetensors import from_float32, to_float32
from hpczero.cli import main
from tests.support.checkpoints import BUFFERS, SMALL, Grid, Wanted, make, parameters

SPEC = 'name = "x"\n[model]\nlayers = 3\nhidden = 24\nheads = 6\nseq_len = 33\nvocab = 257\n'


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.toml"
    path.write_text(SPEC + f'[data]\nsource = "{tmp_path}"\n')
    return path


def export(*arguments: object, code: int = 0) -> None:
    assert main(["ckpt", "export", *map(str, arguments)]) == code


def test_one_file_has_the_weights_and_the_buffers(tmp_path: Path) -> None:
    make(tmp_path / "c", Grid(tensor=2, data=3, pipeline=2))
    export(tmp_path / "c", tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    wanted = Wanted().values[0] | BUFFERS
    assert found.keys() == wanted.keys()
    assert all(
        found[name].dtype == values.dtype and np.array_equal(found[name], values)
        for name, values in wanted.items()
    )
    with safe_open(tmp_path / "out.safetensors", "np") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["hpczero.step"] == "100"
    assert not list(tmp_path.glob("*.new"))


def test_several_files_have_an_index(tmp_path: Path) -> None:
    make(tmp_path / "c", Grid(data=2))
    export(tmp_path / "c", tmp_path / "out", "--shard-size", "20kB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    found = {
        name: (file, values)
        for file in files
        for name, values in load_file(tmp_path / "out" / file).items()
    }
    assert {name: file for name, (file, _) in found.items()} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(values.nbytes for _, values in found.values())
    assert all(
        np.array_equal(found[name][1], values)
        for name, values in (Wanted().values[0] | BUFFERS).items()
    )
    for file in files:
        sizes = [values.nbytes for values in load_file(tmp_path / "out" / file).values()]
        assert sum(sizes) <= 20_000 or len(sizes) == 1
    for before, after in pairwise(files):
        first = next(name for name, file in index["weight_map"].items() if file == after)
        held = sum(values.nbytes for file, values in found.values() if file == before)
        assert held + found[first][1].nbytes > 20_000, "it had room"


def test_an_export_that_was_killed_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "c", Grid(data=2))
    out = tmp_path / "out"
    export(tmp_path / "c", out, "--shard-size", "1")
    whole = {path.name: path.read_bytes() for path in out.iterdir()}
    shards = sorted(path for path in out.iterdir() if path.suffix == ".safetensors")
    (out / "model.safetensors.index.json").unlink()
    for path in shards[2:]:
        path.unlink()
    (out / f"{shards[2].name}.new").write_bytes(b"half")
    export(tmp_path / "c", out, "--shard-size", "1", "--dtype", "bf16", code=2)  # another export's
    assert "exists already" in capsys.readouterr().err
    export(tmp_path / "c", out, "--shard-size", "1")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
    export(tmp_path / "c", out, "--shard-size", "1", code=2)  # complete: left as it is
    (out / "model.safetensors.index.json").unlink()
    make(tmp_path / "d", Grid(data=2), Wanted(step=7))
    export(tmp_path / "d", out, "--shard-size", "1", code=2)  # another checkpoint's
    shards[0].write_bytes(b"somebody's")
    export(tmp_path / "c", out, "--shard-size", "1", code=2)
    assert shards[0].read_bytes() == b"somebody's"


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_is_rounded_as_torch_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, dtype: torch.dtype
) -> None:
    wanted = Wanted(layers=parameters(some=(300, 100), special=(8,)))
    wanted.values[0]["some"] *= 1000
    wanted.values[0]["special"][:] = [
        np.nan,
        np.inf,
        -np.inf,
        3.4e38,
        65520,
        1e-40,
        -0.0,
        1.00390625,
    ]
    make(tmp_path / "c", Grid(data=3), wanted)
    export(tmp_path / "c", tmp_path / "out.safetensors", "--dtype", name)
    found = load_torch(tmp_path / "out.safetensors")
    for own in ("some", "special"):
        exact = torch.from_numpy(wanted.values[0][own]).to(dtype)
        assert torch.equal(found[own].nan_to_num(nan=7.0), exact.nan_to_num(nan=7.0))
        assert torch.equal(found[own].isnan(), exact.isnan())
    assert found["norm.seen"].dtype == torch.int64
    overflows = (
        2 if name == "fp16" else 1
    )  # 3.4e38 is beyond bf16's largest; and 65520 beyond fp16's
    assert f"WARN {overflows} weights" in capsys.readouterr().out


def test_bf16_of_every_kind_of_number_is_torch_s() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32)
    values = bits.view(np.float32)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    ours = from_float32(values, "BF16")
    number = ~np.isnan(values)
    assert np.array_equal(ours[number], theirs[number])
    assert np.isnan(to_float32(ours[~number], "BF16")).all()


def test_what_is_there_is_left_and_nothing_is_half_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "c")
    (tmp_path / "there.safetensors").write_text("mine")
    export(tmp_path / "c", tmp_path / "there.safetensors", code=2)
    assert (tmp_path / "there.safetensors").read_text() == "mine"
    export(tmp_path / "c", tmp_path / "one.safetensors", "--shard-size", "1GB", code=2)
    export(tmp_path / "c", tmp_path / "out", "--shard-size", "many", code=2)
    export(tmp_path / "c", tmp_path / "no" / "such" / "one.safetensors", code=1)
    shard = next((tmp_path / "c").glob("step-*/shard-00000.h5"))
    damaged = bytearray(shard.read_bytes())
    damaged[70_000] ^= 1
    shard.write_bytes(damaged)
    export(tmp_path / "c", tmp_path / "out.safetensors", code=1)
    assert "shard-00000.h5" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_what_was_exported_is_imported(
    tmp_path: Path, spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(tmp_path / "c", Grid(data=2))
    export(made, tmp_path / "out", "--shard-size", "50kB")
    assert (
        main(
            [
                "ckpt",
                "import",
                str(tmp_path / "out"),
                "--spec",
                str(spec),
                "-o",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    assert main(["ckpt", "diff", str(made), str(tmp_path / "run"), "--slot", "model"]) == 0
    assert main(["ckpt", "verify", str(tmp_path / "run")]) == 0
    with hpczero.checkpoint.open(tmp_path / "run") as checkpoint:
        assert checkpoint.step == 0
        assert not checkpoint["/optimizer/moment2/blocks.0.attention.qkv.weight"].numpy().any()
        assert checkpoint.buffers["norm.seen"] == 7
        with h5py.File(checkpoint.folder / "index.h5") as file:
            assert np.array_equal(
                file["model/head.norm.bias"][()], Wanted().values[0]["head.norm.bias"]
            )
    assert (tmp_path / "run" / "spec.toml").exists()
    assert (
        main(
            [
                "ckpt",
                "import",
                str(tmp_path / "out"),
                "--spec",
                str(spec),
                "-o",
                str(tmp_path / "run"),
            ]
        )
        == 2
    )
    assert "has checkpoints already" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_in_other_types_are_imported(
    tmp_path: Path, spec: Path, dtype: torch.dtype
) -> None:
    values = {name: torch.from_numpy(found).to(dtype) for name, found in Wanted().values[0].items()}
    save_torch(values, tmp_path / "in.safetensors")
    assert (
        main(
            [
                "ckpt",
                "import",
                str(tmp_path / "in.safetensors"),
                "--spec",
                str(spec),
                "-o",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    with hpczero.checkpoint.open(tmp_path / "run") as checkpoint:
        assert all(
            torch.equal(checkpoint[f"/model/{name}"].torch(), found.float())
            for name, found in values.items()
        )


def test_a_model_of_ones_own_takes_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text('name = "x"\n[model]\nfamily = "some.module:factory"\n')
    save_file(
        {"w": np.ones((3, 4), np.float32), "seen": np.array([3])}, tmp_path / "in.safetensors"
    )
    assert (
        main(
            [
                "ckpt",
                "import",
                str(tmp_path / "in.safetensors"),
                "--spec",
                str(tmp_path / "spec.toml"),
                "-o",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    with hpczero.checkpoint.open(tmp_path / "run") as checkpoint:
        assert checkpoint["/model/w"].shape == (3, 4)
        assert checkpoint.buffers["seen"] == [3]


def test_tensors_that_are_not_the_model_s_are_all_named(
    tmp_path: Path, spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = dict(Wanted().values[0])
    values["more"] = values.pop("head.norm.bias")
    values["head.norm.weight"] = np.ones(SMALL.hidden + 1, np.float32)
    save_file(values, tmp_path / "in.safetensors")
    assert (
        main(
            [
                "ckpt",
                "import",
                str(tmp_path / "in.safetensors"),
                "--spec",
                str(spec),
                "-o",
                str(tmp_path / "run"),
            ]
        )
        == 2
    )
    text = capsys.readouterr().err
    assert all(
        line in text
        for line in (
            "head.norm.bias: not in the files",
            "more: not in the model",
            "head.norm.weight: [25] in the files, [24]",
        )
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (5).to_bytes(8, "little") + b"hello",
        (2).to_bytes(8, "little") + b"[]",
        (60000).to_bytes(8, "little") + b"[" * 60000,
        *(
            len(text).to_bytes(8, "little") + text + bytes(16)
            for text in (
                b'{"w": 1}',
                b'{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 17]}}',
                b'{"w": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}',
                (
                    b'{"w": {"dtype": "F32", "shape": [99999999999999999999], "data_offsets": '
                    b"[0, 16]}}"
                ),
                b'{"w": {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}}',
                b'{"w": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}',
            )
        ),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line(
    tmp_path: Path, spec: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / "in.safetensors").write_bytes(content)
    assert (
        main(
            [
                "ckpt",
                "import",
                str(tmp_path / "in.safetensors"),
                "--spec",
                str(spec),
                "-o",
                str(tmp_path / "run"),
            ]
        )
        == 2
    )
    assert capsys.readouterr().err.count("\n") == 1


def test_sizes_are_decimal(tmp_path: Path) -> None:
    """Two tensors of 10,160 bytes do not fit into 20.2 kB."""
    wanted = Wanted(layers=parameters(**dict.fromkeys("abcdef", (2540,))))
    make(tmp_path / "c", wanted=wanted)
    export(tmp_path / "c", tmp_path / "out", "--shard-size", "20.2kB", "--dtype", "fp32")
    files = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    assert max(sum(values.nbytes for values in file.values()) for file in files) <= 20_200
