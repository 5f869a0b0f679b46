"""`hpczero sample`: prompts in, texts out, and what is refused."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from hpczero.cli import main
from hpczero.data.token_file import open_token_file
from hpczero.data.tokenizer import tokenizer
from tests.support.inference import model_of, random_run
from tests.support.token_files import make

TEXT = "".join(f"line {number} of the text: äöü 世界\n" for number in range(3000))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a token file, with random weights."""
    folder = tmp_path_factory.mktemp("sample")
    (folder / "text.txt").write_text(TEXT)
    make(folder / "text.txt", folder / "text.h5")
    return random_run(folder, model_of("llama", vocab=257), folder / "text.h5")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a model of a single position."""
    return random_run(tmp_path_factory.mktemp("short"), model_of("gpt", vocab=257, seq_len=1),
                      "stdlib")  # fmt: skip


@pytest.fixture(scope="module")
def own_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a token file with a tokenizer of its own, whose file is gone."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "text.txt").write_text(TEXT)
    paths = [str(folder / name) for name in ("text.txt", "tokenizer.json", "text.h5")]
    train = ["data", "tokenizer", "train", "-o", paths[1], "--vocabulary", "300", paths[0]]
    assert main(train) == 0
    assert main(["data", "build", "-o", paths[2], "--tokenizer", paths[1], paths[0]]) == 0
    (folder / "tokenizer.json").unlink()
    return random_run(folder, model_of("llama", vocab=320), folder / "text.h5")


def sampled(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Any:
    capsys.readouterr()
    assert main(["sample", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    capsys.readouterr()
    assert main(["sample", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_a_text_is_its_prompt_and_its_tokens(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (answer,) = sampled(capsys, run, "line 1", "--tokens", 9)
    assert answer["prompt"] == "line 1"
    assert answer["prompt_tokens"] == list(b"line 1")
    text = bytes(token for token in answer["tokens"] if token < 256)
    assert answer["text"] == text.decode(errors="replace")
    assert answer["ended"] == ("end of document" if answer["tokens"][-1] == 256 else "length")
    assert main(["sample", str(run), "line 1", "--tokens", "9"]) == 0
    assert capsys.readouterr().out == "line 1" + answer["text"] + "\n"


def test_prompts_come_from_arguments_a_file_or_stdin(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # in half precision a product may round by the number of its rows, on some processors
    options = "--tokens", 5, "--temperature", 0.9, "--seed", 4, "--precision", "fp32"
    both = sampled(capsys, run, "one", "two\nlines", *options)
    assert [answer["prompt"] for answer in both] == ["one", "two\nlines"]
    assert sampled(capsys, run, *options, "one", "two\nlines") == both  # behind options, too
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    lines = sampled(capsys, run, "--file", tmp_path / "p.txt", *options)
    assert [answer["prompt"] for answer in lines] == ["one", "two"]
    assert lines[0] == both[0]
    records = [json.dumps({"prompt": text}) for text in ("one", "two\nlines")]
    (tmp_path / "p.jsonl").write_text("\n".join(records))
    assert sampled(capsys, run, "--file", tmp_path / "p.jsonl", *options) == both
    one_by_one = sampled(capsys, run, "one", "two\nlines", *options, "--batch", 1)
    assert one_by_one == both
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one")))
    assert sampled(capsys, run, *options) == [both[0]]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    (new,) = sampled(capsys, run, *options)
    assert new["prompt_tokens"] == [256]  # a document begins


def test_the_token_file_is_all_that_is_needed(
    own_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (answer,) = sampled(capsys, own_tokenizer, "line 12 of", "--tokens", 30)
    made = open_token_file(own_tokenizer.parents[1] / "text.h5").made_with()
    assert answer["prompt_tokens"] == made.encode(["line 12 of"])[0].tolist()
    ended = answer["ended"] == "end of document"
    tokens = answer["tokens"][:-1] if ended else answer["tokens"]
    assert answer["text"] == made.decode([*answer["prompt_tokens"], *tokens])[len("line 12 of") :]
    assert max(answer["tokens"]) < made.vocabulary < 320
    begun = sampled(capsys, own_tokenizer, "x", "--begin", "<|endoftext|>", "--tokens", 1)
    assert begun[0]["prompt_tokens"][0] == made.end_of_document


def test_one_clear_message_each(
    run: Path, short: Path, own_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = refused(capsys, run, "x" * 40)
    assert "40 tokens" in long
    assert "model.seq_len" in long
    assert "39 at most" in long
    assert "prompt 2 has 99 tokens" in refused(capsys, run, "x", "x" * 99)
    assert "no such token" in refused(capsys, run, "x", "--begin", "<s>")
    larger = refused(capsys, run, "x", "--tokenizer", own_tokenizer.parents[1] / "text.h5")
    assert "300 ids" in larger
    assert "257" in larger
    assert "model.vocab" in larger
    for option, value in (
        ("--temperature", -1),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--top-p", 0),
        ("--top-p", 1.5),
        ("--top-k", -1),
        ("--tokens", 0),
        ("--batch", 0),
    ):
        message = refused(capsys, run, "x", option, value)
        assert option in message
        assert str(value) in message
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"text": 3}\n')
    assert "record 2" in refused(capsys, run, "--file", tmp_path / "p.jsonl")
    (tmp_path / "empty.txt").write_text("\n")
    assert "has no prompts" in refused(capsys, run, "--file", tmp_path / "empty.txt")
    (tmp_path / "torn.jsonl").write_text('{"prompt": "a\\ud800b"}\n')
    assert sampled(capsys, run, "--file", tmp_path / "torn.jsonl")[0]["prompt"] == "a?b"
    assert "has 1 token:" in refused(capsys, short, "x")
    assert "not from both" in refused(capsys, run, "x", "--file", tmp_path / "empty.txt")
    assert "no such" in refused(capsys, run, "--file", tmp_path / "none").lower()


def test_a_tokenizer_that_is_gone_or_random_data_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    gone = random_run(tmp_path / "a", model_of("gpt", vocab=257), tmp_path / "gone.h5")
    message = refused(capsys, gone, "x")
    assert "gone.h5" in message
    assert "--tokenizer" in message
    assert len(sampled(capsys, gone, "x", "--tokenizer", "byte", "--tokens", 3)) == 1
    (tmp_path / "b").mkdir()
    random = random_run(tmp_path / "b", model_of("gpt", vocab=257), "synthetic")
    assert "--tokenizer" in refused(capsys, random, "x")


def test_the_exported_tokenizer_is_the_runs(
    own_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["ckpt", "export", str(own_tokenizer), str(out), "--hf"]) == 0
    file = open_token_file(own_tokenizer.parents[1] / "text.h5")
    assert tokenizer(str(out)).name == file.tokenizer


def test_without_an_output_nothing_is_printed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert main(["sample", str(run), "a", "--tokens", "2"]) == 0


def test_a_terminal_gets_no_control_characters(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["sample", str(run), "a\x1b[31mb", "--tokens", "20", "--seed", "9"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("a\\x1b[31mb")
    assert all(sign.isprintable() or sign in "\n\t" for sign in out)
