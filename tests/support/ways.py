"""Ways to reach an engine's parameters from outside: in a forward, around one, between steps."""

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vmap
from torch.func import grad as func_grad
from torch.nn import functional
from torch.nn.utils import (
    parameters_to_vector,
    prune,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

WIDTH = 8
RIGHT, REFUSED = "right", "refused"
Forward = Callable[["Net", Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class Net(nn.Module):
    """Its forward is the way that is tried."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.way: Forward = plain

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)

    def body(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def plain(net: Net, x: Tensor) -> Tensor:
    return net.last(net.body(x)).square().sum()


# -- inside of the forward


def _hooks(net: Net, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return plain(net, x)


def _hooks_in_a_layer(net: Net, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        x = net.first(x)
    return plain(net, x)


def _multiplied(matrix: Callable[[nn.Parameter], Tensor]) -> Forward:
    """The first layer's weight is used again, outside of that layer."""
    return lambda net, x: (net.body(x) @ matrix(net.first.weight)).square().sum()


class _Product(torch.autograd.Function):
    """x @ weight.t(), which keeps what it needs in one of these ways."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, how: str) -> Tensor:
        context.how = how
        context.save_for_backward(x, *([weight] if how == "saved" else []))
        if how == "parameter in ctx":
            context.weight = weight
        if how == "view in ctx":
            context.view = weight.t()
        return x @ weight.t()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, *saved = context.saved_tensors
        if context.how == "view in ctx":
            saved = [context.view.t()]
        (weight,) = saved or [context.weight]
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2), None


def _function(how: str) -> Forward:
    return lambda net, x: _Product.apply(net.body(x), net.first.weight, how).square().sum()


def _penalty_inside(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = plain(net, x)
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + slope.square().sum()


def _checkpointed(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return net.last(net.first(x)).square().sum()


def _selective(net: Net, x: Tensor) -> Tensor:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_kept = operation in products
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return net.last(net.first(x)).square().sum()


def _vmap(net: Net, x: Tensor) -> Tensor:
    own = dict(net.first.named_parameters())
    return vmap(lambda one: functional_call(net.first, own, (one,)))(net.body(x)).square().sum()


def _func_grad(net: Net, x: Tensor) -> Tensor:
    return plain(net, x) + func_grad(lambda one: net.first(one).square().sum())(x).square().sum()


def _func_jacrev(net: Net, x: Tensor) -> Tensor:
    return plain(net, x) + jacrev(net.first)(x[0, 0]).square().sum()


def _func_jvp(net: Net, x: Tensor) -> Tensor:
    out, slope = jvp(net.first, (x,), (torch.ones_like(x),))
    return plain(net, out) + slope.square().sum()


def _dual(net: Net, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        out, slope = forward_ad.unpack_dual(net.body(forward_ad.make_dual(x, torch.ones_like(x))))
        return net.last(out).square().sum() + slope.square().sum()


def _hessian_product(net: Net, x: Tensor) -> Tensor:
    ones = torch.ones_like(x)
    _, product = torch.autograd.functional.hvp(
        lambda one: plain(net, one), x, ones, create_graph=True
    )
    return plain(net, x) + product.square().sum() / 100


def _jacobian(net: Net, x: Tensor) -> Tensor:
    slope = torch.autograd.functional.jacobian(
        net.first, x[0, 0], create_graph=True, vectorize=True
    )
    return plain(net, x) + slope.square().sum()


def _autocast(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return plain(net, x).float()


def _in_a_thread(net: Net, x: Tensor) -> Tensor:
    made: list[Tensor] = []
    thread = threading.Thread(target=lambda: made.append(plain(net, x)))
    thread.start()
    thread.join()
    return made[0]


def _without_the_module(net: Net, x: Tensor) -> Tensor:
    return functional.layer_norm(net.body(x), [WIDTH], net.blocks[0].norm.weight).square().sum()


def _kept_for_later(net: Net, x: Tensor) -> Tensor:
    views = [block.up.weight.data.t() for block in net.blocks]
    x = net.body(x)
    for view in views:
        x = x @ view
    return net.last(x).square().sum()


def _clamped_inside(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.first.weight.clamp_(-0.01, 0.01)
    return plain(net, x)


def _regularised(net: Net, x: Tensor) -> Tensor:
    return plain(net, x) + sum(own.square().sum() for own in net.parameters())


INSIDE: dict[str, tuple[Forward, str]] = {  # and what becomes of it where parameters are gathered
    "plainly": (plain, RIGHT),
    "hooks for saved tensors": (_hooks, RIGHT),
    "tensors saved on the CPU": (_hooks_in_a_layer, RIGHT),
    ".t()": (_multiplied(lambda weight: weight.t()), RIGHT),
    ".T": (_multiplied(lambda weight: weight.T), RIGHT),
    ".mT": (_multiplied(lambda weight: weight.mT), RIGHT),
    ".H": (_multiplied(lambda weight: weight.H), RIGHT),
    ".real": (_multiplied(lambda weight: weight.real), RIGHT),
    ".data": (_multiplied(lambda weight: weight.data.t()), RIGHT),
    ".detach()": (_multiplied(lambda weight: weight.detach().t()), RIGHT),
    ".clone()": (_multiplied(lambda weight: weight.clone()), RIGHT),
    "a stack of it": (_multiplied(lambda weight: torch.stack([weight, weight]).sum(0)), RIGHT),
    "einsum": (_multiplied(lambda weight: torch.einsum("ij,jk->ik", weight, weight)), RIGHT),
    "a sum of it": (_multiplied(lambda weight: weight / weight.norm().detach()), RIGHT),
    "a tensor of its values": (_multiplied(lambda weight: torch.tensor(weight.tolist())), RIGHT),
    "numpy": (_multiplied(lambda weight: torch.from_numpy(weight.detach().numpy().copy())), RIGHT),
    "save_for_backward": (_function("saved"), RIGHT),
    "a parameter kept in ctx": (_function("parameter in ctx"), RIGHT),
    "a view kept in ctx": (_function("view in ctx"), RIGHT),
    "views kept in a list": (_kept_for_later, RIGHT),
    "a gradient penalty inside": (_penalty_inside, RIGHT),
    "checkpoint": (_checkpointed, RIGHT),
    "selective checkpoint": (_selective, RIGHT),
    "vmap of a functional call": (_vmap, RIGHT),
    "torch.func.grad": (_func_grad, REFUSED),
    "torch.func.jacrev": (_func_jacrev, REFUSED),
    "torch.func.jvp": (_func_jvp, RIGHT),
    "forward-mode differentiation": (_dual, RIGHT),
    "a Hessian's product": (_hessian_product, RIGHT),
    "a Jacobian": (_jacobian, RIGHT),
    "autocast": (_autocast, RIGHT),
    "in a thread": (_in_a_thread, RIGHT),
    "layer_norm with it": (_without_the_module, RIGHT),
    "a regulariser": (_regularised, RIGHT),
}
REFUSED_EVERYWHERE: dict[str, Forward] = {"clamped in the forward": _clamped_inside}


# -- around a forward


@dataclass
class Caller:
    """How a loop sees what it trains: PyTorch's module, or an engine."""

    net: Net
    run: Callable[[Tensor], Tensor]
    whole: Callable[[list[nn.Parameter]], AbstractContextManager[None]]

    @classmethod
    def of(cls, net: Net) -> "Caller":
        return cls(net, net, lambda _: nullcontext())

    @classmethod
    def engine(cls, engine: Any) -> "Caller":
        return cls(engine.module, engine, engine.gathered)


Around = Callable[[Caller, Tensor], Tensor]


def _penalty_between(caller: Caller, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = caller.run(x)
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + slope.square().sum()


def _penalty_of_parameters(caller: Caller, x: Tensor) -> Tensor:
    loss = caller.run(x)
    slopes = torch.autograd.grad(loss, list(caller.net.blocks.parameters()), create_graph=True)
    return loss + sum(slope.square().sum() for slope in slopes) / 100


def _submodules(caller: Caller, x: Tensor) -> Tensor:
    net = caller.net
    x = net.first(x)
    for block in net.blocks:
        x = block(x)
    return net.last(x).square().sum()


def _hooks_around(caller: Caller, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return caller.run(x)


def _frozen_between(caller: Caller, x: Tensor) -> Tensor:
    loss = caller.run(x)
    caller.net.blocks[2].requires_grad_(False)
    return loss


def _unfrozen_between(caller: Caller, x: Tensor) -> Tensor:
    loss = caller.run(x)
    caller.net.requires_grad_(True)
    return loss


def _regulariser_gathered(caller: Caller, x: Tensor) -> Tensor:
    norm = caller.net.blocks[1].norm
    with caller.whole([norm.weight]):
        more = functional.layer_norm(x, [WIDTH], norm.weight).square().sum()
    return caller.run(x) + more


def _regulariser(caller: Caller, x: Tensor) -> Tensor:
    return caller.run(x) + caller.net.first.weight.square().sum()


def _inference_before(caller: Caller, x: Tensor) -> Tensor:
    with torch.inference_mode():
        caller.run(x)
    return caller.run(x)


def _hook_on_a_gradient(caller: Caller, x: Tensor) -> Tensor:
    loss = caller.run(x)
    weight = caller.net.first.weight
    handle = weight.register_hook(lambda gradient: 2 * gradient)
    caller.net.first.register_full_backward_hook(lambda *_: handle.remove())
    return loss


def _teacher(caller: Caller, x: Tensor) -> Tensor:
    teacher = copy.deepcopy(caller.net)
    return (caller.run(x) - teacher(x).detach() / 2).square()


def _pruned(caller: Caller, x: Tensor) -> Tensor:
    """The parameter stays in the module, by another name."""
    if not prune.is_pruned(caller.net.last):
        prune.l1_unstructured(caller.net.last, "weight", 3)
    return caller.run(x)


AROUND: dict[str, tuple[Around, str]] = {
    "module(x)": (lambda caller, x: caller.net(x), RIGHT),
    "submodules by themselves": (_submodules, RIGHT),
    "a part of a layer by itself": (lambda caller, x: caller.net.blocks[0].up(x).sum(), REFUSED),
    "layer.forward(x)": (lambda caller, x: caller.net.blocks[0].forward(x).sum(), REFUSED),
    "hooks around the engine's call": (_hooks_around, RIGHT),
    "a gradient penalty": (_penalty_between, RIGHT),
    "a penalty on the parameters' gradients": (_penalty_of_parameters, RIGHT),
    "checkpoint around the call": (
        lambda caller, x: checkpoint(caller.run, x, use_reentrant=False),
        RIGHT,
    ),
    "frozen between forward and backward": (_frozen_between, RIGHT),
    "unfrozen between forward and backward": (_unfrozen_between, RIGHT),
    "a regulariser of gathered parameters": (_regulariser_gathered, RIGHT),
    "a regulariser outside": (_regulariser, REFUSED),
    "all parameters as a vector": (
        lambda caller, x: caller.run(x) + parameters_to_vector(caller.net.parameters()).sum(),
        REFUSED,
    ),
    "inference_mode before": (_inference_before, RIGHT),
    "a hook on a gradient": (_hook_on_a_gradient, RIGHT),
    "a deep copy as a teacher": (_teacher, REFUSED),
    "pruning": (_pruned, REFUSED),
    "functional_call": (
        lambda caller, x: functional_call(caller.net, dict(caller.net.named_parameters()), (x,)),
        RIGHT,
    ),
}
