"""The time before the first step: a line at once, and no library that nothing needs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import CHECKOUT, hpczero, launch, mpirun

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

SAID = r"\S+Z load spec=spec\.toml what=\"torch, MPI and kernels\"\n"


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_first_line_comes_before_torch(ranks: int, tmp_path: Path) -> None:
    """With a torch that cannot be imported nothing else comes."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )
    path = os.pathsep.join(
        filter(None, [str(tmp_path), str(CHECKOUT), os.environ.get("PYTHONPATH")])
    )
    command = [*(mpirun(ranks) if ranks else []), *hpczero("run", "spec.toml")]
    done = launch(command, 120, tmp_path, {"PYTHONPATH": path})
    assert done.code == 1, done
    assert re.search(SAID, done.out), done
    assert done.out.count(" load ") == 1
    assert "this needs the package torch" in done.err


def test_no_compiler_is_imported() -> None:
    """torch._dynamo with sympy took longer than all else that hpczero adds to torch."""
    code = (
        "import hpczero.kernel_cache as c, sys; c.load('hpczero.train.run'); print([m for m in "
        "('torch._dynamo', 'sympy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done


@pytest.mark.slow
def test_the_compiler_still_takes_a_choice_for_a_constant() -> None:
    code = """
import torch
from hpczero_kernels import dispatch
def marked(function):
    return {name: value for name, value in vars(function).items() if name.startswith("_dynamo")}
assert marked(dispatch._choose) == marked(torch.compiler.assume_constant_result(lambda: 0)) != {}
"""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "numba_cuda")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done
