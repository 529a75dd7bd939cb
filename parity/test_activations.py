"""Activations are the functions that transformers has under the same names."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity import oracle, reference
from parity.compare import TRUTH_BOUND
from reimpl.feedforward import ACTIVATIONS, activation

pytestmark = pytest.mark.parity

agree = partial(torch.testing.assert_close, rtol=TRUTH_BOUND, atol=TRUTH_BOUND)


@pytest.mark.parametrize("name", ACTIVATIONS)
@given(values=st.lists(st.floats(-20, 20), min_size=1, max_size=20))
def test_values_agree(name: str, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    with oracle.lifted():
        theirs = reference.modeling("llama").ACT2FN[name](x)
    agree(activation(name)(x), theirs)


def test_an_unknown_activation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown activation 'siluu': known are gelu, .*silu"):
        activation("siluu")
