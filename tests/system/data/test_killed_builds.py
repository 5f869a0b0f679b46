"""A build of 200 MB of compressed lines and of tables, killed twenty times: the same bytes."""

import json
import random
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

import psutil
import pytest

from tests.support.launch import hpczero, launch, start

pyarrow = pytest.importorskip("pyarrow", reason="tables are read by pyarrow")
zstd = pytest.importorskip("backports.zstd", reason="Zstandard is read by backports.zstd")

_BYTES = 200_000_000
_KILLS = 20


def write_corpus(folder: Path, size: int) -> None:
    """Write the library's text again and again: half as lines, half as rows."""
    import pyarrow.parquet

    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(errors="replace") for path in library]
    chosen, written = list[str](), 0
    while written < size:
        text = texts[len(chosen) % len(texts)]
        chosen.append(f"# copy {len(chosen)}\n{text}")
        written += len(chosen[-1])
    lines = "".join(json.dumps({"text": text}) + "\n" for text in chosen[::2])
    (folder / "lines.jsonl.zst").write_bytes(zstd.compress(lines.encode()))
    pyarrow.parquet.write_table(pyarrow.table({"text": chosen[1::2]}), folder / "rows.parquet")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_twenty_times_a_build_makes_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    write_corpus(tmp_path / "text", _BYTES)
    whole = launch(hpczero("data", "build", "-o", "whole.h5", "text"), 600, tmp_path)
    assert whole.code == 0, whole
    expected = (tmp_path / "whole.h5").read_bytes()
    draws = random.Random(1)
    kills = finished = resumed = 0
    command = hpczero("data", "build", "-o", "killed.h5", "--workers", "2", "text")
    while kills < _KILLS or not finished:
        process = start(command, tmp_path)
        workers: list[psutil.Process] = []
        try:
            process.wait(draws.uniform(0.3, 4.0) if kills < _KILLS else 600)
        except subprocess.TimeoutExpired:
            workers = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGKILL)
            kills += 1
        out, _ = process.communicate()
        psutil.wait_procs(workers, timeout=30)
        assert not any(worker.is_running() for worker in workers), "a worker outlived its builder"
        resumed += b"resuming after" in out
        if process.returncode == 0:
            assert (tmp_path / "killed.h5").read_bytes() == expected
            (tmp_path / "killed.h5").unlink()
            finished += kills >= _KILLS
        time.sleep(0.01)
    assert resumed >= _KILLS // 4, "most went on where the one before had been"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text", "whole.h5"]
