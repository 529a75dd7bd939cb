"""Weights read into the wrong place, turned over, or not at all."""

from __future__ import annotations

import torch

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import ATTENDING, BLOCKS, DECODERS, GATED, GROUPED, MODELS
from parity.mistakes.seams import built, loaded, loaded_each, swapped
from reimpl.decoder import Decoder

KIND = "layout"

MISTAKES = (
    Mistake(
        "swaps gate and up",
        swapped("gate_proj", "up_proj"),
        (Place(GATED, ("mlp", *BLOCKS), "b1 s3"),),
        ("act_fn", "input of down_proj"),
        "any input: the two are not used alike",
        remedy="weights['gate_proj.weight'], weights['up_proj.weight'] = "
        "weights['up_proj.weight'], weights['gate_proj.weight']",
    ),
    Mistake(
        "swaps k and v",
        swapped("k_proj", "v_proj"),
        (Place(GROUPED, ATTENDING, "b1 s3"),),
        ("k", "k_norm", "k after rotation", "cached k"),
        "any input: the two are not used alike",
        remedy="weights['k_proj.weight'], weights['v_proj.weight'] = "
        "weights['v_proj.weight'], weights['k_proj.weight']",
    ),
    Mistake(
        "does not load biases",
        loaded_each("bias", lambda bias, config: bias * 0),
        (Place(("llama",), ("mlp", "attention", "block"), "bias=yes mlp_bias=yes b1 s3", "b1 s4"),),
        ("q", "gate_proj"),
        "biases that are not 0",
        source="ANEForge#253",
    ),
    Mistake(
        "reads o_proj untransposed where it is square",
        loaded_each("o_proj.weight", lambda weight, config: weight.T if weight.shape[0] == weight.shape[1] else weight),
        (Place(GROUPED, BLOCKS, "square=yes b1 s3", "b1 s4"),),
        ("o_proj",),
        "as many channels in all heads as in the hidden state",
        remedy="weights['o_proj.weight'] = weights['o_proj.weight'].T",
    ),
    Mistake(
        "ties the head to the embeddings where it is not",
        loaded(lambda weights, config: {"lm_head.weight": weights.get("model.embed_tokens.weight", torch.zeros(0))}),
        (Place(DECODERS, ("logits",), "b1 s3", "tie=yes b1 s4"),),
        ("lm_head",),
        "a head of its own",
    ),
    Mistake(
        "scales the embeddings",
        built(Decoder, lambda model: model.embed_tokens.register_forward_hook(lambda module, ids, out: 6 * out)),
        (Place(DECODERS, MODELS, "b1 s3"),),
        ("embed_tokens", "input_layernorm"),
        "any input: residuals keep the factor",
    ),
    Mistake(
        "leaves out the last layer",
        built(Decoder, lambda model: setattr(model, "layers", model.layers[:-1])),
        (Place(DECODERS, MODELS, "layers=2 b1 s3"),),
        ("input_layernorm", "input of q_proj"),
        "any input: every layer adds something",
    ),
)
