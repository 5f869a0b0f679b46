"""Every operator in every precision and direction against fp64, beside PyTorch's own operations.

The tests run on the device of `tests.support.device`.

Legend: x [samples, rows, columns], flattened where an operator has rows only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hpczero_kernels import cross_entropy, dropout, elementwise, glu, norm, rotary, soft_cap
from hpczero_kernels.dispatch import upcast_half
from hpczero_kernels.operations import OPERATIONS
from tests.support.device import DEVICE, KERNELS, distance, drawn, size

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Two roundings of fp32, a quarter of a rounding of a half.
FLOOR = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
SMALL = [(1, 2, 24), (1, 3, 13), (1, 1, 1)]
SHAPES = (
    SMALL
    if KERNELS and DEVICE == "cpu"
    else [*SMALL, (5, 3, 123), (2, 4, 256), (3, 1, 1032), (1, 2, 4096)]
)
KEY = 0xFEDCBA9876543210
PLACE = dropout.ActivationWindow(all_columns=8200, first_row=3, first_column=8)
Operator = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """One operator: `made` draws its inputs from shape, precision and offset.

    `own` and `torchs` are hpczero's and PyTorch's implementation, which take these inputs.
    """

    made: Callable[[tuple[int, int, int], torch.dtype, int], list[Tensor]]
    own: Operator
    torchs: Operator


def rows_and_columns(
    *which: str,
) -> Callable[[tuple[int, int, int], torch.dtype, int], list[Tensor]]:
    def made(shape: tuple[int, int, int], dtype: torch.dtype, offset: int) -> list[Tensor]:
        shapes = {
            "x": shape,
            "column": shape[-1:],
            "both": (*shape[:-1], 2, shape[-1]),
            "heads": (*shape[:2], 2, 2 * shape[-1]),
            "odd_heads": (2 * shape[0], shape[1], 3, 2 * shape[-1] + 1),
        }
        return [drawn(shapes[name], number, dtype, offset) for number, name in enumerate(which, 1)]

    return made


def targets_for(logits: Tensor) -> Tensor:
    targets = torch.arange(logits.shape[0]) * 7 % logits.shape[-1]
    targets[1::3] = cross_entropy.IGNORED
    return targets.to(logits.device)


def torchs_losses(x: Tensor) -> Tensor:
    x = x.flatten(0, 1)
    return torch.nn.functional.cross_entropy(upcast_half(x), targets_for(x), reduction="sum")


def weights_for(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[0], device=logits.device).float() / 4


def torchs_weighted_losses(x: Tensor) -> Tensor:
    x = x.flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(upcast_half(x), targets_for(x), reduction="none")
    return (losses * weights_for(x)).sum()


def samples_of(x: Tensor) -> Tensor:
    return (torch.arange(x.shape[0]) * 1_000_000_007).to(x.device)


def own_dropout(x: Tensor, *rest: Tensor) -> Tensor:
    bias, residual = rest or (None, None)
    return dropout.FusedDropout.apply(
        x, bias, residual, dropout.DropoutParameters(0.3, KEY, samples_of(x), PLACE)
    )


def torchs_dropout(x: Tensor, *rest: Tensor) -> Tensor:
    kept = dropout.keep_mask_reference(KEY, 0.3, samples_of(x), x.shape, PLACE)
    return (x + rest[0]) * kept / 0.7 + rest[1] if rest else x * kept / 0.7


def tables(x: Tensor, pairs: int, by_sample: bool) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of positions from 5 on, or of other positions in each sample."""
    positions = torch.arange(5, 5 + x.shape[1], device=x.device)
    if by_sample:
        positions = positions + 3 * torch.arange(x.shape[0], device=x.device)[:, None]
    cosines, sines = rotary.angles(positions, x.shape[-1])
    return cosines[..., :pairs], sines[..., :pairs]


