"""A hash of 64-bit integers, for choices that every rank has to make alike (pure)."""

MASK = 2**64 - 1
# SplitMix64's finalizer (Steele, Lea, Flood 2014)
MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """Map 64 bits to 64 well-mixed bits, one to one."""
    value = value + GOLDEN & MASK
    for shift, factor in MIXERS:
        value = (value ^ value >> shift) * factor & MASK
    return value ^ value >> 31
