"""Mamba (Gu and Dao 2023, arXiv:2312.00752): a state space whose steps depend on the token, token after token.

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
from reimpl.config import GENERIC, TRAINING, Config, ConfigError, between, known_activation
from reimpl.decoder import CausalLM
from reimpl.feedforward import activation
from reimpl.norm import RMSNorm
from reimpl.precision import wide
from reimpl.state import StateCache

MambaRMSNorm = RMSNorm
ANOTHER_NAME = "another name of a size"
INITIAL_STEPS = (
    "rescale_prenorm_residual",
    "time_step_floor",
    "time_step_init_scheme",
    "time_step_max",
    "time_step_min",
    "time_step_scale",
)
"""Fields that say what training begins with."""


@dataclass(frozen=True, kw_only=True)
class MambaConfig(Config):
    """The fields of config.json that change what Mamba computes."""

    IRRELEVANT: ClassVar[Mapping[str, str]] = {
        **GENERIC,
        **dict.fromkeys(("d_inner", "d_model", "n_layer"), ANOTHER_NAME),
        **dict.fromkeys(INITIAL_STEPS, TRAINING),
        **dict.fromkeys(("fused_add_norm", "use_associative_scan", "use_mambapy"), "equal results, computed otherwise"),
        "expand": "intermediate_size is so many times hidden_size",
        "pad_vocab_size_multiple": "vocab_size is one already",
    }
    ONLY: ClassVar[Mapping[str, Any]] = {**Config.ONLY, "model_type": "mamba", "rms_norm": True, "ssm_cfg": {}}
    SIZES: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "state_size",
        "conv_kernel",
        "time_step_rank",
    )

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    state_size: int = 16
    conv_kernel: int = 4
    time_step_rank: int
    layer_norm_epsilon: float = 1e-5
    hidden_act: str = "silu"
    use_bias: bool = False
    use_conv_bias: bool = True
    residual_in_fp32: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0

    @classmethod
    def complete(cls, read: dict[str, Any]) -> None:
        hidden = read.get("hidden_size")
        if read.get("time_step_rank") in (None, "auto") and isinstance(hidden, int):
            read["time_step_rank"] = -(-hidden // 16)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "MambaConfig":
        hidden, expand = mapping.get("hidden_size"), mapping.get("expand", 2)
        given = dict(mapping)
        if given.get("intermediate_size") is None and isinstance(hidden, int) and isinstance(expand, int | float):
            given["intermediate_size"] = int(expand * hidden)
        return super().from_dict(given)

    def __post_init__(self) -> None:
        super().__post_init__()
        known_activation(self.hidden_act, "hidden_act")
        between(self.layer_norm_epsilon, 0, 1, "layer_norm_epsilon")
        if self.pad_token_id is not None:
            between(self.pad_token_id, -self.vocab_size, self.vocab_size - 1, "pad_token_id")
        if self.time_step_rank > self.intermediate_size:
            raise ConfigError(
                f"time_step_rank is {self.time_step_rank}, more than intermediate_size, {self.intermediate_size}, whose"
                " steps it makes: correct it"
            )


class CausalConv(nn.Conv1d):
    """Every channel along the tokens by itself: each sees the kernel's last tokens, the newest of them itself."""

    def __init__(self, channels: int, kernel: int, bias: bool) -> None:
        super().__init__(channels, channels, kernel, groups=channels, bias=bias)

    def forward(
        self, u: Float[Tensor, "batch seq channels"], cache: StateCache | None = None
    ) -> Float[Tensor, "batch seq channels"]:
        """The cache holds as many tokens as the kernel spans, the first of which no later one needs."""
        (kernel,) = self.kernel_size
        held = None if cache is None else cache.get("convolution")
        past = u.new_zeros(u.shape[0], u.shape[2], kernel) if held is None else held
        seen = torch.cat([past, u.mT], dim=-1)
        if cache is not None:
            cache.hold(convolution=seen[..., -kernel:])
        return super().forward(seen[..., 1:]).mT


def selective_scan(
    u: Float[Tensor, "batch seq channels"],
    step: Float[Tensor, "batch seq channels"],
    A: Float[Tensor, "channels state"],
    B: Float[Tensor, "batch seq state"],
    C: Float[Tensor, "batch seq state"],
    h: Float[Tensor, "batch channels state"],
) -> tuple[Float[Tensor, "batch seq channels"], Float[Tensor, "batch channels state"]]:
    """h_t = exp(step_t A) h_{t-1} + step_t B_t u_t; y_t = C_t h_t (algorithm 2, eq. 2). All y, and the last h.

    `A` is discretised exactly, as a zero-order hold does, `B` as Euler does: so does the published code.
    """
    outputs = []
    for u_t, step_t, B_t, C_t in zip(u.unbind(1), step.unbind(1), B.unbind(1), C.unbind(1), strict=True):
        h = torch.exp(step_t[..., None] * A) * h + (step_t * u_t)[..., None] * B_t[:, None]
        outputs.append((h @ C_t[..., None])[..., 0])
    return torch.stack(outputs, dim=1), h


