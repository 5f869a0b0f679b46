"""Groups of parameters by patterns of their names."""

import pytest

from hpczero.errors import InputError
from hpczero.optim.groups import first_matches, options_by_name

NAMES = ["embed.weight", "layers.0.weight", "layers.0.bias", "layers.1.bias", "head.weight"]


def test_the_first_match_counts_and_a_star_goes_over_dots() -> None:
    matches = first_matches(["*.bias", "layers.*", "h?ad.[uvw]eight"], NAMES, "groups")
    assert matches == {
        "layers.0.bias": "*.bias",
        "layers.1.bias": "*.bias",
        "layers.0.weight": "layers.*",
        "head.weight": "h?ad.[uvw]eight",
    }


def test_options_are_those_of_the_pattern() -> None:
    groups = {"head.*": {"lr": 1.0}, "*": {"lr": 2.0}}
    options = options_by_name(groups, NAMES)
    assert options["head.weight"] is groups["head.*"]
    assert options["embed.weight"] is groups["*"]
    assert options_by_name({}, NAMES) == {}


def test_a_pattern_without_effect_is_a_mistake() -> None:
    with pytest.raises(
        InputError, match=r"groups: 'layer\.0\.\*' matches no parameter; .* layers\.0\.bias"
    ):
        first_matches(["layer.0.*"], NAMES, "groups")
    with pytest.raises(
        InputError, match=r"'head\.\*' has no effect.* '\*' before it matches head\.weight: put it"
    ):
        first_matches(["*", "head.*"], NAMES, "groups")
    with pytest.raises(InputError, match="matches no parameter"):
        first_matches(["Layers.*"], NAMES, "groups")
