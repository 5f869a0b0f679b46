"""Phase 1 of a build: text in, raw files of tokens out, with a journal from which it is resumed.

Records are encoded in batches, by all cores, while the next ones are read; they are appended in
order, so that nothing of this shows in the files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from hpczero.data.corpus import Input, InputPart, Place, Record
from hpczero.data.encoders import Encoded, encoded
from hpczero.data.journal import (
    COMMIT_EVERY,
    SHOWN,
    BuildState,
    Recipe,
    digest_of,
    identity,
    resumed,
)
from hpczero.data.raw_files import RawFile, writing
from hpczero.data.records import records
from hpczero.data.token_file import SPLITS, token_dtype
from hpczero.data.tokenizer import Tokens
from hpczero.errors import HpczeroError, InputError
from hpczero.safe_files import create_nameless

_BATCH = 4 * 2**20  # bytes that are encoded at once by as many threads as there are cores
_BATCH_OF_WORKER = 2**20
_MOST_PARTS = 4096  # of a batch


class Listener(Protocol):
    """Receives the progress of a build."""

    def said(self, line: str) -> None:
        """Take a message for the user."""

    def advanced(self, done: int, total: int) -> None:
        """Take the bytes of the files that have been read."""

    def copied(self, done: int, total: int) -> None:
        """Take the bytes of tokens that are in the token file."""


@dataclass(frozen=True)
class Effort:
    """How text is read: nothing of it shows in the tokens.

    `commit_every`: bytes of text from journal to journal; 0: no journal, raw files without a name.
    `workers`: processes that encode; 0: this one, by all cores. `most_bad`: records that may be
    left out.
    """

    commit_every: int = COMMIT_EVERY
    workers: int = 0
    most_bad: int = 0


class Reader:
    """Phase 1: text in, raw files out."""

    def __init__(
        self, inputs: list[Input], recipe: Recipe, work: Path, listener: Listener, effort: Effort
    ) -> None:
        self._inputs = inputs
        self._work = work
        self._listener = listener
        self._effort = effort
        self._fraction = recipe.validation_fraction
        self._tokenizer = recipe.tokenizer
        self._field = recipe.field
        found = None
        if effort.commit_every:
            found = resumed(inputs, recipe, work, listener.said, effort.most_bad)
        self.state = found or BuildState(recipe.facts())
        self._digest = digest_of(inputs[: self.state.done])
        self._total = sum(source.size for source in inputs)
        self._before = sum(source.size for source in inputs[: self.state.done])
        self._unsaved = 0  # bytes of text
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
        if self._effort.commit_every:
            return RawFile(self._work / name, dtype, self.state.lengths.get(name, 0))
        with writing(self._work):
            return RawFile(self._work, dtype, 0, create_nameless(self._work))

    def close(self) -> None:
        for files in self.raw.values():
            for file in files.values():
                file.close()

    def read(self) -> None:
        batches = self._batches()
        for batch, results in encoded(batches, self._tokenizer, self._field, self._effort.workers):
            for part, result in zip(batch, results, strict=True):
                if part.record is None:
                    self._end_input(part)
                else:
                    self._take(part.source, part.record, result)
        self._listener.advanced(self._total, self._total)
        self._commit(None)

    def _batches(self) -> Iterator[list[InputPart]]:
        """Yield some megabytes of text at a time; an error comes after what was read before it."""
        most = _BATCH_OF_WORKER if self._effort.workers else _BATCH
        batch: list[InputPart] = []
        size = 0
        try:
            for part in self._parts():
                batch.append(part)
                size += len(part.record.content or b"") if part.record else 0
                if size >= most or len(batch) >= _MOST_PARTS:
                    yield batch
                    batch = []
                    size = 0
        except (HpczeroError, OSError):
            yield batch
            raise
        yield batch

    def _parts(self) -> Iterator[InputPart]:
        """Yield what there is to read, each input followed by its end."""
        place = self.state.place
        for source in self._inputs[self.state.done :]:
            try:
                source.path.open("rb").close()
            except OSError as error:
                yield InputPart(source, unreadable=error.strerror or "it cannot be read")
                place = Place()
                continue
            for record in records(source, place, self._field):
                yield InputPart(source, record)
            _refuse_changed(source)
            yield InputPart(source)
            place = Place()

    def _end_input(self, part: InputPart) -> None:
        state = self.state
        source = part.source
        if part.unreadable:
            state.unreadable.add(f"{source.path} ({part.unreadable})")
        elif not state.has_text:
            state.empty.add(str(source.path))
        self._before += source.size
        state.done += 1
        state.place = Place()
        state.has_text = False
        self._digest.update(identity(source))

    def _take(self, source: Input, record: Record, result: Encoded) -> None:
        """Append the sections of a record."""
        state = self.state
        if result.problem:
            self._leave_out(f"{source.path}:{record.after.number}: {result.problem}")
        if result.damaged:
            state.replaced.add(str(source.path))
        for number, tokens in enumerate(result.sections, start=1):
            ends = record.ends_document and number == len(result.sections)
            self._append(tokens, ends, source)
        state.has_text |= bool(result.sections)
        state.place = record.after
        self._unsaved += len(record.content or b"")
        self._listener.advanced(min(self._total, self._before + record.read), self._total)
        if self._unsaved >= self._effort.commit_every > 0:
            self._commit(source)
            self._unsaved = 0

    def _leave_out(self, problem: str) -> None:
        """Count a bad record; InputError if there are more than may be."""
        bad = self.state.bad
        bad.add(problem)
        most = self._effort.most_bad
        if bad.count > most:
            before = f"; {most:,} were left out before it" if most else ""
            raise InputError(f"{problem}{before} (--max-bad {bad.count} leaves it out, too)")
        if bad.count <= SHOWN:
            self._listener.said(f"WARN left out: {problem}")

    def _append(self, tokens: Tokens, ends_document: bool, source: Input) -> None:
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
        if ends_document:
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
            digest.update(identity(current))
        self.state.digest = digest.hexdigest()
        for split, files in self.raw.items():
            for kind, file in files.items():
                file.commit()
                self.state.lengths[f"{split}.{kind}"] = file.length
        if self._effort.commit_every:
            self.state.write(self._work)


def _refuse_changed(source: Input) -> None:
    status = source.path.stat()
    if (status.st_size, status.st_mtime_ns) != (source.size, source.changed):
        raise HpczeroError(
            f"{source.path} changed while the corpus was built: "
            "give the command again when the file is complete"
        )
