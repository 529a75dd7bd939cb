"""Position information that is added, to the embeddings or to the scores."""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F


def sinusoidal(
    positions: Int[Tensor, "*batch"],
    size: int,
    base: float = 10000.0,
    layout: Literal["interleaved", "halved"] = "interleaved",
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*batch size"]:
    """sin(m / base^(2i/size)) and cos of the same (Vaswani et al. 2017, arXiv:1706.03762, section 3.5).

    `interleaved` puts them in channels 2i and 2i + 1, as the paper does; `halved` puts all sines before all cosines, as
    Marian does. Computed in float64 and rounded once.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float64, device=positions.device) / size
    angles = positions.unsqueeze(-1) / base**exponents
    sines, cosines = angles.sin(), angles.cos()[..., : size // 2]
    if layout == "halved":
        return torch.cat((sines, cosines), -1).to(dtype)
    table = positions.new_empty((*positions.shape, size), dtype=torch.float64)
    table[..., 0::2], table[..., 1::2] = sines, cosines
    return table.to(dtype)


class LearnedPosition(nn.Embedding):
    """A trained vector per position (Gehring et al. 2017, arXiv:1705.03122), which ends at a limit."""

    def forward(self, positions: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch size"]:
        """Raises IndexError, naming the limit, for a position outside the table."""
        try:
            return F.embedding(positions, self.weight)
        except IndexError as error:
            raise IndexError(
                f"positions {int(positions.min())} to {int(positions.max())} do not fit the learned table of "
                f"{self.num_embeddings}: shorten the input to at most {self.num_embeddings} tokens, with those cached"
            ) from error


def alibi_slopes(heads: int, dtype: torch.dtype = torch.float32) -> Float[Tensor, "heads"]:
    """2^(-8h/n) for h = 1..n, for a number of heads n that is a power of two (Press et al. 2022, arXiv:2108.12409).

    Otherwise the slopes of the next lower power of two, then every other one of the next higher, as in the authors'
    code.
    """

    def geometric(count: int) -> Tensor:
        return 2.0 ** (-8.0 / count * torch.arange(1, count + 1, dtype=torch.float64))

    lower = 2 ** math.floor(math.log2(heads))
    return torch.cat((geometric(lower), geometric(2 * lower)[0::2][: heads - lower])).to(dtype)


def alibi_bias(
    slopes: Float[Tensor, "heads"], queries: Int[Tensor, "#batch q"], keys: Int[Tensor, "#batch k"]
) -> Float[Tensor, "#batch heads q k"]:
    """-slope * (query position - key position), added to the scaled scores."""
    distance = queries[:, None, :, None] - keys[:, None, None, :]
    return -slopes[:, None, None] * distance
