"""What the models that generate text share: embeddings, layers, a final norm; then a head and greedy decoding."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from reimpl.cache import Cache, GrowingCache, SlidingCache
from reimpl.checkpoint import Pretrained
from reimpl.mask import CAUSAL, Mask, causal, documents_from_positions, packed, padding, sliding
from reimpl.weights import Derived, Rule, Same, Tied


class Decoder(nn.Module):
    """norm(layers(embed(ids))), each token seeing itself and those before it, as far as the layer's window reaches."""

    def __init__(
        self,
        embed_tokens: nn.Embedding,
        layers: Iterable[nn.Module],
        norm: nn.Module,
        rotary_emb: nn.Module,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.rotary_emb = rotary_emb
        self.windows = (None,) * len(self.layers) if windows is None else tuple(windows)

    def forward(
        self,
        ids: Int[Tensor, "batch seq"] | None = None,
        valid: Bool[Tensor, "batch total"] | None = None,
        positions: Int[Tensor, "#batch seq"] | None = None,
        cache: Cache | None = None,
        embeddings: Float[Tensor, "batch seq hidden"] | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Hidden states of new tokens, given by `ids` or by their `embeddings`.

        `valid` tells tokens from padding, the cached ones included. `positions` continue those in the cache unless they
        are given; given alone, without `valid` and `cache`, they also separate documents packed into one row: a new
        one begins where a position does not follow the one before.
        """
        h = self.embed_tokens(ids) if embeddings is None else embeddings
        seen = 0 if cache is None else cache.length
        told = positions if cache is None else None
        masks = {each: decoder_mask(h.shape[1], seen, valid, told, h.device, each) for each in set(self.windows)}
        if positions is None:
            positions = torch.arange(seen, seen + h.shape[1], device=h.device)[None]
        rotary = self.rotary_emb(h, positions)
        for index, layer in enumerate(self.layers):
            mask = masks[self.windows[index]]
            h = layer(h, rotary=rotary, mask=mask, cache=None if cache is None else cache[index])
        return self.norm(h)

    def make_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for this model, with room for `capacity` tokens where the number is known."""
        return Cache(GrowingCache(capacity) if each is None else SlidingCache(each) for each in self.windows)


def decoder_mask(
    new: int,
    seen: int,
    valid: Bool[Tensor, "batch total"] | None,
    positions: Int[Tensor, "#batch seq"] | None,
    device: torch.device,
    window: int | None = None,
) -> Mask:
    """Causal, less the keys that are padding, those of other documents and those that the window has left behind.

    The marker where nothing is taken away. Of the tokens seen before, those are in the cache that the window reaches.
    """
    keys = new + (seen if window is None else min(seen, window - 1))
    reach = CAUSAL if window is None or keys <= window else sliding(new, keys, window, device)
    others = None
    if valid is not None:
        others = None if valid[:, -keys:].all() else padding(valid[:, -keys:])
    elif positions is not None:
        document = documents_from_positions(positions)
        others = None if (document == document[:, :1]).all() else packed(document)
    if others is None:
        return reach if reach is CAUSAL else reach[None, None]
    return others & (causal(new, keys, device) if reach is CAUSAL else reach)


class CausalLM(Pretrained):
    """A decoder with a head that gives the next token's logits. A subclass names its configuration and its decoder.

    `BODY`, `EMBEDDINGS` and `HEAD` are what a checkpoint calls the decoder, its embeddings and the head, `DERIVED` how
    the names of tensors end that old checkpoints hold though they follow from the configuration.
    """

    DECODER: ClassVar[type[Any]]
    BODY: ClassVar[str] = "model"
    EMBEDDINGS: ClassVar[str] = "embed_tokens"
    HEAD: ClassVar[str] = "lm_head"
    DERIVED: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.add_module(self.BODY, self.DECODER(config))
        embeddings = self.body.get_parameter(f"{self.EMBEDDINGS}.weight")
        vocab, hidden = embeddings.shape
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = embeddings

    @property
    def body(self) -> Any:
        """The decoder."""
        return getattr(self, self.BODY)

    def forward(
        self,
        ids: Int[Tensor, "batch seq"] | None = None,
        valid: Bool[Tensor, "batch total"] | None = None,
        positions: Int[Tensor, "#batch seq"] | None = None,
        cache: Cache | None = None,
        embeddings: Float[Tensor, "batch seq hidden"] | None = None,
        **others: Tensor | None,
    ) -> Float[Tensor, "batch seq vocab"]:
        """Logits after every token. The arguments are those of the decoder."""
        return self.logits(self.body(ids, valid, positions, cache, embeddings, **others))

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """What the head makes of hidden states."""
        return self.lm_head(hidden)

    def make_cache(self, capacity: int | None = None) -> Cache:
        return self.body.make_cache(capacity)

    @torch.no_grad()
    def generate(
        self,
        ids: Int[Tensor, "batch seq"],
        max_new_tokens: int,
        valid: Bool[Tensor, "batch seq"] | None = None,
        use_cache: bool = True,
        eos: int | None = None,
        **others: Tensor | None,
    ) -> Int[Tensor, "batch total"]:
        """Append the likeliest token again and again; the prompts with what followed.

        Prompts of different lengths are padded on the left, and `valid` says where. A row that has produced `eos` is
        filled with the padding token (or with `eos` where the configuration has none). The decoder gets `others`, as
        an encoder's memory, at every step.
        """
        filler: Any = eos if self.config.pad_token_id is None else self.config.pad_token_id
        valid = torch.ones_like(ids, dtype=torch.bool) if valid is None else valid
        finished = torch.zeros_like(ids[:, 0], dtype=torch.bool)
        cache = self.make_cache(ids.shape[1] + max_new_tokens) if use_cache else None
        for _ in range(max_new_tokens):
            new = slice(0 if cache is None else cache.length, None)
            positions = (valid.cumsum(-1) - 1).clamp(min=0)[:, new]
            hidden = self.body(ids[:, new], valid, positions, cache, **others)
            following = self.logits(hidden[:, -1]).argmax(-1)
            if eos is not None:
                following = following.masked_fill(finished, filler)
                finished |= following == eos
            ids = torch.cat([ids, following[:, None]], dim=1)
            valid = torch.cat([valid, torch.ones_like(valid[:, :1])], dim=1)
            if finished.all():
                break
        return ids

    @classmethod
    def modern(cls, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A body that was saved without a head lacks its own name before those of its tensors."""
        bare = f"{cls.EMBEDDINGS}.weight" in tensors
        return {f"{cls.BODY}.{name}" if bare else name: tensor for name, tensor in tensors.items()}

    @classmethod
    def weight_rules(cls, config: Any) -> tuple[Rule, ...]:
        rules: list[Rule] = [Derived(ending) for ending in cls.DERIVED]
        if config.tie_word_embeddings:
            rules.append(Tied(f"{cls.HEAD}.weight", f"{cls.BODY}.{cls.EMBEDDINGS}.weight"))
        elif cls.HEAD != "lm_head":
            rules.append(Same(f"{cls.HEAD}.weight", "lm_head.weight"))
        return tuple(rules)
