"""A user's module among tensor ranks: its planned modules work with this rank's parts.

The modules stay the objects that they are; a planned one gets another `forward`, and the parent of
heads the sizes of its own part. A *cut region* is what lies between columns and the row behind
them: a value in it is a part, or a summand, of one; outside every rank has the same.

    column       enter(x) -> this rank's outputs;      backward: the gradient of x, summed
    row          this rank's inputs -> the sum over ranks, and the bias once
    vocabulary   a lookup, summed; a linear map whose outputs are gathered
    replicated   as it is; the gradients of its parameters are summed
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from hpczero.comm.group import Group
from hpczero.errors import HpczeroError
from hpczero.parallel.layout import shard_range
from hpczero.parallel.tensor.heads import ColumnsOfParent
from hpczero.parallel.tensor.linear import Replicated, StreamLayout, sum_of_parts
from hpczero.parallel.tensor.positions import (
    EnterRows,
    NotCopied,
    Positions,
    replace_first_tensor,
)
from hpczero.parallel.tensor.random_streams import RandomStreams
from hpczero.parallel.tensor.user_plan import Cuts, is_conv1d


class CutModules(NotCopied):
    """The modules of a plan on this rank, until `close`."""

    def __init__(self, module: nn.Module, cuts: Cuts, group: Group, device: torch.device) -> None:
        self.cuts = cuts
        self.group = group
        self.random = RandomStreams(group, device)
        self.positions = Positions(group, self.random)
        self.unproven = set(cuts.regions)  # that have not been compared with themselves as a whole
        self.whole = False  # the planned modules run with whole parameters, as they were
        self.before_message: Callable[[], None] = lambda: None  # of a forward
        self._sizes: list[tuple[nn.Module, dict[str, int], dict[str, int]]] = []
        self._planned: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = []
        parts = dict(module.named_modules())
        self.name_of = {part: name for name, part in parts.items()}
        layers = [parts[name] for name in cuts.with_role("sequence")]
        self._hooks += self.positions.hooks(layers)
        for parent, columns in cuts.columns.items():
            self._cut_parent(parts, parent, columns)
        for name in cuts.rows:
            self._replace(parts[name], _Row(parts[name], self))
        for name in cuts.with_role("vocabulary"):
            lookup = isinstance(parts[name], nn.Embedding)
            kind = _Lookup if lookup else _GatheredColumn
            self._replace(parts[name], kind(parts[name], self))
        self._sum_gradients(module)

    def _cut_parent(self, parts: dict[str, nn.Module], name: str, columns: ColumnsOfParent) -> None:
        parent = parts[name]
        entry = Entry(self, self.cuts.in_sequence(name))
        self._hooks += [
            parent.register_forward_pre_hook(entry.begin, with_kwargs=True),
            parent.register_forward_hook(entry.end, always_call=True),
        ]
        ranks, rank = self.group.size, self.group.rank
        seen = columns.seen(ranks, rank) if columns.queries else []
        for column in columns.cuts:
            kept_whole = columns.is_kept_whole(column)
            heads = Seen(seen, columns.head_width) if kept_whole else None
            self._replace(parts[column], _Column(parts[column], self, entry, heads))
        own = columns.sizes(vars(parent), ranks, rank)
        self._sizes.append((parent, {fact: vars(parent)[fact] for fact in own}, own))
        vars(parent).update(own)

    def _replace(self, module: nn.Module, forward: "_CutForward") -> None:
        module.forward = forward
        self._planned.append(module)

    def _sum_gradients(self, module: nn.Module) -> None:
        """Let the gradients be summed of parameters that all ranks hold and use in part."""
        for name in self.cuts.summed(module):
            parameter = module.get_parameter(name)
            if parameter.is_floating_point():
                trained = parameter.requires_grad
                parameter.requires_grad_(True)
                self._hooks.append(parameter.register_hook(SummedGradient(name, self.group)))
                parameter.requires_grad_(trained)

    @contextmanager
    def as_whole(self) -> Iterator[None]:
        """Run the planned modules as they were inside; the caller gives them whole parameters."""
        self.whole = True
        for parent, whole, _ in self._sizes:
            vars(parent).update(whole)
        try:
            yield
        finally:
            self.whole = False
            for parent, _, own in self._sizes:
                vars(parent).update(own)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for module in self._planned:
            vars(module).pop("forward", None)
        for parent, whole, _ in self._sizes:
            vars(parent).update(whole)


class SummedGradient(NotCopied):
    """A hook that sums a parameter's gradient over the tensor ranks."""

    def __init__(self, name: str, group: Group) -> None:
        self._name = name
        self._group = group
        self._is_known = False  # to differ between the ranks

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.contiguous().clone()
        if not self._is_known and total.numel():
            bits = total.double().abs().sum().reshape(1)
            sums = self._group.stack(bits).flatten().tolist()
            if len(set(sums)) == 1 and sums[0] > 0:
                raise HpczeroError(
                    f"tensor_plan: {self._name} has the same gradient on all tensor ranks already:"
                    ' it is used outside of cut regions, and the role "replicated" would sum it'
                    " again; take it out of the plan"
                )
            self._is_known = any(sums)
        self._group.all_reduce(total)
        return total


