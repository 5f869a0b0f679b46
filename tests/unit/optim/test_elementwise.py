"""Which optimizers can step shards is found by trying, and what they keep."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hpczero.errors import InputError  # noqa: E402
from hpczero.optim.elementwise import Kept, torch_optimizer  # noqa: E402
from tests.support.optimizers import OPTIMIZERS, Lamb, Wandering  # noqa: E402

CPU = torch.device("cpu")
STEP = torch.tensor(8.0, dtype=torch.float32)


def probed(optimizer: Any, group: dict[str, Any] | None = None, **options: Any) -> Kept:
    return torch_optimizer(optimizer, options).probed(group or {}, CPU)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_elementwise_ones_can(name: str) -> None:
    optimizer, options, _ = OPTIMIZERS[name]
    assert isinstance(probed(optimizer, **options), Kept)


def test_what_they_keep_follows_from_the_options() -> None:
    assert probed("SGD") == probed("SGD", fused=True) == Kept((), {}, ())
    assert probed("SGD", momentum=0.9) == Kept(("momentum_buffer",), {}, ())
    assert probed("SGD", {"momentum": 0.9}) == Kept(("momentum_buffer",), {}, ())
    assert probed("Adam") == Kept(("exp_avg", "exp_avg_sq"), {"step": STEP}, ())
    assert "max_exp_avg_sq" in probed("Adam", amsgrad=True).tensors
    assert probed(Wandering) == Kept(("velocity",), {"own_steps": 8}, ("calls",))
    assert probed(lambda groups, lr: torch.optim.SGD(groups, lr, 0.9)).tensors


class Changed(torch.optim.SGD):
    """SGD that a test gives another habit."""

    def __init__(self, groups: Any, lr: float, habit: str | int) -> None:
        super().__init__(groups, lr)
        self.habit = habit
        self.count = 0
        self.own: dict[int, int] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (one for group in self.param_groups for one in group["params"]):
            if parameter.grad is None:
                if self.habit == "decays always":
                    parameter.mul_(0.9)
                continue
            if self.habit == "decays matrices" and parameter.dim() > 1:
                parameter.mul_(0.9)
            if self.habit == "noise":
                parameter.add_(torch.rand(parameter.shape, dtype=torch.float32))
            if self.habit == "first element":
                parameter.grad.add_(parameter.grad.flatten()[0].clone())
            if self.habit in ("average", "a/b", 3):
                self.state[parameter][self.habit] = parameter.clone()
            kinds = {
                "doubles": lambda own: own.double(),
                "a list": lambda own: [0.0],
                "its norm": lambda own: float(own.norm()),
            }
            if self.habit in kinds:
                self.state[parameter]["kept"] = kinds[self.habit](parameter)
        if self.habit == "an own dictionary":
            self.own[len(self.own)] = 1
        self.count += self.habit == "counts"
        super().step()


@pytest.mark.parametrize(
    ("habit", "reason"),
    [
        ("decays always", "it updates a parameter that has no gradient"),
        ("decays matrices", "the elements of a matrix in a row as the matrix"),
        ("noise", "a tensor twice in the same way: random numbers?"),
        ("first element", "it does not update parts of a tensor as the whole"),
        ("doubles", "it keeps 'kept' in torch.float64; only torch.float32 can be"),
        ("a list", "it keeps 'kept', a list"),
        ("its norm", "it keeps another 'kept' for each part of a tensor"),
        ("counts", r"it changes an attribute \('count'\), which nobody saves"),
        ("average", "it keeps a tensor under the name 'average', which no checkpoint has"),
        ("a/b", "it keeps a tensor under the name 'a/b'"),
        (3, "it keeps a state under 3, which is no name"),
        ("an own dictionary", r"it changes an attribute \('own'\), which nobody saves"),
    ],
)
def test_habits_that_shards_cannot_follow(habit: str | int, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        probed(Changed, habit=habit)
    assert probed(Changed, habit="none")


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        ("LBFGS", "LBFGS doesn't support per-parameter options"),
        ("Adafactor", r"it keeps 'row_var' of shape \[8, 1\] for a parameter of shape \[8, 16\]"),
        ("SparseAdam", "SparseAdam does not support dense gradients"),
        (Lamb, "it does not update parts of a tensor as the whole"),
        (lambda groups, lr: [], "it makes a list"),
        (lambda groups, lr: torch.optim.SGD([groups[0]], lr), "it makes other groups"),
    ],
)
def test_others_are_refused(optimizer: Any, reason: str) -> None:
    if isinstance(optimizer, str) and not hasattr(torch.optim, optimizer):
        pytest.skip(f"this PyTorch has no {optimizer}")
    with pytest.raises(InputError, match=reason) as caught:
        probed(optimizer)
    assert "SGD, Adam, AdamW" in str(caught.value)
    assert "LBFGS, LAMB, Muon" in str(caught.value)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_muon_is_refused() -> None:
    with pytest.raises(InputError, match="Muon cannot be used: ValueError: Muon only supports 2D"):
        probed("Muon")


def test_names_and_options_that_there_are_not() -> None:
    with pytest.raises(InputError, match=r"'Adem': no optimizer of torch.optim has this name"):
        torch_optimizer("Adem", {})
    with pytest.raises(InputError, match="give a name, a class or a function"):
        torch_optimizer(3, {})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="'moment' is no option; there are lr, momentum"):
        torch_optimizer("SGD", {"moment": 0.9})
    with pytest.raises(InputError, match=r"'lr' is the spec's: set optimizer.lr"):
        torch_optimizer("SGD", {"lr": 0.1})
    with pytest.raises(InputError, match="groups: 'moment' is no option of a group"):
        probed("SGD", {"moment": 0.9})
    with pytest.raises(InputError, match="ValueError: Invalid momentum value: -1"):
        probed("SGD", momentum=-1)


def test_the_random_numbers_of_the_program_stay_as_they_are() -> None:
    before = torch.get_rng_state()
    with pytest.raises(InputError):
        probed(Changed, habit="noise")
    assert torch.equal(torch.get_rng_state(), before)
