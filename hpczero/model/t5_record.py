"""The record of T5: all that is known of it before it is built (pure).

Architecture and initial values: Raffel et al. 2020. The torch model is `model/t5.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpczero.model.attention_layouts import rule_of
from hpczero.model.layer_work import core, inside_attention, keys_counted, of_embedding, of_logits
from hpczero.model.moments import FORWARD_AND_BACKWARD, FP32, BlockBytes, of_layers
from hpczero.model.shapes import (
    NORM_OF_ROWS,
    ONES,
    SPLIT_OF_ROWS,
    ChunkLayout,
    Family,
    Initial,
    Layer,
    Moments,
    Parameter,
    ffn,
    gate,
    head_dim,
    number_of,
)
from hpczero.model.work import NOTHING, Core, LayerWork, Pass, Product, WorkLayout
from hpczero.spec.schema import Model

_ENCODER, _DECODER = 0, 1  # the streams


def _layers(model: Model) -> list[Layer]:
    normal = Initial("normal", 1.0)
    lookup = Parameter("embedding.lookup.tokens", (model.vocab, model.hidden), normal, split=0)
    last = Parameter("head.norm.weight", (model.hidden,), ONES)
    if model.tied_embeddings:
        head = Layer("head", (last,), uses=(lookup.name,))
    else:
        of_logits = Initial("normal", model.hidden**-0.5)
        logits = Parameter("head.logits.weight", lookup.shape, of_logits, split=0)
        head = Layer("head", (last, logits))
    return [
        Layer("embedding", (lookup,), only_forward=(lookup.name,)),
        Layer("positions", tuple(_bias(model, name) for name in ("encoder", "decoder"))),
        *(_encoder_block(model, index) for index in range(model.encoder_blocks)),
        *(_decoder_block(model, index) for index in range(model.decoder_blocks)),
        head,
    ]


def _bias(model: Model, stream: str) -> Parameter:
    shape = model.position_buckets, model.heads
    return Parameter(f"positions.{stream}", shape, Initial("normal", model.hidden**-0.5), split=1)


def _encoder_block(model: Model, index: int) -> Layer:
    name = f"encoder.{index}"
    parts = *_attention(f"{name}.attention", model), *_feed_forward(f"{name}.feed_forward", model)
    if index == model.encoder_blocks - 1:
        parts = *parts, _norm(f"{name}.last_norm", model)
    return Layer(name, parts, uses=("positions.encoder",))


def _decoder_block(model: Model, index: int) -> Layer:
    name = f"decoder.{index}"
    parts = (
        *_attention(f"{name}.attention", model),
        *_cross_attention(f"{name}.cross", model),
        *_feed_forward(f"{name}.feed_forward", model),
    )
    return Layer(name, parts, uses=("positions.decoder",))


def _norm(name: str, model: Model) -> Parameter:
    return Parameter(f"{name}.weight", (model.hidden,), ONES)


def _attention(name: str, model: Model) -> tuple[Parameter, ...]:
    inputs = f"{name}.inputs"
    return (
        _norm(f"{name}.norm", model),
        _heads(f"{inputs}.query", model, (model.hidden * head_dim(model)) ** -0.5),
        _heads(f"{inputs}.key", model, model.hidden**-0.5),
        _heads(f"{inputs}.value", model, model.hidden**-0.5),
        _output(name, model),
    )


def _cross_attention(name: str, model: Model) -> tuple[Parameter, ...]:
    memory = _heads(f"{name}.memory", model, model.hidden**-0.5)
    return (
        _norm(f"{name}.norm", model),
        _heads(f"{name}.query", model, (model.hidden * head_dim(model)) ** -0.5),
        replace(memory, shape=(2, *memory.shape), split=1, is_stack=True),
        _output(name, model),
    )


def _heads(name: str, model: Model, std: float) -> Parameter:
    """Return the map to all heads; that to queries is small, as logits have no scale."""
    shape = model.heads * head_dim(model), model.hidden
    grain = head_dim(model)
    return Parameter(f"{name}.weight", shape, Initial("normal", std), split=0, grain=grain)


def _output(name: str, model: Model) -> Parameter:
    grain = head_dim(model)
    inner = model.heads * grain
    of_output = Initial("normal", inner**-0.5)
    return Parameter(
        f"{name}.output.weight", (model.hidden, inner), of_output, split=1, grain=grain
    )


def _feed_forward(name: str, model: Model) -> tuple[Parameter, ...]:
    hidden, wide = model.hidden, ffn(model)
    of_up, of_down = (Initial("normal", width**-0.5) for width in (hidden, wide))
    up = Parameter(f"{name}.up.weight", (wide, hidden), of_up, split=0)
    if gate(model):
        up = replace(up, shape=(2, *up.shape), split=1, is_stack=True)
    return (
        _norm(f"{name}.norm", model),
        up,
        Parameter(f"{name}.down.weight", (hidden, wide), of_down, split=1),
    )


def _operations(model: Model, seq: int) -> list[int]:
    """Count products of matrices, and of attention's queries with the keys of `keys_counted`."""
    encoder, decoder = model.streams(seq)
    first = model.encoder_blocks
    in_encoder = [keys_counted(model, layer, encoder) for layer in range(first)]
    in_decoder = [keys_counted(model, layer, decoder) for layer in range(first, model.layers)]
    hidden, inner = model.hidden, model.heads * head_dim(model)
    of_ffn = 2 * hidden * ffn(model) * (3 if gate(model) else 2)
    of_attention = 8 * hidden * inner + of_ffn
    # cross-attention, and its maps
    of_cross = decoder * 4 * encoder * inner + (decoder + encoder) * 4 * hidden * inner
    costs = [
        seq * hidden,
        0,
        *(encoder * (of_attention + 4 * keys * inner) for keys in in_encoder),
        *(decoder * (of_attention + 4 * keys * inner) + of_cross for keys in in_decoder),
        2 * decoder * hidden * model.vocab,
    ]
    return [round(FORWARD_AND_BACKWARD * cost) for cost in costs]


