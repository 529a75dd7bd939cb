"""A diagnosis names the mistake that a second implementation makes, and none that it knows not; a report prints it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from parity import family as families
from parity import property as properties
from parity.diagnose import Diagnosis, diagnose
from parity.diagnosed import AND, RECORD, Made, bars, outcome, pairs, singles
from parity.meta.second import second_pair
from parity.mismatch import Mismatch
from parity.mistakes import find, of
from parity.pair import renew_pairs
from parity.run import grouped
from parity.runner import check
from parity.scenario import parse_scenario

PAIRING = "rotates adjacent pairs where the reference rotates halves"


def diagnosed(model_type: str, layer: str, names: Sequence[str], line: str, without: str = "") -> Diagnosis:
    """What is said of a second implementation that makes these mistakes, by a catalogue without one of them."""
    scenario = parse_scenario(line)
    build = partial(second_pair, model_type, layer, wrong=names)
    known = [mistake for mistake in of(model_type, layer) if mistake.name != without]
    prop = properties.find(find(names[0]).prop)
    dtype = scenario.dtypes[0]
    return diagnose(build(scenario.config), scenario, prop, dtype=dtype, known=known, pair_at=build, depth=1)


@pytest.mark.parametrize(
    ("model_type", "layer", "name", "line"),
    [
        ("llama", "attention", PAIRING, "b1 s3 f32"),
        ("llama", "attention", PAIRING, "b1 s3 bf16"),
        ("mistral", "attention", "tiles key/value heads where the reference repeats each", "h6/3 b1 s3 f32"),
        ("qwen3", "attention", "detaches k", "b1 s3 f64"),
        ("deepseek_v3", "norm", "adds 1 to the gains", "b1 s3 bf16"),
        ("deepseek_v3", "moe", "chooses the experts with the lowest scores", "b1 s3 f64"),
        ("deepseek_v3", "moe", "puts experts into groups in turn", "experts=8/4/2/3 b1 s3 f64"),
    ],
)
def test_a_mistake_is_named_first_and_alone(model_type: str, layer: str, name: str, line: str) -> None:
    diagnosis = diagnosed(model_type, layer, [name], line)
    assert [str(cause) for cause in diagnosis.causes] == [name]
    assert str(diagnosis) == f"{name}   (explains the whole difference)"


def test_a_mistake_that_the_catalogue_lacks_is_unknown() -> None:
    diagnosis = diagnosed("llama", "attention", [PAIRING], "b1 s3 f64", without=PAIRING)
    assert diagnosis.causes == ()
    assert str(diagnosis).startswith("unknown: none of the")


def test_what_comes_near_by_the_rounding_of_small_inputs_is_not_the_cause() -> None:
    """Small inputs, moved by one unit in the last place, move scores by more than two such scales differ."""
    scenario = parse_scenario("h4 head=10/6/3 b2 s4,1 left4,2 masked x0.001 bf16 #29108")
    build = partial(second_pair, "deepseek_v3", "attention", wrong=["scales by the channels of a value"])
    known = [find("scales by the fourth root of head_dim for the second")]
    diagnosis = diagnose(build(scenario.config), scenario, dtype="bf16", known=known, pair_at=build)
    assert diagnosis.causes == ()
    assert diagnosis.tried == 1


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (
            "attention",
            "rotates the wrong way   (explains the whole difference; our own layer is itself wrong here, so a",
        ),
        ("block", "unknown: our own layer is itself wrong here, so there is none to make known mistakes in"),
    ],
)
def test_where_our_own_layer_is_wrong_the_report_says_so(layer: str, said: str) -> None:
    """As while someone edits it: unlike a mistake that is planted, this one stays while causes are looked for."""
    family = families.load("llama")
    renew_pairs()
    with find("rotates the wrong way").exchange(), pytest.raises(Mismatch) as raised:
        check(properties.find("forward"), family, family.layer(layer), parse_scenario("b1 s3 f64"))
    with find("rotates the wrong way").exchange():
        assert str(raised.value.diagnosis).startswith(said)
    renew_pairs()


def test_two_mistakes_are_named_together() -> None:
    names = [PAIRING, "does not scale the scores"]
    scenario, build = parse_scenario("b1 s3 f64"), partial(second_pair, "llama", "attention", wrong=names)
    known = [find(name) for name in (*names, "leaves k unrotated", "swaps k and v", "scales the scores twice")]
    diagnosis = diagnose(build(), scenario, known=known, pair_at=build)
    assert [{mistake.name for mistake in cause.mistakes} for cause in diagnosis.causes] == [set(names)]


def test_mistakes_that_are_the_same_under_one_configuration_are_all_named() -> None:
    scenario = parse_scenario("d4 b1 s3 f64")
    pair = second_pair("llama", "norm", (), ["subtracts the mean"])
    diagnosis = diagnose(pair, scenario, known=[find("subtracts the mean")] * 2, depth=1)
    assert len(diagnosis.causes) == 2
    assert "or, which is the same here" in str(diagnosis)


def test_nothing_is_said_of_a_candidate_that_is_right() -> None:
    assert diagnose(second_pair("llama", "norm"), parse_scenario("b1 s3 f64")).causes == ()


def report_of(name: str, layer: str, line: str) -> dict[str, str]:
    """The lines of a report by their labels, of a mistake that our Llama makes."""
    family, mistake = families.load("llama"), find(name)
    with mistake.planted(), pytest.raises(Mismatch) as raised:
        check(properties.find(mistake.prop), family, family.layer(layer), parse_scenario(line))
    with mistake.planted():
        _, *lines = str(raised.value).splitlines()
    return {line[:12].strip(): line[12:] for line in lines}


@pytest.mark.parametrize(
    ("name", "layer", "line", "fix"),
    [
        ("swaps k and v", "block", "b1 s3 f64", "weights |= swapped(weights, 'self_attn.k_proj', 'self_attn.v_proj')"),
        ("detaches k", "attention", "b1 s3 f64", ""),
        ("adds the residual in place", "block", "b1 s3 f64", ""),
        ("takes the softmax in the model's dtype", "attention", "attend=eager b1 s4 bf16", ""),
    ],
)
def test_a_report_names_cause_and_fix(name: str, layer: str, line: str, fix: str) -> None:
    report = report_of(name, layer, line)
    assert report["cause"] == f"{name}   (explains the whole difference)"
    assert report.get("fix", "").endswith(fix)
    assert ("fix" in report) == bool(fix)


def test_a_mistake_in_several_layers_is_reported_once() -> None:
    family, mistake = families.load("llama"), find("leaves k unrotated")
    mismatches = []
    with mistake.planted():
        for layer in ("attention", "block"):
            with pytest.raises(Mismatch) as raised:
                check(properties.find("forward"), family, family.layer(layer), parse_scenario("b1 s3 f64"))
            mismatches.append(raised.value)
        assert [(first.layer.name, len(others)) for first, others in grouped(mismatches)] == [("attention", 1)]


def test_an_outcome_tells_the_right_name_from_others() -> None:
    made = Made("gpt2", "attention", ("ignores scale_attn_by_inverse_layer_idx",), "f64")
    found = outcome(0, made)
    assert found.named
    assert found.same == [["divides scores by the layer's index for its number"]]
    wrong = replace(found, causes=[["rotates v too"]], without=[["rotates v too"]], same=[])
    unseen = replace(found, scenario="")
    held = {
        bar["name"]: bar["holds"]
        for bar in bars([replace(each, made=replace(made, dtype="f32")) for each in (found, wrong, unseen)])
    }
    assert held["named first and alone in float32"] is False
    assert held["unknown without its entry in float32"] is False
    assert all(bar["holds"] for bar in bars([replace(found, made=replace(made, dtype="f32"), seconds=0.1)]))


def test_second_implementations_make_most_of_the_catalogue() -> None:
    made = {made.mistakes for made in singles(dtypes=("f32",))}
    assert len(made) >= 90
    assert all(len(made.mistakes) == 2 for made in pairs("llama"))


def test_the_record_is_of_these_mistakes_and_names_them() -> None:
    """`parity mistakes --diagnose --record` renews it; how long that took is said there, and is the machine's."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    listed: dict[str, dict[str, set[str]]] = {}
    for made in [*singles(), *pairs()]:
        what = made.dtype if len(made.mistakes) == 1 else "pairs"
        listed.setdefault(f"{made.model} {made.layer}", {}).setdefault(what, set()).add(AND.join(made.mistakes))
    recorded = {
        layer: {what: {*each["named"], *each["called"], *each["unseen"]} for what, each in of_layer.items()}
        for layer, of_layer in record["layers"].items()
    }
    assert recorded == listed
    assert [bar["name"] for bar in record["bars"] if not bar["holds"] and "seconds" not in bar["name"]] == []
