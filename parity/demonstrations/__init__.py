"""Every known gap, shown by holding the reference against itself, inside and right beside; no candidate takes part."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from parity.demonstrations import attention, models, of_torch

DEMONSTRATIONS: Mapping[str, Callable[[bool], float]] = {
    "latent-eps": attention.latent_eps,
    "window-of-one": attention.window_of_one,
    "packed-cache": attention.packed_cache,
    "empty-row": attention.empty_row,
    "no-mask": attention.no_mask,
    "boolean-mask": attention.boolean_mask,
    "dynamic-chunks": attention.dynamic_chunks,
    "dynamic-history": attention.dynamic_history,
    "longrope-chunks": attention.longrope_chunks,
    "partial-rotary": attention.partial_rotary,
    "half-buffers": attention.half_buffers,
    "gpt2-scales": models.gpt2_scales,
    "gpt2-upcast": models.gpt2_upcast,
    "bloom-gelu": models.bloom_gelu,
    "jitter-in-place": models.jitter_in_place,
    "qwen3-moe-dense": models.qwen3_moe_dense,
    "mamba-chunks": models.mamba_chunks,
    "mamba-mask": models.mamba_mask,
    "rwkv-rows": models.rwkv_rows,
    "rwkv-rescaled": models.rwkv_rescaled,
    "rwkv-eps": models.rwkv_eps,
    "rwkv-width": models.rwkv_width,
    "rwkv-one-layer": models.rwkv_one_layer,
    "half-fourier": of_torch.half_fourier,
    "encoder-nan": of_torch.encoder_nan,
    "encoder-zeros": of_torch.encoder_zeros,
}
"""How far the reference is from itself, inside a gap and right beside it."""
