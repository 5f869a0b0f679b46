"""A tiny run on a few ranks, started as a user starts it."""

from pathlib import Path

from tests.support.launch import Finished, hpczero, launch, mpirun

SPEC = """
name = "tiny"
[model]
layers = 2
hidden = 32
heads = 4
seq_len = 16
[data]
source = "synthetic"
[train]
steps = 5
global_batch = 5
micro_batch = 2
eval_batches = 2
log_every = 1
"""


def command(ranks: int, *arguments: str) -> list[str]:
    """Return the command that starts the run; `ranks` = 0: without mpirun."""
    return [*(mpirun(ranks) if ranks else []), *hpczero("run", "spec.toml", *arguments)]


def train(folder: Path, ranks: int, *arguments: str, **variables: str) -> Finished:
    """Run it to its end, and assert that no process is left."""
    done = launch(command(ranks, *arguments), 120, folder, variables)
    assert done.left == []
    return done
