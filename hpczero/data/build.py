"""Building a token file from the files of a corpus: streaming, resumable, the same bytes each time.

Phase 1: every section of text is encoded and appended to the raw files of its split in the work
folder. From time to time they are flushed and `journal.json` is replaced: it records which inputs
are done and how long the raw files were then. Phase 2: the raw files are copied into a token file
under a temporary name, which is flushed and renamed.

A builder that finds a journal truncates the raw files to the lengths given there and resumes. The
split of a section depends only on the text before it, so an interruption leaves no trace.
"""

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from hpczero.data.corpus import (
    FIELD,
    Corpus,
    Input,
    Section,
    open_text,
    sections,
    token_dtype,
    tokenizer,
)
from hpczero.data.raw_files import RawFile, only_builder, replace_file, writing
from hpczero.data.token_file import (
    SPLITS,
    TokenFile,
    fill_token_file,
    open_token_file,
    write_token_file,
)
from hpczero.errors import HpczeroError
from hpczero.safe_files import (
    create_nameless,
    give_name,
    make_own_folder,
    remove_tree,
    sync,
    written_durably,
)

BUILDER = 1  # raised when the same text would give another token file
COMMIT_EVERY = 32 * 2**20  # bytes of text


@dataclass(frozen=True)
class Recipe:
    """Everything besides the text that decides the content of the token file."""

    tokenizer: str = "byte"
    validation_fraction: float = 0.05
    builder: int = BUILDER
    field: str = FIELD  # of a line of .jsonl

    def attributes(self, inputs: Sequence[Input]) -> dict[str, str | float | int]:
        """Return the token file's attributes for this recipe and these inputs."""
        return {
            "tokenizer": self.tokenizer,
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


def build_token_file(
    corpus: Corpus,
    output: Path,
    recipe: Recipe,
    work: Path,
    listener: Listener,
    commit_every: int = COMMIT_EVERY,
) -> TokenFile:
    """Build `output` by way of the folder `work`, which is removed afterwards."""
    with writing(work):
        make_own_folder(work)
    with only_builder(work, output, listener.said):
        with (
            _removed_unless_begun(work),
            closing(Reader(corpus.inputs, recipe, work, listener, commit_every)) as reader,
        ):
            reader.read()
        _report(reader.state, corpus, listener)
        encoding = tokenizer(recipe.tokenizer)
        attributes = recipe.attributes(corpus.inputs)
        assembled = work / "assembled.h5"
        write_token_file(assembled, encoding, attributes, reader.raw, listener.copied)
        replace_file(assembled, output)
        with suppress(OSError):
            remove_tree(work)
    return open_token_file(output)


def build_in_one_go(corpus: Corpus, output: Path, recipe: Recipe, listener: Listener) -> bool:
    """Build `output` in files without a name: a builder that is killed leaves nothing behind.

    Return False, with nothing done, if the file system does not support such files.
    """
    with writing(output):
        descriptor = create_nameless(output.parent)
    if descriptor is None:
        return False
    try:
        with closing(Reader(corpus.inputs, recipe, output.parent, listener, 0)) as reader:
            reader.read()
            _report(reader.state, corpus, listener)
            encoding = tokenizer(recipe.tokenizer)
            attributes = recipe.attributes(corpus.inputs)
            fill_token_file(output, descriptor, encoding, attributes, reader.raw, listener.copied)
        # A file that another builder has put there meanwhile has the same bytes.
        with writing(output), suppress(FileExistsError):
            os.fsync(descriptor)
            give_name(descriptor, output)
            sync(output.parent)
    finally:
        os.close(descriptor)
    return True


def is_up_to_date(file: TokenFile, corpus: Corpus, recipe: Recipe) -> bool:
    """Return True if this recipe made the file from inputs of these names and sizes, none newer."""
    wanted = recipe.attributes(corpus.inputs)
    newest = max(source.changed for source in corpus.inputs)
    return (
        all(getattr(file, name) == value for name, value in wanted.items())
        and newest <= file.path.stat().st_mtime_ns
    )


@contextmanager
def _removed_unless_begun(work: Path) -> Iterator[None]:
    """Remove the folder of a build that is refused before it writes its first journal."""
    try:
        yield
    except HpczeroError:
        if not (work / "journal.json").exists():
            with suppress(OSError):
                remove_tree(work)
        raise


def names_digest(inputs: Sequence[Input], field: str = FIELD) -> str:
    """Digest of the inputs' names and sizes, and of the field if it is not the default.

    Files of earlier versions record their names and sizes alone.
    """
    digest = xxhash.xxh3_128(b"" if field == FIELD else b"field\0%s\0" % os.fsencode(field))
    for source in inputs:
        digest.update(os.fsencode(source.name) + b"\0%d\0" % source.size)
    return str(digest.hexdigest())


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
        self._tokenizer = tokenizer(recipe.tokenizer)
        self._field = recipe.field
        resumed = _resumed(inputs, recipe, work, listener) if commit_every else None
        self.state = resumed or BuildState(asdict(recipe))
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
        state = self.state
        total = _bytes(self._inputs)
        before = _bytes(self._inputs[: state.done])
        unsaved = 0
        for source in self._inputs[state.done :]:
            for section in self._sections(source):
                self._take(section)
                if section.resume is None:
                    continue
                unsaved += section.resume - state.position
                state.position = section.resume
                reached = min(source.size, state.position)  # a file may grow meanwhile
                self._listener.advanced(min(total, before + reached), total)
                if unsaved >= self._commit_every > 0:
                    self._commit(source)
                    unsaved = 0
            before += source.size
            state.done += 1
            state.position = 0
            self._digest.update(_identity(source))
        self._listener.advanced(total, total)
        self._commit(None)

    def _sections(self, source: Input) -> Iterator[Section]:
        try:
            file = open_text(source)
        except OSError as error:
            self.state.unreadable.add(f"{source.path} ({error.strerror})")
            return
        with file:
            try:
                for section in sections(source, file, self.state.position, self._field):
                    if section.damaged:
                        self.state.replaced.add(str(source.path))
                    yield section
            except (OSError, EOFError, zlib.error) as error:
                why = getattr(error, "strerror", None) or error
                raise HpczeroError(
                    f"{source.path} cannot be read past byte {self.state.position}: {why}"
                ) from error
            status = os.fstat(file.fileno())
        if (status.st_size, status.st_mtime_ns) != (source.size, source.changed):
            raise HpczeroError(
                f"{source.path} changed while the corpus was built: "
                "give the command again when the file is complete"
            )

    def _take(self, section: Section) -> None:
        state = self.state
        tokens = self._tokenizer.encode(section.text)
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
    if state.recipe != asdict(recipe):
        why = f"{work} was begun with {state.recipe}, this is {asdict(recipe)}"
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


def _report(state: BuildState, corpus: Corpus, listener: Listener) -> None:
    """Tell the listener which files were left out or damaged."""
    unreadable = state.unreadable
    replaced = state.replaced
    for path in corpus.unreadable:
        unreadable.add(str(path))
    if corpus.others:
        listener.said(f"left out, being of other kinds: {corpus.others} files")
    if unreadable.count:
        listener.said(f"WARN left out, cannot be read: {unreadable.count} ({unreadable})")
    if replaced.count:
        listener.said(
            f"WARN not UTF-8, undecodable bytes became U+FFFD: {replaced.count} files ({replaced})"
        )
