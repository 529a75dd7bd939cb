"""Nothing in the weights is silent: one entry of any parameter, moved in our layer alone, changes some verdict.

With the weights of a default initialisation that is not so, which is why ours are drawn as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from parity import family as families
from parity.compare import Judgement
from parity.family import Layer
from parity.mistakes import Mistake, find
from parity.pair import Pair, evaluate, forward, gradients
from parity.scenario import parse_scenario
from parity.tiny import initialise
from parity.tiny.initialise import Distribution

F64 = torch.float64
LLAMA = families.load("llama")
SCENARIO = parse_scenario("h6/3 bias=yes mlp_bias=yes layers=2 b2 s5,1 f64 #5")
SLIGHTLY = 1 + 2**-7  # the smallest step of a bfloat16
HIDDEN_BY_DEFAULT = [find("forgets the gains"), find("does not load biases")]
layers = pytest.mark.parametrize("layer", [layer for layer in LLAMA.layers if layer.name != "rotary"], ids=str)


def pair_of(layer: Layer) -> Pair:
    return Pair(LLAMA, layer, SCENARIO.values)


def failed(pair: Pair) -> list[Judgement]:
    return [judgement for judgement in evaluate(pair, SCENARIO, (forward, gradients)) if not judgement.holds]


def moved(tensor: Tensor, row: int) -> Tensor:
    """The tensor with one entry moved: in a given row, in the middle of it."""
    tensor = tensor.clone()
    tensor[(row, *[size // 2 for size in tensor.shape[1:]])] *= SLIGHTLY
    return tensor


@layers
def test_one_entry_of_any_parameter_changes_some_verdict(layer: Layer) -> None:
    pair = pair_of(layer)
    weights = initialise.fill(pair.plan, SCENARIO.seed)
    read = int(pair.case(SCENARIO).ids[0, 0])  # of embeddings, only rows of tokens that occur are
    silent = []
    for name, tensor in weights.items():
        row = read if "embed_tokens" in name else len(tensor) // 2
        pair.load(pair.candidate(F64), {**weights, name: moved(tensor, row)}, SCENARIO.seed)
        if not failed(pair):
            silent.append(name)
    assert weights
    assert not silent


@layers
def test_the_weights_as_they_are_change_none(layer: Layer) -> None:
    assert not failed(pair_of(layer))


@contextmanager
def default_initialisation() -> Iterator[None]:
    """Gains of 1 and biases of 0, as models are born with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initialise, "GAIN", Distribution(1.0, 0.0))
        patch.setattr(initialise, "BIAS", Distribution(0.0, 0.0))
        yield


@pytest.mark.parametrize("mistake", HIDDEN_BY_DEFAULT, ids=str)
def test_a_default_initialisation_would_hide_mistakes(mistake: Mistake) -> None:
    layer = LLAMA.layer("block")
    with mistake.planted():
        assert failed(pair_of(layer))
        with default_initialisation():
            assert not failed(pair_of(layer))
