"""`hpczero ckpt import` of odd and of crafted files: what it makes can be read, and what it
refuses leaves nothing that a run would begin from.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import hpczero.checkpoint
from hpczero import safe_files
from hpczero.checkpoint import directory, import_safetensors
from hpczero.checkpoint.safetensors import SafetensorsFile
from hpczero.cli import main
from hpczero.errors import InputError
from tests.support.checkpoints import memory_at_most


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "spec.toml").write_text('name = "x"\n[model]\nfamily = "some.module:factory"\n')
    return tmp_path / "spec.toml"


def tensor(begin: Any = 0, end: Any = 16, shape: Any = (4,), **more: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]} | more


def file_of(path: Path, header: str | dict[str, Any], data: int) -> Path:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return path


ODD: dict[str, tuple[str | dict[str, Any], int]] = {
    **{
        f"name {name!a}": ({name: tensor()}, 16)
        for name in (
            "a\nb",
            "./a",
            "..",
            "a//b",
            "a/",
            "",
            "\0",
            "\ud800",
            "\u200b",
            "a/" * 40 + "a",
            "n" * 5000,
        )
    },
    "a tensor and a group": ({"a": tensor(), "a/b": tensor(16, 32)}, 32),
    "40 dimensions": ({"a": tensor(0, 4, [1] * 40)}, 4),
    "many lengths": ({"a": tensor(0, 16, [1 << 47] * 100_000)}, 16),
    "empty and huge": ({"a": tensor(0, 0, [0, 1 << 70])}, 0),
    "length that is true": ({"a": tensor(0, 4, [True])}, 4),
    "place that is true": ({"a": tensor(0, 0, [0]), "b": tensor(True, 17)}, 17),
    "over each other": ({"a": tensor(), "b": tensor(8, 24)}, 24),
    "the same twice": ({"a": tensor(), "b": tensor()}, 16),
    "a gap": ({"a": tensor(), "b": tensor(20, 36)}, 36),
    "a gap at the beginning": ({"a": tensor(8, 24)}, 24),
    "more behind the end": ({"a": tensor()}, 24),
    "another key": ({"a": tensor(more=1)}, 16),
    "a name twice": (
        (
            '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {"dtype": "F32", '
            '"shape": [1], "data_offsets": [0, 4]}}'
        ),
        4,
    ),
    "a key twice": (
        '{"a": {"dtype": "F32", "shape": [1], "shape": [1], "data_offsets": [0, 4]}}',
        4,
    ),
    "metadata that is null": ({"__metadata__": None, "a": tensor()}, 16),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": tensor()}, 16),
}


def imported(spec: Path, *files: Path, code: int) -> None:
    assert (
        main(
            [
                "ckpt",
                "import",
                *map(str, files),
                "--spec",
                str(spec),
                "-o",
                str(spec.parent / "run"),
            ]
        )
        == code
    )


@pytest.mark.parametrize("what", ODD)
def test_an_odd_file_is_refused_in_one_line_and_nothing_is_left(
    spec: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    imported(spec, file_of(spec.parent / "in.safetensors", *ODD[what]), code=2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert len(said) < 1000
    assert not (spec.parent / "run").exists()


def test_the_same_without_its_oddness_is_imported(spec: Path) -> None:
    header = {
        "__metadata__": {"hpczero.buffers": "[" * 100_000},
        "b": tensor(16, 32),
        "a": tensor(),
        "none": tensor(16, 16, [0, 3]),
    }
    imported(spec, file_of(spec.parent / "in.safetensors", header, 32), code=0)
    with hpczero.checkpoint.open(spec.parent / "run") as checkpoint:
        assert checkpoint["/model/none"].numpy().shape == (0, 3)
    assert main(["ckpt", "verify", str(spec.parent / "run")]) == 0


@pytest.mark.parametrize(("precision", "scale"), [("fp16", 1024), ("bf16", 1), ("fp32", 1)])
def test_a_run_begins_with_the_loss_scale_of_its_precision(
    spec: Path, precision: str, scale: int
) -> None:
    train = f'[train]\nprecision = "{precision}"\nloss_scale = 1024\n'
    spec.write_text(spec.read_text() + train)
    imported(spec, file_of(spec.parent / "in.safetensors", {"a": tensor()}, 16), code=0)
    with hpczero.checkpoint.open(spec.parent / "run") as checkpoint:
        assert checkpoint.content.state.loss_scale == scale


def test_two_files_whose_names_are_in_each_other_s_way_are_refused(
    spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        file_of(spec.parent / f"{number}.safetensors", {name: tensor()}, 16)
        for number, name in enumerate(("a", "a/b"))
    ]
    imported(spec, *files, code=2)
    assert "there cannot be a too" in capsys.readouterr().err


def test_an_import_without_room_is_refused_before_anything_is_written(
    spec: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(
        safe_files, "free_bytes", lambda path: asked.append(path) or 3 * 4 * 1000 - 1
    )
    save_file({"w": np.ones(1000, np.float32)}, spec.parent / "in.safetensors")
    imported(spec, spec.parent / "in.safetensors", code=2)
    assert "12.0 kB are to be written" in capsys.readouterr().err
    assert asked == [spec.parent / "run"]
    assert not (spec.parent / "run").exists()


def test_an_import_that_fails_leaves_nothing_that_a_run_would_begin_from(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    save_file({"w": np.ones(1000, np.float32)}, spec.parent / "in.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(import_safetensors.manifest, "write", full)
        imported(spec, spec.parent / "in.safetensors", code=1)
    assert not (spec.parent / "run" / "spec.toml").exists()
    assert not directory.steps(spec.parent / "run" / "checkpoints")
    imported(spec, spec.parent / "in.safetensors", code=0)
    assert (spec.parent / "run" / "spec.toml").exists()


def test_weights_that_are_too_large_for_fp32_are_counted(
    spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(
        {"w": np.array([1e300, -1e39, 1.0, np.inf, np.nan, 3e38])}, spec.parent / "in.safetensors"
    )
    imported(spec, spec.parent / "in.safetensors", code=0)
    assert "WARN 2 weights are too large for fp32" in capsys.readouterr().out


HEADERS = {
    "entries": lambda: b"{" + b",".join(b'"t%d":{}' % number for number in range(1_100_000)) + b"}",
    "lists": lambda: b"{" + b"[" * 1_100_000 + b"}",
    "blanks": lambda: b"{" + b" " * (33 << 20) + b"}",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_of_too_many_entries_is_refused_unread(kind: str, tmp_path: Path) -> None:
    header = HEADERS[kind]()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with memory_at_most(len(header) + (20 << 20)), pytest.raises(InputError, match="a header "):
        SafetensorsFile(tmp_path / "x.safetensors")
