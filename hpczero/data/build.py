"""Turns the files of a corpus into a token file: streaming, resumable, and the same bytes whatever happens on the way.

Phase 1: every section of text is encoded and appended to the raw files of its split in the work folder. From time to time they
are flushed and `journal.json` is replaced: it says how long they were when which inputs were done. Phase 2: the raw files are copied
into a token file under a temporary name, which is flushed and renamed. A builder that finds a journal cuts the raw
files to the lengths it gives and goes on from there; where text is assigned depends only on the text before it, so the
result does not show the interruption.
"""

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from hpczero.data.corpus import (
    FIELD,
    FoundText,
    Input,
    Section,
    open_text,
    sections,
    token_dtype,
    tokenizer,
)
from hpczero.data.raw_files import RawFile, replace_file, writing
from hpczero.data.token_file import (
    SPLITS,
    TokenFile,
    fill_token_file,
    open_token_file,
    write_token_file,
)
from hpczero.errors import HpczeroError, InputError
from hpczero.safe_files import (
    give_name,
    nameless,
    open_lock,
    own_folder,
    remove_tree,
    sync,
    written_durably,
)

BUILDER = 1  # raised when the same text would give another token file
COMMIT_EVERY = 32 * 2**20  # bytes of text


@dataclass(frozen=True)
class Recipe:
    """Everything besides the text that decides what the token file holds."""

    tokenizer: str = "byte"
    validation_fraction: float = 0.05
    builder: int = BUILDER
    field: str = FIELD  # of a line of .jsonl

    def attributes(self) -> dict[str, str | float | int]:
        """Return what the token file says of it."""
        return {
            "tokenizer": self.tokenizer,
            "validation_fraction": self.validation_fraction,
            "builder": self.builder,
        }


class Listener(Protocol):
    """Is told what happens."""

    def said(self, line: str) -> None: ...

    def advanced(self, done: int, total: int) -> None:
        """So many bytes of the text are read."""

    def copied(self, done: int, total: int) -> None:
        """So many bytes of tokens are in the token file."""


@dataclass
class Noted:
    """Files that something was wrong with."""

    count: int = 0
    examples: list[str] = field(default_factory=list)
    latest: str = ""

    def add(self, name: str) -> None:
        if name == self.latest:
            return
        self.count, self.latest = self.count + 1, name
        if len(self.examples) < 5:
            self.examples.append(name)


@dataclass
class BuildState:
    """How far phase 1 is: the journal's content."""

    recipe: dict[str, str | float | int]
    done: int = 0  # inputs that are read to the end
    position: int = 0  # byte reached in the input after them
    inside: str = ""  # the split of the document that is being read; empty between two documents
    digest: str = ""  # of the inputs read so far, as they were then
    lengths: dict[str, int] = field(default_factory=dict)  # values in each raw file
    replaced: Noted = field(default_factory=Noted)  # had text that was not UTF-8
    unreadable: Noted = field(default_factory=Noted)


def build_token_file(
    found: FoundText,
    output: Path,
    recipe: Recipe,
    work: Path,
    listener: Listener,
    commit_every: int = COMMIT_EVERY,
) -> TokenFile:
    """Makes `output` by way of the folder `work`, which is gone afterwards."""
    with writing(work):
        own_folder(work)
    with _only_builder(work, output, listener):
        with (
            _leaves_nothing_unless_begun(work),
            contextlib.closing(
                Reader(found.inputs, recipe, work, listener, commit_every)
            ) as reader,
        ):
            reader.read()
        _report(reader, found, listener)
        attributes = recipe.attributes() | {"inputs": names_digest(found.inputs, recipe.field)}
        write_token_file(
            work / "assembled.h5",
            tokenizer(recipe.tokenizer),
            attributes,
            reader.raw,
            listener.copied,
        )
        replace_file(work / "assembled.h5", output)
        with contextlib.suppress(OSError):
            remove_tree(work)
    return open_token_file(output)


def build_in_one_go(found: FoundText, output: Path, recipe: Recipe, listener: Listener) -> bool:
    """Makes `output`, and gives nothing a name before: a builder that is killed leaves nothing.

    False, and nothing is done, where the file system has no files without a name.
    """
    with writing(output):
        made = nameless(output.parent)
    if made is None:
        return False
    try:
        with contextlib.closing(Reader(found.inputs, recipe, output.parent, listener, 0)) as reader:
            reader.read()
            _report(reader, found, listener)
            attributes = recipe.attributes() | {"inputs": names_digest(found.inputs, recipe.field)}
            encoding = tokenizer(recipe.tokenizer)
            fill_token_file(output, made, encoding, attributes, reader.raw, listener.copied)
        with (
            writing(output),
            contextlib.suppress(FileExistsError),
        ):  # of another one: the same bytes
            os.fsync(made)
            give_name(made, output)
            sync(output.parent)
    finally:
        os.close(made)
    return True


def is_up_to_date(made: TokenFile, found: FoundText, recipe: Recipe) -> bool:
    """Whether the file was made by this recipe from files of these names and sizes, none of which is newer."""
    same = (made.tokenizer, made.validation_fraction, made.builder) == (
        recipe.tokenizer,
        recipe.validation_fraction,
        recipe.builder,
    )
    newest = max(source.changed for source in found.inputs)
    return (
        same
        and made.inputs == names_digest(found.inputs, recipe.field)
        and newest <= made.path.stat().st_mtime_ns
    )


@contextlib.contextmanager
def _leaves_nothing_unless_begun(work: Path) -> Iterator[None]:
    """A build that is refused before its first journal has nothing to go on from."""
    try:
        yield
    except HpczeroError:
        if not (work / "journal.json").exists():
            with contextlib.suppress(OSError):
                remove_tree(work)
        raise


