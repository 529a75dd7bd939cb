"""The second implementations are right: within the same bounds as our own layers, under ordinary scenarios."""

from __future__ import annotations

import pytest
import torch

from parity import family as families
from parity import property as properties
from parity.meta.second import SECOND, second_pair
from parity.mistakes import catalogue
from parity.strategies import Pool, examples

FORWARD, GRADIENTS = properties.find("forward"), properties.find("gradients")
PLACES = [pytest.param(*place, id=" ".join(place)) for place in SECOND]


@pytest.mark.parametrize("prop", [FORWARD, GRADIENTS], ids=lambda prop: prop.name)
@pytest.mark.parametrize(("model_type", "layer"), PLACES)
def test_a_second_implementation_is_right(model_type: str, layer: str, prop: properties.Property) -> None:
    family = families.load(model_type)
    dtypes = ("f64", "f32", "bf16") if prop is FORWARD else ("f64",)
    for scenario in examples(prop.scenarios(family, family.layer(layer), Pool(dtypes=dtypes)), 2, seed=1):
        judgements = prop.judge(second_pair(model_type, layer, scenario.config), scenario)
        assert not [str(j) for j in judgements if not j.holds and j.quantity.verdict != "precision"], scenario


@pytest.mark.parametrize(("model_type", "layer"), PLACES)
def test_its_mistakes_are_those_of_the_catalogue(model_type: str, layer: str) -> None:
    assert {mistake.name for mistake in catalogue()} >= SECOND[model_type, layer].MAKES


def test_a_mistake_that_it_cannot_make_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot make these mistakes: leaves k unrotated"):
        second_pair("llama", "norm", (), ["leaves k unrotated"]).candidate(torch.float64)
