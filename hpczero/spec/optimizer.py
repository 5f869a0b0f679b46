"""The tables [optimizer] and [schedule]: the update of the weights, and its rate over the steps."""

from typing import Annotated, Literal

from pydantic import Field

from hpczero.spec.table import LARGEST, Decay, Line, Positions, Table, key


class Outer(Table):
    """Local steps (DiLoCo): replicas train by themselves, and a second optimizer joins them."""

    every: int = key(
        0,
        "changeable",
        "steps that a replica takes by itself between two outer steps; "
        "0: none, gradients are summed in every step",
        ge=0,
        le=LARGEST,
    )
    begin: int = key(
        0,
        "changeable",
        "steps before the first of these, in which gradients are summed as with `every = 0`",
        ge=0,
        le=LARGEST,
    )
    lr: float = key(0.7, "changeable", "learning rate of the outer step", gt=0)
    momentum: Decay = key(0.9, "changeable", "Nesterov momentum of the outer step")
    fragments: int = key(
        1,
        "changeable",
        "parts of the model that take turns, evenly spread over `every` steps",
        ge=1,
        le=1_000_000,
    )
    precision: Literal["fp32", "bf16", "int8", "int4"] = key(
        "fp32", "changeable", "numbers that are sent; int8 and int4 with error feedback"
    )


class Optimizer(Table):
    """The update of the weights."""

    name: Literal["adamw", "one_bit_adam", "lamb", "lion", "muon"] = key(
        "adamw",
        "changeable",
        "the update rule; one_bit_adam: AdamW that sends signs between replicas; lamb: steps as "
        "long as a matrix's weights say, for large batches; lion: by signs, with one moment; muon: "
        "steps of matrices are orthogonalised, the rest is AdamW",
    )
    momentum: Decay = key(0.95, "changeable", "muon only: decay of the momentum of matrices")
    not_muon: tuple[Line, ...] = key(
        (
            *("*embed*", "head.*", "*lm_head*", "*wte*", "*wpe*", "shared.*", "*.shared.*"),
            *("positions.*", "*relative_attention_bias*"),
        ),
        "changeable",
        "muon only: names of matrices that AdamW steps, as in a shell; each but these "
        "defaults must match a parameter (biases and convolutions are no matrices anyway)",
        strict=False,
    )
    freeze: int = key(
        0,
        "changeable",
        "one_bit_adam only: steps before the second moment is frozen, and signs are sent; "
        "0: found by itself",
        ge=0,
        le=LARGEST,
    )
    lr: float = key(3e-4, "changeable", "peak learning rate", gt=0)
    betas: tuple[Decay, Decay] = key(
        (0.9, 0.95), "changeable", "decay of the first and second moment", strict=False
    )
    eps: float = key(1e-8, "changeable", "added to the root of the second moment", gt=0)
    weight_decay: float = key(
        0.1,
        "changeable",
        "decoupled decay of matrices, the bias of query, key and value among them "
        "(norms and other biases have none)",
        ge=0,
    )
    outer: Outer = Outer()


Phase = Annotated[
    tuple[Positions, Annotated[int, Field(ge=1, le=100_000_000)]], Field(strict=False)
]


class Schedule(Table):
    """The learning rate over the steps, and the length of sequences."""

    name: Literal["constant", "linear", "cosine", "wsd", "polynomial", "inverse_sqrt"] = key(
        "cosine",
        "changeable",
        "shape after the warm-up; wsd: constant, then decay_steps of decay; polynomial: what is "
        "left of the steps to the power of `power`; inverse_sqrt: as the root of warmup_steps / "
        "step",
    )
    power: float = key(1.0, "changeable", "polynomial only: the power", gt=0, le=100)
    warmup_steps: int = key(0, "changeable", "steps of linear growth from 0", ge=0, le=LARGEST)
    decay_steps: int = key(
        0, "changeable", "wsd only: steps of the decay; 0: a fifth of all steps", ge=0, le=LARGEST
    )
    min_lr: float = key(0.0, "changeable", "learning rate at the end, or the least of all", ge=0)
    seq_len: Annotated[tuple[Phase, ...], Field(strict=False)] = key(
        (),
        "changeable",
        "[[0, 512], [2000, 4096]]: from step 0 on sequences of 512 tokens, from step 2000 on of "
        "4096, with as many tokens in a batch and a micro-batch; []: all as long as data.seq_len",
    )
