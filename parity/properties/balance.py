"""Router logits are the reference's, and the load-balancing loss of them is, with and without padding.

Both sides compute the loss of the same logits, so that no near-tie takes part.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from parity import reference as theirs
from parity import strategies
from parity.case import Case
from parity.compare import Judgement, Quantity, Record
from parity.compare import judge as hold_against
from parity.family import Family, Kind, Layer
from parity.oracle import lifted
from parity.pair import DISTURBANCES, Pair, Side, evaluate, moved, run_truth
from parity.property import Property
from parity.scenario import DTYPES, Scenario
from parity.strategies import Pool
from reimpl import moe

Loss = Callable[..., Tensor]

_ONE_CHUNK = st.integers(1, strategies.LONGEST).map(lambda length: (length,))


def scenarios(family: Family, layer: Layer, pool: Pool) -> SearchStrategy[Scenario]:
    """One pass over all tokens, some of which may be padding."""
    return strategies.scenarios(family, layer, pool, schedule=_ONE_CHUNK, stack=8)


def judge(pair: Pair, scenario: Scenario) -> list[Judgement]:
    """Judge the logits, and the loss and its gradient."""
    case = pair.case(scenario)
    judgements = evaluate(pair, scenario, (router_logits,), case)
    loss = theirs.balance_loss(pair.family.model_type)
    if loss is None:
        return judgements
    logits, chosen = run_truth(pair, case, router_logits).values, pair.reference_config.num_experts_per_tok
    if not logits:  # no layer of the configuration has experts
        return judgements
    for valid in (None,) if case.valid is None else (None, case.valid):
        for name in scenario.dtypes:
            judgements += _judge_loss(loss, [each.to(DTYPES[name]) for each in logits], chosen, valid, name, scenario)
    return judgements


def _judge_loss(
    loss: Loss, logits: list[Tensor], chosen: int, valid: Tensor | None, name: str, scenario: Scenario
) -> list[Judgement]:
    """Judge our loss of the same logits; where it fails, the yardstick gets its second look, which unties near-ties."""
    dtype = DTYPES[name]
    with lifted():
        truth = _loss(loss, [each.double() for each in logits], chosen, valid)
    ours = _loss(moe.load_balancing_loss, logits, chosen, valid)
    references = [] if dtype is torch.float64 else [_loss(loss, logits, chosen, valid)]
    judgements = hold_against(truth, ours, references, dtype, name)
    if dtype is torch.float64 or all(judgement.holds for judgement in judgements):
        return judgements
    for number in range(DISTURBANCES):
        near = [
            moved(each, dtype, scenario.seed, f"disturbance {number} of logits {i}") for i, each in enumerate(logits)
        ]
        references.append(_loss(loss, [each.to(dtype) for each in near], chosen, valid))
    return hold_against(truth, ours, references, dtype, name)


def router_logits(side: Side, case: Case) -> Record:
    """The logits of every layer's router, [tokens, experts]."""
    with torch.no_grad():
        logits = side.router_logits(case)
    names = [Quantity(f"router logits, {index} of {len(logits)}", "routing") for index in range(len(logits))]
    valid = None if case.valid is None else case.valid.flatten()[:, None]
    return Record(names, list(logits), [valid] * len(logits))


def _loss(loss: Loss, logits: list[Tensor], chosen: int, valid: Tensor | None) -> Record:
    """The loss, and its gradient with respect to the logits."""
    leaves = [each.detach().requires_grad_() for each in logits]
    value = loss(tuple(leaves), chosen, valid)
    what = "load-balancing loss" if valid is None else "load-balancing loss without padding"
    names = [Quantity(what, "output"), *(Quantity(f"gradient of {what}, {i}", "gradient") for i in range(len(leaves)))]
    return Record(names, [value.detach()[None], *torch.autograd.grad(value, leaves)], [None] * len(names))


PROPERTY = Property(
    "balance",
    "has the reference's router logits, and its load-balancing loss of them",
    lambda family, layer: layer.kind is Kind.MODEL and layer.routes,
    scenarios,
    judge,
)
