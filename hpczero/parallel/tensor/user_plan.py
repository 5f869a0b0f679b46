"""A tensor plan for a module that hpczero has not written: which parameters are cut, and how.

A plan names modules by patterns, each with a role. From it and the module's own sizes follows a cut
of every parameter (`Cuts`); what does not fit is an InputError. `cut_modules` carries it out.

Columns make outputs of which each rank has some; a row takes them as its inputs. Which columns lead
to a row is found in the structure: the row's inputs are as many as their outputs, and no smaller
part of the module has both.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial

from torch import nn

from hpczero.errors import InputError
from hpczero.model.shapes import Parameter
from hpczero.parallel.tensor.heads import Column, ColumnsOfParent, Cut, columns_of_parent
from hpczero.parallel.user_module import Layers
from hpczero.text import first_few, join_words

ROLES = ("column", "row", "vocabulary", "replicated", "sequence")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

TensorPlan = Mapping[str, str | Column]


@dataclass
class Cuts:
    """A plan carried through a module, for so many ranks: by name of a module, or of a parameter.

    `regions`: the modules that hold columns and the rows behind them: what comes out of one is
    whole. `kept_whole`: columns of keys and values that every rank holds whole.
    """

    ranks: int
    roles: dict[str, str] = field(default_factory=dict)
    columns: dict[str, ColumnsOfParent] = field(default_factory=dict)  # by name of the parent
    rows: dict[str, Cut] = field(default_factory=dict)
    regions: list[str] = field(default_factory=list)
    region_of_row: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, tuple[int, Cut]] = field(default_factory=dict)  # dimension and cut
    kept_whole: list[str] = field(default_factory=list)

    def with_role(self, role: str) -> list[str]:
        return [name for name, known in self.roles.items() if known == role]

    def in_sequence(self, name: str) -> bool:
        """Return True for a module in the layers between which positions are cut."""
        return any(_is_inside(name, layer) for layer in self.with_role("sequence"))

    def has_own_positions(self, name: str) -> bool:
        """Return True for a module that works on this rank's positions alone.

        One that has columns, and what is in it, gets all positions.
        """
        return self.in_sequence(name) and not any(map(partial(_is_inside, name), self.columns))

    def summed(self, module: nn.Module) -> list[str]:
        """Return the parameters that all ranks hold and use in part: their gradients are summed.

        In the layers of the role "sequence" these are all that work on own positions: the bias of a
        row has its whole gradient, and a module that has columns gets all positions.
        """
        found = []
        for path, _ in module.named_parameters():
            name = _parent(path)
            in_role = any(map(partial(_is_inside, name), self.with_role("replicated")))
            of_rows = name not in self.rows and self.has_own_positions(name)
            is_cut = path in self.parameters and name not in self.kept_whole
            if not is_cut and (in_role or of_rows or name in self.kept_whole):
                found.append(path)
        return found

    def apply(self, layers: Layers) -> Layers:
        """Return the layers of a module with their parameters cut."""
        return [
            (
                module,
                replace(layer, parameters=tuple(map(self._parameter, layer.parameters))),
            )
            for module, layer in layers
        ]

    def _parameter(self, whole: Parameter) -> Parameter:
        if whole.name not in self.parameters:
            return whole
        dim, cut = self.parameters[whole.name]
        return replace(
            whole, split=dim, grain=cut.grain, fine_grain=cut.fine_grain, sections=cut.sections
        )


def cuts_of(module: nn.Module, plan: TensorPlan, ranks: int, sequence: bool = False) -> Cuts:
    """Return how a plan cuts a module among tensor ranks.

    `sequence`: the spec asks for sequence parallelism.
    """
    parts = dict(module.named_modules())
    chosen = _chosen(parts, plan)
    roles = {name: "column" if isinstance(how, Column) else how for name, how in chosen.items()}
    cuts = Cuts(ranks, roles)
    for name, role in roles.items():
        _refuse_unfit(parts, name, role)
    _cut_columns(cuts, parts, chosen)
    _cut_rows(cuts, parts)
    for name in cuts.with_role("vocabulary"):
        length = _lengths(parts[name])[0]
        if length < ranks:
            raise InputError(f"{name} has {length} tokens, fewer than the {ranks} tensor ranks")
        _cut_parameters(cuts, module, name, 0, Cut(length, 1))
    _refuse_other_uses(cuts, parts, module)
    _check_sequence(cuts, parts, sequence)
    return cuts


def described(plan: TensorPlan) -> str:
    """Return the plan in words that are equal for equal plans; InputError: it is none."""
    if not isinstance(plan, Mapping) or not all(isinstance(pattern, str) for pattern in plan):
        example = '{"model.layers.*.mlp.up": "column"}'
        raise InputError(f"tensor_plan = {plan!r}: give a table of patterns and roles: {example}")
    return str(dict(plan))


def is_conv1d(module: nn.Module) -> bool:
    """Return True for the linear map of `transformers` whose weight is [inputs, outputs]."""
    weight = module._parameters.get("weight")
    alike = weight is not None and weight.dim() == 2
    return type(module).__name__ == "Conv1D" and alike and hasattr(module, "nf")


def _chosen(parts: Mapping[str, nn.Module], plan: TensorPlan) -> dict[str, str | Column]:
    """Return the role of each module that has one; the first pattern that fits counts."""
    chosen: dict[str, str | Column] = {}
    for pattern, how in plan.items():
        if not isinstance(how, Column) and how not in ROLES:
            known = join_words([f'"{role}"' for role in ROLES], "or")
            raise InputError(
                f"tensor_plan: {pattern!r} has the role {how!r}; it is {known}, or hpczero.Column"
            )
        fitting = [name for name in parts if name and fnmatchcase(name, pattern)]
        if not fitting:
            raise InputError(
                f"tensor_plan: no module's name fits {pattern!r}{_nearest(pattern, parts)}"
            )
        taken = _outermost(fitting) if how == "sequence" else fitting
        new = [name for name in taken if name not in chosen]
        if not new:
            raise InputError(
                f"tensor_plan: {pattern!r} has no effect, as the first match counts, and a pattern"
                f" before it has {first_few(taken)}: put it first"
            )
        chosen |= dict.fromkeys(new, how)
    return chosen


def _outermost(names: list[str]) -> list[str]:
    return [
        name
        for name in names
        if not any(_is_inside(name, other) for other in names if other != name)
    ]


def _nearest(pattern: str, parts: Collection[str]) -> str:
    near = get_close_matches(pattern, [name for name in parts if name], n=3, cutoff=0.5)
    return f": the nearest are {join_words(near)}" if near else ""


def _refuse_unfit(parts: Mapping[str, nn.Module], name: str, role: str) -> None:
    module = parts[name]
    kind = type(module)
    where = f"tensor_plan: {name} ({kind.__name__})"
    if role in ("replicated", "sequence"):
        if role == "replicated" and not any(True for _ in module.parameters()):
            raise InputError(f'{where} has no parameters, and needs no role "replicated"')
        return
    is_linear = kind.forward is nn.Linear.forward and "forward" not in vars(module)
    is_lookup = kind.forward is nn.Embedding.forward and "forward" not in vars(module)
    if not (is_linear or (is_lookup if role == "vocabulary" else is_conv1d(module))):
        kinds = "nn.Embedding or nn.Linear" if role == "vocabulary" else "nn.Linear or Conv1D"
        raise InputError(
            f'{where} cannot be "{role}": that is for {kinds} with the forward of that class, as'
            " what another forward does with the weight is not known"
        )
    if module._parameters.get("weight") is None:
        raise InputError(
            f"{where} computes its weight from others (parametrize, weight_norm): it cannot be cut"
        )
    if is_lookup and (module.scale_grad_by_freq or module.sparse):
        raise InputError(f"{where} has scale_grad_by_freq or sparse, which a cut lookup has not")
    parent = type(parts[_parent(name)])
    if parent.__module__.startswith("torch.nn.") and parent not in _CONTAINERS:
        raise InputError(
            f"{where}: {parent.__name__} may use the weights of its parts without calling them,"
            " and cannot be cut"
        )


def _lengths(module: nn.Module) -> tuple[int, ...]:
    weight = module._parameters["weight"]
    assert weight is not None
    return tuple(weight.shape)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _cut_columns(
    cuts: Cuts, parts: Mapping[str, nn.Module], chosen: Mapping[str, str | Column]
) -> None:
    by_parent: dict[str, dict[str, tuple[int, Column]]] = {}
    for name in cuts.with_role("column"):
        how = chosen[name]
        width = _lengths(parts[name])[1 if is_conv1d(parts[name]) else 0]
        as_column = how if isinstance(how, Column) else Column()
        by_parent.setdefault(_parent(name), {})[name] = width, as_column
    for parent, columns in by_parent.items():
        found = columns_of_parent(parent, vars(parts[parent]), columns, cuts.ranks)
        cuts.columns[parent] = found
        for name, cut in found.cuts.items():
            dim = 1 if is_conv1d(parts[name]) else 0
            _cut_parameters(cuts, parts[""], name, dim, cut)
            if found.is_kept_whole(name):
                cuts.kept_whole.append(name)


def _cut_rows(cuts: Cuts, parts: Mapping[str, nn.Module]) -> None:
    """Cut each row as the columns before it; rows in small parts of the module choose first."""
    inputs = {
        name: _lengths(parts[name])[0 if is_conv1d(parts[name]) else 1]
        for name in cuts.with_role("row")
    }
    free = dict(cuts.columns)
    waiting = dict.fromkeys(inputs)
    longest = max((name.count(".") + 1 for name in inputs), default=0)
    for up in range(1, longest + 1):
        for name in list(waiting):
            words = name.split(".")
            if up > len(words):
                continue
            region = ".".join(words[:-up])
            inside = [
                parent
                for parent, columns in free.items()
                if _is_inside(parent, region) and columns.width == inputs[name]
            ]
            if not inside:
                continue
            if len({free[parent].outputs for parent in inside}) > 1:
                raise InputError(
                    f"tensor_plan: the row {name} may follow the columns of"
                    f" {join_words(inside, 'or')}, which are cut in different ways"
                )
            del waiting[name]
            cuts.rows[name] = free[inside[0]].outputs
            cuts.region_of_row[name] = region
            cuts.regions += [region] if region not in cuts.regions else []
            for parent in inside:
                del free[parent]
            dim = 0 if is_conv1d(parts[name]) else 1
            _cut_parameters(cuts, parts[""], name, dim, cuts.rows[name], bias=False)
    _refuse_single(waiting, free, inputs)


def _is_inside(name: str, region: str) -> bool:
    return not region or name == region or name.startswith(f"{region}.")


def _refuse_single(
    rows: Collection[str], columns: Mapping[str, ColumnsOfParent], inputs: Mapping[str, int]
) -> None:
    for name in rows:
        raise InputError(
            f'tensor_plan: {name} is a "row" of {inputs[name]} inputs, and no "column" of as many'
            " outputs comes before it: the plan has both or neither"
        )
    for found in columns.values():
        names = first_few(list(found.cuts))
        raise InputError(
            f'tensor_plan: {names}: a "column" of {found.width} outputs without a "row" that takes'
            " them: the plan has both or neither"
        )


def _cut_parameters(
    cuts: Cuts, module: nn.Module, name: str, dim: int, cut: Cut, bias: bool = True
) -> None:
    """Note the cut of a module's weight along `dim`, and of its bias."""
    part = module.get_submodule(name)
    names = {parameter: path for path, parameter in module.named_parameters()}
    of_part = {"weight": dim} | ({"bias": 0} if bias else {})
    for own, own_dim in of_part.items():
        parameter = part._parameters.get(own)
        if parameter is None:
            continue
        known = cuts.parameters.setdefault(names[parameter], (own_dim, cut))
        if known != (own_dim, cut):
            raise InputError(
                f"tensor_plan: {name}.{own} is {names[parameter]}, too, and cut in another way"
                " there: tied modules need the same role"
            )


