"""The harness sees: every mistake of the catalogue shows where it must, nowhere else, and the report points at it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import family as families
from parity import mistakes
from parity import property as properties
from parity.candidate import Candidate
from parity.family import Family, FamilyError, Layer
from parity.mismatch import Mismatch
from parity.mistakes import Mistake
from parity.mistakes.seams import planted, wrapped
from parity.pair import pair_of
from parity.runner import check, hold
from parity.scenario import DTYPES, Scenario, parse_scenario
from reimpl.attention import MultiHead

LLAMA = families.load("llama")
FORWARD = properties.find("forward")
CATALOGUE = mistakes.catalogue()
SCENARIOS = 120  # at most; half of the mistakes are caught by the third
WIDE = 100  # times the allowance, at least, by which a mistake is seen
each_mistake = pytest.mark.parametrize("mistake", CATALOGUE, ids=str)


def places(mistake: Mistake) -> Iterator[tuple[Family, Layer]]:
    """Of each place one family, from mistake to mistake another, with the lowest layer that can make it."""
    turn = CATALOGUE.index(mistake)
    for place in mistake.places:
        family = families.load(place.families[turn % len(place.families)])
        yield family, family.layer(mistake.where[family.model_type][0])


def scenario_of(mistake: Mistake, line: str) -> Scenario:
    """A scenario in the mistake's own dtype, where it does not say another."""
    scenario = parse_scenario(line)
    return scenario.only(mistake.dtype) if scenario.dtypes == tuple(DTYPES) else scenario


@each_mistake
def test_a_mistake_shows_widely_and_is_located(mistake: Mistake) -> None:
    with mistake.planted():
        for family, layer in places(mistake):
            scenario = scenario_of(mistake, mistake.place(family.model_type).shows)
            with pytest.raises(Mismatch) as raised:
                check(properties.find(mistake.prop), family, layer, scenario)
            mismatch = raised.value
            divergence = mismatch.divergence
            assert set(mismatch.verdicts) <= mistake.verdicts_of(layer), family.model_type
            assert (divergence.quantity.name in mistake.parts) if divergence else not mistake.parts, family.model_type
            assert all(judgement.ratio > WIDE for judgement in mismatch.failed[:1]), family.model_type


@each_mistake
def test_a_mistake_does_not_show_where_it_cannot(mistake: Mistake) -> None:
    with mistake.planted():
        for family, layer in places(mistake):
            if line := mistake.place(family.model_type).unseen:
                check(properties.find(mistake.prop), family, layer, scenario_of(mistake, line))


def test_mistakes_have_names_of_their_own() -> None:
    assert len({mistake.name for mistake in CATALOGUE}) == len(CATALOGUE)


@each_mistake
def test_what_a_mistake_says_of_its_places_is_so(mistake: Mistake) -> None:
    """Every place has layers; what always shows says why."""
    for place in mistake.places:
        assert place.families
        assert all(mistake.where[model_type] for model_type in place.families)
        assert place.unseen or mistake.trigger.startswith("any ")


def test_a_mistake_is_found_by_its_name_and_by_where_it_can_be_made() -> None:
    assert mistakes.find("rotates the wrong way").kind == "rope pairing"
    assert mistakes.find("rotates the wrong way") in mistakes.of("llama", "attention")
    assert mistakes.find("rotates the wrong way") not in mistakes.of("llama", "mlp")
    with pytest.raises(FamilyError, match="did you mean 'rotates the wrong way'"):
        mistakes.find("rotates a wrong way")


# The report of a mismatch


def caught(layer: str, mistake: Mistake) -> Mismatch:
    """The smallest mismatch that the ordinary scenarios of a layer find."""
    prop = properties.find(mistake.prop)
    tally = hold(prop, LLAMA, LLAMA.layer(layer), (mistake.dtype,), examples=SCENARIOS, seed=0)
    assert tally.mismatch is not None, f"{mistake} survives {tally.scenarios} scenarios"
    return tally.mismatch


@contextmanager
def report_of(name: str, layer: str) -> Iterator[dict[str, str]]:
    """The lines of a report by their labels, while the mistake is planted."""
    mistake = mistakes.find(name)
    with mistake.planted():
        headline, *lines = str(caught(layer, mistake)).splitlines()
        yield {"": headline} | {line[:12].strip(): line[12:] for line in lines}


