"""The validation loss of a run, computed again by plain PyTorch from exported weights and the
token file's bytes.
"""

import json
import random
import re
import shutil
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support.launch import hpczero, launch, mpirun

torch = pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

LAYERS, HIDDEN, HEADS, SEQ_LEN, SEED = 2, 32, 4, 16, 5
BATCH, BATCHES = 6, 8  # in an evaluation
SPEC = f"""
name = "tiny"
seed = {SEED}
[model]
layers = {LAYERS}
hidden = {HIDDEN}
heads = {HEADS}
seq_len = {SEQ_LEN}
[data]
source = "text.h5"
[train]
steps = 60
global_batch = {BATCH}
micro_batch = 2
precision = "fp32"
eval_batches = {BATCHES}
eval_every = 40
[optimizer]
lr = 1e-2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus whose first documents are noise, the others one letter."""
    folder, letters = tmp_path_factory.mktemp("validation"), random.Random(1)
    noise = [
        "".join(letters.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(300))
        for _ in range(30)
    ]
    documents = noise + ["e" * 300] * 70
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents)
    )
    built = launch(
        hpczero("data", "build", "-o", "text.h5", "text.jsonl", "--validation-fraction", "0.4"),
        60,
        folder,
    )
    assert built.code == 0, built
    (folder / "spec.toml").write_text(SPEC)
    return folder


def validation_windows(path: Path) -> "torch.Tensor":
    """[windows, SEQ_LEN + 1], all of the split, as docs/data.md says where they lie."""
    with h5py.File(path) as file:
        tokens = file["validation/tokens"][:].astype(np.int64)
    count = (len(tokens) - 1) // SEQ_LEN
    return torch.from_numpy(
        np.stack([tokens[w * SEQ_LEN : (w + 1) * SEQ_LEN + 1] for w in range(count)])
    )


