"""Adjacent rotary pairs on unpermuted weights are half pairs on permuted ones, in outputs and in cached keys.

Two conventions with equal shapes: the paper pairs channels (2i, 2i+1), transformers pairs (i, i + half). A permutation
of the rows of q and k, head by head, turns one into the other; the cached keys correspond under the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from parity import strategies
from parity.compare import Judgement, Record
from parity.compare import judge as hold_against
from parity.family import Family, Kind, Layer
from parity.pair import Pair, forward, measured, run_truth
from parity.property import Property
from parity.scenario import Scenario
from parity.strategies import Pool
from parity.tiny import initialise
from reimpl.rope import adjacent_from_half, half_from_adjacent, half_order

Weights = Mapping[str, Tensor]


def scenarios(family: Family, layer: Layer, pool: Pool) -> SearchStrategy[Scenario]:
    """Any chunks and padding."""
    return strategies.scenarios(family, layer, pool)


def judge(pair: Pair, scenario: Scenario) -> list[Judgement]:
    """Both directions: weights made for half pairs in an adjacent rotation, and the reverse."""
    drawn = initialise.fill(pair.plan, scenario.seed)
    return [
        *compare(pair, scenario, reference=drawn, candidate=permuted(pair, drawn, adjacent_from_half)),
        *compare(pair, scenario, reference=permuted(pair, drawn, half_from_adjacent), candidate=drawn),
    ]


def compare(pair: Pair, scenario: Scenario, reference: Weights, candidate: Weights) -> list[Judgement]:
    """Hold the candidate, rotating adjacent pairs, against the reference, each with its own weights."""
    case, side = pair.case(scenario), pair.candidate(torch.float64)
    pair.load(pair.reference(torch.float64), reference, scenario.seed)
    truth = run_truth(pair, case, forward)
    with adjacent(side.module):
        pair.load(side, candidate, scenario.seed)
        ours = measured(pair, side, case, forward)
    pair.forget()
    return hold_against(truth, _keys_in_half_order(pair, ours), [], torch.float64, "f64")


def permuted(pair: Pair, weights: Weights, permute: Callable[[Tensor, int], Tensor]) -> Weights:
    """The weights with the rows of every q and k projection permuted within their heads."""
    width = pair.reference_config.head_dim
    return {
        name: permute(tensor, width) if name.split(".")[-2] in pair.family.turned else tensor
        for name, tensor in weights.items()
    }


@contextmanager
def adjacent(module: torch.nn.Module) -> Iterator[None]:
    """Let every attention inside a module rotate adjacent pairs."""
    parts = [part for part in module.modules() if hasattr(part, "pairing")]
    for part in parts:
        vars(part)["pairing"] = "adjacent"
    try:
        yield
    finally:
        for part in parts:
            vars(part)["pairing"] = "half"


def _keys_in_half_order(pair: Pair, record: Record) -> Record:
    order = half_order(pair.reference_config.head_dim)
    values = [
        value[..., order] if quantity.name.endswith("keys") else value
        for quantity, value in zip(record.quantities, record.values, strict=True)
    ]
    return replace(record, values=values)


PROPERTY = Property(
    "pairing",
    "is the same in the other rotary pairing, with the rows of q and k permuted",
    lambda family, layer: layer.kind is Kind.ATTENTION and family.rotary is not None and bool(family.turned),
    scenarios,
    judge,
    dtypes=("f64",),
)
