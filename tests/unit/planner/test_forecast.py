"""A forecast's lines say what a job's memory and files come to."""

import pytest

from hpczero.comm.grid import Grid
from hpczero.model.families import layers, parameter_count
from hpczero.planner.forecast import Forecast, in_lines
from hpczero.planner.needs import Hardware
from hpczero.planner.platform import CPUS
from hpczero.spec.schema import Model, Parallel, Spec, Zero
from hpczero.text import format_memory

MODEL = Model(layers=8, hidden=1024, heads=4, vocab=1000, seq_len=128)


def test_a_step_reads_and_writes_all_states_in_files() -> None:
    """12 bytes a parameter: a third of them on each of three nodes, and twice through its
    storage.
    """
    spec = Spec(model=MODEL, zero=Zero(stage=1, offload="nvme:/scratch"))
    grid = Grid.build(Parallel(), [0, 1, 2])
    memory = Forecast(spec, grid, Hardware(), CPUS).memory(layers(MODEL))
    files, said = memory["files"], " ".join(in_lines(memory))
    whole = 12 * parameter_count(MODEL)
    assert 3 * files["node"] == pytest.approx(whole, rel=1e-3)
    assert files["all"] == pytest.approx(whole, rel=1e-3)
    assert f"zero.offload {format_memory(files['node'])} on a node" in said
    assert f"{format_memory(files['all'])} on all nodes" in said
    assert f"reads and writes all of them, {format_memory(2 * files['node'])} on a node" in said
