"""What Llama and its descendants share: z = x + attention(norm(x)); y = z + mlp(norm(z)), under rotary positions."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from reimpl.cache import LayerCache
from reimpl.config import Config, ConfigError, between, check_rope, divides, known_activation, shared
from reimpl.decoder import Decoder
from reimpl.mask import Mask
from reimpl.norm import RMSNorm
from reimpl.rope import RotaryEmbedding

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class PreNormConfig(Config):
    """The fields of config.json that all of them have."""

    SIZES: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_parameters: Mapping
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None

    @classmethod
    def complete(cls, read: dict[str, Any]) -> None:
        if read.get("num_key_value_heads") is None:
            read["num_key_value_heads"] = read.get("num_attention_heads")
        if read.get("head_dim") is None:
            read["head_dim"] = shared(read, "hidden_size", "num_attention_heads")

    def __post_init__(self) -> None:
        super().__post_init__()
        between(self.max_position_embeddings, 1, sys.maxsize, "max_position_embeddings")
        between(self.rms_norm_eps, 0, 1, "rms_norm_eps")
        between(self.attention_dropout, 0, 1, "attention_dropout")
        if self.pad_token_id is not None:
            between(self.pad_token_id, -self.vocab_size, self.vocab_size - 1, "pad_token_id")
        divides(self.num_key_value_heads, self.num_attention_heads, "num_key_value_heads", "num_attention_heads")
        known_activation(self.hidden_act, "hidden_act")
        check_rope(self.rope_parameters, self.head_dim, self.max_position_embeddings)
        rope = self.rope_parameters
        if rope.get("rope_type", "default") != "default" and rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(
                f"rope_parameters: partial_rotary_factor is {rope['partial_rotary_factor']}, but this model"
                " rotates whole heads; remove it"
            )

    @property
    def windows(self) -> Sequence[int | None]:
        """The sliding window of each layer; None where a token sees everything before it."""
        return (None,) * self.num_hidden_layers


@dataclass(frozen=True, kw_only=True)
class LayeredWindowConfig(PreNormConfig):
    """Adds a window for some layers: those that `layer_types` names, or those from `max_window_layers` on."""

    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: Sequence = ()

    @classmethod
    def complete(cls, read: dict[str, Any]) -> None:
        super().complete(read)
        windowed = read.get("use_sliding_window", False) and read.get("sliding_window", 4096) is not None
        if read.get("layer_types") is None and isinstance(read.get("num_hidden_layers"), int):
            first = read.get("max_window_layers", 28) if windowed else read["num_hidden_layers"]
            read["layer_types"] = tuple(SLIDING if i >= first else FULL for i in range(read["num_hidden_layers"]))

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.layer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"layer_types has {len(self.layer_types)} entries for num_hidden_layers={self.num_hidden_layers}:"
                " name the type of every layer, or leave layer_types out"
            )
        unknown = set(self.layer_types) - {SLIDING, FULL}
        if unknown:
            raise ConfigError(f"layer_types holds {sorted(unknown)}; known are {SLIDING!r} and {FULL!r}")
        if SLIDING in self.layer_types:
            if self.sliding_window is None:
                raise ConfigError(f"layer_types names {SLIDING!r}, but sliding_window is not set")
            between(self.sliding_window, 1, sys.maxsize, "sliding_window")

    @property
    def windows(self) -> Sequence[int | None]:
        """The sliding window of each layer; None where a token sees everything before it."""
        return [self.sliding_window if each == SLIDING else None for each in self.layer_types]


class PreNormLayer(nn.Module):
    """z = x + attention(norm(x)); y = z + mlp(norm(z))."""

    def __init__(self, config: PreNormConfig, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self,
        x: Float[Tensor, "batch seq hidden"],
        rotary: tuple[Float[Tensor, "#batch seq rotary"], Float[Tensor, "#batch seq rotary"]] | None = None,
        mask: Mask = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        z = x + self.self_attn(self.input_layernorm(x), rotary, mask, cache)
        return z + self.mlp(self.post_attention_layernorm(z))


class PreNormRotary(RotaryEmbedding):
    """The tables of the rotation, computed once for all layers."""

    def __init__(self, config: PreNormConfig) -> None:
        whole = {**config.rope_parameters, "partial_rotary_factor": 1.0}  # the reference ignores the field here
        super().__init__(whole, config.head_dim, config.max_position_embeddings)


class PreNormModel(Decoder):
    """Embeddings, layers and a final norm; positions enter through the rotation alone. A subclass names its layer."""

    LAYER: ClassVar[type[Any]]

    def __init__(self, config: PreNormConfig) -> None:
        super().__init__(
            nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id),
            (self.LAYER(config, layer_idx) for layer_idx in range(config.num_hidden_layers)),
            RMSNorm(config.hidden_size, config.rms_norm_eps),
            PreNormRotary(config),
            windows=config.windows,
        )
