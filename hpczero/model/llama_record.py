"""The record of Llama and its relatives: all that is known of it before it is built (pure).

Initial values are GPT-2's (Radford et al. 2019). The torch model is `model/llama.py`.
"""

from typing import Any

from hpczero.model.attention_layouts import rules_of
from hpczero.model.layer_work import core, inside_attention, keys_counted, of_embedding, of_head
from hpczero.model.moments import FORWARD_AND_BACKWARD, FP32, BlockBytes, of_layers
from hpczero.model.shapes import (
    NORM_OF_HEADS,
    NORM_OF_ROWS,
    ONES,
    SUMS_OF_ONE_STREAM,
    ZEROS,
    ChunkLayout,
    Family,
    Initial,
    Layer,
    Moments,
    Parameter,
    ffn,
    head_dim,
    kv_heads,
)
from hpczero.model.work import LayerWork, Pass, Product, WorkLayout
from hpczero.spec.schema import Model

_NORMAL = Initial("normal", 0.02)


def _layers(model: Model) -> list[Layer]:
    """Return the layers; projections into the residual stream start smaller."""
    lookup = Parameter("embedding.lookup.tokens", (model.vocab, model.hidden), _NORMAL, split=0)
    embedding = Layer("embedding", (lookup,), only_forward=(lookup.name,))
    blocks = [_block(f"blocks.{index}", model) for index in range(model.layers)]
    norm = _norm("head.norm", model, model.hidden)
    if model.tied_embeddings:
        head = Layer("head", (norm,), uses=("embedding.lookup.tokens",))
    else:
        logits = Parameter("head.logits.weight", (model.vocab, model.hidden), _NORMAL, split=0)
        head = Layer("head", (norm, logits))
    return [embedding, *blocks, head]


def _block(name: str, model: Model) -> Layer:
    return Layer(name, (*_attention(f"{name}.attention", model), *_feed_forward(name, model)))


def _attention(name: str, model: Model) -> list[Parameter]:
    """Return the parameters in the order of the module.

    Where there are fewer heads of keys than tensor ranks, each rank holds all of them; else those
    that its queries see.
    """
    hidden, grain = model.hidden, head_dim(model)
    inner, of_keys = model.heads * grain, kv_heads(model) * grain
    group = inner // kv_heads(model)
    smaller = Initial("normal", _NORMAL.std / (2 * model.layers) ** 0.5)
    parameters = [_norm(f"{name}.norm", model, hidden)]
    for part, width, coarse, fine in (
        ("query", inner, group, grain),
        ("key", of_keys, grain, 0),
        ("value", of_keys, grain, 0),
    ):
        cut: dict[str, Any] = {"split": 0, "grain": coarse, "fine_grain": fine}
        parameters.append(
            Parameter(f"{name}.inputs.{part}.weight", (width, hidden), _NORMAL, **cut)
        )
        if model.qkv_bias:
            parameters.append(Parameter(f"{name}.inputs.{part}.bias", (width,), ZEROS, **cut))
    if model.qk_norm:
        parameters += [_norm(f"{name}.{part}_norm", model, grain) for part in ("query", "key")]
    parameters.append(Parameter(f"{name}.output.weight", (hidden, inner), smaller, 1, group, grain))
    if model.output_bias:
        parameters.append(Parameter(f"{name}.output.bias", (hidden,), ZEROS))
    if model.post_norms:
        parameters.append(_norm(f"{name}.post_norm", model, hidden))
    return parameters


def _feed_forward(block: str, model: Model) -> list[Parameter]:
    name = f"{block}.feed_forward"
    hidden, wide = model.hidden, ffn(model)
    smaller = Initial("normal", _NORMAL.std / (2 * model.layers) ** 0.5)
    parameters = [
        _norm(f"{name}.norm", model, hidden),
        Parameter(f"{name}.up.weight", (2, wide, hidden), _NORMAL, split=1, is_stack=True),
    ]
    if model.ffn_bias:
        parameters.append(Parameter(f"{name}.up.bias", (2, wide), ZEROS, split=1))
    parameters.append(Parameter(f"{name}.down.weight", (hidden, wide), smaller, split=1))
    if model.ffn_bias:
        parameters.append(Parameter(f"{name}.down.bias", (hidden,), ZEROS))
    if model.post_norms:
        parameters.append(_norm(f"{name}.post_norm", model, hidden))
    return parameters


def _norm(name: str, model: Model, width: int) -> Parameter:
    return Parameter(f"{name}.weight", (width,), ZEROS if model.norm_offset else ONES)


def _operations(model: Model, seq: int) -> list[int]:
    """Count products of matrices, and of attention's queries with the keys that they may see."""
    inner, of_keys = model.heads * head_dim(model), kv_heads(model) * head_dim(model)
    weights = model.hidden * (2 * inner + 2 * of_keys + 3 * ffn(model))
    blocks = [
        2 * weights + 4 * keys_counted(model, index, seq) * inner for index in range(model.layers)
    ]
    costs = [model.hidden, *blocks, 2 * model.hidden * model.vocab]
    return [round(FORWARD_AND_BACKWARD * seq * cost) for cost in costs]


