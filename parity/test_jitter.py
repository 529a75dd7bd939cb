"""Jitter is for training only, moves a router's input as the reference does, and leaves the caller's tensor alone."""

import pytest
import torch
from torch import Tensor, nn

from parity.case import Case
from parity.compare import TRUTH_BOUND
from parity.oracle import lifted
from parity.pair import Pair, pair_of
from parity.scenario import Scenario

pytestmark = pytest.mark.parity

SEED = 5


def pair_and_case(jitter: float) -> tuple[Pair, Case]:
    config = (("jitter", jitter),) if jitter else ()
    pair = pair_of("mixtral", "moe", config)
    for side in (pair.reference(torch.float64), pair.candidate(torch.float64)):
        pair.ready(side, SEED)
    return pair, pair.case(Scenario(config=config, batch=2, schedule=(5,), seed=SEED))


@torch.no_grad()
def trained(module: nn.Module, x: Tensor) -> Tensor:
    """What a module computes in training, with always the same random numbers."""
    torch.manual_seed(SEED)
    try:
        return module.train()(x)
    finally:
        module.eval()


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def test_training_jitters_as_the_reference_does() -> None:
    """With the same random numbers, which both draw alike."""
    pair, case = pair_and_case(0.1)
    ours, theirs = pair.candidate(torch.float64).module, pair.reference(torch.float64).module
    got = trained(ours, case.x.clone())
    with lifted():
        wanted = trained(theirs, case.x.clone())
    assert relative(got, wanted) < TRUTH_BOUND
    assert relative(ours(case.x).detach(), wanted) > 1e-2


def test_evaluation_does_not() -> None:
    jittered, plain = pair_and_case(0.1), pair_and_case(0.0)
    outputs = [pair.candidate(torch.float64).module(case.x) for pair, case in (jittered, plain)]
    assert torch.equal(*outputs)


def test_the_caller_s_tensor_is_left_alone() -> None:
    pair, case = pair_and_case(0.1)
    x, module = case.x.clone(), pair.candidate(torch.float64).module
    trained(module, x)
    assert torch.equal(x, case.x)
