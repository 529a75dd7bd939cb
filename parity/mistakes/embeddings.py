"""What tokens become before the first layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import BERT, DECODERS, GPT2, MODELS
from parity.mistakes.seams import Fields, Function, built, called, several, wrapped
from reimpl.bert import BertEmbeddings
from reimpl.decoder import Decoder
from reimpl.gpt2 import GPT2Model
from reimpl.position import LearnedPosition

KIND = "embeddings"
BERT_MODELS = ("embeddings", "model", "decoder_model", "logits")
TYPES = ("token_type_embeddings",)
PARTS = ("embed_tokens", "input_layernorm", "wte", "drop", "ln_1", "output", "LayerNorm", "input of LayerNorm", *TYPES)


def without_types(forward: Function) -> Function:
    def call(self: Any, ids: Any, positions: Tensor, token_types: Any = None, embeddings: Any = None) -> Tensor:
        return forward(self, ids, positions, None, embeddings)

    return call


def untyped(given: Fields) -> Fields:
    return {} if given.get("token_types") is None else {"token_types": None}


def all_of_the_second_type(forward: Function) -> Function:
    def call(self: Any, ids: Any, positions: Tensor, token_types: Any = None, embeddings: Any = None) -> Tensor:
        last = self.token_type_embeddings.num_embeddings - 1
        return forward(self, ids, positions, torch.full_like(positions, min(1, last)), embeddings)

    return call


def no_type_unless_given(forward: Function) -> Function:
    def call(self: Any, ids: Any, positions: Tensor, token_types: Any = None, embeddings: Any = None) -> Tensor:
        if token_types is not None:
            return forward(self, ids, positions, token_types, embeddings)
        hook = self.token_type_embeddings.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
        with hook:
            return forward(self, ids, positions, token_types, embeddings)

    return call


def empty_padding(embeddings: Any) -> None:
    """The padding token has no vector, as one that was never trained."""
    words = embeddings.word_embeddings
    if words.padding_idx is not None:
        words.register_forward_hook(lambda module, args, out: out * (args[0] != words.padding_idx)[..., None])


def words_of(model: Any) -> Any:
    return model.wte if isinstance(model, GPT2Model) else model.embed_tokens


def scale_words(model: Any) -> None:
    words = words_of(model)
    words.register_forward_hook(lambda module, args, out: out * words.embedding_dim**0.5)


def next_word(model: Any) -> None:
    words = words_of(model)
    words.register_forward_pre_hook(lambda module, args: ((args[0] + 1) % words.num_embeddings,))


MISTAKES = (
    Mistake(
        "multiplies the embeddings by the root of their width",
        several(built(Decoder, scale_words), built(GPT2Model, scale_words)),
        (Place((*DECODERS, *GPT2), MODELS, "b1 s3"),),
        PARTS,
        "any input: residuals keep the factor",
    ),
    Mistake(
        "looks up the token after the one given",
        several(built(Decoder, next_word), built(GPT2Model, next_word)),
        (Place((*DECODERS, *GPT2), MODELS, "b1 s3"),),
        PARTS,
        "any token",
    ),
    Mistake(
        "leaves out positions",
        wrapped(LearnedPosition, "forward", lambda forward: lambda self, positions: 0 * forward(self, positions)),
        (Place(GPT2, MODELS, "b1 s3"), Place(BERT, BERT_MODELS, "b1 s3")),
        (*PARTS, "position_embeddings"),
        "any token",
    ),
    Mistake(
        "ignores the types of tokens",
        several(wrapped(BertEmbeddings, "forward", without_types), called(untyped)),
        (Place(GPT2, MODELS, "typed b1 s4", "b1 s4"), Place(BERT, BERT_MODELS, "typed b1 s6", "b1 s4")),
        PARTS,
        "tokens of several types",
    ),
    Mistake(
        "takes all tokens to be of the second type",
        wrapped(BertEmbeddings, "forward", all_of_the_second_type),
        (Place(BERT, BERT_MODELS, "b1 s4", "types=1 b1 s4"),),
        PARTS,
        "more than one type",
    ),
    Mistake(
        "adds no vector of a type where no types are given",
        wrapped(BertEmbeddings, "forward", no_type_unless_given),
        (Place(BERT, BERT_MODELS, "b1 s4", "typed b1 s4"),),
        PARTS,
        "no types given",
    ),
    Mistake(
        "gives the padding token no vector",
        built(BertEmbeddings, empty_padding),
        (Place(BERT, BERT_MODELS, "pad=first b3 s12 *8", "b1 s4"),),
        PARTS,
        "the padding token among the tokens",
    ),
)