def _activations(model: Model, tokens: int, element: int, part: ChunkLayout) -> Moments:
    """Count the activations.

    A block keeps its input, both streams; of its own one the residual between its parts, what norms
    and maps make, and attention's results; of the decoder also the keys and values of the encoder;
    in blocks a bias for each head and distance.
    """
    encoder, decoder = (length / part.seq_len for length in model.streams(part.seq_len))
    of_blocks = {
        "encoder": _block_bytes(model, tokens, element, part, (encoder, 0.0)),
        "decoder": _block_bytes(model, tokens, element, part, (decoder, encoder)),
    }
    return of_layers(model, tokens, element, part, of_blocks)


def _block_bytes(
    model: Model, tokens: int, element: int, part: ChunkLayout, shares: tuple[float, float]
) -> BlockBytes:
    """Count the bytes of a block for a token of both streams.

    `shares` of the tokens: of its own stream, and of the one that it looks at.
    """
    own, other = shares
    attentions = 2 if other else 1
    ranks = part.tensor
    hidden = model.hidden / ranks if part.sequence else model.hidden
    inner = model.heads * head_dim(model) / ranks
    wide = ffn(model) / ranks
    stored = (3 if "glu" in part.kernels else 4) if gate(model) else 1
    first, end = (model.encoder_blocks, model.layers) if other else (0, model.encoder_blocks)
    sparse = [rule_of(model, layer) is not None for layer in range(first, end)]
    in_blocks = sum(sparse) / max(1, len(sparse))  # share of the stream's layers
    norms = (1 + attentions) / (ranks if part.sequence else 1)
    normed = (1 + attentions) * hidden
    of_own = (1 + attentions) * hidden + attentions * hidden  # norms' results, residuals
    of_own += (2 + 2 * attentions) * inner + stored * wide
    heads = model.heads / ranks
    kept = element * (hidden + own * of_own + other * 2 * inner)
    kept += FP32 * own * (attentions * heads + norms)
    kept += in_blocks * FP32 * heads * 2 * own * part.seq_len / max(1, tokens)
    if "relative_attention" not in part.kernels:
        length = own * part.seq_len
        # in blocks the mask, too, and probabilities before what sees nothing is left out
        of_blocks = in_blocks * (1 + FP32 if element == FP32 else 1)
        of_pair = of_blocks + (FP32 if element == FP32 else FP32 + element)
        kept += own * heads * (of_pair * length - FP32) + 8 * length**2 / tokens  # and classes
    of_norms = 0.0  # bytes that PyTorch's norms keep beyond the inputs counted above
    if "rms_norm" not in part.kernels:
        of_norms = own * (2 * FP32 - element) * normed
        # In half precision copies take the place of inputs. The first norm's is a slice of the
        # block's input, which an encoder block then frees, and a decoder block keeps: its memory
        # map reads the encoder's part.
        if element < FP32:
            of_norms += element * (own * hidden if other else (own - 1) * hidden)
    cheap = own * (FP32 * norms + element * (normed + max(0, stored - 2) * wide)) + of_norms
    of_head = 4 * FP32 * max(own, other) * part.seq_len  # probabilities, and what follows of them
    widest = max(element * 4 * wide, element * 6 * inner + of_head * (in_blocks < 1))
    if in_blocks:
        of_bias = FP32 * 4 * heads
        widest = max(widest, inside_attention(model, element, inner, inner) + of_bias)
    product = element * model.hidden * max((2 if gate(model) else 1) * wide, 2 * inner)
    return BlockBytes(kept + of_norms, cheap, own * widest, product)


