"""scripts/bench_step.py on a tiny model: every contender trains the same, and one that does not
is found out. No speed is asserted.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.launch import CHECKOUT, Finished, launch, mpirun

SCRIPTS = CHECKOUT / "scripts"
TINY = [
    *("--layers", "2", "--hidden", "32", "--heads", "2", "--vocab", "64", "--seq-len", "16"),
    *("--rounds", "1", "--warmup", "3", "--steps", "2"),
]


def bench(*arguments: str, ranks: int = 2) -> Finished:
    return launch(
        [*mpirun(ranks), sys.executable, str(SCRIPTS / "bench_step.py"), *TINY, *arguments],
        seconds=200,
    )


def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_report", SCRIPTS / "bench_report.py")
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_all_contenders_train_the_same(tmp_path: Path) -> None:
    contenders = ["floor", "ours-0", "ours-3", "ours-2-shared", "ddp-autocast", "ddp-bf16", "fsdp2"]
    files = tmp_path / "step.json", tmp_path / "step.svg"
    done = bench(
        "--contenders", ",".join(contenders[1:]), "--json", str(files[0]), "--plot", str(files[1])
    )
    assert (done.code, done.left) == (0, []), done.err
    assert [
        line.split(" | ")[0].strip("| ") for line in done.out.splitlines() if line.startswith("|")
    ][2:] == contenders
    figures = json.loads(files[0].read_text())["figures"]
    for name, (one,) in figures.items():
        assert len(one["seconds"]) == 2
        assert min(one["seconds"]) > 0
        falls = one["losses"][0] - one["losses"][-1]
        assert abs(falls) < 1e-6 if name == "floor" else falls > 0.01, (name, one["losses"])
    assert len(
        list(ElementTree.parse(files[1]).iter("{http://www.w3.org/2000/svg}rect"))
    ) == 1 + len(contenders)


@pytest.mark.slow
def test_what_is_not_installed_is_skipped_with_the_reason() -> None:
    if importlib.util.find_spec("deepspeed"):
        pytest.skip("DeepSpeed is installed")
    done = bench("--contenders", "ours-1,deepspeed-2", ranks=1)
    assert done.code == 0, done.err
    assert "skipped deepspeed-2: not installed" in done.out


@pytest.mark.slow
def test_an_unknown_contender_is_refused() -> None:
    done = bench("--contenders", "ours-1,horovod", ranks=1)
    assert done.code == 2
    assert "no contender horovod" in done.err


def figures(losses: list[float], seconds: float = 1.0) -> dict[str, Any]:
    return {
        "seconds": [seconds] * 3,
        "cpu_seconds": [1.0],
        "losses": losses,
        "states_bytes": 1,
        "peak_bytes": 2,
    }


def test_one_that_does_not_train_is_found_out() -> None:
    falling, level = [9.0, 8.0, 6.0], [9.0, 9.0, 9.0]
    found = report().rows(
        {
            "floor": [figures(level)],
            "ours-0": [figures(falling)],
            "fine": [figures([9.0, 8.01, 6.02])],
            "lazy": [figures(level)],
        }
    )
    (text,) = report().differing(found)
    assert text.startswith("lazy does not train like ours-0")
    broken = [9.0, float("nan"), 1.0]
    found = report().rows(
        {"floor": [figures(level)], "ours-0": [figures(falling)], "broken": [figures(broken)]}
    )
    assert len(report().differing(found)) == 1


def test_ratios_are_taken_within_a_round() -> None:
    """The machine becomes three times slower in the second round; nobody else does."""
    rounds = {
        name: [figures([1.0], seconds), figures([1.0], 3 * seconds)]
        for name, seconds in (("floor", 1.0), ("ours-0", 1.25), ("fsdp2", 5.0))
    }
    ours = report().rows(rounds)[1]
    assert ours.to_floor == [1.25, 1.25]
    assert ours.fsdp_to_it == [4.0, 4.0]
