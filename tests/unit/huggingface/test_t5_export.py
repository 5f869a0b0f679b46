"""An exported T5 trains on in `transformers`: its samples, made there, have the run's loss."""

import argparse
from pathlib import Path

import pytest
import sentencepiece
import torch
import transformers

from hpczero import cli
from hpczero.checkpoint.load import Checkpoint
from hpczero.data.dataset import open_source
from hpczero.data.special_ids import special_ids
from hpczero.data.tokenizer import ByteTokenizer
from hpczero.model.batch import MicroBatch
from hpczero.spec.load import load
from hpczero.spec.model import Model
from hpczero.train.batches import Batches
from tests.support.hugging_face import loaded
from tests.support.inference import model_of, random_module, random_run

IDS = special_ids(Model(family="t5"), ByteTokenizer())


def model(**sizes: object) -> Model:
    return model_of("gpt", **{"family": "t5", "vocab": 400, "seq_len": 142, "layers": 4} | sizes)


def a_batch(spec: Path, *overrides: str) -> MicroBatch:
    spec_of_run = load(spec, overrides).spec
    source = open_source(spec_of_run, lambda value: value)
    return Batches(spec_of_run, source, 0, 1).training(3)[0]


@pytest.mark.parametrize("tied", [True, False])
def test_labels_alone_give_the_loss_of_the_run(tied: bool, tmp_path: Path) -> None:
    ours = model(tied_embeddings=tied)
    run, out = random_run(tmp_path, ours, "stdlib"), tmp_path / "out"
    assert cli.main(["ckpt", "export", str(run), str(out), "--hf"]) == 0
    batch = a_batch(tmp_path / "spec.toml")
    encoder = batch.tokens[:, : ours.streams(142)[0]]
    theirs = loaded(out)
    loss = theirs(encoder, labels=batch.targets).loss  # it makes the decoder's input itself
    with torch.no_grad():
        expected = random_module(ours)(batch).item() / batch.targets.numel()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert all(parameter.grad is not None for parameter in theirs.parameters())


