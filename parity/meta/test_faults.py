"""The harness sees: what is planted into our Llama is caught by ordinary scenarios, and the report points at it."""

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
from parity import property as properties
from parity.candidate import Candidate
from parity.family import Family, Layer
from parity.meta.faults import FAULTS
from parity.meta.seams import Fault, wrapped
from parity.mismatch import Mismatch
from parity.pair import pair_of
from parity.runner import check, hold
from parity.scenario import DTYPES, Scenario, parse_scenario
from reimpl.attention import MultiHead

LLAMA = families.load("llama")
FORWARD = properties.find("forward")
SCENARIOS = 120  # at most; half of the faults are caught by the third
WIDE = 100  # times the allowance, at least, by which a fault is seen
PLACES = [(fault, layer) for fault in FAULTS for layer in dict.fromkeys((fault.layers[0], fault.layers[-1]))]
PLACES = [(fault, layer) for fault, layer in PLACES if layer == fault.layers[0] or layer != "logits"]
BY_NAME = {fault.name: fault for fault in FAULTS}
PAIRING = BY_NAME["rotates adjacent pairs where the reference rotates halves"]


def caught(layer: str, fault: Fault) -> Mismatch:
    """The smallest mismatch that the ordinary scenarios of a layer find."""
    tally = hold(properties.find(fault.prop), LLAMA, LLAMA.layer(layer), (fault.dtype,), examples=SCENARIOS, seed=0)
    assert tally.mismatch is not None, f"{fault} survives {tally.scenarios} scenarios"
    return tally.mismatch


@pytest.mark.parametrize(("fault", "layer"), [pytest.param(*place, id=f"{place[1]} {place[0]}") for place in PLACES])
def test_a_fault_is_caught_and_located(fault: Fault, layer: str) -> None:
    with fault.planted():
        mismatch = caught(layer, fault)
        divergence = mismatch.divergence
    assert set(mismatch.verdicts) <= set(fault.verdicts)
    assert divergence.quantity.name in fault.parts if divergence else fault.parts == ()
    assert all(judgement.ratio > WIDE for judgement in mismatch.failed[:1])


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.unseen], ids=str)
def test_a_fault_does_not_show_where_it_cannot(fault: Fault) -> None:
    scenario = parse_scenario(fault.unseen)
    scenario = scenario.only(fault.dtype) if fault.dtype == "f64" else scenario
    with fault.planted():
        check(properties.find(fault.prop), LLAMA, LLAMA.layer(fault.layers[0]), scenario)


def test_faults_have_names_of_their_own_and_reach_every_layer() -> None:
    assert len(BY_NAME) == len(FAULTS) >= 25
    assert {layer for fault in FAULTS for layer in fault.layers} == {layer.name for layer in LLAMA.layers}


@contextmanager
def report_of(fault: Fault, layer: str) -> Iterator[dict[str, str]]:
    """The lines of a report by their labels, while the fault is planted."""
    with fault.planted():
        headline, *lines = str(caught(layer, fault)).splitlines()
        yield {"": headline} | {line[:12].strip(): line[12:] for line in lines}


def test_a_report_says_where_how_large_and_how_to_see_it_again() -> None:
    with report_of(PAIRING, "block") as lines:
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
    with report_of(BY_NAME[name], layer) as lines:
        assert re.match(pattern, lines["outputs"]) if pattern else "outputs" not in lines


def test_an_order_that_numbers_cannot_show_is_not_called_exact() -> None:
    with report_of(BY_NAME["mixes heads and channels when heads are joined"], "attention") as lines:
        assert lines["where"] == "first departs at o_proj, with context exact but for the order"


def test_a_precision_is_named() -> None:
    with report_of(BY_NAME["takes the softmax in the model's dtype"], "attention") as lines:
        assert lines["where"] == "softmax in bfloat16, where the reference takes float32"


def test_where_a_candidate_breaks_off_is_located() -> None:
    def breaking(mix: Any) -> Any:
        def call(*args: Any) -> Tensor:
            raise RuntimeError("no kernel for this")

        return call

    with Fault("breaks off", ("block",), (), wrapped(MultiHead, "mix", breaking)).planted():
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

    with Fault("transposes", (), (), wrapped(Candidate, "output", transposed)).planted():
        with pytest.raises(Mismatch) as raised:
            check(FORWARD, family, layer, parse_scenario("b2 s3 left0,1 f64"))
        assert raised.value.divergence is None
        assert "unknown" in str(raised.value)


def test_a_candidate_that_is_not_the_same_twice_is_a_mismatch() -> None:
    calls = count()

    def failing_once(mix: Any) -> Any:
        return lambda self, *args: mix(self, *args) + (next(calls) == 5)

    with Fault("fails once", (), (), wrapped(MultiHead, "mix", failing_once)).planted():
        tally = hold(FORWARD, LLAMA, LLAMA.layer("attention"), ("f64",), examples=20, seed=0)
    assert tally.mismatch is not None
    assert tally.mismatch.verdicts == ["output"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_are_seen_in_every_dtype(dtype: str) -> None:
    with BY_NAME["adds the residual in place"].planted(), pytest.raises(Mismatch) as raised:
        check(FORWARD, LLAMA, LLAMA.layer("block"), parse_scenario("b1 s3").only(dtype))
    assert "side effects" in raised.value.verdicts


def test_layers_are_right_again_after_a_fault() -> None:
    with PAIRING.planted():
        pair_of("llama", "attention").candidate(torch.float64)
    check(FORWARD, LLAMA, LLAMA.layer("attention"), parse_scenario("b2 s3,1 f64"))
