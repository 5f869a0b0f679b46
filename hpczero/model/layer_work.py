"""The work of layers that families share: lookup and head, and a block's operations (pure).

Bytes count every number that an operation reads or writes once, as kernels do that keep nothing in
a cache from one operation to the next.
"""

from hpczero.model.attention_layouts import density, rule_of, rules_of
from hpczero.model.shapes import Layer, head_dim, is_causal, number_of, positions, window
from hpczero.model.work import Core, LayerWork, Pass, Product, WorkLayout, visible_keys
from hpczero.spec.schema import Model

FP32 = 4
_LOSS_OF_KERNEL = (2, 3)  # numbers in half precision read and written for each logit
_LOSS_OF_PYTORCH = (18, 14)  # bytes: to fp32, its log-softmax, back


def of_embedding(model: Model, layout: WorkLayout) -> LayerWork:
    """A lookup, and in backward rows that are added to zeros."""
    stream = layout.element * layout.rows * model.hidden
    whole = layout.element * layout.tokens * model.hidden
    vectors = layout.element * layout.share(model.vocab) * model.hidden
    return LayerWork(
        Pass(bytes=2 * whole + 3 * stream, launches=3),
        Pass(bytes=2 * vectors + 3 * whole, launches=4),
    )


def of_head(model: Model, layout: WorkLayout) -> LayerWork:
    """The last norm, the logits and the loss; by pieces all but the norm is done in backward."""
    stream = layout.element * layout.rows * model.hidden
    loss = of_logits(model, layout, layout.tokens)
    forward = Pass(bytes=2 * stream, launches=1)
    backward = loss.backward + Pass(bytes=4 * stream)
    if layout.by_pieces:
        product = loss.forward.products[0]
        moved = Pass(product.backward + loss.forward.products, (), loss.forward.bytes, 4)
        return LayerWork(forward, moved + backward)
    return LayerWork(forward + loss.forward, backward)


def of_logits(model: Model, layout: WorkLayout, targets: float) -> LayerWork:
    """The logits of so many targets, and their loss."""
    vocab = layout.share(model.vocab)
    logits = targets * vocab
    by_kernel = "cross_entropy" in layout.kernels or layout.tensor > 1
    per_logit = _LOSS_OF_PYTORCH
    if by_kernel:
        per_logit = (_LOSS_OF_KERNEL[0] * layout.element, _LOSS_OF_KERNEL[1] * layout.element)
    caps = 2 * layout.element * logits if model.logit_cap else 0.0
    product = Product(targets, vocab, model.hidden)
    return LayerWork(
        Pass((product,), (), per_logit[0] * logits + caps, 3),
        Pass(bytes=per_logit[1] * logits + caps, launches=8),
    )


def core(model: Model, layer: Layer, layout: WorkLayout, heads: int) -> Core:
    """Attention of a block's heads to the positions of its stream."""
    index = number_of(model, layer)
    seq = positions(model, index, layout.seq_len)
    visible = visible_keys(seq, window(model, index)) if is_causal(model, index) else seq
    share = _share(model, index, seq, heads)
    keys = min(seq, window(model, index) or seq) * share
    return Core(layout.samples * heads, seq, keys, visible * share, head_dim(model))


def keys_counted(model: Model, index: int, seq: int) -> float:
    """Return how many keys the products of a query count: those behind it, too, as usual.

    Of a layer in blocks it is the share of them that its density is of dense attention.
    """
    return min(seq, window(model, index) or seq) * _share(model, index, seq, model.heads)


def _share(model: Model, index: int, seq: int, heads: int) -> float:
    """Return the density of a layer's attention for the busiest of ranks with so many heads."""
    return density(rule_of(model, index), seq, model.heads, heads)


def inside_attention(model: Model, element: int, inner: float, of_keys: float) -> float:
    """Return the bytes of a token inside of attention in blocks on its way through backward.

    Queries, the result and its gradient, keys and values in whole blocks; the gradient of queries,
    and those of keys and values, which are added up in fp32 and then rounded.
    """
    if not any(rules_of(model)):
        return 0.0
    rounded = element * 2 * of_keys if element < FP32 else 0.0
    return element * (4 * inner + 2 * of_keys) + FP32 * 2 * of_keys + rounded
