"""Rules of sequences: their lengths over the steps, and layouts of attention that cannot be."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from hpczero.model.attention_layouts import EFFECT, PER_LAYER, LayoutRule, hides_nothing, rules_of
from hpczero.model.families import known
from hpczero.model.shapes import positions
from hpczero.spec.keys import Contradiction
from hpczero.spec.model import Model
from hpczero.spec.schema import Spec
from hpczero.text import join_words, toml_repr


def _lengths(spec: Spec) -> Iterator[Contradiction]:
    phases = spec.schedule.seq_len
    keys = ("schedule.seq_len", "data.seq_len", "model.seq_len")
    steps = [step for step, _ in phases]
    if phases and (steps[0] or sorted(set(steps)) != steps):
        yield Contradiction(
            keys[:1],
            f"schedule.seq_len = {[list(phase) for phase in phases]}: must begin at step 0, and "
            "each entry at a later step than the one before",
        )
    for _, length in phases:
        if spec.seq_len % length:
            yield Contradiction(
                keys,
                f"schedule.seq_len has sequences of {length}, which do not divide the longest of "
                f"{spec.seq_len} (data.seq_len, or model.seq_len): a batch keeps its tokens, so it "
                "has a whole number of sequences for each of the longest",
            )


def _attention(spec: Spec) -> Iterator[Contradiction]:
    model = spec.model
    default = type(model.attention)()
    if model.attention == default:
        return
    if not known(model):
        changed = _changed(model)[0]
        yield Contradiction(
            (f"model.attention.{changed}", "model.family"),
            f"{_setting(model, changed)} is for hpczero's own families, and model.family is "
            f"{toml_repr(model.family)}: leave it out",
        )
        return
    for name in PER_LAYER:
        value = getattr(model.attention, name)
        if isinstance(value, tuple) and len(value) > model.layers:
            yield Contradiction(
                (f"model.attention.{name}", "model.layers"),
                f"model.attention.{name} has {len(value)} entries, more than model.layers = "
                f"{model.layers}: one for each layer, or fewer, which begin again",
            )
    if model.window and any(rules_of(model)):
        yield Contradiction(
            ("model.window", "model.attention.kind"),
            f"model.window = {model.window} and {_setting(model, 'kind')} both say what a query "
            'sees: take one (kind = "local" is a window in blocks)',
        )
    for rule, layer in _first_with(model).items():
        yield from _of_layer(rule, layer, spec)


def _first_with(model: Model) -> dict[LayoutRule, int]:
    """Return the layouts of a model, but for their random blocks, and the first layer with each."""
    found: dict[LayoutRule, int] = {}
    for layer, rule in enumerate(rules_of(model)):
        if rule:
            found.setdefault(replace(rule, layer=0), layer)
    return found


def _of_layer(rule: LayoutRule, layer: int, spec: Spec) -> Iterator[Contradiction]:
    length, shortest = spec.shortest
    seq = positions(spec.model, layer, shortest)
    blocks = rule.blocks(seq)
    where = f"layer {layer} ({toml_repr(rule.kind)})"
    if rule.kind == "fixed" and rule.globals > rule.window:
        yield Contradiction(
            ("model.attention.global", "model.attention.window"),
            f"model.attention.global = {rule.globals} in {where} is more than the {rule.window} "
            "blocks of a group (model.attention.window): fewer, or larger groups",
        )
    if rule.kind != "fixed" and rule.globals > blocks:
        yield Contradiction(
            ("model.attention.global", "model.attention.block", length),
            f"model.attention.global = {rule.globals} in {where} is more than the {blocks} blocks "
            f"of {rule.block} that {seq} positions have: fewer, or smaller blocks",
        )


RULES: tuple[Callable[[Spec], Iterator[Contradiction]], ...] = (_lengths, _attention)


def without_effect_of_sequences(spec: Spec) -> list[str]:
    """Return what is said of lengths and attention, and changes nothing next to the other keys."""
    never = [
        f"schedule.seq_len has sequences of {length} from step {step} on, which never comes: "
        f"train.steps = {spec.train.steps}"
        for step, length in spec.schedule.seq_len
        if step >= spec.train.steps
    ]
    return never + (_of_layouts(spec) if known(spec.model) else [])


def _of_layouts(spec: Spec) -> list[str]:
    model = spec.model
    kinds = {rule.kind if rule else "dense" for rule in rules_of(model)}
    read = {"kind"}.union(*(EFFECT[kind] for kind in kinds))
    if all(rule is None or rule.patterns(model.heads) == 1 for rule in rules_of(model)):
        read -= {"heads"}
    named = join_words([toml_repr(kind) for kind in sorted(kinds)])
    notes = [
        f"{_setting(model, name)} has no effect with model.attention.kind = {named}"
        for name in _changed(model)
        if name not in read
    ]
    if model.kernels == "torch" and model.family != "t5" and any(rules_of(model)):
        scores = 4e-9 * model.heads * spec.seq_len**2  # those of T5 are counted
        notes.append(
            f'model.kernels = "torch" computes model.attention.kind = {named} with a mask over all '
            f"pairs: {scores:,.3g} GB of scores for a sequence and layer, several times, which no "
            "forecast counts"
        )
    lengths = {
        rule: (layer, positions(model, layer, spec.seq_len))
        for rule, layer in _first_with(model).items()
    }
    return notes + [
        f"model.attention.kind = {toml_repr(rule.kind)} of layer {layer} hides nothing in "
        f"sequences of {seq}, {rule.blocks(seq)} blocks of {rule.block}: dense "
        "attention does the same, faster"
        for rule, (layer, seq) in lengths.items()
        if hides_nothing(rule, seq, model.heads)
    ]


def _changed(model: Model) -> list[str]:
    default = type(model.attention)()
    names = type(model.attention).model_fields
    return [name for name in names if getattr(model.attention, name) != getattr(default, name)]


def _setting(model: Model, name: str) -> str:
    return f"model.attention.{name} = {toml_repr(getattr(model.attention, name))}"
