"""The quick time of a step is that of all actions of all stages, whatever was timed before."""

import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest

from hpczero.model.families import layers
from hpczero.planner.allocation import Allocation
from hpczero.planner.cluster import find
from hpczero.planner.layout_space import Space
from hpczero.planner.search import Machine
from hpczero.planner.step_time import StepTimes, predict
from hpczero.spec.schema import Spec
from tests.support.exact_time import exact_seconds
from tests.support.fitting import changed
from tests.support.plans import on_nodes, space

GPUS = ("dgx-h100", "juwels-booster", "lumi-mi250x")


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_random_jobs_take_the_time_of_all_their_actions(count: int) -> None:
    choice = random.Random(1)
    for _ in range(count):
        spec, nodes, platform, _ = on_nodes(choice)
        cluster = find(choice.choice(GPUS) if platform.on_gpus else "epyc-7763").cluster
        if choice.random() < 0.5:
            cluster = changed(cluster, {"network.hidden": 0.2, "node.hidden": 0.6})
        model = layers(spec.model)
        times = StepTimes(model, cluster, platform)
        seconds = times.of(spec, nodes).seconds
        exact = exact_seconds(spec, model, nodes, Machine(cluster, platform))
        assert seconds == pytest.approx(exact, rel=0.01), spec
        assert times.at_least(spec, nodes) <= 1.01 * seconds, spec


def walked(of: Space, count: int, choice: random.Random) -> Iterator[Spec]:
    """Draw layouts of a job, each with all but one part of the one before where that can be."""

    def kept(value: Any, options: Sequence[Any], changes: bool) -> Any:
        return choice.choice(options) if changes or value not in options else value

    parallel, order, states, size, saving = of.parallels[0], None, None, 0, None
    for _ in range(count):
        part = choice.randrange(5)
        grid = parallel.tensor, parallel.pipeline
        alike = [one for one in of.parallels if (one.tensor, one.pipeline) == grid]
        parallel = kept(parallel, choice.choice((alike, of.parallels)), part == 0)
        order = kept(order, of.orders(parallel), part == 1)
        states = kept(states, list(of.states(parallel, order)), part == 2)
        size = kept(size, of.micro_batches(parallel), part == 3)
        saving = kept(saving, of.savings(parallel, size), part == 4)
        yield of.spec_with(of.saving(of.layout(parallel, order, states, size), saving))


@pytest.mark.parametrize("nodes", [Allocation.of_nodes(3, 4), Allocation.of_nodes(1, 8)])
@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_what_layouts_share_changes_the_time_of_none(nodes: Allocation, count: int) -> None:
    of, machine = space(nodes)
    model = layers(of.spec.model)
    hidden = {"network.hidden": 0.2, "node.hidden": 0.6}
    machine = Machine(changed(machine.cluster, hidden), machine.platform)
    cluster, platform = machine.cluster, machine.platform
    times = StepTimes(model, cluster, platform)
    for spec in walked(of, count, random.Random(2)):
        at_least, computing = times.at_least(spec, nodes), times.of_computing(spec, nodes)
        alone = StepTimes(model, cluster, platform)
        assert at_least == alone.at_least(spec, nodes), spec
        assert computing == alone.of_computing(spec, nodes), spec
        time = times.of(spec, nodes)
        assert time.causes == predict(spec, model, nodes, cluster, platform).causes, spec
        exact = exact_seconds(spec, model, nodes, machine)
        assert time.seconds == pytest.approx(exact, rel=0.01), spec
        assert computing <= at_least * (1 + 1e-9) <= 1.01 * time.seconds, spec


@pytest.mark.parametrize("hidden", [None, 0.2])
def test_the_bound_of_chunks_at_stage_3_gathers_no_more_than_any_stage(
    hidden: float | None,
) -> None:
    """Stages with the same layers gather differently often there: the time is that of each."""
    nodes = Allocation.of_nodes(3, 4)
    pinned = {"parallel__pipeline": 4, "parallel__chunks": 2, "zero__stage": 3}
    of, machine = space(nodes, **pinned, memory__offload_activations="cpu")
    cluster = changed(machine.cluster, {"network.hidden": hidden, "node.hidden": hidden})
    times = StepTimes(layers(of.spec.model), cluster, machine.platform)
    checked = 0
    for parallel, size in product(of.parallels, (1, 3)):
        order = of.orders(parallel)[0]
        for states in of.states(parallel, order):
            spec = of.spec_with(of.layout(parallel, order, states, size))
            assert times.at_least(spec, nodes) <= 1.001 * times.of(spec, nodes).seconds, spec
            checked += 1
    assert checked >= 2
