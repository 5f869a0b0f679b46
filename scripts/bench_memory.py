"""The share of a node's memory that each ZeRO stage takes, beside the formula: real runs of three
steps, a table in markdown.

    python scripts/bench_memory.py [--ranks 2 4] [--mpirun PATH]

The model has 286 million parameters. `formula` is that of docs/zero.md per parameter, `allocated`
what the engine counts (padding, slots and buffers included), `measured` the growth of the node's
memory (sum of PSS over its ranks) from before the engine until after the last step. Nothing is
saved: that leaves another 4 MB a rank behind, of the libraries that do it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpczero import safe_files

MODEL = {"layers": 22, "hidden": 1024, "heads": 16, "vocab": 8192, "seq_len": 128}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mpirun", default=str(Path(sys.executable).parent / "mpirun"))
    options = parser.parse_args()
    print(
        "| ranks | stage | node-shared | formula GB | allocated GB | measured GB | measured "
        "/ allocated |"
    )
    print("|---:|---:|---|---:|---:|---:|---:|")
    for ranks, shared, stage in product(options.ranks, (False, True), range(4)):
        summary = run(options.mpirun, ranks, stage, shared)
        node = summary["memory"]["nodes"][0]
        predicted = formula(stage, ranks, shared) * summary["parameters"] * ranks
        figures = [f"{size / 1e9:.3f}" for size in (predicted, node["allocated"], node["measured"])]
        figures.append(f"{node['measured'] / node['allocated']:.3f}")
        print(
            f"| {ranks} | {stage} | {'yes' if shared else 'no'} | {' | '.join(figures)} |",
            flush=True,
        )


def formula(stage: int, ranks: int, shared: bool) -> float:
    """Bytes per parameter and rank (one micro-batch), without what is in flight."""
    weights = 2 / ranks if shared or stage == 3 else 2
    return weights + (2 / ranks if stage >= 2 else 2) + (12 / ranks if stage >= 1 else 12)


def run(mpirun: str, ranks: int, stage: int, shared: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.toml"
        model = "\n".join(f"{key} = {value}" for key, value in MODEL.items())
        train = f"steps = 3\nglobal_batch = {ranks}\nmicro_batch = 1\neval_batches = 0"
        zero = f"stage = {stage}\nnode_shared = {str(shared).lower()}\n[checkpoint]\nevery = -1"
        safe_files.write_new(
            spec,
            (
                f'output = "{folder}"\n[model]\n{model}\n[data]\nsource = "synthetic"\n[train]\n'
                f"{train}\n[zero]\n{zero}\n"
            ),
        )
        command = [mpirun, "-n", str(ranks), sys.executable, "-m", "hpczero", "run", str(spec)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        summary: dict[str, Any] = json.loads((Path(folder) / "run" / "summary.json").read_text())
        return summary


if __name__ == "__main__":
    main()
