"""Parameters, FLOPs of a forward, and numbers that a cache keeps, from a configuration alone.

A matrix takes 2 FLOPs per weight and token; scores and the sum of values take 2 per channel, head and pair of a query
and a key, all pairs counted, as kernels compute a causal mask's other half too. A norm, an activation, a rotation take
none here, as in `torch.utils.flop_counter`. Latent attention is counted in its expanded form.

So a feed-forward layer takes 4 T d d_ff, since it has two matrices, and a gated one 6 T d d_ff; a head with a matrix of
its own takes V d parameters a second time; and of experts a token uses k / n, but of all else everything.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reimpl.bert import BertConfig
from reimpl.config import Config, ConfigError
from reimpl.deepseek_v3 import DeepseekV3Config
from reimpl.gpt2 import GPT2Config
from reimpl.llama import LlamaConfig
from reimpl.mistral import MistralConfig
from reimpl.mixtral import MixtralConfig
from reimpl.pre_norm import PreNormConfig
from reimpl.qwen2 import Qwen2Config
from reimpl.qwen3 import Qwen3Config
from reimpl.qwen3_moe import Qwen3MoeConfig


@dataclass(frozen=True)
class Part:
    """A part of all layers, or of none: parameters stored, those a token uses in matrices, channels of all pairs."""

    name: str
    parameters: int
    used: int = 0
    channels: int = 0

    def flops(self, length: int) -> int:
        """Of one row."""
        return 2 * (self.used * length + self.channels * length**2)

    def __add__(self, other: "Part") -> "Part":
        numbers = (self.parameters + other.parameters, self.used + other.used, self.channels + other.channels)
        return Part(self.name, *numbers)

    def __mul__(self, times: int) -> "Part":
        return Part(self.name, self.parameters * times, self.used * times, self.channels * times)


@dataclass(frozen=True)
class Size:
    """The parts of a model, and how many numbers its cache keeps per token, in all layers together."""

    parts: tuple[Part, ...]
    cached: int
    expanded: int  # what it would keep of whole keys and values, for each query head its own

    @property
    def parameters(self) -> int:
        """Those that are shared count once."""
        return sum(part.parameters for part in self.parts)

    @property
    def used(self) -> int:
        """Weights that a token is multiplied with."""
        return sum(part.used for part in self.parts)

    def part(self, name: str) -> Part:
        """The part of that name."""
        return next(part for part in self.parts if part.name == name)

    def flops(self, batch: int, length: int) -> int:
        """Of one forward over rows without a cache, logits at every position."""
        return batch * sum(part.flops(length) for part in self.parts)


def size(config: Config) -> Size:
    """The size of the whole model with its head.

    Raises:
        ConfigError: for a model that is not counted.
    """
    if getattr(config, "add_cross_attention", False):
        raise ConfigError("add_cross_attention is true: attention to a memory is not counted; take a model without")
    for kind, count in COUNTED.items():
        if type(config) is kind:
            return count(config)
    counted = ", ".join(sorted(str(kind.ONLY["model_type"]) for kind in COUNTED))
    raise ConfigError(f"model_type {type(config).ONLY['model_type']} is not counted; counted are {counted}")


def _matrix(name: str, rows: int, columns: int, bias: bool = False, stored: int = 1, used: int = 1) -> Part:
    return Part(name, stored * (rows * columns + bias * rows), used * rows * columns)


def _attention(config: PreNormConfig, bias: bool, out_bias: bool, norms: int = 0) -> Part:
    heads, groups, width, hidden = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.hidden_size,
    )
    return (
        _matrix("attention", (heads + 2 * groups) * width, hidden, bias)
        + _matrix("", hidden, heads * width, out_bias)
        + Part("", norms * width, channels=2 * heads * width)
    )


def _swiglu(hidden: int, inner: int, bias: bool = False, stored: int = 1, used: int = 1) -> Part:
    gate_up = _matrix("feed-forward", 2 * inner, hidden, bias, stored, used)
    return gate_up + _matrix("", hidden, inner, bias, stored, used)


def _embeddings(config: Any) -> tuple[Part, Part]:
    tied = Part("embeddings", config.vocab_size * config.hidden_size)
    head = _matrix("head", config.vocab_size, config.hidden_size)
    return tied, Part("head", 0, head.used) if config.tie_word_embeddings else head


def _pre_norm(config: PreNormConfig, attention: Part, mlp: Part, cached: int = 0) -> Size:
    """Of the parts in all layers: two norms each, one at the end."""
    layers, width = config.num_hidden_layers, config.head_dim
    embeddings, head = _embeddings(config)
    norms = Part("norms", (2 * layers + 1) * config.hidden_size)
    return Size(
        (embeddings, attention * layers, mlp, norms, head),
        cached or layers * 2 * config.num_key_value_heads * width,
        layers * 2 * config.num_attention_heads * width,
    )


def _dense(config: Any) -> Size:
    bias = getattr(config, "attention_bias", False)
    qwen2, qwen3 = isinstance(config, Qwen2Config), isinstance(config, Qwen3Config)
    attention = _attention(config, bias or qwen2, bias, norms=2 if qwen3 else 0)
    mlp = _swiglu(config.hidden_size, config.intermediate_size, getattr(config, "mlp_bias", False))
    return _pre_norm(config, attention, mlp * config.num_hidden_layers)


def _experts(hidden: int, inner: int, stored: int, used: int) -> Part:
    return _swiglu(hidden, inner, stored=stored, used=used) + _matrix("", stored, hidden)


def _mixtral(config: MixtralConfig) -> Size:
    experts = (config.num_local_experts, config.num_experts_per_tok)
    mlp = _experts(config.hidden_size, config.intermediate_size, *experts)
    return _pre_norm(config, _attention(config, False, False), mlp * config.num_hidden_layers)


def _qwen3_moe(config: Qwen3MoeConfig) -> Size:
    sparse = sum(config.has_experts(index) for index in range(config.num_hidden_layers))
    experts = _experts(config.hidden_size, config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok)
    dense = _swiglu(config.hidden_size, config.intermediate_size) * (config.num_hidden_layers - sparse)
    attention = _attention(config, config.attention_bias, config.attention_bias, norms=2)
    return _pre_norm(config, attention, dense + experts * sparse)


def _deepseek_v3(config: DeepseekV3Config) -> Size:
    hidden, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
    rank, query = config.kv_lora_rank, heads * config.qk_head_dim
    kept, value = rank + config.qk_rope_head_dim, heads * config.v_head_dim
    if config.q_lora_rank is None:
        queries = _matrix("attention", query, hidden)
    else:
        queries = _matrix("attention", config.q_lora_rank, hidden, bias) + Part("", config.q_lora_rank)
        queries += _matrix("", query, config.q_lora_rank)
    attention = (
        queries
        + _matrix("", kept, hidden, bias)
        + _matrix("", heads * config.qk_nope_head_dim + value, rank)
        + _matrix("", hidden, value, bias)
        + Part("", rank, channels=query + value)
    )
    layers = config.num_hidden_layers
    dense = min(config.first_k_dense_replace, layers)
    inner = config.moe_intermediate_size
    experts = _experts(hidden, inner, config.n_routed_experts, config.num_experts_per_tok)
    experts += _swiglu(hidden, inner * config.n_shared_experts)
    mlp = _swiglu(hidden, config.intermediate_size) * dense + experts * (layers - dense)
    whole = _pre_norm(config, attention, mlp, cached=layers * kept)
    return Size(whole.parts, whole.cached, layers * (query + value))


def _layer_norm_layers(hidden: int, inner: int, layers: int) -> tuple[Part, Part, Part]:
    attention = _matrix("attention", 3 * hidden, hidden, True) + _matrix("", hidden, hidden, True)
    mlp = _matrix("feed-forward", inner, hidden, True) + _matrix("", hidden, inner, True)
    attention += Part("", 0, channels=2 * hidden)
    return attention * layers, mlp * layers, Part("norms", 4 * hidden * layers)


def _gpt2(config: GPT2Config) -> Size:
    hidden, layers = config.n_embd, config.n_layer
    embeddings, head = _embeddings(config)
    embeddings += Part("", config.n_positions * hidden)
    attention, mlp, norms = _layer_norm_layers(hidden, config.inner, layers)
    kept = layers * 2 * hidden
    return Size((embeddings, attention, mlp, norms + Part("", 2 * hidden), head), kept, kept)


def _bert(config: BertConfig) -> Size:
    hidden, layers = config.hidden_size, config.num_hidden_layers
    embeddings, head = _embeddings(config)
    embeddings += Part("", (config.max_position_embeddings + config.type_vocab_size) * hidden)
    attention, mlp, norms = _layer_norm_layers(hidden, config.intermediate_size, layers)
    head += _matrix("", hidden, hidden, True) + Part("", config.vocab_size * (1 if config.tie_word_embeddings else 2))
    kept = layers * 2 * hidden if config.is_decoder else 0
    return Size((embeddings, attention, mlp, norms + Part("", 4 * hidden), head), kept, kept)


COUNTED: Mapping[type[Config], Callable[[Any], Size]] = {
    GPT2Config: _gpt2,
    BertConfig: _bert,
    LlamaConfig: _dense,
    MistralConfig: _dense,
    Qwen2Config: _dense,
    Qwen3Config: _dense,
    MixtralConfig: _mixtral,
    Qwen3MoeConfig: _qwen3_moe,
    DeepseekV3Config: _deepseek_v3,
}
