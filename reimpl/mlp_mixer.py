"""MLP-Mixer (Tolstikhin et al. 2021, arXiv:2105.01601, section 2): a feed-forward layer mixes tokens, too.

Its weights belong to places in the row, so a row has one length, and no token can be left out.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from reimpl.config import Config, between, known_activation
from reimpl.feedforward import FeedForward
from reimpl.metaformer import MetaFormerBlock
from reimpl.norm import LayerNorm


@dataclass(frozen=True, kw_only=True)
class MlpMixerConfig(Config):
    """The sizes of table 1 in the paper: S, C, D_S and D_C are the first four."""

    ONLY: ClassVar = {"model_type": "mlp_mixer"}
    SIZES: ClassVar[tuple[str, ...]] = (
        "num_patches",
        "hidden_size",
        "tokens_mlp_dim",
        "channels_mlp_dim",
        "num_hidden_layers",
        "patch_size",
        "num_labels",
    )

    num_patches: int
    hidden_size: int
    tokens_mlp_dim: int
    channels_mlp_dim: int
    num_hidden_layers: int
    patch_size: int
    num_labels: int
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        known_activation(self.hidden_act, "hidden_act")
        between(self.layer_norm_eps, 0, 1, "layer_norm_eps")


class TokenFeedForward(FeedForward):
    """W2 act(W1 X) for each column of X: the channels are mixed by none, and all by the same weights (eq. 1)."""

    def forward(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        return super().forward(x.mT).mT


class MixerLayer(MetaFormerBlock):
    """U = X + W2 act(W1 norm(X)); Y = U + W4 act(W3 norm(U)), the first over tokens, the second over channels."""

    def __init__(self, config: MlpMixerConfig) -> None:
        super().__init__(
            LayerNorm(config.hidden_size, config.layer_norm_eps),
            TokenFeedForward(config.num_patches, config.tokens_mlp_dim, config.hidden_act),
            LayerNorm(config.hidden_size, config.layer_norm_eps),
            FeedForward(config.hidden_size, config.channels_mlp_dim, config.hidden_act),
        )


class MlpMixer(nn.Module):
    """The logits of an image whose patches are given one by one: embedded, mixed, normed, averaged, classified."""

    def __init__(self, config: MlpMixerConfig) -> None:
        super().__init__()
        self.projection = nn.Linear(config.patch_size, config.hidden_size)
        self.layers = nn.Sequential(*(MixerLayer(config) for _ in range(config.num_hidden_layers)))
        self.norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, patches: Float[Tensor, "batch seq patch"]) -> Float[Tensor, "batch labels"]:
        return self.classifier(self.norm(self.layers(self.projection(patches))).mean(dim=1))
