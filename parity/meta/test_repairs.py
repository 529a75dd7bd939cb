"""A repair is found with no knowledge of the family, and the line that is printed mends the candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from parity import family as families
from parity import repairs
from parity.check.session import Options
from parity.check.session import check as check_layer
from parity.compare import Record
from parity.diagnose import Diagnosis
from parity.meta.second import second_pair
from parity.mismatch import Mismatch
from parity.mistakes.seams import Exchange, loaded, planted
from parity.pair import Pair, forward, measured, run_truth
from parity.property import find
from parity.repairs import Repair
from parity.runner import check
from parity.scenario import parse_scenario
from parity.tiny import initialise
from parity.weights import (
    adjacent_from_half,
    alternating_from_halved,
    block_from_head,
    half_from_adjacent,
    halved_from_alternating,
    head_from_block,
    of,
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
        ("bert", "attention", "swaps k and v", "b1 s3 f64", "swap attention.self.key and attention.self.value"),
        ("llama", "norm", "adds 1 to the gains", "b1 s3 f64", "w - 1"),
        ("llama", "attention", "scales the scores twice", "h1/1 d8 b1 s3 f64", "{name: w * 8 ** 0.5"),
        ("gpt2", "attention", "does not scale the scores", "h1 d8 b1 s3 f64", "first_scaled(w.mT, 8 ** -0.5).mT"),
    ],
)
def test_a_repair_of_a_second_implementation_is_found(
    model_type: str, layer: str, name: str, line: str, wanted: str
) -> None:
    repair = found(second_pair(model_type, layer, parse_scenario(line).config, [name]), line)
    assert repair is not None
    assert repair.whole
    assert wanted in str(repair)


def rows(turned: Callable[[Tensor, Any], Tensor], *modules: str) -> Exchange:
    """Some modules are loaded with other rows, of weights and biases."""

    def change(weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
        return {name: turned(w, config) for name, w in of(weights, *modules).items()}

    return loaded(change)


def tile(weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Queries in the order in which tiled key/value heads are read, and what reads their contexts."""
    sizes = config.head_dim, config.num_key_value_heads
    q = {name: repeated_from_tiled(w, *sizes) for name, w in of(weights, "q_proj").items()}
    o = {name: repeated_from_tiled(w.mT, *sizes).mT for name, w in of(weights, "o_proj").items() if w.ndim > 1}
    return q | o


def turned_back(w: Tensor, config: Any) -> Tensor:
    """Rows permuted for the wrong number of heads."""
    return adjacent_from_half(half_from_adjacent(w, config.head_dim // 2), config.head_dim)


def per_head(w: Tensor, config: Any) -> Tensor:
    """GPT-2's columns, packed as BLOOM packs."""
    return head_from_block(w, config.n_head) if w.ndim == 1 else head_from_block(w.mT, config.n_head).mT


def untransposed(w: Tensor, config: Any) -> Tensor:
    return w.mT if w.ndim > 1 and w.shape[0] == w.shape[1] else w


CONVENTIONS = {
    "permute the rows of self_attn.q_proj and self_attn.k_proj": (
        "llama attention h1/1 d8",
        rows(lambda w, config: half_from_adjacent(w, config.head_dim), "q_proj", "k_proj"),
        "adjacent_from_half(w, 8)",
    ),
    "permute with 4 heads instead of 8 the rows of self_attn.k_proj": (
        "llama attention h8/4 d8",
        rows(turned_back, "k_proj"),
        "adjacent_from_half(half_from_adjacent(w, 4), 8)",
    ),
    "transpose self_attn.o_proj": ("llama attention square=yes", rows(untransposed, "o_proj"), "w.mT"),
    "transpose attn.c_proj": ("gpt2 attention", rows(untransposed, "c_proj"), "w.mT"),
    "reorder the packed rows of attn.c_attn": ("gpt2 attention h2", rows(per_head, "c_attn"), "block_from_head(w, 2)"),
    "reorder the packed rows of self_attention.query_key_value": (
        "bloom attention",
        rows(lambda w, config: block_from_head(w, config.n_head), "query_key_value"),
        "head_from_block(w, 2)",
    ),
    "swap self_attn.k_proj and self_attn.v_proj": (
        "llama attention",
        loaded(lambda weights, config: swapped(weights, "k_proj", "v_proj")),
        "swapped(weights, 'self_attn.k_proj', 'self_attn.v_proj')",
    ),
    "swap mlp.gate_proj and mlp.up_proj": (
        "llama mlp",
        loaded(lambda weights, config: swapped(weights, "gate_proj", "up_proj")),
        "swapped(weights, 'mlp.gate_proj', 'mlp.up_proj')",
    ),
    "reorder the heads of self_attn.q_proj and self_attn.o_proj": (
        "llama attention h6/3",
        loaded(tile),
        "tiled_from_repeated(w, 4, 3)",
    ),
    "multiply by 0.353553 the weights of self_attn.q_proj": (
        "llama attention h1/1 d8",
        rows(lambda w, config: w.double() * 8**0.5, "q_proj"),
        "w * 8 ** -0.5",
    ),
}


@pytest.mark.parametrize("what", CONVENTIONS)
def test_a_mismatch_prints_the_line_that_mends_the_weights(what: str) -> None:
    """Our layers are loaded by another convention; whatever is said of the cause, the fix is printed and mends it."""
    place, exchange, wanted = CONVENTIONS[what]
    model_type, layer, *config = place.split()
    family = families.load(model_type)
    with planted(exchange), patch.object(Mismatch, "diagnosis", Diagnosis()), pytest.raises(Mismatch) as raised:
        check(find("forward"), family, family.layer(layer), parse_scenario(" ".join([*config, "b1 s3 f64"])))
    with planted(exchange), patch.object(Mismatch, "diagnosis", Diagnosis()):
        fix = dict(raised.value.told[1])["fix"]
    assert fix.startswith(f"{what}, by parity.weights: weights |= ")
    assert wanted in fix


def said(mismatch: Mapping[str, Any]) -> str:
    return " ".join(text for _, text in mismatch["lines"])


PACKED = """
import torch


class Packed(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = torch.nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        packed = self.gate_up_proj(x)
        gate, up = READ
        return self.down_proj(gate * gate.sigmoid() * up)
"""


@pytest.mark.parametrize(
    ("read", "wanted"),
    [
        ("packed[..., 0::2], packed[..., 1::2]", "alternating_from_halved(w)"),
        ("reversed(packed.chunk(2, -1))", "other_half_first(w)"),
    ],
)
def test_a_check_prints_the_line_for_gate_and_up_that_are_packed_otherwise(
    read: str, wanted: str, tmp_path: Path
) -> None:
    file = tmp_path / "packed.py"
    file.write_text(PACKED.replace("READ", read), encoding="utf-8")
    given = Options(f"{file}:Packed", "phi3:Phi3MLP", properties=("forward",), configurations=1, dtypes=("f64",))
    [mismatch] = check_layer(given).mismatches
    assert f"weights |= {{name: {wanted} for name, w in of(weights, 'gate_up_proj').items()}}" in said(mismatch)


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
