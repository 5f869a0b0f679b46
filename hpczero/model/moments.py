"""Figures that the records of families share (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass

from hpczero.model.shapes import ChunkLayout, Moments, Peak
from hpczero.spec.schema import Model

FP32 = 4  # bytes
# Backward makes two products of the size of forward's: the gradients of the input and the weight.
FORWARD_AND_BACKWARD = 3
_LOGITS_BLOCK = 1 << 18  # logits that tensor ranks have in fp32 at a time, twice


def of_loss(
    part: ChunkLayout, tokens: int, element: int, hidden: float, vocab: float, caps: bool
) -> Moments:
    """Return the bytes of the head: those that it keeps, and those at its widest moments.

    PyTorch's cross-entropy goes from logits over fp32 ones to their log-softmax, which it keeps;
    its backward holds three fp32 tensors of that size. hpczero's kernel, and tensor ranks, keep the
    logits and write the gradient over them; the kernel also keeps two numbers a token. By pieces
    nothing but the input is kept, and logits are made in backward. Logits count as no part of
    `Peak.kept`, whoever keeps them.
    """
    by_kernel = "cross_entropy" in part.kernels
    over_logits = by_kernel or part.tensor > 1 or part.loss_rows > 0
    rows = min(part.loss_rows, tokens) if part.loss_rows else tokens
    logits = element * vocab * rows
    capped = 2 * logits if caps else 0
    in_fp32 = 3 * vocab * rows
    if by_kernel:
        in_fp32 = 2 * rows
    elif over_logits:
        in_fp32 = 2 * min(_LOGITS_BLOCK, vocab * rows)
    stream = element * hidden * tokens
    widest = 2 * stream + (logits if over_logits else 0) + FP32 * in_fp32 + capped
    if part.loss_rows:
        return Moments(stream, Peak(stream, stream), Peak(stream, widest))
    kept = stream + (logits if over_logits else FP32 * vocab * tokens) + capped
    return Moments(kept, Peak(stream, widest), Peak(stream, widest))


@dataclass(frozen=True)
class BlockBytes:
    """The bytes that one block keeps and makes."""

    kept: float  # from a token, until its backward
    cheap: float  # of these, results of cheap operations
    wide: float  # inside of its widest part, of a token on its way through backward
    product: float  # of the largest gradient of a weight


OfBlocks = Mapping[str, BlockBytes]  # by the kind of layer


def _kept_by_blocks(part: ChunkLayout, tokens: int, stream: float, of_blocks: OfBlocks) -> float:
    """Return the bytes that a chunk's blocks keep on their device."""
    kept = 0.0
    for kind, block in of_blocks.items():
        inputs = part.recomputed[kind, "block"]
        whole = part.layers[kind] - inputs
        kept += tokens * (whole * block.kept - part.recomputed[kind, "selective"] * block.cheap)
        kept += inputs * (stream / part.tensor if part.partitioned else stream)
    if part.blocks_here is None or part.blocks <= part.blocks_here:
        return kept
    return kept * part.blocks_here / part.blocks


def _made_again(part: ChunkLayout, tokens: int, stream: float, of_blocks: OfBlocks) -> float:
    """Return the bytes that the widest block makes again in its backward."""
    whole = [block.kept for kind, block in of_blocks.items() if part.recomputed[kind, "block"]]
    if whole:
        return max(whole) * tokens + 2 * stream * part.partitioned
    cheap = [block.cheap for kind, block in of_blocks.items() if part.recomputed[kind, "selective"]]
    return max(cheap, default=0.0) * tokens


def of_layers(
    model: Model, tokens: int, element: int, part: ChunkLayout, of_blocks: OfBlocks
) -> Moments:
    """Count the activations of an embedding, blocks of some kinds and a head, in one chunk.

    Dropout keeps nothing: it draws its mask again. A stage keeps its output too; the input of its
    first block lies in the receive buffer; its last gradient waits to be sent. With sequence
    parallelism tensor ranks divide what follows rows, but gather the input of each product.
    """
    hidden = model.hidden / part.tensor if part.sequence else model.hidden
    vocab = model.vocab / part.tensor
    stream = element * hidden * tokens
    kept = _kept_by_blocks(part, tokens, stream, of_blocks)
    here = [block for kind, block in of_blocks.items() if part.layers[kind]]
    wide = max((block.wide for block in here), default=0.0)
    made_again = _made_again(part, tokens, stream, of_blocks)  # of a block at a time
    repeats = any(part.recomputed[kind, "block"] for kind in of_blocks)
    if part.sends and "embedding" in part.layers:
        kept += stream
    sent = hidden if part.sends else 0
    gathered = 2 * model.hidden if part.sequence else 0
    in_flight = element * tokens * (sent + gathered)
    embedding = element * vocab * model.hidden
    # The gradient of tied embeddings waits for the lookup's own; autograd adds them into a third.
    waiting = embedding if model.tied_embeddings and "head" in part.layers else 0
    of_head = 0.0
    forward = [Peak(kept, kept + (wide * tokens if repeats else 0.0))]
    backward = [Peak(kept, kept)]
    if "head" in part.layers:
        targets = part.targets or tokens
        width = model.hidden if part.picked else hidden  # what is picked is whole everywhere
        head = of_loss(part, targets, element, width, vocab, bool(model.logit_cap))
        of_head = head.kept
        forward.append(head.forward.beside(kept))
        logits = element * vocab * (part.loss_rows or targets)
        backward.append(head.backward.beside(kept))
        backward.append(Peak(kept, kept + 2 * element * hidden * tokens + logits + embedding))
    if here:
        masking = (2 * element + 1) * hidden if model.dropout else 0  # gradient by mask, two steps
        of_block = (element * 2 * hidden + wide + masking) * tokens
        product = max(block.product for block in here)
        backward.append(Peak(kept, kept + made_again + of_block + product + waiting))
    if "embedding" in part.layers:
        backward.append(Peak(0.0, embedding + 2 * waiting + element * 2 * hidden * tokens))
    widest = (Peak.of(moments) for moments in (forward, backward))
    return Moments(
        kept + of_head, *(Peak(moment.kept, moment.widest + in_flight) for moment in widest)
    )
