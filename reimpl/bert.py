"""BERT (Devlin et al. 2019, arXiv:1810.04805, section 3), whose norms follow the residual sums (Vaswani et al. 2017).

Parameters carry the names that they have in a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from reimpl.attention import CrossAttention, MultiHead, check_memory
from reimpl.cache import Cache, CrossCache, DecoderCache, GrowingCache
from reimpl.checkpoint import Pretrained
from reimpl.config import GENERIC, LABELS, Config, ConfigError, between, divides, known_activation
from reimpl.decoder import decoder_mask
from reimpl.feedforward import activation
from reimpl.mask import Mask, MemoryMask, bidirectional
from reimpl.norm import LayerNorm
from reimpl.position import LearnedPosition
from reimpl.weights import Derived, Rule, Tied


@dataclass(frozen=True, kw_only=True)
class BertConfig(Config):
    """The fields of config.json that change what BERT computes."""

    IRRELEVANT: ClassVar[Mapping[str, str]] = {**GENERIC, "classifier_dropout": LABELS}
    ONLY: ClassVar[Mapping[str, Any]] = {**Config.ONLY, "model_type": "bert", "position_embedding_type": "absolute"}
    SIZES: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "type_vocab_size",
    )

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    is_decoder: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        divides(self.num_attention_heads, self.hidden_size, "num_attention_heads", "hidden_size")
        known_activation(self.hidden_act, "hidden_act")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps"):
            between(getattr(self, name), 0, 1, name)
        if self.pad_token_id is not None:
            between(self.pad_token_id, -self.vocab_size, self.vocab_size - 1, "pad_token_id")
        if self.add_cross_attention and not self.is_decoder:
            raise ConfigError("add_cross_attention is true and is_decoder false: only a decoder attends to a memory")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class BertEmbeddings(nn.Module):
    """LayerNorm(token + position + token type)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.position_embeddings = LearnedPosition(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        ids: Int[Tensor, "batch seq"] | None,
        positions: Int[Tensor, "#batch seq"],
        token_types: Int[Tensor, "batch seq"] | None = None,
        embeddings: Float[Tensor, "batch seq hidden"] | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Of tokens given by `ids` or by their `embeddings`; all of the first type unless `token_types` says so."""
        words = self.word_embeddings(ids) if embeddings is None else embeddings
        types = self.token_type_embeddings(torch.zeros_like(positions) if token_types is None else token_types)
        return self.dropout(self.project(self.LayerNorm(words + types + self.position_embeddings(positions))))

    def project(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        """Nothing here; FNet has a matrix."""
        return x


class BertOutput(nn.Module):
    """LayerNorm(residual + Linear(x)): the end of each of a layer's parts."""

    def __init__(self, size: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(size, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, x: Float[Tensor, "*batch size"], residual: Float[Tensor, "*batch hidden"]
    ) -> Float[Tensor, "*batch hidden"]:
        return self.LayerNorm(residual + self.dropout(self.dense(x)))


class BertSelfAttention(MultiHead):
    """Multi-head attention up to the joined heads."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config.head_dim, dropout=config.attention_probs_dropout_prob)
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, x: Float[Tensor, "batch seq hidden"], mask: Mask = None, cache: GrowingCache | None = None
    ) -> Float[Tensor, "batch seq hidden"]:
        k, v = self.split(self.key(x)), self.split(self.value(x))
        if cache is not None:
            k, v = cache.append(k, v)
        return self.mix(self.split(self.query(x)), k, v, mask)


class BertCrossAttention(CrossAttention):
    """The same over a memory."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config.head_dim, dropout=config.attention_probs_dropout_prob)
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def query_heads(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch heads seq dim"]:
        return self.split(self.query(x))

    def project(
        self, memory: Float[Tensor, "batch memory hidden"]
    ) -> tuple[Float[Tensor, "batch heads memory dim"], Float[Tensor, "batch heads memory dim"]]:
        return self.split(self.key(memory)), self.split(self.value(memory))


class BertAttention(nn.Module):
    """LayerNorm(x + Linear(attention(x)))."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertOutput(config.hidden_size, config)

    def forward(
        self, x: Float[Tensor, "batch seq hidden"], mask: Mask = None, cache: GrowingCache | None = None
    ) -> Float[Tensor, "batch seq hidden"]:
        return self.output(self.self(x, mask, cache), x)


class BertMemoryAttention(nn.Module):
    """LayerNorm(x + Linear(attention(x, memory)))."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = BertCrossAttention(config)
        self.output = BertOutput(config.hidden_size, config)

    def forward(
        self,
        x: Float[Tensor, "batch seq hidden"],
        memory: Float[Tensor, "batch memory hidden"],
        mask: MemoryMask = None,
        cache: CrossCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        return self.output(self.self(x, memory, mask, cache), x)


class BertIntermediate(nn.Module):
    """act(Linear(x)): the first half of the feed-forward layer, whose second half is a `BertOutput`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.act = activation(config.hidden_act)

    def forward(self, x: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch inner"]:
        return self.act(self.dense(x))


class BertLayer(nn.Module):
    """z = norm(x + attention(x)); y = norm(z + mlp(z)). Attention to a memory, if there is one, stands between them."""

    def __init__(self, config: BertConfig, layer_idx: int = 0) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.crosses = config.add_cross_attention
        if self.crosses:
            self.crossattention = BertMemoryAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config.intermediate_size, config)

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
        z = self.attention(x, mask, own)
        if memory is not None:
            z = self.crossattention(z, memory, memory_mask, cross)
        return self.output(self.intermediate(z), z)


class BertEncoder(nn.Module):
    """The layers, one after the other."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers))

    def forward(
        self,
        x: Float[Tensor, "batch seq hidden"],
        mask: Mask = None,
        cache: Cache | None = None,
        memory: Float[Tensor, "batch memory hidden"] | None = None,
        memory_mask: MemoryMask = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        for index, layer in enumerate(self.layer):
            x = layer(x, mask, None if cache is None else cache[index], memory, memory_mask)
        return x


class BertBody(Pretrained):
    """Embeddings and layers: what every BERT has, whatever its head."""

    CONFIG = BertConfig

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)

    def encode(
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
        """Hidden states of tokens, given by `ids` or by their `embeddings`; every token sees all that are no padding.

        With is_decoder it sees none after it, and `cache` holds those before. `valid` then covers the cached tokens
        too. Positions count up from the cached tokens, padding or not, unless they are given.
        """
        given = ids if embeddings is None else embeddings
        if given is None:
            raise ValueError("neither ids nor embeddings are given")
        seen, seq, device = 0 if cache is None else cache.length, given.shape[1], given.device
        if positions is None:
            positions = torch.arange(seen, seen + seq, device=device)[None]
        x = self.embeddings(ids, positions, token_types, embeddings)
        mask = decoder_mask(seq, seen, valid, None, device) if self.config.is_decoder else bidirectional(valid, seq)
        return self.encoder(x, mask, cache, memory, bidirectional(memory_valid, seq))

    def make_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for a decoder, with room for `capacity` tokens where the number is known."""
        if not self.config.is_decoder:
            raise ValueError("every token of an encoder sees those after it, so none can be cached: set is_decoder")
        kind = DecoderCache if self.config.add_cross_attention else GrowingCache
        return Cache(kind(capacity) for _ in self.encoder.layer)

    @classmethod
    def modern(cls, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The first checkpoints call gain and bias of a norm `gamma` and `beta`."""
        names = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
        return {
            next((name.replace(old, new) for old, new in names.items() if name.endswith(old)), name): tensor
            for name, tensor in tensors.items()
        }

    @classmethod
    def weight_rules(cls, config: BertConfig) -> tuple[Rule, ...]:
        return (Derived("embeddings.position_ids"),)


class BertPooler(nn.Module):
    """tanh(Linear(first token)): a vector for the whole row."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch hidden"]:
        return self.dense(x[:, 0]).tanh()


class BertModel(BertBody):
    """The body with its pooler."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.pooler = BertPooler(config)

    def forward(
        self, *args: Any, **named: Any
    ) -> tuple[Float[Tensor, "batch seq hidden"], Float[Tensor, "batch hidden"]]:
        """Hidden states and what the pooler makes of them. The arguments are those of the body."""
        hidden = self.encode(*args, **named)
        return hidden, self.pooler(hidden)


class BertPredictionHeadTransform(nn.Module):
    """LayerNorm(act(Linear(x)))."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.act = activation(config.hidden_act)
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        return self.LayerNorm(self.act(self.dense(x)))


class BertLMPredictionHead(nn.Module):
    """Linear(transform(x)), the matrix shared with the token embeddings and the bias its own.

    Where the matrix is not shared, `decoder` has a bias too, which counts; checkpoints hold the other all the same.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def tie(self, embeddings: Tensor) -> None:
        self.decoder.weight, self.decoder.bias = embeddings, self.bias

    def forward(self, x: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        return self.decoder(self.transform(x))


class BertOnlyMLMHead(nn.Module):
    """The head that guesses masked tokens, under the name that it has in a checkpoint."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)

    def forward(self, x: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        return self.predictions(x)


class BertForMaskedLM(Pretrained):
    """The body with a head that gives the logits of every token, masked or not."""

    CONFIG = BertConfig

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertBody(config)
        self.cls = BertOnlyMLMHead(config)
        if config.tie_word_embeddings:
            self.cls.predictions.tie(self.bert.embeddings.word_embeddings.weight)

    def forward(self, *args: Any, **named: Any) -> Float[Tensor, "batch seq vocab"]:
        """The arguments are those of the body."""
        return self.cls(self.bert.encode(*args, **named))

    def make_cache(self, capacity: int | None = None) -> Cache:
        return self.bert.make_cache(capacity)

    @classmethod
    def modern(cls, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Pretraining leaves a pooler and a head for pairs of sentences, too, which have no part in this model."""
        others = ("bert.pooler.", "cls.seq_relationship.")
        return {name: tensor for name, tensor in BertBody.modern(tensors).items() if not name.startswith(others)}

    @classmethod
    def weight_rules(cls, config: BertConfig) -> tuple[Rule, ...]:
        rules = BertBody.weight_rules(config)
        if not config.tie_word_embeddings:
            return rules
        twins = {"weight": "bert.embeddings.word_embeddings.weight", "bias": "cls.predictions.bias"}
        return (*rules, *(Tied(f"cls.predictions.decoder.{name}", twin) for name, twin in twins.items()))
