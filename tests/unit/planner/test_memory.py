"""The predicted memory of a job: against the closed formulas, the engine's own count, and what
autograd really keeps.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hpczero.model import families
from hpczero.parallel.states import UpdateMemory
from hpczero.planner.activations import activations
from hpczero.planner.memory import RUNTIME, need, needs_of_nodes
from hpczero.planner.needs import Need, NodeNeed, of_account
from hpczero.planner.placement import Placement
from hpczero.planner.platform import Platform
from hpczero.spec.schema import Data, Model, Spec, Train, Zero

LARGE = Model(layers=8, hidden=1024, heads=16, vocab=8192, seq_len=128)  # 109 M parameters
ODD = Model(layers=2, hidden=10, heads=3, vocab=11, seq_len=5, ffn=7)
STATES = ("weights", "master", "moments", "gradients")


def job(
    model: Model = LARGE,
    stage: int = 0,
    precision: str = "bf16",
    accumulates: bool = False,
    node_shared: Any = False,
) -> Spec:
    """A micro-batch of one sequence on each of up to eight ranks, or two of them."""
    train = Train(precision=precision, micro_batch=1, global_batch=16 if accumulates else 1)  # type: ignore[arg-type]
    return Spec(model=model, train=train, zero=Zero(stage=stage, node_shared=node_shared))  # type: ignore[arg-type]


def predicted(spec: Spec, ranks: int, on_node: int = 1, shared: bool = False) -> Need:
    return need(spec, families.layers(spec.model), Placement(ranks, on_node, shared))


def states_of(need_of_node: Need) -> int:
    """Return the states of one rank."""
    return sum(need_of_node.rank[kind] for kind in STATES)


def formula(stage: int, ranks: int, gradient: int, weights: float) -> float:
    """Bytes a parameter."""
    return {
        0: weights + gradient + 12,
        1: weights + gradient + 12 / ranks,
        2: weights + (gradient + 12) / ranks,
        3: weights + (gradient + 12) / ranks,
    }[stage]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulates", [False, True])
def test_large_models_follow_the_closed_formulas(stage: int, accumulates: bool) -> None:
    parameters, gradient = families.parameter_count(LARGE), 4 if accumulates else 2
    assert parameters > 100_000_000
    for ranks in range(1, 9):
        states = states_of(predicted(job(stage=stage, accumulates=accumulates), ranks))
        assert states / parameters == pytest.approx(
            formula(stage, ranks, gradient, 2 / ranks if stage == 3 else 2), rel=0.02
        )
        for on_node in range(1, ranks + 1):
            shared = states_of(
                predicted(
                    job(stage=stage, accumulates=accumulates, node_shared=True),
                    ranks,
                    on_node,
                    shared=True,
                )
            )
            assert shared / parameters == pytest.approx(
                formula(stage, ranks, gradient, 2 / on_node), rel=0.02
            )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_has_no_separate_master_weights(stage: int) -> None:
    parameters = families.parameter_count(LARGE)
    kinds = predicted(job(stage=stage, precision="fp32"), 4).rank
    assert kinds["master"] == 0
    assert kinds["weights"] / parameters == pytest.approx(4 / (4 if stage == 3 else 1), rel=0.02)
    assert kinds["moments"] / parameters == pytest.approx(8 / (4 if stage >= 1 else 1), rel=0.02)


def test_another_update_keeps_other_states() -> None:
    """By PyTorch, with one state of each element, an average, and the gradient of one layer."""
    update = UpdateMemory(moments=1, average=True, by_torch=True)
    assert update.of_element == 12
    layers, place = families.layers(LARGE), Placement(4, 1, False)
    largest = max(layer.size for layer in layers)
    for stage, ranks in ((0, 1), (1, 4)):
        spec = job(stage=stage)
        kinds = need(spec, layers, place, Platform(update=update)).rank
        plain = need(spec, layers, place).rank
        assert kinds["moments"] == kinds["average"] == plain["moments"] // 2
        assert kinds["gradient of a unit"] == pytest.approx(4 * largest / ranks, rel=0.01)
        assert kinds["update"] == 3 * kinds["gradient of a unit"]
        others = kinds.keys() - {"moments", "average", "gradient of a unit", "update"}
        assert all(kinds[kind] == plain[kind] for kind in others)
        assert plain.keys() == others | {"moments"}


def test_in_flight_are_two_of_the_largest_units() -> None:
    largest = max(layer.size for layer in families.layers(LARGE))
    slots = [
        (
            predicted(job(stage=stage), 4).rank["gradient slots"],
            predicted(job(stage=stage), 4).rank["gather slots"],
        )
        for stage in range(4)
    ]
    assert slots[:2] == [(0, 0), (0, 0)]
    assert slots[2] == (pytest.approx(2 * 2 * largest, rel=0.001), 0)
    assert slots[3] == (slots[2][0], slots[2][0])


def test_what_a_node_holds_together_counts_once() -> None:
    alone, shared = predicted(job(), 4, 4), predicted(job(node_shared=True), 4, 4, shared=True)
    weights = alone.rank["weights"]
    assert alone.node["weights"] == 4 * weights
    assert shared.node["weights"] == weights
    assert shared.rank["weights"] == weights // 4
    assert shared.windows == weights + shared.node["gradients"]
    assert alone.windows == 0
    for kinds in (NodeNeed((alone,)), NodeNeed((shared,))):
        assert kinds.of(4) == sum(kinds.node.values())
        assert kinds.of(2) == kinds.of(4) // 2
    for place, own in ((Placement(4, 4, True), weights // 4), (Placement(4, 4, False), weights)):
        assert place.part_of_rank({"weights": weights, "master": 8}) == {
            "weights": own,
            "master": 8,
        }


def test_in_windows_at_stage_2_are_the_weights_and_the_slots() -> None:
    shared = predicted(job(stage=2, node_shared=True), 8, 4, shared=True)
    assert shared.windows == shared.together["weights"] + 4 * shared.rank["gradient slots"]


def test_communication_buffers_do_not_depend_on_the_model() -> None:
    sizes = {
        predicted(job(model), ranks).rank["communication"]
        for model in (LARGE, ODD)
        for ranks in (2, 8)
    }
    assert len(sizes) == 1
    assert predicted(job(), 1).rank["communication"] == 0
    assert predicted(job(), 4, 4, shared=True).rank["communication"] == 0, (
        "all of it is read in place"
    )
    assert {predicted(job(), 8, 4, shared=True).rank["communication"]} == sizes


def test_nodes_of_different_sizes() -> None:
    nodes = needs_of_nodes(job(node_shared="auto"), families.layers(LARGE), {0: 2, 1: 1})
    assert [nodes[node].ranks for node in (0, 1)] == [2, 1]
    assert nodes[0].node["weights"] == nodes[1].node["weights"]
    assert nodes[0].node["runtime"] == 2 * RUNTIME


def names(layers: Any) -> list[str]:
    return [parameter.name for _, layer in layers for parameter in layer.parameters]


@dataclass
class Alone:
    """A data axis on which nobody answers: enough to allocate an engine."""

    rank: int
    size: int
    shared = False
    replicas = None
    done = True
    device: Any = None
    group: Any = None

    def __post_init__(self) -> None:
        from hpczero.device import CPU

        self.device = self.device or CPU
        self.group = self.connection = self.progress = self

    def advance(self) -> bool:
        return False

    def close(self) -> None: ...

    def allocate(self, once: object, each: object) -> dict[str, Any]:
        return {}

    def written(self, elements: int, sharded: bool) -> slice:
        return (
            slice(self.rank * elements // self.size, (self.rank + 1) * elements // self.size)
            if sharded
            else slice(0, elements)
        )

    def gather(self, *_: object, **__: object) -> "Alone":
        return self

    settle = gather

    def wait(self) -> None: ...

    def poll(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stage", "precision", "accumulates"), list(product(range(4), ("bf16", "fp32"), (False, True)))
)
def test_what_is_predicted_is_allocated(stage: int, precision: str, accumulates: bool) -> None:
    """On a model whose units are mostly padding, to the byte, and in blocks of just that size."""
    torch = pytest.importorskip("torch")
    from hpczero.model import build
    from hpczero.parallel.zero.engine import Engine
    from hpczero.parallel.zero.engine_settings import EngineSettings
    from hpczero.parallel.zero.weights import ModelParts

    spec = job(ODD, stage, precision, accumulates)
    for ranks in (1, 3, 4):
        module = build.on_meta(ODD)
        layers = list(zip(module.layers(), families.layers(ODD), strict=True))  # type: ignore[operator]
        settings = EngineSettings(spec.train, spec.optimizer, spec.zero, spec.seed, accumulates)
        parts = ModelParts(module, layers, None, {}, names(layers))
        engine = Engine(parts, Alone(ranks - 1, ranks), settings)  # type: ignore[arg-type]
        kinds = predicted(spec, ranks).rank
        allocated = engine.memory()
        assert allocated == {kind: kinds[kind] for kind in allocated}
        assert set(STATES) <= set(allocated)
        assert {kind: block.numel() for kind, block in engine.arena._blocks.items()} == allocated
        assert all(block.dtype is torch.uint8 for block in engine.arena._blocks.values())


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("to_files", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_offloaded_states_are_predicted(
    stage: int, precision: str, to_files: bool, device: str, tmp_path: Path
) -> None:
    """In memory and in files; those of a device in the computer's memory."""
    pytest.importorskip("torch")
    from hpczero.model import build
    from hpczero.parallel.zero.engine import Engine
    from hpczero.parallel.zero.weights import EngineSettings, ModelParts
    from tests.support.queued import Queued

    spec = job(ODD, stage, precision, accumulates=bool(stage % 2))
    zero = spec.zero.model_copy(update={"offload": f"nvme:{tmp_path}" if to_files else "cpu"})
    spec = spec.model_copy(update={"zero": zero})
    on = Queued() if device == "cuda" else None
    module = build.on_meta(ODD)
    layers = list(zip(module.layers(), families.layers(ODD), strict=True))  # type: ignore[operator]
    settings = EngineSettings(spec.train, spec.optimizer, zero, spec.seed, bool(stage % 2))
    parts = ModelParts(module, layers, None, {}, names(layers))
    engine = Engine(parts, Alone(1, 3, device=on), settings)  # type: ignore[arg-type]
    needed = need(spec, families.layers(ODD), Placement(3, 1, False), Platform(device))
    allocated = {kind: size for kind, size in engine.memory().items() if size}
    expected = {kind: size for kind, size in needed.rank.items() if size}
    assert allocated == {kind: expected[kind] for kind in allocated}
    of_states = expected.keys() - {"activations", "workspace", "data", "runtime", "communication"}
    assert allocated.keys() == of_states - {"checkpoint copy", "pipeline"}
    assert needed.files == (engine.file.size if engine.file else 0)
    assert (needed.files > 0) == to_files
    moved = {kind for kind in allocated if kind.endswith("on the host")}
    assert bool(moved) == (device == "cuda")
    assert set(of_account(needed.rank, "device")).isdisjoint(moved)
    engine.close()


