"""`hpczero run`: print a first line, then load torch, MPI and the kernels, and train."""

import argparse
import gc
import sys

from hpczero import env, kernel_cache
from hpczero.text import log_line
from hpczero.train.console import Tolerant


def run(options: argparse.Namespace) -> int:
    if all(rank == 0 for rank, _ in env.launched_tasks().values()):
        _say(log_line("load", {"spec": options.spec, "what": "torch, MPI and kernels"}))
    train = kernel_cache.load("hpczero.train.run")
    # At its end the interpreter would look for garbage among the libraries for seconds. Nothing of
    # a user is loaded yet: what a callback or model has open is still written and closed then.
    gc.freeze()
    code: int = train.run(options)
    return code


def _say(words: str) -> None:
    """Print to a user who waits while many ranks load libraries from a shared file system."""
    stream = Tolerant(sys.stdout)
    stream.write(words + "\n")
    stream.flush()
