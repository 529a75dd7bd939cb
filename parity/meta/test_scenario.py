"""A scenario's line is read back as the scenario, for every layer; what contradicts itself or its family is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from parity import family as families
from parity import strategies
from parity.pair import pair_of
from parity.scenario import Scenario, ScenarioError, format_scenario, parse_scenario
from parity.strategies import Pool

LAYERS = [(model_type, layer) for model_type in families.names() for layer in families.load(model_type).layers]


def drawn() -> SearchStrategy[Scenario]:
    """Scenarios of every layer of every family."""
    return st.sampled_from(LAYERS).flatmap(
        lambda each: strategies.scenarios(families.load(each[0]), each[1], Pool(), packed=True)
    )


@settings(max_examples=200)
@given(scenario=drawn())
def test_a_line_is_read_back(scenario: Scenario) -> None:
    line = format_scenario(scenario)
    assert format_scenario(parse_scenario(line)) == line


def test_words_come_in_any_order() -> None:
    line = "rope=yarn h6/3 d8 b2 s5,1,1 left0,2 masked m5-0,2 typed @1000 x0.01 f32 #17 *8"
    scenario = parse_scenario(line)
    assert format_scenario(scenario) == line
    assert parse_scenario(" ".join(reversed(line.split()))).memory_padding == (0, 2) == scenario.memory_padding


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("b2 m3-1", "m3-1 pads 1 memories, but b2"),
        ("m3-3", "leaves a memory of 3 tokens empty"),
        ("m3-", "'m3-' is not understood"),
        ("typ", "'typ' is not understood"),
        ("s4 w3", "4 pixels do not fill an image that is 3 wide"),
    ],
)
def test_what_contradicts_itself_is_refused(line: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        parse_scenario(line)


@pytest.mark.parametrize(
    ("model_type", "layer", "line", "message"),
    [
        ("llama", "block", "m3", "block attends to no memory"),
        ("gpt2", "block", "m3", "block attends to no memory under this configuration"),
        ("llama", "model", "typed", "llama knows no types of tokens"),
        ("gpt2", "model", "s5 @60", "gpt2 has 64 positions"),
        ("bert", "block", "s2,1", "tokens of block see those after them"),
        ("fnet", "block", "s3 left1", "block cannot tell padding from tokens"),
        ("llama", "block", "s4 w2", "block is given no images"),
    ],
)
def test_what_a_family_does_not_have_is_refused(model_type: str, layer: str, line: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        pair_of(model_type, layer).case(parse_scenario(line))
