"""`hpczero run`, as far as it needs nothing that takes long to import."""

import argparse

from hpczero import kernel_cache


def run(options: argparse.Namespace) -> int:
    code: int = kernel_cache.load("hpczero.train.run").run(options)
    return code