class Entry(NotCopied):
    """The way of a whole value into the columns of one parent: one sum in backward for all of them.

    Columns that get the same tensor share it. Where positions are cut, the parent gets them whole.
    """

    def __init__(self, cut: CutModules, in_sequence: bool) -> None:
        self._cut = cut
        self._in_sequence = in_sequence
        self._known: tuple[torch.Tensor, int, bool, torch.Tensor] | None = None
        self._gathered: tuple[torch.Tensor, torch.Tensor] | None = None  # whole, own positions

    def begin(self, _: nn.Module, given: Any, named: Any) -> tuple[Any, Any] | None:
        self._known = self._gathered = None
        if self._cut.positions.off:
            return None
        if not self._in_sequence:
            self._cut.random.forget()
            return None

        def gather(own: torch.Tensor) -> torch.Tensor:
            whole = self._cut.positions.gather(own)
            self._gathered = whole, own
            return whole

        return replace_first_tensor(given, named, gather)

    def end(self, *_: object) -> None:
        self._known = self._gathered = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        known = self._known
        present = (x._version, torch.is_grad_enabled())
        if known and known[0] is x and known[1:3] == present:
            return known[3]
        if self._gathered and self._gathered[0] is x and not x._version:
            layout = self._cut.positions.of(x.shape[1])
            entered: torch.Tensor = EnterRows.apply(self._gathered[1], x.detach(), layout)
        else:
            entered = Enter.apply(x, Replicated(self._cut.group))
        self._known = (x, *present, entered)
        return entered


class Seen:
    """Heads of keys that this rank's queries see, of a map of all of them."""

    def __init__(self, heads: list[int], width: int) -> None:
        self.rows = slice(heads[0] * width, (heads[-1] + 1) * width)
        self._width = width
        self._heads = [head - heads[0] for head in heads]

    def for_each_query(self, y: torch.Tensor) -> torch.Tensor:
        of_heads = y.unflatten(-1, (-1, self._width))
        return of_heads[..., self._heads, :].flatten(-2)


class _CutForward(NotCopied):
    """The forward of a planned module; `serial` is the one that it had."""

    def __init__(self, module: nn.Module, cut: CutModules) -> None:
        self.module = module
        self.cut = cut
        self.serial: Callable[..., torch.Tensor] = module.forward
        self.is_conv1d = is_conv1d(module)
        self.in_sequence = cut.cuts.in_sequence(cut.name_of[module])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.serial(x) if self.cut.whole else self.part(x)

    @abstractmethod
    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's output, or the one that all ranks have together."""

    def summed(
        self, y: torch.Tensor, bias: torch.Tensor | None, layout: StreamLayout
    ) -> torch.Tensor:
        self.cut.before_message()
        return sum_of_parts(y, bias, layout)

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if not self.is_conv1d:
            return functional.linear(x, weight, bias)
        y = torch.matmul(x, weight)
        return y if bias is None else y + bias


