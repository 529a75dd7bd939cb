"""BLOOM (BigScience 2022, arXiv:2211.05100, section 3.2): ALiBi in place of positions, a norm behind the embeddings.

Parameters carry the names that they have in a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from reimpl.attention import Bias, MultiHead
from reimpl.cache import Cache, GrowingCache
from reimpl.config import GENERIC, Config, between, divides
from reimpl.decoder import CausalLM, decoder_mask
from reimpl.mask import Mask
from reimpl.norm import LayerNorm
from reimpl.position import alibi_bias, alibi_slopes
from reimpl.precision import wide

ALIASES: Mapping[str, str] = {"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
"""Names in the published config.json, and today's."""
KERNELS = "equal results, computed otherwise"


@dataclass(frozen=True, kw_only=True)
class BloomConfig(Config):
    """The fields of config.json that change what BLOOM computes."""

    IRRELEVANT: ClassVar[Mapping[str, str]] = {
        **GENERIC,
        **dict.fromkeys(("pretraining_tp", "slow_but_exact"), "equal results, computed in slices"),
        **dict.fromkeys(("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion"), KERNELS),
        **dict.fromkeys(("skip_bias_add", "skip_bias_add_qkv"), KERNELS),
        **dict.fromkeys(("offset_alibi", "seq_length"), "distances have no limit"),
        "n_inner": "four times hidden_size, whatever it says",
        "pad_token_id": "the embedding of padding is one like others",
        "unk_token_id": "the tokenizer's",
    }
    ONLY: ClassVar[Mapping[str, Any]] = {**Config.ONLY, "model_type": "bloom"}
    SIZES: ClassVar[tuple[str, ...]] = ("vocab_size", "hidden_size", "n_layer", "n_head")

    vocab_size: int
    hidden_size: int
    n_layer: int
    n_head: int
    layer_norm_epsilon: float = 1e-5
    apply_residual_connection_post_layernorm: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "BloomConfig":
        """Read the fields of a config.json, raising ConfigError where one is unknown, missing or of no use."""
        renamed = {ALIASES[name]: value for name, value in mapping.items() if name in ALIASES}
        return super().from_dict({**renamed, **{name: mapping[name] for name in mapping.keys() - ALIASES.keys()}})

    def __post_init__(self) -> None:
        super().__post_init__()
        divides(self.n_head, self.hidden_size, "n_head", "hidden_size")
        for name in ("hidden_dropout", "attention_dropout", "layer_norm_epsilon"):
            between(getattr(self, name), 0, 1, name)

    @property
    def num_hidden_layers(self) -> int:
        """What other models call n_layer."""
        return self.n_layer


class BloomAttention(MultiHead):
    """Multi-head attention with ALiBi. One projection makes queries, keys and values, head by head."""

    def __init__(self, config: BloomConfig, layer_idx: int = 0) -> None:
        super().__init__(config.hidden_size // config.n_head, dropout=config.attention_dropout)
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.hidden_dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        x: Float[Tensor, "batch seq hidden"],
        bias: Bias = None,
        mask: Mask = None,
        cache: GrowingCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        q, k, v = self.query_key_value(x).unflatten(-1, (-1, 3, self.head_dim)).transpose(1, 2).unbind(-2)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.hidden_dropout(self.dense(self.mix(q, k, v, mask, bias)))


class BloomGelu(torch.autograd.Function):
    """GELU by tanh (arXiv:1606.08415, section 2), with sqrt(2/pi) cut to eight digits.

    Its gradient has a coefficient of its own, three times the cubic one cut to ten digits, so that it is that of its
    value to eleven digits only; BLOOM was trained with it (gap bloom-gelu).
    """

    LINEAR, CUBIC, THREE_CUBIC = 0.79788456, 0.044715, 0.1070322243

    @staticmethod
    def forward(ctx: Any, x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        ctx.save_for_backward(x)
        return x / 2 * (1 + BloomGelu.inner(x))

    @staticmethod
    def inner(x: Tensor) -> Tensor:
        return torch.tanh(BloomGelu.LINEAR * x * (1 + BloomGelu.CUBIC * x * x))

    @staticmethod
    def backward(ctx: Any, gradient: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        (x,) = ctx.saved_tensors
        inner = BloomGelu.inner(x)
        slope = BloomGelu.LINEAR + BloomGelu.THREE_CUBIC * x * x
        return gradient * ((1 + inner) + x * (1 - inner * inner) * slope) / 2


class BloomMLP(nn.Module):
    """Down(gelu(up(x))), four times as wide between the two."""

    def __init__(self, config: BloomConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.dense_4h_to_h = nn.Linear(4 * config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        return self.dropout(self.dense_4h_to_h(BloomGelu.apply(self.dense_h_to_4h(x))))


class BloomBlock(nn.Module):
    """z = x + attention(norm(x)); y = z + mlp(norm(z)), or with the normed x and z in place of those that are added."""

    def __init__(self, config: BloomConfig, layer_idx: int = 0) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.self_attention = BloomAttention(config, layer_idx)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = BloomMLP(config)
        self.adds_normed = config.apply_residual_connection_post_layernorm

    def forward(
        self,
        x: Float[Tensor, "batch seq hidden"],
        bias: Bias = None,
        mask: Mask = None,
        cache: GrowingCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        normed = self.input_layernorm(x)
        z = (normed if self.adds_normed else x) + self.self_attention(normed, bias, mask, cache)
        normed = self.post_attention_layernorm(z)
        return (normed if self.adds_normed else z) + self.mlp(normed)


class BloomModel(nn.Module):
    """Normed embeddings, blocks that learn of positions through ALiBi alone, a final norm."""

    def __init__(self, config: BloomConfig) -> None:
        super().__init__()
        self.heads = config.n_head
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.word_embeddings_layernorm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.h = nn.ModuleList(BloomBlock(config, layer_idx) for layer_idx in range(config.n_layer))
        self.ln_f = LayerNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(
        self,
        ids: Int[Tensor, "batch seq"] | None = None,
        valid: Bool[Tensor, "batch total"] | None = None,
        positions: Int[Tensor, "#batch seq"] | None = None,
        cache: Cache | None = None,
        embeddings: Float[Tensor, "batch seq hidden"] | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Hidden states of new tokens, as `reimpl.decoder.Decoder` describes it.

        Distances between tokens count those that are `valid`; `positions` do nothing but separate documents.
        """
        h = self.word_embeddings(ids) if embeddings is None else embeddings
        seen, new = 0 if cache is None else cache.length, h.shape[1]
        mask = decoder_mask(new, seen, valid, positions if cache is None else None, h.device)
        keys = torch.arange(seen + new, device=h.device)[None] if valid is None else valid.cumsum(-1)
        alibi = alibi_bias(alibi_slopes(self.heads, wide(h)).to(h.device), keys[:, seen:], keys).to(h.dtype)
        h = self.word_embeddings_layernorm(h)
        for index, block in enumerate(self.h):
            h = block(h, alibi, mask, None if cache is None else cache[index])
        return self.ln_f(h)

    def make_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for this model, with room for `capacity` tokens where the number is known."""
        return Cache(GrowingCache(capacity) for _ in self.h)


class BloomForCausalLM(CausalLM):
    """BLOOM with its head, tied to the embeddings unless the configuration says otherwise."""

    CONFIG = BloomConfig
    DECODER = BloomModel
    BODY = "transformer"
    EMBEDDINGS = "word_embeddings"
    DERIVED = ()
