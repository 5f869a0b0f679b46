"""Windows of tokens from a token file and from the synthetic source."""

import math
from pathlib import Path

import numpy as np
import pytest

from hpczero.data.dataset import open_source
from hpczero.data.token_file import open_token_file
from hpczero.errors import InputError
from tests.support.token_files import TEXT, alone, spec_of


def test_windows_are_the_text(path: Path) -> None:
    source, file = open_source(spec_of(path), alone), open_token_file(path)
    assert source.vocabulary == 257
    out = np.empty(33, np.int64)
    for split in ("train", "validation"):
        tokens = np.asarray(file.splits[split].tokens)
        assert source.windows(split) == (len(tokens) - 1) // 32
        for window in (0, 1, source.windows(split) - 1):
            source.fill(split, window, out)
            assert np.array_equal(out, tokens[window * 32 : window * 32 + 33])
        with pytest.raises(AssertionError):
            source.fill(split, source.windows(split), out)
        shares = np.bincount(tokens) / len(tokens)
        assert source.unigram_entropy(split) == pytest.approx(
            -sum(share * math.log(share) for share in shares if share)
        )
    assert TEXT.startswith(bytes(file.splits["train"].tokens[:1000].astype(np.uint8)).decode())
    facts = source.describe()
    assert facts["path"] == str(path)
    assert sum(facts["tokens"].values()) == len(TEXT) + sum(facts["documents"].values())
    assert len(facts["fingerprint"]) == 32


def test_tokens_are_mapped_not_read(path: Path) -> None:
    tokens = open_token_file(path).splits["train"].tokens
    assert isinstance(tokens, np.memmap)
    assert not tokens.flags.writeable
    assert tokens.offset % 4096 == 0  # type: ignore[attr-defined]


def test_the_model_must_have_room_for_every_token(path: Path) -> None:
    refusal = (
        r"model\.vocab = 256 is too small: .* holds token 256 .*"
        r"set model\.vocab = 257 or more"
    )
    with pytest.raises(InputError, match=refusal):
        open_source(spec_of(path, vocab=256), alone)
    assert open_source(spec_of(path, vocab=1000), alone).vocabulary == 257


def test_a_split_must_hold_a_window(path: Path) -> None:
    with pytest.raises(InputError, match=r"tokens to train on, a sequence needs 5000001 "):
        open_source(spec_of(path, seq_len=5_000_000), alone)
    tokens = len(open_token_file(path).splits["validation"].tokens)
    refusal = (
        rf"has {tokens} tokens for validation, "
        rf"a sequence needs {tokens + 1} .*eval_batches = 0"
    )
    with pytest.raises(InputError, match=refusal):
        open_source(spec_of(path, seq_len=tokens), alone)
    assert (
        open_source(spec_of(path, seq_len=tokens, eval_batches=0), alone).windows("validation") == 0
    )
    assert open_source(spec_of(path, seq_len=tokens - 1), alone).windows("validation") == 1


def test_synthetic_tokens_are_uniform_and_a_hash_of_seed_and_position() -> None:
    source = open_source(spec_of("synthetic", seq_len=10_000, vocab=50), alone)
    first, second = np.empty(10_001, np.int64), np.empty(10_001, np.int64)
    source.fill("train", 3, first)
    source.fill("train", 4, second)
    assert first[-1] == second[0]  # the same position
    assert abs(np.bincount(first, minlength=50) - 200).max() < 90
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05
    source.fill("train", 3, second)
    assert np.array_equal(first, second)
    assert (first.min(), first.max()) == (0, 49)
    for other, split in (
        (spec_of("synthetic", 10_000, 50, seed=2), "train"),
        (spec_of("synthetic", 10_000, 50), "validation"),
    ):
        open_source(other, alone).fill(split, 3, second)
        assert 100 < (first == second).sum() < 300  # by chance 200
    assert source.unigram_entropy("train") == pytest.approx(math.log(50))
    source.fill("train", source.windows("train") - 1, first)
    assert source.vocabulary == 50


@pytest.mark.parametrize(("vocab", "seed"), [(1, 0), (10**9, 2**63 - 1)])
def test_synthetic_tokens_stay_inside_any_vocabulary(vocab: int, seed: int) -> None:
    source, out = (
        open_source(spec_of("synthetic", 1000, vocab, seed=seed), alone),
        np.empty(1001, np.int64),
    )
    source.fill("validation", 0, out)
    assert 0 <= out.min() <= out.max() < vocab
    assert out.max() > vocab // 2 or vocab == 1
