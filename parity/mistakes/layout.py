"""Weights read into the wrong place, turned over, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parity.mistakes.mistake import Mistake, Place
from parity.mistakes.places import (
    ATTENDING,
    BERT,
    BLOCKS,
    DECODERS,
    FEED_FORWARD,
    GATED,
    GPT2,
    GROUPED,
    LATENT,
    LLAMA,
    MODELS,
)
from parity.mistakes.seams import Exchange, Weights, built, loaded, loaded_each, several, swapped
from reimpl.decoder import Decoder

KIND = "layout"
K = ("k", "k_norm", "k after rotation", "cached k", "c_attn", "cached v", "scores")
Q = ("q", "q_norm", "q after rotation", "k", "k_norm", "k after rotation", "c_attn", "cached k", "scores", "weights")
NOT_ALIKE = "any input: the two are not used alike"


def is_projection(name: str) -> bool:
    *_, module, parameter = ["", *name.split(".")]
    return parameter == "bias" and "norm" not in module.lower() and not module.startswith("ln_")


def forget_biases(weights: Weights, config: Any) -> Weights:
    return {name: torch.zeros_like(bias) for name, bias in weights.items() if is_projection(name)}


def transpose_square(ending: str) -> Exchange:
    """A matrix is read untransposed, which only its shape would tell."""
    return loaded_each(ending, lambda weight, config: weight.T if weight.shape[0] == weight.shape[1] else weight)


def of_packed(change: Callable[[list[Tensor], Any], list[Tensor]]) -> Exchange:
    """GPT-2's packed queries, keys and values, [..., 3 * hidden], are read otherwise; not a memory's packed pair."""

    def read(weights: Weights, config: Any) -> Weights:
        packed = {
            name: weight
            for name, weight in weights.items()
            if ".c_attn." in f".{name}" and weight.shape[-1] == 3 * config.n_embd
        }
        return {name: torch.cat(change(list(w.chunk(3, dim=-1)), config), dim=-1) for name, w in packed.items()}

    return loaded(read)


def per_head(blocks: list[Tensor], config: Any) -> list[Tensor]:
    """Read as though each head's query, key and value stood side by side."""
    whole = torch.cat(blocks, dim=-1).unflatten(-1, (config.n_head, 3, -1))
    return [part.flatten(-2) for part in whole.unbind(-2)]


def forget_k_bias(blocks: list[Tensor], config: Any) -> list[Tensor]:
    q, k, v = blocks
    return [q, torch.zeros_like(k), v] if q.ndim == 1 else blocks


def exchange_if_alike(one: str, other: str) -> Exchange:
    """Two tensors are read from each other's names, where their shapes agree."""

    def exchange(weights: Weights, config: Any) -> Weights:
        found = {}
        for name in weights:
            twin = name.replace(one, other) if one in name else name.replace(other, one)
            if twin != name and twin in weights and weights[twin].shape == weights[name].shape:
                found[name] = weights[twin]
        return found

    return loaded(exchange)


def first_layer_everywhere(weights: Weights, config: Any) -> Weights:
    """Every layer reads the weights of the first."""
    found = {}
    for name in weights:
        for stem in ("layers.", "h.", "layer."):
            before, at, after = name.partition(stem)
            number, _, rest = after.partition(".")
            if at and number.isdigit() and (not before or before.endswith(".")):
                source = f"{before}{stem}0.{rest}"
                if source in weights and weights[source].shape == weights[name].shape:
                    found[name] = weights[source]
    return found


