"""A mixture is read by its weights, equally on any ranks, and goes on where it was."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpczero.data.dataset import open_source
from hpczero.data.mixture import Mixture, MixtureRecord
from hpczero.data.samples import window
from hpczero.errors import InputError
from hpczero.spec.schema import Data, Model, Source, Spec, Train
from hpczero.train.batches import Batches, Validation, mixed
from hpczero.train.mixed_data import (
    DATA,
    MIXTURE,
    WINDOWS,
    as_recorded,
    continued,
    identity_of_data,
)
from tests.support.token_files import alone, make

LETTERS = ("abc", "klm", "xyz", "012")
WEIGHTS = (0.7, 0.2, 0.1)
SEQ = 8
BATCH = 7


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Token files of letters of their own: a sample tells which of them it is from."""
    folder = tmp_path_factory.mktemp("sources")
    found = []
    for number, letters in enumerate(LETTERS):
        draws = np.random.default_rng(number)
        texts = folder / letters
        texts.mkdir()
        for text in range(20):
            words = "".join(draws.choice(list(letters), 600 + 140 * number))
            (texts / f"{text}.txt").write_text(words)
        found.append(make(texts, folder / f"{letters}.h5", fraction=0.3).path)
    return found


def spec_of(
    files: Sequence[Path], weights: Sequence[float] = WEIGHTS, epochs: float = 0.0, **train: int
) -> Spec:
    sources = tuple(
        Source(path=str(path), weight=weight, epochs=epochs)
        for path, weight in zip(files, weights, strict=True)
    )
    return Spec(
        model=Model(seq_len=SEQ, vocab=257),
        data=Data(sources=sources),
        train=Train(**{"global_batch": BATCH, "micro_batch": 2, "eval_batches": 2} | train),
    )


def mixture(spec: Spec) -> Mixture:
    source = open_source(spec, alone)
    assert isinstance(source, Mixture)
    return source


def rows(spec: Spec, source: Mixture, step: int, ranks: int = 1) -> list[bytes]:
    """Return the samples of a step, in their order, read by so many ranks."""
    found = []
    for rank in range(ranks):
        for batch in Batches(spec, source, rank, ranks).training(step):
            found += [bytes(row) for row in batch.tokens.numpy().astype(np.uint8)]
    return found


def source_of(row: bytes) -> int:
    """Return the number of the file that a sample is from."""
    return next(number for number, letters in enumerate(LETTERS) if {*letters.encode()} & {*row})


def test_every_number_of_ranks_reads_the_same_and_counts_are_near_the_shares(
    files: list[Path],
) -> None:
    spec = spec_of(files[:3])
    source = mixture(spec)
    counts = Counter[int]()
    for step in range(1000):
        whole = rows(spec, source, step)
        assert len(whole) == BATCH
        for ranks in (2, 3, 8):
            assert rows(spec, source, step, ranks) == whole
        counts.update(map(source_of, whole))
        for number, weight in enumerate(WEIGHTS):
            assert abs(counts[number] - weight * BATCH * (step + 1)) < 1


def test_each_source_is_read_in_its_own_order(files: list[Path]) -> None:
    """Its samples are those that a run on it alone reads, one after the other."""
    spec = spec_of(files[:3])
    read: list[list[bytes]] = [[], [], []]
    for step in range(60):
        for row in rows(spec, mixture(spec), step):
            read[source_of(row)].append(row)
    for number, path in enumerate(files[:3]):
        single = open_source(spec.of_source(Source(path=str(path))), alone)
        out = np.empty(SEQ + 1, np.int64)
        for sample, row in enumerate(read[number]):
            single.fill("train", window(spec.seed, single.windows("train"), sample), out)
            assert bytes(out[:-1].astype(np.uint8)) == row


