"""The plan of an update follows the arguments, and the memory follows the plan."""

import pytest

torch = pytest.importorskip("torch")

from hpczero.errors import InputError  # noqa: E402
from hpczero.model.shapes import ZEROS, Parameter  # noqa: E402
from hpczero.parallel.states import ADAMW, UpdateMemory  # noqa: E402
from hpczero.parallel.zero.update_plan import (  # noqa: E402
    UpdatePlan,
    UpdateWanted,
    plan_update,
)
from hpczero.spec.optimizer import Outer  # noqa: E402
from hpczero.spec.schema import Optimizer  # noqa: E402

SHAPES = {"body.weight": (4, 3), "body.bias": (4,), "head.weight": (2, 4)}
NAMES = list(SHAPES)
PARAMETERS = [Parameter(name, shape, ZEROS) for name, shape in SHAPES.items()]


def planned(wanted: UpdateWanted, spec: Optimizer | None = None) -> UpdatePlan:
    return plan_update(wanted, spec or Optimizer(), PARAMETERS, torch.device("cpu"))


def test_nothing_asked_for_is_the_kernel_s_adamw() -> None:
    plan = planned(UpdateWanted())
    assert plan == UpdatePlan()
    assert plan.memory == ADAMW
    assert planned(UpdateWanted(average=0.9)).memory == UpdateMemory(average=True)


def test_a_group_may_keep_more_than_the_others() -> None:
    groups = {"*.bias": {"momentum": 0.9}, "head.*": {"lr": 1.0}}
    plan = planned(UpdateWanted("SGD", groups=groups))
    kept = {name: plan.kept[name].tensors for name in NAMES}
    assert kept == {"body.weight": (), "body.bias": ("momentum_buffer",), "head.weight": ()}
    assert plan.memory == UpdateMemory(moments=1, by_torch=True)
    assert plan.options == {"body.bias": {"momentum": 0.9}, "head.weight": {"lr": 1.0}}


def test_the_same_wishes_have_the_same_words() -> None:
    def optimizer(groups: object, lr: float) -> None: ...

    one = UpdateWanted(optimizer, {"b": 1, "a": 2}, {"*": {"lr": 1.0, "eps": 1e-3}})
    other = UpdateWanted(optimizer, {"a": 2, "b": 1}, {"*": {"eps": 1e-3, "lr": 1.0}})
    assert one.described() == other.described()
    assert one.described()["optimizer"].endswith("optimizer")
    for different in (
        UpdateWanted(torch.optim.SGD, {"b": 1, "a": 2}, one.groups),
        UpdateWanted(optimizer, {"b": 1}, one.groups),
        UpdateWanted(optimizer, one.optimizer_options, {"?": one.groups["*"]}),
        UpdateWanted(optimizer, one.optimizer_options, one.groups, 0.9),
    ):
        assert different.described() != one.described()


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (UpdateWanted("SGD"), "`optimizer`"),
        (UpdateWanted(average=0.9), "`average`"),
        (UpdateWanted(groups={"*.bias": {"lr": 1.0}}), "`groups`"),
        (UpdateWanted("SGD", average=0.9), "`optimizer` and `average`"),
    ],
)
@pytest.mark.parametrize(
    ("spec", "setting"),
    [
        (Optimizer(name="one_bit_adam"), 'optimizer.name = "one_bit_adam"'),
        (Optimizer(outer=Outer(every=50)), "optimizer.outer.every = 50"),
    ],
)
def test_replicas_that_send_less_have_one_update(
    wanted: UpdateWanted, named: str, spec: Optimizer, setting: str
) -> None:
    with pytest.raises(InputError) as caught:
        planned(wanted, spec)
    assert f"{setting} is for" in str(caught.value)
    assert f" {named} of hpczero.initialize" in str(caught.value)
    assert planned(UpdateWanted(), spec) == UpdatePlan()


@pytest.mark.parametrize(
    ("name", "pattern", "options", "message"),
    [
        ("muon", "body.*", {"betas": (0.9, 0.99)}, "'betas' of 'body.*' is not read by muon's"),
        ("muon", "*", {"lr": 1.0, "eps": 1e-4}, "'eps' of '*' is not read by muon's step of"),
        ("lion", "*.bias", {"eps": 1e-4}, "'eps' of '*.bias' is not read by lion, whose steps"),
    ],
)
def test_options_that_a_step_does_not_read_are_refused(
    name: str, pattern: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        planned(UpdateWanted(groups={pattern: options}), Optimizer(name=name))
    assert message in str(caught.value)
    assert planned(UpdateWanted(groups={pattern: options}), Optimizer(name="lamb")).options


def test_options_that_a_step_reads_are_taken() -> None:
    by_adamw = {"*.bias": {"betas": (0.9, 0.99)}, "head.*": {"eps": 1e-4}}
    assert planned(UpdateWanted(groups=by_adamw), Optimizer(name="muon")).options
    of_matrices = {"body.*": {"lr": 1e-2, "weight_decay": 0.0}}
    assert planned(UpdateWanted(groups=of_matrices), Optimizer(name="muon")).options
    of_lion = {"*": {"betas": (0.9, 0.99)}}
    assert planned(UpdateWanted(groups=of_lion), Optimizer(name="lion")).options


def test_a_pattern_of_not_muon_without_parameters_is_refused() -> None:
    given = *Optimizer().not_muon, "bodi.*"
    with pytest.raises(InputError) as caught:
        planned(UpdateWanted(), Optimizer(name="muon", not_muon=given))
    assert "optimizer.not_muon: 'bodi.*' matches no parameter; the nearest names" in str(
        caught.value
    )
    planned(UpdateWanted(), Optimizer(name="muon", not_muon=(*given[:-1], "body.*")))
    planned(UpdateWanted(), Optimizer(name="lion", not_muon=given))
