"""Checkpoints of small random models, for sampling and evaluation."""

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hpczero import cli
from hpczero.model import build, families
from hpczero.spec.attention import Attention
from hpczero.spec.load import to_toml
from hpczero.spec.model import Model
from hpczero.spec.schema import Data, Spec

# one of each family, and a relative of Llama with everything that attention can have
MODELS = {
    "gpt": {"family": "gpt"},
    "llama": {"family": "llama", "kv_heads": 2},
    "blocks": {
        "family": "llama",
        "kv_heads": 1,
        "attention_cap": 1.0,
        "attention": Attention(
            kind=("bigbird", "fixed", "strided"), block=8, window=2, heads="different"
        ),
    },
    "relative": {
        "family": "llama",
        "kv_heads": 1,
        "head_dim": 7,
        "window": 5,
        "window_pattern": 2,
        "attention_cap": 5.0,
        "logit_cap": 8.0,
        "qk_norm": True,
        "post_norms": True,
        "norm_offset": True,
        "rope_fraction": 0.6,
        "rope_local_base": 100.0,
    },
}
SIZES = {"layers": 3, "hidden": 32, "heads": 4, "vocab": 50, "seq_len": 40}


def model_of(name: str, **sizes: Any) -> Model:
    return Model(**(SIZES | MODELS[name] | sizes))


def random_weights(model: Model) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    parameters = (parameter for layer in families.layers(model) for parameter in layer.parameters)
    return {
        parameter.name: 0.3 * torch.randn(parameter.shape, generator=generator)
        + (parameter.initial.kind == "ones")
        for parameter in parameters
    }


def random_module(model: Model) -> Any:
    module = build.on_meta(model)
    weights = random_weights(model)
    build.install_parameters(module, {n: torch.nn.Parameter(t) for n, t in weights.items()})
    return module.eval()


def random_run(folder: Path, model: Model, source: Path | str, **data: Any) -> Path:
    """Make a run's directory that has a checkpoint of random weights, at step 0."""
    save_file(random_weights(model), str(folder / "weights.safetensors"))
    table = Data(source=str(source), **data)
    spec = Spec(name="random", model=model, data=table, output=str(folder / "runs"))
    (folder / "spec.toml").write_text(to_toml(spec))
    paths = [str(folder / name) for name in ("weights.safetensors", "spec.toml")]
    with contextlib.redirect_stdout(io.StringIO()):
        assert cli.main(["ckpt", "import", paths[0], "--spec", paths[1]]) == 0
    return folder / "runs" / "random"
