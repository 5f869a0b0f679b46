"""The samples that a family's training takes, made of windows of text."""

from hpczero.data.masking import SPECIAL, Masking, SpecialIds
from hpczero.data.token_source import NO_TOKENIZER, TokenSource
from hpczero.errors import InputError
from hpczero.spec.schema import Spec
from hpczero.text import join_words


def masking_of(spec: Spec, source: TokenSource) -> Masking | None:
    """Return how a spec masks tokens; None if its model predicts the next one."""
    if not spec.model.masks:
        return None
    tokenizer = source.tokenizer()
    ids = _special_ids(spec, source)
    if max(ids) >= spec.model.vocab:
        listed = join_words([str(one) for one in ids])
        raise InputError(
            f"model.vocab = {spec.model.vocab} is too small for the ids of {join_words(SPECIAL)}, "
            f"{listed}: set model.vocab = {max(ids) + 1} or more"
        )
    continues = None
    if spec.data.whole_words:
        continues = tokenizer.continues() if tokenizer else None
        if continues is None:
            raise InputError(
                "data.whole_words = true needs a tokenizer that tells where words begin (byte, "
                "WordPiece, byte-level or SentencePiece), and that of "
                f"{source.describe()['path']} does not, or is not known: set it to false"
            )
    vocabulary = tokenizer.vocabulary if tokenizer else spec.model.vocab
    return Masking(spec.model, spec.seq_len, spec.seed, ids, vocabulary, continues)


def _special_ids(spec: Spec, source: TokenSource) -> SpecialIds:
    if spec.data.special_ids:
        return SpecialIds(*spec.data.special_ids)
    if source.describe()["tokenizer"] == NO_TOKENIZER:  # random tokens: the last ones are as good
        return SpecialIds(*range(spec.model.vocab - len(SPECIAL), spec.model.vocab))
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise InputError(
            f"the tokenizer of {source.describe()['path']} is not known: say which ids are "
            f"{join_words(SPECIAL)} by data.special_ids"
        )
    return SpecialIds.of(tokenizer)