def torchs_rotary(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn pairs as complex numbers."""
    pairs = cosines.shape[-1]
    wide = upcast_half(x)
    turns = torch.complex(cosines.to(wide.dtype), sines.to(wide.dtype)).unsqueeze(-2)
    complexes = torch.complex(wide[..., :pairs], wide[..., pairs : 2 * pairs]) * turns
    return torch.cat([complexes.real, complexes.imag, wide[..., 2 * pairs :]], -1).to(x.dtype)


def rotary_case(kind: str, share: int, by_sample: bool = False) -> Case:
    """Return the case of heads whose pairs are turned but for those beyond one in `share`."""

    def given(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, *tables(x.detach(), x.shape[-1] // 2 // share, by_sample)

    return Case(
        rows_and_columns(kind),
        lambda x: rotary.Rotary.apply(*given(x)),
        lambda x: torchs_rotary(*given(x)),
    )


CASES = {
    "layer_norm": Case(
        rows_and_columns("x", "column", "column"),
        lambda x, w, b: norm.Norm.apply(x, None, w, b, norm.EPS, True, 0.0),
        norm.layer_norm_reference,
    ),
    "add_layer_norm": Case(
        rows_and_columns("x", "x", "column", "column"),
        lambda x, r, w, b: norm.Norm.apply(x, r, w, b, norm.EPS, True, 0.0),
        norm.add_layer_norm_reference,
    ),
    "rms_norm": Case(
        rows_and_columns("x", "column"),
        lambda x, w: norm.Norm.apply(x, None, w, None, norm.EPS, False, 0.0),
        norm.rms_norm_reference,
    ),
    "rms_norm_with_offset": Case(
        rows_and_columns("x", "column"),
        lambda x, w: norm.Norm.apply(x, None, w, None, norm.EPS, False, 1.0),
        lambda x, w: norm.rms_norm_reference(x, w, norm.EPS, 1.0),
    ),
    "gelu_tanh": Case(
        rows_and_columns("x"),
        lambda x: elementwise.Gelu.apply(x, None, True),
        elementwise.gelu_reference,
    ),
    "bias_gelu_tanh": Case(
        rows_and_columns("x", "column"),
        lambda x, b: elementwise.Gelu.apply(x, b, True),
        elementwise.gelu_reference,
    ),
    "bias_gelu_erf": Case(
        rows_and_columns("x", "column"),
        lambda x, b: elementwise.Gelu.apply(x, b, False),
        lambda x, b: elementwise.gelu_reference(x, b, by_tanh=False),
    ),
    **{
        f"glu_{activation}": Case(
            rows_and_columns("both"),
            lambda x, activation=activation: glu.Glu.apply(x, activation),
            lambda x, activation=activation: glu.glu_reference(x, activation),
        )
        for activation in glu.ACTIVATIONS
    },
    **{
        f"soft_cap_{cap}": Case(
            rows_and_columns("x"),
            lambda x, cap=cap: soft_cap.SoftCap.apply(x, cap),
            lambda x, cap=cap: soft_cap.soft_cap_reference(x, cap),
        )
        for cap in (1.5, 30.0)
    },
    "dropout": Case(rows_and_columns("x"), own_dropout, torchs_dropout),
    "bias_dropout_residual": Case(
        rows_and_columns("x", "column", "x"), own_dropout, torchs_dropout
    ),
    "cross_entropy": Case(
        rows_and_columns("x"),
        lambda x: cross_entropy.CrossEntropy.apply(
            x.flatten(0, 1) * 1, targets_for(x.flatten(0, 1)), None
        ),
        torchs_losses,
    ),
    "weighted_cross_entropy": Case(
        rows_and_columns("x"),
        lambda x: cross_entropy.CrossEntropy.apply(
            x.flatten(0, 1) * 1, targets_for(x.flatten(0, 1)), weights_for(x.flatten(0, 1))
        ),
        torchs_weighted_losses,
    ),
    "rotary": rotary_case("heads", 1),
    "rotary_of_odd_heads": rotary_case("odd_heads", 1),
    "rotary_of_a_quarter": rotary_case("heads", 4),  # of no pair where there are few
    "rotary_of_samples": rotary_case("odd_heads", 2, by_sample=True),
}
OPERATORS = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fill new memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


# numpy warns of the simulator's infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def carried_out(
    operator: Operator, given: list[Tensor], dtype: torch.dtype, seed: int = 100
) -> list[Tensor]:
    """Return outputs, then gradients; the outputs' gradients are drawn in `given`'s precision."""
    inputs = [
        tensor.detach().to(dtype).requires_grad_()
        if dtype != tensor.dtype
        else tensor.detach().requires_grad_()
        for tensor in given
    ]
    made = operator(*inputs)
    outputs = list(made) if isinstance(made, tuple) else [made]
    above = [
        drawn(tuple(out.shape), seed + number, given[0].dtype).to(out.dtype)
        for number, out in enumerate(outputs)
    ]
    gradients = torch.autograd.grad(outputs, inputs, above)
    return [*(out.detach() for out in outputs), *gradients]


@OPERATORS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.few(simulated=13)
def test_it_is_as_exact_as_torchs(
    case: Case, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    given = case.made(shape, dtype, 0)
    exact = carried_out(case.torchs, given, torch.float64)
    theirs, ours = carried_out(case.torchs, given, dtype), carried_out(case.own, given, dtype)
    for number, (right, their, our) in enumerate(zip(exact, theirs, ours, strict=True)):
        assert our.shape == right.shape
        assert our.dtype == their.dtype
        assert our.isfinite().all()
        assert distance(our, right) <= 2 * distance(their, right) + FLOOR[dtype] * size(right), (
            number
        )


@OPERATORS
@pytest.mark.parametrize("shape", [(0, 2, 16), (2, 0, 16)], ids=str)
def test_nothing_gives_nothing(case: Case, shape: tuple[int, int, int]) -> None:
    given = case.made(shape, torch.bfloat16, 0)
    expected, found = (
        carried_out(operator, given, torch.bfloat16) for operator in (case.torchs, case.own)
    )
    for theirs, ours in zip(expected, found, strict=True):
        assert ours.shape == theirs.shape
        assert not ours.any()


@OPERATORS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.few(6, simulated=2)
def test_neither_alignment_nor_another_run_changes_a_bit(case: Case, dtype: torch.dtype) -> None:
    shape = SHAPES[-1] if DEVICE == "cuda" else (1, 3, 24)
    ways = [
        carried_out(case.own, case.made(shape, dtype, offset), dtype) for offset in (0, 0, 1, 3)
    ]
    for way in ways[1:]:
        assert all(torch.equal(*pair) for pair in zip(ways[0], way, strict=True))


@OPERATORS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.few(simulated=9)
def test_what_is_not_finite_goes_where_torch_takes_it(case: Case, bad: float) -> None:
    given = case.made((1, 3, 13), torch.float32, 0)
    given[0][0, 2].flatten()[5] = bad
    expected, same_dtype = (
        carried_out(case.torchs, given, torch.float64),
        carried_out(case.torchs, given, torch.float32),
    )
    found = carried_out(case.own, given, torch.float32)
    for right, torchs, ours in zip(
        expected, same_dtype, found, strict=True
    ):  # some of PyTorch's operations in fp32 make nan of inf
        agrees = [
            torch.isclose(ours.double(), other.double(), equal_nan=True, rtol=1e-5, atol=1e-5)
            for other in (right, torchs)
        ]
        assert torch.logical_or(*agrees).all()


ODD = {
    "a residual of one row": lambda on, x, c: on.add_layer_norm(x, x[:1, :1], c, c),
    "a residual of another precision": lambda on, x, c: on.add_layer_norm(x, x.bfloat16(), c, c),
    "every other element of a weight": lambda on, x, c: on.layer_norm(x[..., :12], c[::2], c[1::2]),
    "every other element of a scale": lambda on, x, c: on.rms_norm(x[..., :12], c[::2]),
    "a bias of another precision": lambda on, x, c: on.gelu(x, c.double()),
    "a bias of one element": lambda on, x, c: on.gelu(x, c[:1]),
    "every other element of a bias": lambda on, x, c: on.gelu(x[..., :12], c[::2]),
    "no columns": lambda on, x, c: on.gelu(x[..., :0]),
    "no gates": lambda on, x, c: on.glu(x[..., None, :0].expand(-1, -1, 2, -1), "gelu"),
    "a column": lambda on, x, c: on.layer_norm(
        x.transpose(-1, -2).contiguous().transpose(-1, -2), c, c
    ),
    "a dropped residual of one row": lambda on, x, c: on.dropout(
        x, 0.5, KEY, samples_of(x), None, x[:1, :1], c[:1]
    ),
    "one angle for all positions": lambda on, x, c: on.rotary(
        x[..., None, :], c[None, :12].cos(), c[None, :12].sin()
    ),
    "angles of one sample for all": lambda on, x, c: on.rotary(
        x[..., None, :], x[:1, :, :12].cos(), x[:1, :, :12].sin()
    ),
    "angles of another precision": lambda on, x, c: on.rotary(
        x[..., None, :], x[0, :, :12].double().cos(), x[0, :, :12].double().sin()
    ),
    "samples of another precision": lambda on, x, c: on.dropout(
        x, 0.5, KEY, samples_of(x).int(), None, None, c
    ),
    "probabilities as targets": lambda on, x, c: on.cross_entropy(x[0] * 1, x[1].softmax(-1)),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_what_no_kernel_takes_is_left_to_torch(
    odd: Callable[..., Tensor | tuple[Tensor, ...]],
) -> None:
    """A kernel would read beyond these tensors."""
    x, column = drawn((2, 3, 24), 1, torch.float32), drawn((24,), 2, torch.float32)
    expected, found = (odd(OPERATIONS[word], x, column) for word in ("torch", "auto"))
    pairs = zip(
        *(made if isinstance(made, tuple) else (made,) for made in (expected, found)), strict=True
    )
    for theirs, ours in pairs:
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("word", OPERATIONS)
def test_more_pairs_than_a_head_has_are_an_error(word: str) -> None:
    x, (cosines, sines) = drawn((2, 3, 1, 9), 1, torch.float32), rotary.angles(torch.arange(3), 10)
    with pytest.raises(AssertionError, match="5 pairs do not fit into a head of 9 elements"):
        OPERATIONS[word].rotary(x, cosines, sines)
    assert OPERATIONS[word].rotary(x, cosines[:, :4], sines[:, :4]).shape == x.shape


def test_rows_that_do_not_count_may_hold_anything() -> None:
    x = drawn((3, 13), 1, torch.float32)
    x[1] = float("nan")
    loss = cross_entropy.CrossEntropy.apply(x.clone(), targets_for(x), None)
    torch.testing.assert_close(loss, torchs_losses(x[None]))
    assert loss.isfinite()


@pytest.mark.skipif(DEVICE == "cuda", reason="the process could not use the GPU any more")
@pytest.mark.parametrize("wrong", [13, -1])
def test_a_target_outside_of_the_vocabulary_is_an_error(wrong: int) -> None:
    x = drawn((3, 13), 1, torch.float32)
    with pytest.raises(
        (RuntimeError, IndexError),
        match=r"a target is outside of the vocabulary of 13|out of bounds",
    ):
        OPERATIONS["auto"].cross_entropy(x, torch.tensor([1, wrong, cross_entropy.IGNORED]))
    with pytest.raises(RuntimeError, match="a target is outside of the vocabulary of 13"):
        cross_entropy.check_targets(torch.tensor([1, wrong, cross_entropy.IGNORED]), 13)
    cross_entropy.check_targets(torch.tensor([0, 12, cross_entropy.IGNORED]), 13)


@OPERATORS
@pytest.mark.skipif(KERNELS, reason="kernels have no fp64")
def test_gradients_are_those_of_the_formula(case: Case) -> None:
    given = [tensor.double().requires_grad_() for tensor in case.made((2, 2, 5), torch.float32, 0)]
    if case in (CASES["cross_entropy"], CASES["weighted_cross_entropy"]):
        pytest.skip("its arithmetic is fp32 whatever comes")
    assert torch.autograd.gradcheck(case.own, given)


@OPERATORS
@pytest.mark.skipif(KERNELS and DEVICE == "cpu", reason="the simulator's kernels are no graph")
@pytest.mark.few(8)
def test_it_survives_the_compiler(case: Case) -> None:
    given = case.made((2, 3, 24), torch.float32, 0)
    plain = carried_out(case.own, given, torch.float32)
    torch.compiler.reset()
    traced = torch.compile(case.own, backend="aot_eager", fullgraph=True)
    compiled = carried_out(traced, given, torch.float32)
    for left, right in zip(plain, compiled, strict=True):
        torch.testing.assert_close(left, right)
