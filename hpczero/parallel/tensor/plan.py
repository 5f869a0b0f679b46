"""The roles of modules among tensor ranks, and a family's plan carried out.

A plan is a part of the family's record (`model.shapes.Family`).
"""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from hpczero.model.shapes import Family, Layer
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


ROLES: dict[str, Replacement] = {
    "column": ColumnLinear,
    "row": RowLinear,
    "vocabulary": VocabularyLookup,
    "vocabulary loss": VocabularyCrossEntropy,
    "norm of rows": OnOwnRows,
    "dropout of rows": DropoutOnOwnRows,
}


def apply_plan(
    layers: Sequence[tuple[nn.Module, Layer]], family: Family, residual: Residual
) -> None:
    """Put the parallel modules in place of the serial ones, in these layers of a model.

    The model is on meta: the parameters' own parts come later.
    """
    table = dict(family.tensor_plan)
    if isinstance(residual, SequenceParts):
        table |= family.sequence_plan
    for layer, described in layers:
        for path, module in list(layer.named_modules()):
            role = _role(table, f"{described.name}.{path}")
            if role:
                parent, _, name = path.rpartition(".")
                setattr(layer.get_submodule(parent), name, ROLES[role](module, residual))


def _role(table: Mapping[str, str], name: str) -> str | None:
    found = [role for pattern, role in table.items() if _matches(name, pattern)]
    assert len(found) <= 1, f"{name} has {len(found)} entries in the plan"
    return found[0] if found else None


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(
        fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=True)
    )
