"""Steps that were published with their time, or memory, are predicted, within stated bounds.

`python scripts/fit_cluster.py` makes the numbers of the clusters; docs/foresight.md has the tables.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import mean

import pytest

from hpczero.planner.allocation import Allocation
from hpczero.spec.schema import Parallel, Train
from tests.support.figures import Figure
from tests.support.fitting import a100, left_out, sizes
from tests.support.launch import CHECKOUT
from tests.support.published_deepspeed import on_64, superlinear
from tests.support.published_memory import (
    activations_of_a_block,
    largest_in_theory,
    memory_of_korthikanti,
    needs_of_zero,
    states_of_zero,
)
from tests.support.published_steps import Measured, korthikanti, mosaic, zero
from tests.support.published_tables import tables


def deviations(rows: Iterable[Measured]) -> list[float]:
    return sorted(abs(row.predicted().seconds / row.seconds - 1) for row in rows)


def test_korthikanti() -> None:
    errors = deviations(korthikanti())
    assert len(errors) == 8
    assert mean(errors) <= 0.04


def test_zero_on_v100() -> None:
    errors = deviations(zero())
    assert len(errors) == 13
    assert mean(errors) <= 0.12


@pytest.mark.slow
def test_mosaic_by_fits_that_have_not_seen_the_model() -> None:
    errors = sizes(left_out(a100()))
    assert len(errors) == 139
    assert errors[len(errors) // 2] <= 0.06
    assert errors[int(0.9 * len(errors))] <= 0.15


@pytest.mark.slow
def test_the_page_has_the_tables_that_are_printed() -> None:
    page = (CHECKOUT / "docs" / "foresight.md").read_text()
    assert not [line for line in tables() if line not in page]


@pytest.mark.parametrize("rows", [korthikanti, mosaic, zero])
def test_causes_add_up(rows: Callable[[], Iterable[Measured]]) -> None:
    for row in list(rows())[::9]:
        step = row.predicted()
        assert all(seconds >= 0 for seconds in step.causes.values())
        assert sum(step.causes.values()) == pytest.approx(step.seconds, rel=1e-12)


def test_tensor_parallelism_alone_is_nearly_ten_times_slower_at_100b() -> None:
    """Rajbhandari et al. 2020, figure 2: it then goes over several nodes."""
    row = next(each for each in zero() if each.name.startswith("125 x"))
    samples = row.spec.train.global_batch
    alone = row.spec.model_copy(
        update={
            "train": Train(global_batch=12, micro_batch=4, precision="fp16"),
            "parallel": Parallel(tensor=128, order="tensor,data,pipeline"),
        }
    )
    slow = replace(row, spec=alone, nodes=Allocation(384, 16)).predicted()
    of_each = row.predicted().seconds / samples * 400  # GPU-seconds of a sample
    assert 7 <= slow.seconds / 12 * 384 / of_each <= 12
    assert slow.largest(1)[0][0] == "tensor"


def worst(figures: Iterable[Figure]) -> float:
    return max(abs(each.error) for each in figures if each.error is not None)


def test_memory_of_korthikanti() -> None:
    """States and activations by formulas of the paper; hpczero's own engine needs less."""
    figures = list(memory_of_korthikanti())
    assert len(figures) == 12
    assert worst(figures) <= 0.04
    assert all(float(own) <= each.predicted + 0.01 for each in figures for own in each.notes)


def test_activations_of_a_layer() -> None:
    figures = list(activations_of_a_block())
    assert len(figures) == 5
    assert worst(figures) <= 0.01


def test_states_of_zero() -> None:
    assert len(list(states_of_zero())) == 15
    assert worst(states_of_zero()) <= 0.01
    assert worst(largest_in_theory()) <= 0.03


def test_steps_that_ran_are_not_refused() -> None:
    close = [step.name for step, fit in needs_of_zero() if fit.verdict != "fits"]
    assert close == ["212 x 8192, tensor 16, 400 GPUs"]
    assert not [step for step, fit in needs_of_zero() if fit.verdict == "does not fit"]


def test_steps_on_v100_that_nothing_was_fitted_to() -> None:
    off = [abs(each.error) for each in on_64() if each.error is not None]
    assert len(off) == 8
    assert mean(off) <= 0.12  # as for the rows that the numbers were fitted to


def test_60b_is_superlinear() -> None:
    """Stage 2 on 400 GPUs is more than 400 / 64 times as fast as on 64."""
    few, *_, many = superlinear()
    assert many.predicted > few.predicted
    sent = [float(each.notes[1].replace(",", "")) for each in (few, many)]
    assert sent[1] < sent[0] / 3
