"""An exported tokenizer encodes as the run's: held against `transformers`."""

import argparse
import json
import random
from pathlib import Path

import pytest
import sentencepiece
import transformers

from hpczero.cli import main
from hpczero.data.special_ids import special_ids
from hpczero.data.token_file import open_token_file
from hpczero.data.tokenizer import (
    OF_T5,
    SENTENCEPIECE,
    SETTINGS,
    Tokenizer,
    from_files,
    tokenizer,
)
from hpczero.huggingface.tokenizer_files import as_json, signs_of_bytes, tokenizer_files
from hpczero.spec.model import Model
from tests.support.inference import model_of, random_run
from tests.support.word_pieces import trained_word_pieces

SIGNS = ["a", "B", " ", "  ", "\n", "\t", "é", "世", "🙂", "'s", "0", "12", "</s>", "\x00", "\x7f"]
SIGNS += ["def ", "self", "(", ")", "\r\n", "\u200d", "import", "Ω", "\u00ad", "\u00a0"]


def random_texts(count: int) -> list[str]:
    chance = random.Random(11)
    texts = ["".join(chance.choices(SIGNS, k=chance.randrange(20))) for _ in range(count // 2)]
    anything = [chr(code) for code in range(0x3000) if not 0xD800 <= code < 0xE000]
    return texts + ["".join(chance.choices(anything, k=chance.randrange(9))) for _ in texts]


@pytest.fixture(params=["byte", "own"])
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, Path]:
    """A run's tokenizer, and the folder that its model was exported to."""
    (tmp_path / "text.txt").write_text("def number(self):\n    return 'äöü' * 12\n" * 3000)
    paths = [str(tmp_path / name) for name in ("text.txt", "tokenizer.json", "text.h5")]
    wanted = "byte"
    if request.param == "own":
        train = ["data", "tokenizer", "train", "-o", paths[1], "--vocabulary", "290", paths[0]]
        assert main(train) == 0
        wanted = paths[1]
    assert main(["data", "build", "-o", paths[2], "--tokenizer", wanted, paths[0]]) == 0
    run = random_run(tmp_path, model_of("llama", vocab=300), paths[2])
    assert main(["ckpt", "export", str(run), str(tmp_path / "out"), "--hf"]) == 0
    return open_token_file(Path(paths[2])).made_with(), tmp_path / "out"


def test_ten_thousand_texts_are_encoded_alike(exported: tuple[Tokenizer, Path]) -> None:
    ours, folder = exported
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    texts = random_texts(10_000)
    for text, tokens in zip(texts, ours.encode(texts), strict=True):
        assert theirs.encode(text, add_special_tokens=False) == tokens.tolist(), text
        assert theirs.decode(tokens.tolist()) == text == ours.decode(tokens.tolist())
    assert theirs.eos_token_id == ours.end_of_document
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == ours.end_of_document
    config = json.loads((folder / "config.json").read_text())
    assert config["eos_token_id"] == ours.end_of_document
    # and hpczero reads it again as it was, all tokens that end documents included
    again = tokenizer(str(folder))
    assert again.end_of_document == ours.end_of_document
    assert [tokens.tolist() for tokens in again.encode(texts[:200])] == [
        tokens.tolist() for tokens in ours.encode(texts[:200])
    ]


@pytest.mark.parametrize("kind", ["byte", "own"])
def test_a_masked_models_tokenizer_marks_texts_as_in_training(kind: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def number(self):\n    return 'äöü' * 12\n" * 3000)
    paths = [str(tmp_path / name) for name in ("text.txt", "tokenizer.json", "text.h5")]
    train = ["data", "tokenizer", "train", "-o", paths[1], "--vocabulary", "290", paths[0]]
    assert kind == "byte" or main(train) == 0
    wanted = "byte" if kind == "byte" else paths[1]
    assert main(["data", "build", "-o", paths[2], "--tokenizer", wanted, paths[0]]) == 0
    run = random_run(tmp_path, model_of("gpt", family="bert", vocab=300), paths[2])
    assert main(["ckpt", "export", str(run), str(tmp_path / "out"), "--hf"]) == 0
    ours = open_token_file(Path(paths[2])).made_with()
    ids = special_ids(model_of("gpt", family="bert"), ours)
    begin, separator = [ids["[CLS]"]], [ids["[SEP]"]]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    found = [theirs.cls_token_id, theirs.sep_token_id, theirs.mask_token_id]
    assert found == list(ids.values())
    first, second = (tokens.tolist() for tokens in ours.encode(["def x", "12"]))
    both = theirs("def x", "12", return_token_type_ids=True)
    assert both["input_ids"] == begin + first + separator + second + separator
    assert both["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert not (tmp_path / "out" / "generation_config.json").exists()
    assert theirs.encode("a[MASK]b", add_special_tokens=False)[1] == ids["[MASK]"]


def own_tokenizer(kind: str, folder: Path) -> Tokenizer:
    """Return one of bytes, one of a text, or one with T5's names, as `transformers` writes it."""
    if kind == "byte":
        return tokenizer("byte")
    if kind == "own":
        (folder / "text.txt").write_text("def number(self):\n    return 'äöü' * 12\n" * 3000)
        paths = [str(folder / name) for name in ("text.txt", "own.json")]
        train = ["data", "tokenizer", "train", "-o", paths[1], "--vocabulary", "290", paths[0]]
        assert main(train) == 0
        return tokenizer(paths[1])
    names = [
        "<pad>",
        "</s>",
        "<unk>",
        "▁",
        *"defx12",
        *map("<extra_id_{}>".format, range(99, -1, -1)),
    ]
    made = transformers.T5Tokenizer(vocab=[(name, -2.0) for name in names])
    made.save_pretrained(folder / "theirs")
    return tokenizer(str(folder / "theirs"))


@pytest.mark.parametrize("kind", ["byte", "own", "t5"])
def test_a_tokenizer_of_t5_marks_texts_as_in_training(kind: str, tmp_path: Path) -> None:
    ours = own_tokenizer(kind, tmp_path)
    model = Model(family="t5", seq_len=626, vocab=500)
    ids = special_ids(model, ours)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')  # as an exported model has
    files = tokenizer_files(ours, model)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.pad_token_id, theirs.eos_token_id) == (ids["<pad>"], ids["</s>"])
    assert {name: theirs.convert_tokens_to_ids(name) for name in ids} == ids
    sentinels = [f"<extra_id_{number}>" for number in range(100)]
    assert sorted(theirs.extra_special_tokens) == sorted(sentinels)
    first, second = (tokens.tolist() for tokens in ours.encode(["def x", "12"]))
    end = [ids["</s>"]]
    assert theirs("def x").input_ids == first + end
    both = theirs("def x", "12", return_token_type_ids=True)
    assert both.input_ids == first + end + second + end
    assert not any(both.token_type_ids)
    between = [ids["<extra_id_27>"]]
    assert theirs("def x<extra_id_27>12").input_ids == first + between + second + end
    assert theirs.decode([*between, *second, *end], skip_special_tokens=True).strip() == "12"
    # what is exported says again all that it said
    again = tokenizer(str(tmp_path))
    assert again.end_of_document == ids["</s>"]
    assert special_ids(model, again) == {name: ids[name] for name in special_ids(model, again)}
    assert tokenizer_files(again, model) == files
    if kind == "t5":
        assert all(json.loads(files[name]) == json.loads(ours.files[name]) for name in files)


KINDS_OF_PIECES = ["control_symbols", "user_defined_symbols", "no_symbols"]
SENTINELS = [f"<extra_id_{number}>" for number in range(100)]
PIECES_OF_T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}


def pieces_of_t5(folder: Path, kind: str) -> Tokenizer:
    """Return a SentencePiece model as T5's; with "no_symbols" it has no sentinels, as published."""
    sentencepiece.SentencePieceTrainer.train(
        input=argparse.__file__,
        model_prefix=str(folder / "own"),
        vocab_size=400,
        minloglevel=2,
        **PIECES_OF_T5,
        **({} if kind == "no_symbols" else {kind: SENTINELS[::-1]}),
    )
    return tokenizer(str(folder / "own.model"))


@pytest.mark.parametrize("kind", KINDS_OF_PIECES)
@pytest.mark.parametrize("has_settings", [False, True])
@pytest.mark.few(2)
def test_pieces_of_t5_are_exported_with_settings_by_which_texts_end(
    has_settings: bool, kind: str, tmp_path: Path
) -> None:
    ours = pieces_of_t5(tmp_path, kind)
    if has_settings:
        said = {"tokenizer_class": "LlamaTokenizer", "add_eos_token": False, "extra_ids": 100}
        ours = from_files({**ours.files, SETTINGS: as_json({**said, "own": 1})})
    model = Model(family="t5", seq_len=626, vocab=400)
    files = tokenizer_files(ours, model)
    settings = json.loads(files[SETTINGS])
    found = [settings[key] for key in ("tokenizer_class", "extra_ids", "pad_token", "eos_token")]
    assert found == ["T5Tokenizer", 0, "<pad>", "</s>"]
    assert settings["extra_special_tokens"] == SENTINELS
    assert settings.get("own") == (1 if has_settings else None)
    assert files[OF_T5] == ours.files[SENTENCEPIECE]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "own.model").unlink()
    again = tokenizer(str(tmp_path))
    assert again.end_of_document == ours.end_of_document == 1
    assert tokenizer_files(again, model) == files


