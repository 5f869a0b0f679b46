"""Sizes of compressed messages (`signs`, `quantised`), for kernels on any device."""

SIGN_BLOCK = 2048  # elements of one scale
QUANTISED_BLOCK = 256
MOST = {8: 127, 4: 7}  # the largest integer of so many bits
SMALLEST_SCALE = 2.0**-126  # of integers: the smallest normal fp32


def sign_bytes(count: int) -> int:
    """Return the bytes of the signs of so many elements."""
    return -(-count // 8)


def sign_blocks(count: int) -> int:
    """Return the scales of the signs of so many elements."""
    return -(-count // SIGN_BLOCK)


def quantised_bytes(count: int, bits: int) -> int:
    """Return the bytes of the integers of so many elements."""
    return -(-count * bits // 8)


def quantised_blocks(count: int) -> int:
    """Return the scales of the integers of so many elements."""
    return -(-count // QUANTISED_BLOCK)
