"""Sum up the parts of scripts/test.sh: a line for each, the files of tests that took longest, and
all passed, failed and skipped.

    python scripts/count_tests.py FOLDER WALL_SECONDS

The folder holds `parts` (a line each: name, exit code, processes left running, seconds,
processor-seconds) and NAME.xml (JUnit) for the parts that are pytest. A part that ends badly
without a failed test to show for it, or that leaves processes behind, counts as one failure.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

LONG = 20.0  # seconds of all tests of a file
MOST = 24  # files that are named


class Count(NamedTuple):
    passed: int
    failed: int
    skipped: int


def count(code: int, left: int, results: Path) -> Count:
    passed = failed = skipped = 0
    if results.is_file():
        for case in cases(results):
            kinds = {child.tag for child in case}
            if kinds & {"failure", "error"}:
                failed += 1
            elif "skipped" in kinds:
                skipped += 1
            else:
                passed += 1
    elif code == 0:
        passed = 1
    if (code != 0 and failed == 0) or left > 0:
        failed += 1
    return Count(passed, failed, skipped)


def cases(results: Path) -> Iterable[Element]:
    """Return what a part has told of its tests, or one error where the file is cut off."""
    try:
        return ElementTree.parse(results).iter("testcase")
    except ElementTree.ParseError:
        return ElementTree.fromstring("<testsuite><testcase><error/></testcase></testsuite>")


def seconds_by_file(results: Path) -> dict[str, float]:
    """Return how long the tests of each file took, by its name as a module."""
    seconds: Counter[str] = Counter()
    for case in cases(results) if results.is_file() else ():
        seconds[case.get("classname", "")] += float(case.get("time", 0))
    return seconds


def main(folder: Path, wall: int) -> int:
    total = Count(0, 0, 0)
    processors = 0.0
    longest: Counter[str] = Counter()
    print()
    for line in (folder / "parts").read_text().splitlines():
        name, code, left, seconds, measured = line.split("\t")
        processors += float(measured)
        results = folder / f"{name}.xml"
        part = count(int(code), int(left), results)
        for file, of_file in seconds_by_file(results).items():
            longest[f"{name:16} {file}"] += of_file
        remark = f", exit code {code}" if code != "0" else ""
        remark += f", {left} processes left running" if left != "0" else ""
        print(
            f"{name:16} {part.passed:5} passed {part.failed:4} failed {part.skipped:4} "
            f"skipped {seconds:>5} s {float(measured):5.0f} processor-seconds{remark}"
        )
        total = Count(*map(sum, zip(total, part, strict=True)))
    for words, took in longest.most_common(MOST):
        if took > LONG:
            print(f"{words}: {took:.0f} s")
    print(f"{processors:.0f} processor-seconds, installation apart; {wall} s by the clock, with it")
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped")
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
