"""Names and shapes of weights as Hugging Face has them, and where their elements lie in hpczero's
parameters (pure).

A row of a table says: these parameters of hpczero, one after the other in memory order, are these
tensors of the file, one after the other. So fused and stacked weights are ranges of others'.
`transposed` tensors are in the file as [inputs, outputs].
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from hpczero.checkpoint.views import Part, View
from hpczero.huggingface.architectures import Architecture
from hpczero.model.families import layers
from hpczero.spec.schema import Model


@dataclass(frozen=True)
class Row:
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    transposed: bool = False
    dims: int = 0  # the row is for parameters of so many dimensions alone; 0: for all


def _of_modules(ours: str, theirs: str, *suffixes: str, transposed: bool = False) -> list[Row]:
    """Return the rows of modules' parameters; several modules are joined by +."""
    return [
        Row(
            tuple(f"{module}.{suffix}" for module in ours.split("+")),
            tuple(f"{module}.{suffix}" for module in theirs.split("+")),
            transposed and suffix == "weight",
        )
        for suffix in suffixes
    ]


_BOTH = ("weight", "bias")
_ENDS = [
    Row(("embedding.lookup.tokens",), ("model.embed_tokens.weight",)),
    Row(("head.norm.weight",), ("model.norm.weight",)),
    Row(("head.logits.weight",), ("lm_head.weight",)),
]
_ATTENTION = [
    *_of_modules("attention.norm", "input_layernorm", "weight"),
    *_of_modules("attention.query_norm", "self_attn.q_norm", "weight"),
    *_of_modules("attention.key_norm", "self_attn.k_norm", "weight"),
    *_of_modules("attention.output", "self_attn.o_proj", *_BOTH),
]
_APART = [
    *_of_modules("attention.inputs.query", "self_attn.q_proj", *_BOTH),
    *_of_modules("attention.inputs.key", "self_attn.k_proj", *_BOTH),
    *_of_modules("attention.inputs.value", "self_attn.v_proj", *_BOTH),
    *_of_modules("feed_forward.up", "mlp.gate_proj+mlp.up_proj", *_BOTH),
]
_FUSED = [
    *_of_modules(
        "attention.inputs.query+attention.inputs.key+attention.inputs.value",
        "self_attn.qkv_proj",
        "weight",
    ),
    *_of_modules("feed_forward.up", "mlp.gate_up_proj", "weight"),
]
_DOWN = _of_modules("feed_forward.down", "mlp.down_proj", *_BOTH)
_TWO_NORMS = _of_modules("feed_forward.norm", "post_attention_layernorm", "weight")
_FOUR_NORMS = [
    *_of_modules("attention.post_norm", "post_attention_layernorm", "weight"),
    *_of_modules("feed_forward.norm", "pre_feedforward_layernorm", "weight"),
    *_of_modules("feed_forward.post_norm", "post_feedforward_layernorm", "weight"),
]
_GPT2_ENDS = [
    Row(("embedding.lookup.tokens",), ("transformer.wte.weight",)),
    Row(("embedding.lookup.positions",), ("transformer.wpe.weight",)),
    *_of_modules("head.norm", "transformer.ln_f", *_BOTH),
    Row(("head.logits.weight",), ("lm_head.weight",)),
]
_GPT2_BLOCK = [
    *_of_modules("attention.norm", "ln_1", *_BOTH),
    *_of_modules("attention.qkv", "attn.c_attn", *_BOTH, transposed=True),
    *_of_modules("attention.output", "attn.c_proj", *_BOTH, transposed=True),
    *_of_modules("feed_forward.norm", "ln_2", *_BOTH),
    *_of_modules("feed_forward.up", "mlp.c_fc", *_BOTH, transposed=True),
    *_of_modules("feed_forward.down", "mlp.c_proj", *_BOTH, transposed=True),
]


