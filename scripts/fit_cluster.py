"""Fit the numbers of shipped clusters to published steps, and print the tables of these.

    python scripts/fit_cluster.py a100          # or v100; a minute
    python scripts/fit_cluster.py left-out      # MosaicML's rows by fits without their model
    python scripts/fit_cluster.py tables        # of docs/foresight.md

A fit prints numbers for clusters/*.toml and for the records of `tests/support/published_steps.py`,
and the errors with them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.fitting import Fit, a100, fit, left_out, summary, v100
from tests.support.published_tables import tables

FITS = {"a100": a100, "v100": v100}


def report(of: Fit, errors: Sequence[float]) -> None:
    weights = [weight for _, weight in (*of.rows, *of.others)]
    plain = [error / weight for error, weight in zip(errors, weights, strict=True)]
    print(f"  {len(of.rows)} rows: {summary(plain[: len(of.rows)])}")
    if of.others:
        print(f"  {len(of.others)} others: {summary(plain[len(of.rows) :])}")


def fitted(name: str) -> None:
    of = FITS[name]()
    print("as they stand")
    report(of, of.errors({}))
    found = fit(of.errors, of.numbers, rounds=15)
    print("fitted")
    report(of, of.errors(found))
    for path, value in found.items():
        print(f"  {path} = {value:.4g}")


def main() -> None:
    word = sys.argv[1]
    if word == "tables":
        print("\n".join(tables()))
    elif word == "left-out":
        print(summary(left_out(a100())))
    else:
        fitted(word)


if __name__ == "__main__":
    main()