@pytest.mark.parametrize("kind", KINDS_OF_PIECES)
def test_pieces_of_t5_mark_texts_as_in_training(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf", reason="transformers reads SentencePiece models by it")
    ours = pieces_of_t5(tmp_path, kind)
    model = Model(family="t5", seq_len=626, vocab=400)
    ids = special_ids(model, ours)
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"model_type": "t5"}')
    for name, content in tokenizer_files(ours, model).items():
        (out / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert (theirs.pad_token_id, theirs.eos_token_id) == (ids["<pad>"], ids["</s>"]) == (0, 1)
    assert {name: theirs.convert_tokens_to_ids(name) for name in ids} == ids
    first, second = (tokens.tolist() for tokens in ours.encode(["def x", "12"]))
    assert theirs("def x").input_ids == [*first, 1]
    assert theirs("def x", "12").input_ids == [*first, 1, *second, 1]
    between = [ids["<extra_id_27>"]]
    assert theirs("def x<extra_id_27>12").input_ids == [*first, *between, *second, 1]
    assert theirs.decode([*between, *second, 1], skip_special_tokens=True).strip() == "12"
    lines = [line for line in Path(argparse.__file__).read_text().splitlines() if line.strip()]
    for line, tokens in zip(lines, ours.encode(lines), strict=True):
        assert theirs(line).input_ids == [*tokens.tolist(), 1], line
    batch = theirs(["def x", "12"], padding=True).input_ids
    assert batch[1] == [*second, 1] + [0] * (len(first) - len(second))


def test_pieces_of_bert_have_its_names_and_no_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentencepiece.SentencePieceTrainer.train(
        input=argparse.__file__,
        model_prefix=str(tmp_path / "own"),
        vocab_size=400,
        minloglevel=2,
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
    )
    paths = [str(tmp_path / name) for name in ("own.model", "text.h5", "out")]
    assert main(["data", "build", "-o", paths[1], "--tokenizer", paths[0], argparse.__file__]) == 0
    run = random_run(tmp_path, model_of("gpt", family="bert", vocab=400), paths[1])
    capsys.readouterr()
    assert main(["ckpt", "export", str(run), paths[2], "--hf"]) == 0
    assert "WARN transformers puts no [CLS] and [SEP] around" in capsys.readouterr().out
    settings = json.loads((tmp_path / "out" / SETTINGS).read_text())
    assert (settings["cls_token"], settings["mask_token"]) == ("[CLS]", "[MASK]")


def test_a_tokenizer_of_bert_pads_a_batch(tmp_path: Path) -> None:
    ours = tokenizer(str(trained_word_pieces(tmp_path)))  # without settings beside it
    model = model_of("gpt", family="bert", vocab=60)
    files = tokenizer_files(ours, model)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.pad_token, theirs.unk_token) == ("[PAD]", "[UNK]")
    long, short = (tokens.tolist() for tokens in ours.encode(["the words of others", "text"]))
    batch = theirs(["the words of others", "text"], padding=True)
    assert batch.input_ids[0] == [2, *long, 3]
    assert batch.input_ids[1] == [2, *short, 3] + [0] * (len(long) - len(short))
    assert batch.attention_mask[1] == [1] * (len(short) + 2) + [0] * (len(long) - len(short))
    # what settings say stays
    own = from_files(ours.files | {SETTINGS: as_json({"pad_token": "[UNK]", "unk_token": None})})
    settings = json.loads(tokenizer_files(own, model)[SETTINGS])
    assert (settings["pad_token"], settings["unk_token"]) == ("[UNK]", "[UNK]")