def _activations(model: Model, tokens: int, element: int, part: ChunkLayout) -> Moments:
    """Count the activations, as `gpt_record` does.

    A block keeps its input, the residual in its middle, both norms' outputs, query, key and value
    after their turn, attention's result, gates and values and their product; PyTorch's operations
    also the gates after their activation. Norms of queries and keys keep their inputs, norms after
    a part what it adds; each of PyTorch's keeps two fp32 tensors in place of its input.
    """
    ranks = part.tensor
    hidden = model.hidden / ranks if part.sequence else model.hidden
    own_heads = model.heads / ranks
    own_keys = max(1.0, kv_heads(model) / ranks)
    inner, of_keys = (heads * head_dim(model) for heads in (own_heads, own_keys))
    wide = ffn(model) / ranks
    norms = (2 + 2 * model.post_norms) / (ranks if part.sequence else 1)
    normed = (2 + 2 * model.post_norms) * hidden
    stored = 3 if "glu" in part.kernels else 4
    elements = (4 + 2 * model.post_norms) * hidden + 2 * inner + 2 * of_keys + stored * wide
    if model.qk_norm:
        elements += inner + of_keys
        norms += own_heads + own_keys
        normed += inner + of_keys
    if model.attention_cap and own_heads > 1 and not all(rules_of(model)):
        elements += inner  # a second copy of dense attention's result
    kept = element * elements + FP32 * (own_heads + norms)
    if "rms_norm" not in part.kernels:
        kept += (2 * FP32 - element) * normed
    product = element * model.hidden * max(2 * wide, inner + 2 * of_keys)
    # of norms their inputs stay, of the gated part gates and values
    cheap = FP32 * norms + element * (2 * hidden + (stored - 2) * wide)
    if "rms_norm" not in part.kernels:
        cheap += (2 * FP32 - element) * normed
    widest = max(element * 4 * wide, inside_attention(model, element, inner, of_keys))
    block = BlockBytes(kept, cheap, widest, product)
    return of_layers(model, tokens, element, part, {"blocks": block})


def _heads_of_rank(model: Model, ranks: int) -> tuple[int, int]:
    """Return the queries' and the keys' heads with which the busiest tensor rank works."""
    group = model.heads // kv_heads(model)
    if ranks <= kv_heads(model):
        of_keys = -(-kv_heads(model) // ranks)
        return of_keys * group, of_keys
    own = -(-model.heads // ranks)
    return own, 1 + (own - 1) // group


def _block_products(model: Model, layout: WorkLayout) -> tuple[Product, ...]:
    heads, of_keys = _heads_of_rank(model, layout.tensor)
    grain, hidden, wide = head_dim(model), model.hidden, layout.share(ffn(model))
    return (
        Product(layout.tokens, heads * grain, hidden),
        Product(layout.tokens, of_keys * grain, hidden),
        Product(layout.tokens, of_keys * grain, hidden),
        Product(layout.tokens, hidden, heads * grain),
        Product(layout.tokens, 2 * wide, hidden),
        Product(layout.tokens, hidden, wide),
    )


def _work(model: Model, layer: Layer, layout: WorkLayout) -> LayerWork:
    """Count products, attention, and what lies between them.

    Forward: norms (2 numbers each), sums with the residual stream (3), rotary (2), the gated unit
    (3 w), attention's result in the order of tokens (2). Backward: 3, 3, 2, 5 w and 2, and the sum
    of the three gradients of attention's input (6). PyTorch's norm works in fp32, operation by
    operation: six times the bytes; its rotary three times, its gated unit 5 w and 8 w.
    """
    if layer.kind == "embedding":
        return of_embedding(model, layout)
    if layer.kind == "head":
        return of_head(model, layout)
    heads, of_keys = _heads_of_rank(model, layout.tensor)
    turned = layout.tokens * (heads + of_keys) * head_dim(model)
    stream, columns = layout.rows * model.hidden, layout.tokens * heads * head_dim(model)
    gates = layout.tokens * layout.share(ffn(model))
    fused = "rms_norm" in layout.kernels
    of_norms, of_turns, of_gates = (1, 1, (3, 5)) if fused else (6, 3, (5, 8))
    norms = (2 + 2 * model.post_norms) * stream + model.qk_norm * turned
    cheap = of_norms * 2 * norms + of_gates[0] * gates
    forward = cheap + 6 * stream + of_turns * 2 * turned + 2 * columns
    backward = of_norms * 3 * norms + 12 * stream + of_turns * 2 * turned + of_gates[1] * gates
    extra = 2 * model.post_norms + 2 * model.qk_norm
    launches = (8 + extra, 16 + 3 * extra) if fused else (43 + 8 * extra, 69 + 17 * extra)
    attention = core(model, layer, layout, heads)
    return LayerWork(
        Pass(_block_products(model, layout), (attention,), layout.element * forward, launches[0]),
        Pass(bytes=layout.element * (backward + 2 * columns), launches=launches[1]),
        again=Pass(bytes=layout.element * cheap, launches=3 if fused else 18),
    )


LLAMA = Family(
    model="hpczero.model.llama:Llama",
    layers=_layers,
    operations=_operations,
    activations=_activations,
    work=_work,
    tensor_sums=SUMS_OF_ONE_STREAM,
    tensor_plan={
        "embedding.lookup": "vocabulary",
        "blocks.*.attention.inputs": "attention inputs",
        "blocks.*.attention.core": "attention core",
        "blocks.*.attention.query_norm": NORM_OF_HEADS,
        "blocks.*.attention.key_norm": NORM_OF_HEADS,
        "blocks.*.attention.output": "row",
        "blocks.*.feed_forward.up": "column",
        "blocks.*.feed_forward.down": "row",
        "head.logits": "column",
        "head.loss": "vocabulary loss",
    },
    sequence_plan={
        "embedding.dropout": "dropout of rows",
        "blocks.*.*.norm": NORM_OF_ROWS,
        "blocks.*.*.post_norm": NORM_OF_ROWS,
        "blocks.*.*.dropout": "dropout of rows",
        "head.norm": NORM_OF_ROWS,
    },
    cheap={
        "blocks.*.*.norm": "rms_norm",
        "blocks.*.*.post_norm": "rms_norm",
        "blocks.*.attention.query_norm": "rms_norm",
        "blocks.*.attention.key_norm": "rms_norm",
        "blocks.*.feed_forward": "glu",
    },
)
