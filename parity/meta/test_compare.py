"""The comparison cannot be ignored, and judges by the rule that the design states."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parity import family as families
from parity import property as properties
from parity.compare import VERDICTS, Judgement, Quantity, Record, Unequal, judge, worst
from parity.mismatch import Mismatch
from parity.runner import Tally, check
from parity.scenario import DTYPES, Scenario
from parity.tiny import draw

F64 = torch.float64
LLAMA = families.load("llama")
SCENARIO = Scenario(dtypes=("f64",))


def numbers(seed: int, stream: str = "x", size: tuple[int, ...] = (2, 3, 5)) -> Tensor:
    return torch.as_tensor(draw.normal(size, seed, stream)).double()


def record(*values: Tensor, verdict: str = "output", valid: Tensor | None = None) -> Record:
    names = [f"quantity {index}" for index in range(len(values))]
    return Record([Quantity(name, verdict) for name in names], list(values), [valid] * len(values))


def judged(truth: Record, candidate: Record, references: Sequence[Record] = (), dtype: torch.dtype = F64) -> Judgement:
    judgement = worst(judge(truth, candidate, references, dtype, "f64"))
    assert judgement is not None
    return judgement


def rms(x: Tensor) -> float:
    return math.sqrt(sum(v * v for v in x.flatten().tolist()) / x.numel())


@given(
    seed=st.integers(0, 2**16), name=st.sampled_from(list(DTYPES)), exponent=st.floats(-4, 2), runs=st.integers(1, 3)
)
def test_the_rule_is_that_of_a_plain_reading(seed: int, name: str, exponent: float, runs: int) -> None:
    dtype, truth = DTYPES[name], numbers(seed)
    unit = 1e-12 if dtype is F64 else torch.finfo(dtype).eps
    references = [(truth + unit * numbers(seed, f"reference {i}")).to(dtype) for i in range(runs)]
    candidate = (truth + unit * 10**exponent * numbers(seed, "candidate")).to(dtype)

    errors = [each.double() - truth for each in (candidate, *references)]
    ours, theirs = [rms(e) / rms(truth) for e in errors], [e.abs().max().item() / rms(truth) for e in errors]
    if dtype is F64:
        expected = max(ours[0] / 1e-12, theirs[0] / 1e-12)
    else:
        expected = max(ours[0] / (4 * max(*ours[1:], unit / 4)), theirs[0] / (8 * max(*theirs[1:], unit / 4)))

    yardstick = [] if dtype is F64 else [record(each) for each in references]
    found = judged(record(truth), record(candidate), yardstick, dtype)
    assert found.ratio == pytest.approx(expected, rel=1e-9)
    assert found.holds == (expected <= 1)


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_judgement_that_does_not_hold_raises(verdict: str) -> None:
    failing = Judgement(Quantity("quantity", verdict), "f64", 2.0, 2.0, 1.0, 1.0)
    passing = Judgement(Quantity("another", verdict), "f64", 0.0, 0.0, 1.0, 1.0)
    prop = replace(properties.find("forward"), judge=lambda pair, scenario: [passing, failing])
    with pytest.raises(Mismatch) as caught:
        check(prop, LLAMA, LLAMA.layer("norm"), SCENARIO)
    assert caught.value.verdicts == [verdict]


def test_sides_that_cannot_be_compared_raise() -> None:
    def refuse(pair: object, scenario: Scenario) -> list[Judgement]:
        raise Unequal("the candidate lacks its output")

    prop = replace(properties.find("forward"), judge=refuse)
    with pytest.raises(Mismatch, match="forward"):
        check(prop, LLAMA, LLAMA.layer("norm"), SCENARIO)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_in_the_candidate_alone_fails(name: str, wrong: float) -> None:
    dtype, truth = DTYPES[name], numbers(0)
    candidate = truth.to(dtype).clone()
    candidate[1, 2, 3] = wrong
    yardstick = [] if dtype is F64 else [record(truth.to(dtype))]
    assert not judged(record(truth), record(candidate), yardstick, dtype).holds


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_where_the_reference_is_not_finite_nothing_is_said(wrong: float, scale: float) -> None:
    truth = numbers(0) * scale
    overflowing = truth.half()
    overflowing[0, 0, 0] = wrong
    judgements = judge(record(truth), record(truth.half()), [record(overflowing)], torch.float16, "f16")
    assert [judgement.judged for judgement in judgements] == [False]
    tally = Tally()
    tally.add(SCENARIO, judgements)
    assert (tally.unjudged, tally.worst) == (1, {})


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(Unequal, match="lacks quantity 1"):
        judged(record(numbers(0), numbers(1)), record(numbers(0)))


def test_a_tensor_too_many_is_named() -> None:
    with pytest.raises(Unequal, match="has quantity 1 too many"):
        judged(record(numbers(0)), record(numbers(0), numbers(1)))


def test_another_shape_is_named() -> None:
    with pytest.raises(Unequal, match=r"quantity 0 has shape \(2, 3\), but should have \(2, 3, 5\)"):
        judged(record(numbers(0)), record(numbers(0)[..., 0]))


def test_another_dtype_is_named_even_if_the_numbers_agree() -> None:
    values = draw.bfloat16(numbers(0)).double()
    with pytest.raises(Unequal, match=r"is torch.float32, but should be torch.bfloat16"):
        judged(record(values), record(values.float()), [record(values.bfloat16())], torch.bfloat16)


def test_the_order_of_quantities_does_not_matter() -> None:
    truth = record(numbers(0), numbers(1))
    turned = Record(truth.quantities[::-1], truth.values[::-1], truth.valid[::-1])
    assert judged(truth, turned).error == 0


def test_padding_is_not_compared() -> None:
    truth, valid = numbers(0), torch.tensor([[[True], [False], [True]]] * 2)
    candidate = truth.where(valid, math.nan)
    assert judged(record(truth, valid=valid), record(candidate, valid=valid)).error == 0


def test_beside_padding_everything_is_compared() -> None:
    truth, valid = numbers(0), torch.tensor([[[True], [False], [True]]] * 2)
    candidate = truth.clone()
    candidate[1, 2, 4] += 1e-9
    assert not judged(record(truth, valid=valid), record(candidate, valid=valid)).holds


def test_padding_does_not_dilute_an_error() -> None:
    truth, valid = numbers(0, size=(1, 100, 5)), torch.zeros(1, 100, 1, dtype=torch.bool)
    valid[:, :1] = True
    found = judged(record(truth, valid=valid), record(truth * (1 + 1e-9), valid=valid))
    assert found.rms == pytest.approx(1e-9, rel=1e-3)


def test_a_gradient_that_is_zero_by_structure_is_judged_by_its_module() -> None:
    """As that of a key's bias, through which a constant is added to all scores."""
    module, zero = numbers(0), 1e-18 * numbers(1)
    truth, candidate = (module, zero), (module, -3 * zero)
    assert judged(record(*truth, verdict="gradient"), record(*candidate, verdict="gradient")).holds
    assert not judged(record(*truth), record(*candidate)).holds


def test_a_gradient_is_not_drowned_by_its_module() -> None:
    module, other = numbers(0), 1e-3 * numbers(1)
    truth, candidate = (module, other), (module, torch.zeros_like(other))
    assert not judged(record(*truth, verdict="gradient"), record(*candidate, verdict="gradient")).holds


def test_an_error_where_the_truth_is_zero_is_infinite() -> None:
    zero = torch.zeros(2, 3, dtype=F64)
    assert judged(record(zero), record(zero + 1e-30)).ratio == math.inf
    assert judged(record(zero), record(zero.clone())).ratio == 0
