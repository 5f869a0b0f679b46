"""Samples of T5: held against a construction by loops, and put together again to their texts."""

from collections import Counter
from collections.abc import Mapping
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpczero.data.dataset import open_source
from hpczero.data.hashes import draws
from hpczero.data.masked_samples import Masked
from hpczero.data.objective import objective_of
from hpczero.data.span_corruption import SpanCorruption, SpanIds
from hpczero.data.special_ids import special_ids
from hpczero.data.token_source import TokenSource
from hpczero.data.tokenizer import ByteTokenizer
from hpczero.errors import InputError
from hpczero.spec.schema import Data, Model, Spec, Train
from hpczero.spec.spans import SpanLengths, lengths_of
from hpczero.train.batches import Batches
from tests.support.masked_samples import Texts, samples_of_ranks, texts
from tests.support.token_files import alone, make

IDS = SpanIds(5000, 5001, 9000)
SEED = 7
LENGTHS = [
    lengths_of(text, fraction, span)
    for text in (2, 3, 7, 64, 568)
    for fraction in (0.01, 0.15, 0.5, 0.99)
    for span in (1.0, 3.0, 10.0)
]


def corrupted(
    lengths: SpanLengths, samples: range, split: str = "train", seed: int = SEED
) -> Masked:
    """Return samples of a text that follows from the sample's number."""
    source = Texts(texts(1000, lengths.text))
    return SpanCorruption(lengths, seed, IDS).samples(source, split, samples)


def parts(total: int, count: int, hashes: list[int]) -> list[int]:
    """Return the lengths of parts that are cut after the tokens with the smallest hashes."""
    by_hash = sorted(range(total - 1), key=lambda place: (hashes[place], place))
    ends = [*sorted(place + 1 for place in by_hash[: count - 1]), total]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_samples_are_those_of_a_construction_by_loops(lengths: SpanLengths) -> None:
    samples = range(990, 1010)
    found = corrupted(lengths, samples)
    assert found.tokens.shape == (20, lengths.sample)
    assert found.targets.shape == (20, lengths.decoder)
    unmasked = lengths.text - lengths.masked
    cuts = [
        draws(SEED, "train", samples, use, count - 1).tolist()
        for use, count in enumerate((unmasked, lengths.masked))
    ]
    all_texts = texts(1000, lengths.text)
    for row, sample in enumerate(samples):
        text = all_texts[sample % 1000].tolist()
        left = parts(unmasked, lengths.spans, cuts[0][row])
        taken = parts(lengths.masked, lengths.spans, cuts[1][row])
        encoder, decoder, at = [], [], 0
        for number in range(lengths.spans):
            for _ in range(left[number]):
                encoder.append(text[at])
                at += 1
            encoder.append(IDS.sentinel - number)
            decoder.append(IDS.sentinel - number)
            for _ in range(taken[number]):
                decoder.append(text[at])
                at += 1
        encoder.append(IDS.end)
        decoder.append(IDS.end)
        assert found.tokens[row].tolist() == [*encoder, IDS.begin, *decoder[:-1]]
        assert found.targets[row].tolist() == decoder


def spans_of(targets: list[int], end: int) -> dict[int, list[int]]:
    """Return sentinel -> the tokens after it; sentinels are all ids above that of the end."""
    spans: dict[int, list[int]] = {}
    for token in targets[:-1]:
        if token > end:
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    return spans


def text_of(encoder: list[int], targets: list[int], end: int) -> list[int]:
    """Return the text of a sample, which begins with an unmasked span and has no empty one."""
    assert encoder[-1] == targets[-1] == end
    spans = spans_of(targets, end)
    assert all(spans.values())
    text: list[int] = []
    was_sentinel = True
    for token in encoder[:-1]:
        is_sentinel = token > end
        assert not (was_sentinel and is_sentinel)
        text += spans.pop(token) if is_sentinel else [token]
        was_sentinel = is_sentinel
    assert was_sentinel
    assert not spans
    return text


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_sample_is_put_together_to_its_text(lengths: SpanLengths) -> None:
    found = corrupted(lengths, range(30))
    all_texts = texts(1000, lengths.text)[:30].tolist()
    for text, tokens, targets in zip(
        all_texts, found.tokens.tolist(), found.targets.tolist(), strict=True
    ):
        encoder, reads = tokens[: lengths.encoder], tokens[lengths.encoder :]
        assert reads == [IDS.begin, *targets[:-1]]
        spans = spans_of(targets, IDS.end)
        assert list(spans) == [IDS.sentinel - number for number in range(lengths.spans)]
        assert sum(map(len, spans.values())) == lengths.masked
        assert text_of(encoder, targets, IDS.end) == text


