"""States that leave a device for the computer's memory, or for files: steps on the CPU.

The device is late: a gradient that is read before it came, or a weight that is used before it
went, is garbage.
"""

import pytest

from hpczero.comm.world import World
from hpczero.parallel.offload import offloaded_adamw
from hpczero.spec.schema import Spec
from tests.support.covering import Case, covering
from tests.support.grids import bitwise, factors, possible, spec_of
from tests.support.training import train

pytestmark = pytest.mark.mpi


def offloaded(spec: Spec, offload: str) -> Spec:
    zero = spec.zero.model_copy(update={"offload": offload})
    return spec.model_copy(update={"zero": zero})


def selection(ranks: int, everything: bool = False) -> list[Case]:
    chosen = factors(ranks) | {
        "piece": [1024, offloaded_adamw.PIECE],
        "files": [False, True],
        "optimizer": ["adamw"],
    }
    return covering(chosen | {"family": ["gpt"], "shared": [False]}, (), possible)


@pytest.mark.cases(of=selection)
@pytest.mark.usual(2)
@pytest.mark.few(2)
def test_steps_on_the_host_are_those_of_the_device(
    there: World, case: Case, shared_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(case)
    kept = train(there, spec)
    monkeypatch.setattr(offloaded_adamw, "PIECE", case["piece"])
    offload = f"nvme:{shared_folder}" if case["files"] else "cpu"
    found = train(there, offloaded(spec, offload))
    assert bitwise(kept, found)
