"""[model.attention]: layouts that cannot be are refused, and what changes nothing is said."""

from typing import Any

import pytest

from hpczero.errors import InputError
from hpczero.spec.attention import Attention
from hpczero.spec.load import load
from hpczero.spec.model import Model
from hpczero.spec.rules import contradictions, without_effect
from hpczero.spec.schema import Data, Schedule, Spec

T5 = {"family": "t5", "seq_len": 626}  # 512 positions of the encoder and 114 of the decoder


def spec(
    model: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **keys: Any
) -> Spec:
    family = {"family": "llama", "seq_len": 512} | (model or {})
    return Spec(model=Model(attention=Attention(**keys), **family), data=Data(**(data or {})))


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (
            spec(kind="longformer", **{"global": 9}),
            'model.attention.global = 9 in layer 0 ("longformer") is more than the 8 blocks of 64 '
            "that 512 positions have: fewer, or smaller blocks",
        ),
        (
            spec(kind=("local", "bigbird"), **{"global": 4}, data={"seq_len": 130}),
            'model.attention.global = 4 in layer 1 ("bigbird") is more than the 3 blocks of 64 '
            "that 130 positions have: fewer, or smaller blocks",
        ),
        (
            spec(kind="longformer", model=T5, **{"global": 3}),
            'model.attention.global = 3 in layer 2 ("longformer") is more than the 2 blocks of 64 '
            "that 114 positions have: fewer, or smaller blocks",
        ),
        (
            spec(kind="fixed", window=2, **{"global": 3}),
            'model.attention.global = 3 in layer 0 ("fixed") is more than the 2 blocks of a group '
            "(model.attention.window): fewer, or larger groups",
        ),
        (
            spec(kind="local", window=(1, 2, 3, 4, 5)),
            "model.attention.window has 5 entries, more than model.layers = 4: one for each layer, "
            "or fewer, which begin again",
        ),
        (
            spec(kind="local", model={"window": 7}),
            'model.window = 7 and model.attention.kind = "local" both say what a query sees: take '
            'one (kind = "local" is a window in blocks)',
        ),
        (
            spec(kind="local", model={"family": "mine:model"}),
            'model.attention.kind = "local" is for hpczero\'s own families, and model.family is '
            '"mine:model": leave it out',
        ),
    ],
)
def test_layouts_that_cannot_be(job: Spec, text: str) -> None:
    assert [found.text for found in contradictions(job)] == [text]


@pytest.mark.parametrize(
    "job",
    [
        spec(),
        spec(kind=("bigbird", "dense", "variable"), block=(8, 16), heads="different"),
        spec(kind="fixed", window=4, **{"global": 4}),
        spec(kind="fixed", **{"global": 0}),
        spec(kind="longformer", **{"global": 8}),
        spec(kind="dense", model={"window": 7}),
        spec(kind="strided", model={"family": "gpt"}),
        spec(kind=("bigbird", "bigbird", "dense", "dense"), model=T5, **{"global": 8}),
    ],
)
def test_layouts_that_can_be(job: Spec) -> None:
    assert contradictions(job) == []


def test_heads_that_see_the_same_are_told() -> None:
    (note,) = without_effect(spec(kind="fixed", heads="different", **{"global": 3}))
    assert 'heads = "different" has no effect' in note  # 4 // 3 patterns
    assert without_effect(spec(kind="fixed", heads="different", **{"global": 2})) == []
    for keys in ({"kind": "bigbird", "random": 0}, {"kind": "fixed", "global": 0}):
        (note,) = without_effect(spec(heads="different", **keys))
        assert 'heads = "different" has no effect' in note
    assert without_effect(spec(kind="variable", heads="different", random=1)) == []


def test_shorter_sequences_of_the_schedule_are_looked_at() -> None:
    lengths = {"schedule": Schedule(seq_len=((0, 128), (50, 512)))}
    fits = spec(kind="longformer", **{"global": 2}).model_copy(update=lengths)
    assert contradictions(fits) == []
    job = spec(kind="longformer", **{"global": 3}).model_copy(update=lengths)
    assert contradictions(job.model_copy(update={"schedule": Schedule()})) == []
    (found,) = contradictions(job)
    assert found.keys[-1] == "schedule.seq_len"
    assert '3 in layer 0 ("longformer") is more than the 2 blocks of 64 that 128' in found.text


def test_what_the_reference_keeps_is_said() -> None:
    (note,) = without_effect(spec(kind="local", model={"kernels": "torch", "seq_len": 16384}))
    assert "4.29 GB of scores for a sequence and layer" in note
    assert without_effect(spec(model={"kernels": "torch"})) == []


def test_lengths_that_never_come_are_told() -> None:
    job = spec(model={"seq_len": 512})
    lengths = Schedule(seq_len=((0, 128), (99, 256), (100, 512)))
    (note,) = without_effect(job.model_copy(update={"schedule": lengths}))
    assert "sequences of 512 from step 100 on, which never comes: train.steps = 100" in note


def test_what_has_no_effect_is_said() -> None:
    job = spec(kind="local", groups=(2,), random=3, heads="different", **{"global": 2})
    assert without_effect(job) == [
        'model.attention.groups = [2] has no effect with model.attention.kind = "local"',
        'model.attention.random = 3 has no effect with model.attention.kind = "local"',
        'model.attention.heads = "different" has no effect with model.attention.kind = "local"',
        'model.attention.global = 2 has no effect with model.attention.kind = "local"',
    ]
    assert (
        without_effect(spec(kind=("dense", "bigbird"), random=0, window=7, **{"global": 0})) == []
    )
    said = without_effect(spec(block=8))
    assert said == ['model.attention.block = 8 has no effect with model.attention.kind = "dense"']


@pytest.mark.parametrize(
    ("job", "where"),
    [
        (spec(kind="local", window=8), '"local" of layer 0 hides nothing in sequences of 512, 8'),
        (spec(kind="bigbird", window=1, random=5), ""),
        (spec(kind=("dense", "bigbird"), window=1, random=7), '"bigbird" of layer 1 hides nothing'),
        (
            spec(kind="fixed", data={"seq_len": 200}),
            '"fixed" of layer 0 hides nothing in',
        ),
        (spec(kind="strided", window=2, heads="different"), ""),
        (
            spec(kind="local", window=3, model=T5),
            '"local" of layer 2 hides nothing in sequences of 114, 2 blocks of 64',
        ),
        (
            spec(kind=("local", "local", "dense", "dense"), window=15, model=T5),
            '"local" of layer 0 hides nothing in sequences of 512, 8',
        ),
        (spec(kind=("local", "local", "dense", "dense"), window=3, model=T5), ""),
    ],
)
def test_a_layout_that_is_dense_is_told(job: Spec, where: str) -> None:
    notes = without_effect(job)
    assert len(notes) == bool(where)
    assert where in "".join(notes)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("window = 0", "model.attention.window = 0: must be a whole number from 1 to"),
        ("window = [2, 0]", "model.attention.window = [2, 0]: must be a whole number from 1 to"),
        ("block = 4", "model.attention.block = 4: must be a whole number from 8 to 4_096"),
        ("kind = []", "model.attention.kind = []: must be "),
        ('kind = "sliding"', 'model.attention.kind = "sliding": must be "dense", "local"'),
        (
            "globals = 3",
            "model.attention.globals: unknown key; did you mean model.attention.global",
        ),
    ],
)
def test_values_that_are_not_allowed(tmp_path: Any, setting: str, text: str) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(f"[model.attention]\n{setting}\n")
    with pytest.raises(InputError) as refused:
        load(path, [])
    assert text in str(refused.value)
