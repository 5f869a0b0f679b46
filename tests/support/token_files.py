"""Token files for tests, specs that read them, and a listener to their building."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hpczero.data.build import build_token_file
from hpczero.data.corpus import find
from hpczero.data.encode import Effort
from hpczero.data.journal import Recipe
from hpczero.data.token_file import TokenFile
from hpczero.spec.schema import Data, Model, Spec, Train

TEXT = "".join(f"line {number} of the text\n" for number in range(40_000))


def spec_of(
    source: Path | str, seq_len: int = 32, vocab: int = 257, eval_batches: int = 1, **more: Any
) -> Spec:
    model, train = Model(seq_len=seq_len, vocab=vocab), Train(eval_batches=eval_batches)
    return Spec(model=model, data=Data(source=str(source)), train=train, **more)


def alone(value: Any) -> Any:
    """Broadcast among one rank."""
    return value


class Heard:
    """A listener that records every line, and calls `act` at the advance with number `after`."""

    def __init__(self, after: int = -1, act: Callable[[], None] = lambda: None) -> None:
        self.lines: list[str] = []
        self._after, self._act, self.advances = after, act, 0

    def said(self, line: str) -> None:
        self.lines.append(line)

    def advanced(self, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.advances += 1
        if self.advances == self._after:
            self._act()

    def copied(self, done: int, total: int) -> None:
        assert 0 <= done <= total


def make(
    text: Path,
    output: Path,
    listener: Heard | None = None,
    fraction: float = 0.1,
    commit_every: int = 50_000,
    workers: int = 0,
) -> TokenFile:
    """Build the token file of a text, with the work folder beside it."""
    work = output.with_name(output.name + ".partial")
    return build_token_file(
        find([str(text)]),
        output,
        Recipe(validation_fraction=fraction),
        work,
        listener or Heard(),
        Effort(commit_every, workers),
    )


def documents(file: TokenFile, split: str) -> list[bytes]:
    """The bytes of each document of a split, in order."""
    tokens = np.asarray(file.splits[split].tokens)
    ends = np.flatnonzero(tokens == 256)
    return [bytes(part[part != 256].astype(np.uint8)) for part in np.split(tokens, ends + 1)[:-1]]


def in_child(action: Callable[[], object]) -> int:
    """Run the action in a forked process; return its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(7)
    return os.waitpid(pid, 0)[1]


def several_documents(folder: Path) -> Path:
    """Make the token file of some short texts, each a document."""
    texts = folder / "texts"
    texts.mkdir()
    for number in range(60):
        (texts / f"{number}.txt").write_text(f"text {number} " * (1 + number % 7))
    return make(texts, folder / "text.h5").path
