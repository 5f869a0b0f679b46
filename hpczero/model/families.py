"""hpczero's own families of models, by the spec's word for them (pure).

To add one: its torch model beside `gpt.py`, its record here.
"""

from hpczero.model.shapes import (
    NORM_OF_ROWS,
    ONES,
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
from hpczero.spec.schema import Model

# Operations whose kernels on GPUs change the memory that activations take (`ChunkLayout.kernels`).
KERNELS_THAT_CHANGE_MEMORY = frozenset({"cross_entropy"})

# What hpczero knows of GPT before it builds one (pure): the record of the family.
#
# GPT-2's architecture and initial values: Radford et al. 2019. The torch model is `model/gpt.py`.
_FP32 = 4  # bytes
_LOGITS_BLOCK = 1 << 18  # logits that tensor ranks have in fp32 at a time, twice
# Backward makes two products of the size of forward's: the gradients of the input and the weight.
_FORWARD_AND_BACKWARD = 3


def _layers(model: Model) -> list[Layer]:
    """Return the layers; projections into the residual stream start smaller."""
    normal = Initial("normal", 0.02)
    embedding = Layer(
        "embedding",
        (
            Parameter("embedding.lookup.tokens", (model.vocab, model.hidden), normal, split=0),
            Parameter("embedding.lookup.positions", (model.seq_len, model.hidden), normal),
        ),
        only_forward=True,
    )
    blocks = [_block(f"blocks.{index}", model, normal) for index in range(model.layers)]
    norm = _norm("head.norm", model.hidden)
    if model.tied_embeddings:
        head = Layer("head", norm, uses=("embedding.lookup.tokens",))
    else:
        logits = Parameter("head.logits.weight", (model.vocab, model.hidden), normal, split=0)
        head = Layer("head", (*norm, logits))
    return [embedding, *blocks, head]


def _block(name: str, model: Model, normal: Initial) -> Layer:
    hidden = model.hidden
    wide = ffn(model)
    grain = head_dim(model)
    inner = model.heads * grain
    into_residual = Initial("normal", normal.std / (2 * model.layers) ** 0.5)
    attention = f"{name}.attention"
    feed_forward = f"{name}.feed_forward"
    parameters = (
        *_norm(f"{attention}.norm", hidden),
        Parameter(f"{attention}.qkv.weight", (3, inner, hidden), normal, split=1, grain=grain),
        Parameter(f"{attention}.qkv.bias", (3, inner), ZEROS, split=1, grain=grain),
        Parameter(
            f"{attention}.output.weight", (hidden, inner), into_residual, split=1, grain=grain
        ),
        Parameter(f"{attention}.output.bias", (hidden,), ZEROS),
        *_norm(f"{feed_forward}.norm", hidden),
        Parameter(f"{feed_forward}.up.weight", (wide, hidden), normal, split=0),
        Parameter(f"{feed_forward}.up.bias", (wide,), ZEROS, split=0),
        Parameter(f"{feed_forward}.down.weight", (hidden, wide), into_residual, split=1),
        Parameter(f"{feed_forward}.down.bias", (hidden,), ZEROS),
    )
    return Layer(name, parameters)


def _norm(name: str, hidden: int) -> tuple[Parameter, Parameter]:
    weight = Parameter(f"{name}.weight", (hidden,), ONES)
    return weight, Parameter(f"{name}.bias", (hidden,), ZEROS)


def _operations(model: Model, seq: int) -> list[int]:
    """Count products of matrices, and of attention's queries with all keys.

    The embedding only adds what it looks up.
    """
    inner = model.heads * head_dim(model)
    weights = model.hidden * (4 * inner + 2 * ffn(model))
    block = 2 * weights + 4 * seq * inner
    costs = [model.hidden, *[block] * model.layers, 2 * model.hidden * model.vocab]
    return [_FORWARD_AND_BACKWARD * seq * cost for cost in costs]


def _activations(model: Model, tokens: int, element: int, part: ChunkLayout) -> Moments:
    """Count the activations of a GPT.

    A block keeps its input, the residual in its middle, both norms' outputs, query, key and value,
    attention's result, the wide activations before and after GELU; attention also a number per
    head, norms two. Dropout keeps nothing: it draws its mask again. A stage keeps its output too;
    the input of its first block lies in the receive buffer; its last gradient waits to be sent.

    Tensor ranks divide heads, columns of the feed-forward part and the vocabulary. With sequence
    parallelism they divide the other activations too, but gather the input of each product.
    """
    ranks = part.tensor
    hidden = model.hidden / ranks if part.sequence else model.hidden
    inner = model.heads * head_dim(model) / ranks
    wide = ffn(model) / ranks
    vocab = model.vocab / ranks
    norms = 4 / ranks if part.sequence else 4
    block = element * (4 * hidden + 4 * inner + 2 * wide) + _FP32 * (model.heads / ranks + norms)
    kept = part.layers["blocks"] * block * tokens
    if part.sends and "embedding" in part.layers:
        kept += element * hidden * tokens
    sent = hidden if part.sends else 0
    gathered = 2 * model.hidden if part.sequence else 0
    in_flight = element * tokens * (sent + gathered)
    embedding = element * vocab * model.hidden
    # The gradient of tied embeddings waits for the lookup's own; autograd adds them into a third.
    waiting = embedding if model.tied_embeddings and "head" in part.layers else 0
    of_head = 0.0
    forward = [kept]
    backward = [kept]
    if "head" in part.layers:
        of_head, loss = _loss(part, tokens, element, hidden, vocab)
        logits = element * vocab * tokens
        forward.append(kept + loss)
        backward += [kept + loss, kept + 2 * element * hidden * tokens + logits + embedding]
    if "blocks" in part.layers:
        masking = (2 * element + 1) * hidden if model.dropout else 0  # gradient by mask, two steps
        of_block = element * 2 * (hidden + wide) * tokens + masking * tokens
        backward.append(kept + of_block + element * model.hidden * max(wide, 3 * inner) + waiting)
    if "embedding" in part.layers:
        backward.append(embedding + 2 * waiting + element * 2 * hidden * tokens)
    return Moments(kept + of_head, max(forward) + in_flight, max(backward) + in_flight)


def _loss(
    part: ChunkLayout, tokens: int, element: int, hidden: float, vocab: float
) -> tuple[float, float]:
    """Return the bytes that the head keeps, and those of its loss at the widest moment.

    PyTorch's cross-entropy goes from logits over fp32 ones to their log-softmax, which it keeps;
    its backward holds three fp32 tensors of that size. hpczero's kernel, and tensor ranks, keep the
    logits and write the gradient over them; the kernel also keeps two numbers a token.
    """
    by_kernel = "cross_entropy" in part.kernels
    over_logits = by_kernel or part.tensor > 1
    logits = element * vocab * tokens
    kept = element * hidden * tokens + (logits if over_logits else _FP32 * vocab * tokens)
    in_fp32 = 3 * vocab * tokens
    if by_kernel:
        in_fp32 = 2 * tokens
    elif over_logits:
        in_fp32 = 2 * min(_LOGITS_BLOCK, vocab * tokens)
    return kept, 2 * element * hidden * tokens + (logits if over_logits else 0) + _FP32 * in_fp32


GPT = Family(
    model="hpczero.model.gpt:GPT",
    layers=_layers,
    operations=_operations,
    activations=_activations,
    tensor_sums={"embedding": (1, 0), "blocks": (2, 2), "head": (0, 1)},
    tensor_plan={
        "embedding.lookup": "vocabulary",
        "blocks.*.attention.qkv": "column",
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
)


FAMILIES: dict[str, Family] = {"gpt": GPT}


def family(model: Model) -> Family:
    return FAMILIES[model.family]


def layers(model: Model) -> list[Layer]:
    return family(model).layers(model)


def known(model: Model) -> bool:
    """Return True for hpczero's own families.

    The layers of "package.module:factory" are not known without building the model.
    """
    return model.family in FAMILIES


def layer_count(model: Model) -> int:
    """Return len(layers(model)) without listing the blocks."""
    return model.layers + len(layers(model.model_copy(update={"layers": 0})))


def parameter_count(model: Model) -> int:
    return sum(layer.size for layer in layers(model))