def test_a_tokenizer_of_bytes_pads_by_a_token_that_one_names(tmp_path: Path) -> None:
    for name, content in tokenizer_files(
        tokenizer("byte"), model_of("gpt", family="bert", vocab=260)
    ).items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.pad_token is None
    theirs.pad_token = "[SEP]"
    batch = theirs(["abc", "d"], padding=True)
    assert batch.input_ids == [[257, *b"abc", 258], [257, *b"d", 258, 258, 258]]
    assert batch.attention_mask[1] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("key", ["extra_special_tokens", "additional_special_tokens"])
def test_special_tokens_of_settings_stay(key: str, tmp_path: Path) -> None:
    files = tokenizer_files(tokenizer("byte"), Model(family="gpt"))
    settings = json.loads(files[SETTINGS]) | {key: ["<|endoftext|>"]}
    ours = from_files(files | {SETTINGS: as_json(settings)})
    for name, content in tokenizer_files(ours, Model(family="t5", vocab=400)).items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs.extra_special_tokens) == 101
    assert {"<|endoftext|>", "<extra_id_0>", "<extra_id_99>"} <= {*theirs.extra_special_tokens}
    assert (theirs.eos_token_id, theirs.convert_tokens_to_ids("<|endoftext|>")) == (258, 256)


def test_a_tokenizer_with_more_ids_than_the_model_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = random_run(tmp_path, model_of("gpt", family="bert", vocab=259), "synthetic")
    command = ["ckpt", "export", str(run), str(tmp_path / "out"), "--hf", "--tokenizer", "byte"]
    assert main(command) == 2
    assert "would be [257, 258, 259] after the tokenizer's own, and the model has 259" in (
        capsys.readouterr().err
    )


