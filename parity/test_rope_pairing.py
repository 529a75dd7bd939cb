"""A rotation of adjacent pairs is a rotation of halves under permuted rows of the query and key projections.

The reference's side is an attention layer of transformers: its cache shows the rotated keys, its output the rotated
queries.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from parity import oracle, reference
from parity.compare import TRUTH_BOUND
from parity.tiny import draw
from reimpl import attention, mask
from reimpl.rope import Pairing, RotaryEmbedding, adjacent_from_half, half_from_adjacent, half_order, rotate

pytestmark = pytest.mark.parity

agree = partial(torch.testing.assert_close, rtol=TRUTH_BOUND, atol=TRUTH_BOUND)
for_every_head_count = pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (8, 4), (6, 3)])


class Theirs:
    """An attention layer of the reference, its weights drawn, run once with a cache in lifted float64."""

    def __init__(self, model_type: str, heads: int, kv_heads: int, head_dim: int, seed: int) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        fields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
        sizes = {"hidden_size": heads * head_dim, "num_hidden_layers": 1, "pad_token_id": 0}
        self.config = reference.make_config({"model_type": model_type} | fields | sizes)
        self.config._attn_implementation = "eager"
        self.module = self._class("Attention")(self.config, layer_idx=0).double().eval()
        self.rotary = self._class("RotaryEmbedding")(self.config)
        self.weights = {
            name: draw.normal(parameter.shape, seed, name).double() / parameter.shape[-1] ** 0.5
            for name, parameter in self.module.named_parameters()
        }
        self.x = draw.normal((2, 5, heads * head_dim), seed, "x").double()
        self.positions = torch.tensor([[0, 1, 2, 3, 4], [0, 7, 8, 1000, 4096]])

    def _class(self, name: str) -> type[nn.Module]:
        return reference.layer_class(self.config.model_type, self.config.model_type.capitalize() + name)

    @torch.no_grad()
    def __call__(self, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Output and cached keys."""
        self.module.load_state_dict(weights)
        cache = reference.modeling(self.config.model_type).DynamicCache(config=self.config)
        accepted = inspect.signature(self.module.forward).parameters
        named = {name: cache for name in reference.CACHE_NAMES if name in accepted}
        floor = torch.finfo(torch.float64).min
        with oracle.lifted():
            output, *_ = self.module(
                self.x,
                position_embeddings=self.rotary(self.x, self.positions),
                attention_mask=torch.zeros(5, 5, dtype=torch.float64).masked_fill(~mask.causal(5, 5), floor)[
                    None, None
                ],
                **named,
            )
        ((_, keys), _) = reference.cache_contents(cache)
        return output, keys

    def ours(self, weights: Mapping[str, Tensor], pairing: Pairing) -> tuple[Tensor, Tensor]:
        """The same from our building blocks."""
        rotary = RotaryEmbedding(self.config.rope_parameters, self.head_dim, self.config.max_position_embeddings)
        cos, sin = rotary(self.x, self.positions)
        q, k, v = (self._project(weights, name) for name in ("q_proj", "k_proj", "v_proj"))
        q, k = rotate(q, cos, sin, pairing), rotate(k, cos, sin, pairing)
        context = attention.eager(q, k, v, mask.CAUSAL, self.head_dim**-0.5).transpose(1, 2).flatten(2)
        last = "dense" if "dense.weight" in weights else "o_proj"
        return nn.functional.linear(context, weights[f"{last}.weight"], weights.get(f"{last}.bias")), k

    def _project(self, weights: Mapping[str, Tensor], name: str) -> Tensor:
        y = nn.functional.linear(self.x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
        return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


@pytest.mark.parametrize(
    ("model_type", "pairing"), [("llama", "half"), ("phi", "half"), ("cohere", "adjacent"), ("glm", "adjacent")]
)
@for_every_head_count
def test_rotation_is_the_references_at_full_and_partial_width(
    model_type: str, pairing: Pairing, heads: int, kv_heads: int
) -> None:
    """Phi and GLM turn half of the channels."""
    theirs = Theirs(model_type, heads, kv_heads, 8, seed=1)
    agree(theirs.ours(theirs.weights, pairing), theirs(theirs.weights))


def permuted(
    weights: Mapping[str, Tensor], permute: Callable[[Tensor, int], Tensor], head_dim: int, k_head_dim: int
) -> dict[str, Tensor]:
    """The rows of q and k, of weights and biases, permuted."""
    widths = {"q_proj": head_dim, "k_proj": k_head_dim}
    return {
        name: permute(rows, widths[projection]) if (projection := name.split(".")[0]) in widths else rows
        for name, rows in weights.items()
    }


@for_every_head_count
@given(head_dim=st.sampled_from((4, 6, 8)), seed=st.integers(0, 99))
def test_adjacent_pairs_on_unpermuted_rows_are_half_pairs_on_permuted_ones(
    heads: int, kv_heads: int, head_dim: int, seed: int
) -> None:
    theirs = Theirs("llama", heads, kv_heads, head_dim, seed)
    output, keys = theirs.ours(theirs.weights, "adjacent")
    their_output, their_keys = theirs(permuted(theirs.weights, half_from_adjacent, head_dim, head_dim))
    agree(output, their_output)
    agree(keys[..., half_order(head_dim)], their_keys)


@for_every_head_count
@given(head_dim=st.sampled_from((4, 6, 8)), seed=st.integers(0, 99))
def test_half_pairs_on_unpermuted_rows_are_adjacent_pairs_on_permuted_ones(
    heads: int, kv_heads: int, head_dim: int, seed: int
) -> None:
    theirs = Theirs("cohere", heads, kv_heads, head_dim, seed)
    output, keys = theirs.ours(theirs.weights, "half")
    their_output, their_keys = theirs(permuted(theirs.weights, adjacent_from_half, head_dim, head_dim))
    agree(output, their_output)
    agree(keys, their_keys[..., half_order(head_dim)])


@for_every_head_count
def test_a_permutation_with_the_wrong_head_count_fails(heads: int, kv_heads: int) -> None:
    """heads / kv_heads in place of kv_heads, as in llama.cpp#3364."""
    theirs = Theirs("llama", heads, kv_heads, 8, seed=1)
    wrong = permuted(theirs.weights, half_from_adjacent, 8, kv_heads * 8 // (heads // kv_heads))
    with pytest.raises(AssertionError):
        agree(theirs.ours(theirs.weights, "adjacent")[0], theirs(wrong)[0])


@given(head_dim=st.integers(1, 9), heads=st.integers(1, 3), rotary=st.integers(0, 4).map(lambda pairs: 2 * pairs))
def test_the_two_permutations_undo_each_other(head_dim: int, heads: int, rotary: int) -> None:
    rows = torch.arange(heads * head_dim * 2).view(-1, 2)
    assert torch.equal(adjacent_from_half(half_from_adjacent(rows, head_dim, rotary), head_dim, rotary), rows)


def test_rows_that_are_no_whole_number_of_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="12 rows are no whole number of heads of 8 channels"):
        half_from_adjacent(torch.zeros(12), 8)
