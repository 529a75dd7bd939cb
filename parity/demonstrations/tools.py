"""What demonstrations of gaps have in common: the reference in float64, and how far it is from itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from parity import family as families
from parity.pair import Pair, forward, run_truth
from parity.reference import Reference
from parity.scenario import Scenario
from parity.tiny import initialise

F64 = torch.float64
SEED = 7


def apart(ours: Tensor, theirs: Tensor) -> float:
    """The root mean square of the difference, relative; infinite where one side is not a number."""
    error = torch.linalg.vector_norm(ours.double() - theirs.double()) / torch.linalg.vector_norm(theirs.double())
    return error.nan_to_num(nan=torch.inf).item()


def pair_at(model_type: str, layer: str, scenario: Scenario) -> Pair:
    """A pair of its own, as modules are changed here."""
    family = families.load(model_type)
    return Pair(family, family.layer(layer), scenario.values)


def outputs(pair: Pair, scenario: Scenario) -> Tensor:
    """What the reference computes in float64 throughout, all chunks joined."""
    record = run_truth(pair, pair.case(scenario), forward)
    pairs = zip(record.quantities, record.values, strict=True)
    return torch.cat([value for quantity, value in pairs if quantity.verdict == "output"], dim=1)


def filled(pair: Pair, side: Reference | None = None) -> Reference:
    """The reference in float64, with weights on which differences show."""
    side = side or pair.reference(F64)
    pair.load(side, initialise.fill(pair.plan, SEED), SEED)
    return side


def from_one_pass(model_type: str, scenario: Scenario) -> float:
    """How far a model's chunks are from its own pass over all tokens."""
    pair = pair_at(model_type, "model", scenario)
    return apart(outputs(pair, scenario), outputs(pair, replace(scenario, schedule=(scenario.length,))))


def eager_from_sdpa(side: Reference, call: Callable[[], Tensor]) -> float:
    """How far the reference's two ways to attend are from each other."""
    results = []
    for way in ("eager", "sdpa"):
        side.use({"_attn_implementation": way})
        with torch.no_grad():
            results.append(call())
    return apart(*results)
