"""TensorBoard's event files, as TensorBoard's own reader sees them."""

import math
import struct
from pathlib import Path

import pytest

from hpczero.track import event_file
from hpczero.track.tensorboard_files import TensorBoard
from tests.support.tracked import accumulator, begin, event, facts, line, tensorboard_losses


@pytest.mark.parametrize(
    ("content", "checksum"),
    [  # RFC 3720, B.4, and the check value of the CRC catalogue
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_checksums_are_castagnoli_s(content: bytes, checksum: int) -> None:
    assert event_file.crc32c(content) == checksum


def test_a_record_has_its_length_and_two_checksums() -> None:
    record = event_file.record(b"message")
    assert struct.unpack_from("<Q", record) == (7,)
    assert record[12:-4] == b"message"
    assert len(record) == 8 + 4 + 7 + 4


@pytest.fixture(autouse=True)
def _reader() -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard's reader is not installed")


def test_tensorboard_reads_every_figure_by_its_name(tmp_path: Path) -> None:
    writer = TensorBoard(facts(tmp_path))
    values = {"grad_norm": math.nan, "lr": 1e-3, "tokens": 64, "compute_seconds": 0.5}
    values |= {"validation_loss": 2.0, "validation_losses": {"/my data/web.txt": 2.5}}
    writer.write([begin(1), line(1, 3.5, 1.5e9, **values)])
    writer.write([line(2, math.inf), line(3, 1e300)])
    writer.close()
    read = accumulator(tmp_path)
    assert [(one.step, one.value) for one in read.Scalars("loss")] == [
        *((1, 3.5), (2, math.inf), (3, math.inf)),
    ]
    assert read.Scalars("loss")[0].wall_time == 1.5e9
    assert math.isnan(read.Scalars("grad_norm")[0].value)
    assert read.Scalars("validation/my_data_web.txt")[0].value == 2.5
    assert [one.value for one in read.Scalars("tokens")] == [64, 128, 192]
    assert {"lr", "seconds/compute", "validation/loss"} <= set(read.Tags()["scalars"])


def test_a_resumed_run_has_no_step_twice(tmp_path: Path) -> None:
    for first, last, loss in ((1, 8, 5.0), (6, 9, 4.0), (3, 4, 3.0)):
        writer = TensorBoard(facts(tmp_path))
        steps = range(first, last + 1)
        writer.write([begin(first), *(line(step, loss) for step in steps)])
        writer.close()
    losses = tensorboard_losses(tmp_path)
    assert losses == [(1, 5.0), (2, 5.0), (3, 3.0), (4, 3.0)]


def test_a_loop_that_goes_back_in_the_same_job_has_no_step_twice(tmp_path: Path) -> None:
    writer = TensorBoard(facts(tmp_path))
    writer.write([begin(1), *(line(step, 5.0) for step in range(1, 6))])
    writer.write([begin(3), line(3, 4.0)])
    writer.close()
    assert tensorboard_losses(tmp_path) == [(1, 5.0), (2, 5.0), (3, 4.0)]


def test_events_and_the_spec_are_texts(tmp_path: Path) -> None:
    writer = TensorBoard(facts(tmp_path))
    writer.write([begin(1), event("WARN", 1, what="first"), event("WARN", 1, what="second\x1b[1m")])
    writer.close()
    read = accumulator(tmp_path)
    assert b'name = "tiny"' in read.Tensors("spec")[0].tensor_proto.string_val[0]
    last = read.Tensors("events/WARN")[-1].tensor_proto.string_val[0]
    assert last == b"WARN: first\n\nWARN: second [1m"  # readers that keep one a step have both


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    writer = TensorBoard(facts(tmp_path))
    writer.write([begin(1), line(1, 5.0)])
    for path in (tmp_path / "tensorboard").iterdir():
        path.unlink()
    (tmp_path / "tensorboard").rmdir()
    writer.write([line(2, 4.0)])
    writer.close()
    assert tensorboard_losses(tmp_path) == [(2, 4.0)]
