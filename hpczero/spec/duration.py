"""Durations as a spec writes them, and as schedulers want them (pure)."""

import re

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def seconds(text: str) -> int:
    """Of "1h30m", "12:00:00" or "1-12:00:00" (schema.WALLTIME)."""
    if ":" not in text:
        return sum(int(number) * _SECONDS[unit] for number, unit in re.findall(r"(\d+)([dhms])", text))
    days, _, clock = text.rpartition("-")
    hours, minutes, rest = map(int, clock.split(":"))
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + rest


def clock(duration: int) -> str:
    """hh:mm:ss, hours past 24 included: what both Slurm and PBS read."""
    return f"{duration // 3600:02d}:{duration // 60 % 60:02d}:{duration % 60:02d}"
