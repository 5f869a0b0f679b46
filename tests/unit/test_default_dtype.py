"""torch.set_default_dtype is the user's: nothing that hpczero makes for itself takes its type
from there.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch import CHECKOUT

MAKERS = {
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "arange",
    "linspace",
    "logspace",
    "rand",
    "randn",
    "eye",
}
MAKERS |= {"scalar_tensor", "sparse_coo_tensor", "empty_strided", "Tensor"}
PLAIN_MODELS = "hpczero/model/"  # on meta; their parameters are replaced, in train.precision


def files() -> list[Path]:
    found = [
        *(CHECKOUT / "hpczero").rglob("*.py"),
        *(CHECKOUT / "numba_cuda" / "hpczero_kernels").rglob("*.py"),
    ]
    return [
        path
        for path in sorted(found)
        if not str(path.relative_to(CHECKOUT)).startswith(PLAIN_MODELS)
    ]


def without_dtype(text: str) -> Iterator[int]:
    """Lines that make a tensor of PyTorch's default type, or of one that follows from values."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if (
                of_torch
                and node.func.attr in MAKERS
                and not any(word.arg == "dtype" for word in node.keywords)
            ):
                yield node.lineno


def test_every_tensor_is_made_with_a_dtype() -> None:
    found = [
        f"{path.relative_to(CHECKOUT)}:{line}"
        for path in files()
        for line in without_dtype(path.read_text())
    ]
    assert not found, "say dtype=: " + ", ".join(found)


@pytest.mark.parametrize("line", ["torch.zeros(3)", "x = torch.tensor([1.0], device=d)"])
def test_one_without_is_found(line: str) -> None:
    assert list(without_dtype(line)) == [1]
    assert not list(without_dtype(line.replace(")", ", dtype=torch.float32)")))
