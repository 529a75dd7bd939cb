"""A diagnosis names the mistake that a second implementation makes, and none where it knows none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from parity import property as properties
from parity.diagnose import Diagnosis, diagnose
from parity.meta.second import second_pair
from parity.mistakes import find, of
from parity.scenario import parse_scenario

PAIRING = "rotates adjacent pairs where the reference rotates halves"


def diagnosed(
    model_type: str, layer: str, names: Sequence[str], line: str, without: str = "", depth: int = 1
) -> Diagnosis:
    """What is said of a second implementation that makes these mistakes, by a catalogue without one of them."""
    scenario = parse_scenario(line)
    build = partial(second_pair, model_type, layer, wrong=names)
    known = [mistake for mistake in of(model_type, layer) if mistake.name != without]
    prop = properties.find(find(names[0]).prop)
    dtype = scenario.dtypes[0]
    return diagnose(build(scenario.config), scenario, prop, dtype=dtype, known=known, pair_at=build, depth=depth)


@pytest.mark.parametrize(
    ("model_type", "layer", "name", "line"),
    [
        ("llama", "attention", PAIRING, "b1 s3 f64"),
        ("llama", "attention", PAIRING, "b1 s3 f32"),
        ("llama", "attention", PAIRING, "b1 s3 bf16"),
        ("mistral", "attention", "tiles key/value heads where the reference repeats each", "h6/3 b1 s3 f32"),
        ("qwen3", "attention", "detaches k", "b1 s3 f64"),
        ("deepseek_v3", "norm", "adds 1 to the gains", "b1 s3 bf16"),
    ],
)
def test_a_mistake_is_named_first_and_alone(model_type: str, layer: str, name: str, line: str) -> None:
    diagnosis = diagnosed(model_type, layer, [name], line)
    assert [str(cause) for cause in diagnosis.causes] == [name]
    assert str(diagnosis) == f"{name}   (explains the whole difference)"


@pytest.mark.parametrize("line", ["b1 s3 f64", "b1 s3 bf16"])
def test_a_mistake_that_the_catalogue_lacks_is_unknown(line: str) -> None:
    diagnosis = diagnosed("llama", "attention", [PAIRING], line, without=PAIRING)
    assert diagnosis.causes == ()
    assert str(diagnosis).startswith("unknown: none of the")


def test_two_mistakes_are_named_together() -> None:
    names = [PAIRING, "does not scale the scores"]
    diagnosis = diagnosed("llama", "attention", names, "b1 s3 f64", depth=2)
    assert [{mistake.name for mistake in cause.mistakes} for cause in diagnosis.causes] == [set(names)]


def test_mistakes_that_are_the_same_under_one_configuration_are_all_named() -> None:
    scenario = parse_scenario("d4 b1 s3 f64")
    pair = second_pair("llama", "norm", (), ["subtracts the mean"])
    diagnosis = diagnose(pair, scenario, known=[find("subtracts the mean")] * 2, depth=1)
    assert len(diagnosis.causes) == 2
    assert "or, which is the same here" in str(diagnosis)


def test_nothing_is_said_of_a_candidate_that_is_right() -> None:
    assert diagnose(second_pair("llama", "norm"), parse_scenario("b1 s3 f64")).causes == ()
