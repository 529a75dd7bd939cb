"""GPT-2 (Radford et al. 2019, *Language Models are Unsupervised Multitask Learners*, section 2.3).

Parameters carry the names that they have in a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from reimpl.attention import CrossAttention, MultiHead, check_memory
from reimpl.cache import Cache, CrossCache, DecoderCache, GrowingCache
from reimpl.config import GENERIC, LABELS, Config, between, divides, known_activation
from reimpl.decoder import CausalLM, decoder_mask
from reimpl.feedforward import activation
from reimpl.mask import Mask, MemoryMask, bidirectional
from reimpl.norm import LayerNorm
from reimpl.position import LearnedPosition


@dataclass(frozen=True, kw_only=True)
class GPT2Config(Config):
    """The fields of config.json that change what GPT-2 computes."""

    IRRELEVANT: ClassVar[Mapping[str, str]] = {
        **GENERIC,
        **dict.fromkeys(("summary_type", "summary_use_proj", "summary_activation"), LABELS),
        **dict.fromkeys(("summary_proj_to_labels", "summary_first_dropout"), LABELS),
        "n_ctx": "the old name of n_positions",
        "is_decoder": "it always is one",
    }
    ONLY: ClassVar[Mapping[str, Any]] = {**Config.ONLY, "model_type": "gpt2"}
    SIZES: ClassVar[tuple[str, ...]] = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "inner")

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    add_cross_attention: bool = False
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        divides(self.n_head, self.n_embd, "n_head", "n_embd")
        known_activation(self.activation_function, "activation_function")
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "layer_norm_epsilon"):
            between(getattr(self, name), 0, 1, name)

    @property
    def hidden_size(self) -> int:
        """What other models call n_embd."""
        return self.n_embd

    @property
    def num_hidden_layers(self) -> int:
        """What other models call n_layer."""
        return self.n_layer

    @property
    def inner(self) -> int:
        """Channels between the two matrices of the feed-forward layer."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    def attention_scale(self, layer_idx: int) -> float:
        """What scores are multiplied with. Mistral's GPT-2 shrinks it from layer to layer."""
        scale = (self.n_embd // self.n_head) ** -0.5 if self.scale_attn_weights else 1.0
        return scale / (layer_idx + 1) if self.scale_attn_by_inverse_layer_idx else scale


class Conv1D(nn.Module):
    """x W + b with W stored as [in, out], the transpose of what `nn.Linear` stores."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        return F.linear(x, self.weight.mT, self.bias)


class GPT2Attention(MultiHead):
    """Multi-head attention whose queries, keys and values come out of one projection, block by block."""

    def __init__(self, config: GPT2Config, layer_idx: int = 0) -> None:
        super().__init__(
            config.n_embd // config.n_head,
            config.attention_scale(layer_idx),
            config.attn_pdrop,
            upcast=config.reorder_and_upcast_attn,
        )
        self.c_attn = Conv1D(config.n_embd, 3 * config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(
        self, x: Float[Tensor, "batch seq hidden"], mask: Mask = None, cache: GrowingCache | None = None
    ) -> Float[Tensor, "batch seq hidden"]:
        q, k, v = map(self.split, self.c_attn(x).chunk(3, dim=-1))
        if cache is not None:
            k, v = cache.append(k, v)
        return self.resid_dropout(self.c_proj(self.mix(q, k, v, mask)))


class GPT2CrossAttention(CrossAttention):
    """The same over a memory: its own projection for queries, one for keys and values."""

    def __init__(self, config: GPT2Config, layer_idx: int = 0) -> None:
        super().__init__(
            config.n_embd // config.n_head,
            config.attention_scale(layer_idx),
            config.attn_pdrop,
            upcast=config.reorder_and_upcast_attn,
        )
        self.q_attn = Conv1D(config.n_embd, config.n_embd)
        self.c_attn = Conv1D(config.n_embd, 2 * config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(
        self,
        x: Float[Tensor, "batch seq hidden"],
        memory: Float[Tensor, "batch memory hidden"],
        mask: MemoryMask = None,
        cache: CrossCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        return self.resid_dropout(self.c_proj(super().forward(x, memory, mask, cache)))

    def query_heads(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch heads seq dim"]:
        return self.split(self.q_attn(x))

    def project(
        self, memory: Float[Tensor, "batch memory hidden"]
    ) -> tuple[Float[Tensor, "batch heads memory dim"], Float[Tensor, "batch heads memory dim"]]:
        keys, values = self.c_attn(memory).chunk(2, dim=-1)
        return self.split(keys), self.split(values)


class GPT2MLP(nn.Module):
    """Out(act(In(x)))."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.n_embd, config.inner)
        self.c_proj = Conv1D(config.inner, config.n_embd)
        self.act = activation(config.activation_function)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class GPT2Block(nn.Module):
    """z = x + attention(norm(x)); y = z + mlp(norm(z)). Attention to a memory, if there is one, stands between them."""

    def __init__(self, config: GPT2Config, layer_idx: int = 0) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, layer_idx)
        self.crosses = config.add_cross_attention
        if self.crosses:
            self.ln_cross_attn = LayerNorm(config.n_embd, config.layer_norm_epsilon)
            self.crossattention = GPT2CrossAttention(config, layer_idx)
        self.ln_2 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config)

    def forward(
        self,
        x: Float[Tensor, "batch seq hidden"],
        mask: Mask = None,
        cache: GrowingCache | DecoderCache | None = None,
        memory: Float[Tensor, "batch memory hidden"] | None = None,
        memory_mask: MemoryMask = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        check_memory(memory, self.crosses)
        own, cross = (cache.own, cache.cross) if isinstance(cache, DecoderCache) else (cache, None)
        z = x + self.attn(self.ln_1(x), mask, own)
        if memory is not None:
            z = z + self.crossattention(self.ln_cross_attn(z), memory, memory_mask, cross)
        return z + self.mlp(self.ln_2(z))


class GPT2Model(nn.Module):
    """Token and position embeddings, blocks, a final norm."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = LearnedPosition(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(GPT2Block(config, layer_idx) for layer_idx in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.crosses = config.add_cross_attention

    def forward(
        self,
        ids: Int[Tensor, "batch seq"] | None = None,
        valid: Bool[Tensor, "batch total"] | None = None,
        positions: Int[Tensor, "#batch seq"] | None = None,
        cache: Cache | None = None,
        embeddings: Float[Tensor, "batch seq hidden"] | None = None,
        token_types: Int[Tensor, "batch seq"] | None = None,
        memory: Float[Tensor, "batch memory hidden"] | None = None,
        memory_valid: Bool[Tensor, "batch memory"] | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Hidden states of new tokens, as `reimpl.decoder.Decoder` describes it.

        `token_types` are looked up among the tokens, which GPT-2 has in place of a table of their own. The blocks
        attend to an encoder's `memory` too, given at every step, if the configuration has add_cross_attention.
        """
        h = self.wte(ids) if embeddings is None else embeddings
        seen, new = 0 if cache is None else cache.length, h.shape[1]
        mask = decoder_mask(new, seen, valid, positions if cache is None else None, h.device)
        h = h + self.wpe(torch.arange(seen, seen + new, device=h.device)[None] if positions is None else positions)
        h = self.drop(h if token_types is None else h + self.wte(token_types))
        memory_mask = bidirectional(memory_valid, new)
        for index, block in enumerate(self.h):
            h = block(h, mask, None if cache is None else cache[index], memory, memory_mask)
        return self.ln_f(h)

    def make_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for this model, with room for `capacity` tokens where the number is known."""
        return Cache((DecoderCache if self.crosses else GrowingCache)(capacity) for _ in self.h)


class GPT2LMHeadModel(CausalLM):
    """GPT-2 with its head, tied to the token embeddings unless the configuration says otherwise."""

    CONFIG = GPT2Config
    DECODER = GPT2Model
    BODY = "transformer"
    EMBEDDINGS = "wte"
    DERIVED = (".attn.bias", ".attn.masked_bias", ".crossattention.bias", ".crossattention.masked_bias")
