"""A checkpoint keeps values and states of a loop of one's own, without pickle."""

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from hpczero.checkpoint.shard_file import Damaged
from hpczero.errors import InputError
from hpczero.train import rank_states
from hpczero.train.loop_state import LoopState

EXTRA: dict[str, Any] = {
    "epoch": 3,
    "best": float("inf"),
    "name": "räuber",
    "nothing": None,
    "table": {"list": [1, 2.5, {"deep": torch.arange(3)}], "flag": True},
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "bits": torch.tensor([[True], [False]]),
    "number": torch.tensor(7, dtype=torch.int64),
    "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
    "none of it": torch.empty(0, 4),
    "numpy's": np.float64(0.1),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_what_is_saved_comes_back() -> None:
    optimizer = {"class": "SGD", "scalars": {"a.weight": {"step": 3.0}}}
    ranks = {"data": ["abc", "a longer one"]}
    buffers = LoopState(EXTRA, ranks, {"norm.mean": ["x", "y"]}, optimizer).packed()
    assert all(name.startswith(".loop/") for name in buffers)
    back = LoopState.of(buffers, "here")
    assert same(back.extra, EXTRA)
    assert [state.strip() for state in back.generators["data"]] == ranks["data"]
    assert back.buffers == {"norm.mean": ["x", "y"]}
    assert back.optimizer == optimizer


def test_no_loops_checkpoint_has_nothing() -> None:
    assert LoopState.of({}, "here") == LoopState()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"a": {"b": [object()]}}, r"extra\['a'\]\['b'\]\[0\] is a object"),
        ({"a": {3: 1}}, r"extra\['a'\] has the key 3: a checkpoint's keys are text"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, r"numbers of type complex64"),
        ({"a": torch.eye(2).to_sparse()}, "sparse, quantized or on meta"),
        ({"a": torch.ones(2, device="meta")}, "sparse, quantized or on meta"),
        ({"a": np.array(["text"])}, "numbers of type <U4"),
        ({"a": lambda: 1}, "is a function: a checkpoint takes numbers, text"),
        ({"a": {1, 2}}, "is a set"),
    ],
)
def test_what_json_cannot_say_is_refused(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        LoopState(extra).packed()


def test_too_deep_is_refused() -> None:
    deep: dict[str, Any] = {}
    deep["again"] = deep
    with pytest.raises(InputError, match="more than 50 tables in each other"):
        LoopState(deep).packed()


def text(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


@pytest.mark.parametrize(
    "state",
    [
        [],
        {},
        {"extra": 3, "tensors": [], "generators": [], "buffers": [], "optimizer": {}},
        {"extra": {}, "tensors": [[["a"], "float32", False]]},
        {"extra": {"a": 1}, "tensors": [[["a"], "float32", False]], "generators": []},
        {"extra": {"a": None}, "tensors": [[["a"], "int8", False]], "generators": []},
        {"extra": {}, "tensors": [], "generators": ["x"], "buffers": [], "optimizer": {}},
        {"extra": {}, "tensors": [], "generators": [], "buffers": {"a": 1}, "optimizer": 3},
    ],
)
def test_what_a_stranger_wrote_is_damaged(state: Any) -> None:
    buffers = {".loop/state": text(state), ".loop/tensors/0": np.ones(2, np.float32)}
    with pytest.raises(Damaged, match="the state of its loop does not fit together"):
        LoopState.of(buffers, "here")
    with pytest.raises(Damaged, match="does not fit together"):
        LoopState.of({".loop/state": np.frombuffer(b"\xff{", np.uint8)}, "here")


def draws(generators: dict[str, Any]) -> list[float]:
    return [
        torch.rand((), generator=generators["torch"]).item(),
        *generators["pcg"].random(3),
        *generators["mt"].normal(size=2),
        *generators["old"].normal(size=3),
        generators["python"].gauss(0, 1),
    ]


def made(seed: int) -> dict[str, Any]:
    return {
        "torch": torch.Generator().manual_seed(seed),
        "pcg": np.random.default_rng(seed),
        "mt": np.random.Generator(np.random.MT19937(seed)),
        "old": np.random.RandomState(seed),
        "python": random.Random(seed),
    }


def test_generators_go_on_where_they_were() -> None:
    generators = made(3)
    draws(generators)  # which leaves Python's gauss with half a pair
    states = json.loads(json.dumps(rank_states.states_of(generators)))
    expected = draws(generators)
    others = made(4)
    rank_states.set_states(others, states)
    assert draws(others) == expected


def test_modules_that_are_generators() -> None:
    generators = {"numpy": np.random, "python": random}
    before = rank_states.states_of(generators)
    expected = np.random.random(), random.random()
    rank_states.set_states(generators, before)
    assert (np.random.random(), random.random()) == expected


def test_what_is_no_generator_or_no_state_is_said() -> None:
    with pytest.raises(InputError, match=r"random\['x'\] is a int: a generator is a torch"):
        rank_states.states_of({"x": 3})
    with pytest.raises(InputError, match="has no state of the generator 'x'"):
        rank_states.refuse_unknown({"x": random.Random()}, {"y": []})
    for name, generator in made(1).items():
        for wrong in ("", "[]", "{}", "AAAA", '{"bit_generator": "PCG64", "state": 3}'):
            with pytest.raises(Damaged, match="is none of its kind"):
                rank_states.set_states({name: generator}, {name: wrong})
