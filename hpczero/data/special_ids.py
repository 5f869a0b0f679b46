"""Ids of the tokens that samples have beside text: those of a tokenizer, or the next after it."""

from itertools import count, takewhile

from hpczero.data.tokenizer import Tokenizer
from hpczero.errors import InputError
from hpczero.spec.data import SPECIAL_TOKENS
from hpczero.spec.model import Model
from hpczero.spec.spans import FEWEST_SENTINELS


def special_ids(model: Model, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens of a model's samples, each with its id, for training and export.

    Those that the tokenizer lacks have the next ids after its vocabulary, in the dictionary's
    order. InputError: its sentinels cannot be those of the model's samples.
    """
    begin, end, last = SPECIAL_TOKENS[model.family]
    names = [begin, end, last]
    if model.family == "t5":
        needed = model.spans(model.seq_len).spans
        # a tokenizer without any gets T5's hundred, so that ids do not depend on seq_len
        most = needed if knows(tokenizer, last) else max(needed, FEWEST_SENTINELS)
        names[2:] = [_sentinel(number) for number in reversed(range(most))]
    ids, after = dict[str, int](), tokenizer.vocabulary
    for name in names:
        known = tokenizer.token_to_id(name)
        ids[name] = after if known is None else known
        after += known is None
    if model.family == "t5":
        _refuse_gaps(model, tokenizer, ids)
    return ids


def sentinels_of(tokenizer: Tokenizer) -> list[str]:
    """Return the sentinels that a tokenizer has, from the first one on."""
    return list(takewhile(lambda name: knows(tokenizer, name), map(_sentinel, count())))


def ids_of_random_tokens(model: Model) -> tuple[int, int, int]:
    """Return the ids of the family's `SPECIAL_TOKENS` in samples that are of no text: the last."""
    last = model.vocab - 1
    before = last - (model.spans(model.seq_len).spans if model.family == "t5" else 1)
    return before - 1, before, last


def knows(tokenizer: Tokenizer, name: str) -> bool:
    return tokenizer.token_to_id(name) is not None


def _sentinel(number: int) -> str:
    return f"<extra_id_{number}>"


def _refuse_gaps(model: Model, tokenizer: Tokenizer, ids: dict[str, int]) -> None:
    """Raise InputError unless the ids of sentinels go down one by one."""
    first, spans = ids[_sentinel(0)], model.spans(model.seq_len).spans
    for number in range(spans):
        name = _sentinel(number)
        if ids[name] != first - number:
            has = f"has the id {ids[name]} for" if knows(tokenizer, name) else "has no"
            raise InputError(
                f"a sample of model.seq_len = {model.seq_len} has {spans} spans, whose sentinels' "
                f"ids go down from {_sentinel(0)} = {first}: {name} would be {first - number}, and "
                f"the tokenizer {has} {name}: take a longer model.span_length or a shorter "
                "model.seq_len, or say other ids by data.special_ids"
            )
