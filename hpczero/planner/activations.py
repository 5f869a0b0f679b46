"""What a micro-batch holds between forward and backward, estimated from the model's shapes (pure).

Counted are the tensors that PyTorch's operations keep for their backward in the models of `hpczero.model`, and what comes on top at each of
the moments that may be the widest, gradients on their way into the engine included. Measured peaks of GPTs were 0.93 to 1.2 times this, with
an allocator that returns what is freed; what malloc keeps for later (up to 0.1 GB was seen on small models) is not in it.
"""

from collections.abc import Callable

from hpczero.model.shapes import ffn, head_dim
from hpczero.spec.schema import Model, Spec

_FP32 = 4


def activations(spec: Spec, samples: int) -> int:
    """Bytes at the widest moment of forward and backward of one micro-batch of so many sequences."""
    element = 4 if spec.train.precision == "fp32" else 2
    return _FAMILIES[spec.model.family](spec.model, samples * spec.model.seq_len, element)


def _gpt(model: Model, tokens: int, element: int) -> int:
    """A block keeps its input, the residual in its middle, both norms' outputs, query, key and value, attention's result, the wide part
    before and after its GELU; attention also a number per head, norms two. The head goes from logits over fp32 ones to their log-softmax;
    its backward holds three fp32 tensors of that size. The gradient of tied embeddings waits for the embedding's own, and autograd adds
    them into a third.
    """
    hidden, inner, wide = model.hidden, model.heads * head_dim(model), ffn(model)
    dropped = 2 * hidden * (element + 1) if model.dropout else 0  # what goes on, and which of it was kept
    block = element * (4 * hidden + 4 * inner + 2 * wide) + _FP32 * (model.heads + 4) + dropped
    kept = model.layers * block * tokens
    embedding = element * model.vocab * model.hidden
    waiting = embedding if model.tied_embeddings else 0
    loss = kept + (2 * element * hidden + 3 * _FP32 * model.vocab) * tokens
    head = kept + element * (2 * hidden + model.vocab) * tokens + embedding
    last_block = kept + element * 2 * (hidden + wide) * tokens + element * hidden * max(wide, 3 * inner) + waiting
    end = embedding + 2 * waiting + element * 2 * hidden * tokens
    return max(loss, head, last_block, end)


_FAMILIES: dict[str, Callable[[Model, int, int], int]] = {"gpt": _gpt}
