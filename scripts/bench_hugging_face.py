"""Cost of importing and exporting a model of Hugging Face: bytes read and written, peak memory.

    python scripts/bench_hugging_face.py --layers 4 --folder /scratch/bench

makes a synthetic folder with so many of the 32 layers of Llama-3-8B's shape in bf16 (vocabulary
128,256; 0.44 GB a layer and 2.1 GB for embedding and head), imports it as a checkpoint (12 bytes a
parameter) and exports that again, each in a process of its own. Counts are the kernel's
(/proc/self/io), so what is read again counts again. The folder is removed at the end.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpczero import safe_files

HIDDEN, WIDE, VOCAB, OF_KEYS = 4096, 14336, 128_256, 1024
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (OF_KEYS, HIDDEN),
    "self_attn.v_proj": (OF_KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (WIDE, HIDDEN),
    "mlp.up_proj": (WIDE, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDE),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}


def make(folder: Path, layers: int) -> int:
    """Write the model's folder; return the bytes of its weights."""
    import torch
    from safetensors.torch import save_file

    safe_files.make_folder(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    safe_files.write_text(folder / "config.json", json.dumps(config))
    parts = [{"model.embed_tokens.weight": (VOCAB, HIDDEN)}]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        parts.append({f"{prefix}{name}.weight": shape for name, shape in SHAPES.items()})
    parts.append({"lm_head.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)})
    places = {}
    for number, part in enumerate(parts):
        file = f"model-{number}.safetensors"
        tensors = {
            name: torch.randn(shape, dtype=torch.bfloat16) * 0.02 for name, shape in part.items()
        }
        save_file(tensors, str(folder / file))
        places |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": places}
    safe_files.write_text(folder / "model.safetensors.index.json", json.dumps(index))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def counts() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}


def measured(arguments: list[str]) -> None:
    """Carry out a command of hpczero in this process; print what it took, as JSON."""
    from hpczero import cli

    before = counts()
    began = time.perf_counter()
    assert cli.main(arguments) == 0
    seconds = time.perf_counter() - began
    after = counts()
    took = {name: after[name] - before[name] for name in ("rchar", "wchar")}
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    print(json.dumps(took | {"peak": peak, "seconds": seconds}))


def run(arguments: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, "--measured", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def report(what: str, figures: dict[str, float], read: int, written: int) -> None:
    print(
        f"{what}: read {figures['rchar'] / 1e9:.2f} GB ({figures['rchar'] / read:.4f} of what is "
        f"there), wrote {figures['wchar'] / 1e9:.2f} GB ({figures['wchar'] / written:.4f} of what "
        f"was made), peak {figures['peak'] / 1e9:.2f} GB, {figures['seconds']:.0f} s"
    )


def bench(folder: Path, layers: int) -> None:
    size = make(folder / "model", layers)
    print(f"a folder of {size / 1e9:.2f} GB; largest tensor {2e-9 * VOCAB * HIDDEN:.2f} GB")
    model, spec, adopted = (str(folder / name) for name in ("model", "spec.toml", "run"))
    run(["init", "--from-hf", model, spec])
    imported = run(["ckpt", "import", "--hf", model, "--spec", spec, "-o", adopted])
    stored = sum(path.stat().st_size for path in Path(adopted).rglob("*") if path.is_file())
    report("import", imported, size, stored)
    out = str(folder / "out")
    exported = run(
        ["ckpt", "export", adopted, out, "--hf", "--dtype", "bf16", "--shard-size", "2GB"]
    )
    made = sum(path.stat().st_size for path in Path(out).iterdir())
    report("export", exported, 2 * size, made)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--folder", default=None, help="where there is room (default: a new one in /tmp)"
    )
    parser.add_argument("--measured", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measured:
        measured(json.loads(options.measured))
        return
    folder = safe_files.temporary_folder(Path(options.folder or "/tmp"), "hpczero-bench-")
    try:
        bench(folder, options.layers)
    finally:
        safe_files.remove_tree(folder)


if __name__ == "__main__":
    main()
