"""TensorBoard's event files: records with checksums, each a protobuf message of a step.

A record is the length, a masked CRC-32C of the length, the message, a masked CRC-32C of it
(tensorflow/core/lib/io/record_writer.h). The messages are `Event` and what it contains
(tensorboard/compat/proto/event.proto, summary.proto), of which the few fields here are written:

    Event      wall_time 1, step 2, file_version 3, summary 5, session_log 7
    SessionLog status 1 (START = 1)
    Summary    value 1: tag 1, simple_value 2, tensor 8, metadata 9
    metadata   plugin_data 1: plugin_name 1
    tensor     dtype 1 (string = 7), tensor_shape 2: dim 2: size 1; string_val 8
"""

import struct
from collections.abc import Mapping

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected
_MASK = 0xA282EAD8


def _table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def crc32c(content: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in content:
        value = _TABLE[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


def record(message: bytes) -> bytes:
    """Return a message as a file holds it."""
    length = struct.pack("<Q", len(message))
    return b"".join([length, _masked(length), message, _masked(message)])


def _masked(content: bytes) -> bytes:
    value = crc32c(content)
    rotated = (value >> 15 | value << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + _MASK) & 0xFFFFFFFF)


# -- messages ------------------------------------------------------------------------------------


def first_event(wall_time: float) -> bytes:
    """Return the event that a file begins with."""
    return _double(1, wall_time) + _bytes(3, b"brain.Event:2")


def session_start(wall_time: float, step: int) -> bytes:
    """Return the event at which readers drop all that they have of this step and later ones."""
    return _double(1, wall_time) + _integer(2, step) + _bytes(7, _integer(1, 1))


def scalars(wall_time: float, step: int, values: Mapping[str, float]) -> bytes:
    """Return the event of a step with these scalars."""
    summary = b"".join(
        _bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items()
    )
    return _double(1, wall_time) + _integer(2, step) + _bytes(5, summary)


def text(wall_time: float, step: int, tag: str, words: str) -> bytes:
    """Return the event of a step with a text, which TensorBoard shows as Markdown."""
    plugin = _bytes(1, _bytes(1, b"text"))
    shape = _bytes(2, _bytes(2, _integer(1, 1)))
    tensor = _integer(1, 7) + shape + _bytes(8, words.encode())
    value = _bytes(1, tag.encode()) + _bytes(8, tensor) + _bytes(9, plugin)
    return _double(1, wall_time) + _integer(2, step) + _bytes(5, _bytes(1, value))


def _varint(value: int) -> bytes:
    """Return seven bits a byte, the lowest first."""
    content = bytearray()
    while value > 0x7F:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    content.append(value)
    return bytes(content)


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    """Return a float of 32 bits; numbers beyond them are infinite."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _varint(field << 3 | 5) + packed
