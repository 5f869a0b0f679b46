"""The record of BERT: all that is known of it before it is built (pure).

Architecture and initial values: Devlin et al. 2019. The torch model is `model/bert.py`.
"""

from dataclasses import replace

from hpczero.model.gpt_record import (
    GPT,
    block,
    bytes_of_block,
    costs_of_blocks,
    norm_parameters,
    work_of_block,
)
from hpczero.model.layer_work import of_embedding, of_logits
from hpczero.model.moments import FORWARD_AND_BACKWARD, FP32, of_layers
from hpczero.model.shapes import (
    NORM_OF_ROWS,
    SUMS_OF_ONE_STREAM,
    ZEROS,
    ChunkLayout,
    Family,
    Initial,
    Layer,
    Moments,
    Parameter,
)
from hpczero.model.work import LayerWork, Pass, Product, WorkLayout
from hpczero.spec.schema import Model

_NORMAL = Initial("normal", 0.02)


def _layers(model: Model) -> list[Layer]:
    hidden = model.hidden
    first = norm_parameters("embedding.norm", hidden) if model.norm_order == "post" else ()
    lookup = (
        Parameter("embedding.lookup.tokens", (model.vocab, hidden), _NORMAL, split=0),
        Parameter("embedding.lookup.positions", (model.seq_len, hidden), _NORMAL),
        Parameter("embedding.lookup.segments", (2, hidden), _NORMAL),
    )
    names = tuple(one.name for one in lookup)
    embedding = Layer("embedding", (*lookup, *first), only_forward=names)
    blocks = [block(f"blocks.{index}", model, _NORMAL, _NORMAL) for index in range(model.layers)]
    return [embedding, *blocks, _head(model)]


def _head(model: Model) -> Layer:
    hidden = model.hidden
    last = norm_parameters("head.norm", hidden) if model.norm_order == "pre" else ()
    logits = Parameter("head.logits.weight", (model.vocab, hidden), _NORMAL, split=0)
    of_order = () if model.sentences == "none" else _linear("head.pooler", hidden, hidden)
    if of_order:
        of_order += _linear("head.sentences", 2, hidden)
    parameters = (
        *last,
        *_linear("head.transform", hidden, hidden),
        *norm_parameters("head.transform_norm", hidden),
        *(() if model.tied_embeddings else (logits,)),
        Parameter("head.logits.bias", (model.vocab,), ZEROS, split=0),
        *of_order,
    )
    uses = ("embedding.lookup.tokens",) if model.tied_embeddings else ()
    return Layer("head", parameters, uses=uses)


def _linear(name: str, outputs: int, inputs: int) -> tuple[Parameter, ...]:
    weight = Parameter(f"{name}.weight", (outputs, inputs), _NORMAL)
    return weight, Parameter(f"{name}.bias", (outputs,), ZEROS)


def _picked(model: Model, seq: int) -> int:
    return model.target_count(seq) + (model.sentences != "none")


def _operations(model: Model, seq: int) -> list[int]:
    """Count products: those of the head are made for targets alone."""
    hidden = model.hidden
    of_head = model.target_count(seq) * 2 * hidden * (hidden + model.vocab)
    if model.sentences != "none":
        of_head += 2 * hidden * (hidden + 2)
    costs = [seq * hidden, *(seq * cost for cost in costs_of_blocks(model, seq)), of_head]
    return [round(FORWARD_AND_BACKWARD * cost) for cost in costs]


def _activations(model: Model, tokens: int, element: int, part: ChunkLayout) -> Moments:
    """Count the activations: a norm after the embedding keeps its input; a head what it picks.

    Where norms come last, selective recomputation keeps the last one's result: the next block's
    input.
    """
    is_post = model.norm_order == "post"
    of_block = bytes_of_block(model, element, part, 1 if is_post else 2)
    found = of_layers(model, tokens, element, part, {"blocks": of_block})
    kept = 0.0
    if is_post and "embedding" in part.layers:
        rows = tokens / part.tensor if part.sequence else tokens
        kept += rows * (element * model.hidden + 2 * FP32)
    if "head" in part.layers:  # picked, transformed, its GELU, its norm
        kept += 3 * element * model.hidden * part.targets
    return Moments(found.kept + kept, found.forward.beside(kept), found.backward.beside(kept))


def _work(model: Model, layer: Layer, layout: WorkLayout) -> LayerWork:
    if layer.kind == "blocks":
        return work_of_block(model, layer, layout)
    hidden = model.hidden
    if layer.kind == "embedding":
        found = of_embedding(model, layout)
        rows = layout.element * layout.rows * hidden  # of the segments, and of the norm
        norm = 2 * rows if model.norm_order == "post" else 0.0
        forward, backward = Pass(bytes=2 * rows + norm, launches=2), Pass(bytes=rows + 1.5 * norm)
        return replace(found, forward=found.forward + forward, backward=found.backward + backward)
    targets = layout.samples * model.target_count(layout.seq_len)
    rows = layout.element * targets * hidden
    products = [Product(targets, hidden, hidden)]
    if model.sentences != "none":
        products += [Product(layout.samples, width, hidden) for width in (hidden, 2)]
    picked = Pass(tuple(products), (), 6 * rows, 4)
    loss = of_logits(model, layout, targets)
    stream = layout.element * layout.rows * hidden  # the gradient of what was not picked is 0
    return replace(
        loss,
        forward=picked + loss.forward,
        backward=loss.backward + Pass(bytes=2 * stream + 9 * rows, launches=8),
    )


BERT = Family(
    model="hpczero.model.bert:Bert",
    layers=_layers,
    operations=_operations,
    activations=_activations,
    work=_work,
    tensor_sums=SUMS_OF_ONE_STREAM | {"head": ((), ())},
    tensor_plan=dict(GPT.tensor_plan) | {"head.logits": "column of whole"},
    sequence_plan={
        "embedding.norm": NORM_OF_ROWS,
        "embedding.dropout": "dropout of rows",
        "blocks.*.*.norm": NORM_OF_ROWS,
        "blocks.*.*.dropout": "dropout of rows",
        "head.pick": "picked from rows",
    },
    cheap=GPT.cheap,
    picked=_picked,
)
