"""Tokenizers of one's own: trained, kept in the token file, the same as the library's."""

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers

from hpczero import env
from hpczero.cli import main
from hpczero.data.build import build_token_file
from hpczero.data.corpus import find
from hpczero.data.encode import Effort
from hpczero.data.journal import Recipe
from hpczero.data.token_file import open_token_file
from hpczero.data.tokenizer import ByteTokenizer, tokenizer
from hpczero.errors import InputError
from tests.support.token_files import Heard, in_child

STDLIB = Path(os.__file__).parent
TEXTS = [str(STDLIB / name) for name in ("argparse.py", "ast.py", "bdb.py", "json", "html")]
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    assert main(["data", "tokenizer", "train", "-o", str(path), "--vocabulary", "700", *TEXTS]) == 0
    return path


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pieces")
    sentencepiece.SentencePieceTrainer.train(
        input=TEXTS[0],
        model_prefix=str(folder / "spm"),
        vocab_size=600,
        byte_fallback=True,
        minloglevel=2,
    )
    return folder / "spm.model"


def random_texts(count: int) -> list[str]:
    chance = random.Random(7)
    signs = ["a", "B", " ", "  ", "\n", "\t", "é", "世", "🙂", "'s", "0", "12", END, "</s>", "\x00"]
    signs += ["def ", "self", "(", ")", "\r\n", "\u200d", "import", "Ω"]
    return ["".join(chance.choices(signs, k=chance.randrange(20))) for _ in range(count)]


def test_training_gives_the_same_file_again(trained: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    command = ["data", "tokenizer", "train", "-o", str(again), "--vocabulary", "700", *TEXTS]
    assert main(command) == 0
    assert again.read_bytes() == trained.read_bytes()
    assert main(command) == 2
    assert tokenizer(str(trained)).vocabulary == 700


def test_any_text_comes_back_and_is_encoded_as_by_the_library(trained: Path) -> None:
    ours = tokenizer(str(trained))
    theirs = tokenizers.Tokenizer.from_file(str(trained))
    theirs.encode_special_tokens = True
    texts = random_texts(10_000)
    for text, tokens in zip(texts, ours.encode(texts), strict=True):
        assert tokens.tolist() == theirs.encode(text, add_special_tokens=False).ids
        assert ours.end_of_document not in tokens
        assert ours.decode(tokens.tolist()) == text


def test_sentencepiece(pieces: Path) -> None:
    ours = tokenizer(str(pieces))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    assert ours.vocabulary == theirs.get_piece_size() == 600
    assert ours.end_of_document == theirs.eos_id()
    for text, tokens in zip(random_texts(1000), ours.encode(random_texts(1000)), strict=True):
        assert tokens.tolist() == theirs.encode(text)
        assert ours.decode(tokens.tolist()) == theirs.decode(tokens.tolist())


@pytest.mark.parametrize("kind", ["trained", "pieces"])
def test_the_token_file_keeps_it(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = request.getfixturevalue(kind)
    path = tmp_path / "a.h5"
    command = ["data", "build", "-o", str(path), "--tokenizer", str(source), *TEXTS]
    assert main(command) == 0
    file = open_token_file(path)
    made = file.made_with()
    assert made.files == tokenizer(str(source)).files
    split = file.splits["train"]
    first = split.tokens[: split.ends[1] - 1]
    expected = np.concatenate(made.encode([Path(TEXTS[0]).read_text()]))
    assert np.array_equal(first, expected)
    assert split.tokens[split.ends[1] - 1] == made.end_of_document
    assert main(["data", "verify", str(path)]) == 0
    assert main(command) == 0
    assert "up to date" in capsys.readouterr().out
    before = path.read_bytes()
    path.unlink()
    assert main(command) == 0
    assert path.read_bytes() == before
    capsys.readouterr()
    assert main(["data", "tokenizer", "show", str(path), "--text", "def x", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tokens"] == made.encode(["def x"])[0].tolist()
    assert shown["vocabulary"] == made.vocabulary


def test_the_settings_of_a_folder_say_what_ends_a_document(trained: Path, tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_file(str(trained))
    made.add_special_tokens(["<finis>"])
    made.save(str(tmp_path / "tokenizer.json"))
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"eos_token": {"content": "<finis>"}}))
    assert tokenizer(str(tmp_path)).end_of_document == 700
    assert tokenizer(str(tmp_path), END).end_of_document == made.token_to_id(END)
    settings.write_text(json.dumps({"eos_token": "<gone>"}))
    with pytest.raises(InputError, match="no token <gone>"):
        tokenizer(str(tmp_path))


def without_an_end(path: Path, content: dict[str, Any]) -> Path:
    content["added_tokens"] = []
    content["model"]["vocab"] = {
        ("[x]" if name == END else name): number
        for name, number in content["model"]["vocab"].items()
    }
    path.write_text(json.dumps(content))
    return path


def test_bad_tokenizers_have_one_message_each(
    trained: Path, pieces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nameless = without_an_end(tmp_path / "nameless.json", json.loads(trained.read_text()))
    (tmp_path / "broken.json").write_text('{"model": 3}')
    huge = json.loads(trained.read_text())
    huge["model"]["vocab"]["far"] = 2**32 - 1
    (tmp_path / "huge.json").write_text(json.dumps(huge))
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "tiktoken.model").write_text("IQ== 0\n")
    (tmp_path / "hollow.model").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "both").mkdir()
    for name in ("spiece.model", "tokenizer.model"):
        shutil.copy(pieces, tmp_path / "both" / name)
    for source, said in {
        "broken.json": "tokenizer.json cannot be read",
        "tiktoken.model": "no model of SentencePiece",
        "hollow.model": "no pieces",
        "empty": "neither tokenizer.json nor tokenizer.model",
        "both": "name one of the files",
        "gone.json": "No such file",
        "huge.json": "the id 4,294,967,295",
        "fifo.json": "no plain file",
        "nonsense": "there is no tokenizer",
        nameless.name: "--end-of-document",
    }.items():
        command = ["data", "build", "-o", str(tmp_path / "a.h5"), TEXTS[0]]
        assert main([*command, "--tokenizer", str(tmp_path / source)]) == 2
        assert said in capsys.readouterr().err
        assert not list(tmp_path.glob("a.h5*"))


def test_text_that_has_the_end_as_a_plain_token_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "build", "-o", str(tmp_path / "a.h5"), "--tokenizer", str(trained)]
    assert main([*command, "--end-of-document", "e", TEXTS[0]]) == 2
    assert "argparse.py" in (said := capsys.readouterr().err)
    assert "--end-of-document" in said


