"""Sources of a mixture beside settings that they cannot have."""

from hpczero.spec.data import Data, Source
from hpczero.spec.rules import contradictions
from hpczero.spec.schema import Spec


def messages(data: Data) -> list[str]:
    return [contradiction.text for contradiction in contradictions(Spec(data=data))]


def mixture(*paths: str, **more: object) -> Data:
    return Data(sources=tuple(Source(path=path) for path in paths), **more)


def test_a_single_source_beside_several_is_refused() -> None:
    [said] = messages(mixture("a.h5", "b.h5", source="c.h5"))
    assert 'data.source = "c.h5" stands beside the 2 of data.sources' in said


def test_a_source_that_stands_there_twice_is_refused() -> None:
    [said] = messages(mixture("a.h5", "b.h5", "a.h5"))
    assert 'data.sources has "a.h5" more than once' in said


def test_the_library_s_text_needs_a_share_for_validation_wherever_it_is_read() -> None:
    assert not messages(mixture("a.h5", "b.h5", validation_fraction=0.0))
    for data in (mixture("a.h5", "stdlib", validation_fraction=0.0), Data(validation_fraction=0.0)):
        [said] = messages(data)
        assert "data.validation_fraction = 0 leaves no text" in said
