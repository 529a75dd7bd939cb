"""Every mixer has its slot: in the frame it gives what the frame's equations give with the reference's mixer in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parity.compare import TRUTH_BOUND
from parity.oracle import lifted
from parity.pair import Pair, pair_of
from parity.scenario import parse_scenario
from reimpl.metaformer import MetaFormerBlock
from reimpl.norm import GroupNorm, LayerNorm

pytestmark = pytest.mark.parity

F64 = torch.float64
MIXERS = {
    "fnet": ("fourier", "b2 s5 #3"),
    "poolformer": ("pooling", "b2 s12 w4 #3"),
    "mlp_mixer": ("token_mlp", "b2 s3 #3"),
    "rankmixer": ("mixing", "b2 s3 #3"),
    "mamba": ("mixer", "b2 s5 #3"),
    "rwkv": ("attention", "b2 s5 #3"),
    "bert": ("attention", "b2 s5 #3"),
    "llama": ("attention", "b2 s5 #3"),
}
"""A layer that mixes tokens, of each family that has one of its own, and what it is called with."""


class Squared(nn.Module):
    """A channel mixer that is nothing but seen: x^2."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


def gain(size: int) -> Tensor:
    return torch.linspace(0.5, 1.5, size, dtype=F64)


def apart(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def expected(x: Tensor, norm: Callable[[Tensor], Tensor], mix: Callable[[Tensor], Tensor], norm_first: bool) -> Tensor:
    """The two equations, with the reference's mixer."""
    if norm_first:
        z = x + mix(norm(x))
        return z + norm(z).square()
    z = norm(x + mix(x))
    return norm(z + z.square())


def sides(pair: Pair, line: str) -> tuple[Tensor, Callable[[Tensor], Tensor], nn.Module, dict[str, object]]:
    """The input, the reference's mixer as a function, ours, and what ours is called with besides."""
    scenario = parse_scenario(line)
    case = pair.case(scenario)
    (step,) = case.steps
    theirs, ours = pair.reference(F64), pair.candidate(F64)
    for side in (theirs, ours):
        pair.ready(side, scenario.seed)
    tables = theirs.tables(case)
    _, given = ours.arguments(case, step, case.x, tables, None)
    return case.x, lambda x: theirs(case, step, x, tables, None)["output"], ours.module, given


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("model_type", MIXERS)
def test_the_frame_holds_with_each_mixer_in_its_slot(model_type: str, norm_first: bool) -> None:
    layer, line = MIXERS[model_type]
    x, mix, mixer, given = sides(pair_of(model_type, layer), line)
    image = x.ndim == 4
    size = x.shape[1] if image else x.shape[-1]
    norms: list[nn.Module] = [GroupNorm(size) if image else LayerNorm(size, 1e-5) for _ in range(2)]
    block = MetaFormerBlock(norms[0], mixer, norms[1], Squared(), norm_first).to(F64)
    zero = torch.zeros(size, dtype=F64)
    with torch.no_grad(), lifted():
        for norm in norms:
            norm.get_parameter("weight").copy_(gain(size))

        def normed(x: Tensor) -> Tensor:
            return F.group_norm(x, 1, gain(size)) if image else F.layer_norm(x, (size,), gain(size), zero)

        wanted = expected(x, normed, mix, norm_first)
        assert apart(block(x, **given), wanted) <= TRUTH_BOUND
        assert apart(block(x, **given), expected(x, normed, mix, not norm_first)) > TRUTH_BOUND
