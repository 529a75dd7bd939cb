"""GPT-2's `reorder_and_upcast_attn` chooses a precision, not a function; hence the truth may be taken without it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

from parity import family as families
from parity import strategies
from parity.family import Layer
from parity.pair import Pair, forward, pair_of, run_references
from parity.scenario import Scenario
from parity.strategies import Pool

pytestmark = pytest.mark.parity

GPT2 = families.load("gpt2")


def scenarios(layer: Layer) -> SearchStrategy[Scenario]:
    return strategies.scenarios(GPT2, layer, Pool(dtypes=("f32",)), far=False, stack=4)


def reference(layer: str, scenario: Scenario, upcast: bool) -> list[torch.Tensor]:
    """What the reference's unfused implementation computes in float32."""
    config = tuple((name, value) for name, value in scenario.config if name != "upcast")
    pair: Pair = pair_of("gpt2", layer, (*config, ("upcast", upcast)))
    return run_references(pair, pair.case(scenario), forward, torch.float32)[0].values


@pytest.mark.parametrize("layer", ["attention", "cross_attention"])
def test_the_reference_computes_the_same_with_and_without_it(layer: str) -> None:
    @settings(max_examples=10)
    @given(scenario=scenarios(GPT2.layer(layer)))
    def same(scenario: Scenario) -> None:
        for plain, upcast in zip(*(reference(layer, scenario, choice) for choice in (False, True)), strict=True):
            torch.testing.assert_close(plain, upcast)

    same()
