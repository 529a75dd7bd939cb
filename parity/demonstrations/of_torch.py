"""Gaps of torch, shown on torch alone."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn

from parity.demonstrations.tools import F64, SEED, apart, pair_at
from parity.scenario import Scenario


def half_fourier(inside: bool) -> float:
    """In half precision from float32; a refusal is infinitely far."""
    x = torch.arange(12.0).view(1, 3, 4)
    transform = pair_at("fnet", "fourier", Scenario()).reference(F64).module
    try:
        (result,) = transform(x.bfloat16() if inside else x)
    except RuntimeError:
        return math.inf
    return apart(result, transform(x)[0])


def fast_from_slow(padding: int, window: int | None, nested: bool) -> tuple[Tensor, Tensor]:
    """An encoder's outputs in eval on both paths, for a row of 6 tokens whose last ones are padding."""
    index = torch.arange(6)
    seen = index[None] <= index[:, None]
    seen = seen if window is None else seen & (index[None] > index[:, None] - window)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dtype=F64)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
        x = torch.randn(1, 6, 8, dtype=F64)
    results = []
    for fast in (True, False):
        torch.backends.mha.set_fastpath_enabled(fast)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # nested tensors are a prototype
                mask = None if nested else ~seen
                results.append(encoder(x, mask=mask, src_key_padding_mask=index[None] >= 6 - padding))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    return results[0], results[1]


def encoder_nan(inside: bool) -> float:
    """More padding than the window is wide, and less."""
    return apart(*fast_from_slow(4 if inside else 1, window=2, nested=False))


def encoder_zeros(inside: bool) -> float:
    """The padded rows, and the others."""
    rows = slice(4, None) if inside else slice(4)
    return apart(*(output[:, rows] for output in fast_from_slow(2, window=None, nested=True)))