def test_lengths_are_those_that_were_published() -> None:
    lengths = Model(family="t5").spans(626)
    assert lengths == lengths_of(568, 0.15, 3.0)
    assert (lengths.text, lengths.encoder, lengths.decoder) == (568, 512, 114)


@pytest.mark.parametrize("fraction", [0.15, 0.3])
@pytest.mark.parametrize("span", [1.0, 3.0, 7.5])
def test_every_length_that_a_sample_has_is_had_exactly(fraction: float, span: float) -> None:
    model = Model(family="t5", masked_fraction=fraction, span_length=span)
    exact = [n for n in range(6, 300) if model.spans(n).sample == n]
    assert len(exact) > 100
    for seq_len in exact:
        found = corrupted(model.spans(seq_len), range(2))
        assert found.tokens.shape == (2, seq_len)
        assert found.targets.shape == (2, model.target_count(seq_len))
        assert model.streams(seq_len) == (seq_len - found.targets.shape[1], found.targets.shape[1])


def test_all_divisions_are_equally_likely() -> None:
    lengths, samples = SpanLengths(12, 5, 3), 27_000
    found = corrupted(lengths, range(samples))
    taken = [tuple(map(len, spans_of(row, IDS.end).values())) for row in found.targets.tolist()]
    is_sentinel = found.tokens[:, : lengths.encoder] > IDS.end
    ends = np.nonzero(is_sentinel)[1].reshape(samples, 3) - np.arange(3)
    left = map(tuple, np.diff(ends, axis=1, prepend=0).tolist())
    counts = Counter(zip(left, taken, strict=True))
    kinds = comb(4, 2) * comb(6, 2)  # both divisions together, so one must not follow the other
    assert len(counts) == kinds
    expected = samples / kinds
    squares = sum((count - expected) ** 2 for count in counts.values()) / expected
    assert squares < kinds - 1 + 5 * (2 * (kinds - 1)) ** 0.5  # of chi square


def test_a_sample_is_the_same_whoever_makes_it() -> None:
    lengths = lengths_of(64, 0.15, 3.0)
    whole = corrupted(lengths, range(3, 40))
    pieces = [corrupted(lengths, range(*ends)) for ends in ((3, 4), (4, 25), (25, 25), (25, 40))]
    for name in ("tokens", "targets"):
        joined = np.concatenate([getattr(piece, name) for piece in pieces])
        assert np.array_equal(getattr(whole, name), joined)
        assert joined.dtype == np.int64
    assert [name for name, value in vars(whole).items() if value is not None] == [
        "tokens",
        "targets",
    ]


def test_another_seed_split_or_epoch_masks_other_spans() -> None:
    lengths = lengths_of(64, 0.15, 3.0)
    first = corrupted(lengths, range(100)).targets
    others = (
        corrupted(lengths, range(100), seed=8),
        corrupted(lengths, range(100), "validation"),
        corrupted(lengths, range(1000, 1100)),  # the same texts again
    )
    assert all((first == other.targets).all(1).sum() < 5 for other in others)


# -- the samples of a run, and the ids of special tokens

SEQ = 72


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"the words of text {number}, and no others\n" * 60)
    return make(folder, folder / "text.h5", fraction=0.3).path


def spec_of(file: Path | str, vocab: int = 359, data: Any = (), **model: Any) -> Spec:
    return Spec(
        model=Model(family="t5", vocab=vocab, **({"seq_len": SEQ} | model)),
        data=Data(source=str(file), **dict(data)),
        train=Train(global_batch=11, micro_batch=2, eval_batches=2),
    )


def test_every_number_of_ranks_reads_the_same(file: Path) -> None:
    spec = spec_of(file)
    source = open_source(spec, alone)
    for read in (lambda of_rank: of_rank.training(5), lambda of_rank: of_rank.evaluation(1)):
        alone_ = samples_of_ranks(spec, source, 1, read)
        assert len(set(alone_)) == 11
        assert all(samples_of_ranks(spec, source, ranks, read) == alone_ for ranks in (2, 3, 8))