def names_digest(inputs: Sequence[Input], field: str = FIELD) -> str:
    """The default field has no part in it: files of earlier versions are known by their names and sizes alone."""
    digest = xxhash.xxh3_128(b"" if field == FIELD else b"field\0%s\0" % os.fsencode(field))
    for source in inputs:
        digest.update(os.fsencode(source.name) + b"\0%d\0" % source.size)
    return str(digest.hexdigest())


@contextlib.contextmanager
def _only_builder(work: Path, output: Path, listener: Listener) -> Iterator[None]:
    """One builder per work folder: the kernel frees the lock when its holder ends, however it ends."""
    path = work / "lock"
    with writing(path):
        file = os.fdopen(open_lock(path), "wb")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another process is building {output} (it holds {path}): wait for it, or choose another output"
            ) from None
        except OSError as error:  # some parallel file systems are mounted without locks
            listener.said(
                f"WARN {path} cannot be locked ({error.strerror}): nothing keeps a second builder of {output} away"
            )
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise InputError(
                f"another process has just built {output}"
            )  # it finished between our open and our lock
        yield


class Reader:
    """Phase 1: text in, raw files out. `commit_every`: bytes of text; 0: no journal is kept, and the
    raw files have no names.
    """

    def __init__(
        self, inputs: list[Input], recipe: Recipe, work: Path, listener: Listener, commit_every: int
    ) -> None:
        self._inputs, self._work, self._listener, self._commit_every = (
            inputs,
            work,
            listener,
            commit_every,
        )
        self._fraction, self._tokenizer, self._field = (
            recipe.validation_fraction,
            tokenizer(recipe.tokenizer),
            recipe.field,
        )
        resumed = _resumed(inputs, recipe, work, listener) if commit_every else None
        self.state = resumed or BuildState(asdict(recipe))
        self._digest = _digest(inputs[: self.state.done])
        dtypes = {"tokens": token_dtype(self._tokenizer.vocabulary), "documents": np.dtype("<i8")}
        self.raw = {
            split: {
                kind: self._raw_file(f"{split}.{kind}", dtype) for kind, dtype in dtypes.items()
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
            return RawFile(self._work, dtype, 0, nameless(self._work))

    def close(self) -> None:
        for files in self.raw.values():
            for file in files.values():
                file.close()

    def read(self) -> None:
        state, total = self.state, sum(source.size for source in self._inputs)
        before = sum(source.size for source in self._inputs[: state.done])
        unsaved = 0
        for source in self._inputs[state.done :]:
            for section in self._sections(source):
                self._take(section)
                if section.resume is None:
                    continue
                unsaved += section.resume - state.position
                state.position = section.resume
                self._listener.advanced(
                    min(total, before + min(source.size, state.position)), total
                )  # a file may grow meanwhile
                if unsaved >= self._commit_every > 0:
                    self._commit(source)
                    unsaved = 0
            before += source.size
            state.done, state.position = state.done + 1, 0
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
                f"{source.path} changed while the corpus was built: give the command again when the file is complete"
            )

    def _take(self, section: Section) -> None:
        tokens, state = self._tokenizer.encode(section.text), self.state
        split = self._split_for(len(tokens))
        if state.inside and state.inside != split:
            self._end_document(state.inside)
        self.raw[split]["tokens"].append(tokens)
        state.inside = split
        if section.ends_document:
            self._end_document(split)
            state.inside = ""

    def _split_for(self, tokens: int) -> str:
        """Validation, where that brings its share of all tokens closer to what was asked for."""
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
    """The state to go on from, or None (said, if there was something) to start at the beginning."""
    try:
        content = json.loads((work / "journal.json").read_text(encoding="utf-8"))
        content["replaced"], content["unreadable"] = (
            Noted(**content["replaced"]),
            Noted(**content["unreadable"]),
        )
        state = BuildState(**content)
        sizes = {name: (work / name).stat().st_size for name in state.lengths}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        listener.said(f"starting over: {work} cannot be used ({error})")
        return None
    read = inputs[: state.done + bool(state.position)]
    if state.recipe != asdict(recipe):
        listener.said(
            f"starting over: {work} was begun with {state.recipe}, this is {asdict(recipe)}"
        )
    elif state.digest != _digest(read).hexdigest():
        listener.said("starting over: files that were read before have changed")
    elif any(
        sizes[name] < length for name, length in state.lengths.items()
    ):  # a value has one byte at least
        listener.said(f"starting over: {work} lacks what its journal says")
    else:
        listener.said(
            f"going on after {sum(source.size for source in inputs[: state.done]) + state.position} bytes of text"
        )
        return state
    return None


def _digest(inputs: Sequence[Input]) -> "xxhash.xxh3_128":
    digest = xxhash.xxh3_128()
    for source in inputs:
        digest.update(_identity(source))
    return digest


def _identity(source: Input) -> bytes:
    return os.fsencode(source.path.absolute()) + b"\0%d\0%d\0" % (source.size, source.changed)


def _report(reader: Reader, found: FoundText, listener: Listener) -> None:
    state = reader.state
    for path in found.unreadable:
        state.unreadable.add(str(path))
    if found.others:
        listener.said(f"left out, being of other kinds: {found.others} files")
    if state.unreadable.count:
        listener.said(
            f"WARN left out, cannot be read: {state.unreadable.count} ({_named(state.unreadable)})"
        )
    if state.replaced.count:
        listener.said(
            f"WARN not UTF-8, what is not text became U+FFFD: {state.replaced.count} files ({_named(state.replaced)})"
        )


def _named(noted: Noted) -> str:
    return ", ".join(noted.examples) + (", …" if noted.count > len(noted.examples) else "")
