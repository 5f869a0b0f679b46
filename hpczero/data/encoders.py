"""Encoding a corpus by all cores: in this process, or in processes of its own.

The package `tokenizers` encodes by all cores by itself, and hands its results over by one. From a
few cores on that one is what the others wait for: then each process parses, encodes and hands over.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context, parent_process

from hpczero import env
from hpczero.data.corpus import InputPart, Record
from hpczero.data.sections import texts_of
from hpczero.data.tokenizer import Tokenizer, Tokens, from_files
from hpczero.errors import HpczeroError

Records = Sequence[Record | None]


@dataclass(frozen=True)
class Encoded:
    """A record's sections; `problem` says why it has none. Of no record there is nothing."""

    sections: list[Tokens] = field(default_factory=list)
    damaged: bool = False  # what was no text is now U+FFFD or "?"
    problem: str = ""


def encode(records: Records, encoding: Tokenizer, field: str) -> list[Encoded]:
    """Encode all sections of some records together."""
    texts: list[str] = []
    found: list[tuple[int, bool, str]] = []  # sections, damaged, problem
    for record in records:
        before = len(texts)
        damaged, problem = False, ""
        if record:
            try:
                more, damaged = texts_of(record, field)
                texts += more
            except ValueError as error:
                problem = str(error)
        found.append((len(texts) - before, damaged, problem))
    encoded = iter(encoding.encode(texts))
    return [
        Encoded([next(encoded) for _ in range(count)], damaged, problem)
        for count, damaged, problem in found
    ]


def encoded(
    batches: Iterator[list[InputPart]], encoding: Tokenizer, field: str, workers: int
) -> Iterator[tuple[list[InputPart], list[Encoded]]]:
    """Yield batches with what became of them, in order, the next ones being encoded meanwhile.

    `workers`: so many processes of one core each; 0: this process, by all cores. An error of
    `batches` comes after what was read before it.
    """
    waiting: deque[tuple[list[InputPart], Future[list[Encoded]]]] = deque()
    failure: Exception | None = None
    ahead = 2 * workers or 2
    with _pool(encoding, field, workers) as start:
        try:
            for batch in batches:
                waiting.append((batch, _started(start, [part.record for part in batch])))
                if len(waiting) > ahead:
                    before, result = waiting.popleft()
                    yield before, _finished(result)
        except (HpczeroError, OSError) as error:
            failure = error
        for before, result in waiting:
            yield before, _finished(result)
    if failure:
        raise failure


def _started(
    start: Callable[[Records], Future[list[Encoded]]], records: Records
) -> Future[list[Encoded]]:
    try:
        return start(records)
    except BrokenProcessPool:
        raise _killed() from None


def _finished(result: Future[list[Encoded]]) -> list[Encoded]:
    try:
        return result.result()
    except BrokenProcessPool:
        raise _killed() from None


def _killed() -> HpczeroError:
    return HpczeroError(
        "a process that encodes text was killed (by lack of memory?): "
        "the same command goes on where it was; fewer --workers take less memory"
    )


@contextmanager
def _pool(
    encoding: Tokenizer, field: str, workers: int
) -> Iterator[Callable[[Records], Future[list[Encoded]]]]:
    pool: Executor
    if workers:
        facts = (dict(encoding.files), encoding.end, field)
        pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, facts)
        way: Callable[[Records], list[Encoded]] = _encode
    else:
        pool = ThreadPoolExecutor(2, "encode")
        way = partial(encode, encoding=encoding, field=field)
    try:
        yield lambda records: pool.submit(way, records)
    finally:
        pool.shutdown(cancel_futures=True)


# What a process of its own knows.
_own: list[tuple[Tokenizer, str]] = []


def _begin(files: Mapping[str, bytes], end: str, field: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the builder, which gets it too, ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    env.encode_by_one_thread()
    _own.append((from_files(files, end), field))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(records: Records) -> list[Encoded]:
    encoding, field = _own[0]
    return encode(records, encoding, field)
