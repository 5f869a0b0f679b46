"""The record of GPT: all that is known of it before it is built (pure).

GPT-2's architecture and initial values: Radford et al. 2019. The torch model is `model/gpt.py`.
"""

from hpczero.model.layer_work import core, inside_attention, keys_counted, of_embedding, of_head
from hpczero.model.moments import FORWARD_AND_BACKWARD, FP32, BlockBytes, of_layers
from hpczero.model.shapes import (
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
)
from hpczero.model.work import LayerWork, Pass, Product, WorkLayout
from hpczero.spec.schema import Model


def _layers(model: Model) -> list[Layer]:
    """Return the layers; projections into the residual stream start smaller."""
    normal = Initial("normal", 0.02)
    lookup = (
        Parameter("embedding.lookup.tokens", (model.vocab, model.hidden), normal, split=0),
        Parameter("embedding.lookup.positions", (model.seq_len, model.hidden), normal),
    )
    embedding = Layer("embedding", lookup, only_forward=tuple(one.name for one in lookup))
    into_residual = Initial("normal", normal.std / (2 * max(1, model.layers)) ** 0.5)
    blocks = [
        block(f"blocks.{index}", model, normal, into_residual) for index in range(model.layers)
    ]
    norm = norm_parameters("head.norm", model.hidden)
    if model.tied_embeddings:
        head = Layer("head", norm, uses=("embedding.lookup.tokens",))
    else:
        logits = Parameter("head.logits.weight", (model.vocab, model.hidden), normal, split=0)
        head = Layer("head", (*norm, logits))
    return [embedding, *blocks, head]


def block(name: str, model: Model, normal: Initial, into_residual: Initial) -> Layer:
    hidden = model.hidden
    wide = ffn(model)
    grain = head_dim(model)
    inner = model.heads * grain
    attention = f"{name}.attention"
    feed_forward = f"{name}.feed_forward"
    parameters = (
        *norm_parameters(f"{attention}.norm", hidden),
        Parameter(
            f"{attention}.qkv.weight",
            (3, inner, hidden),
            normal,
            split=1,
            grain=grain,
            is_stack=True,
        ),
        Parameter(f"{attention}.qkv.bias", (3, inner), ZEROS, split=1, grain=grain),
        Parameter(
            f"{attention}.output.weight", (hidden, inner), into_residual, split=1, grain=grain
        ),
        Parameter(f"{attention}.output.bias", (hidden,), ZEROS),
        *norm_parameters(f"{feed_forward}.norm", hidden),
        Parameter(f"{feed_forward}.up.weight", (wide, hidden), normal, split=0),
        Parameter(f"{feed_forward}.up.bias", (wide,), ZEROS, split=0),
        Parameter(f"{feed_forward}.down.weight", (hidden, wide), into_residual, split=1),
        Parameter(f"{feed_forward}.down.bias", (hidden,), ZEROS),
    )
    return Layer(name, parameters)


def norm_parameters(name: str, hidden: int) -> tuple[Parameter, Parameter]:
    weight = Parameter(f"{name}.weight", (hidden,), ONES)
    return weight, Parameter(f"{name}.bias", (hidden,), ZEROS)


def _operations(model: Model, seq: int) -> list[int]:
    """Count products of matrices, and of attention's queries with the keys of `keys_counted`.

    The embedding only adds what it looks up.
    """
    costs = [model.hidden, *costs_of_blocks(model, seq), 2 * model.hidden * model.vocab]
    return [round(FORWARD_AND_BACKWARD * seq * cost) for cost in costs]


def costs_of_blocks(model: Model, seq: int) -> list[float]:
    """Return the operations of each block's forward for a token."""
    inner = model.heads * head_dim(model)
    weights = model.hidden * (4 * inner + 2 * ffn(model))
    return [
        2 * weights + 4 * keys_counted(model, index, seq) * inner for index in range(model.layers)
    ]


