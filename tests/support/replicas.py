"""Jobs whose replicas exchange their gradients, or less than that; and all that an engine keeps."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hpczero.parallel.zero.engine import Engine
from hpczero.spec.optimizer import Outer
from hpczero.spec.schema import Comm, Data, Model, Optimizer, Parallel, Spec, Train, Zero

# the table `optimizer`; steps before signs, or between outer steps, are few
METHODS: dict[str, dict[str, Any]] = {
    "sums": {},
    "int8": {},
    "one_bit_adam": {"name": "one_bit_adam", "freeze": 1},
    "local steps": {"outer": {"every": 3, "lr": 0.9, "momentum": 0.3}},
    "local steps, int4": {
        "outer": {"every": 4, "precision": "int4", "fragments": 2, "lr": 0.9, "momentum": 0.3}
    },
}


def spec_of(
    method: str,
    zero: Mapping[str, Any] | None = None,
    parallel: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    **train: Any,
) -> Spec:
    """Return the spec of a small GPT; nothing divides."""
    shape = {"layers": 3, "hidden": 24, "heads": 4, "seq_len": 17, "vocab": 67}
    batches = {"steps": 6, "global_batch": 12, "micro_batch": 2, "eval_batches": 0}
    table = METHODS[method] | dict(optimizer or {})
    table["outer"] = Outer(**table.get("outer", {}))
    return Spec(
        model=Model(**shape, tied_embeddings=True),
        data=Data(source="synthetic"),
        train=Train(**{**batches, "precision": "fp32", "grad_clip": 0.7, **train}),
        optimizer=Optimizer(**{"lr": 2e-4, "eps": 1e-4, **table}),
        parallel=Parallel(**(parallel or {})),
        zero=Zero(**{"shard_ranks": "node", **(zero or {})}),
        comm=Comm(compress="int8" if method == "int8" else "none"),
    )


def own_spec_of(method: str, folder: str = "runs", **tables: Any) -> dict[str, Any]:
    """Return the spec of a loop of one's own."""
    found: dict[str, Any] = {
        "name": "loop",
        "output": folder,
        "train": {"steps": 12, "precision": "fp32", "grad_clip": 0},
        "optimizer": {"lr": 1e-3, "eps": 1e-6, **METHODS[method]},
        "zero": {"shard_ranks": "node"},
        "comm": {"compress": "int8" if method == "int8" else "none"},
        "schedule": {"name": "constant"},
        "checkpoint": {"every": 0},
    }
    for name, table in tables.items():
        found[name] = {**found.get(name, {}), **table}
    return found


def kept(engine: Engine) -> dict[str, Tensor]:
    """Return copies of all that a step may change on this rank, by unit and name."""
    found = {}
    for unit in engine.units:
        update = engine.update
        tensors = {"master": unit.master, "weights": unit.weights}
        tensors |= {"common weights": update.common_weights(unit)} | update.states(unit)
        tensors |= update.own_states(unit) | update.dealt_states(unit)
        found |= {f"{unit.layout.name} {name}": state.clone() for name, state in tensors.items()}
    return found