@pytest.mark.parametrize("step", [0, 1, 7, 333])
def test_a_run_goes_on_with_the_same_samples(files: list[Path], step: int) -> None:
    spec = spec_of(files[:3])
    begun = mixture(spec)
    there = identity_of_data(begun)
    record, changes = continued(there, identity_of_data(mixture(spec)), step * BATCH, step * BATCH)
    assert not changes
    resumed = as_recorded(mixture(spec), record)
    assert isinstance(resumed, Mixture)
    for later in range(step, step + 30):
        assert rows(spec, resumed, later) == rows(spec, begun, later)


def test_another_source_comes_with_the_next_sample_and_is_told(files: list[Path]) -> None:
    """The counts of the others stay: nothing of them comes twice."""
    before, after = spec_of(files[:3]), spec_of(files, (0.7, 0.1, 0.1, 0.1))
    old, step = mixture(before), 50
    record, changes = continued(
        identity_of_data(old), identity_of_data(mixture(after)), step * BATCH, step * BATCH
    )
    assert changes == [
        f"data.sources: {files[1]} had weight 0.2, and has weight 0.1",
        f"data.sources: {files[3]} is new, with weight 0.1",
    ]
    resumed = as_recorded(mixture(after), record)
    assert isinstance(resumed, Mixture)
    counts = Counter(source_of(row) for past in range(step) for row in rows(before, old, past))
    now = Counter(
        source_of(row) for later in range(step, step + 100) for row in rows(after, resumed, later)
    )
    for number, weight in enumerate((0.7, 0.1, 0.1, 0.1)):
        assert abs(now[number] - weight * 100 * BATCH) <= 1
    found = MixtureRecord.from_text(record[MIXTURE])
    assert found.first == step * BATCH
    assert list(found.counts.values()) == [counts[number] for number in range(3)]
    again, changes = continued(record, identity_of_data(mixture(after)), 80 * BATCH, 80 * BATCH)
    assert (again, changes) == (record, [])
    gone, changes = continued(record, identity_of_data(mixture(before)), 80 * BATCH, 80 * BATCH)
    assert changes[-1] == f"data.sources: {files[3]} is not read any more"
    kept = MixtureRecord.from_text(gone[MIXTURE]).counts
    assert sum(kept.values()) == 80 * BATCH


def test_samples_that_were_read_are_counted_by_source(files: list[Path]) -> None:
    spec = spec_of(files[:3], epochs=1.5)
    source = mixture(spec)
    counts = Counter[int]()
    for step in range(40):
        found = source.samples_of_sources(step * BATCH)
        assert found == {str(path): counts[number] for number, path in enumerate(files[:3])}
        counts.update(map(source_of, rows(spec, source, step)))
    end = int(source.end)
    most = [int(1.5 * part.source.windows("train")) for part in source.parts()]
    assert list(source.samples_of_sources(end).values()) == most
    assert not source.parts()[0].source.samples_of_sources(end)


def test_a_run_on_one_source_goes_on_with_several(files: list[Path]) -> None:
    spec = spec_of(files[:3])
    single = open_source(spec.of_source(spec.data.sources[0]), alone)
    here = identity_of_data(mixture(spec))
    record, changes = continued(identity_of_data(single), here, 40, 40)
    assert len(changes) == 2 + 1  # two are new, and the first has another share
    resumed = as_recorded(mixture(spec), record)
    windows = single.windows("train")
    assert resumed.chosen("train", spec.seed, range(40, 41)) == [window(spec.seed, windows, 40)]
    assert continued({DATA: "other"}, here, 40, 40)[1][0].endswith("is not read any more")


def test_other_batches_go_on_where_the_sources_were(files: list[Path]) -> None:
    """Weights have changed once, and then the batch becomes smaller: nothing comes twice."""
    before, after = spec_of(files[:2], (0.5, 0.5)), spec_of(files[:2], (0.75, 0.25))
    first, _ = continued(
        identity_of_data(mixture(before)), identity_of_data(mixture(after)), 80, 80
    )
    found, changes = continued(first, identity_of_data(mixture(after)), 160, 40)
    assert not changes
    record = MixtureRecord.from_text(found[MIXTURE])
    assert record.first == 40
    assert list(record.counts.values()) == [40 + 60, 40 + 20]
    with pytest.raises(ValueError, match="from sample 80 on, and 79 have been read"):
        continued(first, identity_of_data(mixture(before)), 79, 79)


