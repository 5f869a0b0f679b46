"""The samples that a family's training takes, made of windows of text."""

from hpczero.data.masking import Masking, SpecialIds
from hpczero.data.token_source import NO_TOKENIZER, TokenSource
from hpczero.errors import InputError
from hpczero.spec.schema import Spec
from hpczero.text import join_words

_NAMES = ["[CLS]", "[SEP]", "[MASK]"]


def masking_of(spec: Spec, source: TokenSource) -> Masking | None:
    """Return how a spec masks tokens; None if its model predicts the next one."""
    if spec.model.family != "bert":
        return None
    ids, vocabulary = _special_ids(spec, source)
    if max(ids) >= spec.model.vocab:
        raise InputError(
            f"model.vocab = {spec.model.vocab} is too small for the ids of {join_words(_NAMES)}, "
            f"{join_words([str(one) for one in ids])}: set model.vocab = {max(ids) + 1} or more"
        )
    continues = None
    if spec.data.whole_words:
        tokenizer = source.tokenizer()
        continues = tokenizer.continues() if tokenizer else None
        if continues is None:
            raise InputError(
                "data.whole_words = true needs a tokenizer that tells where words begin (byte, "
                "WordPiece, byte-level or SentencePiece), and that of "
                f"{source.describe()['path']} does not, or is not known: set it to false"
            )
    return Masking(spec.model, spec.seq_len, spec.seed, SpecialIds(*ids), vocabulary, continues)


def _special_ids(spec: Spec, source: TokenSource) -> tuple[list[int], int]:
    """Return the ids of [CLS], [SEP] and [MASK], and the number of ids that tokens may have."""
    if source.describe()["tokenizer"] == NO_TOKENIZER:
        last = spec.model.vocab
        return list(spec.data.special_ids) or [last - 3, last - 2, last - 1], last
    tokenizer = source.tokenizer()
    if spec.data.special_ids:
        vocabulary = tokenizer.vocabulary if tokenizer else spec.model.vocab
        return list(spec.data.special_ids), vocabulary
    if tokenizer is None:
        raise InputError(
            f"the tokenizer of {source.describe()['path']} is not known: say which ids are "
            f"{join_words(_NAMES)} by data.special_ids"
        )
    found = [tokenizer.token_to_id(name) for name in _NAMES]
    known = [number for number in found if number is not None]
    if len(known) < len(_NAMES):
        first = tokenizer.vocabulary
        return [first, first + 1, first + 2], first
    return known, tokenizer.vocabulary
