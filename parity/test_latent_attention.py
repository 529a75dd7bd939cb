"""Latent attention: both forms are the same function, and its cache holds one latent and one rotated key of a token."""

import pytest
import torch
from torch import Tensor

from parity.compare import TRUTH_BOUND
from parity.tiny import draw
from reimpl.attention import IMPLEMENTATIONS
from reimpl.cache import LatentCache
from reimpl.latent_attention import FORMS, LatentAttention, cheaper
from reimpl.mask import CAUSAL

HEADS, RANK, NOPE, ROPE, VALUE = 3, 16, 7, 4, 5


def drawn(name: str, *shape: int) -> Tensor:
    return draw.normal(shape, 0, name).double()


def attention() -> LatentAttention:
    return LatentAttention(36, HEADS, 12, RANK, NOPE, ROPE, VALUE, scale=0.3).double().eval()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (4, 9), (9, 9), (130, 150)])
def test_absorbing_changes_nothing(implementation: str, queries: int, keys: int) -> None:
    """In a prefill, a chunk, a decoding step, and where causal queries are taken in blocks."""
    q, q_rope = drawn("q", 2, HEADS, queries, NOPE), drawn("q_rope", 2, HEADS, queries, ROPE)
    latents, k_rope = drawn("latents", 2, keys, RANK), drawn("k_rope", 2, keys, ROPE)
    up, attend = drawn("up", HEADS, NOPE + VALUE, RANK), IMPLEMENTATIONS[implementation]
    one, other = (form(q, q_rope, latents, k_rope, up, attend, CAUSAL, 0.3) for form in FORMS.values())
    assert float((one - other).norm() / one.norm()) < TRUTH_BOUND


@pytest.mark.parametrize(
    ("queries", "keys", "form"),
    [(1, 2, "absorbed"), (1, 4096, "absorbed"), (2048, 2048, "expanded"), (512, 4096, "expanded"), (1, 1, "expanded")],
)
def test_the_form_with_fewer_multiplications_is_taken(queries: int, keys: int, form: str) -> None:
    """At the size of DeepSeek-V3. For a single token the matrix costs both alike, and the rest is less if expanded."""
    assert cheaper(queries, keys, torch.empty(128, 256, 512, device="meta")) == form


def test_a_cache_holds_576_numbers_of_a_token_of_deepseek_v3() -> None:
    cache = LatentCache(capacity=10)
    cache.append(torch.zeros(1, 10, 512), torch.zeros(1, 10, 64))
    assert sum(held.numel() for held in cache.held) == 10 * 576


@torch.no_grad()
def test_decoding_makes_no_keys_and_values_of_the_cached_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, cache = attention(), LatentCache()
    tables = drawn("cos", 1, 6, ROPE), drawn("sin", 1, 6, ROPE)
    x = drawn("x", 1, 6, 36)
    layer(x[:, :5], (tables[0][:, :5], tables[1][:, :5]), CAUSAL, cache)
    monkeypatch.setitem(FORMS, "expanded", lambda *_: pytest.fail("the cache was expanded"))
    layer(x[:, 5:], (tables[0][:, 5:], tables[1][:, 5:]), None, cache)
    assert cache.latents.shape == (1, 6, RANK)
    assert cache.rope_keys.shape == (1, 6, ROPE)
