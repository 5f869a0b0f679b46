"""Phase 1 of a build: text in, raw files of tokens out, with a journal from which it is resumed.

Sections are encoded in batches, by all cores, while the next ones are read; they are appended in
order, so that nothing of this shows in the files.
"""

import json
import os
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import xxhash

from hpczero.data.corpus import FIELD, Input, Section, open_text, sections, token_dtype
from hpczero.data.raw_files import RawFile, writing
from hpczero.data.token_file import SPLITS
from hpczero.data.tokenizer import ByteTokenizer, Tokenizer, Tokens
from hpczero.errors import HpczeroError, InputError
from hpczero.safe_files import create_nameless, written_durably

BUILDER = 1  # raised when the same text would give another token file
COMMIT_EVERY = 32 * 2**20  # bytes of text
_BATCH = 4 * 2**20  # characters that are encoded at once, by as many threads as there are cores
_MOST_PARTS = 16_384
_AT_ONCE = 2  # batches, so that no core waits for the end of one


@dataclass(frozen=True)
class Recipe:
    """Everything besides the text that decides the content of the token file."""

    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    validation_fraction: float = 0.05
    builder: int = BUILDER
    field: str = FIELD  # of a line of .jsonl

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


class Listener(Protocol):
    """Receives the progress of a build."""

    def said(self, line: str) -> None:
        """Take a message for the user."""

    def advanced(self, done: int, total: int) -> None:
        """Take the bytes of text that have been read."""

    def copied(self, done: int, total: int) -> None:
        """Take the bytes of tokens that are in the token file."""


@dataclass
class ProblemFiles:
    """The number of files with a problem of one kind, and a few of their names."""

    count: int = 0
    examples: list[str] = field(default_factory=list)
    latest: str = ""

    def add(self, name: str) -> None:
        if name == self.latest:
            return
        self.count += 1
        self.latest = name
        if len(self.examples) < 5:
            self.examples.append(name)

    def __str__(self) -> str:
        return ", ".join(self.examples) + (", …" if self.count > len(self.examples) else "")


@dataclass
class BuildState:
    """The progress of phase 1: the journal's content."""

    recipe: dict[str, str | float | int]
    done: int = 0  # inputs that are read to the end
    position: int = 0  # byte reached in the input after them
    inside: str = ""  # the split of the document that is being read; empty between two documents
    digest: str = ""  # of the inputs read so far, as they were then
    lengths: dict[str, int] = field(default_factory=dict)  # values in each raw file
    replaced: ProblemFiles = field(default_factory=ProblemFiles)  # had text that was not UTF-8
    unreadable: ProblemFiles = field(default_factory=ProblemFiles)


def names_digest(inputs: Sequence[Input], field: str = FIELD) -> str:
    """Digest of the inputs' names and sizes, and of the field if it is not the default.

    Files of earlier versions record their names and sizes alone.
    """
    digest = xxhash.xxh3_128(b"" if field == FIELD else b"field\0%s\0" % os.fsencode(field))
    for source in inputs:
        digest.update(os.fsencode(source.name) + b"\0%d\0" % source.size)
    return str(digest.hexdigest())


@dataclass(frozen=True)
class InputPart:
    """A section of an input, or the input's end."""

    source: Input
    section: Section | None = None
    unreadable: str = ""  # why the input could not be opened


def batches(parts: Iterator[InputPart]) -> Iterator[list[InputPart]]:
    """Yield some megabytes of text at a time; an error comes after what was read before it."""
    batch: list[InputPart] = []
    size = 0
    try:
        for part in parts:
            batch.append(part)
            size += len(part.section.text) if part.section else 0
            if size >= _BATCH or len(batch) >= _MOST_PARTS:
                yield batch
                batch = []
                size = 0
    except (HpczeroError, OSError):
        yield batch
        raise
    yield batch


