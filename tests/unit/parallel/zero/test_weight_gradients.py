"""Gradients written where they are summed are those of autograd, whoever uses the parameters and
whether or not there is a place for them.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hpczero.parallel.zero.weight_gradients import DirectGradients


class Net(nn.Module):
    """A tied embedding and one that is not, a weight used three times, one through a view, a
    frozen one, one without bias.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.other = nn.Embedding(11, 6), nn.Embedding(11, 6)
        self.stacked = nn.Parameter(torch.randn(3, 2, 6) / 3)
        self.again = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.bare = nn.Linear(6, 6, bias=False)

    def inner(self, x: Tensor) -> Tensor:
        x = functional.linear(x, self.stacked.flatten(0, 1))
        for _ in range(3):
            x = x + torch.tanh(self.again(x))
        return self.bare(self.frozen(x))

    def forward(self, tokens: Tensor) -> Tensor:
        x = checkpoint(self.inner, self.embedding(tokens) + self.other(tokens), use_reentrant=False)
        return functional.linear(x, self.embedding.weight).square().sum()


class Places:
    """Sums that lie in tensors of their own; those without one wait in `parameter.grad`, or are
    autograd's.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self.of = {parameter: torch.full_like(parameter, float("nan")) for parameter in parameters}
        self.there: set[Tensor] = set()

    def write(self, parameter: Tensor, into: Callable[[Tensor], None]) -> bool:
        if parameter not in self.of:
            return False
        made = torch.empty_like(parameter)
        into(made)
        self.add(parameter, made)
        return True

    def add(self, parameter: Tensor, rows: Tensor) -> None:
        if parameter not in self.of:
            parameter.grad = rows if parameter.grad is None else parameter.grad + rows
            return
        place = self.of[parameter]
        if parameter not in self.there:
            self.there.add(parameter)
            place.zero_()
        place.add_(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "placed",
    [
        (),
        ("stacked",),
        ("embedding", "again"),
        ("embedding", "other", "stacked", "again", "bare", "frozen"),
    ],
)
def test_gradients_are_autograds(dtype: torch.dtype, placed: tuple[str, ...]) -> None:
    torch.manual_seed(1)
    net = Net().to(dtype)
    tokens = torch.tensor([[1, 4, 4], [4, 0, 9]])
    net(tokens).backward()
    expected = {
        name: own.grad.clone() for name, own in net.named_parameters() if own.grad is not None
    }
    net.zero_grad()
    places = Places([own for name, own in net.named_parameters() if name.split(".")[0] in placed])
    mode, calls = DirectGradients(set(net.parameters()), places), []
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(calls.append)
    with mode.redirect_weight_grads():
        loss = net(tokens)
        mode.backward(loss, torch.ones_like(loss))
    assert len(calls) == len(expected) == len({id(parameter) for parameter in calls}), (
        "each is said to be there once"
    )
    for name, own in net.named_parameters():
        if name in expected:
            assert own.grad is not None
            found = own.grad.to_dense() + (places.of[own] if own in places.there else 0)
            assert (own in places.there) == (own in places.of), name
            torch.testing.assert_close(
                found, expected[name], rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
            )
        else:
            assert own.grad is None


def test_without_gradients_nothing_changes() -> None:
    layer = nn.Linear(3, 3)
    with (
        DirectGradients(set(layer.parameters()), Places([])).redirect_weight_grads(),
        torch.no_grad(),
    ):
        assert layer(torch.ones(2, 3)).grad_fn is None
    with DirectGradients(set(), Places([])).redirect_weight_grads():
        assert "Addmm" in type(layer(torch.ones(2, 3)).grad_fn).__name__


def test_a_hook_that_is_put_on_after_the_forward_sees_the_gradient_and_changes_it() -> None:
    """An embedding's and a linear map's weight are watched."""
    net = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6, bias=False))
    tokens = torch.tensor([[1, 4, 4]])
    net(tokens).square().sum().backward()
    expected = [own.grad.clone() for own in net.parameters()]
    net.zero_grad()
    places = Places(list(net.parameters()))
    mode, seen = DirectGradients(set(net.parameters()), places), []
    with mode.redirect_weight_grads():
        loss = net(tokens).square().sum()
        for own in net.parameters():
            own.register_hook(lambda gradient: seen.append(gradient.clone()) or 2 * gradient)
        mode.backward(loss, torch.ones_like(loss))
    seen.sort(key=torch.numel, reverse=True)  # the lookup's is the larger one
    for gradient, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(gradient, theirs)
    for own, theirs in zip(net.parameters(), expected, strict=True):
        found = own.grad if own.grad is not None else places.of[own]
        torch.testing.assert_close(found.to_dense(), 2 * theirs)
