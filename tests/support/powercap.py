"""A folder laid out as Linux' powercap, whose counters a thread advances at known power."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICK = 0.002  # seconds, or more of a clock outside where the machine is busy


@dataclass
class _Zone:
    watts: float
    most: int  # microjoules after which the counter begins anew
    begin: int


class Powercap:
    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self._zones: dict[str, _Zone] = {}
        self._ran = 0.0  # seconds, as the counters have them
        self._ends = threading.Event()

    def zone(self, folder: str, name: str, watts: float, most: int = 262_143_328_850) -> None:
        """Add a domain; its counter begins shortly before it wraps."""
        (self.root / folder).mkdir()
        self._zones[folder] = _Zone(watts, most, most - 1_000_000)
        self.write(folder, "name", name)
        self.write(folder, "max_energy_range_uj", str(most))
        self.write(folder, "energy_uj", str(self.microjoules(folder)))

    def write(self, folder: str, file: str, content: str) -> None:
        (self.root / folder / f"{file}.new").write_text(content + "\n")
        (self.root / folder / f"{file}.new").rename(self.root / folder / file)

    def microjoules(self, folder: str) -> int:
        zone = self._zones[folder]
        return (zone.begin + int(1e6 * zone.watts * self._ran)) % zone.most

    def joules(self, *folders: str) -> float:
        """Return what these have taken so far."""
        return sum(self._zones[folder].watts for folder in folders) * self._ran

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._ends.clear()

        def run() -> None:
            while not self._ends.wait(_TICK):
                self._ran += _TICK
                for folder in self._zones:
                    self.write(folder, "energy_uj", str(self.microjoules(folder)))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            self._ends.set()
            thread.join()
