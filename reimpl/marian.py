"""Marian's encoder and decoder (Junczys-Dowmunt et al. 2018, arXiv:1804.00344): the original Transformer, translating.

Norms follow the residual sums, and no stack ends in one. Positions are sines, then cosines, each in half of the
channels, where the original paper (Vaswani et al. 2017, arXiv:1706.03762, section 3.5) interleaves them. Parameters
carry the names that they have in a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from reimpl.attention import CrossAttention, MultiHead
from reimpl.cache import Cache, CrossCache, DecoderCache, GrowingCache
from reimpl.config import DECODING, GENERIC, TRAINING, Config, between, divides, known_activation
from reimpl.decoder import decoder_mask
from reimpl.feedforward import activation
from reimpl.mask import Mask, MemoryMask, bidirectional
from reimpl.norm import LayerNorm
from reimpl.position import sinusoidal

EPS = 1e-5  # of all norms; no field says it


@dataclass(frozen=True, kw_only=True)
class MarianConfig(Config):
    """The fields of config.json that change what Marian's encoder and decoder compute."""

    IRRELEVANT: ClassVar[Mapping[str, str]] = {
        **GENERIC,
        **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop", "init_std", "num_hidden_layers"), TRAINING),
        **dict.fromkeys(("decoder_vocab_size", "share_encoder_decoder_embeddings"), "the embeddings of both together"),
        "tie_word_embeddings": "the head's",
        "decoder_start_token_id": DECODING,
    }
    ONLY: ClassVar[Mapping[str, Any]] = {**Config.ONLY, "model_type": "marian", "is_encoder_decoder": True}
    SIZES: ClassVar[tuple[str, ...]] = (
        *("vocab_size", "d_model", "max_position_embeddings"),
        *("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
        *("decoder_layers", "decoder_attention_heads", "decoder_ffn_dim"),
    )

    vocab_size: int
    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_layers: int
    decoder_attention_heads: int
    decoder_ffn_dim: int
    max_position_embeddings: int = 1024
    activation_function: str = "gelu"
    scale_embedding: bool = False
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    pad_token_id: int = 58100

    def __post_init__(self) -> None:
        super().__post_init__()
        for heads in ("encoder_attention_heads", "decoder_attention_heads"):
            divides(getattr(self, heads), self.d_model, heads, "d_model")
        for rate in ("dropout", "attention_dropout", "activation_dropout"):
            between(getattr(self, rate), 0, 1, rate)
        between(self.pad_token_id, -self.vocab_size, self.vocab_size - 1, "pad_token_id")
        known_activation(self.activation_function, "activation_function")


def projections(module: nn.Module, size: int) -> None:
    """Give a module the projections of queries, keys and values, and that of the joined heads."""
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        module.add_module(name, nn.Linear(size, size))


class MarianAttention(MultiHead):
    """Multi-head attention of a sequence to itself."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear

    def __init__(self, config: MarianConfig, heads: int) -> None:
        super().__init__(config.d_model // heads, dropout=config.attention_dropout)
        projections(self, config.d_model)

    def forward(
        self, x: Float[Tensor, "batch seq size"], mask: Mask = None, cache: GrowingCache | None = None
    ) -> Float[Tensor, "batch seq size"]:
        k, v = self.split(self.k_proj(x)), self.split(self.v_proj(x))
        if cache is not None:
            k, v = cache.append(k, v)
        return self.out_proj(self.mix(self.split(self.q_proj(x)), k, v, mask))


class MarianMemoryAttention(CrossAttention):
    """The same over a memory."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear

    def __init__(self, config: MarianConfig, heads: int) -> None:
        super().__init__(config.d_model // heads, dropout=config.attention_dropout)
        projections(self, config.d_model)

    def forward(
        self,
        x: Float[Tensor, "batch seq size"],
        memory: Float[Tensor, "batch memory size"],
        mask: MemoryMask = None,
        cache: CrossCache | None = None,
    ) -> Float[Tensor, "batch seq size"]:
        return self.out_proj(super().forward(x, memory, mask, cache))

    def query_heads(self, x: Float[Tensor, "batch seq size"]) -> Float[Tensor, "batch heads seq dim"]:
        return self.split(self.q_proj(x))

    def project(
        self, memory: Float[Tensor, "batch memory size"]
    ) -> tuple[Float[Tensor, "batch heads memory dim"], Float[Tensor, "batch heads memory dim"]]:
        return self.split(self.k_proj(memory)), self.split(self.v_proj(memory))


class MarianLayer(nn.Module):
    """What layers of both stacks have: attention to themselves, a feed-forward part, a norm behind each."""

    def __init__(self, config: MarianConfig, heads: int, hidden: int) -> None:
        super().__init__()
        self.self_attn = MarianAttention(config, heads)
        self.self_attn_layer_norm = LayerNorm(config.d_model, EPS)
        self.fc1 = nn.Linear(config.d_model, hidden)
        self.fc2 = nn.Linear(hidden, config.d_model)
        self.final_layer_norm = LayerNorm(config.d_model, EPS)
        self.act = activation(config.activation_function)
        self.activation_dropout = nn.Dropout(config.activation_dropout)
        self.dropout = nn.Dropout(config.dropout)

    def ffn(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        return self.fc2(self.activation_dropout(self.act(self.fc1(x))))


class MarianEncoderLayer(MarianLayer):
    """z = norm(x + attention(x)); y = norm(z + ffn(z))."""

    def __init__(self, config: MarianConfig) -> None:
        super().__init__(config, config.encoder_attention_heads, config.encoder_ffn_dim)

    def forward(self, x: Float[Tensor, "batch seq size"], mask: Mask = None) -> Float[Tensor, "batch seq size"]:
        z = self.self_attn_layer_norm(x + self.dropout(self.self_attn(x, mask)))
        return self.final_layer_norm(z + self.dropout(self.ffn(z)))


class MarianDecoderLayer(MarianLayer):
    """The same with attention to the encoder's memory between the two."""

    def __init__(self, config: MarianConfig) -> None:
        super().__init__(config, config.decoder_attention_heads, config.decoder_ffn_dim)
        self.encoder_attn = MarianMemoryAttention(config, config.decoder_attention_heads)
        self.encoder_attn_layer_norm = LayerNorm(config.d_model, EPS)

    def forward(
        self,
        x: Float[Tensor, "batch seq size"],
        memory: Float[Tensor, "batch memory size"],
        mask: Mask = None,
        memory_mask: MemoryMask = None,
        cache: DecoderCache | None = None,
    ) -> Float[Tensor, "batch seq size"]:
        own, cross = (None, None) if cache is None else (cache.own, cache.cross)
        z = self.self_attn_layer_norm(x + self.dropout(self.self_attn(x, mask, own)))
        z = self.encoder_attn_layer_norm(z + self.dropout(self.encoder_attn(z, memory, memory_mask, cross)))
        return self.final_layer_norm(z + self.dropout(self.ffn(z)))


class MarianEmbeddings(nn.Module):
    """What stacks begin with: tokens, times sqrt(d_model) with scale_embedding, plus the sinusoids of positions."""

    def __init__(self, config: MarianConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.scale = config.d_model**0.5 if config.scale_embedding else 1.0
        self.limit = config.max_position_embeddings
        self.dropout = nn.Dropout(config.dropout)

    def embed(
        self, ids: Int[Tensor, "batch seq"] | None, embeddings: Float[Tensor, "batch seq size"] | None, seen: int
    ) -> Float[Tensor, "batch seq size"]:
        """Of tokens that follow `seen` others, given by `ids` or by their `embeddings`."""
        words = self.embed_tokens(ids) if embeddings is None else embeddings
        positions = torch.arange(seen, seen + words.shape[1], device=words.device)
        if seen + len(positions) > self.limit:
            raise IndexError(
                f"positions {seen} to {seen + len(positions) - 1} do not fit max_position_embeddings of {self.limit}:"
                f" shorten the input to at most {self.limit} tokens, with those cached"
            )
        table = sinusoidal(positions, words.shape[-1], layout="halved").to(words.dtype)
        return self.dropout(words * self.scale + table)


class MarianEncoder(MarianEmbeddings):
    """Embeddings and layers; every token sees every other."""

    def __init__(self, config: MarianConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(MarianEncoderLayer(config) for _ in range(config.encoder_layers))

    def forward(
        self,
        ids: Int[Tensor, "batch seq"] | None = None,
        valid: Bool[Tensor, "batch seq"] | None = None,
        embeddings: Float[Tensor, "batch seq size"] | None = None,
    ) -> Float[Tensor, "batch seq size"]:
        """Hidden states of tokens, given by `ids` or by their `embeddings`; `valid` tells them from padding."""
        h = self.embed(ids, embeddings, seen=0)
        mask = bidirectional(valid, h.shape[1])
        for layer in self.layers:
            h = layer(h, mask)
        return h


class MarianDecoder(MarianEmbeddings):
    """Embeddings and layers that attend to an encoder's memory; a token sees itself and those before it."""

    def __init__(self, config: MarianConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(MarianDecoderLayer(config) for _ in range(config.decoder_layers))

    def forward(
        self,
        ids: Int[Tensor, "batch seq"] | None = None,
        valid: Bool[Tensor, "batch total"] | None = None,
        cache: Cache | None = None,
        embeddings: Float[Tensor, "batch seq size"] | None = None,
        *,
        memory: Float[Tensor, "batch memory size"],
        memory_valid: Bool[Tensor, "batch memory"] | None = None,
    ) -> Float[Tensor, "batch seq size"]:
        """Hidden states of new tokens. Positions count all tokens, padding too, those in the cache included."""
        seen = 0 if cache is None else cache.length
        h = self.embed(ids, embeddings, seen)
        mask = decoder_mask(h.shape[1], seen, valid, None, h.device)
        memory_mask = bidirectional(memory_valid, h.shape[1])
        for index, layer in enumerate(self.layers):
            h = layer(h, memory, mask, memory_mask, None if cache is None else cache[index])
        return h

    def make_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for this decoder, with room for `capacity` tokens where the number is known."""
        return Cache(DecoderCache(capacity) for _ in self.layers)