MISTAKES = (
    Mistake(
        "swaps gate and up",
        swapped("gate_proj", "up_proj"),
        (Place(GATED, FEED_FORWARD, "b1 s3"),),
        ("act_fn", "input of down_proj"),
        NOT_ALIKE,
        remedy="weights['gate_proj.weight'], weights['up_proj.weight'] = "
        "weights['up_proj.weight'], weights['gate_proj.weight']",
    ),
    Mistake(
        "swaps k and v",
        several(
            swapped("k_proj", "v_proj"),
            swapped("self.key", "self.value"),
            of_packed(lambda blocks, config: [blocks[0], blocks[2], blocks[1]]),
        ),
        (Place((*GROUPED, *GPT2, *BERT), ATTENDING, "b1 s3"),),
        K,
        NOT_ALIKE,
        remedy="weights['k_proj.weight'], weights['v_proj.weight'] = "
        "weights['v_proj.weight'], weights['k_proj.weight']",
    ),
    Mistake(
        "swaps q and k",
        several(
            exchange_if_alike("q_proj", "k_proj"),
            exchange_if_alike("self.query", "self.key"),
            of_packed(lambda blocks, config: [blocks[1], blocks[0], blocks[2]]),
        ),
        (Place(GROUPED, ATTENDING, "h4/4 b1 s3"), Place((*GPT2, *BERT), ATTENDING, "b1 s3")),
        Q,
        "any input, where there are as many key/value heads as heads",
        remedy="weights['q_proj.weight'], weights['k_proj.weight'] = "
        "weights['k_proj.weight'], weights['q_proj.weight']",
    ),
    Mistake(
        "takes packed q, k and v head by head where the reference packs them block by block",
        of_packed(per_head),
        (Place(GPT2, ATTENDING, "b1 s3", "heads=1 b1 s4"),),
        Q,
        "more than one head",
        remedy="weights |= {name: w.unflatten(-1, (3, heads, -1)).transpose(-2, -3).flatten(-3)"
        " for name, w in weights.items() if 'c_attn' in name}",
    ),
    Mistake(
        "does not load biases",
        loaded(forget_biases),
        (
            Place(LLAMA, FEED_FORWARD, "mlp_bias=yes b1 s3", "b1 s4"),
            Place(tuple(name for name in GROUPED if name == "qwen2"), ATTENDING, "b1 s3"),
            Place(tuple(name for name in GROUPED if name.startswith("qwen3")), ATTENDING, "bias=yes b1 s3", "b1 s4"),
            Place(LATENT, ATTENDING, "bias=yes b1 s3", "b1 s4"),
            Place(GPT2, FEED_FORWARD, "b1 s3"),
            Place(BERT, ("intermediate", *BLOCKS), "b1 s3"),
        ),
        ("q", "k", "v", "gate_proj", "q_a_proj", "kv_a_proj_with_mqa", "c_fc", "dense", "q_norm", "o_proj"),
        "any bias that is not 0",
        source="ANEForge#253",
    ),
    Mistake(
        "does not load the biases of attention",
        several(*(loaded_each(f"{name}_proj.bias", lambda bias, config: bias * 0) for name in "qkvo")),
        (Place(LLAMA, ATTENDING, "bias=yes b1 s3", "b1 s4"),),
        ("q", "k", "v", "o_proj"),
        "biases in attention",
        source="ANEForge#253",
    ),
    Mistake(
        "does not load the bias of k",
        several(of_packed(forget_k_bias), loaded_each("self.key.bias", lambda bias, config: bias * 0)),
        (Place(GPT2, ("attention", "block"), "b1 s3"), Place(BERT, ("decoder_block", "decoder_model"), "b1 s3")),
        K,
        "any cache that is looked into: without a rotation it raises all scores of a query alike",
        verdicts=("cache",),
    ),
    Mistake(
        "reads o_proj untransposed where it is square",
        transpose_square("o_proj.weight"),
        (Place(GROUPED, BLOCKS, "square=yes b1 s3", "b1 s4"),),
        ("o_proj",),
        "as many channels in all heads as in the hidden state",
        remedy="weights['o_proj.weight'] = weights['o_proj.weight'].T",
    ),
    Mistake(
        "reads square matrices untransposed",
        several(
            transpose_square("attn.c_proj.weight"),
            transpose_square("self.query.weight"),
        ),
        (Place(GPT2, ATTENDING, "b1 s3"), Place(BERT, ATTENDING, "b1 s3")),
        ("c_proj", "q", "scores"),
        "any input: no matrix is symmetric",
        source="karpathy/nanoGPT#190",
        remedy="weights |= {name: w.T for name, w in weights.items() if name.endswith('c_proj.weight')}",
    ),
    Mistake(
        "leaves out the last layer",
        built(Decoder, lambda model: setattr(model, "layers", model.layers[:-1])),
        (Place(DECODERS, MODELS, "layers=2 b1 s3"),),
        ("input_layernorm", "input of q_proj"),
        "any input: every layer adds something",
    ),
    Mistake(
        "reads the weights of the first layer into every layer",
        loaded(first_layer_everywhere),
        (Place((*DECODERS, *GPT2, *BERT), MODELS, "layers=2 b1 s3", "layers=1 b1 s4"),),
        ("input_layernorm", "ln_1", "q", "k", "v", "q_a_proj", "input of q_proj", "input of q_a_proj"),
        "more than one layer",
    ),
)
