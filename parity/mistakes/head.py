"""What is made of the last hidden states: logits, or a vector for the whole row."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import BERT, LANGUAGE_MODELS
from parity.mistakes.seams import Weights, built, exchanged, loaded
from reimpl.bert import BertLMPredictionHead, BertPooler, BertPredictionHeadTransform
from reimpl.decoder import CausalLM

KIND = "head"
POOLER = ("pooler", "model", "decoder_model")
POOLED = ("pooled", "output", "dense", "activation", "input of dense", "input of pooler")
LOGITS = ("lm_head", "decoder", "output", "LayerNorm", "transform", "dense", "transform_act_fn", "input of LayerNorm")


def tie(weights: Weights, config: Any) -> Weights:
    """The head reads the embeddings, whatever the checkpoint has for it."""
    if config.tie_word_embeddings or "lm_head.weight" not in weights:
        return {}
    return {"lm_head.weight": next(weight for name, weight in weights.items() if is_embedding(name))}


def is_embedding(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight"))


def untie(model: Any) -> None:
    """The head keeps what it was born with."""
    if model.config.tie_word_embeddings:
        own = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
        model.lm_head.forward = lambda x: F.linear(x, own.to(x.dtype))


MISTAKES = (
    Mistake(
        "ties the head to the embeddings where it is not",
        loaded(tie),
        (Place(LANGUAGE_MODELS, ("logits",), "tie=no b1 s3", "tie=yes b1 s4"),),
        LOGITS,
        "a head of its own",
    ),
    Mistake(
        "does not tie the head to the embeddings where it is",
        built(CausalLM, untie),
        (Place(LANGUAGE_MODELS, ("logits",), "tie=yes b1 s3", "tie=no b1 s4"),),
        LOGITS,
        "a head that the checkpoint does not hold",
    ),
    Mistake(
        "forgets the bias of the head",
        exchanged(BertLMPredictionHead, "forward", lambda self, x: F.linear(self.transform(x), self.decoder.weight)),
        (Place(BERT, ("logits",), "b1 s3"),),
        LOGITS,
        "any bias that is not 0",
    ),
    Mistake(
        "skips the transform before the head",
        exchanged(BertLMPredictionHead, "forward", lambda self, x: self.decoder(x)),
        (Place(BERT, ("logits",), "b1 s3"),),
        LOGITS,
        "any input",
    ),
    Mistake(
        "skips the norm of the transform before the head",
        exchanged(BertPredictionHeadTransform, "forward", lambda self, x: self.act(self.dense(x))),
        (Place(BERT, ("logits",), "b1 s3"),),
        LOGITS,
        "any input",
    ),
    Mistake(
        "skips the activation of the transform before the head",
        exchanged(BertPredictionHeadTransform, "forward", lambda self, x: self.LayerNorm(self.dense(x))),
        (Place(BERT, ("logits",), "b1 s3"),),
        LOGITS,
        "any input",
    ),
    Mistake(
        "pools without tanh",
        exchanged(BertPooler, "forward", lambda self, x: self.dense(x[:, 0])),
        (Place(BERT, POOLER, "b1 s3"),),
        POOLED,
        "any input",
    ),
    Mistake(
        "pools the last token for the first",
        exchanged(BertPooler, "forward", lambda self, x: self.dense(x[:, -1]).tanh()),
        (Place(BERT, POOLER, "b1 s3", "b1 s1"),),
        POOLED,
        "more than one token",
    ),
    Mistake(
        "pools the mean of all tokens for the first",
        exchanged(BertPooler, "forward", lambda self, x: self.dense(x.mean(1)).tanh()),
        (Place(BERT, POOLER, "b1 s3", "b1 s1"),),
        POOLED,
        "more than one token",
    ),
)
