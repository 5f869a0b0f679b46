"""A spec written as TOML reads back equal, and two specs are compared key by key."""

import tomllib
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.spec.load import differences, load, to_toml, toml_value
from hpczero.spec.schema import Spec
from tests.support.specs import Write


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_written_as_toml_on_one_line(text: str) -> None:
    written = toml_value(text)
    assert tomllib.loads(f"value = {written}") == {"value": text}
    assert written.splitlines() == [written]
    assert not any(unicodedata.category(character) == "Cc" for character in written)


SPECS = st.builds(
    lambda seed, output, source, lr, betas, eps, steps: Spec().model_copy(
        update={
            "seed": seed,
            "output": output,
            "data": Spec().data.model_copy(update={"source": source}),
            "train": Spec().train.model_copy(update={"steps": steps}),
            "optimizer": Spec().optimizer.model_copy(update={"lr": lr, "betas": betas, "eps": eps}),
        }
    ),
    seed=st.integers(0, 2**63 - 1),
    output=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30),
    source=st.text("ab\"\\'# \u2028é𝄞", min_size=1, max_size=30),
    lr=st.floats(0, exclude_min=True, allow_infinity=False),
    betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    eps=st.floats(0, 1, exclude_min=True),
    steps=st.integers(1, 10**15),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(spec=SPECS)
def test_the_resolved_copy_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, spec: Spec
) -> None:
    text = to_toml(spec)
    path = tmp_path_factory.getbasetemp() / "resolved.toml"
    path.write_text(text, encoding="utf-8")
    loaded = load(path)
    assert loaded.spec == spec
    assert all(source.line for source in loaded.sources.values()), "the copy holds every key"
    assert to_toml(loaded.spec) == text


def test_differences_name_key_values_and_role(write: Write) -> None:
    old, new = load(write("")).spec, load(write("seed = 2\ntrain.steps = 5\noutput = 'x'")).spec
    assert differences(old, old) == []
    assert [(d.key, d.old, d.new, d.role) for d in differences(old, new)] == [
        ("seed", 1, 2, "identity"),
        ("output", "runs", "x", "site"),
        ("train.steps", 100, 5, "changeable"),
    ]
