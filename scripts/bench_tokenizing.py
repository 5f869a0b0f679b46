#!/usr/bin/env python3
"""Speed of `hpczero data build` with a tokenizer, beside the bare package `tokenizers`.

    python scripts/bench_tokenizing.py FOLDER               200 MB of the folder's text
    python scripts/bench_tokenizing.py FOLDER --rounds 3 --megabytes 50
    python scripts/bench_tokenizing.py FOLDER --tables      half in .jsonl.zst, half in .parquet

The text of FOLDER is repeated, each copy with words of its own, until there is enough. The bare
package reads the same files and encodes them in batches of the same size on all cores; it writes
nothing. In a round each is a process of its own: ours, bare, ours again, bare again (which show the
noise). Times are whole processes with their workers; peaks are the most memory of all of them
(shared pages counted once), looked at ten times a second. With --tables a document is a part of
a file of FOLDER, and the bare package reads the same text as files without compression.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hpczero import safe_files  # noqa: E402

_BARE = """
import sys
from pathlib import Path
from tokenizers import Tokenizer

made = Tokenizer.from_file(sys.argv[1])
count, batch, size = 0, [], 0
for path in sorted(Path(sys.argv[2]).iterdir()):
    for text in (path.read_text(),):
        for first in range(0, len(text), 1 << 18):
            batch.append(text[first : first + (1 << 18)])
            size += len(batch[-1])
            if size >= 4 << 20:
                count += sum(len(one.ids) for one in made.encode_batch_fast(batch))
                batch, size = [], 0
count += sum(len(one.ids) for one in made.encode_batch_fast(batch))
print(count)
"""


def corpus(source: Path, target: Path, size: int) -> int:
    """Write files of some megabytes of text, together at least `size` bytes."""
    texts = [path.read_text(errors="replace") for path in sorted(source.rglob("*.py"))]
    written = number = 0
    while written < size:
        for first in range(0, len(texts), 100):
            text = "\n".join(texts[first : first + 100])
            # words of its own: no cache of words knows all of a copy
            text = re.sub(r"\b(self|return|import|the)\b", rf"\1_{number}", text)
            safe_files.write_text(target / f"{number:03}-{first:05}.txt", text)
            written += len(text.encode())
            if written >= size:
                return written
        number += 1
    return written


def tables(text: Path, target: Path) -> None:
    """Write every other file of `text` into one .jsonl.zst, the others into one .parquet."""
    import pyarrow
    import pyarrow.parquet
    from backports import zstd

    paths = sorted(text.iterdir())
    documents = [path.read_text().split("\n\n\n") for path in paths]
    lines = "".join(
        json.dumps({"text": one}) + "\n" for part in documents[::2] for one in part if one
    )
    with safe_files.written_whole(target / "lines.jsonl.zst") as file:
        file.write(zstd.compress(lines.encode()))
    rows = [one for part in documents[1::2] for one in part if one]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), target / "rows.parquet")


def run(command: Sequence[str]) -> tuple[float, float, float]:
    """Return wall seconds, processor seconds and peak gigabytes of a process and its workers."""
    began = time.perf_counter()
    pid = os.spawnv(os.P_NOWAIT, command[0], list(command))
    peak, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.1):
            with contextlib.suppress(psutil.Error):
                top = psutil.Process(pid)
                held = 0
                for process in (top, *top.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        held += process.memory_full_info().pss
                peak = max(peak, held)

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status, used = os.wait4(pid, 0)
    wall = time.perf_counter() - began
    ended.set()
    watcher.join()
    assert status == 0, command
    return wall, used.ru_utime + used.ru_stime, peak / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--vocabulary", default="32768")
    options = parser.parse_args()
    folder = safe_files.temporary_folder(Path("/tmp"), "hpczero-bench-")
    try:
        bench(folder, options)
    finally:
        safe_files.remove_tree(folder)


def bench(folder: Path, options: argparse.Namespace) -> None:
    safe_files.make_folder(folder / "text")
    size = corpus(options.folder, folder / "text", options.megabytes * 1_000_000)
    tokenizer, built = str(folder / "tokenizer.json"), str(folder / "built.h5")
    ours = [sys.executable, "-m", "hpczero", "data"]
    run([*ours, "tokenizer", "train", "-o", tokenizer, "--vocabulary", options.vocabulary,
         str(options.folder)])  # fmt: skip
    given = folder / "text"
    if options.tables:
        given = folder / "tables"
        safe_files.make_folder(given)
        tables(folder / "text", given)
    build = [*ours, "build", "-o", built, "--tokenizer", tokenizer, str(given)]
    bare = [sys.executable, "-c", _BARE, tokenizer, str(folder / "text")]
    contenders = {"ours": build, "bare": bare, "ours again": build, "bare again": bare}
    rounds = []
    for number in range(options.rounds):
        took = {}
        for name, command in contenders.items():
            safe_files.remove(Path(built))
            took[name] = run(command)
        rounds.append(took)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    for name in contenders:
        ratios = [took["bare"][0] / took[name][0] for took in rounds]
        low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        wall, processor, peak = (median(took[name][at] for took in rounds) for at in range(3))
        print(
            f"{name:10} wall {wall:6.2f} s, processor {processor:6.2f} s, "
            f"{size / wall / 1e6:5.1f} MB/s, peak {peak:.2f} GB, "
            f"speed / bare {middle:.3f} ({low:.3f}-{high:.3f})"
        )


if __name__ == "__main__":
    main()
