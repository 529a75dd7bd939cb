"""The truth is true: lifted, the reference agrees with itself to the last digits; not lifted, it does not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import family as families
from parity.case import Case
from parity.compare import TRUTH_BOUND, judge, worst
from parity.family import Kind, Layer
from parity.oracle import Lift, lifted
from parity.pair import Pair, forward, gradients, pair_of, run_truth, tabulate
from parity.reference import frequency_functions
from parity.scenario import Scenario, parse_scenario

F32, F64 = torch.float32, torch.float64
LLAMA = families.load("llama")
SCENARIO = parse_scenario("h6/3 b2 s6,1,1 left0,3 x1 #3")
ISLANDS = [layer for layer in LLAMA.layers if layer.name != "mlp"]  # an mlp asks for no float32
attending = pytest.mark.parametrize("layer", [layer for layer in LLAMA.layers if layer.kind.attends], ids=str)


@contextmanager
def never_lifted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parity.pair.lifted", nullcontext)
        yield


def truth(layer: Layer, measure: Callable[..., Any] = forward, implementation: int = 0) -> Any:
    """What the reference says in float64, by one of its implementations."""
    pair = Pair(LLAMA, layer, SCENARIO.values)
    case, side = pair.case(SCENARIO), pair.reference(F64)
    tabulate(pair, case, F64)
    pair.ready(side, SCENARIO.seed)
    side.use(LLAMA.implementations[implementation])
    with lifted():
        return measure(side, case)


def apart(one: Any, other: Any) -> float:
    """The largest error of one record against the other, relative."""
    furthest = worst(judge(one, other, [], F64, "f64"))
    assert furthest is not None
    return max(furthest.rms, furthest.max)


@attending
@pytest.mark.parametrize("measure", [forward, gradients])
def test_lifted_implementations_of_the_reference_agree(layer: Layer, measure: Callable[..., Any]) -> None:
    assert apart(truth(layer, measure, 0), truth(layer, measure, 1)) < TRUTH_BOUND / 10


def case_of(pair: Pair) -> Case:
    """A padded text; one without padding for a layer that knows none."""
    return pair.case(replace(SCENARIO, padding=()) if pair.layer.kind is Kind.POINTWISE else SCENARIO)


@pytest.mark.parametrize("layer", ISLANDS, ids=str)
def test_without_the_lift_the_reference_is_off_by_float32(layer: Layer) -> None:
    """Far above what decides, so the lift is needed; far below a mistake, so it changes nothing else."""
    pair = Pair(LLAMA, layer, SCENARIO.values)
    right = run_truth(pair, case_of(pair), forward)
    with never_lifted():
        plain = run_truth(pair, case_of(pair), forward)
    assert 1e-9 < apart(right, plain) < 1e-5


def test_the_mlp_needs_no_lift() -> None:
    pair = Pair(LLAMA, LLAMA.layer("mlp"), SCENARIO.values)
    right = run_truth(pair, case_of(pair), forward)
    with never_lifted():
        assert apart(right, run_truth(pair, case_of(pair), forward)) == 0


@pytest.mark.parametrize("rope", LLAMA.axis("rope").choices)
def test_frequencies_stay_the_buffer_that_was_specified(rope: str) -> None:
    """Also those that a forward computes again: dynamic ones that have grown, long ones of LongRoPE."""
    pair = Pair(LLAMA, LLAMA.layer("rotary"), {"rope": rope})
    case = pair.case(Scenario(schedule=(4,), offset=200))
    module = pair.reference(F64).module
    with torch.no_grad():
        module(case.x, case.positions)
        expected = module.inv_freq.clone()
        pair.ready(pair.reference(F64), 0)
        with lifted():
            module(case.x, case.positions)
    assert module.inv_freq.dtype is F32
    assert torch.equal(module.inv_freq, expected)


def test_functions_of_frequencies_run_without_the_lift() -> None:
    seen = []

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(torch.ones(1).double().float().dtype)
            return function(*args, **kwargs)

        return call

    pair = pair_of("llama", "rotary", (("rope", "dynamic"),))
    case = pair.case(Scenario(schedule=(4,), offset=200))
    with frequency_functions(wrap), lifted(), torch.no_grad():
        pair.reference(F64).module(case.x, case.positions)
    assert set(seen) == {F32}


def ask_to(x: Tensor) -> Tensor:
    return x.to(F32)


def ask_to_named(x: Tensor) -> Tensor:
    return x.to(dtype=F32)


def ask_softmax(x: Tensor) -> Tensor:
    return torch.nn.functional.softmax(x, dim=-1, dtype=F32)


def ask_sum(x: Tensor) -> Tensor:
    return x.sum(-1, dtype=F32)


@pytest.mark.parametrize("ask", [Tensor.float, ask_to, ask_to_named, ask_softmax, ask_sum])
def test_every_way_to_ask_for_float32_is_lifted(ask: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(2, 3, dtype=F64) / 3
    assert ask(x).dtype is F32
    with Lift():
        assert ask(x).dtype is F64
        assert torch.equal(x.to(torch.bfloat16).float(), x.to(torch.bfloat16).double())


def test_the_lift_ends_with_its_context() -> None:
    with lifted():
        pass
    assert torch.ones(1, dtype=F64).float().dtype is F32


def test_models_run_lifted_beside_rotary_modules_of_every_kind() -> None:
    model = LLAMA.layer("model")
    assert model.kind is Kind.MODEL
    for rope in LLAMA.axis("rope").choices:
        pair = Pair(LLAMA, model, {"rope": rope})
        record = run_truth(pair, pair.case(SCENARIO), forward)
        assert all(value.dtype is F64 for value in record.values)