class _Column(_CutForward):
    def __init__(self, module: Any, cut: CutModules, enter: Entry, seen: Seen | None) -> None:
        super().__init__(module, cut)
        self._enter = enter
        self._seen = seen

    def part(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.module.weight
        bias: Any = self.module.bias
        if self.module.training and not self.in_sequence:
            self.cut.random.enter()
        whole = self._enter(x)
        if self._seen is None:
            return self.product(whole, weight, bias)
        rows = self._seen.rows
        weight = weight[:, rows] if self.is_conv1d else weight[rows]
        y = self.product(whole, weight, None if bias is None else bias[rows])
        return self._seen.for_each_query(y)


class _Row(_CutForward):
    def part(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.module.weight
        bias: Any = self.module.bias
        region = self.cut.cuts.region_of_row[self.cut.name_of[self.module]]
        if region in self.cut.unproven and not self.cut.positions.off:
            raise HpczeroError(
                f"tensor_plan: {region or 'the module'} runs by its forward alone"
                " (layer.forward(x)), past the hooks that compare it first: call it (layer(x))"
            )
        inputs = weight.shape[0 if self.is_conv1d else 1]
        if x.shape[-1] != inputs:
            raise HpczeroError(
                f"a row of the tensor plan takes this rank's {inputs} inputs, and gets"
                f" {x.shape[-1]}: what comes before it is no column of the plan, or was put"
                " together again"
            )
        y = self.product(x, weight, None)
        if self.in_sequence and not self.cut.positions.off:
            return self.summed(y, bias, self.cut.positions.of(y.shape[1]))
        y = self.summed(y, bias, Replicated(self.cut.group))
        if not self.in_sequence:
            self.cut.random.leave()
        return y


class _Lookup(_CutForward):
    """A lookup in this rank's vectors; the sum over the ranks has those of all tokens."""

    def __init__(self, module: Any, cut: CutModules) -> None:
        super().__init__(module, cut)
        self._tokens = module.num_embeddings
        self._own = shard_range(self._tokens, 1, cut.group.size, cut.group.rank)
        padding = module.padding_idx
        here = padding is not None and self._own.start <= padding < self._own.stop
        self._padding = padding - self._own.start if here else None

    def part(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.module.weight
        torch._assert_async(
            ((x >= 0) & (x < self._tokens)).all(),
            f"a token is outside of the vocabulary of {self._tokens}",
        )
        index = x - self._own.start
        here = (index >= 0) & (index < len(weight))
        found = functional.embedding(index.where(here, 0), weight, self._padding)
        found = found.masked_fill(~here.unsqueeze(-1), 0.0)
        return self.summed(found, None, Replicated(self.cut.group))


class _GatheredColumn(_CutForward):
    """A linear map, of whose outputs each rank makes some; then all ranks have all."""

    def part(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.module.weight
        bias: Any = self.module.bias
        entered = Enter.apply(x, Replicated(self.cut.group))
        outputs: Any = self.module.out_features
        own = self.product(entered, weight, bias)
        self.cut.before_message()
        y: torch.Tensor = _Gather.apply(own, outputs, self.cut.group)
        return y


class Enter(torch.autograd.Function):
    """A value that all ranks have, and use in part from here on: its gradient is summed."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, layout: StreamLayout) -> torch.Tensor:
        context.layout = layout
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # others may see this gradient, and the sum overwrites it
        return context.layout.start_sum(gradient.contiguous().clone())(), None


class _Gather(torch.autograd.Function):
    """Outputs of all ranks side by side; `length`: of all together. [..., own] -> [..., length]"""

    @staticmethod
    def forward(context: Any, own: torch.Tensor, length: int, group: Group) -> torch.Tensor:
        parts = [shard_range(length, 1, group.size, rank) for rank in range(group.size)]
        context.own = parts[group.rank]
        longest = parts[0].stop
        rows = own.reshape(-1, own.shape[-1])
        gathered = own.new_empty(group.size, len(rows), longest)
        sent = gathered[group.rank]
        sent[:, : own.shape[-1]] = rows
        sent[:, own.shape[-1] :] = 0
        group.all_gather(gathered, sent)
        pairs = zip(gathered, parts, strict=True)
        whole = torch.cat([part[:, : cut.stop - cut.start] for part, cut in pairs], dim=1)
        return whole.view(*own.shape[:-1], length)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient[..., context.own].contiguous(), None, None
