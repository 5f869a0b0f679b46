"""What a micro-batch holds between forward and backward, estimated from the model's shapes (pure).

Counted are the tensors that PyTorch's operations keep for their backward in the models of `hpczero.model`, and what comes on top at each of
the moments that may be the widest, gradients on their way into the engine included. Measured peaks of GPTs were 0.93 to 1.2 times this, with
an allocator that returns what is freed; what malloc keeps for later (up to 0.1 GB was seen on small models) is not in it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hpczero.model.shapes import ffn, head_dim
from hpczero.parallel.held import Chunks, layers_that_run
from hpczero.spec.schema import Model, Parallel, Spec

_FP32 = 4
_IN_FLIGHT = 4  # outputs and gradients on their way from or to other stages


@dataclass(frozen=True)
class Runs:
    """What a rank runs: so many layers of each kind ("blocks" -> 3), whose activations it keeps of `live` micro-batches at most, shared by so
    many tensor ranks; `sequence`: what lies between a layer's products is shared as well.
    """

    layers: dict[str, int]
    live: float = 1
    tensor: int = 1
    sequence: bool = False
    sends: bool = False


def runs(spec: Spec, chunks: Chunks, stage: int, micro_batches: int) -> Runs:
    kinds = [layer.name.partition(".")[0] for layer in layers_that_run(chunks)]
    parallel = spec.parallel
    live = live_chunks(parallel, stage, micro_batches) / len(chunks)
    counts = {kind: kinds.count(kind) for kind in set(kinds)}
    return Runs(counts, live, parallel.tensor, parallel.sequence_parallel and parallel.tensor > 1, parallel.pipeline > 1)


def live_chunks(parallel: Parallel, stage: int, micro_batches: int) -> int:
    """Micro-batches times chunks whose activations a stage keeps at most; `parallel.schedule` has the bounds."""
    stages, chunks = parallel.pipeline, parallel.chunks
    after = stages - 1 - stage
    if stages == 1:
        return 1
    if parallel.schedule == "gpipe":
        return micro_batches
    ahead = after + 1 if chunks == 1 else 2 * after + (chunks - 1) * stages + 1
    return min(ahead, chunks * micro_batches)


def activations(spec: Spec, samples: int, part: Runs | None = None) -> int:
    """Bytes at the widest moment of forward and backward, with micro-batches of so many sequences; without `part` of the whole model."""
    element = 4 if spec.train.precision == "fp32" else 2
    part = part or Runs({"embedding": 1, "blocks": spec.model.layers, "head": 1})
    return int(_FAMILIES[spec.model.family](spec.model, samples * spec.model.seq_len, element, part))


def _gpt(model: Model, tokens: int, element: int, part: Runs) -> float:
    """A block keeps its input, the residual in its middle, both norms' outputs, query, key and value, attention's result, the wide part
    before and after its GELU; attention also a number per head, norms two. The head goes from logits over fp32 ones to their log-softmax;
    its backward holds three fp32 tensors of that size. The gradient of tied embeddings waits for the embedding's own, and autograd adds
    them into a third.
    Tensor ranks share what belongs to heads, to columns of the feed-forward part, to tokens of the vocabulary; with sequence parallelism the
    rest too, but for the input of a product, which is made whole for it.
    """
    ranks = part.tensor
    hidden = model.hidden / ranks if part.sequence else model.hidden
    inner, wide, vocab = model.heads * head_dim(model) / ranks, ffn(model) / ranks, model.vocab / ranks
    norms = 4 / ranks if part.sequence else 4
    dropped = 2 * hidden * (element + 1) if model.dropout else 0  # what goes on, and which of it was kept
    block = element * (4 * hidden + 4 * inner + 2 * wide) + _FP32 * (model.heads / ranks + norms) + dropped
    in_flight = (_IN_FLIGHT * hidden if part.sends else 0) + (2 * model.hidden if part.sequence else 0)
    kept = part.layers.get("blocks", 0) * block * tokens * part.live + element * in_flight * tokens
    embedding = element * vocab * model.hidden
    waiting = embedding if model.tied_embeddings and "head" in part.layers else 0
    moments = [kept]
    if "head" in part.layers:
        moments.append(kept + (2 * element * hidden + 3 * _FP32 * vocab) * tokens)  # the loss
        moments.append(kept + element * (2 * hidden + vocab) * tokens + embedding)
    if "blocks" in part.layers:
        moments.append(kept + element * 2 * (hidden + wide) * tokens + element * model.hidden * max(wide, 3 * inner) + waiting)
    if "embedding" in part.layers:
        moments.append(embedding + 2 * waiting + element * 2 * hidden * tokens)
    return max(moments)


_FAMILIES: dict[str, Callable[[Model, int, int, Runs], float]] = {"gpt": _gpt}