def test_a_file_that_names_another_tokenizer_is_refused(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    command = ["data", "build", "-o", str(path), "--tokenizer", str(trained), TEXTS[0]]
    assert main(command) == 0
    content = path.read_bytes()
    at = content.index(b'"single_word"')
    path.write_bytes(content[:at] + b'"single_w0rd"' + content[at + 13 :])
    with pytest.raises(InputError):
        open_token_file(path).made_with()


def test_text_of_a_terminal_that_is_no_text(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "tokenizer", "show", str(trained), "--json"]
    assert main([*command, "--text", os.fsdecode(b"a\xff")]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "a\ufffd"


def test_killed_while_it_encodes_it_goes_on_to_the_same_bytes(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpczero.data.encode._BATCH", 10_000)
    recipe = Recipe(tokenizer(str(trained)), 0.1)

    def build(name: str, listener: Heard) -> None:
        work = tmp_path / f"{name}.partial"
        build_token_file(find(TEXTS), tmp_path / name, recipe, work, listener, Effort(1))

    build("whole.h5", Heard())
    kill = Heard(5, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert os.WTERMSIG(in_child(lambda: build("a.h5", kill))) == signal.SIGKILL
    heard = Heard()
    build("a.h5", heard)
    assert heard.lines[0].startswith("resuming after")
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_a_worker_encodes_by_one_thread(pieces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SentencePiece as well as `tokenizers`; each worker has a core of its own."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")  # and unset it behind the test
    ours: Any = tokenizer(str(pieces))
    encode, threads = ours._made.encode, list[int]()

    def seen(texts: list[str], num_threads: int, **more: Any) -> Any:
        threads.append(num_threads)
        return encode(texts, num_threads=num_threads, **more)

    monkeypatch.setattr(ours._made, "encode", seen)
    before = ours.encode(TEXTS)
    env.encode_by_one_thread()
    after = ours.encode(TEXTS)
    assert threads == [3, 1]
    assert all(map(np.array_equal, before, after))


def test_bytes() -> None:
    made = ByteTokenizer()
    assert made.decode([104, 105, 256]) == "hi"
    assert made.encode(["é"])[0].tolist() == [0xC3, 0xA9]


@pytest.mark.parametrize("kind", ["byte", "trained", "pieces"])
def test_ids_stand_for_the_bytes_of_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    source = "byte" if kind == "byte" else str(request.getfixturevalue(kind))
    made = tokenizer(source)
    sizes = made.bytes_of_ids()
    assert sizes is not None
    assert len(sizes) == made.vocabulary
    assert sizes[made.end_of_document] == 0
    texts = random_texts(1000)
    for text, tokens in zip(texts, made.encode(texts), strict=True):
        read = text
        if kind == "pieces":  # it normalizes text, and puts a space before it
            read = " " + made.decode(tokens.tolist()) if len(tokens) else ""
        assert sizes[tokens].sum() == len(read.encode()), text


def test_what_an_unknown_word_was_is_not_known(tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        input=TEXTS[0], model_prefix=str(tmp_path / "spm"), vocab_size=200, minloglevel=2
    )
    made = tokenizer(str(tmp_path / "spm.model"))
    sizes = made.bytes_of_ids()
    assert sizes is not None
    assert sizes[made.encode(["世"])[0]].min() == -1
    spaces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}
    vocabulary = [["a", 0.0], ["<unk>", 0.0], ["</s>", 0.0]]
    content = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": spaces,
        "decoder": spaces,
        "model": {"type": "Unigram", "unk_id": 1, "vocab": vocabulary},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    sizes = tokenizer(str(tmp_path / "tokenizer.json")).bytes_of_ids()
    assert sizes is not None
    assert sizes.tolist() == [1, -1, 4]


def test_the_bytes_of_words_are_not_known(trained: Path, tmp_path: Path) -> None:
    """A tokenizer that drops spaces cannot tell them."""
    content = json.loads(trained.read_text())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert tokenizer(str(tmp_path / "tokenizer.json")).bytes_of_ids() is None