@pytest.mark.parametrize("stage", range(4))
def test_what_is_in_use_around_others_is_predicted(stage: int) -> None:
    """A module with parameters beside its parts: they have a place of their own while these are
    gathered.
    """
    torch = pytest.importorskip("torch")
    from hpczero.parallel.user_module import layers_of
    from hpczero.parallel.zero.engine import Engine
    from hpczero.parallel.zero.weights import EngineSettings, ModelParts

    class Beside(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(2000, 64))
            self.parts = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    spec, module = job(stage=stage), Beside()
    layers = layers_of(module)
    assert [
        layer.around for _, layer in layers if any(own.name == "table" for own in layer.parameters)
    ] == [True]
    kinds = need(spec, [layer for _, layer in layers], Placement(2, 1, False)).rank
    settings = EngineSettings(spec.train, spec.optimizer, spec.zero, spec.seed, False)
    engine = Engine(ModelParts(module, layers, None, {}, names(layers)), Alone(0, 2), settings)  # type: ignore[arg-type]
    allocated = engine.memory()
    assert allocated == {kind: kinds[kind] for kind in allocated}
    assert allocated["gather slots"] == (3 * 2000 * 64 * 2 if stage == 3 else 0), (
        "two slots as large as the table, and its own place"
    )


MODELS = [
    Model(layers=6, hidden=64, heads=4, vocab=5, seq_len=64),
    Model(layers=6, hidden=64, heads=4, vocab=5, seq_len=64, dropout=0.1),
    Model(
        layers=5,
        hidden=32,
        heads=2,
        head_dim=48,
        ffn=300,
        vocab=5,
        seq_len=32,
        tied_embeddings=False,
    ),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_activations_are_what_autograd_keeps(model: Model, precision: str) -> None:
    """With a tiny vocabulary the head adds little: nearly all is what the blocks keep, and the
    rest of it is no more than a block's backward.
    """
    torch = pytest.importorskip("torch")
    from hpczero.model import build
    from hpczero.model.batch import MicroBatch

    module = (
        build.on_meta(model)
        .to_empty(device="cpu")
        .to(torch.bfloat16 if precision == "bf16" else torch.float32)
    )
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    known = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    tokens = torch.zeros(4, model.seq_len, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = module(MicroBatch(tokens, tokens, torch.arange(4), 0, 1))
    assert loss.grad_fn is not None
    measured = sum(storage.nbytes() for address, storage in kept.items() if address not in known)
    spec = Spec(model=model, train=Train(precision=precision), data=Data(source="synthetic"))  # type: ignore[arg-type]
    few, many = activations(spec, 4), activations(spec, 8)
    assert few.kept == pytest.approx(measured, rel=0.03)
    assert measured <= few.widest <= measured * 1.35
    assert many.widest == pytest.approx(2 * few.widest, rel=0.05)


def test_our_cross_entropy_keeps_no_logits_in_fp32() -> None:
    """Count what autograd keeps and what backward gives, of the very function that GPUs have."""
    torch = pytest.importorskip("torch")
    from hpczero_kernels.cross_entropy import CrossEntropy

    rows, vocab = 512, 3000
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, requires_grad=True)
    targets, kept = torch.zeros(rows, dtype=torch.int64), dict[int, Any]()

    def keep(tensor: Any) -> Any:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    work = logits * 1
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = CrossEntropy.apply(work, targets, None)
    measured = sum(storage.nbytes() for storage in kept.values())
    assert measured == 2 * rows * vocab + rows * (8 + 4 + 4)
    (gradient,) = torch.autograd.grad(loss, work)
    assert gradient.data_ptr() == work.data_ptr()

    model = Model(layers=1, hidden=32, vocab=vocab, seq_len=512)
    spec = Spec(model=model)
    pytorchs, ours = (
        activations(spec, 1, kernels=frozenset(names)).widest for names in ((), {"cross_entropy"})
    )
    assert pytorchs - ours == pytest.approx((12 - 2) * rows * vocab, rel=0.1)


def test_a_wide_vocabulary_makes_the_loss_the_widest_moment() -> None:
    narrow, wide = (
        Spec(model=Model(layers=1, hidden=32, vocab=vocab, seq_len=512))
        for vocab in (1000, 101_000)
    )
    more = activations(wide, 8).widest - activations(narrow, 8).widest
    assert more == pytest.approx(3 * 4 * 100_000 * 512 * 8, rel=0.05)
