"""Who may see whom."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ATTENDING, DECODERS, GROUPED, MODELS
from parity.mistakes.seams import MASKING, Fields, exchanged, masked, remasked, several
from reimpl import attention, decoder
from reimpl.attention import MultiHead

KIND = "mask"
WEIGHTS = ("weights",)
ONE_TOKEN, ONE_CHUNK = "b1 s1", "b1 s4"


def causal_from_the_top(q_len: int, k_len: int, device: Any = None) -> Tensor:
    return torch.ones(q_len, k_len, dtype=torch.bool).tril()


def without_itself(mask: Tensor) -> Tensor:
    queries, keys = mask.shape[-2:]
    return mask & ~torch.eye(keys, dtype=torch.bool)[-queries:]


def forget_padding_when_decoding(seen: int, valid: Any, **others: Any) -> Fields:
    return {"valid": None} if seen else {}


def mask_weights(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """The weights, which are the contexts of unit vectors, are masked when they are normalised already."""
    units = torch.eye(k.shape[2], dtype=q.dtype).expand(len(k), k.shape[1], -1, -1)
    weights, allowed = attention.eager(q, k, units, None, self.scale), attention._as_tensor(mask, q, k)
    weights = weights if allowed is None else weights.masked_fill(~allowed, 0)
    return (weights @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)).transpose(1, 2).flatten(2)


MISTAKES = (
    Mistake(
        "aligns the causal mask top-left",
        several(*(exchanged(module, "causal", causal_from_the_top) for module in MASKING)),
        (Place(DECODERS, MODELS, "b1 s3,2", "b1 s4,1"),),
        WEIGHTS,
        "a chunk of several tokens after others in the cache",
        source="pytorch/pytorch#108108",
    ),
    Mistake(
        "lets no token see itself",
        remasked(without_itself),
        (Place(DECODERS, MODELS, "b1 s3"),),
        WEIGHTS,
        "any token: each has a value of its own",
    ),
    Mistake(
        "masks nothing",
        exchanged(decoder, "decoder_mask", lambda *_: None),
        (Place(DECODERS, MODELS, "b1 s3", ONE_TOKEN),),
        WEIGHTS,
        "several tokens in one chunk",
        source="TinyLLM#18",
    ),
    Mistake(
        "ignores padding",
        masked(lambda **_: {"valid": None}),
        (Place(DECODERS, MODELS, "b2 s4 left0,2", ONE_CHUNK),),
        WEIGHTS,
        "padding before a token",
    ),
    Mistake(
        "forgets the padding in decoding",
        masked(forget_padding_when_decoding),
        (Place(DECODERS, MODELS, "b2 s4,1 left0,2", "b2 s4 left0,2"),),
        WEIGHTS,
        "padded rows, then a decoding step",
        source="TransformerLensOrg/TransformerLens#772",
    ),
    Mistake(
        "lets packed documents see each other",
        exchanged(decoder, "packed", lambda document: torch.ones_like(document, dtype=torch.bool)[:, None, None]),
        (Place(DECODERS, MODELS, "b1 s4 packed2,2", "b1 s4,1"),),
        WEIGHTS,
        "several documents in a row",
    ),
    Mistake(
        "masks the weights after the softmax",
        exchanged(MultiHead, "mix", mask_weights),
        (Place(GROUPED, ATTENDING, "b1 s3", ONE_TOKEN),),
        WEIGHTS,
        "several tokens in one chunk",
    ),
)
