"""A whole step of the engine with all tensors on one device, torch's "meta": it computes nothing,
but refuses to mix its tensors with the CPU's, and to have their values read: the host waits for
what it reads by `Device.later`, at the end of the step.
"""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hpczero.device import Device  # noqa: E402  # needs torch
from hpczero.model import build, families  # noqa: E402
from hpczero.model.batch import MicroBatch  # noqa: E402
from hpczero.parallel.zero import kernel_update  # noqa: E402
from hpczero.parallel.zero import reduce as reduction  # noqa: E402
from hpczero.parallel.zero.buffers import Loan, Loans  # noqa: E402
from hpczero.parallel.zero.engine import Engine  # noqa: E402
from hpczero.parallel.zero.engine_settings import EngineSettings  # noqa: E402
from hpczero.parallel.zero.unit import Unit  # noqa: E402
from hpczero.parallel.zero.weights import ModelParts  # noqa: E402
from hpczero.spec.schema import Model, Spec, Train, Zero  # noqa: E402

MODEL = Model(layers=2, hidden=24, heads=3, seq_len=33, vocab=61, kernels="torch")


happened: list[str] = []


class Meta(Device):
    kind = "cuda"
    has_queues = True
    torch = torch.device("meta")

    def put(self, tensor: Any) -> Any:
        return tensor.to(self.torch)

    def later(self, values: Any) -> Any:
        assert values.is_meta
        return lambda: happened.append("read") or [1.0] * values.numel()  # type: ignore[func-returns-value]


class NothingInFlight:
    """A group of one rank: its connection, and the progress of its operations."""

    rank = 0

    @property
    def connection(self) -> "NothingInFlight":
        return self

    progress = connection

    def snapshot(self) -> Any:
        return lambda: happened.append("host_sync")

    def stack(self, values: Any) -> Any:
        return values[None]


class OneRank:
    """A data axis of one rank."""

    replicas = None
    group = NothingInFlight()

    rank, size, shared, device = 0, 1, False, Meta()
    done = True

    def allocate(self, once: object, each: object) -> dict[str, Any]:
        return {}

    def written(self, elements: int, sharded: bool) -> slice:
        return slice(0, elements)

    def reduce(self, tensor: Any, sums: Any) -> "OneRank":
        sums.into_shard(slice(0, tensor.numel()), [tensor], [0])
        return self

    def gather(self, *_: object, **__: object) -> "OneRank":
        return self

    def wait(self) -> None: ...

    def poll(self) -> bool:
        return True


def lend(_: Loans, part: Any, returned: Any) -> Loan:
    """Tensors without memory have no aliases, nor addresses."""
    return Loan(torch.empty_like(part), part, torch.UntypedStorage(1), returned)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The tensors given to each call of a kernel; the kernels compute nothing."""
    given: list[list[Any]] = []
    monkeypatch.setattr(
        reduction,
        "sum_pieces",
        lambda pieces, out, accumulate, squares, pool: given.append([*pieces, out, squares]),
    )

    def adamw(state: Any, decay: float, scalars: Any, pool: Any) -> None:
        happened.append("adamw")
        given.append([state.master, state.moment1, state.moment2, state.gradient, scalars.values])

    monkeypatch.setattr(kernel_update, "adamw", adamw)
    monkeypatch.setattr(Loans, "lend", lend)
    monkeypatch.setattr(
        Unit, "fill_owned", lambda unit, fill: unit.weights_from_master()
    )  # initial values are made on the CPU
    return given


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_tensor_of_a_step_is_on_the_device(
    stage: int, precision: str, given: list[list[Any]]
) -> None:
    spec = Spec(model=MODEL, train=Train(precision=precision), zero=Zero(stage=stage))  # type: ignore[arg-type]
    module = build.on_meta(MODEL)
    module.register_buffer("kept", torch.zeros(3))
    layers = list(zip(module.layers(), families.layers(MODEL), strict=True))
    names = [parameter.name for _, layer in layers for parameter in layer.parameters]
    settings = EngineSettings(spec.train, spec.optimizer, spec.zero, 1, True, own_model=True)
    engine = Engine(ModelParts(module, layers, None, {}, names), OneRank(), settings)  # type: ignore[arg-type]
    text = torch.zeros(2, MODEL.seq_len + 1, dtype=torch.int64)
    for last in (False, True):
        loss = engine(
            MicroBatch(text[:, :-1], text[:, 1:], torch.arange(2), 0, 1).on(engine.device)
        )
        engine.backward(loss / 66, last)
    happened.clear()
    engine.finish_step(1e-3)
    assert happened.count("adamw") >= len(engine.units)
    assert happened[-2:] == ["host_sync", "read"]
    assert happened.count("read") == 1
    assert len(given) > 2 * len(engine.units)
    states = [
        tensor
        for unit in engine.units
        for tensor in (
            unit.weights,
            unit.master,
            engine.update.moment1[unit],
            unit.squares,
            unit.reduced_shard,
            *unit.parameters,
        )
    ]
    assert {tensor.device.type for tensors in (*given, states) for tensor in tensors} == {"meta"}
    assert module.kept.is_meta
    engine.pool.close()