def test_what_it_generates_begins_and_ends_as_in_training(tmp_path: Path) -> None:
    run, out = random_run(tmp_path, model(), "stdlib"), tmp_path / "out"
    assert cli.main(["ckpt", "export", str(run), str(out), "--hf"]) == 0
    theirs = loaded(out)
    begin, end = theirs.config.decoder_start_token_id, theirs.config.eos_token_id
    assert (begin, end) == (IDS["<pad>"], IDS["</s>"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = tokenizer("def <extra_id_0>(self):", return_tensors="pt")
    assert text["input_ids"][0, -1] == end
    made = theirs.generate(**text, max_new_tokens=5, do_sample=False)
    assert made[0, 0] == begin


def test_the_ids_of_a_run_are_written_where_no_tokenizer_is_known(tmp_path: Path) -> None:
    run = random_run(tmp_path, model(), "stdlib", special_ids=(7, 8, 390))
    out = tmp_path / "out"
    assert cli.main(["ckpt", "export", str(run), str(out), "--hf"]) == 0
    assert not (out / "tokenizer.json").exists()
    config = loaded(out).config
    assert (config.decoder_start_token_id, config.pad_token_id, config.eos_token_id) == (7, 7, 8)


def ids_of_config(folder: Path) -> tuple[int, int, int]:
    config = loaded(folder).config
    return config.decoder_start_token_id, config.pad_token_id, config.eos_token_id


def test_a_tokenizer_that_cannot_be_exported_says_its_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A SentencePiece model as Llama's, which has no <pad> and no sentinels."""
    text = argparse.__file__
    sentencepiece.SentencePieceTrainer.train(
        input=text, model_prefix=str(tmp_path / "own"), vocab_size=250, minloglevel=2
    )
    tokens = str(tmp_path / "text.h5")
    build = ["data", "build", "-o", tokens, "--tokenizer", str(tmp_path / "own.model"), text]
    assert cli.main(build) == 0
    run, out = random_run(tmp_path, model(), tokens), tmp_path / "out"
    assert cli.main(["ckpt", "export", str(run), str(out), "--hf"]) == 0
    said = capsys.readouterr().out
    assert "WARN no tokenizer is exported: the SentencePiece model of the run lacks some" in said
    assert "published" not in said
    assert ids_of_config(out) == (250, 250, 2)
    targets = a_batch(tmp_path / "spec.toml", "train.eval_batches=0").targets
    assert set(targets[:, -1].tolist()) == {2}


def test_a_folder_as_published_ones_gives_its_sentinels_to_the_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its `spiece.model` has none: they come after it, the first one last."""
    pytest.importorskip("google.protobuf", reason="transformers reads SentencePiece models by it")
    text, folder, tokens = argparse.__file__, tmp_path / "published", str(tmp_path / "text.h5")
    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        input=text,
        model_prefix=str(folder / "spiece"),
        vocab_size=350,
        minloglevel=2,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
    )
    build = ["data", "build", "-o", tokens, "--tokenizer", str(folder), text]
    assert cli.main(build) == 0
    run, out = random_run(tmp_path, model(vocab=480), tokens), tmp_path / "out"
    capsys.readouterr()
    assert cli.main(["ckpt", "export", str(run), str(out), "--hf"]) == 0
    assert "WARN" not in capsys.readouterr().out
    assert ids_of_config(out) == (0, 0, 1)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    batch = a_batch(tmp_path / "spec.toml", "train.eval_batches=0")
    for stream in (batch.tokens[0].tolist(), batch.targets[0].tolist()):
        spelled = theirs.convert_ids_to_tokens([one for one in stream if one >= 350])
        assert spelled
        assert spelled[:2] == ["<extra_id_0>", "<extra_id_1>"]
        assert theirs.convert_tokens_to_ids("<extra_id_0>") == 449


def test_samples_of_random_tokens_say_their_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = random_run(tmp_path, model(), "synthetic"), tmp_path / "out"
    assert cli.main(["ckpt", "export", str(run), str(out), "--hf"]) == 0
    assert "published" not in capsys.readouterr().out
    batch = a_batch(tmp_path / "spec.toml")
    begin, pad, end = ids_of_config(out)
    assert {begin} == {pad} == set(batch.tokens[:, model().streams(142)[0]].tolist())
    assert {end} == set(batch.targets[:, -1].tolist())


def test_ids_that_nobody_knows_are_those_of_published_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = random_run(tmp_path, model(), tmp_path / "absent.h5"), tmp_path / "out"
    assert cli.main(["ckpt", "export", str(run), str(out), "--hf"]) == 0
    assert (
        "WARN config.json says decoder_start_token_id = 0, pad_token_id = 0 and eos_token_id = 1, "
        "as published models of T5 have them"
    ) in capsys.readouterr().out
    assert ids_of_config(out) == (0, 0, 1)


@pytest.mark.parametrize("ids", [[1, 2], [-1, 10**20, 3], [1, 2, 2], [1, 2, 400], [1, 2, True], 7])
def test_damaged_ids_are_one_message(
    ids: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = random_run(tmp_path, model(), "stdlib", special_ids=(7, 8, 390))
    opened = Checkpoint.open

    def damaged(path: Path) -> Checkpoint:
        checkpoint = opened(path)
        checkpoint.content.spec["data"]["special_ids"] = ids
        return checkpoint

    monkeypatch.setattr(Checkpoint, "open", damaged)
    assert cli.main(["ckpt", "export", str(run), str(tmp_path / "out"), "--hf"]) == 2
    said = capsys.readouterr().err
    assert f"data.special_ids = {ids} must be three" in said
    assert "0 to 399, the ids of <pad>, </s> and <extra_id_0>" in said
    assert not (tmp_path / "out").exists()