_BERT_HEAD = [
    *_of_modules("head.transform", "cls.predictions.transform.dense", *_BOTH),
    *_of_modules("head.transform_norm", "cls.predictions.transform.LayerNorm", *_BOTH),
    Row(("head.logits.bias",), ("cls.predictions.bias",)),
    *_of_modules("head.pooler", "bert.pooler.dense", *_BOTH),
    *_of_modules("head.sentences", "cls.seq_relationship", *_BOTH),
]
_BERT_ENDS = [
    Row(("embedding.lookup.tokens",), ("bert.embeddings.word_embeddings.weight",)),
    Row(("embedding.lookup.positions",), ("bert.embeddings.position_embeddings.weight",)),
    Row(("embedding.lookup.segments",), ("bert.embeddings.token_type_embeddings.weight",)),
    *_of_modules("embedding.norm", "bert.embeddings.LayerNorm", *_BOTH),
    *_of_modules("head.norm", "bert.encoder.ln", *_BOTH),
    *_BERT_HEAD,
]
_BERT_BLOCK = [
    *_of_modules(
        "attention.qkv",
        "attention.self.query+attention.self.key+attention.self.value",
        *_BOTH,
    ),
    *_of_modules("attention.output", "attention.output.dense", *_BOTH),
    *_of_modules("feed_forward.up", "intermediate.dense", *_BOTH),
    *_of_modules("feed_forward.down", "output.dense", *_BOTH),
]
_NORMS_LAST = [
    *_of_modules("attention.norm", "attention.output.LayerNorm", *_BOTH),
    *_of_modules("feed_forward.norm", "output.LayerNorm", *_BOTH),
]
_NORMS_FIRST = [
    *_of_modules("attention.norm", "attention.ln", *_BOTH),
    *_of_modules("feed_forward.norm", "ln", *_BOTH),
]