@pytest.mark.parametrize("times", [0.5, 2])
def test_epochs_are_as_long_in_other_sequences(files: list[Path], times: float) -> None:
    """Half an epoch that has been read is half an epoch of sequences of another length."""
    spec = spec_of(files[:2], (0.5, 0.5), epochs=1.0)
    old = mixture(spec)
    windows = [part.source.windows("train") for part in old.parts()]
    seen = windows[0]  # half of the first, as the second is no shorter
    length = int(SEQ * times)
    other = spec.model_copy(update={"model": spec.model.model_copy(update={"seq_len": length})})
    new = mixture(other)
    found, changes = continued(identity_of_data(old), identity_of_data(new), seen, seen)
    assert not changes
    record = MixtureRecord.from_text(found[MIXTURE])
    for part, count, before in zip(new.parts(), record.counts.values(), windows, strict=True):
        share = seen / 2 / before
        assert count / part.source.windows("train") == pytest.approx(share, abs=0.02)
    resumed = as_recorded(new, found)
    assert isinstance(resumed, Mixture)
    left = sum(part.source.windows("train") for part in new.parts()) - sum(record.counts.values())
    assert resumed.end == seen + left


@pytest.mark.parametrize("times", [0.5, 2])
def test_a_single_source_goes_on_where_it_was_in_other_sequences(
    files: list[Path], times: float
) -> None:
    spec = spec_of(files[:2], (0.5, 0.5))
    single = open_source(spec.of_source(spec.data.sources[0]), alone)
    there = identity_of_data(single)
    model = spec.model.model_copy(update={"seq_len": int(SEQ * times)})
    new = mixture(spec.model_copy(update={"model": model}))
    seen = 3 * single.windows("train") // 4
    found, _ = continued(there, identity_of_data(new), seen, seen)
    [count] = MixtureRecord.from_text(found[MIXTURE]).counts.values()
    assert count / new.parts()[0].source.windows("train") == pytest.approx(0.75, abs=0.02)
    # a checkpoint of an older version does not say how many there were
    older, _ = continued({DATA: there[DATA]}, identity_of_data(new), seen, seen)
    assert list(MixtureRecord.from_text(older[MIXTURE]).counts.values()) == [seen]
    with pytest.raises(ValueError, match="invalid literal"):
        continued({**there, WINDOWS: "many"}, identity_of_data(new), seen, seen)