def test_a_report_says_where_how_large_and_how_to_see_it_again() -> None:
    with report_of("rotates adjacent pairs where the reference rotates halves", "block") as lines:
        assert re.fullmatch(r"llama / LlamaDecoderLayer   output and cache differ from transformers [\d.]+", lines[""])
        assert lines["where"] == (
            "first departs at q after rotation in self_attn, k after rotation too, with q, k and cached v exact"
        )
        size = r"[\d.]+ relative, \de\+\d\d times the allowance of \de-12 \(.* in step 1, float64\)"
        assert re.fullmatch(size, lines["size"])
        assert lines["outputs"] == "exact at the first token"
        smallest = eval(lines["smallest"], {"Scenario": Scenario})
        assert smallest == Scenario(schedule=(1, 1), dtypes=("f64",))
        command, line = lines["again"].split(" --scenario ")
        assert command == "parity run llama --layer block --property forward"
        assert parse_scenario(line.strip("'")) == smallest
        with pytest.raises(Mismatch):
            check(FORWARD, LLAMA, LLAMA.layer("block"), smallest)


@pytest.mark.parametrize(
    ("name", "layer", "pattern"),
    [
        ("drops the attention factor of yarn", "rotary", r"0\.8782\d+ times what they should be"),
        (
            "keeps the frequencies of a long prompt for a short one",
            "rotary",
            "exact at the first .* tokens, further off",
        ),
        ("decodes from position 0 again", "model", "exact at the first 9 tokens, exact in one pass over all tokens"),
        ("counts positions from 1", "model", "exact"),
        ("mixes heads and channels when heads are joined", "attention", None),
    ],
)
def test_patterns_are_read_off_the_outputs(name: str, layer: str, pattern: str | None) -> None:
    with report_of(name, layer) as lines:
        assert re.match(pattern, lines["outputs"]) if pattern else "outputs" not in lines


def test_an_order_that_numbers_cannot_show_is_not_called_exact() -> None:
    with report_of("mixes heads and channels when heads are joined", "attention") as lines:
        assert lines["where"] == "first departs at o_proj, with context exact but for the order"


def test_a_precision_is_named() -> None:
    with report_of("takes the softmax in the model's dtype", "attention") as lines:
        assert lines["where"] == "softmax in bfloat16, where the reference takes float32"


def test_where_a_candidate_breaks_off_is_located() -> None:
    def breaking(mix: Any) -> Any:
        def call(*args: Any) -> Tensor:
            raise RuntimeError("no kernel for this")

        return call

    with planted(wrapped(MultiHead, "mix", breaking)):
        with pytest.raises(Mismatch) as raised:
            check(FORWARD, LLAMA, LLAMA.layer("block"), parse_scenario("b1 s3 f64"))
        report = str(raised.value)
    assert "the candidate raises RuntimeError in torch.float64: no kernel for this" in report
    assert "first departs at scores in self_attn, with q after rotation, cached k and cached v exact" in report


OTHERS = [family for family in map(families.load, families.names()) if family is not LLAMA]
TOPS = [(LLAMA, layer) for layer in LLAMA.layers] + [(family, family.layers[-1]) for family in OTHERS]


@pytest.mark.parametrize(("family", "layer"), [pytest.param(*top, id=f"{top[0].model_type} {top[1]}") for top in TOPS])
def test_nothing_is_blamed_in_a_candidate_that_computes_everything(family: Family, layer: Layer) -> None:
    """Its outputs come in a shape in which they cannot be compared, so that every result is suspected."""

    def transposed(output: Any) -> Any:
        return lambda self, returned: {name: value.mT for name, value in output(self, returned).items()}

    line = " ".join(["b2 s3 f64", *["left0,1"] * (layer.kind.attends and layer.masks), *["m3"] * layer.must_remember])
    with planted(wrapped(Candidate, "output", transposed)):
        with pytest.raises(Mismatch) as raised:
            check(FORWARD, family, layer, parse_scenario(line))
        assert raised.value.divergence is None
        assert "unknown" in str(raised.value)


def test_a_candidate_that_is_not_the_same_twice_is_a_mismatch() -> None:
    calls = count()

    def failing_once(mix: Any) -> Any:
        return lambda self, *args: mix(self, *args) + (next(calls) == 5)

    with planted(wrapped(MultiHead, "mix", failing_once)):
        tally = hold(FORWARD, LLAMA, LLAMA.layer("attention"), ("f64",), examples=20, seed=0)
    assert tally.mismatch is not None
    assert tally.mismatch.verdicts == ["output"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_are_seen_in_every_dtype(dtype: str) -> None:
    with mistakes.find("adds the residual in place").planted(), pytest.raises(Mismatch) as raised:
        check(FORWARD, LLAMA, LLAMA.layer("block"), parse_scenario("b1 s3").only(dtype))
    assert "side effects" in raised.value.verdicts


def test_layers_are_right_again_after_a_mistake() -> None:
    with mistakes.find("rotates the wrong way").planted():
        pair_of("llama", "attention").candidate(torch.float64)
    check(FORWARD, LLAMA, LLAMA.layer("attention"), parse_scenario("b2 s3,1 f64"))
