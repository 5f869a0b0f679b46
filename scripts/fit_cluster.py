"""Fit the numbers of a shipped cluster to the published steps that tests hold it against.

    python scripts/fit_cluster.py a100          # or v100; a minute

prints the numbers for clusters/*.toml and for the records of `tests/support/published_steps.py`,
and the errors with them.
"""

import sys
from collections.abc import Sequence
from math import expm1
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.fitting import Fit, a100, fit, v100

FITS = {"a100": a100, "v100": v100}


def summary(errors: Sequence[float]) -> str:
    sizes = sorted(abs(expm1(error)) for error in errors)
    median, late = sizes[len(sizes) // 2], sizes[int(0.9 * len(sizes))]
    mean = sum(sizes) / len(sizes)
    return f"mean {mean:.1%}, median {median:.1%}, p90 {late:.1%}, worst {sizes[-1]:.1%}"


def report(of: Fit, errors: Sequence[float]) -> None:
    weights = [weight for _, weight in (*of.rows, *of.others)]
    plain = [error / weight for error, weight in zip(errors, weights, strict=True)]
    print(f"  {len(of.rows)} rows: {summary(plain[: len(of.rows)])}")
    if of.others:
        print(f"  {len(of.others)} others: {summary(plain[len(of.rows) :])}")


def main() -> None:
    of = FITS[sys.argv[1]]()
    print("as they stand")
    report(of, of.errors({}))
    found = fit(of.errors, of.numbers, rounds=15)
    print("fitted")
    report(of, of.errors(found))
    for path, value in found.items():
        print(f"  {path} = {value:.4g}")


if __name__ == "__main__":
    main()
