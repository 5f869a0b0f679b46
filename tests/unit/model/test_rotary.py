"""Frequencies of stretched rotary positions, as `transformers` has them."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hpczero.model.rotary import frequencies, growth
from hpczero.spec.schema import Model

CPU = torch.device("cpu")
SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({}, {}),
    "llama3": (
        {"rope_low": 1.5, "rope_high": 5.0},
        {"low_freq_factor": 1.5, "high_freq_factor": 5.0},
    ),
    "yarn": ({"rope_fast": 20.0, "rope_slow": 2.0}, {"beta_fast": 20.0, "beta_slow": 2.0}),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_all_frequencies_are_theirs(name: str) -> None:
    """64 of them: some are kept, some stretched, some between."""
    ours, theirs = SCALINGS[name]
    model = Model(
        family="llama",
        hidden=256,
        heads=2,
        rope_base=5e5,
        rope_scaling=name,
        rope_factor=6.0,
        rope_original=128,
        **ours,
    )
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=768,
        rope_parameters={
            "rope_type": name,
            "rope_theta": 5e5,
            "factor": 6.0,
            "original_max_position_embeddings": 128,
            **theirs,
        },
    )
    expected, of_angles = ROPE_INIT_FUNCTIONS[name](config, "cpu")
    assert frequencies(model, False, CPU) == pytest.approx(expected, rel=1e-5)
    assert growth(model) == pytest.approx(of_angles)
