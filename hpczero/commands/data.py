"""`hpczero data build`, `show` and `verify`: make a token file from text, and look into it."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpczero.data.build import build_token_file, is_up_to_date
from hpczero.data.corpus import Corpus, find
from hpczero.data.encode import Effort, Listener
from hpczero.data.journal import Recipe
from hpczero.data.plain_formats import is_plain
from hpczero.data.plain_tokens import open_plain_tokens
from hpczero.data.token_file import TokenFile, open_token_file
from hpczero.data.tokenizer import tokenizer
from hpczero.errors import InputError, Stopped, for_terminal
from hpczero.safe_files import make_own_folder, remove_tree
from hpczero.text import printable

_SECONDS_BETWEEN_LINES = 10.0
_LITTLE_TEXT = 16 * 2**20  # bytes: encoded before processes have started
_MOST_WORKERS = 4096
_MOST_DAMAGES = 20  # lines of damages that are printed


def build(options: argparse.Namespace) -> int:
    output = Path(options.output)
    encoding = tokenizer(options.tokenizer, options.end_of_document)
    recipe = Recipe(encoding, options.validation_fraction, field=options.field)
    _check_output(output)
    if not 0 <= recipe.validation_fraction < 1:  # NaN is neither
        raise InputError(
            f"--validation-fraction is {recipe.validation_fraction}: "
            "it must be at least 0 and less than 1"
        )
    if options.max_bad < 0:
        raise InputError(f"--max-bad is {options.max_bad}: it must be at least 0")
    text = find(options.paths)
    workers = _workers(options.workers, text)
    if options.submit:
        return _submitted(output, text, recipe, options)
    if options.dry_run or options.overrides:
        word = "--dry-run" if options.dry_run else "--set"
        raise InputError(f"{word} is for --submit SPEC: say it too, or leave this out")
    effort = Effort(workers=workers, most_bad=options.max_bad)
    work = output.with_name(output.name + ".partial")
    if output.exists():
        _check_up_to_date(output, text, recipe, options.max_bad)
        with contextlib.suppress(OSError):
            remove_tree(work)  # left if a builder was killed between its last two actions
        print(f"{output} is up to date")
        return 0
    _make(work)
    try:
        with _listener() as listener:
            built = build_token_file(text, output, recipe, work, listener, effort)
    except KeyboardInterrupt:
        raise Stopped(
            f"stopped; the same command goes on where it was (what is done lies in {work})"
        ) from None
    print(_summary(built))
    if recipe.validation_fraction and not built.splits["validation"].documents:
        print(
            "WARN nothing for validation: too little text for a share of "
            f"{recipe.validation_fraction}; --validation-fraction sets it"
        )
    return 0


def _submitted(output: Path, text: Corpus, recipe: Recipe, options: argparse.Namespace) -> int:
    """Submit the same command, with whole paths, as a job."""
    from hpczero.batch.submit_build import submit_build

    if output.exists():
        _check_up_to_date(output, text, recipe, options.max_bad)
        print(f"{output} is up to date")
        return 0
    path = Path(options.tokenizer)
    named = str(path.absolute()) if path.exists() else options.tokenizer
    words = {
        "-o": str(output.absolute()),
        "--tokenizer": named,
        "--end-of-document": options.end_of_document,
        "--validation-fraction": repr(recipe.validation_fraction),
        "--field": options.field,
        "--workers": options.workers,
        "--max-bad": options.max_bad,
    }
    given = [f"{name}={value}" for name, value in words.items() if value is not None]
    given[0:1] = ["-o", words["-o"]]
    paths = [str(Path(name).absolute()) for name in options.paths]
    return submit_build(options.submit, output, [*given, "--", *paths], options)


def show(options: argparse.Namespace) -> int:
    if is_plain(Path(options.path)):
        return _show_plain(Path(options.path), options.json)
    file = open_token_file(Path(options.path))
    if options.json:
        print(json.dumps(_facts(file), indent=2))
    else:
        print(_summary(file))
    return 0


def _show_plain(path: Path, as_json: bool) -> int:
    """Print what is known of tokens that others made, without a split for validation."""
    tokens = open_plain_tokens(path, 0.0)
    facts = tokens.describe()
    split = tokens.splits["train"]
    facts |= {
        "form": tokens.form,
        "tokens": len(split),
        "documents": facts["documents"]["train"],
        "end_of_document": tokens.end_of_document,
    }
    facts["largest_seen"] = facts.pop("vocabulary") - 1
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0
    end = "end with no token of their own, or are not known"
    if tokens.end_of_document is not None:
        end = f"end with token {tokens.end_of_document}"
    print(f"{printable(str(path))}: {tokens.form}, fingerprint {tokens.fingerprint}")
    print(f"  {len(split):,} tokens, {facts['documents']:,} documents, which {end}")
    print(f"  the largest token of those looked at is {tokens.largest}; no checksums")
    return 0


def verify(options: argparse.Namespace) -> int:
    """Return 0 if all tokens are as they were written, else 1."""
    if is_plain(Path(options.path)):
        raise InputError(
            f"{printable(options.path)} was not made by hpczero, and such tokens have no "
            "checksums: `hpczero data show` prints what is known of them"
        )
    file = open_token_file(Path(options.path))
    damages = list(file.damages())
    if options.json:
        print(json.dumps(file.describe() | {"damages": damages}, indent=2))
        return 1 if damages else 0
    path = printable(str(file.path))
    if damages:
        print(f"{path}: DAMAGED")
        for damage in damages[:_MOST_DAMAGES]:
            print(f"  {damage}")
        if len(damages) > _MOST_DAMAGES:
            print(f"  and {len(damages) - _MOST_DAMAGES:,} more")
        return 1
    tokens = sum(len(split.tokens) for split in file.splits.values())
    no_sums = (
        "" if file.has_checksums else " (it has no checksums of blocks: hpczero builds them in)"
    )
    print(f"{path}: good, {tokens:,} tokens with the fingerprint {file.fingerprint}{no_sums}")
    return 0


def _workers(wanted: int | None, text: Corpus) -> int:
    """Return the number of processes that encode; 0: none but this one."""
    if wanted is not None and not 1 <= wanted <= _MOST_WORKERS:
        raise InputError(f"--workers is {wanted}: it must be from 1 to {_MOST_WORKERS:,}")
    if wanted is None and sum(source.size for source in text.inputs) < _LITTLE_TEXT:
        return 0
    return wanted or len(os.sched_getaffinity(0))


def _check_output(output: Path) -> None:
    if output.suffix not in (".h5", ".hdf5"):
        raise InputError(f"the output {output} must end in .h5")
    folder = output.absolute().parent
    if not folder.is_dir():
        raise InputError(f"the output's folder {folder} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"the output's folder {folder} cannot be written")


def _make(work: Path) -> None:
    """Make the work folder; some folders look writable, and are not."""
    try:
        make_own_folder(work)
    except OSError as error:
        raise InputError(
            f"the output's folder {work.absolute().parent} cannot be written: {error.strerror}"
        ) from error


def _check_up_to_date(output: Path, text: Corpus, recipe: Recipe, most_bad: int) -> None:
    try:
        file = open_token_file(output)
        same = is_up_to_date(file, text, recipe)
    except InputError as error:
        raise InputError(f"the output exists, and is left alone: {error}") from error
    if not same:
        raise InputError(
            f"{output} exists, and was made from other text or with other parameters: "
            "remove it, or choose another output"
        )
    if file.bad_records > most_bad:
        raise InputError(
            f"{output} exists, and {file.bad_records:,} bad records were left out of it, while "
            f"--max-bad is {most_bad:,}: --max-bad {file.bad_records} takes it as it is; else mend "
            "the text, and remove it or choose another output"
        )


def _facts(file: TokenFile) -> dict[str, Any]:
    more = {
        "bytes": file.path.stat().st_size,
        "bytes_per_token": file.splits["train"].tokens.itemsize,
        "validation_fraction": file.validation_fraction,
        "bad_records": file.bad_records,
        "block_checksums": file.has_checksums,
        "unigram_entropy": {name: split.entropy() for name, split in file.splits.items()},
    }
    return file.describe() | more


def _summary(file: TokenFile) -> str:
    lines = [
        f"{printable(str(file.path))}: tokenizer {file.tokenizer}, vocabulary {file.vocabulary}, "
        f"fingerprint {file.fingerprint}"
    ]
    for name, split in file.splits.items():
        size = f"{len(split.tokens):>15,} tokens {split.documents:>11,} documents"
        lines.append(f"  {name:10} {size}   unigram entropy {split.entropy():.4f} nats per token")
    return "\n".join(lines)


@contextlib.contextmanager
def _listener() -> Iterator[Listener]:
    if not sys.stdout.isatty():
        yield _Lines()
        return
    from rich import progress as rich

    with rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    ) as progress:
        yield _Bar(progress)


class _Bar:
    """Progress bars on a terminal: one for reading text, one for writing the token file."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._tasks: dict[str, Any] = {}
        self._shown = 0.0

    def said(self, line: str) -> None:
        self._progress.print(for_terminal(line), markup=False, highlight=False, soft_wrap=True)

    def advanced(self, done: int, total: int) -> None:
        self._show("reading text", done, total)

    def copied(self, done: int, total: int) -> None:
        self._show("writing tokens", done, total)

    def _show(self, doing: str, done: int, total: int) -> None:
        if doing not in self._tasks:
            self._tasks[doing] = self._progress.add_task(doing, total=total, completed=done)
        now = time.monotonic()
        if done == total or now - self._shown > 0.1:
            self._progress.update(self._tasks[doing], completed=done)
            self._shown = now


class _Lines:
    """Progress as a line every few seconds, for logs."""

    def __init__(self) -> None:
        self._shown = time.monotonic()
        self._began: dict[str, tuple[float, int]] = {}  # activity -> its start: time, bytes done
        self._finished: set[str] = set()

    def said(self, line: str) -> None:
        print(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} build {for_terminal(line)}", flush=True)

    def advanced(self, done: int, total: int) -> None:
        self._show("read", done, total)

    def copied(self, done: int, total: int) -> None:
        self._show("written", done, total)

    def _show(self, doing: str, done: int, total: int) -> None:
        now = time.monotonic()
        began, first = self._began.setdefault(doing, (now, done))
        last = done == total and doing not in self._finished
        if last or now - self._shown > _SECONDS_BETWEEN_LINES:
            rate = f" bytes_per_second={(done - first) / (now - began):.0f}" if now > began else ""
            self.said(f"{doing}={done} total={total}{rate}")
            self._shown = now
            self._finished |= {doing} if last else set()