def _work(model: Model, layer: Layer, layout: WorkLayout) -> LayerWork:
    """Count products, attention, and what lies between them, as `llama_record` does."""
    encoder, decoder = model.streams(layout.seq_len)
    if layer.kind == "embedding":
        found = of_embedding(model, layout)
        joined = Pass(bytes=2 * layout.element * layout.rows * model.hidden, launches=1)
        return replace(found, forward=found.forward + joined, backward=found.backward + joined)
    if layer.kind == "positions":
        return LayerWork(NOTHING, NOTHING)
    if layer.kind == "head":
        targets = layout.samples * decoder
        rows = layout.element * targets * model.hidden
        loss = of_logits(model, layout, targets)
        both = layout.element * layout.rows * model.hidden
        scales = 2 * rows if model.tied_embeddings else 0.0
        return replace(
            loss,
            forward=loss.forward + Pass(bytes=2 * rows + scales, launches=2),
            backward=loss.backward + Pass(bytes=4 * rows + scales + both, launches=3),
        )
    if layer.kind == "encoder":
        return _work_of_block(model, layer, layout, (encoder, 0))
    return _work_of_block(model, layer, layout, (decoder, encoder))


def _work_of_block(
    model: Model, layer: Layer, layout: WorkLayout, lengths: tuple[int, int]
) -> LayerWork:
    """Return the work of a block on its own positions, and on those that it looks at, if any.

    Dense attention with a bias is made of products, so its probabilities are moved: eight numbers
    for each pair in forward, and twelve in backward, in fp32. In blocks they stay in a cache.
    """
    own, other = lengths
    heads, wide = layout.share(model.heads), layout.share(ffn(model))
    inner, hidden, element = heads * head_dim(model), model.hidden, layout.element
    tokens, seen = layout.samples * own, layout.samples * other
    up = 2 * wide if gate(model) else wide
    products = [
        *[Product(tokens, inner, hidden)] * 3,
        Product(tokens, hidden, inner),
        Product(tokens, up, hidden),
        Product(tokens, hidden, wide),
    ]
    cores = [core(model, layer, layout, heads)]
    if other:
        products += [
            Product(tokens, inner, hidden),
            Product(seen, 2 * inner, hidden),
            Product(tokens, hidden, inner),
        ]
        cores.append(Core(layout.samples * heads, own, other, other, head_dim(model)))
    parts = 3 if other else 2
    share = layout.rows / layout.tokens
    stream, both = tokens * hidden * share, (tokens + seen) * hidden * share
    fused = "rms_norm" in layout.kernels
    of_norms = 1 if fused else 6
    of_gates = (up + wide, 2 * up + wide)
    if gate(model) and not fused:
        of_gates = 5 * wide, 8 * wide
    cheap = 2 * of_norms * parts * stream + tokens * of_gates[0]
    forward = cheap + 3 * parts * stream + 2 * both + (parts - 1) * 2 * tokens * inner
    backward = (3 * of_norms + 6) * parts * stream + 2 * both + tokens * of_gates[1]
    backward += (parts - 1) * 8 * tokens * inner
    in_blocks = rule_of(model, number_of(model, layer)) is not None
    pairs = 0.0 if in_blocks else FP32 * layout.samples * heads * own * own
    launches = (8 * parts, 16 * parts) if fused else (21 * parts, 36 * parts)
    return LayerWork(
        Pass(tuple(products), tuple(cores), element * forward + 8 * pairs, launches[0]),
        Pass(bytes=element * backward + 12 * pairs, launches=launches[1]),
        again=Pass(bytes=element * cheap, launches=parts + 1 if fused else 8 * parts + 2),
    )


