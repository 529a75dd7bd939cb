"""Rotary position embedding: queries and keys turned by angles that grow with position (arXiv:2104.09864).

Channel pair i at position m turns by m * inv_freq[i]. Two layouts of the pairs exist, with equal shapes: `half` pairs
channel i with i + rotary/2, `adjacent` pairs 2i with 2i + 1, as Su et al. do. Attention computes the same under both if
the rows of the query and key projections are permuted (`half_from_adjacent`). Tables come in the half layout, each
frequency twice.

The frequencies are float32 numbers, part of a model's specification: the order of operations below fixes their last
bit. Angles are computed in at least float32, whatever the model's dtype.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from reimpl.precision import wide

Fields: TypeAlias = Mapping[str, Any]
Length: TypeAlias = int | Int[Tensor, ""] | None
Pairing: TypeAlias = Literal["half", "adjacent"]


@dataclass(frozen=True)
class Rope:
    """What frequencies are computed from."""

    fields: Fields
    head_dim: int
    max_position_embeddings: int
    length: Length = None

    def need(self, name: str) -> Any:
        """A field without a default. Raises ValueError if it is missing."""
        if self.fields.get(name) is None:
            raise ValueError(f"rope type {self.type!r} needs the field {name!r}, but got only {dict(self.fields)}")
        return self.fields[name]

    @property
    def type(self) -> str:
        return self.fields.get("rope_type", "default")

    @property
    def base(self) -> float:
        return float(self.need("rope_theta"))

    @property
    def portion(self) -> float:
        """Of the channels of a head, those that turn."""
        return float(self.fields.get("partial_rotary_factor", 1.0))

    @property
    def width(self) -> int:
        return int(self.head_dim * self.portion)

    @property
    def original(self) -> int:
        """The length the model was trained with before its context was extended."""
        return self.fields.get("original_max_position_embeddings") or self.max_position_embeddings

    @property
    def extension(self) -> float:
        """By how much the context was extended."""
        factor = self.fields.get("factor")
        return self.max_position_embeddings / self.original if factor is None else float(factor)


def _periods(base: float | Tensor, width: int, channels: int | None = None) -> Float[Tensor, "pairs"]:
    """base^(2i/width) for the pairs i of the first `channels` channels: positions per radian."""
    exponents = torch.arange(0, width if channels is None else channels, 2, device="cpu").float() / width
    return base**exponents


def _default(rope: Rope) -> tuple[Tensor, float]:
    """theta_i = base^(-2i/d) (Su et al. 2021, arXiv:2104.09864, section 3.2.2)."""
    return 1.0 / _periods(rope.base, rope.width), 1.0


def _linear(rope: Rope) -> tuple[Tensor, float]:
    """Position interpolation: positions shrink by `factor` (Chen et al. 2023, arXiv:2306.15595)."""
    return 1.0 / _periods(rope.base, rope.width) / rope.need("factor"), 1.0


def _proportional(rope: Rope) -> tuple[Tensor, float]:
    """The first pairs turn as they do at full width, the others stand still; the tables keep their full width."""
    turning = int(rope.portion * rope.head_dim // 2)
    frequencies = torch.zeros(rope.head_dim // 2, device="cpu")
    frequencies[:turning] = 1.0 / _periods(rope.base, rope.head_dim, channels=2 * turning)
    return frequencies / rope.fields.get("factor", 1.0), 1.0


def _dynamic(rope: Rope) -> tuple[Tensor, float]:
    """NTK-aware: the base grows with the length, just so that the slowest pair is interpolated (arXiv:2309.00071)."""
    width, factor, limit = rope.width, rope.need("factor"), rope.max_position_embeddings
    if width == 2:
        raise ValueError("rope type 'dynamic' needs a rotary width above 2, as its exponent is width / (width - 2)")
    # A tensor stays one: its arithmetic is in float32, where that of a number would be in float64.
    length = rope.length.clamp(min=limit) if isinstance(rope.length, Tensor) else max(rope.length or 0, limit)
    growth = factor * length / limit - (factor - 1)
    return 1.0 / _periods(rope.base * growth ** (width / (width - 2)), width), 1.0


def _yarn(rope: Rope) -> tuple[Tensor, float]:
    """NTK by parts (Peng et al. 2023, arXiv:2309.00071, section 3.2): fast pairs stay, slow pairs are interpolated."""
    base, width, factor = rope.base, rope.width, rope.extension
    if width % 2:
        raise ValueError(f"rope type 'yarn' needs an even rotary width: got {width}")

    def pair_turning(times: float) -> float:
        """The (fractional) pair that turns so many times within the original length."""
        return width * math.log(rope.original / (times * 2 * math.pi)) / (2 * math.log(base))

    first = pair_turning(float(rope.fields.get("beta_fast") or 32))
    last = pair_turning(float(rope.fields.get("beta_slow") or 1))
    if rope.fields.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    span = last - first if last != first else 0.001

    periods = _periods(base, width)
    kept = 1 - ((torch.arange(width // 2, device="cpu").float() - first) / span).clamp(0, 1)
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: Rope) -> float:
    """sqrt(1/t) = 0.1 ln(factor) + 1 (arXiv:2309.00071, section 3.4); a ratio of two such in DeepSeek-V2."""

    given, over, under = (rope.fields.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    if over and under:
        return yarn_magnitude(rope.extension, float(over)) / yarn_magnitude(rope.extension, float(under))
    return yarn_magnitude(rope.extension)


def yarn_magnitude(extension: float, weight: float = 1.0) -> float:
    """By how much queries and keys are enlarged, so that attention over an extended context stays as sharp."""
    return 0.1 * weight * math.log(extension) + 1.0 if extension > 1 else 1.0


def _longrope(rope: Rope) -> tuple[Tensor, float]:
    """A searched factor per pair, one set for short and one for long inputs (Ding et al. 2024, arXiv:2402.13753)."""
    is_long = rope.length is not None and bool(rope.length > rope.original)
    factors = torch.tensor(rope.need("long_factor" if is_long else "short_factor"), dtype=torch.float32, device="cpu")
    return 1.0 / (factors * _periods(rope.base, rope.width)), _longrope_attention_factor(rope)


def _longrope_attention_factor(rope: Rope) -> float:
    """sqrt(1 + ln(extension) / ln(original length)), so that scores keep their entropy (arXiv:2402.13753)."""
    given = rope.fields.get("attention_factor")
    if given is not None:
        return float(given)
    return math.sqrt(1 + math.log(rope.extension) / math.log(rope.original)) if rope.extension > 1 else 1.0


def _llama3(rope: Rope) -> tuple[Tensor, float]:
    """Long waves are interpolated, short ones stay, those between are blended (Llama 3.1, arXiv:2407.21783)."""
    low, high, factor = (rope.need(name) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    frequencies = 1.0 / _periods(rope.base, rope.width)
    wavelengths = 2 * math.pi / frequencies
    blend = (rope.original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelengths > rope.original / low, frequencies / factor, blended)
    return torch.where(wavelengths < rope.original / high, frequencies, scaled), 1.0


ROPE_TYPES: dict[str, Callable[[Rope], tuple[Tensor, float]]] = {
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
    rope: Fields, head_dim: int, max_position_embeddings: int, length: Length = None
) -> tuple[Float[Tensor, "pairs"], float]:
    """The angle per position of each pair, in float32, and the factor by which both tables are multiplied.

    `rope` holds the fields of config.json: `rope_type`, `rope_theta` and what the type needs. `length` is the number of
    positions in use, which `dynamic` and `longrope` read. Raises ValueError for an unknown type or a missing field.
    """
    return _frequencies(Rope(rope, head_dim, max_position_embeddings, length))


def _frequencies(rope: Rope) -> tuple[Tensor, float]:
    if rope.type not in ROPE_TYPES:
        raise ValueError(f"unknown rope type {rope.type!r}: known are {', '.join(ROPE_TYPES)}")
    return ROPE_TYPES[rope.type](rope)


def _tables(rope: Rope) -> Float[Tensor, "rotary"]:
    """The frequencies in the half layout."""
    frequencies, _ = _frequencies(rope)
    return torch.cat((frequencies, frequencies))


class Fixed:
    """The same frequencies at every call."""

    def __init__(self, rope: Rope) -> None:
        self.rope, self.initial = rope, _tables(rope)

    def __call__(self, positions: Int[Tensor, "#batch seq"]) -> Float[Tensor, "rotary"]:
        return self.initial


class Growing(Fixed):
    """`dynamic`: recomputed for every sequence longer than the longest so far, back to the initial frequencies for one
    shorter than the limit, and kept between the two. So a call depends on those before it.
    """

    def __init__(self, rope: Rope) -> None:
        super().__init__(rope)
        self.current, self.longest = self.initial, rope.max_position_embeddings

    def __call__(self, positions: Int[Tensor, "#batch seq"]) -> Float[Tensor, "rotary"]:
        length, limit = positions.max() + 1, self.rope.max_position_embeddings
        if length > self.longest:
            self.current, self.longest = _tables(replace(self.rope, length=length)), int(length)
        elif length < limit:
            self.current, self.longest = self.initial, limit
        return self.current


class Switching(Fixed):
    """`longrope`: one set up to the original length, another beyond it, chosen at every call for all positions."""

    def __init__(self, rope: Rope) -> None:
        super().__init__(rope)
        self.long = _tables(replace(rope, length=rope.original + 1))

    def __call__(self, positions: Int[Tensor, "#batch seq"]) -> Float[Tensor, "rotary"]:
        return self.long if positions.max() >= self.rope.original else self.initial


SCHEDULES: dict[str, type[Fixed]] = {"dynamic": Growing, "longrope": Switching}


class RotaryEmbedding(nn.Module):
    """cos(m * inv_freq) and sin(m * inv_freq) for the positions m, both times the attention factor.

    The frequencies are no buffer: a model converted to bfloat16 keeps them in float32.
    """

    def __init__(self, rope: Fields, head_dim: int, max_position_embeddings: int) -> None:
        super().__init__()
        given = Rope(rope, head_dim, max_position_embeddings)
        _, self.attention_factor = _frequencies(given)
        self.frequencies = SCHEDULES.get(given.type, Fixed)(given)

    def forward(
        self, x: Float[Tensor, "..."], positions: Int[Tensor, "#batch seq"]
    ) -> tuple[Float[Tensor, "#batch seq rotary"], Float[Tensor, "#batch seq rotary"]]:
        """In the dtype and on the device of `x`, which is read for nothing else."""
        angles = positions.unsqueeze(-1) * self.frequencies(positions).to(x.device, wide(x))
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
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
    """(a + ib) e^(im theta), in at least float32, since no half precision has complex numbers."""
    dtype, pairs = wide(x), x.shape[-1] // 2
    turn = torch.complex(cos[..., :pairs].to(dtype), sin[..., :pairs].to(dtype))
    # Copied, as a slice may begin at an odd address, where no complex number can.
    paired = x.unflatten(-1, (-1, 2)).to(dtype, copy=True, memory_format=torch.contiguous_format)
    return torch.view_as_real(torch.view_as_complex(paired) * turn).flatten(-2).to(x.dtype)


def half_order(head_dim: int, rotary: int | None = None) -> Int[Tensor, "head_dim"]:
    """Where each channel of the half layout stands in the adjacent one: 0, 2, 4, ..., 1, 3, 5, ..., then the rest."""
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
