"""Masked samples: the published shares, whole words, sentences, and choices that are hashes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from hpczero.cli import main
from hpczero.data.dataset import open_source
from hpczero.data.masked_samples import Masked
from hpczero.data.masking import Masking, SpecialIds
from hpczero.data.objective import objective_of
from hpczero.data.tokenizer import tokenizer
from hpczero.errors import InputError
from hpczero.spec.schema import Data, Model, Source, Spec, Train
from hpczero.train.batches import Batches
from tests.support.masked_samples import Texts, samples_of_ranks, texts
from tests.support.token_files import alone, make
from tests.support.word_pieces import trained_word_pieces

IDS = SpecialIds(1000, 1001, 1002)
SEQ = 64
WORDS = np.array([number % 3 > 0 for number in range(1000)])  # a third of the ids begin a word


def model_of(**keys: Any) -> Model:
    return Model(family="bert", vocab=1003, seq_len=SEQ, **keys)


def masked(samples: range, split: str = "train", seed: int = 7, **keys: Any) -> Masked:
    """Return samples of a text that follows from the sample's number."""
    continues = keys.pop("continues", None)
    model = model_of(**keys)
    masking = Masking(model, SEQ, seed, IDS, 1000, continues)
    return masking.samples(Texts(texts(10_000, model.text_len(SEQ))), split, samples)


def restored(found: Masked) -> np.ndarray:
    """Return the tokens before they were masked."""
    tokens = found.tokens.copy()
    used = found.weights > 0
    rows = np.broadcast_to(np.arange(len(tokens))[:, None], found.target_positions.shape)
    tokens[rows[used], found.target_positions[used]] = found.targets[used]
    return tokens


def test_shares_are_those_that_were_published() -> None:
    found = masked(range(4000))
    text = texts(10_000, SEQ - 2)[:4000]
    before = restored(found)
    assert (before[:, 0] == IDS.begin).all()
    assert (before[:, -1] == IDS.separator).all()
    assert np.array_equal(before[:, 1:-1], text)
    count = round(0.15 * (SEQ - 2))
    assert found.target_positions.shape == (4000, count)
    assert (found.weights == 1).all()
    assert (np.diff(found.target_positions) > 0).all()
    after = np.take_along_axis(found.tokens, found.target_positions, 1)
    all_targets = after.size
    as_mask = (after == IDS.mask).sum() / all_targets
    same = (after == found.targets).sum() / all_targets
    four_sigmas = 4 * (0.8 * 0.2 / all_targets) ** 0.5
    assert abs(as_mask - 0.8) < four_sigmas
    assert abs(same - (0.1 + 0.1 / 1000)) < four_sigmas
    drawn = after[(after != IDS.mask) & (after != found.targets)]
    assert drawn.max() < 1000
    assert len(set(drawn.tolist())) > 950  # of some 3,700 draws from 1,000
    # every place as often as another
    at = np.bincount(found.target_positions.flatten(), minlength=SEQ)[1:-1]
    expected = all_targets / (SEQ - 2)
    assert abs(at - expected).max() < 5 * expected**0.5


@pytest.mark.parametrize("sentences", ["none", "next", "order"])
@pytest.mark.parametrize("continues", [None, WORDS], ids=["tokens", "words"])
def test_a_sample_is_the_same_whoever_makes_it(sentences: str, continues: Any) -> None:
    keys = {"sentences": sentences, "continues": continues}
    whole = masked(range(3, 40), **keys)
    parts = [masked(range(*ends), **keys) for ends in ((3, 4), (4, 25), (25, 40))]
    for name in ("tokens", "targets", "target_positions", "weights", "segments", "labels"):
        of_whole = getattr(whole, name)
        if of_whole is None:
            assert sentences == "none"
            continue
        assert np.array_equal(of_whole, np.concatenate([getattr(one, name) for one in parts]))


def test_another_seed_split_or_sample_masks_other_places() -> None:
    first = masked(range(50))
    for other in (masked(range(50), seed=8), masked(range(50), "validation")):
        alike = (first.target_positions == other.target_positions).all(1).sum()
        assert alike == 0
    text = np.zeros((50, SEQ - 2), np.int64)
    one = Masking(model_of(), SEQ, 7, IDS, 1000)
    first, again = (
        one.samples(Texts(text), "train", range(at, at + 50)).target_positions for at in (0, 5000)
    )
    assert not (first == again).all(1).any()


def test_every_token_of_a_word_is_masked_or_none() -> None:
    found = masked(range(500), continues=WORDS)
    before = restored(found)
    used = found.weights > 0
    most = round(0.15 * (SEQ - 2))
    assert used.sum(1).max() == most
    assert used.sum() > 0.95 * used.size  # words that do not fit are left out
    for row, places in zip(before, found.target_positions, strict=True):
        is_masked = np.zeros(SEQ, bool)
        is_masked[places[places > 0]] = True
        for at in range(2, SEQ - 1):
            if WORDS[row[at]]:
                assert is_masked[at] == is_masked[at - 1]