def losses(weights: "dict[str, torch.Tensor]", windows: "torch.Tensor") -> "torch.Tensor":
    """A plain GPT: the loss of each target of each window."""
    functional = torch.nn.functional

    def norm(x: "torch.Tensor", name: str) -> "torch.Tensor":
        return functional.layer_norm(
            x, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"]
        )

    tokens, targets = windows[:, :-1], windows[:, 1:]
    vectors = weights["embedding.lookup.tokens"]
    x = vectors[tokens] + weights["embedding.lookup.positions"][: tokens.shape[1]]
    later = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    for block in (f"blocks.{number}" for number in range(LAYERS)):
        inside, qkv = norm(x, f"{block}.attention.norm"), weights[f"{block}.attention.qkv.weight"]
        mixed = (
            torch.einsum("kih,bsh->kbsi", qkv, inside)
            + weights[f"{block}.attention.qkv.bias"][:, None, None]
        )
        query, key, value = mixed.unflatten(-1, (HEADS, HIDDEN // HEADS)).transpose(2, 3)
        scores = (query @ key.transpose(-1, -2) / (HIDDEN // HEADS) ** 0.5).masked_fill(
            later, -torch.inf
        )
        heads = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = (
            x
            + heads @ weights[f"{block}.attention.output.weight"].T
            + weights[f"{block}.attention.output.bias"]
        )
        inside = (
            norm(x, f"{block}.feed_forward.norm") @ weights[f"{block}.feed_forward.up.weight"].T
        )
        wide = functional.gelu(
            inside + weights[f"{block}.feed_forward.up.bias"], approximate="tanh"
        )
        x = (
            x
            + wide @ weights[f"{block}.feed_forward.down.weight"].T
            + weights[f"{block}.feed_forward.down.bias"]
        )
    shares = torch.log_softmax(norm(x, "head.norm") @ vectors.T, -1)
    return -shares.gather(-1, targets[..., None])[..., 0]


def intervals_with_the_loss(of_split: "torch.Tensor", windows: "torch.Tensor") -> int:
    """Count, of 20 seeds, those whose interval of 95 % has the whole split's loss in it."""
    from hpczero.data.samples import window
    from hpczero.model.batch import MicroBatch
    from hpczero.train.batches import Tally

    covered = 0
    for seed in range(20):
        own = [
            of_split[window(seed, len(windows), sample)].item() * SEQ_LEN
            for sample in range(BATCH * BATCHES)
        ]
        batch = MicroBatch(windows[:, :-1], windows[:, 1:], torch.arange(len(own)), 0, seed)
        found = Tally.of([batch], [own]).validation(len(windows), len(windows) * SEQ_LEN)
        covered += abs(found.loss - of_split.mean().item()) <= 1.96 * (found.standard_error or 0)
    return covered


def assert_reported(run: Path, summary: dict[str, Any], output: str) -> None:
    """Assert that metrics.jsonl holds the summary's figures and that the output shows them once."""
    first, last = (
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if "validation_loss" in line
    )
    assert {name: last[name] for name in last if name.startswith("validation_")} == {
        name: summary[name]
        for name in summary
        if name.startswith("validation_") and name != "validation_step"
    }
    assert first["validation_tokens"] == last["validation_tokens"]
    said = re.findall(
        r" eval step=60 validation_loss=\S+ validation_standard_error=\S+ validation_tokens=768 ",
        output,
    )
    assert len(said) == 1, output
    assert re.search(
        r"validation: \d\.\d{4} ± \d\.\d{4} \(standard error\), over 768 of [\d,]+ tokens", output
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.few(1)
def test_the_loss_is_that_of_the_exported_weights(folder: Path, ranks: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from hpczero.data.samples import window

    for name in ("text.h5", "spec.toml"):
        shutil.copy(folder / name, tmp_path)
    done = launch([*mpirun(ranks), *hpczero("run", "spec.toml")], 120, tmp_path)
    assert done.code == 0, done
    assert (
        launch(hpczero("ckpt", "export", "runs/tiny", "weights.safetensors"), 60, tmp_path).code
        == 0
    )
    windows = validation_windows(tmp_path / "text.h5")
    of_split = losses(
        {name: one.double() for name, one in load_file(tmp_path / "weights.safetensors").items()},
        windows,
    ).mean(1)
    run = tmp_path / "runs" / "tiny"
    summary = json.loads((run / "summary.json").read_text())
    drawn = [window(SEED, len(windows), sample) for sample in range(BATCH * BATCHES)]
    assert len(set(drawn)) == BATCH * BATCHES < len(windows)
    assert summary["validation_loss"] == pytest.approx(of_split[drawn].mean().item(), abs=1e-4)
    assert summary["validation_tokens"] == BATCH * BATCHES * SEQ_LEN
    assert summary["validation_tokens_of_split"] == len(windows) * SEQ_LEN
    assert summary["validation_step"] == 60
    unseen = 1 - len(drawn) / len(windows)
    expected = (unseen * of_split[drawn].var() / len(drawn)).sqrt().item()
    assert summary["validation_standard_error"] == pytest.approx(expected, rel=1e-3)
    assert_reported(run, summary, done.out)

    before = of_split[: BATCH * BATCHES].mean().item()
    assert abs(before - of_split.mean().item()) > 0.3, (
        "the first windows of this split are not like the others"
    )

    covered = intervals_with_the_loss(of_split, windows)
    # pytest -rP shows it
    print(f"the interval of 95 % of {covered} of 20 seeds has the whole split's loss in it")
    assert covered >= 18
    assert of_split.mean().item() < log(257)


def pieces_of_documents(path: Path, kind: str, seq_len: int) -> "list[torch.Tensor]":
    """Return what validation has to predict of each document, or of the part in a window."""
    with h5py.File(path) as file:
        tokens = torch.from_numpy(file["validation/tokens"][:].astype(np.int64))
        ends = file["validation/documents"][:].tolist()
    if kind == "padded":
        cuts = [
            (start, min(start + seq_len + 1, end))
            for begin, end in pairwise(ends)
            for start in range(begin, end - 1, seq_len)
        ]
    else:
        read = (len(tokens) - 1) // seq_len * seq_len
        borders = sorted({*ends, *range(0, read + 1, seq_len)})
        cuts = [
            (begin, end if end in ends else end + 1)
            for begin, end in pairwise(borders)
            if end <= read
        ]
    return [tokens[begin:end] for begin, end in cuts if end - begin > 1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked", "padded"])
def test_documents_count_alone_at_another_length_and_layout(
    folder: Path, kind: str, tmp_path: Path
) -> None:
    """A run goes on with other sequences, on two tensor ranks that share them."""
    from safetensors.torch import load_file

    for name in ("text.h5", "spec.toml"):
        shutil.copy(folder / name, tmp_path)
    larger = ["train.global_batch=48", "train.micro_batch=24"]  # fewer of them in an evaluation
    begins = [word for change in ("train.steps=4", *larger) for word in ("--set", change)]
    begun = launch(hpczero("run", "spec.toml", *begins), 120, tmp_path)
    assert begun.code == 0, begun
    changes = [
        *larger,
        f"data.documents={kind}",
        "data.seq_len=11",
        "train.steps=8",
        "train.eval_batches=9999",
    ]
    changes += ["parallel.tensor=2", "parallel.sequence_parallel=true"]
    options = [word for change in changes for word in ("--set", change)]
    done = launch([*mpirun(2), *hpczero("run", "spec.toml", *options)], 120, tmp_path)
    assert done.code == 0, done
    assert "data.seq_len was 0 and is 11" in done.err + done.out
    exported = launch(hpczero("ckpt", "export", "runs/tiny", "weights.safetensors"), 60, tmp_path)
    assert exported.code == 0, exported
    weights = load_file(tmp_path / "weights.safetensors")
    weights = {name: one.double() for name, one in weights.items()}
    pieces = pieces_of_documents(tmp_path / "text.h5", kind, 11)
    of_pieces = [losses(weights, piece[None]).sum().item() for piece in pieces]
    targets = sum(len(piece) - 1 for piece in pieces)
    summary = json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())
    assert summary["validation_tokens"] == summary["validation_tokens_of_split"] == targets
    assert summary["validation_loss"] == pytest.approx(sum(of_pieces) / targets, abs=1e-4)
    last = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()[-1]
    assert 0 < json.loads(last)["targets"] <= 48 * 11


def test_an_evaluation_of_the_checkpoint_says_the_same(
    folder: Path, everything: bool, tmp_path: Path
) -> None:
    """On ranks that share the model, with --slow alone, too: by plain PyTorch and the text."""
    from safetensors.torch import load_file

    for name in ("text.h5", "spec.toml"):
        shutil.copy(folder / name, tmp_path)
    begun = launch(hpczero("run", "spec.toml", "--set", "train.steps=20"), 120, tmp_path)
    assert begun.code == 0, begun
    exported = launch(hpczero("ckpt", "export", "runs/tiny", "weights.safetensors"), 60, tmp_path)
    assert exported.code == 0, exported
    weights = load_file(tmp_path / "weights.safetensors")
    windows = validation_windows(tmp_path / "text.h5")
    of_targets = losses({name: one.double() for name, one in weights.items()}, windows)
    expected = of_targets.mean().item()
    size = (windows[:, 1:] < 256).sum().item()  # each byte is a token
    alone = hpczero("eval", "runs/tiny", "--json")
    shared = [*mpirun(2), *hpczero("eval", "runs/tiny", "text.h5", "--json", "--tensor", "2")]
    for command in [alone, shared] if everything else [shared]:
        done = launch(command, 120, tmp_path)
        assert done.code == 0, done
        (facts,) = json.loads(done.out)["results"]
        assert facts["loss"] == pytest.approx(expected, rel=1e-5)
        assert facts["bits_per_byte"] == pytest.approx(
            of_targets.sum().item() / log(2) / size, rel=1e-5
        )
        assert (facts["bytes"], facts["tokens"]) == (size, of_targets.numel())
    if everything:
        shorter = launch(hpczero("eval", "runs/tiny", "--seq-len", "99"), 60, tmp_path)
        assert shorter.code == 2, shorter
        assert "--seq-len 99" in shorter.err
        three = launch([*mpirun(2), *hpczero("eval", "runs/tiny", "--tensor", "3")], 60, tmp_path)
        assert three.code == 2, three
        assert "--tensor 3 does not divide the 2 ranks" in three.err