def test_a_tokenizer_with_other_special_ids_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of("gpt", family="bert", vocab=300)
    run = random_run(tmp_path, model, "stdlib", special_ids=(1, 2, 290))
    assert main(["ckpt", "export", str(run), str(tmp_path / "out"), "--hf"]) == 0
    said = capsys.readouterr().out
    assert "WARN no tokenizer is exported" in said
    assert "[1, 2, 290]" in said
    assert "[257, 258, 259]" in said
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_each_byte_has_a_sign_of_its_own() -> None:
    assert len(set(signs_of_bytes())) == 256
    assert signs_of_bytes()[ord("a")] == "a"
    assert signs_of_bytes()[ord(" ")] == "Ġ"


def test_without_a_tokenizer_the_rest_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = random_run(tmp_path, model_of("llama", vocab=300), "synthetic")
    out = tmp_path / "out"
    assert main(["ckpt", "export", str(run), str(out), "--hf"]) == 0
    assert "WARN no tokenizer is exported" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    other = str(tmp_path / "other")
    assert main(["ckpt", "export", str(run), other, "--hf", "--tokenizer", "byte"]) == 0
    assert (tmp_path / "other" / "tokenizer.json").exists()
    refused = ["ckpt", "export", str(run), str(tmp_path / "w"), "--tokenizer", "byte"]
    assert main(refused) == 2
    assert "--tokenizer needs --hf" in capsys.readouterr().err