def _of_blocks(words: Mapping[str, str], kinds: Sequence[str]) -> dict[str, str]:
    return {f"{kind}.*.{name}": word for kind in kinds for name, word in words.items()}


_BOTH = ("encoder", "decoder")
_CROSS = {"query": "column", "memory": "column", "output": "row"}

T5 = Family(
    model="hpczero.model.t5:T5",
    layers=_layers,
    operations=_operations,
    activations=_activations,
    work=_work,
    tensor_sums={
        "embedding": ((_ENCODER, _DECODER), ()),
        "positions": ((), ()),
        "encoder": ((_ENCODER, _ENCODER), (_ENCODER, _ENCODER)),
        "decoder": ((_DECODER,) * 3, (*(_DECODER,) * 3, _ENCODER)),
        "head": ((), (_DECODER,)),
    },
    tensor_plan={
        "embedding.lookup": "vocabulary",
        **_of_blocks(
            {
                "attention.inputs": "attention inputs",
                "attention.core": "attention core",
                "attention.output": "row",
                "feed_forward.up": "column",
                "feed_forward.down": "row",
            },
            _BOTH,
        ),
        **{f"decoder.*.cross.{name}": role for name, role in _CROSS.items()},
        "head.logits": "column",
        "head.loss": "vocabulary loss",
    },
    sequence_plan={
        "embedding.streams": SPLIT_OF_ROWS,
        "embedding.*_dropout": "dropout of rows",
        "encoder.*.last_norm": NORM_OF_ROWS,
        **_of_blocks(
            {"streams": SPLIT_OF_ROWS, "*.norm": NORM_OF_ROWS, "*.dropout": "dropout of rows"},
            _BOTH,
        ),
        "head.streams": SPLIT_OF_ROWS,
        "head.norm": NORM_OF_ROWS,
    },
    stream_of={
        "embedding.encoder_dropout": _ENCODER,
        "embedding.decoder_dropout": _DECODER,
        "encoder.*.last_norm": _ENCODER,
        "encoder.*.*.*": _ENCODER,
        "decoder.*.attention.*": _DECODER,
        "decoder.*.feed_forward.*": _DECODER,
        "decoder.*.cross.memory": _ENCODER,
        **{f"decoder.*.cross.{name}": _DECODER for name in ("norm", "query", "output", "dropout")},
        "head.norm": _DECODER,
        "head.logits": _DECODER,
    },
    cheap=_of_blocks({"*.norm": "rms_norm", "feed_forward": "activation"}, _BOTH)
    | {"encoder.*.last_norm": "rms_norm"},
)
