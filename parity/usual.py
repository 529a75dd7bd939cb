"""What the usual checks would say of a candidate: one prompt, default initialisation, one tolerance.

They are here to be compared with, not to decide anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity.case import Case
from parity.compare import Record
from parity.pair import Pair, Side, forward, run_candidate, run_references
from parity.scenario import Scenario
from parity.tiny import draw

CHECKS = ("assert_close", "cosine", "greedy tokens")
PROMPT, NEW_TOKENS, DEVIATION, ALIKE = 8, 5, 0.02, 0.99
F32 = torch.float32


def default_weights(pair: Pair, seed: int) -> dict[str, Tensor]:
    """Weights as `transformers` initialises them: matrices N(0, 0.02^2), gains 1, biases 0."""

    def initial(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) > 1:
            return draw.normal(shape, seed, f"default {name}") * DEVIATION
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)

    return {name: initial(name, shape) for name, shape in pair.plan.shapes.items()}


def prompt(scenario: Scenario) -> Scenario:
    """One row of one chunk, under the configuration of a scenario."""
    return Scenario(config=scenario.config, schedule=(PROMPT,), memory=scenario.memory, dtypes=("f32",))


def usual_checks(pair: Pair, scenario: Scenario) -> dict[str, bool]:
    """Whether each of the usual checks finds the candidate right.

    The outputs of one prompt by `torch.testing.assert_close` and by a cosine above 0.99; where the layer generates,
    also the tokens of a greedy generation. A candidate that raises passes none.
    """
    case = pair.case(prompt(scenario))
    try:
        if pair.reference(F32).slots:
            weights = default_weights(pair, case.scenario.seed)
            for side in (pair.reference(F32), pair.candidate(F32)):
                pair.load(side, weights, case.scenario.seed)
        theirs = _output(run_references(pair, case, forward, F32)[0])
        ours = _output(run_candidate(pair, case, forward, F32))
        said = {"assert_close": _is_close(ours, theirs), "cosine": _is_alike(ours, theirs)}
        if pair.layer.generates:
            said["greedy tokens"] = _tokens(pair.candidate(F32), case) == _tokens(pair.reference(F32), case)
    except Exception:  # whatever it is, nobody would overlook it
        said = dict.fromkeys(CHECKS, False)
    pair.forget()
    return said


def _output(record: Record) -> Tensor:
    return record.values[0]


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    try:
        torch.testing.assert_close(ours, theirs)
    except AssertionError:
        return False
    return True


def _is_alike(ours: Tensor, theirs: Tensor) -> bool:
    return bool(torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > ALIKE)


def _tokens(side: Side, case: Case) -> list[list[int]]:
    with torch.no_grad():
        return side.generate(case, NEW_TOKENS, use_cache=True, eos=None).tolist()
