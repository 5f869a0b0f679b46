"""The samples that a family's training takes, made of windows of text."""

from collections.abc import Sequence

from hpczero.data.masked_samples import Flags, Objective
from hpczero.data.masking import Masking, SpecialIds
from hpczero.data.span_corruption import SpanCorruption, SpanIds
from hpczero.data.special_ids import ids_of_random_tokens, special_ids
from hpczero.data.token_source import NO_TOKENIZER, TokenSource
from hpczero.errors import InputError
from hpczero.spec.data import SPECIAL_TOKENS
from hpczero.spec.schema import Spec
from hpczero.text import join_words


def objective_of(spec: Spec, source: TokenSource) -> Objective | None:
    """Return how a spec's samples are made; None if its model predicts the next token."""
    model = spec.model
    if not model.masks:
        return None
    ids = _special_ids(spec, source)
    if max(ids) >= model.vocab:
        named = join_words(list(SPECIAL_TOKENS[model.family]))
        raise InputError(
            f"model.vocab = {model.vocab} is too small for the ids of {named}, "
            f"{join_words([str(one) for one in ids])}: set model.vocab = {max(ids) + 1} or more"
        )
    if model.family == "t5":
        return SpanCorruption(model.spans(spec.seq_len), spec.seed, SpanIds(*ids))
    tokenizer = source.tokenizer()
    vocabulary = tokenizer.vocabulary if tokenizer else model.vocab
    continues = _continues(source) if spec.data.whole_words else None
    return Masking(model, spec.seq_len, spec.seed, SpecialIds(*ids), vocabulary, continues)


def _continues(source: TokenSource) -> Flags:
    """Return which ids go on with a word."""
    tokenizer = source.tokenizer()
    continues = tokenizer.continues() if tokenizer else None
    if continues is None:
        raise InputError(
            "data.whole_words = true needs a tokenizer that tells where words begin (byte, "
            "WordPiece, byte-level or SentencePiece), and that of "
            f"{source.describe()['path']} does not, or is not known: set it to false"
        )
    return continues


def _special_ids(spec: Spec, source: TokenSource) -> Sequence[int]:
    """Return the ids of the family's `SPECIAL_TOKENS`."""
    if spec.data.special_ids:
        return spec.data.special_ids
    model = spec.model
    if source.describe()["tokenizer"] == NO_TOKENIZER:
        return ids_of_random_tokens(model)
    tokenizer = source.tokenizer()
    names = SPECIAL_TOKENS[model.family]
    if tokenizer is None:
        raise InputError(
            f"the tokenizer of {source.describe()['path']} is not known: say which ids are "
            f"{join_words(list(names))} by data.special_ids"
        )
    ids = special_ids(model, tokenizer)
    return [ids[name] for name in names]
