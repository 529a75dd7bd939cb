"""RWKV-4 (Peng et al. 2023, arXiv:2305.13048): attention whose scores decay with distance, carried as a recurrence.

Parameters carry the names that they have in a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from reimpl.cache import Cache
from reimpl.config import GENERIC, LARGEST_SIZE, Config, between
from reimpl.decoder import CausalLM
from reimpl.norm import LayerNorm
from reimpl.precision import wide
from reimpl.state import StateCache


@dataclass(frozen=True, kw_only=True)
class RwkvConfig(Config):
    """The fields of config.json that change what RWKV computes."""

    IRRELEVANT: ClassVar[Mapping[str, str]] = {
        **GENERIC,
        "context_length": "how long rows were in training; the recurrence has no limit",
        "pad_token_id": "no mask can keep padding out of the recurrence",
    }
    ONLY: ClassVar[Mapping[str, Any]] = {**Config.ONLY, "model_type": "rwkv"}
    SIZES: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "attention_hidden_size",
        "intermediate_size",
    )

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    attention_hidden_size: int
    intermediate_size: int
    layer_norm_epsilon: float = 1e-5
    rescale_every: int = 6
    tie_word_embeddings: bool = False
    pad_token_id: ClassVar[int | None] = None

    @classmethod
    def complete(cls, read: dict[str, Any]) -> None:
        hidden = read.get("hidden_size")
        if isinstance(hidden, int):
            if read.get("attention_hidden_size") is None:
                read["attention_hidden_size"] = hidden
            if read.get("intermediate_size") is None:
                read["intermediate_size"] = 4 * hidden

    def __post_init__(self) -> None:
        super().__post_init__()
        between(self.layer_norm_epsilon, 0, 1, "layer_norm_epsilon")
        between(self.rescale_every, 0, LARGEST_SIZE, "rescale_every")


def shifted(
    x: Float[Tensor, "batch seq hidden"], cache: StateCache | None, name: str
) -> Float[Tensor, "batch seq hidden"]:
    """For every token the one before it: zeros before the first, or what the cache holds under a name (section 3.1)."""
    held = None if cache is None else cache.get(name)
    before = torch.zeros_like(x[:, 0]) if held is None else held
    if cache is not None:
        cache.hold(0, **{name: x[:, -1]})
    return torch.cat([before[:, None], x[:, :-1]], dim=1)


def wkv(
    k: Float[Tensor, "batch seq inner"],
    v: Float[Tensor, "batch seq inner"],
    decay: Float[Tensor, " inner"],
    bonus: Float[Tensor, " inner"],
    state: tuple[Float[Tensor, "batch inner"], Float[Tensor, "batch inner"], Float[Tensor, "batch inner"]],
) -> tuple[
    Float[Tensor, "batch seq inner"],
    tuple[Float[Tensor, "batch inner"], Float[Tensor, "batch inner"], Float[Tensor, "batch inner"]],
]:
    """The mean of all values so far, by weights e^k that have decayed by e^decay per token (eq. 16, appendix D).

    The newest token's own weight is e^(bonus + k) instead. The state is the sum of weighted values and that of weights,
    both divided by e^exponent, the largest weight so far, so that nothing overflows.
    """
    total, weights, exponent = state
    outputs = []
    for k_t, v_t in zip(k.unbind(1), v.unbind(1), strict=True):
        highest = torch.maximum(exponent, bonus + k_t)
        old, new = torch.exp(exponent - highest), torch.exp(bonus + k_t - highest)
        outputs.append((old * total + new * v_t) / (old * weights + new))
        highest = torch.maximum(exponent + decay, k_t)
        old, new = torch.exp(exponent + decay - highest), torch.exp(k_t - highest)
        total, weights, exponent = old * total + new * v_t, old * weights + new, highest
    return torch.stack(outputs, dim=1), (total, weights, exponent)


class TimeMix(nn.Module):
    """What both mixers share: inputs between a token and the one before it, by a share per channel (eq. 11 to 13)."""

    def __init__(self, hidden: int, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(f"time_mix_{name}", nn.Parameter(torch.full((1, 1, hidden), 0.5)))

    def between(
        self, x: Float[Tensor, "batch seq hidden"], before: Float[Tensor, "batch seq hidden"], name: str
    ) -> Float[Tensor, "batch seq hidden"]:
        share = self.get_parameter(f"time_mix_{name}")
        return x * share + before * (1 - share)


class RwkvSelfAttention(TimeMix):
    """output(sigmoid(r) wkv(k, v)): the token mixer (eq. 11 to 14, 16 and 17)."""

    STATE: ClassVar[tuple[str, ...]] = ("total", "weights", "exponent")

    def __init__(self, config: RwkvConfig, layer_id: int = 0) -> None:
        super().__init__(config.hidden_size, "key", "value", "receptance")
        hidden, inner = config.hidden_size, config.attention_hidden_size
        self.time_decay = nn.Parameter(torch.zeros(inner))
        self.time_first = nn.Parameter(torch.zeros(inner))
        self.key = nn.Linear(hidden, inner, bias=False)
        self.value = nn.Linear(hidden, inner, bias=False)
        self.receptance = nn.Linear(hidden, inner, bias=False)
        self.output = nn.Linear(inner, hidden, bias=False)

    def forward(
        self, x: Float[Tensor, "batch seq hidden"], cache: StateCache | None = None
    ) -> Float[Tensor, "batch seq hidden"]:
        before = shifted(x, cache, "time_shift")
        r = torch.sigmoid(self.receptance(self.between(x, before, "receptance")))
        k = self.key(self.between(x, before, "key"))
        v = self.value(self.between(x, before, "value"))
        return self.output(r * self.recur(k, v, cache).to(r.dtype))

    def recur(
        self,
        k: Float[Tensor, "batch seq inner"],
        v: Float[Tensor, "batch seq inner"],
        cache: StateCache | None,
    ) -> Float[Tensor, "batch seq inner"]:
        """The weighted mean, in at least float32."""
        dtype = wide(k)
        k, v = k.to(dtype), v.to(dtype)
        held = [None if cache is None else cache.get(name) for name in self.STATE]
        zero = torch.zeros_like(k[:, 0])
        empty = (zero, zero, torch.full_like(zero, -torch.inf))
        total, weights, exponent = (start if state is None else state for state, start in zip(held, empty, strict=True))
        decay = -self.time_decay.to(dtype).exp()
        mean, state = wkv(k, v, decay, self.time_first.to(dtype), (total, weights, exponent))
        if cache is not None:
            cache.hold(k.shape[1], **dict(zip(self.STATE, state, strict=True)))
        return mean


class RwkvFeedForward(TimeMix):
    """sigmoid(r) value(max(k, 0)^2): the channel mixer, which looks one token back, too (eq. 18 to 20)."""

    def __init__(self, config: RwkvConfig, layer_id: int = 0) -> None:
        super().__init__(config.hidden_size, "key", "receptance")
        self.key = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.receptance = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.value = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(
        self, x: Float[Tensor, "batch seq hidden"], cache: StateCache | None = None
    ) -> Float[Tensor, "batch seq hidden"]:
        before = shifted(x, cache, "channel_shift")
        r = torch.sigmoid(self.receptance(self.between(x, before, "receptance")))
        k = self.key(self.between(x, before, "key"))
        return r * self.value(F.relu(k).square())


class RwkvBlock(nn.Module):
    """z = x + attention(norm(x)); y = z + feed_forward(norm(z)). The first block has a norm before all else."""

    def __init__(self, config: RwkvConfig, layer_id: int = 0) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_epsilon
        self.pre_ln = LayerNorm(size, eps) if layer_id == 0 else None
        self.ln1 = LayerNorm(size, eps)
        self.attention = RwkvSelfAttention(config, layer_id)
        self.ln2 = LayerNorm(size, eps)
        self.feed_forward = RwkvFeedForward(config, layer_id)

    def forward(
        self, x: Float[Tensor, "batch seq hidden"], cache: StateCache | None = None, scale: float = 1.0
    ) -> Float[Tensor, "batch seq hidden"]:
        """What the two mixers add is multiplied by `scale`, which is a power of two."""
        if self.pre_ln is not None:
            x = self.pre_ln(x)
        z = x + scale * self.attention(self.ln1(x), cache)
        return z + scale * self.feed_forward(self.ln2(z), cache)


class RwkvModel(nn.Module):
    """Embeddings, blocks and a final norm.

    In evaluation hidden states are halved every `rescale_every` blocks, and what later blocks add as often, so that
    half precision does not overflow. That changes nothing but how large epsilon is beside them.
    """

    def __init__(self, config: RwkvConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(RwkvBlock(config, layer_id) for layer_id in range(config.num_hidden_layers))
        self.ln_out = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.rescale_every = config.rescale_every

    def forward(
        self,
        ids: Int[Tensor, "batch seq"] | None = None,
        valid: Bool[Tensor, "batch total"] | None = None,
        positions: Int[Tensor, "#batch seq"] | None = None,
        cache: Cache | None = None,
        embeddings: Float[Tensor, "batch seq hidden"] | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Hidden states of new tokens, given by `ids` or by their `embeddings`.

        No token may be padding: there is no mask, so `valid` is only taken if it says so. `positions` are taken, and
        not needed.
        """
        if valid is not None and not valid.all():
            raise ValueError("RWKV takes no padding into account: give rows of one length, or one row at a time")
        h = self.embeddings(ids) if embeddings is None else embeddings
        every = 0 if self.training else self.rescale_every
        for index, block in enumerate(self.blocks):
            halvings = index // every if every else 0
            h = block(h, None if cache is None else cache[index], 0.5**halvings)
            if every and (index + 1) % every == 0:
                h = h / 2
        return self.ln_out(h)

    def make_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for this model, which is of one size for any number of tokens."""
        return Cache(StateCache() for _ in self.blocks)


class RwkvForCausalLM(CausalLM):
    """RWKV with its head, tied to the embeddings if the configuration says so."""

    CONFIG = RwkvConfig
    DECODER = RwkvModel
    BODY = "rwkv"
    EMBEDDINGS = "embeddings"
    HEAD = "head"
    DERIVED = ()