def encoded(
    read: Iterator[list[InputPart]], encoding: Tokenizer
) -> Iterator[tuple[list[InputPart], list[Tokens]]]:
    """Yield batches with their tokens, in order, the next ones being encoded meanwhile."""

    def encode(batch: list[InputPart]) -> list[Tokens]:
        return encoding.encode([part.section.text if part.section else "" for part in batch])

    waiting: deque[tuple[list[InputPart], Future[list[Tokens]]]] = deque()
    failure: Exception | None = None
    with ThreadPoolExecutor(_AT_ONCE, "encode") as pool:
        try:
            for batch in read:
                waiting.append((batch, pool.submit(encode, batch)))
                if len(waiting) > _AT_ONCE:
                    before, tokens = waiting.popleft()
                    yield before, tokens.result()
        except (HpczeroError, OSError) as error:
            failure = error
        for before, tokens in waiting:
            yield before, tokens.result()
    if failure:
        raise failure


class Reader:
    """Phase 1: text in, raw files out.

    `commit_every`: bytes of text from journal to journal. 0: no journal, raw files without a name.
    """

    def __init__(
        self, inputs: list[Input], recipe: Recipe, work: Path, listener: Listener, commit_every: int
    ) -> None:
        self._inputs = inputs
        self._work = work
        self._listener = listener
        self._commit_every = commit_every
        self._fraction = recipe.validation_fraction
        self._tokenizer = recipe.tokenizer
        self._field = recipe.field
        resumed = _resumed(inputs, recipe, work, listener) if commit_every else None
        self.state = resumed or BuildState(recipe.facts())
        self._digest = _digest(inputs[: self.state.done])
        tokens = token_dtype(self._tokenizer.vocabulary)
        documents = np.dtype("<i8")
        self.raw = {
            split: {
                "tokens": self._raw_file(f"{split}.tokens", tokens),
                "documents": self._raw_file(f"{split}.documents", documents),
            }
            for split in SPLITS
        }
        for files in self.raw.values():
            if not files["documents"].length:
                files["documents"].append(np.zeros(1))

    def _raw_file(self, name: str, dtype: np.dtype) -> RawFile:
        if self._commit_every:
            return RawFile(self._work / name, dtype, self.state.lengths.get(name, 0))
        with writing(self._work):
            return RawFile(self._work, dtype, 0, create_nameless(self._work))

    def close(self) -> None:
        for files in self.raw.values():
            for file in files.values():
                file.close()

    def read(self) -> None:
        self._total = _bytes(self._inputs)
        self._before = _bytes(self._inputs[: self.state.done])
        self._unsaved = 0
        for batch, tokens in encoded(batches(self._stretches()), self._tokenizer):
            for part, of_part in zip(batch, tokens, strict=True):
                self._take(part, of_part)
        self._listener.advanced(self._total, self._total)
        self._commit(None)

    def _take(self, part: InputPart, tokens: Tokens) -> None:
        """Append a section, or note the end of an input."""
        state = self.state
        source = part.source
        section = part.section
        if section is None:
            if part.unreadable:
                state.unreadable.add(f"{source.path} ({part.unreadable})")
            self._before += source.size
            state.done += 1
            state.position = 0
            self._digest.update(_identity(source))
            return
        if section.damaged:
            state.replaced.add(str(source.path))
        self._append(section, tokens, source)
        if section.resume is None:
            return
        self._unsaved += section.resume - state.position
        state.position = section.resume
        reached = min(source.size, state.position)  # a file may grow meanwhile
        self._listener.advanced(min(self._total, self._before + reached), self._total)
        if self._unsaved >= self._commit_every > 0:
            self._commit(source)
            self._unsaved = 0

    def _stretches(self) -> Iterator[InputPart]:
        """Yield what there is to read, each input followed by its end."""
        position = self.state.position
        for source in self._inputs[self.state.done :]:
            try:
                file = open_text(source)
            except OSError as error:
                yield InputPart(source, unreadable=error.strerror or "it cannot be read")
                position = 0
                continue
            for section in self._sections(source, file, position):
                yield InputPart(source, section)
            yield InputPart(source)
            position = 0

    def _sections(self, source: Input, file: BinaryIO, position: int) -> Iterator[Section]:
        with file:
            try:
                for section in sections(source, file, position, self._field):
                    yield section
                    position = section.resume or position
            except (OSError, EOFError, zlib.error) as error:
                why = getattr(error, "strerror", None) or error
                raise HpczeroError(
                    f"{source.path} cannot be read past byte {position}: {why}"
                ) from error
            status = os.fstat(file.fileno())
        if (status.st_size, status.st_mtime_ns) != (source.size, source.changed):
            raise HpczeroError(
                f"{source.path} changed while the corpus was built: "
                "give the command again when the file is complete"
            )

    def _append(self, section: Section, tokens: Tokens, source: Input) -> None:
        state = self.state
        if (tokens == self._tokenizer.end_of_document).any():
            raise InputError(
                f"{source.path}: the tokenizer makes of its text the token "
                f"{self._tokenizer.end_of_document}, which is to end documents: "
                "name another one with --end-of-document"
            )
        split = self._split_for(len(tokens))
        if state.inside and state.inside != split:
            self._end_document(state.inside)
        self.raw[split]["tokens"].append(tokens)
        state.inside = split
        if section.ends_document:
            self._end_document(split)
            state.inside = ""

    def _split_for(self, tokens: int) -> str:
        """Return "validation" if that brings its share of all tokens closer to the fraction."""
        train, validation = (self.raw[split]["tokens"].length for split in SPLITS)
        wanted = self._fraction * (train + validation + tokens)
        return "validation" if validation + tokens / 2 < wanted else "train"

    def _end_document(self, split: str) -> None:
        files = self.raw[split]
        files["tokens"].append(np.array([self._tokenizer.end_of_document]))
        files["documents"].append(np.array([files["tokens"].length]))

    def _commit(self, current: Input | None) -> None:
        digest = self._digest.copy()
        if current is not None:
            digest.update(_identity(current))
        self.state.digest = digest.hexdigest()
        for split, files in self.raw.items():
            for kind, file in files.items():
                file.commit()
                self.state.lengths[f"{split}.{kind}"] = file.length
        if not self._commit_every:
            return
        journal = self._work / "journal.json"
        with writing(journal), written_durably(journal) as new:
            new.write(json.dumps(asdict(self.state)).encode())


