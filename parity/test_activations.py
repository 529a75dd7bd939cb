"""Activations are the functions that transformers has under the same names."""

from functools import partial

import pytest
import torch

from parity import oracle, reference
from parity.compare import TRUTH_BOUND
from reimpl.feedforward import ACTIVATIONS, activation

pytestmark = pytest.mark.parity

agree = partial(torch.testing.assert_close, rtol=TRUTH_BOUND, atol=TRUTH_BOUND)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_agree_from_tail_to_tail(name: str) -> None:
    x = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    with oracle.lifted():
        theirs = reference.modeling("llama").ACT2FN[name](x)
    agree(activation(name)(x), theirs)


def test_an_unknown_activation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown activation 'siluu': known are gelu, .*silu"):
        activation("siluu")
