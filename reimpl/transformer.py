"""The Transformer of the original paper (Vaswani et al. 2017, arXiv:1706.03762), encoder and decoder, as torch has it.

Norms follow the residual sums as in the paper, or stand before each part (`norm_first`; Xiong et al. 2020,
arXiv:2002.04745); beyond the paper, each stack ends in a norm. Embeddings, positions and a head are not part of it.
Parameters carry the names that they have in torch.nn. Inputs are batch first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from reimpl.attention import Bias, CrossAttention, MultiHead
from reimpl.cache import Cache, CrossCache, DecoderCache, GrowingCache
from reimpl.config import Config, between, divides, known_activation
from reimpl.feedforward import activation
from reimpl.mask import Mask, MemoryMask
from reimpl.norm import LayerNorm

SourceMask: TypeAlias = Bool[Tensor, "#batch #heads source source"] | None
"""Which tokens of the source see which."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Config):
    """The arguments of torch.nn.Transformer that change what it computes."""

    IRRELEVANT: ClassVar[Mapping[str, str]] = {}
    ONLY: ClassVar[Mapping[str, Any]] = {"model_type": "transformer"}
    SIZES: ClassVar[tuple[str, ...]] = (
        "d_model",
        "nhead",
        "num_encoder_layers",
        "num_decoder_layers",
        "dim_feedforward",
    )

    d_model: int = 512
    nhead: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    dim_feedforward: int = 2048
    dropout: float = 0.1
    activation: str = "relu"
    layer_norm_eps: float = 1e-5
    norm_first: bool = False
    final_norm: bool = True
    bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        divides(self.nhead, self.d_model, "nhead", "d_model")
        known_activation(self.activation, "activation")
        between(self.dropout, 0, 1, "dropout")
        between(self.layer_norm_eps, 0, 1, "layer_norm_eps")


def packed_projections(module: nn.Module, size: int, bias: bool) -> None:
    """Give a module the projections of queries, keys and values, one above the other, and that of the joined heads."""
    module.in_proj_weight = nn.Parameter(torch.empty(3 * size, size))
    module.register_parameter("in_proj_bias", nn.Parameter(torch.zeros(3 * size)) if bias else None)
    module.out_proj = nn.Linear(size, size, bias=bias)
    nn.init.xavier_uniform_(module.in_proj_weight)


class MultiheadAttention(MultiHead):
    """Concat(head_1, ..., head_h) W^O of a sequence to itself (section 3.2.2)."""

    in_proj_weight: Tensor
    in_proj_bias: Tensor | None
    out_proj: nn.Linear

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.d_model // config.nhead, dropout=config.dropout)
        packed_projections(self, config.d_model, config.bias)

    def forward(
        self,
        x: Float[Tensor, "batch seq size"],
        bias: Bias = None,
        mask: Mask = None,
        cache: GrowingCache | None = None,
    ) -> Float[Tensor, "batch seq size"]:
        q, k, v = map(self.split, F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1))
        if cache is not None:
            k, v = cache.append(k, v)
        return self.out_proj(self.mix(q, k, v, mask, bias))


class MemoryAttention(CrossAttention):
    """The same over a memory (section 3.2.3): it makes keys and values, the sequence the queries."""

    in_proj_weight: Tensor
    in_proj_bias: Tensor | None
    out_proj: nn.Linear

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.d_model // config.nhead, dropout=config.dropout)
        packed_projections(self, config.d_model, config.bias)

    def forward(
        self,
        x: Float[Tensor, "batch seq size"],
        memory: Float[Tensor, "batch memory size"],
        mask: MemoryMask = None,
        cache: CrossCache | None = None,
    ) -> Float[Tensor, "batch seq size"]:
        return self.out_proj(super().forward(x, memory, mask, cache))

    def query_heads(self, x: Float[Tensor, "batch seq size"]) -> Float[Tensor, "batch heads seq dim"]:
        return self.split(self._in(x, slice(0, x.shape[-1])))

    def project(
        self, memory: Float[Tensor, "batch memory size"]
    ) -> tuple[Float[Tensor, "batch heads memory dim"], Float[Tensor, "batch heads memory dim"]]:
        keys, values = self._in(memory, slice(memory.shape[-1], None)).chunk(2, dim=-1)
        return self.split(keys), self.split(values)

    def _in(self, x: Tensor, rows: slice) -> Tensor:
        bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
        return F.linear(x, self.in_proj_weight[rows], bias)


