"""FNet (Lee-Thorp et al. 2021, arXiv:2105.03824, section 3): BERT with a Fourier transform where attention was.

Parameters carry the names that they have in a checkpoint, but for those of a layer, which `weight_rules` translates.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from reimpl.bert import BertEmbeddings, BertOnlyMLMHead, BertPooler
from reimpl.checkpoint import Pretrained
from reimpl.config import GENERIC, Config, between, known_activation
from reimpl.feedforward import FeedForward
from reimpl.metaformer import MetaFormerBlock
from reimpl.norm import LayerNorm
from reimpl.precision import wide
from reimpl.weights import Derived, Rule, Same, Tied


@dataclass(frozen=True, kw_only=True)
class FNetConfig(Config):
    """The fields of config.json that change what FNet computes."""

    IRRELEVANT: ClassVar[Mapping[str, str]] = {
        **GENERIC,
        "use_tpu_fourier_optimizations": "equal results, computed as products with matrices",
        "tpu_short_seq_length": "which products these are",
    }
    ONLY: ClassVar[Mapping[str, Any]] = {**Config.ONLY, "model_type": "fnet"}
    SIZES: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "max_position_embeddings",
        "type_vocab_size",
    )

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    hidden_act: str = "gelu_new"
    hidden_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 4
    layer_norm_eps: float = 1e-12
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        known_activation(self.hidden_act, "hidden_act")
        for name in ("hidden_dropout_prob", "layer_norm_eps"):
            between(getattr(self, name), 0, 1, name)
        if self.pad_token_id is not None:
            between(self.pad_token_id, -self.vocab_size, self.vocab_size - 1, "pad_token_id")


class FNetFourierTransform(nn.Module):
    """The real part of the discrete Fourier transform along tokens and channels (section 3.2, eq. 3).

    It has no parameters, and no mask: every token reaches all others, those that are padding too. In half precision it
    runs in float32.
    """

    def forward(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        return torch.fft.fft2(x.to(wide(x))).real.to(x.dtype)


class FNetFeedForward(FeedForward):
    """The channel mixer, with dropout at its end."""

    def __init__(self, config: FNetConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        return self.dropout(super().forward(x))


class FNetLayer(MetaFormerBlock):
    """z = norm(x + fourier(x)); y = norm(z + mlp(z))."""

    DISK: ClassVar[Mapping[str, str]] = {
        "token_norm": "fourier.output.LayerNorm",
        "channel_mixer.up_proj": "intermediate.dense",
        "channel_mixer.down_proj": "output.dense",
        "channel_norm": "output.LayerNorm",
    }
    """What its parts are called on disk."""

    def __init__(self, config: FNetConfig) -> None:
        super().__init__(
            LayerNorm(config.hidden_size, config.layer_norm_eps),
            FNetFourierTransform(),
            LayerNorm(config.hidden_size, config.layer_norm_eps),
            FNetFeedForward(config),
            norm_first=False,
        )


class FNetEmbeddings(BertEmbeddings):
    """Linear(LayerNorm(token + position + token type))."""

    def __init__(self, config: FNetConfig) -> None:
        super().__init__(config)
        self.projection = nn.Linear(config.hidden_size, config.hidden_size)

    def project(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        return self.projection(x)


class FNetEncoder(nn.Module):
    """The layers, one after the other."""

    def __init__(self, config: FNetConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(FNetLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        for layer in self.layer:
            x = layer(x)
        return x


class FNetModel(Pretrained):
    """Embeddings, layers, and a pooler."""

    CONFIG = FNetConfig

    def __init__(self, config: FNetConfig) -> None:
        super().__init__(config)
        self.embeddings = FNetEmbeddings(config)
        self.encoder = FNetEncoder(config)
        self.pooler = BertPooler(config)

    def forward(
        self,
        ids: Int[Tensor, "batch seq"] | None = None,
        positions: Int[Tensor, "#batch seq"] | None = None,
        embeddings: Float[Tensor, "batch seq hidden"] | None = None,
        token_types: Int[Tensor, "batch seq"] | None = None,
    ) -> tuple[Float[Tensor, "batch seq hidden"], Float[Tensor, "batch hidden"]]:
        """Hidden states of tokens, given by `ids` or by their `embeddings`, and what the pooler makes of the first.

        Rows have one length, as no mask could keep padding out of the transform. Positions count up from 0 unless they
        are given.
        """
        given = ids if embeddings is None else embeddings
        if given is None:
            raise ValueError("neither ids nor embeddings are given")
        if positions is None:
            positions = torch.arange(given.shape[1], device=given.device)[None]
        hidden = self.encoder(self.embeddings(ids, positions, token_types, embeddings))
        return hidden, self.pooler(hidden)

    @classmethod
    def weight_rules(cls, config: FNetConfig) -> tuple[Rule, ...]:
        return tuple(_layer_rules("", config.num_hidden_layers))


def _layer_rules(prefix: str, layers: int) -> Iterable[Rule]:
    yield Derived("embeddings.position_ids")
    for index in range(layers):
        at = f"{prefix}encoder.layer.{index}."
        for module, disk in FNetLayer.DISK.items():
            for name in ("weight", "bias"):
                yield Same(f"{at}{disk}.{name}", f"{at}{module}.{name}")


class FNetForMaskedLM(Pretrained):
    """FNet with a head that gives the logits of every token, masked or not."""

    CONFIG = FNetConfig

    def __init__(self, config: FNetConfig) -> None:
        super().__init__(config)
        self.fnet = FNetModel(config)
        self.cls = BertOnlyMLMHead(config)
        if config.tie_word_embeddings:
            self.cls.predictions.tie(self.fnet.embeddings.word_embeddings.weight)

    def forward(self, *args: Any, **named: Any) -> Float[Tensor, "batch seq vocab"]:
        """The arguments are those of the model."""
        hidden, _ = self.fnet(*args, **named)
        return self.cls(hidden)

    @classmethod
    def modern(cls, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Pretraining leaves a head for pairs of sentences, too, which has no part in this model."""
        return {name: tensor for name, tensor in tensors.items() if not name.startswith("cls.seq_relationship.")}

    @classmethod
    def weight_rules(cls, config: FNetConfig) -> tuple[Rule, ...]:
        rules = tuple(_layer_rules("fnet.", config.num_hidden_layers))
        if not config.tie_word_embeddings:
            return rules
        twins = {"weight": "fnet.embeddings.word_embeddings.weight", "bias": "cls.predictions.bias"}
        return (*rules, *(Tied(f"cls.predictions.decoder.{name}", twin) for name, twin in twins.items()))