def _resumed(
    inputs: list[Input], recipe: Recipe, work: Path, listener: Listener
) -> BuildState | None:
    """Return the journal's state; None, with a message, if it cannot be used; None without one."""
    try:
        content = json.loads((work / "journal.json").read_text(encoding="utf-8"))
        for name in ("replaced", "unreadable"):
            content[name] = ProblemFiles(**content[name])
        state = BuildState(**content)
        sizes = {name: (work / name).stat().st_size for name in state.lengths}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        listener.said(f"starting over: {work} cannot be used ({error})")
        return None
    why = ""
    if state.recipe != recipe.facts():
        why = f"{work} was begun with {state.recipe}, this is {recipe.facts()}"
    elif state.digest != _digest(inputs[: state.done + bool(state.position)]).hexdigest():
        why = "files that were read before have changed"
    elif any(sizes[name] < length for name, length in state.lengths.items()):
        why = f"{work} is shorter than its journal says"  # a value has one byte at least
    if why:
        listener.said(f"starting over: {why}")
        return None
    listener.said(f"resuming after {_bytes(inputs[: state.done]) + state.position} bytes of text")
    return state


def _bytes(inputs: Sequence[Input]) -> int:
    return sum(source.size for source in inputs)


def _digest(inputs: Sequence[Input]) -> "xxhash.xxh3_128":
    digest = xxhash.xxh3_128()
    for source in inputs:
        digest.update(_identity(source))
    return digest


def _identity(source: Input) -> bytes:
    return os.fsencode(source.path.absolute()) + b"\0%d\0%d\0" % (source.size, source.changed)
