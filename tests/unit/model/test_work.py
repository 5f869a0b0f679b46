"""A layer's work: operations are the family's formula, weights are the parameters' shapes."""

import pytest

from hpczero.model.families import KERNELS_THAT_CHANGE_MEMORY, family, layers
from hpczero.model.shapes import Layer
from hpczero.model.work import LayerWork, Pass, WorkLayout, visible_keys
from hpczero.parallel.layout import unit_layout
from hpczero.spec.attention import Attention
from hpczero.spec.schema import Model

FUSED = KERNELS_THAT_CHANGE_MEMORY["cuda"]
GPT = Model(layers=2, hidden=96, heads=8, vocab=512, seq_len=64)
LLAMA = Model(
    family="llama", layers=4, hidden=96, heads=8, kv_heads=4, ffn=160, vocab=512, seq_len=64
)
BLOCKS = Attention(kind=("strided", "dense", "bigbird"), block=8, window=2, heads="different")
MODELS = [
    GPT,
    GPT.model_copy(update={"head_dim": 20, "ffn": 100, "tied_embeddings": False}),
    LLAMA,
    LLAMA.model_copy(update={"window": 16, "window_pattern": 2, "qk_norm": True}),
    LLAMA.model_copy(update={"attention": BLOCKS}),
    GPT.model_copy(update={"attention": BLOCKS}),
    LLAMA.model_copy(update={"post_norms": True, "logit_cap": 30.0, "kv_heads": 8}),
    GPT.model_copy(update={"family": "bert", "sentences": "next"}),
    GPT.model_copy(update={"family": "bert", "norm_order": "pre", "attention": BLOCKS}),
    GPT.model_copy(update={"family": "t5", "layers": 5, "attention": BLOCKS}),
    GPT.model_copy(update={"family": "t5", "layers": 5}),
    GPT.model_copy(update={"family": "t5", "feed_forward": "relu", "encoder_layers": 1}),
]


def work_of(model: Model, layer: Layer, **layout: object) -> LayerWork:
    sizes = {"samples": 3, "seq_len": model.seq_len, "element": 2, **layout}
    return family(model).work(model, layer, WorkLayout(**sizes))


def operations(work: Pass) -> float:
    return sum(each.operations for each in (*work.products, *work.cores))


def whole(work: LayerWork) -> float:
    """Operations of forward and backward; those of a core's gradients are twice forward's."""
    return operations(work.forward) + operations(work.gradients) + operations_of_cores(work)


def operations_of_cores(work: LayerWork) -> float:
    return sum(core.operations for core in work.gradients.cores)


@pytest.mark.parametrize("model", MODELS)
def test_operations_are_those_of_the_family(model: Model) -> None:
    expected = family(model).operations(model, model.seq_len)
    for layer, count in zip(layers(model), expected, strict=True):
        if layer.kind != "embedding":  # which adds, and has no products
            assert whole(work_of(model, layer)) == pytest.approx(3 * count, rel=1e-7)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_products_have_the_weights_of_the_layer(model: Model, ranks: int) -> None:
    everything = layers(model)
    used = {each.name: each for layer in everything for each in layer.parameters}
    for layer in everything[1:]:
        if layer.kind == "positions":  # which are added
            continue
        products = work_of(model, layer, tensor=ranks).forward.products
        held = [
            (slot.parameter, slot.shape)
            for slot in unit_layout(layer, 1, ranks).slots
            if len(slot.shape) > 1 and "qkv.bias" not in slot.parameter.name
        ]
        held = [each for each in held if not each[0].name.endswith("bias")]
        elements = sum(product_of(shape) for _, shape in held)
        multiplied = [name for name in layer.uses if not name.startswith("positions.")]
        elements += sum(used[name].size // ranks for name in multiplied)
        assert sum(each.n * each.k for each in products) == elements
        assert all(each.weight and each.times == 1 for each in products)


def product_of(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


@pytest.mark.parametrize("model", MODELS)
def test_tensor_ranks_share_the_operations(model: Model) -> None:
    for layer in layers(model)[1:]:
        at_once, part = whole(work_of(model, layer)), whole(work_of(model, layer, tensor=4))
        # a head that picks its positions shares the logits alone
        is_apart = layer.kind == "head" and family(model).picked
        logits = whole_of_logits(model) if is_apart else at_once
        assert 4 * (part - (at_once - logits)) == pytest.approx(logits)


def whole_of_logits(model: Model) -> float:
    return 3 * 3 * model.target_count(model.seq_len) * 2 * model.hidden * model.vocab


@pytest.mark.parametrize("ranks", [3, 5, 8])
def test_the_busiest_rank_has_no_less_than_its_part(ranks: int) -> None:
    for model in MODELS:
        for layer in layers(model)[1:]:
            part = whole(work_of(model, layer, tensor=ranks))
            assert part * ranks >= whole(work_of(model, layer)) * 0.999


OF_KERNELS = [
    (model, block)
    for model in (LLAMA, LLAMA.model_copy(update={"qk_norm": True}), *MODELS[-2:])
    for block in layers(model)
    if block.is_block
]


@pytest.mark.parametrize(("model", "block"), OF_KERNELS)
def test_kernels_and_sequence_parallelism_move_less(model: Model, block: Layer) -> None:
    apart = work_of(model, block, tensor=2)
    fused = work_of(model, block, tensor=2, kernels=FUSED)
    cut = work_of(model, block, tensor=2, kernels=FUSED, sequence=True)
    for direction in ("forward", "backward", "again"):
        moved = [getattr(work, direction).bytes for work in (apart, fused, cut)]
        assert moved[0] > moved[1] > moved[2] > 0
        assert getattr(apart, direction).launches > getattr(fused, direction).launches


@pytest.mark.parametrize("model", [model for model in MODELS if not model.masks])
def test_a_loss_by_pieces_makes_its_logits_in_backward(model: Model) -> None:
    head = layers(model)[-1]
    at_once, pieces = work_of(model, head), work_of(model, head, by_pieces=True)
    assert not pieces.forward.products
    assert whole(pieces) == whole(at_once)


@pytest.mark.parametrize(("seq_len", "window"), [(7, 0), (7, 7), (7, 3), (7, 1), (5, 9), (1, 0)])
def test_visible_keys_are_those_of_a_mask(seq_len: int, window: int) -> None:
    seen = [min(query + 1, window or seq_len) for query in range(seq_len)]
    assert visible_keys(seq_len, window) == pytest.approx(sum(seen) / seq_len)
