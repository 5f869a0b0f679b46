"""Windows of a token file with its documents masked or padded, against the file's own index."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from hpczero.data import documents
from hpczero.data.dataset import FileSource, open_source
from hpczero.data.token_file import TokenFile
from hpczero.errors import InputError
from hpczero.model.batch import MicroBatch
from hpczero.spec.schema import Data
from hpczero.train.batches import Batches, with_documents
from tests.support.token_files import alone, make, spec_of


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """Return a file of documents of 0, 1, 2, ... bytes, and a long one."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (folder / f"{number:02}.txt").write_bytes(
            bytes(range(60, 60 + number)) * (1 + number // 30)
        )
    return make(folder, folder.with_suffix(".h5"), fraction=0.3)


def windows_of(
    source: FileSource, split: str, seq_len: int
) -> list[tuple[np.ndarray, documents.Cut | None]]:
    windows = []
    for number in range(source.windows(split)):
        out = np.empty(seq_len + 1, np.int64)
        cut = source.fill(split, number, out)
        windows.append((out, cut))
    return windows


@pytest.mark.parametrize("seq_len", [1, 2, 7, 32, 1000])
@pytest.mark.parametrize("together", [2, 4096])
def test_padded_windows_hold_every_target_of_every_document_once(
    file: TokenFile, seq_len: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_TOGETHER", together)
    source = FileSource(file, seq_len, "padded")
    for split in ("train", "validation"):
        tokens, ends = (np.asarray(file.splits[split].tokens), file.splits[split].ends)
        expected = []
        for first, stop in pairwise(ends):
            for start in range(first, stop - 1, seq_len):
                expected.append(tokens[start : min(start + seq_len + 1, stop)].tolist())
        found = windows_of(source, split, seq_len)
        pieces = []
        for out, cut in found:
            assert cut is not None
            targets = seq_len - len(cut.silent)
            assert list(cut.silent) == list(range(targets, seq_len))
            assert list(cut.begins) == list(cut.silent[:1])
            assert (out[targets + 1 :] == file.end_of_document).all()
            pieces.append(out[: targets + 1].tolist())
        assert pieces == expected
        assert source.targets(split) == sum(len(piece) - 1 for piece in expected)


@pytest.mark.parametrize("seq_len", [1, 7, 32])
def test_masked_windows_are_the_packed_ones_cut_at_the_ends_of_documents(
    file: TokenFile, seq_len: int
) -> None:
    packed, masked = (FileSource(file, seq_len, kind) for kind in ("packed", "masked"))
    for split in ("train", "validation"):
        ends = file.splits[split].ends[1:].tolist()
        silent = 0
        for number, (out, cut) in enumerate(windows_of(masked, split, seq_len)):
            same = np.empty_like(out)
            assert packed.fill(split, number, same) is None
            assert np.array_equal(out, same)
            assert cut is not None
            start = number * seq_len
            begins = [end - start for end in ends if start < end < start + seq_len]
            lasts = [end - 1 - start for end in ends if start < end <= start + seq_len]
            assert (list(cut.begins), list(cut.silent)) == (begins, lasts)
            silent += len(lasts)
        assert masked.targets(split) == packed.targets(split) - silent


def test_a_micro_batch_restarts_positions_and_weighs_targets() -> None:
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    batch = MicroBatch(tokens, tokens, torch.arange(2), 0, 1)
    found = with_documents(batch, [documents.Cut([2, 3], [1, 2]), None])
    assert found.positions is not None
    assert found.weights is not None
    assert found.positions.tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]
    assert found.weights.tolist() == [[1, 0, 0, 1, 1], [1, 1, 1, 1, 1]]
    assert found.documents == ((2, 3, 5), (5,))
    assert found.weight_of_samples() == [3, 5]
    assert batch.loss_weight == 10


def test_a_run_reads_every_padded_window_once_in_an_epoch(file: TokenFile) -> None:
    spec = spec_of(file.path, seq_len=8)
    spec = spec.model_copy(update={"data": Data(source=str(file.path), documents="padded")})
    source = open_source(spec, alone)
    windows = source.windows("train")
    steps = -(-windows // spec.train.global_batch)
    seen = Counter[str]()
    for step in range(steps):
        for batch in Batches(spec, source, 0, 1).training(step):
            seen.update(str(row) for row in batch.tokens.tolist())
    assert sum(seen.values()) == steps * spec.train.global_batch
    assert set(seen) == {str(out[:-1].tolist()) for out, _ in windows_of(source, "train", 8)}


def test_documents_of_one_token_are_nothing_to_train_on(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").touch()
    (tmp_path / "20.txt").write_bytes(b"x" * 50)
    empty = make(tmp_path, tmp_path.with_suffix(".h5"), fraction=0.0)
    data = Data(source=str(empty.path), documents="padded")
    spec = spec_of(empty.path, eval_batches=1).model_copy(update={"data": data})
    with pytest.raises(InputError, match="0 tokens for validation, a sequence needs a document"):
        open_source(spec, alone)


def test_an_index_that_does_not_grow_is_refused(file: TokenFile, tmp_path: Path) -> None:
    split = file.splits["train"]
    assert isinstance(split.ends, np.memmap)
    damaged = tmp_path / "damaged.h5"
    content = bytearray(file.path.read_bytes())
    third = split.ends.offset + 8 * 3
    content[third : third + 8] = (10**6).to_bytes(8, "little")
    damaged.write_bytes(content)
    data = Data(source=str(damaged), documents="padded")
    with pytest.raises(InputError, match="the ends of its train documents do not grow"):
        open_source(spec_of(damaged).model_copy(update={"data": data}), alone)
