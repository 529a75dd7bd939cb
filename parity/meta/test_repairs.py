"""A repair is found with no knowledge of the family, and the line that is printed mends the candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from parity import repairs
from parity.compare import Record
from parity.meta.second import second_pair
from parity.pair import Pair, forward, measured, run_truth
from parity.repairs import Repair
from parity.scenario import parse_scenario
from parity.tiny import initialise
from parity.weights import (
    adjacent_from_half,
    alternating_from_halved,
    block_from_head,
    half_from_adjacent,
    halved_from_alternating,
    head_from_block,
    other_half_first,
    repeated_from_tiled,
    swapped,
    tiled_from_repeated,
)

F64 = torch.float64
PAIRING = "rotates adjacent pairs where the reference rotates halves"
ROWS = torch.arange(24.0)


def found(pair: Pair, line: str) -> Repair | None:
    """What mends the candidate of a pair under a scenario."""
    scenario = parse_scenario(line)
    case, side = pair.case(scenario), pair.candidate(F64)
    truth = run_truth(pair, case, forward)
    weights = {name: tensor.double() for name, tensor in initialise.fill(pair.plan, scenario.seed).items()}

    def run(given: Mapping[str, Tensor]) -> Record:
        pair.load(side, given, scenario.seed)
        return measured(pair, side, case, forward)

    return repairs.find(weights, run, truth)


@pytest.mark.parametrize(
    ("model_type", "layer", "name", "line", "wanted"),
    [
        ("llama", "attention", "swaps k and v", "b1 s3 f64", "swap self_attn.k_proj and self_attn.v_proj"),
        ("bert", "attention", "swaps k and v", "b1 s3 f64", "swap attention.self.key and attention.self.value"),
        ("llama", "norm", "adds 1 to the gains", "b1 s3 f64", "w - 1"),
        (
            "llama",
            "attention",
            "reads o_proj untransposed where it is square",
            "square=yes b1 s3 f64",
            "transpose self_attn.o_proj",
        ),
        (
            "llama",
            "attention",
            "tiles key/value heads where the reference repeats each",
            "h6/3 b1 s3 f64",
            "tiled_from_repeated(w, 4, 3)",
        ),
        (
            "llama",
            "attention",
            "permutes the rows of k with the number of query heads",
            "h8/4 d8 b1 s3 f64",
            "permute with 4 heads instead of 8 the rows of self_attn.k_proj",
        ),
        (
            "llama",
            "attention",
            "scales the scores twice",
            "h1/1 d8 b1 s3 f64",
            "{name: w * 8 ** 0.5",
        ),
        ("gpt2", "attention", "does not scale the scores", "h1 d8 b1 s3 f64", "first_scaled(w.mT, 8 ** -0.5).mT"),
    ],
)
def test_a_repair_is_found(model_type: str, layer: str, name: str, line: str, wanted: str) -> None:
    repair = found(second_pair(model_type, layer, parse_scenario(line).config, [name]), line)
    assert repair is not None
    assert repair.whole
    assert wanted in str(repair)


def test_gains_of_heads_are_permuted_with_them_and_the_cache_is_spoken_of() -> None:
    repair = found(second_pair("qwen3", "attention", parse_scenario("h1/1 d8").config, [PAIRING]), "h1/1 d8 b1 s3 f64")
    assert repair is not None
    assert not repair.whole
    assert "adjacent_from_half(w, 8)" in repair.line
    assert "self_attn.q_norm" in repair.line
    assert "what is cached keeps an order of its own" in str(repair)


def test_what_no_repair_mends_has_none() -> None:
    assert found(second_pair("llama", "attention", (), ["leaves k unrotated"]), "h1/1 b1 s3 f64") is None


@pytest.mark.parametrize(
    ("there", "back", "sizes"),
    [
        (block_from_head, head_from_block, (4,)),
        (halved_from_alternating, alternating_from_halved, ()),
        (tiled_from_repeated, repeated_from_tiled, (4, 3)),
        (half_from_adjacent, adjacent_from_half, (8,)),
        (other_half_first, other_half_first, ()),
    ],
)
def test_conversions_invert_each_other(
    there: Callable[..., Tensor], back: Callable[..., Tensor], sizes: tuple[int, ...]
) -> None:
    assert torch.equal(back(there(ROWS, *sizes), *sizes), ROWS)
    assert not torch.equal(there(ROWS, *sizes), ROWS)


def test_conversions_do_what_they_say() -> None:
    assert block_from_head(ROWS[:6], 2).tolist() == [0, 3, 1, 4, 2, 5]
    assert halved_from_alternating(ROWS[:6]).tolist() == [0, 2, 4, 1, 3, 5]
    assert other_half_first(ROWS[:4]).tolist() == [2, 3, 0, 1]
    assert tiled_from_repeated(ROWS[:12], 2, 3).tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    weights = {"a.k.weight": ROWS[:1], "a.v.weight": ROWS[1:2]}
    assert swapped(weights, "k", "v") == {"a.k.weight": ROWS[1:2], "a.v.weight": ROWS[:1]}


def test_rows_that_are_no_whole_number_of_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="24 rows are no multiple of 5 x 3"):
        block_from_head(ROWS, 5)
