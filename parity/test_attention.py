"""The implementations of the scaled dot product are exchangeable, also where a row has no key."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parity.compare import RMS_FACTOR, TRUTH_BOUND
from parity.tiny import draw
from reimpl.attention import IMPLEMENTATIONS
from reimpl.mask import CAUSAL, Mask, causal

pytestmark = pytest.mark.parity

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def formula(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """softmax(q k^T scale + bias) v with every head's keys repeated, and 0 where nothing is allowed."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~allowed, -torch.inf).masked_fill(~allowed.any(-1, keepdim=True), 0)
    weights = scores.softmax(-1, torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return weights.masked_fill(~allowed, 0) @ v.repeat_interleave(group, 1)


class Inputs:
    """Queries, keys, values, a mask and perhaps a bias, all numbers representable in bfloat16."""

    def __init__(
        self,
        heads: tuple[int, int],
        dims: tuple[int, int],
        lengths: tuple[int, int],
        mask: str,
        biased: bool = False,
        batch: int = 2,
        seed: int = 0,
    ) -> None:
        def drawn(name: str, *shape: int) -> Tensor:
            return draw.bfloat16(draw.normal(shape, seed, name)).double()

        (q_heads, kv_heads), (dim, value_dim), (q_len, k_len) = heads, dims, lengths
        self.q = drawn("q", batch, q_heads, q_len, dim)
        self.k = drawn("k", batch, kv_heads, k_len, dim)
        self.v = drawn("v", batch, kv_heads, k_len, value_dim)
        self.bias = drawn("bias", 1, q_heads, q_len, k_len) if biased else None
        self.scale = dim**-0.5
        chosen = drawn("mask", batch, 1, q_len, k_len) > 0
        allowed = {
            "none": torch.ones_like(chosen),
            "causal": causal(q_len, k_len).expand_as(chosen),
            "some": chosen,
            "empty row": chosen.index_fill(2, torch.tensor(0), False),
        }
        shortcuts: dict[str, Mask] = {"none": None, "causal": CAUSAL}
        self.allowed = allowed[mask]
        self.mask = shortcuts.get(mask, self.allowed)

    def run(self, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        bias = None if self.bias is None else self.bias.to(dtype)
        return IMPLEMENTATIONS[name](*self.tensors(dtype), self.mask, self.scale, bias)

    def expected(self, dtype: torch.dtype = torch.float64) -> Tensor:
        bias = None if self.bias is None else self.bias.to(dtype)
        return formula(*self.tensors(dtype), self.allowed, self.scale, bias)

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        return self.q.to(dtype), self.k.to(dtype), self.v.to(dtype)

    def gradients(self, output: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, (self.q, self.k, self.v), draw.normal(output.shape, 0, "gradient").double())

    def record(self) -> None:
        for tensor in (self.q, self.k, self.v):
            tensor.requires_grad_()


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@st.composite
def inputs(draw_from: st.DrawFn, mask: st.SearchStrategy[str]) -> Inputs:
    heads = draw_from(st.sampled_from([(1, 1), (4, 4), (4, 1), (6, 3), (8, 4)]), label="heads, kv heads")
    dims = draw_from(st.sampled_from([(4, 4), (8, 8), (8, 5)]), label="channels of keys, of values")
    q_len = draw_from(st.integers(1, 9), label="queries")
    k_len = q_len + draw_from(st.sampled_from([0, 1, 5, 150]), label="keys before the first query")
    return Inputs(
        heads, dims, (q_len, k_len), draw_from(mask), draw_from(st.booleans()), seed=draw_from(st.integers(0, 9))
    )


@every_implementation
@given(case=inputs(st.sampled_from(["none", "causal", "some", "empty row"])))
def test_each_computes_the_formula_and_its_gradients(name: str, case: Inputs) -> None:
    case.record()
    output, truth = case.run(name), case.expected()
    assert (output - truth).norm() <= TRUTH_BOUND * truth.norm()
    expected = case.gradients(truth)
    largest = max(gradient.norm() for gradient in expected)  # a single key has no gradient but for rounding
    for found, wanted in zip(case.gradients(output), expected, strict=True):
        assert (found - wanted).norm() <= TRUTH_BOUND * largest
    with torch.no_grad():
        assert (case.run(name) - truth).norm() <= TRUTH_BOUND * truth.norm()


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recording", [True, False])
@given(case=inputs(st.just("empty row")))
def test_a_row_without_keys_gives_zero_and_no_gradient(
    name: str, dtype: torch.dtype, recording: bool, case: Inputs
) -> None:
    case.record()
    with torch.set_grad_enabled(recording):
        output = case.run(name, dtype)
    assert output[:, :, 0].eq(0).all()
    assert output.isfinite().all()
    if recording:
        gradients = case.gradients(output.double())
        assert gradients[0][:, :, 0].eq(0).all()
        assert all(gradient.isfinite().all() for gradient in gradients)


WAYS: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int], str]] = {
    "one query, few keys": ((6, 3), (8, 8), (1, 40), "causal"),
    "one query, a head each": ((16, 16), (8, 8), (1, 600), "causal"),
    "one query, many keys": ((4, 2), (64, 64), (1, 2**14), "causal"),
    "one query, many keys, some padding": ((4, 2), (64, 64), (1, 2**14), "some"),
    "as many queries as keys": ((6, 3), (8, 8), (300, 300), "causal"),
    "a chunk after others": ((6, 3), (8, 5), (129, 300), "causal"),
    "a chunk whose last block is one query": ((4, 2), (8, 8), (257, 300), "causal"),
    "all see all": ((4, 2), (8, 8), (1030, 1100), "none"),
    "padding": ((6, 3), (8, 8), (130, 130), "some"),
}


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_no_way_is_less_exact_than_the_formula_in_that_dtype(name: str, dtype: torch.dtype, way: str) -> None:
    """Each of these is a way of its own through some implementation."""
    case = Inputs(*WAYS[way], batch=1)
    truth = case.expected()
    yard = max(error(case.expected(dtype), truth), torch.finfo(dtype).eps / 4)
    assert error(case.run(name, dtype), truth) <= RMS_FACTOR * yard


@every_implementation
def test_dropout_keeps_the_mean(name: str) -> None:
    """Half of the weights are dropped and the others doubled, so that single runs differ and their mean does not."""
    torch.manual_seed(0)
    case = Inputs((2, 1), (4, 4), (3, 5), "none")
    arguments = (*case.tensors(torch.float64), None, case.scale)
    runs = torch.stack([IMPLEMENTATIONS[name](*arguments, dropout=0.5) for _ in range(2000)])
    standard_error = runs.std(0) / len(runs) ** 0.5
    assert ((runs.mean(0) - case.expected()).abs() <= 5 * standard_error).all()
    assert (runs.std(0) > 0).all()
