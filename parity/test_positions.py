"""Added positions are those of transformers: Marian's sinusoids, Bloom's slopes, and a learned table with an end."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity import family as families
from parity import oracle, reference
from parity.compare import TRUTH_BOUND
from parity.pair import Pair
from reimpl.position import LearnedPosition, alibi_bias, alibi_slopes, sinusoidal

pytestmark = pytest.mark.parity

agree = partial(torch.testing.assert_close, rtol=TRUTH_BOUND, atol=TRUTH_BOUND)


@given(length=st.integers(1, 600), size=st.integers(2, 65))
def test_halved_sinusoids_are_bit_identical(length: int, size: int) -> None:
    theirs: Any = reference.layer_class("marian", "MarianSinusoidalPositionalEmbedding")(length, size)
    assert torch.equal(sinusoidal(torch.arange(length), size, layout="halved"), theirs.create_weight())


@given(size=st.integers(1, 65))
def test_interleaved_sinusoids_are_the_halved_ones_in_another_order(size: int) -> None:
    positions = torch.tensor([[0, 1, 77], [5, 1000, 131_072]])
    interleaved = sinusoidal(positions, size)
    halves = torch.cat((interleaved[..., 0::2], interleaved[..., 1::2]), -1)
    assert torch.equal(halves, sinusoidal(positions, size, layout="halved"))


@given(heads=st.integers(1, 40), length=st.integers(2, 6))
def test_alibi_adds_to_each_row_what_bloom_adds_up_to_a_constant(heads: int, length: int) -> None:
    """Bloom's bias is slope times the key's position; a constant per query leaves its softmax as it is."""
    with oracle.lifted():
        valid = torch.ones(1, length, dtype=torch.long)
        theirs = reference.modeling("bloom").build_alibi_tensor(valid, heads, torch.float64).view(1, heads, 1, length)
    positions = torch.arange(length)[None]
    ours = alibi_bias(alibi_slopes(heads, torch.float64), positions, positions)
    agree(ours - ours[..., :1], (theirs - theirs[..., :1]).expand_as(ours))
    assert not ours.diagonal(dim1=-2, dim2=-1).any()


def test_a_position_past_the_learned_tables_end_names_the_limit() -> None:
    table = LearnedPosition(4, 3)
    assert torch.equal(table(torch.tensor([[3, 0]])), table.weight[[3, 0]][None])
    with pytest.raises(IndexError, match=r"positions 0 to 4 do not fit the learned table of 4: .* at most 4 tokens"):
        table(torch.tensor([[0, 4]]))


@pytest.mark.parametrize(("model_type", "name"), [("gpt2", "model"), ("bert", "model"), ("bert", "decoder_model")])
def test_a_model_reaches_its_last_position_and_names_it_where_the_next_is_refused(model_type: str, name: str) -> None:
    family = families.load(model_type)
    pair, limit = Pair(family, family.layer(name), {}), family.positions
    assert limit is not None
    ours, theirs = (side.module for side in (pair.candidate(torch.float64), pair.reference(torch.float64)))
    ids = torch.zeros(1, limit + 1, dtype=torch.long)
    ours(ids[:, 1:])
    theirs(ids[:, 1:])
    with pytest.raises((IndexError, RuntimeError)):
        theirs(ids)
    with pytest.raises(IndexError, match=f"positions 0 to {limit} do not fit the learned table of {limit}"):
        ours(ids)
    if pair.layer.causal:
        cache = ours.make_cache()
        ours(ids[:, 1:], cache=cache)
        with pytest.raises(IndexError, match=f"positions {limit} to {limit} do not fit .* with those cached"):
            ours(ids[:, :1], cache=cache)


def test_marian_names_the_limit_past_its_last_position() -> None:
    family = families.load("marian")
    pair, limit = Pair(family, family.layer("decoder"), {}), family.positions
    assert limit is not None
    ours, memory = pair.candidate(torch.float64).module, torch.zeros(1, 2, pair.config.d_model, dtype=torch.float64)
    ids, cache = torch.zeros(1, limit, dtype=torch.long), ours.make_cache()
    ours(ids, cache=cache, memory=memory)
    with pytest.raises(IndexError, match=f"positions {limit} to {limit} do not fit max_position_embeddings of {limit}"):
        ours(ids[:, :1], cache=cache, memory=memory)