def test_a_run_reads_pieces_of_its_text(file: Path) -> None:
    spec = spec_of(file)
    lengths = spec.model.spans(SEQ)
    assert lengths.sample == SEQ
    batches = Batches(spec, open_source(spec, alone), 0, 1)
    wanted = []
    for window in batches.source.chosen("train", spec.seed, range(11, 22)):
        row = np.empty(lengths.text + 1, np.int64)
        batches.source.fill("train", window, row)
        wanted.append(row[:-1].tolist())
    found = []
    for batch in batches.training(1):
        for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
            encoder, reads = tokens[: lengths.encoder], tokens[lengths.encoder :]
            assert reads == [257, *targets[:-1]]
            assert targets[0] == 358
            found.append(text_of(encoder, targets, 258))
        assert batch.weight_of_samples() == [lengths.decoder] * len(batch.samples)
    assert found == wanted
    windows = batches.source.windows("validation")
    assert batches.targets_of_split("validation") == windows * lengths.decoder
    shorter = spec_of(file, data={"seq_len": 30})
    (batch, *_) = Batches(shorter, open_source(shorter, alone), 0, 1).training(0)
    assert batch.tokens.shape[1] == 30
    assert batch.targets[0, 0] == 358


class Knowing(ByteTokenizer):
    """A tokenizer with special tokens of its own."""

    def __init__(self, vocabulary: int, ids: Mapping[str, int]) -> None:
        self.vocabulary, self._ids = vocabulary, ids

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)


def sentinels(first: int, count: int) -> dict[str, int]:
    return {f"<extra_id_{number}>": first - number for number in range(count)}


def ids_of(spec: Spec, source: TokenSource) -> SpanIds:
    found = objective_of(spec, source)
    assert isinstance(found, SpanCorruption)
    return found.ids


def test_special_ids_are_the_tokenizers_or_those_after_it(file: Path) -> None:
    source = open_source(spec_of(file), alone)
    assert ids_of(spec_of(file), source) == (257, 258, 358)
    assert ids_of(spec_of(file, data={"special_ids": (3, 2, 300)}), source) == (3, 2, 300)
    long = spec_of(file, 500, seq_len=570, span_length=1.0, masked_fraction=0.5)
    spans = long.model.spans(570).spans
    assert spans > 100
    assert ids_of(long, source) == (257, 258, 258 + spans)
    model = long.model
    assert list(special_ids(model, ByteTokenizer()).values()) == list(range(257, 259 + spans))
    # an own tokenizer knows all of them, or some
    names = {"<pad>": 0, "</s>": 1} | sentinels(32099, 100)
    short = spec_of(file).model
    wanted = {"<pad>": 0, "</s>": 1} | sentinels(32099, short.spans(SEQ).spans)
    assert special_ids(short, Knowing(32100, names)) == wanted
    del names["<pad>"]
    assert special_ids(short, Knowing(32100, names)) == wanted | {"<pad>": 32100}
    # those that published T5's SentencePiece model lacks are where T5 has them
    found = special_ids(short, Knowing(32000, {"<pad>": 0, "</s>": 1}))
    assert found == {"<pad>": 0, "</s>": 1} | sentinels(32099, 100)


def test_special_ids_of_random_tokens_are_the_last_ones() -> None:
    spec = spec_of("synthetic", 300)
    spans = spec.model.spans(SEQ).spans
    assert ids_of(spec, open_source(spec, alone)) == (298 - spans, 299 - spans, 299)


def test_sentinels_that_do_not_go_down_are_refused() -> None:
    model = spec_of("synthetic", 500, seq_len=570, span_length=1.0, masked_fraction=0.5).model
    spans = model.spans(570).spans
    with pytest.raises(InputError) as error:
        special_ids(model, Knowing(32100, sentinels(32099, 100)))
    said = str(error.value)
    assert f"a sample of model.seq_len = 570 has {spans} spans" in said
    assert "go down from <extra_id_0> = 32099: <extra_id_100> would be 31999, and" in said
    assert "the tokenizer has no <extra_id_100>" in said
    rising = {f"<extra_id_{number}>": 100 + number for number in range(200)}
    with pytest.raises(
        InputError, match="would be 99, and the tokenizer has the id 101 for <extra"
    ):
        special_ids(model, Knowing(32100, rising))


def test_ids_that_are_too_large_or_unknown_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        open_source(spec_of(file, 358), alone)
    said = "358 is too small for the ids of <pad>, </s> and <extra_id_0>, 257, 258 and 358: set "
    assert said + "model.vocab = 359 or more" in str(error.value)
    np.save(tmp_path / "tokens.npy", np.arange(4000, dtype=np.uint16) % 256)
    plain = spec_of(tmp_path / "tokens.npy", data={"validation_fraction": 0.2})
    with pytest.raises(InputError, match=r"<pad>, </s> and <extra_id_0> by data\.special_ids"):
        open_source(plain, alone)
    data = {"validation_fraction": 0.2, "special_ids": (256, 257, 300)}
    plain = spec_of(tmp_path / "tokens.npy", data=data)
    assert ids_of(plain, open_source(plain, alone)) == (256, 257, 300)
