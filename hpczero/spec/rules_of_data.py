"""Keys of [data] that are each allowed, but not together (pure)."""

from collections.abc import Iterator

from hpczero.spec.keys import Contradiction
from hpczero.spec.schema import Spec
from hpczero.text import join_words, toml_repr


def _sources(spec: Spec) -> Iterator[Contradiction]:
    data = spec.data
    if data.sources and data.source != type(data)().source:
        yield Contradiction(
            ("data.source", "data.sources"),
            f"data.source = {toml_repr(data.source)} stands beside the {len(data.sources)} of "
            "data.sources: make it one of them, or leave it out",
        )
    paths = [source.path for source in data.sources]
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        yield Contradiction(
            ("data.sources",),
            f"data.sources has {join_words([toml_repr(path) for path in twice])} more than once: "
            "give it one weight",
        )


def _validation(spec: Spec) -> Iterator[Contradiction]:
    train, data = spec.train, spec.data
    if train.eval_batches and "stdlib" in data.paths and data.validation_fraction == 0:
        yield Contradiction(
            ("data.validation_fraction", "train.eval_batches"),
            "data.validation_fraction = 0 leaves no text for "
            f"train.eval_batches = {train.eval_batches}: set that to 0",
        )


RULES = (_sources, _validation)
