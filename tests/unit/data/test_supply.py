"""data.source in the words of `check`, `render` and `submit`, before a job is in the queue."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpczero.cli import main
from hpczero.data.dataset import open_source
from hpczero.data.supply import IDS, count_tokens
from hpczero.data.tokenizer import tokenizer
from hpczero.errors import InputError
from hpczero.spec.schema import Data, Model, Source, Spec, Train
from tests.support.launch import Finished, hpczero, launch
from tests.support.token_files import alone

TRAIN = Train(steps=10, global_batch=4, eval_batches=0)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """9,050 tokens to train on, 950 or so for validation."""
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": "e" * 99}) + "\n" for _ in range(100))
    )
    assert (
        main(
            [
                "data",
                "build",
                "-o",
                str(tmp_path / "text.h5"),
                str(tmp_path / "text.jsonl"),
                "--validation-fraction",
                "0.1",
            ]
        )
        == 0
    )
    return tmp_path / "text.h5"


def spec(source: str | Path, **model: int) -> Spec:
    return Spec(data=Data(source=str(source)), model=Model(**{"seq_len": 16, **model}), train=TRAIN)


def spec_file(source: str | Path, folder: Path) -> Path:
    path = folder / "spec.toml"
    path.write_text(
        f'[model]\nseq_len = 16\n[data]\nsource = "{source}"\n[train]\nsteps = 1000\n'
        f'eval_batches = 1\n[batch]\nsite = "generic/pbs"\n'
    )
    return path


def carried_out(folder: Path, *words: str) -> Finished:
    return launch(hpczero(*words), 60, folder)


def test_tokens_and_epochs_are_counted(corpus: Path) -> None:
    found = count_tokens(spec(corpus))
    assert (found.wanted, found.train + found.validation, found.problem) == (640, 10_000, "")
    assert found.epochs == 640 / found.train
    assert found.in_words() == (
        f"{found.train:,} tokens to train on, {found.validation:,} for validation (byte, 257 "
        f"ids); the job reads 640: {640 / found.train:.3g} epochs"
    )


def test_what_a_run_would_refuse_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "no.h5").write_text("nothing of the kind")
    for wrong, words in (
        (spec(corpus, vocab=100), "model.vocab = 100 is too small"),
        (spec(corpus, seq_len=100_000), "a sequence needs 100001"),
        (spec(tmp_path / "no.h5"), "is not a token file"),
        (spec(tmp_path), r"has no \*\.ds"),
    ):
        with pytest.raises(InputError, match=words):
            count_tokens(wrong)


def test_a_file_that_is_not_here_may_be_where_the_job_runs(tmp_path: Path) -> None:
    missing = spec(tmp_path / "none.h5")
    assert count_tokens(missing).in_words() == f"there is no file {tmp_path}/none.h5 here"
    with pytest.raises(InputError, match="there is no file"):
        count_tokens(missing, must_be_here=True)
    assert (
        "what follows the $ is not set" in count_tokens(spec("/a/$NOWHERE_AT_ALL/b.h5")).in_words()
    )


def test_what_needs_no_file_is_said() -> None:
    assert (
        "a token file that is made on first use"
        in count_tokens(Spec(), must_be_here=True).in_words()
    )
    assert count_tokens(spec("synthetic")).in_words() == "random tokens, no text"
    assert {name: tokenizer(name).vocabulary for name in IDS} == IDS
    with pytest.raises(InputError, match=r"model\.vocab = 256 is too small for the 257 ids"):
        count_tokens(spec("stdlib", vocab=256))


@pytest.mark.parametrize(("family", "needed"), [("bert", 260), ("t5", 359)])
def test_special_tokens_need_room_before_the_run(family: str, needed: int, corpus: Path) -> None:
    """In bytes, of the library or of a token file: as the run says it."""
    for source in ("stdlib", str(corpus)):
        model = Model(family=family, seq_len=142, vocab=needed)
        fits = Spec(model=model, data=Data(source=source), train=Train(eval_batches=0))
        assert count_tokens(fits).problem in ("", count_tokens(spec("stdlib")).problem)
        narrow = fits.model_copy(update={"model": model.model_copy(update={"vocab": needed - 1})})
        with pytest.raises(InputError, match=f"set model.vocab = {needed} or more"):
            count_tokens(narrow)


def mixed(paths: list[Path | str], epochs: float = 0.0, **model: Any) -> Spec:
    sources = tuple(Source(path=str(path), epochs=epochs) for path in paths)
    words = model.pop("whole_words", False)
    data = Data(sources=sources, validation_fraction=0.2, whole_words=words)
    return Spec(data=data, model=Model(**{"seq_len": 142, "vocab": 359, **model}), train=TRAIN)


@pytest.fixture
def array(tmp_path: Path) -> Path:
    np.save(tmp_path / "tokens.npy", np.random.default_rng(1).integers(0, 256, 4000, "<u2"))
    return tmp_path / "tokens.npy"


@pytest.mark.parametrize("model", [{"family": "bert", "whole_words": True}, {"family": "t5"}])
def test_a_mixture_has_its_special_ids_from_the_tokenizer_that_is_known(
    model: dict[str, Any], corpus: Path, array: Path
) -> None:
    spec = mixed([array, corpus], **model)
    open_source(spec, alone)  # as a run does
    found = count_tokens(spec, must_be_here=True)
    assert (found.problem, found.train) == ("", 3200 + found.sources[str(corpus)].train)
    assert not count_tokens(mixed([array, corpus, "synthetic"], **model)).problem
    narrow = spec.model_copy(update={"model": spec.model.model_copy(update={"vocab": 259})})
    with pytest.raises(InputError, match=r"model\.vocab = 259 is too small for the ids"):
        count_tokens(narrow)
    with pytest.raises(InputError, match=r"tokens\.npy is not known|data\.special_ids"):
        count_tokens(mixed([array], **model))


def test_what_cannot_be_mixed_is_refused_before_the_run(
    corpus: Path, array: Path, tmp_path: Path
) -> None:
    copy, own = tmp_path / "copy.h5", tmp_path / "own.h5"
    copy.write_bytes(corpus.read_bytes())
    text, made = str(tmp_path / "text.jsonl"), str(tmp_path / "tokenizer.json")
    assert main(["data", "tokenizer", "train", "-o", made, "--vocabulary", "258", text]) == 0
    assert main(["data", "build", "-o", str(own), "--tokenizer", made, text]) == 0
    wrong: list[tuple[Spec, str]] = [
        (mixed([corpus, copy]), "are the same tokens"),
        (mixed([corpus, array, own]), "tokens of several tokenizers"),
        (mixed([corpus, array], epochs=1e-3), "sequences are none"),
    ]
    for spec, words in wrong:
        with pytest.raises(InputError, match=words):
            count_tokens(spec)
    missing = count_tokens(mixed([corpus, copy, tmp_path / "none.h5"]))
    assert missing.problem == "", "only where all are here"


def test_a_mixture_whose_epochs_end_early_says_so(corpus: Path, array: Path) -> None:
    spec = mixed([corpus, array], epochs=0.5)
    train = TRAIN.model_copy(update={"steps": 1000})
    found = count_tokens(spec.model_copy(update={"train": train}))
    end = sum((there.train - 1) // 142 // 2 for there in found.sources.values())
    assert f"epochs end after {end} samples, and the steps take 4,000: a run ref" in found.problem


@pytest.mark.slow
def test_check_says_it(corpus: Path) -> None:
    path = str(spec_file(corpus, corpus.parent))
    done = carried_out(corpus.parent, "check", path)
    assert (done.code, done.err) == (0, "")
    assert "the job reads 256,000: " in done.out
    told = json.loads(carried_out(corpus.parent, "check", path, "--json").out)["data"]
    assert (told["wanted"], told["problem"]) == (256_000, "")
    assert told["epochs"] == pytest.approx(256_000 / told["train"])
    refused = carried_out(corpus.parent, "check", path, "--set", "model.vocab=100")
    assert (refused.code, refused.out) == (2, "")
    assert "model.vocab = 100 is too small" in refused.err


@pytest.mark.slow
def test_render_and_submit_say_it(corpus: Path) -> None:
    path = str(spec_file(corpus, corpus.parent))
    for verb in (["render", path], ["submit", "--dry-run", path]):
        done = carried_out(corpus.parent, *verb)
        assert done.code == 0, done
        assert "the job reads 256,000: " in done.err
        refused = carried_out(corpus.parent, *verb, "--set", "model.vocab=100")
        assert (refused.code, refused.out) == (2, "")


def test_submit_wants_the_file_here(tmp_path: Path) -> None:
    path = str(spec_file(tmp_path / "none.h5", tmp_path))
    assert carried_out(tmp_path, "render", path).code == 0
    refused = carried_out(tmp_path, "submit", path)
    assert (refused.code, refused.out) == (2, "")
    assert f"there is no file {tmp_path}/none.h5 here" in refused.err
    assert not (tmp_path / "runs").exists()