# Blocks of T5 number their parts: attention, that of the decoder to the encoder, feed-forward.
_T5_ENDS = [
    Row(("embedding.lookup.tokens",), ("shared.weight",)),
    *(
        Row(
            (f"positions.{stack}",),
            (f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
        )
        for stack in ("encoder", "decoder")
    ),
    Row(("head.norm.weight",), ("decoder.final_layer_norm.weight",)),
    Row(("head.logits.weight",), ("lm_head.weight",)),
]
_T5_ATTENTION = [
    *_of_modules("attention.norm", "layer.0.layer_norm", "weight"),
    *_of_modules("attention.inputs.query", "layer.0.SelfAttention.q", "weight"),
    *_of_modules("attention.inputs.key", "layer.0.SelfAttention.k", "weight"),
    *_of_modules("attention.inputs.value", "layer.0.SelfAttention.v", "weight"),
    *_of_modules("attention.output", "layer.0.SelfAttention.o", "weight"),
]
_T5_CROSS_ATTENTION = [
    *_of_modules("cross.norm", "layer.1.layer_norm", "weight"),
    *_of_modules("cross.query", "layer.1.EncDecAttention.q", "weight"),
    *_of_modules("cross.memory", "layer.1.EncDecAttention.k+layer.1.EncDecAttention.v", "weight"),
    *_of_modules("cross.output", "layer.1.EncDecAttention.o", "weight"),
]


def _t5_feed_forward(part: str) -> list[Row]:
    inner = f"{part}.DenseReluDense"
    up = "feed_forward.up.weight"
    return [
        *_of_modules("feed_forward.norm", f"{part}.layer_norm", "weight"),
        Row((up,), (f"{inner}.wi.weight",), dims=2),
        Row((up,), (f"{inner}.wi_0.weight", f"{inner}.wi_1.weight"), dims=3),  # a gate, values
        *_of_modules("feed_forward.down", f"{inner}.wo", "weight"),
    ]


@dataclass(frozen=True)
class Blocks:
    """Blocks of one kind: the rows are below "kind.N." and below the prefix of block N."""

    kind: str  # of hpczero's layers
    prefix: str
    rows: Sequence[Row]
    of_last: Sequence[Row] = ()  # parameters of the last one that have whole names in the file


@dataclass(frozen=True)
class Names:
    ends: Sequence[Row]  # outside blocks, by their whole names
    blocks: Sequence[Blocks]
    unused: tuple[str, ...]  # endings of tensors that older files have and no model needs
    outer: str  # how names begin, but not in files of a model without its head
    older: Mapping[str, str] = field(default_factory=dict)  # endings of names as they were


def _llama(*rows: Row) -> Names:
    unused = (".rotary_emb.inv_freq",)
    return Names(_ENDS, [Blocks("blocks", "model.layers.{}.", rows)], unused, "model.")


_UNUSED_BY_BERT = (
    ".position_ids",
    "cls.predictions.decoder.weight",  # the same as the embedding's
    "cls.predictions.decoder.bias",  # the same as cls.predictions.bias
    *("bert.pooler.dense.weight", "bert.pooler.dense.bias"),  # of a model for masked tokens alone
    *("cls.seq_relationship.weight", "cls.seq_relationship.bias"),
)
_UNUSED_BY_T5 = (
    *("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),  # the same as shared.weight
    ".layer.1.EncDecAttention.relative_attention_bias.weight",
)
_OF_TENSORFLOW = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
NAMES = {
    "llama": _llama(*_ATTENTION, *_APART, *_DOWN, *_TWO_NORMS),
    "gemma": _llama(*_ATTENTION, *_APART, *_DOWN, *_FOUR_NORMS),
    "phi3": _llama(*_ATTENTION, *_FUSED, *_DOWN, *_TWO_NORMS),
    "gpt2": Names(
        _GPT2_ENDS,
        [Blocks("blocks", "transformer.h.{}.", _GPT2_BLOCK)],
        (".attn.bias", ".attn.masked_bias"),
        "transformer.",
    ),
    "bert": Names(
        _BERT_ENDS,
        [Blocks("blocks", "bert.encoder.layer.{}.", [*_BERT_BLOCK, *_NORMS_LAST])],
        _UNUSED_BY_BERT,
        "bert.",
        _OF_TENSORFLOW,
    ),
    "megatron-bert": Names(
        _BERT_ENDS,
        [Blocks("blocks", "bert.encoder.layer.{}.", [*_BERT_BLOCK, *_NORMS_FIRST])],
        _UNUSED_BY_BERT,
        "bert.",
    ),
    "t5": Names(
        _T5_ENDS,
        [
            Blocks(
                "encoder",
                "encoder.block.{}.",
                [*_T5_ATTENTION, *_t5_feed_forward("layer.1")],
                _of_modules("last_norm", "encoder.final_layer_norm", "weight"),
            ),
            Blocks(
                "decoder",
                "decoder.block.{}.",
                [*_T5_ATTENTION, *_T5_CROSS_ATTENTION, *_t5_feed_forward("layer.2")],
            ),
        ],
        _UNUSED_BY_T5,
        "",
    ),
}


def views(architecture: Architecture, model: Model) -> list[View]:
    """Return the tensors of a file, in the order in which hpczero has their parameters."""
    shapes = {
        parameter.name: parameter.shape for layer in layers(model) for parameter in layer.parameters
    }
    counts = Counter(layer.kind for layer in layers(model))
    rows = _rows(NAMES[architecture.weights], counts)
    found = [view for row in rows for view in _views(row, shapes)]
    parts = {part.parameter for view in found for part in view.parts}
    assert parts == shapes.keys(), f"{architecture.name} lacks {shapes.keys() - parts}"
    place = {name: number for number, name in enumerate(shapes)}
    return sorted(found, key=lambda view: place[view.parts[0].parameter])


def _rows(names: Names, counts: Mapping[str, int]) -> Iterator[Row]:
    """Yield the rows of a model with so many blocks of each kind, by whole names."""
    yield from names.ends
    for blocks in names.blocks:
        for index in range(counts[blocks.kind]):
            prefix = blocks.prefix.format(index)
            for row in blocks.rows:
                yield _below(row, f"{blocks.kind}.{index}.", prefix)
            if index == counts[blocks.kind] - 1:
                yield from (_below(row, f"{blocks.kind}.{index}.", "") for row in blocks.of_last)


def _below(row: Row, ours: str, theirs: str) -> Row:
    return replace(
        row,
        ours=tuple(ours + name for name in row.ours),
        theirs=tuple(theirs + name for name in row.theirs),
    )


def _views(row: Row, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[View]:
    """Yield the tensors of a row; none if the model lacks these parameters, or has others."""
    if not all(name in shapes for name in row.ours):
        return
    first = shapes[row.ours[0]]
    if row.dims not in (0, len(first)):
        return
    is_vector = len(first) == 1 or row.ours[0].endswith(".bias")
    inner = () if is_vector else first[-1:]
    size = sum(prod(shapes[name]) for name in row.ours)
    rows = size // prod(inner) // len(row.theirs)
    parts = [Part(name, 0, prod(shapes[name])) for name in row.ours]
    for number, name in enumerate(row.theirs):
        start = number * (size // len(row.theirs))
        stop = start + size // len(row.theirs)
        shape = (*inner, rows) if row.transposed else (rows, *inner)
        yield View(name, shape, tuple(_between(parts, start, stop)), row.transposed)


def _between(parts: Sequence[Part], start: int, stop: int) -> Iterator[Part]:
    """Cut elements start .. stop - 1 out of parts that follow each other."""
    begin = 0
    for part in parts:
        first, last = max(start - begin, 0), min(stop - begin, part.stop)
        if first < last:
            yield Part(part.parameter, first, last)
        begin += part.stop
