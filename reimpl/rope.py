"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864): queries and keys turned by angles that grow with position.

Channel pair i at position m turns by m * inv_freq[i]. Two layouts of the pairs exist, with equal shapes: `half` pairs channel i
with i + rotary/2, `adjacent` pairs 2i with 2i + 1, as in the paper. Attention computes the same under both if the rows of the
query and key projections are permuted (`half_from_adjacent`). Tables come in the half layout, each frequency twice.

The frequencies are float32 numbers, part of a model's specification: the order of operations below fixes their last bit.
Angles are computed in at least float32, whatever the model's dtype.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

Rope: TypeAlias = Mapping[str, Any]
Length: TypeAlias = int | Int[Tensor, ""] | None
Pairing: TypeAlias = Literal["half", "adjacent"]


def _field(rope: Rope, name: str) -> Any:
    if rope.get(name) is None:
        raise ValueError(f"rope type {rope.get('rope_type', 'default')!r} needs the field {name!r}: got {dict(rope)}")
    return rope[name]


def _rotary_width(rope: Rope, head_dim: int) -> int:
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))


def _original_length(rope: Rope, max_position_embeddings: int) -> int:
    return rope.get("original_max_position_embeddings") or max_position_embeddings


def _stretch(rope: Rope, max_position_embeddings: int) -> float:
    """By how much the context was extended."""
    if rope.get("factor") is not None:
        return rope["factor"]
    return max_position_embeddings / _original_length(rope, max_position_embeddings)


def _periods(base: float | Tensor, width: int, channels: int | None = None) -> Float[Tensor, "pairs"]:
    """base^(2i/width) for the pairs i of the first `channels` channels: positions per radian."""
    exponents = torch.arange(0, width if channels is None else channels, 2, device="cpu").float() / width
    return base**exponents


def _default(rope: Rope, head_dim: int, max_position_embeddings: int, length: Length) -> tuple[Tensor, float]:
    """theta_i = base^(-2i/d) (arXiv:2104.09864, section 3.2.2)."""
    return 1.0 / _periods(_field(rope, "rope_theta"), _rotary_width(rope, head_dim)), 1.0


def _linear(rope: Rope, head_dim: int, max_position_embeddings: int, length: Length) -> tuple[Tensor, float]:
    """Position interpolation: positions shrink by `factor` (Chen et al. 2023, arXiv:2306.15595)."""
    frequencies, _ = _default(rope, head_dim, max_position_embeddings, length)
    return frequencies / _field(rope, "factor"), 1.0


