"""What a rank holds between forward and backward, estimated from the model's shapes (pure).

Counted are the tensors that PyTorch's operations keep for their backward in the models of `hpczero.model`, and what comes on top at each of
the moments that may be the widest, gradients on their way into the engine included. Measured peaks of GPTs were 0.85 to 1.2 times this, with
an allocator that returns what is freed; what malloc keeps for later (up to 0.1 GB was seen on small models) is not in it. Nor are the buffers in
which messages of other stages arrive: they are counted for themselves.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hpczero.model.shapes import ffn, head_dim, layers
from hpczero.parallel.held import Chunks, layers_that_run
from hpczero.planner.under_way import Moments, peak
from hpczero.spec.schema import Model, Spec

_FP32 = 4
_BLOCK = 1 << 18  # logits that tensor ranks have in fp32 at a time, twice


@dataclass(frozen=True)
class Part:
    """Of the model: so many layers of each kind ("blocks" -> 3), shared by so many tensor ranks; `sequence`: what lies between a layer's products
    is shared as well; `sends`: there are other parts.
    """

    layers: Counter[str]
    tensor: int
    sequence: bool
    sends: bool
    kernels: frozenset[str] = frozenset()  # `Platform.kernels`


def activations(
    spec: Spec,
    samples: int,
    chunks: Chunks | None = None,
    stage: int = 0,
    micro_batches: int = 1,
    kernels: frozenset[str] = frozenset(),
) -> int:
    """Bytes at the widest moment of a step, with micro-batches of so many sequences; `chunks` are the stage's, by default the whole model."""
    parallel, element = spec.parallel, 4 if spec.train.precision == "fp32" else 2
    parts = [
        Part(
            Counter(layer.name.partition(".")[0] for layer in layers_that_run([chunk])),
            parallel.tensor,
            parallel.sequence_parallel and parallel.tensor > 1,
            parallel.pipeline > 1,
            kernels,
        )
        for chunk in chunks or [layers(spec.model)]
    ]
    moments = [_FAMILIES[spec.model.family](spec.model, samples * spec.model.seq_len, element, part) for part in parts]
    return int(peak(parallel, moments, stage, micro_batches))


def _gpt(model: Model, tokens: int, element: int, part: Part) -> Moments:
    """A block keeps its input, the residual in its middle, both norms' outputs, query, key and value, attention's result, the wide part
    before and after its GELU; attention also a number per head, norms two. Dropout keeps nothing: it
    draws its mask again. PyTorch's cross-entropy goes from logits over fp32 ones to their log-softmax,
    which it keeps; its backward holds three fp32 tensors of that size. Our kernel keeps the logits and
    two numbers a token, and writes the gradient over the logits. The gradient of tied embeddings waits for the embedding's own, and autograd adds
    them into a third. Where a stage ends, its output is kept too, but the input of its first block lies in the buffer in which it came; the last
    gradient is on its way to the stage before.
    Tensor ranks share what belongs to heads, to columns of the feed-forward part, to tokens of the vocabulary, of which they keep the logits and
    write the gradient over them; with sequence parallelism the rest too, but for the input of a product, which is made whole for it.
    """
    ranks = part.tensor
    hidden = model.hidden / ranks if part.sequence else model.hidden
    inner, wide, vocab = model.heads * head_dim(model) / ranks, ffn(model) / ranks, model.vocab / ranks
    norms = 4 / ranks if part.sequence else 4
    masking = (2 * element + 1) * hidden if model.dropout else 0  # a gradient by a mask, in two steps
    block = element * (4 * hidden + 4 * inner + 2 * wide) + _FP32 * (model.heads / ranks + norms)
    kept = part.layers["blocks"] * block * tokens
    if part.sends and "embedding" in part.layers:
        kept += element * hidden * tokens
    in_flight = element * tokens * ((hidden if part.sends else 0) + (2 * model.hidden if part.sequence else 0))
    embedding = element * vocab * model.hidden
    waiting = embedding if model.tied_embeddings and "head" in part.layers else 0
    logits, of_head, forward, backward = element * vocab * tokens, 0.0, [kept], [kept]
    if "head" in part.layers:
        by_kernel = "cross_entropy" in part.kernels
        over_logits = by_kernel or ranks > 1
        of_head = element * hidden * tokens + (logits if over_logits else _FP32 * vocab * tokens)
        in_fp32 = 2 * min(_BLOCK, vocab * tokens) if over_logits else 3 * vocab * tokens
        in_fp32 = 2 * tokens if by_kernel else in_fp32
        loss = 2 * element * hidden * tokens + (logits if over_logits else 0) + _FP32 * in_fp32
        forward.append(kept + loss)
        backward += [kept + loss, kept + 2 * element * hidden * tokens + logits + embedding]
    if "blocks" in part.layers:
        of_block = element * 2 * (hidden + wide) * tokens + masking * tokens
        backward.append(kept + of_block + element * model.hidden * max(wide, 3 * inner) + waiting)
    if "embedding" in part.layers:
        backward.append(embedding + 2 * waiting + element * 2 * hidden * tokens)
    return Moments(kept + of_head, max(forward) + in_flight, max(backward) + in_flight)


_FAMILIES: dict[str, Callable[[Model, int, int, Part], Moments]] = {"gpt": _gpt}