def test_no_special_token_of_the_text_is_masked() -> None:
    text = texts(200, SEQ - 2)
    text[:, 3::5] = IDS.separator
    text[:, 4] = IDS.mask
    text[:, 5] = IDS.begin
    found = Masking(model_of(), SEQ, 7, IDS, 1000).samples(Texts(text), "train", range(200))
    assert not np.isin(found.targets[found.weights > 0], IDS).any()
    left = (SEQ - 2) - len(range(3, SEQ - 2, 5)) - 2
    assert (found.weights.sum(1) == round(0.15 * left)).all()
    assert (found.target_positions[found.weights == 0] == 0).all()
    nothing = np.full((4, SEQ - 2), IDS.separator)
    none = Masking(model_of(), SEQ, 7, IDS, 1000).samples(Texts(nothing), "train", range(4))
    assert none.weights.sum() == 0
    assert (none.tokens[:, 1:] == IDS.separator).all()


def test_the_second_sentence_follows_or_is_of_another_window() -> None:
    found = masked(range(2000), sentences="next")
    assert found.labels is not None
    assert abs(found.labels.mean() - 0.5) < 0.05
    before, text = restored(found), texts(10_000, SEQ - 3)
    ends = {row.tobytes(): number for number, row in enumerate(text[:, -15:])}
    lengths, others = set(), set()
    for sample, (row, segment, label) in enumerate(
        zip(before, found.segments, found.labels, strict=True)
    ):
        marks = np.flatnonzero(row == IDS.separator)
        assert len(marks) == 2
        assert marks[1] == SEQ - 1
        assert np.array_equal(segment, np.arange(SEQ) > marks[0])
        length = marks[0] - 1
        lengths.add(int(length))
        assert np.array_equal(row[1 : marks[0]], text[sample, :length])
        second = ends[row[-16:-1].tobytes()]
        assert (second != sample) == label
        assert np.array_equal(row[marks[0] + 1 : -1], text[second, length:])
        others |= {second} if label else set()
    assert lengths == set(range(61 // 4, 61 - 61 // 4 + 1))
    assert len(others) > 900  # of some 1,000 draws from 10,000
    assert min(others) < 100
    assert max(others) > 9900


def test_the_only_window_is_always_followed_by_its_own_text() -> None:
    masking = Masking(model_of(sentences="next"), SEQ, 7, IDS, 1000)
    found = masking.samples(Texts(texts(1, SEQ - 3)), "train", range(50))
    assert found.labels is not None
    assert not found.labels.any()


def test_a_word_that_is_too_long_is_masked_in_part() -> None:
    continues = np.ones(1000, np.bool_)
    found = masked(range(20), continues=continues)
    assert (found.weights == 1).all()
    assert np.array_equal(found.target_positions[0], np.arange(1, 10))


def test_two_sentences_are_in_order_or_swapped() -> None:
    found = masked(range(2000), sentences="order")
    assert found.labels is not None
    assert abs(found.labels.mean() - 0.5) < 0.05
    before, text = restored(found), texts(10_000, SEQ - 3)
    for sample, (row, label) in enumerate(zip(before, found.labels, strict=True)):
        end = np.flatnonzero(row == IDS.separator)[0]
        first, second = row[1:end], row[end + 1 : -1]
        pair = (second, first) if label else (first, second)
        assert np.array_equal(np.concatenate(pair), text[sample])


# -- the samples of a run, and the ids of special tokens


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"the words of text {number}, and no others\n" * 60)
    return make(folder, folder / "text.h5", fraction=0.3).path


def spec_of(file: Path | str, vocab: int = 260, data: Any = (), **model: Any) -> Spec:
    return Spec(
        model=Model(family="bert", vocab=vocab, seq_len=SEQ, **model),
        data=Data(source=str(file), **dict(data)),
        train=Train(global_batch=11, micro_batch=2, eval_batches=2),
    )


@pytest.mark.parametrize("sentences", ["none", "next", "order"])
def test_every_number_of_ranks_reads_the_same(file: Path, sentences: str) -> None:
    spec = spec_of(file, sentences=sentences, data={"whole_words": True})
    source = open_source(spec, alone)

    for read in (lambda of_rank: of_rank.training(5), lambda of_rank: of_rank.evaluation(1)):
        alone_ = samples_of_ranks(spec, source, 1, read)
        assert len(set(alone_)) == 11
        assert all(samples_of_ranks(spec, source, ranks, read) == alone_ for ranks in (2, 3, 8))


def test_an_evaluation_counts_the_targets_that_there_are(file: Path) -> None:
    spec = spec_of(file)
    batches = Batches(spec, open_source(spec, alone), 0, 1)
    (batch, *_) = batches.evaluation(0)
    assert batch.weight_of_samples() == [round(0.15 * (SEQ - 2))] * len(batch.samples)
    windows = batches.source.windows("validation")
    assert batches.targets_of_split("validation") == windows * round(0.15 * (SEQ - 2))


def test_a_mixture_is_masked_alike_where_its_sources_are_evaluated(
    file: Path, tmp_path: Path
) -> None:
    """Also a source whose tokenizer nobody knows: the run has one choice of special ids."""
    tokens = np.random.default_rng(1).integers(0, 256, 4000).astype(np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    sources = (Source(path=str(file)), Source(path=str(tmp_path / "tokens.npy")))
    spec = spec_of("stdlib")
    data = spec.data.model_copy(update={"sources": sources, "validation_fraction": 0.2})
    spec = spec.model_copy(update={"data": data})
    batches = Batches(spec, open_source(spec, alone), 0, 1)
    for evaluation in batches.evaluations():
        (batch, *_) = evaluation.evaluation(0)
        assert (batch.tokens[:, 0] == 257).all()
        assert (batch.tokens[:, -1] == 258).all()
    alone_ = spec.of_source(sources[1])
    with pytest.raises(InputError, match=r"data\.special_ids"):
        open_source(alone_, alone)


def mixed_spec(paths: Sequence[Path], weights: Sequence[float], **model: Any) -> Spec:
    spec = spec_of("stdlib", **model)
    pairs = zip(paths, weights, strict=True)
    sources = tuple(Source(path=str(path), weight=weight) for path, weight in pairs)
    data = spec.data.model_copy(update={"sources": sources, "validation_fraction": 0.0})
    train = spec.train.model_copy(update={"eval_batches": 0})
    return spec.model_copy(update={"data": data, "train": train})


def test_the_second_sentence_is_of_the_same_source(file: Path, tmp_path: Path) -> None:
    """Else the label could be guessed, and a small source would be read more often."""
    paths = [file]
    for name, first, count in (("few", 0, 500), ("one", 100, 80), ("many", 150, 9000)):
        paths.append(tmp_path / f"{name}.npy")
        tokens = np.random.default_rng(first).integers(first, first + 50, count)
        np.save(paths[-1], tokens.astype(np.uint16))
    spec = mixed_spec(paths[1:] + paths[:1], (1, 1, 1, 1), sentences="next")
    source = open_source(spec, alone)
    objective = objective_of(spec, source)
    assert objective
    found = objective.samples(source, "train", range(400))
    assert found.labels is not None
    assert found.target_positions is not None
    labels_of: dict[int, list[int]] = {0: [], 100: [], 150: []}
    for row, label in zip(restored(found), found.labels.tolist(), strict=True):
        marks = np.flatnonzero(row == 258)
        halves = row[1 : marks[0]], row[marks[0] + 1 : -1]
        for first, labels in labels_of.items():
            begins, goes_on = ((first <= half) & (half < first + 50) for half in halves)
            if begins.all():
                assert goes_on.all()
                labels.append(label)
    assert not any(labels_of[100]), "there is no other window"
    assert all(0.3 < np.mean(labels_of[first]) < 0.7 for first in (0, 150))


def test_samples_of_a_single_source_stay_as_they_were(file: Path) -> None:
    digests = []
    for sentences in ("none", "next", "order"):
        spec = spec_of(file, sentences=sentences)
        source = open_source(spec, alone)
        objective = objective_of(spec, source)
        assert objective
        found = objective.samples(source, "train", range(5, 300))
        arrays = [array for array in vars(found).values() if array is not None]
        digests.append(xxhash.xxh3_64_hexdigest(b"".join(array.tobytes() for array in arrays)))
    assert digests == ["a8b0a680772900b0", "85f8f968084d9e4f", "9f4ea4175b851357"]


def test_special_ids_are_the_tokenizers_or_those_after_it(file: Path, tmp_path: Path) -> None:
    def ids(spec: Spec) -> SpecialIds:
        masking = objective_of(spec, open_source(spec, alone))
        assert isinstance(masking, Masking)
        return masking.ids

    assert ids(spec_of(file)) == SpecialIds(257, 258, 259)
    assert ids(spec_of(file, data={"special_ids": (1, 2, 3)})) == SpecialIds(1, 2, 3)
    assert ids(spec_of("synthetic")) == SpecialIds(257, 258, 259)
    made = tokenizer(str(trained_word_pieces(tmp_path)))
    assert made.end == "[SEP]"
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} words of text\n" * 90)
    paths = [str(tmp_path / name) for name in ("own.h5", "tokenizer.json", "texts")]
    command = ["data", "build", "--validation-fraction", "0.3", "--tokenizer", paths[1]]
    assert main([*command, "-o", paths[0], paths[2]]) == 0
    assert ids(spec_of(paths[0], made.vocabulary)) == SpecialIds(2, 3, 4)
    with pytest.raises(InputError, match=r"model\.vocab = 259 is too small .* 257, 258 and 259"):
        open_source(spec_of(file, 259), alone)


def test_which_ids_go_on_with_a_word(tmp_path: Path) -> None:
    made = tokenizer(str(trained_word_pieces(tmp_path)))
    continues = made.continues()
    assert continues is not None
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert {token for token, number in vocabulary.items() if continues[number]} == {
        token for token in vocabulary if token.startswith("##")
    }
    of_bytes = tokenizer("byte").continues()
    assert of_bytes is not None
    assert bytes(np.flatnonzero(of_bytes[:128]).astype(np.uint8)).decode().isalnum()
    assert of_bytes[128:256].all()
    assert not of_bytes[256]