def _refuse_other_uses(cuts: Cuts, parts: Mapping[str, nn.Module], module: nn.Module) -> None:
    """Refuse a cut parameter that a module without a role works with, too.

    A module around others may hold one by a second name: it would fail by the shape.
    """
    names = {parameter: path for path, parameter in module.named_parameters()}
    for path, part in module.named_modules(remove_duplicate=False):
        for own, parameter in part._parameters.items():
            if parameter is None or names[parameter] not in cuts.parameters:
                continue
            role = cuts.roles.get(next(name for name in parts if parts[name] is part))
            is_leaf = not any(True for _ in part.children())
            if is_leaf and role not in ("column", "row", "vocabulary"):
                raise InputError(
                    f"tensor_plan: {path}.{own} is {names[parameter]}, which is cut, and {path} has"
                    ' no role that cuts it: give it one (a tied head is "vocabulary" as its'
                    " embedding is)"
                )


def _check_sequence(cuts: Cuts, parts: Mapping[str, nn.Module], sequence: bool) -> None:
    named = cuts.with_role("sequence")
    if named and not sequence:
        raise InputError(
            f'tensor_plan: {first_few(named)}: "sequence" needs parallel.sequence_parallel = true'
        )
    inside = [
        name for name in cuts.with_role("vocabulary") for one in named if _is_inside(name, one)
    ]
    if inside:
        raise InputError(
            f'tensor_plan: {inside[0]} is "vocabulary" inside of a "sequence" layer: it works on'
            " all positions, so it has to stand outside"
        )
    if sequence and not named:
        raise InputError(
            "parallel.sequence_parallel = true needs the layers between which the positions are"
            ' shared out: tensor_plan = {..., "model.layers.*": "sequence"}'
        )