def test_a_source_that_was_gone_while_sequences_changed_goes_on_where_it_was(
    files: list[Path],
) -> None:
    both, one = spec_of(files[:2], (0.5, 0.5)), spec_of(files[:1], (1.0,))
    shorter = {"model": both.model.model_copy(update={"seq_len": SEQ // 2})}
    seen = mixture(both).parts()[1].source.windows("train")  # half an epoch of it
    gone, _ = continued(identity_of_data(mixture(both)), identity_of_data(mixture(one)), seen, seen)
    again, changes = continued(gone, identity_of_data(mixture(one)), seen + BATCH, seen + BATCH)
    assert (again, changes) == (gone, [])
    short_one = mixture(one.model_copy(update=shorter))
    other, _ = continued(gone, identity_of_data(short_one), seen, seen)
    back = mixture(both.model_copy(update=shorter))
    found, changes = continued(other, identity_of_data(back), seen, seen)
    assert changes[-1] == f"data.sources: {files[1]} is new, with weight 0.5"
    counts = list(MixtureRecord.from_text(found[MIXTURE]).counts.values())
    assert counts == pytest.approx([seen, seen], abs=3)  # twice as many windows of half the length
    assert counts[1] / back.parts()[1].source.windows("train") == pytest.approx(0.5, abs=0.02)


def test_shorter_sequences_keep_the_shares(files: list[Path]) -> None:
    spec = spec_of(files[:3])
    shorter = mixture(spec).of_length(SEQ // 2)
    row = np.empty(SEQ // 2 + 1, np.int64)
    found = Counter[int]()
    for chosen in shorter.chosen("train", spec.seed, range(1000)):
        shorter.fill("train", chosen, row)
        found[source_of(bytes(row.astype(np.uint8)))] += 1
    assert [found[number] for number in range(3)] == [700, 200, 100]


def test_a_source_is_read_as_often_as_it_may_be(files: list[Path]) -> None:
    spec = spec_of(files[:3], epochs=1.5)
    source = mixture(spec)
    most = [int(1.5 * part.source.windows("train")) for part in source.parts()]
    found = Counter(
        np.searchsorted(
            np.cumsum([part.source.windows("train") for part in source.parts()]),
            source.chosen("train", spec.seed, range(sum(most))),
            side="right",
        ).tolist()
    )
    assert [found[number] for number in range(3)] == most
    with pytest.raises(InputError, match=f"epochs allow after {sum(most)} samples"):
        source.chosen("train", spec.seed, range(sum(most), sum(most) + 1))


def test_evaluations_are_of_each_source_and_add_up_by_shares(files: list[Path]) -> None:
    spec = spec_of(files[:3])
    source = mixture(spec)
    batches = Batches(spec, source, 0, 1)
    for number, evaluation in enumerate(batches.evaluations()):
        single = Batches(spec, open_source(spec.of_source(spec.data.sources[number]), alone), 0, 1)
        assert evaluation.evaluation_batches() == single.evaluation_batches() == 2
        for mine, alone_read in zip(evaluation.evaluation(1), single.evaluation(1), strict=True):
            assert mine.tokens.equal(alone_read.tokens)
    found = [Validation(2.0, 0.1, 10, 100), Validation(4.0, 0.2, 20, 200), Validation(1, 0, 5, 5)]
    result = mixed(list(zip(source.parts(), found, strict=True)))
    assert result.loss == pytest.approx(0.7 * 2 + 0.2 * 4 + 0.1)
    assert result.standard_error == pytest.approx(np.hypot(0.7 * 0.1, 0.2 * 0.2))
    assert (result.tokens, result.of_tokens) == (35, 305)
    assert result.facts()["validation_losses"] == {
        str(path): loss for path, loss in zip(files[:3], (2.0, 4.0, 1.0), strict=True)
    }
    unknown = replace(found[0], standard_error=None)
    assert (
        mixed([(source.parts()[0], unknown), (source.parts()[1], found[1])]).standard_error is None
    )


def test_what_cannot_be_mixed_is_refused(files: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy.h5"
    copy.write_bytes(files[0].read_bytes())
    with pytest.raises(InputError, match="are the same tokens"):
        mixture(spec_of([files[0], copy], (1, 1)))
    with pytest.raises(InputError, match="sequences are none"):
        mixture(spec_of(files[:2], (1, 1), epochs=1e-9))


RECORD = {
    "names": {"a": "a"},
    "weights": {"a": 1.0},
    "most": {"a": 0},
    "windows": {"a": 9},
    "first": 0,
    "counts": {},
}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}"]
    + [
        json.dumps(RECORD | change)
        for change in (
            {"names": {}, "weights": {}, "most": {}, "windows": {}},
            {"windows": {"b": 9}},
            {"weights": {"a": 0}},
            {"weights": {"a": True}},
            {"most": {"a": -1}},
            {"most": {"b": 0}},
            {"first": 1.5},
            {"counts": {"a": 2**62}},
        )
    ],
)
def test_a_record_that_is_none_is_refused(text: str) -> None:
    here = {MIXTURE: json.dumps(RECORD)}
    assert continued(here, here, 0, 0) == (here, [])
    with pytest.raises(ValueError):  # noqa: PT011 (JSON's own, too)
        continued({MIXTURE: text}, here, 0, 0)
