"""Counters of energy: RAPL's of a computer's processors and memory, and NVML's of GPUs.

RAPL (Linux' powercap) counts microjoules of each processor package, its cores included, and of its
memory where that is a domain of its own. The counters wrap around, some within minutes. Since Linux
5.10 root alone may read them, unless the administrators allow it. NVML, a library of NVIDIA's
driver, counts a GPU's millijoules since the driver was loaded (Volta and newer).
"""

import ctypes
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_DOMAIN = re.compile(r"intel-rapl:\d+(:\d+)?")  # AMD's processors have this name, too
_MOST_WATTS = 1000.0  # of a domain
_LONGEST = 10.0  # seconds between two readings
_SHORTEST = 0.05
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class NotMeasured(Exception):
    """There is no counter, or it may not be read; says why."""


class _Domain:
    def __init__(self, folder: Path) -> None:
        self._counter = folder / "energy_uj"
        self.range = int((folder / "max_energy_range_uj").read_text())
        self._last = self._now()
        self.joules = 0.0  # since then

    def _now(self) -> int:
        return int(self._counter.read_text())

    def read(self) -> None:
        now = self._now()
        spent = now - self._last
        self.joules += 1e-6 * (spent + self.range if spent < 0 else spent)
        self._last = now


class Rapl:
    """The energy of this computer from now on; a thread reads as often as counters may wrap."""

    def __init__(self, root: Path) -> None:
        """`root`: Linux' /sys/class/powercap. Raise NotMeasured where a domain cannot be read."""
        self._domains = _domains(root)
        self._lock = threading.Lock()
        self._ends = threading.Event()
        lasts = min(domain.range for domain in self._domains) * 1e-6 / _MOST_WATTS
        self._every = min(max(lasts / 2, _SHORTEST), _LONGEST)
        self._thread = threading.Thread(target=self._follow, name="energy", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._ends.wait(self._every):
            self.joules()

    def joules(self) -> float:
        """Return those since the start; what cannot be read now counts at the next reading."""
        with self._lock:
            for domain in self._domains:
                try:
                    domain.read()
                except (OSError, ValueError):
                    continue
            return sum(domain.joules for domain in self._domains)

    def close(self) -> None:
        self._ends.set()
        self._thread.join()


def _domains(root: Path) -> Sequence[_Domain]:
    """Return packages and memories; what is a part of a package, or the whole board, is none."""
    try:
        folders = sorted(one for one in root.iterdir() if _DOMAIN.fullmatch(one.name))
        named = [(folder, (folder / "name").read_text().strip()) for folder in folders]
        counted = [one for one, name in named if name == "dram" or name.startswith("package")]
        found = [_Domain(folder) for folder in counted]
    except FileNotFoundError:
        raise NotMeasured("there is no powercap (RAPL) on this computer") from None
    except PermissionError as error:
        raise NotMeasured(f"{error.filename} may be read by root alone") from None
    except (OSError, ValueError) as error:
        raise NotMeasured(f"RAPL cannot be read: {error}") from None
    if not found or min(domain.range for domain in found) <= 0:
        raise NotMeasured(f"{root} has no RAPL domains of processors")
    return found


class Gpu:
    """The energy of one GPU from now on."""

    def __init__(self, identity: str, library: Any = None) -> None:
        """`identity`: its UUID. Raise NotMeasured where NVML does not count for it."""
        if not _UUID.fullmatch(identity):
            raise NotMeasured("PyTorch does not tell the UUID of this GPU")
        try:
            self._nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
            self._call("nvmlInit_v2")
            self._device = ctypes.c_void_p()
            name = ctypes.c_char_p(f"GPU-{identity}".encode())
            self._call("nvmlDeviceGetHandleByUUID", name, ctypes.byref(self._device))
            self._begin = self._now()
        except (OSError, AttributeError) as error:
            raise NotMeasured(f"NVML cannot be used: {error}") from None

    def _call(self, function: str, *arguments: Any) -> None:
        if code := getattr(self._nvml, function)(*arguments):
            raise NotMeasured(f"{function} of NVML failed (error {code})")

    def _now(self) -> float:
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(millijoules))
        return 1e-3 * millijoules.value

    def joules(self) -> float:
        """Return those since the start."""
        return self._now() - self._begin
