"""Keys of [model] that are each allowed, but not together, or not in this family (pure)."""

from collections.abc import Iterator

from hpczero.model.shapes import head_dim, keys_without_effect
from hpczero.spec.keys import Contradiction
from hpczero.spec.model import OF_LLAMA, Model
from hpczero.spec.schema import Spec
from hpczero.text import toml_repr


def unused_by_llama(model: Model) -> list[str]:
    default = type(model)()
    return [
        f"model.{key} = {toml_repr(getattr(model, key))} has no effect with "
        f"model.rope_scaling = {toml_repr(model.rope_scaling)} and model.window = {model.window}"
        for key in sorted(keys_without_effect(model))
        if getattr(model, key) != getattr(default, key)
    ]


def _llama(spec: Spec) -> Iterator[Contradiction]:
    """Keys of llama mean nothing to gpt; a factory may read them."""
    model = spec.model
    if model.family == "gpt":
        default = type(model)()
        for name in OF_LLAMA:
            if getattr(model, name) != getattr(default, name):
                yield Contradiction(
                    (f"model.{name}", "model.family"),
                    f"model.{name} = {toml_repr(getattr(model, name))} is for "
                    'model.family = "llama", and it is "gpt": leave it out, or take the other',
                )
    if model.family != "llama":
        return
    if model.kv_heads and model.heads % model.kv_heads:
        yield Contradiction(
            ("model.kv_heads", "model.heads"),
            f"model.kv_heads = {model.kv_heads} does not divide model.heads = {model.heads}: each "
            "head of keys serves as many queries: take a divisor, or 0 for as many as heads",
        )
    width = int(head_dim(model) * model.rope_fraction)
    if width < 2:
        yield Contradiction(
            ("model.rope_fraction", "model.head_dim", "model.hidden", "model.heads"),
            f"{width} of the {head_dim(model)} elements of a head would be rotated by its position "
            f"(model.rope_fraction = {model.rope_fraction}), and there is no pair of them: wider "
            "heads, or a larger share",
        )
    if model.window_pattern and not model.window:
        yield Contradiction(
            ("model.window", "model.window_pattern"),
            f"model.window_pattern = {model.window_pattern} says which layers have no window, and "
            "model.window = 0 gives none to any: set it, or leave the pattern out",
        )
    if model.window and model.window_pattern == 1:
        yield Contradiction(
            ("model.window_pattern", "model.window"),
            f"model.window_pattern = 1 leaves no layer the window of {model.window} keys: set both "
            "to 0, or a pattern of 2 or more",
        )
    yield from _stretched(model)


def _stretched(model: Model) -> Iterator[Contradiction]:
    stretched = model.rope_scaling in ("llama3", "yarn")
    if stretched and not model.rope_original:
        yield Contradiction(
            ("model.rope_original", "model.rope_scaling"),
            f'model.rope_scaling = "{model.rope_scaling}" needs model.rope_original: the tokens '
            "in a sequence of the model before it was stretched",
        )
    if model.rope_scaling == "llama3" and model.rope_high <= model.rope_low:
        yield Contradiction(
            ("model.rope_high", "model.rope_low"),
            f"model.rope_high = {model.rope_high} is not more than model.rope_low = "
            f"{model.rope_low}: frequencies in between are stretched in part",
        )
    if model.rope_scaling == "yarn" and model.rope_fast <= model.rope_slow:
        yield Contradiction(
            ("model.rope_fast", "model.rope_slow"),
            f"model.rope_fast = {model.rope_fast} is not more than model.rope_slow = "
            f"{model.rope_slow}: frequencies in between are stretched in part",
        )


RULES = (_llama,)
