"""An exported tokenizer encodes as the run's: held against `transformers`."""

import json
import random
from pathlib import Path

import pytest
import transformers

from hpczero.cli import main
from hpczero.data.masking import SpecialIds
from hpczero.data.token_file import open_token_file
from hpczero.data.tokenizer import Tokenizer, tokenizer
from hpczero.huggingface.tokenizer_files import signs_of_bytes
from tests.support.inference import model_of, random_run

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
    ids = SpecialIds.of(ours)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    found = theirs.cls_token_id, theirs.sep_token_id, theirs.mask_token_id
    assert found == (ids.begin, ids.separator, ids.mask)
    first, second = (tokens.tolist() for tokens in ours.encode(["def x", "12"]))
    both = theirs("def x", "12", return_token_type_ids=True)
    begin, separator = [ids.begin], [ids.separator]
    assert both["input_ids"] == begin + first + separator + second + separator
    assert both["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert not (tmp_path / "out" / "generation_config.json").exists()
    assert theirs.encode("a[MASK]b", add_special_tokens=False)[1] == ids.mask


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