def _proportional(rope: Rope, head_dim: int, max_position_embeddings: int, length: Length) -> tuple[Tensor, float]:
    """The first pairs turn at the frequencies they have at full width, the others stand still; the table is full width."""
    turning = int(head_dim * rope.get("partial_rotary_factor", 1.0) // 2)
    frequencies = torch.zeros(head_dim // 2, device="cpu")
    frequencies[:turning] = 1.0 / _periods(_field(rope, "rope_theta"), head_dim, channels=2 * turning)
    return frequencies / rope.get("factor", 1.0), 1.0


def _dynamic(rope: Rope, head_dim: int, max_position_embeddings: int, length: Length) -> tuple[Tensor, float]:
    """NTK-aware scaling: the base grows with the length, so that the slowest pair is interpolated (arXiv:2309.00071, A.1)."""
    width, factor = _rotary_width(rope, head_dim), _field(rope, "factor")
    if isinstance(length, Tensor):
        length = length.clamp(min=max_position_embeddings)
    else:
        length = max(length or 0, max_position_embeddings)
    growth = factor * length / max_position_embeddings - (factor - 1)
    return 1.0 / _periods(_field(rope, "rope_theta") * growth ** (width / (width - 2)), width), 1.0


def _yarn(rope: Rope, head_dim: int, max_position_embeddings: int, length: Length) -> tuple[Tensor, float]:
    """NTK by parts (Peng et al. 2023, arXiv:2309.00071, section 3.2): fast pairs stay, slow pairs are interpolated."""
    base, width = _field(rope, "rope_theta"), _rotary_width(rope, head_dim)
    original = _original_length(rope, max_position_embeddings)
    factor = _stretch(rope, max_position_embeddings)

    def pair_turning(times: float) -> float:
        """The (fractional) pair that turns so many times within the original length."""
        return width * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_turning(rope.get("beta_fast") or 32), pair_turning(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = high - low if high != low else 0.001

    periods = _periods(base, width)
    kept = 1 - ((torch.arange(len(periods), device="cpu").float() - low) / span).clamp(0, 1)
    frequencies = 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept
    return frequencies, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: Rope, factor: float) -> float:
    """The square root of 1/t (arXiv:2309.00071, eq. 22); as a ratio of two weights in DeepSeek-V2 (arXiv:2405.04434)."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return magnitude(1.0)


def _longrope(rope: Rope, head_dim: int, max_position_embeddings: int, length: Length) -> tuple[Tensor, float]:
    """A searched factor per pair, one set for short and one for long inputs (Ding et al. 2024, arXiv:2402.13753)."""
    original = _original_length(rope, max_position_embeddings)
    searched = _field(rope, "long_factor" if length is not None and length > original else "short_factor")
    factors = torch.tensor(searched, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / (factors * _periods(_field(rope, "rope_theta"), _rotary_width(rope, head_dim)))

    attention_factor, factor = rope.get("attention_factor"), _stretch(rope, max_position_embeddings)
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return frequencies, attention_factor


def _llama3(rope: Rope, head_dim: int, max_position_embeddings: int, length: Length) -> tuple[Tensor, float]:
    """Long waves are interpolated, short ones stay, those between are blended (Llama 3.1, arXiv:2407.21783, section 3.4.2)."""
    frequencies, _ = _default(rope, head_dim, max_position_embeddings, length)
    low, high = _field(rope, "low_freq_factor"), _field(rope, "high_freq_factor")
    original, factor = _original_length(rope, max_position_embeddings), _field(rope, "factor")

    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled), 1.0


ROPE_TYPES: dict[str, Callable[[Rope, int, int, Length], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
"""By the names that `rope_type` has in config.json."""


def inverse_frequencies(
    rope: Rope, head_dim: int, max_position_embeddings: int, length: Length = None
) -> tuple[Float[Tensor, "pairs"], float]:
    """The angle per position of each pair, in float32, and the factor by which both tables are multiplied.

    `rope` holds the fields of config.json: `rope_type`, `rope_theta` and what the type needs. `length` is the number of
    positions in use, which `dynamic` and `longrope` read. Raises ValueError for an unknown type or a missing field.
    """
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"unknown rope type {rope_type!r}: known are {', '.join(ROPE_TYPES)}")
    return ROPE_TYPES[rope_type](rope, head_dim, max_position_embeddings, length)


class Fixed:
    """The same frequencies for every call."""

    def __init__(self, rope: Rope, head_dim: int, max_position_embeddings: int) -> None:
        self.rope, self.head_dim, self.limit = rope, head_dim, max_position_embeddings
        self.initial, self.attention_factor = self._frequencies()

    def _frequencies(self, length: Length = None) -> tuple[Tensor, float]:
        inv_freq, factor = inverse_frequencies(self.rope, self.head_dim, self.limit, length)
        return torch.cat((inv_freq, inv_freq)), factor

    def __call__(self, positions: Tensor) -> Tensor:
        return self.initial


class Growing(Fixed):
    """`dynamic`: recomputed whenever the sequence grows beyond the longest so far, kept while it is shorter, and back to
    the initial ones once a sequence is shorter than the limit. So a call depends on those before it."""

    def __init__(self, rope: Rope, head_dim: int, max_position_embeddings: int) -> None:
        super().__init__(rope, head_dim, max_position_embeddings)
        self.current, self.longest = self.initial, max_position_embeddings

    def __call__(self, positions: Tensor) -> Tensor:
        length = positions.max() + 1
        if length > self.longest:
            self.current, self.longest = self._frequencies(length)[0], int(length)
        elif length < self.limit:
            self.current, self.longest = self.initial, self.limit
        return self.current


class Switching(Fixed):
    """`longrope`: one set up to the original length, another beyond it, chosen at every call for all positions."""

    def __init__(self, rope: Rope, head_dim: int, max_position_embeddings: int) -> None:
        super().__init__(rope, head_dim, max_position_embeddings)
        self.original = _original_length(rope, max_position_embeddings)
        self.long, _ = self._frequencies(self.original + 1)

    def __call__(self, positions: Tensor) -> Tensor:
        return self.long if positions.max() >= self.original else self.initial


class RotaryEmbedding(nn.Module):
    """Tables of cos(m * inv_freq) and sin(m * inv_freq), for the positions m, times the attention factor.

    The frequencies are no buffer: a model converted to bfloat16 keeps them in float32.
    """

    def __init__(self, rope: Rope, head_dim: int, max_position_embeddings: int) -> None:
        super().__init__()
        kind = {"dynamic": Growing, "longrope": Switching}.get(rope.get("rope_type", "default"), Fixed)
        self.frequencies = kind(rope, head_dim, max_position_embeddings)

    def forward(
        self, x: Float[Tensor, "..."], positions: Int[Tensor, "#batch seq"]
    ) -> tuple[Float[Tensor, "#batch seq rotary"], Float[Tensor, "#batch seq rotary"]]:
        """In the dtype and on the device of `x`, which is read for nothing else."""
        wide = torch.promote_types(x.dtype, torch.float32)
        angles = positions.unsqueeze(-1) * self.frequencies(positions).to(x.device, wide)
        cos, sin, factor = angles.cos(), angles.sin(), self.frequencies.attention_factor
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return cos.to(x.dtype), sin.to(x.dtype)


def rotate(
    x: Float[Tensor, "batch heads seq head_dim"],
    cos: Float[Tensor, "#batch seq rotary"],
    sin: Float[Tensor, "#batch seq rotary"],
    pairing: Pairing = "half",
) -> Float[Tensor, "batch heads seq head_dim"]:
    """(a, b) -> (a cos - b sin, b cos + a sin) for every pair among the first `rotary` channels; the others pass."""
    rotary = cos.shape[-1]
    turned = (_rotate_half if pairing == "half" else _rotate_adjacent)(x[..., :rotary], cos[:, None], sin[:, None])
    return turned if rotary == x.shape[-1] else torch.cat((turned, x[..., rotary:]), -1)


def _rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((-b, a), -1), sin)


def _rotate_adjacent(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def half_order(head_dim: int, rotary: int | None = None) -> Int[Tensor, "head_dim"]:
    """Where each channel of the half layout stands in the adjacent layout: 0, 2, 4, ..., 1, 3, 5, ..., then those that pass."""
    channels = torch.arange(head_dim, device="cpu")
    turned, passing = channels[:rotary], channels[len(channels[:rotary]) :]
    return torch.cat((turned[0::2], turned[1::2], passing))


def half_from_adjacent(
    rows: Shaped[Tensor, "rows *columns"], head_dim: int, rotary: int | None = None
) -> Shaped[Tensor, "rows *columns"]:
    """Permutes weight or bias of a query or key projection trained for adjacent pairs, so that half pairs fit it."""
    return _permute_heads(rows, half_order(head_dim, rotary))


def adjacent_from_half(
    rows: Shaped[Tensor, "rows *columns"], head_dim: int, rotary: int | None = None
) -> Shaped[Tensor, "rows *columns"]:
    """The inverse of `half_from_adjacent`."""
    return _permute_heads(rows, half_order(head_dim, rotary).argsort())


def _permute_heads(rows: Tensor, order: Tensor) -> Tensor:
    if len(rows) % len(order):
        raise ValueError(f"{len(rows)} rows are no whole number of heads of {len(order)} channels")
    return rows.unflatten(0, (-1, len(order)))[:, order.to(rows.device)].flatten(0, 1)
