"""A scenario's line says all of it: read back it is the same scenario, and what cannot be read is named."""

import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity import family as families
from parity import property as properties
from parity.scenario import DTYPES, SIDES, Scenario, ScenarioError, format_scenario, parse_scenario
from parity.strategies import Pool

often = settings(max_examples=100)  # a line costs next to nothing
LINE = "rope=yarn h6/3 d8 b2 s5,1,1 left0,2 masked m5-0,2 typed @1000 x0.01 f32,bf16 #17 *8"
NOT_WORDS = (
    *("b", "b-1", "b1.5", "bb2", "s", "s1,,2", "s1,", "s-3", "sx", "left", "left1,", "up1", "packed", "packed1,"),
    *("@", "@-1", "@1.5", "x", "x1.2.3", "x-", "xnan", "#", "#-1", "*", "*x", "m", "m5-", "m-1", "f8", "f32,", ",f32"),
    *("h", "hx", "d", "Masked", "typo", "²", "b²", "#1#2", "s" + "9" * 5000),
)
CONTRADICTIONS = (
    *("b0", "*0", "s0", "s2,0", "b2 s3 left1", "s3 left3", "s3 left1 packed1,2", "s3 packed1,1", "s3 packed3,0"),
    *("b2 m5-1", "m5-5", "m0-1", "x0", "x-1", "x1e999", "b1 b2", "s1 s2", "f32 bf16", "rope=yarn rope=linear", "d4 d8"),
    *("left0,1 right0,1 b2 s3", "typed typed"),
)


@st.composite
def recipes(draw: st.DrawFn) -> Scenario:
    """Any scenario at all, whether or not a family has its axes."""
    count = st.integers(0, 10**6)
    schedule = draw(st.lists(st.integers(1, 50), min_size=1, max_size=5).map(tuple))
    batch, length, memory = draw(st.integers(1, 4)), sum(schedule), draw(st.integers(0, 9))
    padding = draw(st.just(()) | st.tuples(*[st.integers(0, length - 1)] * batch))
    memory_padding = draw(st.tuples(*[st.integers(0, memory - 1)] * batch)) if memory else ()
    name = st.from_regex(r"[a-z_]{2,9}", fullmatch=True)
    value = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.just("yarn")
    return Scenario(
        config=tuple(draw(st.dictionaries(name, value, max_size=3)).items()),
        batch=batch,
        schedule=schedule,
        side=draw(st.sampled_from(SIDES)) if any(padding) else "left",
        padding=padding if any(padding) else (),
        packing=draw(st.just(()) | st.just((length,))) if not any(padding) else (),
        offset=draw(count),
        masked_positions=draw(st.booleans()),
        memory=memory,
        memory_padding=memory_padding if any(memory_padding) else (),
        typed=draw(st.booleans()),
        scale=draw(st.floats(min_value=0, exclude_min=True, allow_infinity=False)),
        dtypes=tuple(draw(st.lists(st.sampled_from(list(DTYPES)), min_size=1, unique=True))),
        seed=draw(count),
        stack=draw(st.integers(1, 99)),
    )


def drawn() -> Iterator[st.SearchStrategy[Scenario]]:
    """The scenarios of every property and layer there is."""
    for family in map(families.load, families.names()):
        for prop in properties.properties().values():
            yield from (prop.scenarios(family, layer, Pool()) for layer in family.layers if prop.applies(family, layer))


@often
@given(recipes())
def test_a_line_read_back_is_the_same_scenario(scenario: Scenario) -> None:
    assert parse_scenario(format_scenario(scenario)) == scenario


@often
@given(st.one_of(*drawn()))
def test_a_line_of_any_run_read_back_is_the_same_case(scenario: Scenario) -> None:
    """Padding of which there is none may be left out."""
    line = str(scenario)
    assert str(parse_scenario(line)) == line
    assert parse_scenario(line).rows == scenario.rows


@given(st.permutations(LINE.split()))
def test_words_stand_in_any_order(words: list[str]) -> None:
    read, expected = parse_scenario(" ".join(words)), parse_scenario(LINE)
    assert read.values == expected.values
    assert sorted(str(read).split()) == sorted(str(expected).split())


@pytest.mark.parametrize("word", NOT_WORDS, ids=lambda word: word[:9])
def test_a_word_that_is_none_is_named(word: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(repr(word))):
        parse_scenario(f"b2 {word} s3")


@pytest.mark.parametrize("line", CONTRADICTIONS)
def test_words_that_contradict_each_other_are_refused(line: str) -> None:
    with pytest.raises(ScenarioError):
        parse_scenario(line)


@often
@given(
    st.text()
    | st.lists(st.sampled_from(LINE.split()) | st.text(alphabet="bsmxhd#@*=,-/.0123", min_size=1)).map(" ".join)
)
def test_any_text_is_a_scenario_or_a_scenario_error(text: str) -> None:
    try:
        scenario = parse_scenario(text)
    except ScenarioError:
        return
    assert str(parse_scenario(str(scenario))) == str(scenario)