def _activations(model: Model, tokens: int, element: int, part: ChunkLayout) -> Moments:
    return of_layers(
        model, tokens, element, part, {"blocks": bytes_of_block(model, element, part, 2)}
    )


def bytes_of_block(model: Model, element: int, part: ChunkLayout, made_again: int) -> BlockBytes:
    """Count the bytes of a block for a token.

    It keeps its input, the residual in its middle, both norms' outputs (where norms come last their
    inputs), query, key and value, attention's result, the wide activations before and after GELU;
    attention also a number per head, norms two. Tensor ranks divide heads and columns of the
    feed-forward part; with sequence parallelism also the other activations. `made_again`: results
    of norms that selective recomputation does not keep.
    """
    ranks = part.tensor
    hidden = model.hidden / ranks if part.sequence else model.hidden
    inner = model.heads * head_dim(model) / ranks
    wide = ffn(model) / ranks
    norms = 4 / ranks if part.sequence else 4
    kept = element * (4 * hidden + 4 * inner + 2 * wide) + FP32 * (model.heads / ranks + norms)
    product = element * model.hidden * max(wide, 3 * inner)
    cheap = element * (made_again * hidden + wide) + FP32 * norms
    widest = max(element * 2 * wide, inside_attention(model, element, inner, inner))
    return BlockBytes(kept, cheap, widest, product)


def _work(model: Model, layer: Layer, layout: WorkLayout) -> LayerWork:
    if layer.kind == "embedding":
        return of_embedding(model, layout)
    if layer.kind == "head":
        return of_head(model, layout)
    return work_of_block(model, layer, layout)


def work_of_block(model: Model, layer: Layer, layout: WorkLayout) -> LayerWork:
    """Count products, attention, and what lies between them.

    Forward: both norms (h + h each), both sums with the residual stream (3 h), GELU (2 w), and
    attention's result in the order of tokens (2 i). Backward: norms 3 h, sums 3 h, GELU 3 w; the
    gradient of queries, keys and values side by side (6 i) and of the result (2 i); biases' sums.
    """
    heads, wide = layout.share(model.heads), layout.share(ffn(model))
    inner = heads * head_dim(model)
    tokens, hidden = layout.tokens, model.hidden
    products = (
        Product(tokens, 3 * inner, hidden),
        Product(tokens, hidden, inner),
        Product(tokens, wide, hidden),
        Product(tokens, hidden, wide),
    )
    # elements moved: of the residual stream's rows, and of the columns of this rank
    stream, columns = layout.rows * hidden, tokens * inner
    cheap = 4 * stream + 2 * tokens * wide
    forward = layout.element * (cheap + 6 * stream + 2 * columns)
    backward = layout.element * (14 * stream + 11 * columns + 4 * tokens * wide)
    masks = layout.element * 4 * stream if model.dropout else 0.0
    attention = core(model, layer, layout, heads)
    return LayerWork(
        Pass(products, (attention,), forward + masks, 7),
        Pass(bytes=backward + masks, launches=20),
        again=Pass(bytes=layout.element * cheap, launches=3),
    )


GPT = Family(
    model="hpczero.model.gpt:GPT",
    layers=_layers,
    operations=_operations,
    activations=_activations,
    work=_work,
    tensor_sums=SUMS_OF_ONE_STREAM,
    tensor_plan={
        "embedding.lookup": "vocabulary",
        "blocks.*.attention.qkv": "column",
        "blocks.*.attention.core": "attention core",
        "blocks.*.attention.output": "row",
        "blocks.*.feed_forward.up": "column",
        "blocks.*.feed_forward.down": "row",
        "head.logits": "column",
        "head.loss": "vocabulary loss",
    },
    sequence_plan={
        "embedding.dropout": "dropout of rows",
        "blocks.*.*.norm": NORM_OF_ROWS,
        "blocks.*.*.dropout": "dropout of rows",
        "head.norm": NORM_OF_ROWS,
    },
    cheap={"blocks.*.*.norm": "layer_norm", "blocks.*.feed_forward": "gelu"},
)
