"""Which modules of a model tensor parallelism replaces, and by what: a small table for each family."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from hpczero.model.shapes import Layer
from hpczero.parallel.tensor.linear import (
    ColumnLinear,
    DropoutOnOwnRows,
    OnOwnRows,
    Residual,
    RowLinear,
    SequenceParts,
)
from hpczero.parallel.tensor.vocabulary import VocabularyCrossEntropy, VocabularyLookup

Replacement = Callable[[nn.Module, Residual], nn.Module]


@dataclass(frozen=True)
class Plan:
    """Names of modules ("*" is any one part of a name) and what takes their place; `sequence`: only with sequence parallelism."""

    tensor: Mapping[str, Replacement]
    sequence: Mapping[str, Replacement]


PLANS = {
    "gpt": Plan(
        tensor={
            "embedding.lookup": VocabularyLookup,
            "blocks.*.attention.qkv": ColumnLinear,
            "blocks.*.attention.output": RowLinear,
            "blocks.*.feed_forward.up": ColumnLinear,
            "blocks.*.feed_forward.down": RowLinear,
            "head.logits": ColumnLinear,
            "head.loss": VocabularyCrossEntropy,
        },
        sequence={
            "embedding.dropout": DropoutOnOwnRows,
            "blocks.*.*.norm": OnOwnRows,
            "blocks.*.*.dropout": DropoutOnOwnRows,
            "head.norm": OnOwnRows,
        },
    ),
}


def apply_plan(layers: Sequence[tuple[nn.Module, Layer]], plan: Plan, residual: Residual) -> None:
    """Puts the parallel modules in place of the serial ones, in these layers of a model (on meta: the parameters' own parts come later)."""
    table = {**plan.tensor, **(plan.sequence if isinstance(residual, SequenceParts) else {})}
    for layer, described in layers:
        for path, module in list(layer.named_modules()):
            make = _entry(table, f"{described.name}.{path}")
            if make:
                parent, _, name = path.rpartition(".")
                setattr(layer.get_submodule(parent), name, make(module, residual))


def _entry(table: Mapping[str, Replacement], name: str) -> Replacement | None:
    found = [make for pattern, make in table.items() if _matches(name, pattern)]
    assert len(found) <= 1, f"{name} has {len(found)} entries in the plan"
    return found[0] if found else None


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(
        fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=True)
    )
