"""RankMixer (Zhu et al. 2025, arXiv:2507.15551, section 3): tokens that are features of unlike kinds, for ranking.

Tokens exchange slices of themselves, by no weights at all, and each token has a feed-forward layer of its own.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reimpl.config import Config, between, divides, known_activation
from reimpl.feedforward import activation
from reimpl.metaformer import MetaFormerBlock
from reimpl.norm import LayerNorm


@dataclass(frozen=True, kw_only=True)
class RankMixerConfig(Config):
    """Sizes, and whether norms stand before the mixers or, as in the paper, after the sums."""

    ONLY: ClassVar = {"model_type": "rankmixer"}
    SIZES: ClassVar[tuple[str, ...]] = ("num_tokens", "hidden_size", "intermediate_size", "num_hidden_layers")

    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    norm_first: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        known_activation(self.hidden_act, "hidden_act")
        between(self.layer_norm_eps, 0, 1, "layer_norm_eps")
        divides(self.num_tokens, self.hidden_size, "num_tokens", "hidden_size")


class TokenMixing(nn.Module):
    """Token h of the output holds slice h of every token, one after the other; there are as many slices as tokens.

    Twice in a row it changes nothing (eq. 2 to 4, with H = T, so that the sum with its input has a shape).
    """

    def forward(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        return x.unflatten(-1, (x.shape[1], -1)).transpose(1, 2).flatten(2)


class PerTokenLinear(nn.Module):
    """A matrix and a bias for every token."""

    def __init__(self, tokens: int, size: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tokens, out, size) * size**-0.5)
        self.bias = nn.Parameter(torch.zeros(tokens, out))

    def forward(self, x: Float[Tensor, "batch seq size"]) -> Float[Tensor, "batch seq out"]:
        return torch.einsum("bti,toi->bto", x, self.weight) + self.bias


class PerTokenFeedForward(nn.Module):
    """W2_t act(W1_t x_t + b1_t) + b2_t, token by token (eq. 6 and 7)."""

    def __init__(self, config: RankMixerConfig) -> None:
        super().__init__()
        self.per_token_up = PerTokenLinear(config.num_tokens, config.hidden_size, config.intermediate_size)
        self.per_token_down = PerTokenLinear(config.num_tokens, config.intermediate_size, config.hidden_size)
        self.act = activation(config.hidden_act)

    def forward(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        return self.per_token_down(self.act(self.per_token_up(x)))


class RankMixerBlock(MetaFormerBlock):
    """S = norm(mixing(X) + X); Y = norm(ffn(S) + S) (eq. 1 and 5)."""

    def __init__(self, config: RankMixerConfig) -> None:
        super().__init__(
            LayerNorm(config.hidden_size, config.layer_norm_eps),
            TokenMixing(),
            LayerNorm(config.hidden_size, config.layer_norm_eps),
            PerTokenFeedForward(config),
            norm_first=config.norm_first,
        )


class RankMixer(nn.Module):
    """The blocks, and the mean over the tokens that come out."""

    def __init__(self, config: RankMixerConfig) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(RankMixerBlock(config) for _ in range(config.num_hidden_layers)))

    def forward(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch hidden"]:
        return self.layers(x).mean(dim=1)
