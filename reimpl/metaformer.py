"""The frame that a layer is, whatever mixes its tokens: MetaFormer (Yu et al. 2022, arXiv:2111.11418, section 3.1).

Information moves in two directions: between the tokens, each channel for itself, and between the channels, each token
for itself. A residual runs past each of the two, and a norm stands before each (as in MLP-Mixer and PoolFormer) or
after its sum (as in FNet and RankMixer, after the first Transformer).
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


class MetaFormerBlock(nn.Module):
    """z = x + token_mixer(norm(x)); y = z + channel_mixer(norm(z)).

    With `norm_first=False`: z = norm(x + token_mixer(x)); y = norm(z + channel_mixer(z)).
    """

    def __init__(
        self,
        token_norm: nn.Module,
        token_mixer: nn.Module,
        channel_norm: nn.Module,
        channel_mixer: nn.Module,
        norm_first: bool = True,
    ) -> None:
        super().__init__()
        self.token_norm, self.token_mixer = token_norm, token_mixer
        self.channel_norm, self.channel_mixer = channel_norm, channel_mixer
        self.norm_first = norm_first

    def forward(self, x: Float[Tensor, "batch *token"], **given: Any) -> Float[Tensor, "batch *token"]:
        """Mix tokens, then channels. The token mixer gets what is `given`: a mask, a cache, rotary tables."""
        if self.norm_first:
            z = x + self.token_mixer(self.token_norm(x), **given)
            return z + self.channel_mixer(self.channel_norm(z))
        z = self.token_norm(x + self.token_mixer(x, **given))
        return self.channel_norm(z + self.channel_mixer(z))


class LayerScale(nn.Module):
    """scale * mixer(x), with a scale per channel, trained (Touvron et al. 2021, arXiv:2103.17239, section 2.2).

    `x` holds channels on its axis 1, as images do.
    """

    def __init__(self, mixer: nn.Module, channels: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x: Float[Tensor, "batch channels *place"]) -> Float[Tensor, "batch channels *place"]:
        y = self.mixer(x)
        return y * self.scale.view(-1, *[1] * (y.ndim - 2))
