"""A build's recipe, and the journal from which it is resumed."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import xxhash

from hpczero.data.corpus import FIELD, Input, Place
from hpczero.data.raw_files import writing
from hpczero.data.tokenizer import ByteTokenizer, Tokenizer
from hpczero.errors import InputError
from hpczero.safe_files import written_durably

BUILDER = 1  # raised when the same text would give another token file
COMMIT_EVERY = 32 * 2**20  # bytes of text
_NAME = "journal.json"
SHOWN = 5  # names of files, or records


@dataclass(frozen=True)
class Recipe:
    """Everything besides the text that decides the content of the token file."""

    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    validation_fraction: float = 0.05
    builder: int = BUILDER
    field: str = FIELD  # of a line or row

    def facts(self) -> dict[str, str | float | int]:
        """Return what a journal holds, to tell whether it belongs to this recipe."""
        named = {"tokenizer": self.tokenizer.name, "field": self.field}
        return named | {"validation_fraction": self.validation_fraction, "builder": self.builder}

    def attributes(self, inputs: Sequence[Input]) -> dict[str, str | float | int]:
        """Return the token file's attributes for this recipe and these inputs."""
        return {
            "tokenizer": self.tokenizer.name,
            "validation_fraction": self.validation_fraction,
            "builder": self.builder,
            "inputs": names_digest(inputs, self.field),
        }


@dataclass
class Problems:
    """The number of files or records with a problem of one kind, and a few of them."""

    count: int = 0
    examples: list[str] = field(default_factory=list)
    latest: str = ""

    def add(self, name: str) -> None:
        if name == self.latest:
            return
        self.count += 1
        self.latest = name
        if len(self.examples) < SHOWN:
            self.examples.append(name)

    def __str__(self) -> str:
        return ", ".join(self.examples) + (", …" if self.count > len(self.examples) else "")


@dataclass
class BuildState:
    """The progress of phase 1: the journal's content."""

    recipe: dict[str, str | float | int]
    done: int = 0  # inputs that are read to the end
    position: int = 0  # reached in the input after them (`corpus.Place`)
    number: int = 0
    inside: str = ""  # the split of the document that is being read; empty between two documents
    has_text: bool = False  # the input after those that are done, so far
    digest: str = ""  # of the inputs read so far, as they were then
    lengths: dict[str, int] = field(default_factory=dict)  # values in each raw file
    replaced: Problems = field(default_factory=Problems)  # files with text that was not UTF-8
    unreadable: Problems = field(default_factory=Problems)  # files
    empty: Problems = field(default_factory=Problems)  # files
    bad: Problems = field(default_factory=Problems)  # records

    def attributes(self) -> dict[str, int]:
        """Return the token file's attributes for what was left out, if anything was."""
        return {"bad_records": self.bad.count} if self.bad.count else {}

    @property
    def place(self) -> Place:
        return Place(self.position, self.number)

    @place.setter
    def place(self, place: Place) -> None:
        self.position, self.number = place.position, place.number

    def write(self, work: Path) -> None:
        journal = work / _NAME
        with writing(journal), written_durably(journal) as new:
            new.write(json.dumps(asdict(self)).encode())


def has_journal(work: Path) -> bool:
    return (work / _NAME).exists()


def resumed(
    inputs: list[Input], recipe: Recipe, work: Path, said: Callable[[str], None], most_bad: int
) -> BuildState | None:
    """Return the journal's state; None, with a message, if it cannot be used; None without one.

    InputError if more bad records were left out than may be.
    """
    try:
        content = json.loads((work / _NAME).read_text(encoding="utf-8"))
        for name in {"replaced", "unreadable", "empty", "bad"} & content.keys():
            content[name] = Problems(**content[name])
        state = BuildState(**content)
        sizes = {name: (work / name).stat().st_size for name in state.lengths}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        said(f"starting over: {work} cannot be used ({error})")
        return None
    why = ""
    if state.recipe != recipe.facts():
        why = f"{work} was begun with {state.recipe}, this is {recipe.facts()}"
    elif state.digest != digest_of(inputs[: state.done + bool(state.position)]).hexdigest():
        why = "files that were read before have changed"
    elif any(sizes[name] < length for name, length in state.lengths.items()):
        why = f"{work} is shorter than its journal says"  # a value has one byte at least
    if why:
        said(f"starting over: {why}")
        return None
    if state.bad.count > most_bad:
        raise InputError(
            f"{work} is a build that left out {state.bad.count:,} bad records so far ({state.bad}),"
            f" and --max-bad is {most_bad:,}: --max-bad {state.bad.count} goes on with it; without "
            "that folder it begins anew"
        )
    inside = f", {_amount(state)} of the next" if state.position else ""
    said(f"resuming after {state.done} of {len(inputs)} files{inside}")
    return state


def _amount(state: BuildState) -> str:
    return f"{state.number:,} records" if state.number else f"{state.position:,} bytes"


def names_digest(inputs: Sequence[Input], field: str = FIELD) -> str:
    """Digest of the inputs' names and sizes, and of the field if it is not the default.

    Files of earlier versions record their names and sizes alone.
    """
    digest = xxhash.xxh3_128(b"" if field == FIELD else b"field\0%s\0" % os.fsencode(field))
    for source in inputs:
        digest.update(os.fsencode(source.name) + b"\0%d\0" % source.size)
    return str(digest.hexdigest())


def digest_of(inputs: Sequence[Input]) -> "xxhash.xxh3_128":
    """Digest of the inputs as they are now: their paths, sizes and times of change."""
    digest = xxhash.xxh3_128()
    for source in inputs:
        digest.update(identity(source))
    return digest


def identity(source: Input) -> bytes:
    return os.fsencode(source.path.absolute()) + b"\0%d\0%d\0" % (source.size, source.changed)
