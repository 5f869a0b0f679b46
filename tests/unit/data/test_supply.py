"""data.source in the words of `check`, `render` and `submit`, before a job is in the queue."""

import json
from pathlib import Path

import pytest

from hpczero.cli import main
from hpczero.data.supply import IDS, count_tokens
from hpczero.data.tokenizer import tokenizer
from hpczero.errors import InputError
from hpczero.spec.schema import Data, Model, Spec, Train
from tests.support.launch import Finished, hpczero, launch

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