class WithFFN(nn.Module):
    """What holds W_2 act(W_1 x + b_1) + b_2 (section 3.3), with a dropout behind act, which the paper has not."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.linear1 = nn.Linear(config.d_model, config.dim_feedforward, bias=config.bias)
        self.linear2 = nn.Linear(config.dim_feedforward, config.d_model, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.act = activation(config.activation)

    def ffn(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        return self.linear2(self.dropout(self.act(self.linear1(x))))


class FFN(WithFFN):
    """That alone."""

    def forward(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        return self.ffn(x)


class TransformerEncoderLayer(WithFFN):
    """z = norm(x + attention(x)); y = norm(z + ffn(z)); with `norm_first`, z = x + attention(norm(x)) and so on.

    What a part gives passes a dropout before it is added (section 5.4).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.norm_first = config.norm_first
        self.self_attn = MultiheadAttention(config)
        self.norm1 = LayerNorm(config.d_model, config.layer_norm_eps, config.bias)
        self.norm2 = LayerNorm(config.d_model, config.layer_norm_eps, config.bias)
        self.dropout1 = nn.Dropout(config.dropout)
        self.dropout2 = nn.Dropout(config.dropout)

    def forward(self, x: Float[Tensor, "batch seq size"], mask: Mask = None) -> Float[Tensor, "batch seq size"]:
        if self.norm_first:
            z = x + self.dropout1(self.self_attn(self.norm1(x), mask=mask))
            return z + self.dropout2(self.ffn(self.norm2(z)))
        z = self.norm1(x + self.dropout1(self.self_attn(x, mask=mask)))
        return self.norm2(z + self.dropout2(self.ffn(z)))


class TransformerDecoderLayer(WithFFN):
    """The same with attention to a memory between the two parts: three residual sums, three norms."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.norm_first = config.norm_first
        self.self_attn = MultiheadAttention(config)
        self.multihead_attn = MemoryAttention(config)
        self.norm1 = LayerNorm(config.d_model, config.layer_norm_eps, config.bias)
        self.norm2 = LayerNorm(config.d_model, config.layer_norm_eps, config.bias)
        self.norm3 = LayerNorm(config.d_model, config.layer_norm_eps, config.bias)
        self.dropout1 = nn.Dropout(config.dropout)
        self.dropout2 = nn.Dropout(config.dropout)
        self.dropout3 = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Float[Tensor, "batch seq size"],
        memory: Float[Tensor, "batch memory size"],
        mask: Mask = None,
        memory_mask: MemoryMask = None,
        cache: DecoderCache | None = None,
    ) -> Float[Tensor, "batch seq size"]:
        own, cross = (None, None) if cache is None else (cache.own, cache.cross)
        if self.norm_first:
            z = x + self.dropout1(self.self_attn(self.norm1(x), mask=mask, cache=own))
            z = z + self.dropout2(self.multihead_attn(self.norm2(z), memory, memory_mask, cross))
            return z + self.dropout3(self.ffn(self.norm3(z)))
        z = self.norm1(x + self.dropout1(self.self_attn(x, mask=mask, cache=own)))
        z = self.norm2(z + self.dropout2(self.multihead_attn(z, memory, memory_mask, cross)))
        return self.norm3(z + self.dropout3(self.ffn(z)))


class TransformerEncoder(nn.Module):
    """Layers, and a final norm unless the configuration has none."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerEncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.norm = final_norm(config)

    def forward(self, x: Float[Tensor, "batch seq size"], mask: Mask = None) -> Float[Tensor, "batch seq size"]:
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class TransformerDecoder(nn.Module):
    """The same of layers that attend to a memory."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerDecoderLayer(config) for _ in range(config.num_decoder_layers))
        self.norm = final_norm(config)

    def forward(
        self,
        x: Float[Tensor, "batch seq size"],
        memory: Float[Tensor, "batch memory size"],
        mask: Mask = None,
        memory_mask: MemoryMask = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch seq size"]:
        for index, layer in enumerate(self.layers):
            x = layer(x, memory, mask, memory_mask, None if cache is None else cache[index])
        return self.norm(x)

    def make_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for this decoder, with room for `capacity` tokens where the number is known."""
        return Cache(DecoderCache(capacity) for _ in self.layers)


def final_norm(config: TransformerConfig) -> nn.Module:
    """What a stack ends in."""
    return LayerNorm(config.d_model, config.layer_norm_eps, config.bias) if config.final_norm else nn.Identity()


class Transformer(nn.Module):
    """decoder(target, encoder(source))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.encoder = TransformerEncoder(config)
        self.decoder = TransformerDecoder(config)

    def forward(
        self,
        source: Float[Tensor, "batch source size"],
        target: Float[Tensor, "batch seq size"],
        source_mask: SourceMask = None,
        mask: Mask = None,
        memory_mask: MemoryMask = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch seq size"]:
        """Hidden states of the target's new tokens. Once the cache holds some, the source is not read again."""
        memory = source if cache is not None and cache.length else self.encoder(source, source_mask)
        return self.decoder(target, memory, mask, memory_mask, cache)

    def make_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for the decoder, with room for `capacity` tokens where the number is known."""
        return self.decoder.make_cache(capacity)