class MambaMixer(nn.Module):
    """out(y silu(gate)), with y the scan of a short convolution's output, which gives steps, B and C itself (fig. 3).

    `hidden_act` follows the convolution; the gate's activation is SiLU whatever it says. The state is kept in at least
    float32. A token that is padding enters the recurrence as zeros, so that it adds nothing to the state, which decays
    over it all the same.
    """

    def __init__(self, config: MambaConfig, layer_idx: int = 0) -> None:
        super().__init__()
        inner, state, rank = config.intermediate_size, config.state_size, config.time_step_rank
        self.sizes = (rank, state, state)
        self.in_proj = nn.Linear(config.hidden_size, 2 * inner, bias=config.use_bias)
        self.conv1d = CausalConv(inner, config.conv_kernel, bias=config.use_conv_bias)
        self.x_proj = nn.Linear(inner, sum(self.sizes), bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=config.use_bias)
        self.act = activation(config.hidden_act)

    def forward(
        self,
        x: Float[Tensor, "batch seq hidden"],
        valid: Bool[Tensor, "batch seq"] | None = None,
        cache: StateCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        u, gate = self.in_proj(without_padding(x, valid)).chunk(2, dim=-1)
        u = without_padding(self.act(self.conv1d(u, cache)), valid)
        return self.out_proj(self.recur(u, cache) * F.silu(gate))

    def recur(self, u: Float[Tensor, "batch seq inner"], cache: StateCache | None) -> Float[Tensor, "batch seq inner"]:
        """The scan, and what passes it by, which is no less wide: gradients of D are sums over all tokens."""
        step, B, C = self.x_proj(u).split(self.sizes, dim=-1)
        dtype = wide(u)
        step = F.softplus(self.dt_proj(step)).to(dtype)
        h = None if cache is None else cache.get("recurrence")
        if h is None:
            h = u.new_zeros(u.shape[0], *self.A_log.shape, dtype=dtype)
        A = -self.A_log.to(dtype).exp()
        wide_u = u.to(dtype)
        y, h = selective_scan(wide_u, step, A, B.to(dtype), C.to(dtype), h)
        if cache is not None:
            cache.hold(u.shape[1], recurrence=h)
        return (y + self.D * wide_u).to(u.dtype)


def without_padding(
    x: Float[Tensor, "batch seq channels"], valid: Bool[Tensor, "batch seq"] | None
) -> Float[Tensor, "batch seq channels"]:
    """Zeros where a token is padding."""
    return x if valid is None else x * valid[..., None]


class MambaBlock(nn.Module):
    """x + mixer(norm(x)), the sum in at least float32 if `residual_in_fp32` says so."""

    def __init__(self, config: MambaConfig, layer_idx: int = 0) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = MambaMixer(config, layer_idx)
        self.wide_residual = config.residual_in_fp32

    def forward(
        self,
        x: Float[Tensor, "batch seq hidden"],
        valid: Bool[Tensor, "batch seq"] | None = None,
        cache: StateCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        mixed = self.mixer(self.norm(x.to(self.norm.weight.dtype)), valid, cache)
        return (x.to(wide(x)) if self.wide_residual else x) + mixed


class MambaModel(nn.Module):
    """Embeddings, blocks and a final norm. There are no positions: the recurrence is where order comes from."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MambaBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(
        self,
        ids: Int[Tensor, "batch seq"] | None = None,
        valid: Bool[Tensor, "batch total"] | None = None,
        positions: Int[Tensor, "#batch seq"] | None = None,
        cache: Cache | None = None,
        embeddings: Float[Tensor, "batch seq hidden"] | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Hidden states of new tokens, given by `ids` or by their `embeddings`.

        `valid` tells tokens from padding, those seen before included; `positions` are taken, and not needed.
        """
        h = self.embeddings(ids) if embeddings is None else embeddings
        valid = None if valid is None else valid[:, -h.shape[1] :]
        for index, layer in enumerate(self.layers):
            h = layer(h, valid, None if cache is None else cache[index])
        return self.norm_f(h)

    def make_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for this model, which is of one size for any number of tokens."""
        return Cache(StateCache() for _ in self.layers)


class MambaForCausalLM(CausalLM):
    """Mamba with its head, tied to the embeddings if the configuration says so. Logits are in at least float32."""

    CONFIG = MambaConfig
    DECODER = MambaModel
    BODY = "backbone"
    EMBEDDINGS = "embeddings"
    DERIVED = ()

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        logits = self.lm_head(hidden.to(self.lm_head.weight.dtype))
        return logits.to(wide(logits))
