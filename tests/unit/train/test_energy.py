"""Energy from counters of known power: a folder laid out as powercap's, and a library as NVML."""

import json
import time
from ctypes import c_void_p
from pathlib import Path
from typing import Any

import pytest

from hpczero.runs import energy
from hpczero.train.energy_counters import Gpu, NotMeasured, Rapl
from tests.support.powercap import Powercap

UUID = "0f9f2a3c-1111-2222-3333-444455556666"


@pytest.fixture
def powercap(tmp_path: Path) -> Powercap:
    made = Powercap(tmp_path / "powercap")
    made.zone("intel-rapl:0", "package-0", watts=100.0, most=60_000_000)
    made.zone("intel-rapl:0:0", "core", watts=30.0)
    made.zone("intel-rapl:0:1", "dram", watts=20.0)
    made.zone("intel-rapl:1", "package-1", watts=80.0)
    made.zone("intel-rapl:2", "psys", watts=300.0)
    made.zone("intel-rapl-mmio:0", "package-0", watts=100.0)
    return made


def test_packages_and_memory_are_counted_through_wraps(powercap: Powercap) -> None:
    """The first package's counter wraps again and again, and nobody asks meanwhile.

    What is a part of a package, or the whole board, is not counted.
    """
    counted = "intel-rapl:0", "intel-rapl:0:1", "intel-rapl:1"
    with powercap.running():
        rapl = Rapl(powercap.root)
        begun = powercap.joules(*counted)
        while powercap.joules("intel-rapl:0") < 4 * 60:
            time.sleep(0.01)
        taken = rapl.joules()
        truth = powercap.joules(*counted) - begun
        rapl.close()
    assert taken == pytest.approx(truth, rel=0.01)


def test_a_reading_that_fails_counts_at_the_next_one(powercap: Powercap) -> None:
    rapl = Rapl(powercap.root)
    powercap.write("intel-rapl:1", "energy_uj", "")
    assert rapl.joules() == 0
    powercap.write(
        "intel-rapl:1", "energy_uj", str(powercap.microjoules("intel-rapl:1") + 7_000_000)
    )
    assert rapl.joules() == pytest.approx(7)
    rapl.close()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("energy_uj", None, "root alone"),
        ("energy_uj", "x", "cannot be read"),
        ("max_energy_range_uj", "0", "no RAPL domains"),
    ],
)
def test_what_cannot_be_read_says_why(
    powercap: Powercap, monkeypatch: pytest.MonkeyPatch, name: str, content: str | None, words: str
) -> None:
    path = powercap.root / "intel-rapl:1" / name
    if content is None:
        read = Path.read_text

        def refused(self: Path, *given: Any, **named: Any) -> str:  # root may read every file
            if self == path:
                raise PermissionError(13, "Permission denied", str(self))
            return read(self, *given, **named)

        monkeypatch.setattr(Path, "read_text", refused)
    else:
        path.write_text(content)
    with pytest.raises(NotMeasured, match=words):
        Rapl(powercap.root)


def test_a_computer_without_counters(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="no powercap"):
        Rapl(tmp_path / "none")
    with pytest.raises(NotMeasured, match="no RAPL domains"):
        Rapl(tmp_path)


class Nvml:
    """Functions as NVML's, with one GPU."""

    millijoules = 5_000_000
    code = 0

    def nvmlInit_v2(self) -> int:
        return self.code

    def nvmlDeviceGetHandleByUUID(self, name: Any, device: Any) -> int:
        device._obj.value = 77
        return 0 if name.value == f"GPU-{UUID}".encode() else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, device: c_void_p, output: Any) -> int:
        output._obj.value = self.millijoules
        return 0 if device.value == 77 else 2


def test_a_gpu_by_its_uuid() -> None:
    nvml = Nvml()
    gpu = Gpu(UUID, nvml)
    nvml.millijoules += 12_345
    assert gpu.joules() == pytest.approx(12.345)


@pytest.mark.parametrize("identity", ["", "0", UUID[:-1] + "7", "MIG-" + UUID])
def test_a_gpu_that_nvml_does_not_know(identity: str) -> None:
    with pytest.raises(NotMeasured):
        Gpu(identity, Nvml())


def test_nvml_that_does_not_work() -> None:
    nvml = Nvml()
    nvml.code = 9
    with pytest.raises(NotMeasured, match=r"nvmlInit_v2 .*error 9"):
        Gpu(UUID, nvml)
    with pytest.raises(NotMeasured, match="cannot be used"):
        Gpu(UUID, object())


# -- what a run has left of it


def line(began: str, **figures: Any) -> dict[str, Any]:
    facts = {"nodes_read": 2, "nodes": 2, "gpus_read": 1, "gpus_used": 1, "why": ""}
    return {"began": began, "seconds": 10.0, **facts, **figures}


def write(run: Path, *lines: dict[str, Any]) -> Path:
    run.mkdir()
    (run / energy.FILE).write_text("".join(json.dumps(one) + "\n" for one in lines) + '{"beg')
    return run


def test_the_last_line_of_each_job_counts(tmp_path: Path) -> None:
    lines = [line("a", processors=5.0, gpus=1.0), line("a", processors=300.0, gpus=20.0)]
    lines.append(line("b", processors=80.0, gpus=0.0))
    found = energy.read(write(tmp_path / "r", *lines), 2000)
    assert (found.joules, found.processors, found.gpus) == (400, 380, 20)
    assert (found.seconds, found.missing) == (20, "")
    assert found.words == "400 J (0.000111 kWh), 200 J per 1,000 tokens"
    assert found.as_data()["joules_per_1000_tokens"] == 200


def test_what_lacks_is_named(tmp_path: Path) -> None:
    partly = line("a", processors=9.0, gpus=0.0, nodes_read=1, gpus_read=0, why="no\x1b NVML")
    found = energy.read(write(tmp_path / "r", partly))
    assert found.words == (
        "9 J (2.5e-06 kWh); not measured: the processors of 1 node and 1 GPU (no\\x1b NVML)"
    )
    nothing = line("a", nodes_read=0, gpus_used=0, gpus_read=0, why="no powercap")
    found = energy.read(write(tmp_path / "s", nothing))
    assert found.words == "not measured: the processors of 2 nodes (no powercap)"
    assert energy.read(tmp_path / "none").joules is None


@pytest.mark.parametrize("value", [-1, 1e999, "x", None, [1], 10**400])
def test_figures_that_cannot_be_are_none(tmp_path: Path, value: Any) -> None:
    lines = line("a", processors=value, gpus=value), line("b", processors=5, gpus=value)
    found = energy.read(write(tmp_path / "r", *lines, {"began": [value], "nodes_read": value}))
    assert found.joules == 5
