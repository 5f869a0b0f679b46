"""An exported T5 trains on in `transformers`: its samples, made there, have the run's loss."""

from pathlib import Path

import pytest
import torch
import transformers

from hpczero import cli
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
    return model_of("gpt", family="t5", vocab=400, seq_len=142, layers=4, **sizes)


def a_batch(spec: Path) -> MicroBatch:
    spec_of_run = load(spec).spec
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
