"""Rules between keys: contradictions, impossible layouts of a model, and keys without effect."""

import pytest

from hpczero.spec.load import load
from hpczero.spec.rules import contradictions, unavailable, without_effect
from hpczero.spec.schema import Model, Parallel, Spec
from tests.support.specs import Write, refusal


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "schedule.warmup_steps = 101",
            "schedule.warmup_steps = 101 is more than train.steps = 100",
        ),
        (
            "train.steps = 5\nschedule = {name = 'wsd', warmup_steps = 3, decay_steps = 3}",
            "make 6, more than train.steps = 5",
        ),
        (
            "schedule.decay_steps = 5",
            'schedule.decay_steps = 5 is for "wsd" only, and schedule.name = "cosine"',
        ),
        ("schedule.min_lr = 1", "schedule.min_lr = 1.0 is more than optimizer.lr = 0.0003"),
        (
            "schedule = {name = 'constant', min_lr = 1e-5}",
            'schedule.min_lr = 1e-05, but schedule.name = "constant"',
        ),
        (
            "train = {eval_every = 5, eval_batches = 0}",
            "train.eval_batches = 0 means no evaluation, train.eval_every = 5",
        ),
        ("data.validation_fraction = 0", "leaves no text for train.eval_batches = 8"),
        ("model = {heads = 16, hidden = 8}", "model.heads = 16 is more than model.hidden = 8"),
        (
            "parallel.order = 'data'\nparallel.tensor = 2",
            'parallel.order = "data": must name each axis once',
        ),
        ("checkpoint.weights_only = true", 'checkpoint.resume = "auto" names no checkpoint'),
    ],
)
def test_contradictions_show_all_numbers(write: Write, text: str, expected: str) -> None:
    message = refusal(write(text))
    assert expected in message
    assert message.startswith("spec.toml:")
    assert "mistakes" not in message


def test_defaults_that_stand_in_for_mistakes_contradict_nothing(write: Write) -> None:
    message = refusal(write("[train]\nstepz = 1000\n[schedule]\nwarmup_steps = 500"))
    assert message == "spec.toml:2: train.stepz: unknown key; did you mean train.steps?"
    message = refusal(write("[train]\nsteps = '1000'\n[schedule]\nwarmup_steps = 500"))
    assert "warmup" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "parallel.tensor = 8\nmodel.heads = 6",
            "parallel.tensor = 8 is more than model.heads = 6, and every tensor rank needs a head: "
            "parallel.tensor = 4, 2 or 1 (for the same ranks), at most 6, "
            "or at least model.heads = 8",
        ),
        (
            "parallel = {tensor = 6, sequence_parallel = true}\nmodel = {seq_len = 4, heads = 6}",
            "parallel.tensor = 6 ranks cannot share the 4 positions of model.seq_len "
            "(parallel.sequence_parallel = true): "
            "parallel.tensor = 3, 2 or 1 (for the same ranks), at most 4, "
            "or parallel.sequence_parallel = false",
        ),
        (
            "parallel.pipeline = 12\nmodel.layers = 7",
            "parallel.pipeline = 12 is more than the 9 layers of the model "
            "(model.layers = 7, and those before and after them): "
            "parallel.pipeline = 6, 4, 3 or 2 (for the same ranks), at most 9, "
            "or at least model.layers = 10",
        ),
        (
            "parallel = {pipeline = 4, schedule = 'interleaved', chunks = 3}\nmodel.layers = 7",
            "parallel.pipeline = 4 x parallel.chunks = 3 makes 12 parts, "
            "more than the 9 layers of the model "
            "(model.layers = 7, and those before and after them): "
            "parallel.pipeline = 2 or 1 (for the same ranks), at most 3, "
            "or parallel.chunks = 2 or less, or at least model.layers = 10",
        ),
        (
            "parallel = {pipeline = 2, chunks = 2}",
            'parallel.chunks = 2 is for "interleaved" only, and parallel.schedule = "1f1b"',
        ),
        (
            "parallel = {pipeline = 2, schedule = 'interleaved'}",
            'parallel.schedule = "interleaved" is for several parallel.chunks on a stage',
        ),
    ],
)
def test_layouts_that_the_model_cannot_have(write: Write, text: str, expected: str) -> None:
    message = refusal(write(text))
    assert expected in message
    assert "mistakes" not in message


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(tensor=6),
        Parallel(pipeline=9),
        Parallel(pipeline=3, chunks=3, schedule="interleaved"),
        Parallel(tensor=5, sequence_parallel=True),
    ],
)
def test_layouts_at_the_model_s_limits(parallel: Parallel) -> None:
    model = Model(heads=6, layers=7, seq_len=5)
    assert contradictions(Spec(parallel=parallel, model=model)) == []
    assert (
        contradictions(
            Spec(
                parallel=parallel,
                model=model.model_copy(update={"heads": 5, "layers": 6, "seq_len": 4}),
            )
        )
        != []
    )
    assert (
        contradictions(
            Spec(parallel=parallel, model=Model(family="some.module:factory", seq_len=5))
        )
        == []
    ), "its heads and layers are not known"


def test_what_has_no_effect_on_one_rank_or_one_stage_is_said() -> None:
    notes = without_effect(Spec(parallel=Parallel(sequence_parallel=True, schedule="gpipe")))
    assert [note.partition(" has no effect with ")[::2] for note in notes] == [
        (
            "parallel.sequence_parallel = true",
            "parallel.tensor = 1: there is nobody to share the sequence with",
        ),
        ('parallel.schedule = "gpipe"', "parallel.pipeline = 1: there is one stage"),
    ]
    assert (
        without_effect(
            Spec(parallel=Parallel(tensor=2, sequence_parallel=True, pipeline=2, schedule="gpipe"))
        )
        == []
    )


def test_what_cannot_run_yet_loads_and_is_named(write: Write) -> None:
    spec = load(write("parallel = {tensor = 2, pipeline = 3}")).spec
    assert unavailable(spec) == unavailable(Spec()) == []
    own = Spec(
        model=Model(family="package.module:factory"), parallel=Parallel(tensor=2, pipeline=3)
    )
    assert [text.split(" with ")[0] for text in unavailable(own)] == ["parallel.tensor = 2"]


def test_a_warm_up_may_last_the_whole_run(write: Write) -> None:
    path = write("schedule.warmup_steps = 10\ntrain.steps = 10")
    assert load(path).spec.schedule.warmup_steps == 10
    assert "at most 10" in refusal(path, "schedule.warmup_steps=11")
