"""PoolFormer (Yu et al. 2022, arXiv:2111.11418, section 3.2): images, whose pixels are mixed by nothing but pooling.

Parameters carry the names that they have in a checkpoint, but for those of a layer, which `weight_rules` translates.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from reimpl.checkpoint import Pretrained
from reimpl.config import GENERIC, LARGEST_SIZE, TRAINING, Config, ConfigError, between, known_activation
from reimpl.feedforward import activation
from reimpl.metaformer import LayerScale, MetaFormerBlock
from reimpl.norm import GroupNorm
from reimpl.weights import Rule, Same

Image = Float[Tensor, "batch channels height width"]
Mixed = Float[Tensor, "batch out down across"]


@dataclass(frozen=True, kw_only=True)
class PoolFormerConfig(Config):
    """The fields of config.json that change what PoolFormer computes; lists have an entry per stage."""

    IRRELEVANT: ClassVar[Mapping[str, str]] = {
        **{name: reason for name, reason in GENERIC.items() if name != "id2label"},
        "drop_path_rate": TRAINING,
        "layer_scale_init_value": TRAINING,
        "num_encoder_blocks": "the number of entries in the lists",
        "patch_size": "patch_sizes stands for it",
        "stride": "strides stands for it",
    }
    ONLY: ClassVar[Mapping[str, Any]] = {**Config.ONLY, "model_type": "poolformer"}
    SIZES: ClassVar[tuple[str, ...]] = ("num_channels", "pool_size")
    LISTS: ClassVar[Mapping[str, int]] = {
        "depths": 1,
        "hidden_sizes": 1,
        "patch_sizes": 1,
        "strides": 1,
        "padding": 0,
    }
    """The lists, and the least that an entry can be."""

    num_channels: int = 3
    depths: Sequence
    hidden_sizes: Sequence
    patch_sizes: Sequence
    strides: Sequence
    padding: Sequence
    pool_size: int = 3
    mlp_ratio: float = 4.0
    hidden_act: str = "gelu"
    use_layer_scale: bool = True
    id2label: Mapping = field(default_factory=lambda: {0: "LABEL_0", 1: "LABEL_1"})

    def __post_init__(self) -> None:
        super().__post_init__()
        known_activation(self.hidden_act, "hidden_act")
        for name, least in self.LISTS.items():
            sizes = getattr(self, name)
            if len(sizes) != self.stages:
                raise ConfigError(
                    f"{name} has {len(sizes)} entries for {self.stages} stages (depths): give one for each stage"
                )
            for size in sizes:
                if type(size) is not int:
                    raise ConfigError(f"{name} holds {size!r}: it must hold whole numbers; correct it")
                between(size, least, LARGEST_SIZE, name)
        if self.pool_size % 2 == 0:
            raise ConfigError(f"pool_size is {self.pool_size}: only an odd one has a middle; correct it")
        for size in self.hidden_sizes:
            between(int(size * self.mlp_ratio), 1, LARGEST_SIZE, "mlp_ratio times hidden_sizes")

    @property
    def stages(self) -> int:
        return len(self.depths)


class PoolFormerPooling(nn.Module):
    """The mean over a pixel's neighbourhood, as far as the image reaches, less the pixel itself (eq. 4).

    The block adds the pixel again, so that the mean remains.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Image) -> Image:
        return F.avg_pool2d(x, self.size, stride=1, padding=self.size // 2, count_include_pad=False) - x


class PoolFormerOutput(nn.Module):
    """conv2(act(conv1(x))): the feed-forward layer of every pixel, as convolutions that reach no other one."""

    def __init__(self, channels: int, hidden: int, act: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, hidden, kernel_size=1)
        self.conv2 = nn.Conv2d(hidden, channels, kernel_size=1)
        self.act = activation(act)

    def forward(self, x: Image) -> Image:
        return self.conv2(self.act(self.conv1(x)))


class PoolFormerLayer(MetaFormerBlock):
    """z = x + pooling(norm(x)); y = z + mlp(norm(z)), each mixer's output scaled per channel if asked for."""

    def __init__(self, config: PoolFormerConfig, stage: int = 0) -> None:
        channels = config.hidden_sizes[stage]
        pooling: nn.Module = PoolFormerPooling(config.pool_size)
        mlp: nn.Module = PoolFormerOutput(channels, int(channels * config.mlp_ratio), config.hidden_act)
        if config.use_layer_scale:
            pooling, mlp = LayerScale(pooling, channels), LayerScale(mlp, channels)
        super().__init__(GroupNorm(channels), pooling, GroupNorm(channels), mlp)

    @staticmethod
    def names(scaled: bool) -> Iterator[tuple[str, str]]:
        """What its parameters are called on disk, and here."""
        within = "channel_mixer.mixer" if scaled else "channel_mixer"
        parts = {"before_norm": "token_norm", "after_norm": "channel_norm"}
        parts |= {f"output.{conv}": f"{within}.{conv}" for conv in ("conv1", "conv2")}
        for disk, module in parts.items():
            yield from ((f"{disk}.{name}", f"{module}.{name}") for name in ("weight", "bias"))
        if scaled:
            yield from (("layer_scale_1", "token_mixer.scale"), ("layer_scale_2", "channel_mixer.scale"))


class PoolFormerEmbeddings(nn.Module):
    """A convolution that makes a patch of pixels one pixel of more channels."""

    def __init__(self, config: PoolFormerConfig, stage: int = 0) -> None:
        super().__init__()
        before = config.hidden_sizes[stage - 1] if stage else config.num_channels
        size, stride = config.patch_sizes[stage], config.strides[stage]
        self.projection = nn.Conv2d(before, config.hidden_sizes[stage], size, stride, config.padding[stage])

    def forward(self, x: Image) -> Mixed:
        return self.projection(x)


class PoolFormerEncoder(nn.Module):
    """Stage after stage: patches are embedded, then mixed."""

    def __init__(self, config: PoolFormerConfig) -> None:
        super().__init__()
        stages = range(config.stages)
        self.patch_embeddings = nn.ModuleList(PoolFormerEmbeddings(config, stage) for stage in stages)
        self.block = nn.ModuleList(
            nn.Sequential(*(PoolFormerLayer(config, stage) for _ in range(config.depths[stage]))) for stage in stages
        )

    def forward(self, x: Image) -> Mixed:
        for embed, layers in zip(self.patch_embeddings, self.block, strict=True):
            x = layers(embed(x))
        return x


class PoolFormerModel(Pretrained):
    """All stages."""

    CONFIG = PoolFormerConfig

    def __init__(self, config: PoolFormerConfig) -> None:
        super().__init__(config)
        self.encoder = PoolFormerEncoder(config)

    def forward(self, image: Image) -> Mixed:
        return self.encoder(image)


class PoolFormerForImageClassification(Pretrained):
    """Logits of every label: of the mean over all pixels, behind a norm."""

    CONFIG = PoolFormerConfig

    def __init__(self, config: PoolFormerConfig) -> None:
        super().__init__(config)
        self.poolformer = PoolFormerModel(config)
        self.norm = GroupNorm(config.hidden_sizes[-1])
        self.classifier = nn.Linear(config.hidden_sizes[-1], len(config.id2label))

    def forward(self, image: Image) -> Float[Tensor, "batch labels"]:
        return self.classifier(self.norm(self.poolformer(image)).mean((-2, -1)))

    @classmethod
    def weight_rules(cls, config: PoolFormerConfig) -> tuple[Rule, ...]:
        places = (
            f"poolformer.encoder.block.{stage}.{index}."
            for stage, depth in enumerate(config.depths)
            for index in range(depth)
        )
        names = list(PoolFormerLayer.names(config.use_layer_scale))
        return tuple(Same(at + disk, at + module) for at in places for disk, module in names)
