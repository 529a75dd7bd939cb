"""Who may see whom."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import (
    ATTENDING,
    BERT,
    BERT_DECODER,
    GPT2,
    GROUPED,
    LANGUAGE_MODELS,
    LAYERED_WINDOWS,
    MODELS,
    PACKING,
    WINDOWED,
)
from parity.mistakes.seams import (
    Fields,
    Function,
    called,
    configured,
    everywhere,
    exchanged,
    masked,
    masking_with_cache,
    remasked,
    several,
    wrapped,
)
from reimpl import attention, bert, decoder
from reimpl.attention import MultiHead
from reimpl.bert import BertEncoder
from reimpl.decoder import decoder_mask
from reimpl.mask import CAUSAL, causal

KIND = "mask"
WEIGHTS = ("weights", "scores")  # BLOOM's scores hold the mask already
ENCODER = ("model", "logits")
SLIDING, FULL = "sliding_attention", "full_attention"


def causal_models(shows: str, unseen: str = "") -> tuple[Place, ...]:
    """Whole models in which a token sees none after it."""
    return Place(LANGUAGE_MODELS, MODELS, shows, unseen), Place(BERT, BERT_DECODER, shows, unseen)


def causal_from_the_top(q_len: int, k_len: int, device: Any = None) -> Tensor:
    return torch.ones(q_len, k_len, dtype=torch.bool).tril()


def without_itself(mask: Tensor) -> Tensor:
    queries, keys = mask.shape[-2:]
    return mask & ~torch.eye(keys, dtype=torch.bool)[-queries:]


def with_the_next(mask: Tensor) -> Tensor:
    queries, keys = mask.shape[-2:]
    return mask | torch.eye(keys, dtype=torch.bool).roll(1, 1).tril(1)[-queries:]


def open_after_others(mask: Tensor) -> Tensor:
    """A chunk that follows others sees all there is."""
    return mask | (mask.shape[-1] > mask.shape[-2])


def forget_padding_when_decoding(seen: int, valid: Any, **others: Any) -> Fields:
    return {"valid": None} if seen else {}


def padding_on_the_other_side(valid: Any, **others: Any) -> Fields:
    return {} if valid is None else {"valid": valid.flip(1)}


def by_hand(weigh: Function) -> Function:
    """Attention as it is written, from scores and what may be attended to."""

    def mix(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any = None) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        allowed = attention._as_tensor(mask, q, k)
        allowed = torch.ones((), dtype=torch.bool) if allowed is None else allowed
        return (weigh(q * self.scale @ k.mT, allowed) @ v).transpose(1, 2).flatten(2)

    return mix


def masked_weights(scores: Tensor, allowed: Tensor) -> Tensor:
    return scores.softmax(-1).masked_fill(~allowed, 0)


def zero_scores(scores: Tensor, allowed: Tensor) -> Tensor:
    return scores.masked_fill(~allowed, 0).softmax(-1)


def mildly_low_scores(scores: Tensor, allowed: Tensor) -> Tensor:
    return (scores - 10 * (~allowed).to(scores.dtype)).softmax(-1)


def window(change: Function) -> Function:
    """Another window, where there is one."""

    def fields(given: Fields) -> Fields:
        return {"sliding_window": change(given["sliding_window"])} if given.get("sliding_window") else {}

    return fields


def types(change: Function) -> Function:
    """Other types of layers, where the configuration names them."""

    def fields(given: Fields) -> Fields:
        return {"layer_types": change(list(given["layer_types"]))} if given.get("layer_types") else {}

    return fields


def without_window(given: Fields) -> Fields:
    return {"sliding_window": None, "use_sliding_window": False, "layer_types": None}


MISTAKES = (
    Mistake(
        "aligns the causal mask top-left",
        everywhere(causal, lambda _: causal_from_the_top),
        causal_models("b1 s3,2", "b1 s4,1"),
        WEIGHTS,
        "a chunk of several tokens after others in the cache",
        source="pytorch/pytorch#108108",
    ),
    Mistake(
        "lets a chunk after others see all of itself",
        remasked(open_after_others),
        causal_models("b1 s3,2", "b1 s4,1"),
        WEIGHTS,
        "a chunk of several tokens after others in the cache",
    ),
    Mistake(
        "lets no token see itself",
        remasked(without_itself),
        causal_models("b1 s3"),
        WEIGHTS,
        "any token: each has a value of its own",
    ),
    Mistake(
        "lets tokens see the one after them",
        remasked(with_the_next),
        causal_models("b1 s3", "b1 s1"),
        WEIGHTS,
        "several tokens in one chunk",
    ),
    Mistake(
        "masks nothing",
        everywhere(decoder_mask, lambda _: lambda *_: None),
        causal_models("b1 s3", "b1 s1"),
        WEIGHTS,
        "several tokens in one chunk",
    ),
    Mistake(
        "masks nothing once there is a cache",
        masking_with_cache(lambda *_: None),
        (Place(PACKING, MODELS, "b1 s3", "b1 s4 packed2,2"),),
        WEIGHTS,
        "several tokens in one chunk, with a cache",
        source="TinyLLM#18",
    ),
    Mistake(
        "ignores padding",
        several(masked(lambda **_: {"valid": None}), exchanged(bert, "bidirectional", lambda valid, length: None)),
        (*causal_models("b2 s4 left0,2", "b1 s4"), Place(BERT, ENCODER, "b2 s4 right0,2", "b1 s4")),
        WEIGHTS,
        "padding that a token could see",
    ),
    Mistake(
        "takes padding on the left for padding on the right",
        masked(padding_on_the_other_side),
        causal_models("b2 s4 left0,2", "b1 s4"),
        WEIGHTS,
        "padding on one side",
    ),
    Mistake(
        "forgets the padding in decoding",
        masked(forget_padding_when_decoding),
        causal_models("b2 s4,1 left0,2", "b2 s4 left0,2"),
        WEIGHTS,
        "padded rows, then a decoding step",
        source="TransformerLensOrg/TransformerLens#772",
    ),
    Mistake(
        "ignores the padding of the memory",
        called(lambda given: {"memory_valid": None} if given.get("memory") is not None else {}),
        (
            Place(GPT2, MODELS, "cross=yes b2 s3 m5-0,2", "cross=yes b2 s3 m5"),
            Place(BERT, BERT_DECODER, "cross=yes b2 s3 m5-0,2", "cross=yes b2 s3 m5"),
        ),
        WEIGHTS,
        "a memory with padding",
    ),
    Mistake(
        "lets packed documents see each other",
        exchanged(decoder, "packed", lambda document: torch.ones_like(document, dtype=torch.bool)[:, None, None]),
        (Place(PACKING, MODELS, "b1 s4 packed2,2", "b1 s4,1"),),
        WEIGHTS,
        "several documents in a row",
    ),
    Mistake(
        "lets no token of an encoder see those after it",
        wrapped(BertEncoder, "forward", lambda encode: lambda self, x, mask, *rest: encode(self, x, CAUSAL, *rest)),
        (Place(BERT, ENCODER, "b1 s3", "b1 s1"),),
        WEIGHTS,
        "more than one token",
    ),
    Mistake(
        "masks the weights after the softmax",
        exchanged(MultiHead, "mix", by_hand(masked_weights)),
        (Place((*GROUPED, *GPT2), ATTENDING, "b1 s3", "b1 s1"),),
        WEIGHTS,
        "several tokens in one chunk",
    ),
    Mistake(
        "gives what is masked a score of 0",
        exchanged(MultiHead, "mix", by_hand(zero_scores)),
        (Place((*GROUPED, *GPT2), ATTENDING, "b1 s3", "b1 s1"),),
        WEIGHTS,
        "several tokens in one chunk",
    ),
    Mistake(
        "lowers the scores of what is masked by too little",
        exchanged(MultiHead, "mix", by_hand(mildly_low_scores)),
        (Place((*GROUPED, *GPT2), ATTENDING, "b1 s3", "b1 s1"),),
        WEIGHTS,
        "several tokens in one chunk",
    ),
    Mistake(
        "lets the window reach one token further",
        configured(window(lambda size: size + 1)),
        (Place(WINDOWED, MODELS, "window=3 b1 s6", "window=3 b1 s2"),),
        WEIGHTS,
        "more tokens than the window",
        source="huggingface/transformers#35896",
    ),
    Mistake(
        "lets the window reach one token less far",
        configured(window(lambda size: size - 1)),
        (Place(WINDOWED, MODELS, "window=3 b1 s6", "window=3 b1 s1"),),
        WEIGHTS,
        "as many tokens as the window",
        source="huggingface/transformers#35896",
    ),
    Mistake(
        "ignores the window",
        configured(without_window),
        (Place(WINDOWED, MODELS, "window=3 b1 s6", "window=3 b1 s2"),),
        WEIGHTS,
        "more tokens than the window",
        source="huggingface/transformers#26792",
    ),
    Mistake(
        "puts the window on all layers",
        configured(types(lambda given: [SLIDING if SLIDING in given else each for each in given])),
        (
            Place(
                LAYERED_WINDOWS,
                MODELS,
                "window=3 first_window=1 layers=2 b1 s6",
                "window=3 layers=2 b1 s6",
            ),
        ),
        WEIGHTS,
        "a window for some layers only",
        source="huggingface/transformers#35896",
    ),
    Mistake(
        "puts the window on the other layers",
        configured(types(lambda given: given[::-1])),
        (
            Place(
                LAYERED_WINDOWS,
                MODELS,
                "window=3 first_window=1 layers=2 b1 s6",
                "window=3 layers=2 b1 s6",
            ),
        ),
        WEIGHTS,
        "a window for some layers only",
        source="huggingface/transformers#35896",
    ),
)
