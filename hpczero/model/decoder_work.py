"""The work of layers that families share: lookup and head, and a block's operations (pure).

Bytes count every number that an operation reads or writes once, as kernels do that keep nothing in
a cache from one operation to the next.
"""

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
    vocab = layout.share(model.vocab)
    logits = layout.tokens * vocab
    stream = layout.element * layout.rows * model.hidden
    by_kernel = "cross_entropy" in layout.kernels or layout.tensor > 1
    per_logit = _LOSS_OF_PYTORCH
    if by_kernel:
        per_logit = (_LOSS_OF_KERNEL[0] * layout.element, _LOSS_OF_KERNEL[1] * layout.element)
    caps = 2 * layout.element * logits if model.logit_cap else 0.0
    product = Pass((Product(layout.tokens, vocab, model.hidden),))
    loss = Pass(bytes=per_logit[0] * logits + caps, launches=3)
    gradient = Pass(bytes=per_logit[1] * logits + caps + 4 * stream, launches=8)
    norm = Pass(bytes=2 * stream, launches=1)
    if layout.by_pieces:
        moved = Pass(product.products[0].backward + product.products, (), loss.bytes, 4)
        return LayerWork(norm, moved + gradient)
    return LayerWork(norm + product + loss, gradient)


def core(layout: WorkLayout, heads: int, head_dim: int, window: int) -> Core:
    return Core(
        layout.samples * heads,
        layout.seq_len,
        min(window or layout.seq_len, layout.seq_len),
        visible_keys(layout.seq_len, window),
        head_dim,
    )
