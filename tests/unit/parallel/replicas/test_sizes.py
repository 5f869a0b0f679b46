"""Sizes of what replicas send: against messages that are made, and bytes that are counted here."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.model import families
from hpczero.parallel.layout import unit_layout
from hpczero.parallel.replicas.exchanged import Exchanged
from hpczero.parallel.replicas.sizes import FORMS, part_of
from hpczero.planner.data_volumes import sent_in_exchanges
from hpczero.planner.sent import Sent
from hpczero.spec.optimizer import Outer
from hpczero.spec.schema import Model, Optimizer, Spec, Train, Zero

GPT = Model(layers=8, hidden=1024, heads=16, vocab=8192, seq_len=128)
PARAMETERS = 109_300_000  # about

names = st.sampled_from(sorted(FORMS))
counts = st.integers(1, 20_000)
replicas = st.integers(1, 9)


def message(name: str, elements: int) -> int:
    """Return the bytes of a message, counted on arrays that could be sent."""
    if name == "1bit":
        scales = sum(1 for _ in range(0, elements, 2048))
        return np.packbits(np.zeros(elements, bool)).nbytes + np.zeros(scales, np.float32).nbytes
    if name in ("int8", "int4"):
        scales = sum(1 for _ in range(0, elements, 256))
        in_a_byte = {"int8": 1, "int4": 2}[name]
        numbers = np.zeros(elements + elements % in_a_byte, np.int8)
        return numbers.nbytes // in_a_byte + np.zeros(scales, np.float32).nbytes
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    return torch.zeros(elements, dtype=dtype).nbytes


@given(names, counts)
def test_a_message_has_the_bytes_of_its_arrays(name: str, elements: int) -> None:
    assert FORMS[name].message(elements) == message(name, elements)


@given(names, counts, replicas)
def test_parts_have_every_element_once_and_whole_blocks(
    name: str, elements: int, count: int
) -> None:
    form = FORMS[name]
    parts = [range(elements)[part_of(form, elements, count, number)] for number in range(count)]
    assert [element for part in parts for element in part] == list(range(elements))
    filled = [part for part in parts if part]
    assert parts[: len(filled)] == filled
    assert all(part.start % (form.block or 64) == 0 for part in filled)
    assert len({len(part) for part in filled[:-1]}) <= 1


@given(names, counts, replicas)
@settings(max_examples=50)
def test_what_a_replica_sends_is_what_the_others_receive(
    name: str, elements: int, count: int
) -> None:
    """First a part to each other one; then the own part's average, to which whole blocks go."""
    form = FORMS[name]
    whole = {"1bit": 2048, "int8": 256, "int4": 256}.get(name, 64)
    part = next(length for length in range(whole, 10**6, whole) if length * count >= elements)
    lengths = [max(0, min(part, elements - part * to)) for to in range(count)]
    sent = list(sent_in_exchanges(form, elements, [1] * count, 1))
    assert len(sent) == count
    for sender, operations in enumerate(sent):
        first = sum(message(name, lengths[to]) for to in range(count) if to != sender)
        assert operations["all_to_all"] == Sent(0, first)
        assert operations["all_gather"] == Sent(0, (count - 1) * message(name, part))


def units(shards: int) -> list[int]:
    """Return the elements of each unit's shard."""
    layers = [layer for layer in families.layers(GPT) if layer.parameters]
    return [unit_layout(layer, shards).shard_size for layer in layers]


def counted(shards: int) -> int:
    """Return the elements that a rank owns, counted by hand."""
    block = 12 * 1024**2 + 13 * 1024  # products, their biases, two norms
    embeddings = (8192 + 128) * 1024
    return (8 * block + embeddings + 2 * 1024) // shards


def sent(name: str, shards: int, workers: int) -> int:
    """Return the bytes that the first replica sends in an exchange of all units."""
    total = 0
    for elements in units(shards):
        first = next(sent_in_exchanges(FORMS[name], elements, [1] * workers, 1))
        total += sum(operation.between for operation in first.values())
    return total


LAYOUTS = [(1, 2), (1, 4), (4, 2), (4, 8), (8, 3)]  # shards, workers


@pytest.mark.parametrize(("shards", "workers"), LAYOUTS)
def test_signs_are_a_sixteenth_of_bf16(shards: int, workers: int) -> None:
    elements = counted(shards)
    assert elements * shards == pytest.approx(PARAMETERS, rel=0.01)
    in_bf16 = 2 * 2 * elements * (workers - 1) / workers
    assert sent("bf16", shards, workers) == pytest.approx(in_bf16, rel=0.001)
    assert in_bf16 / 16 < sent("1bit", shards, workers) < 1.03 * in_bf16 / 16


def spec_of(**optimizer: object) -> Spec:
    return Spec(
        model=GPT,
        train=Train(steps=1000),
        optimizer=Optimizer(**optimizer),
        zero=Zero(shard_ranks="node"),
    )


@pytest.mark.parametrize(("shards", "workers"), LAYOUTS)
def test_a_run_with_a_warm_up_of_15_percent_sends_a_fifth(shards: int, workers: int) -> None:
    """Beside AdamW at stage 1, whose gradients and weights are sent once in bf16."""
    spec = spec_of(name="one_bit_adam", freeze=150)
    exchanged = Exchanged.by(spec)
    assert exchanged.form
    assert (exchanged.warm_up, exchanged.every) == (150, 1)
    of_adamw = 2 * 2 * counted(shards) * (workers - 1) / workers  # sums, then weights
    of_signs = sent(exchanged.form.name, shards, workers)
    run = exchanged.warm_up * of_adamw + (spec.train.steps - exchanged.warm_up) * of_signs
    ratio = spec.train.steps * of_adamw / run
    assert ratio >= 4.8
    bits = 1 + 32 / 2048
    assert ratio == pytest.approx(1 / (0.15 + 0.85 * bits / 16), rel=0.01)


@pytest.mark.parametrize(("shards", "workers"), LAYOUTS)
def test_outer_steps_in_4_bits_send_a_hundredth(shards: int, workers: int) -> None:
    exchanged = Exchanged.by(spec_of(outer=Outer(every=50, precision="int4")))
    assert exchanged.form
    of_adamw = 2 * 2 * counted(shards) * (workers - 1) / workers
    of_outer = sent(exchanged.form.name, shards, workers) / exchanged.every
    ratio = of_adamw / of_outer
    assert ratio >= 100
    bits = 4 + 32 / 256
    assert ratio == pytest.approx(50 * 16 / bits, rel=0.01)
