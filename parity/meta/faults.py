"""Mistakes to plant into our Llama, so that the harness can be seen to catch them.

Each says where it shows and where it cannot; `parity/meta/test_faults.py` holds it to that.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from parity.meta import wrong
from parity.meta.seams import (
    Fault,
    Several,
    built,
    called,
    configured,
    exchanged,
    exchanged_in,
    loaded,
    loaded_each,
    masked,
    roped,
    scored,
    swapped,
    wrapped,
)
from reimpl import attention, decoder, feedforward, norm, rope
from reimpl.attention import Attention, MultiHead
from reimpl.cache import Cache, GrowingCache
from reimpl.decoder import CausalLM, Decoder
from reimpl.llama import LlamaDecoderLayer, LlamaModel
from reimpl.norm import RMSNorm
from reimpl.rope import RotaryEmbedding

ATTENDING = ("attention", "block", "model")
MODELS = ("model", "logits")
TABLES = ("rotary", "model")
NORMS, NORM_PARTS = ("norm", "block", "model"), ("output", "input_layernorm")
ROTATED = ("q after rotation", "k after rotation")
GATED = ("act_fn", "input of down_proj")
ONE_TOKEN, ONE_CHUNK = "b1 s1", "b1 s4"

ROPE = (
    Fault(
        "rotates adjacent pairs where the reference rotates halves",
        ATTENDING,
        ROTATED,
        wrapped(attention, "rotate", wrong.adjacent),
        unseen=ONE_TOKEN,
    ),
    Fault("rotates the wrong way", ATTENDING, ROTATED, wrapped(attention, "rotate", wrong.turn_back), ONE_TOKEN),
    Fault(
        "rotates k the wrong way, and q the right way",
        ATTENDING,
        ("k after rotation",),
        exchanged(Attention, "turn", wrong.turn_k_back),
        unseen=ONE_TOKEN,
    ),
    Fault(
        "leaves k unrotated",
        ATTENDING,
        ("k after rotation",),
        exchanged(Attention, "turn", wrong.turn_q_only),
        unseen=ONE_TOKEN,
    ),
    Fault(
        "rotates v too",
        ATTENDING,
        ("cached v", "context"),
        wrapped(Attention, "forward", wrong.turn_v_too),
        unseen=ONE_TOKEN,
    ),
    Fault(
        "permutes the rows of k with the number of query heads",
        ATTENDING,
        ("k",),
        Several(*(loaded_each(f"k_proj.{name}", wrong.permute_by_query_heads) for name in ("weight", "bias"))),
        unseen="heads=4/4 head_dim=8 b1 s4",
    ),
    Fault(
        "uses the positions of the first row for all rows",
        ATTENDING,
        ROTATED,
        wrapped(attention, "rotate", wrong.same_for_all_rows),
        unseen="b3 s4",
    ),
    Fault("ignores rope_theta", TABLES, ("cos",), roped(lambda fields: {"rope_theta": 10000.0}), ONE_CHUNK),
    Fault(
        "takes i/d for the exponent 2i/d of the frequencies",
        TABLES,
        ("cos",),
        wrapped(rope, "_periods", wrong.halve_exponent),
        unseen=ONE_TOKEN,
    ),
    Fault(
        "ignores the scaling of the frequencies",
        TABLES,
        ("cos",),
        configured(wrong.scale_nothing),
        unseen=ONE_CHUNK,
    ),
    Fault("multiplies by the linear factor", TABLES, ("cos",), roped(wrong.multiply_linear), ONE_CHUNK),
    Fault(
        "scales frequencies by the extended length for the original one",
        TABLES,
        ("cos",),
        roped(wrong.take_longer_length),
        unseen="rope=linear b1 s4",
    ),
    Fault(
        "keeps the frequencies of a long prompt for a short one",
        ("rotary",),
        ("cos",),
        wrapped(rope.Growing, "__call__", wrong.stay_long),
        unseen="rope=dynamic b1 s2,2,2",
        prop="tables",
    ),
    Fault(
        "drops the attention factor of yarn",
        TABLES,
        ("cos",),
        exchanged(rope, "_yarn_attention_factor", lambda given: 1.0),
        unseen="rope=longrope b1 s4",
    ),
    Fault(
        "takes the short factors of longrope at any length",
        TABLES,
        ("cos",),
        exchanged(rope.Switching, "__call__", rope.Fixed.__call__),
        unseen="rope=longrope b1 s4",
    ),
    Fault(
        "counts positions in bfloat16",
        TABLES,
        ("cos",),
        wrapped(RotaryEmbedding, "forward", wrong.count_in_bfloat16),
        unseen="b1 s12",
    ),
    Fault(
        "computes angles in the model's dtype",
        TABLES,
        ("rotary angle",),
        exchanged(rope, "wide", lambda x: x.dtype),
        unseen="b1 s4 f32",
        verdicts=("output", "cache", "precision"),
        dtype="bf16",
    ),
)

NORM = (
    Fault("ignores rms_norm_eps", NORMS, NORM_PARTS, configured(lambda fields: {"rms_norm_eps": 1e-6}), ONE_CHUNK),
    Fault("adds eps outside of the root", NORMS, NORM_PARTS, exchanged(norm, "inverse_rms", wrong.add_eps_outside)),
    Fault("subtracts the mean", NORMS, NORM_PARTS, wrapped(RMSNorm, "forward", wrong.subtract_mean)),
    Fault(
        "divides the squares by n - 1",
        NORMS,
        NORM_PARTS,
        exchanged(norm, "inverse_rms", wrong.divide_by_n_minus_one),
    ),
    Fault("forgets the gains", NORMS, NORM_PARTS, loaded_each("norm.weight", lambda gain, config: gain * 0 + 1)),
    Fault("adds 1 to the gains", NORMS, NORM_PARTS, loaded_each("norm.weight", lambda gain, config: gain + 1)),
    Fault(
        "normalises in the model's dtype",
        NORMS,
        ("norm statistic",),
        exchanged(norm, "wide", lambda x: x.dtype),
        unseen="b1 s4 f32",
        verdicts=("output", "cache", "precision"),
        dtype="bf16",
    ),
    Fault(
        "detaches the statistic of the norm",
        NORMS,
        ("gradient of input", "gradient of input of post_attention_layernorm", "gradient of output"),
        wrapped(norm, "inverse_rms", wrong.detach_statistic),
        verdicts=("gradient",),
        prop="gradients",
    ),
    Fault(
        "swaps the gains of the two norms of a layer",
        ("block", "model"),
        ("input_layernorm",),
        swapped("input_layernorm", "post_attention_layernorm"),
    ),
    Fault(
        "skips the final norm",
        MODELS,
        ("norm",),
        built(LlamaModel, lambda model: setattr(model.norm, "forward", lambda x: x)),
    ),
    Fault(
        "takes the residual after the norm",
        ("block", "model"),
        ("input of post_attention_layernorm",),
        wrapped(LlamaDecoderLayer, "forward", wrong.residual_after_norm),
    ),
    Fault(
        "adds the residual in place",
        ("block",),
        ("writes to x in torch.float64",),
        wrapped(LlamaDecoderLayer, "forward", wrong.residual_in_place),
        verdicts=("side effects",),
    ),
)

ATTENTION = (
    Fault("does not scale the scores", ATTENDING, ("scores",), scored(lambda layer: 1 / layer.scale), ONE_TOKEN),
    Fault("scales the scores twice", ATTENDING, ("scores",), scored(lambda layer: layer.scale), ONE_TOKEN),
    Fault(
        "scales by hidden_size / heads for head_dim",
        ATTENDING,
        ("scores",),
        scored(wrong.hidden_over_heads),
        unseen="square=yes b1 s4",
    ),
    Fault(
        "tiles key/value heads where the reference repeats each",
        ATTENDING,
        ("scores",),
        wrapped(MultiHead, "mix", wrong.tile),
        unseen="heads=4/1 b1 s4",
    ),
    Fault(
        "mixes heads and channels when heads are joined",
        ATTENDING,
        ("context", "o_proj"),
        wrapped(MultiHead, "mix", wrong.merge_channels_first),
        unseen="heads=1/1 b1 s4",
    ),
    Fault(
        "masks the weights after the softmax",
        ATTENDING,
        ("weights",),
        exchanged(MultiHead, "mix", wrong.mask_weights),
        unseen=ONE_TOKEN,
    ),
    Fault("drops weights out in eval", ATTENDING, ("weights", "context"), wrapped(MultiHead, "mix", wrong.drop)),
    Fault(
        "takes the softmax in the model's dtype",
        ATTENDING,
        ("softmax",),
        exchanged(attention, "wide", lambda x: x.dtype),
        unseen="attend=eager b1 s4 f32",
        verdicts=("output", "cache", "precision"),
        dtype="bf16",
    ),
    Fault(
        "detaches k",
        ATTENDING,
        ("gradient of k", "gradient of k after rotation"),
        wrapped(Attention, "turn", wrong.detach_k),
        verdicts=("gradient",),
        prop="gradients",
        unseen="b1 s1",
    ),
)

MASKS_AND_POSITIONS = (
    Fault(
        "aligns the causal mask top-left",
        MODELS,
        ("weights",),
        Several(*(exchanged(module, "causal", wrong.causal_from_the_top) for module in (attention, decoder))),
        unseen="b1 s4,1",
    ),
    Fault(
        "lets no token see itself",
        MODELS,
        ("weights",),
        Several(*(exchanged(module, "causal", wrong.causal_without_itself) for module in (attention, decoder))),
    ),
    Fault("masks nothing", MODELS, ("weights",), exchanged(decoder, "decoder_mask", lambda *_: None), ONE_TOKEN),
    Fault("ignores padding", MODELS, ("weights",), masked(lambda **_: {"valid": None}), ONE_CHUNK),
    Fault(
        "forgets the padding in decoding",
        MODELS,
        ("weights",),
        masked(wrong.forget_padding_when_decoding),
        unseen="b2 s4 left0,2",
    ),
    Fault(
        "lets packed documents see each other",
        MODELS,
        ("weights",),
        exchanged(decoder, "packed", lambda document: torch.ones_like(document, dtype=torch.bool)[:, None, None]),
        unseen="b1 s4,1",
    ),
    Fault("decodes from position 0 again", MODELS, ("cos",), called(Decoder, wrong.decode_from_zero), ONE_CHUNK),
    Fault("ignores the positions given", MODELS, ("cos",), called(Decoder, lambda given: {"positions": None}), "b1 s4"),
    Fault(
        "counts positions from 1",
        MODELS,
        ("cos", *ROTATED),
        wrapped(RotaryEmbedding, "forward", wrong.count_from_one),
        verdicts=("cache",),
    ),
)

CACHE = (
    Fault(
        "puts new keys before those in the cache",
        ATTENDING,
        ("weights", "scores"),
        wrapped(GrowingCache, "append", wrong.newest_first),
        unseen=ONE_CHUNK,
    ),
    Fault(
        "attends to the new keys only",
        ATTENDING,
        ("cached k", "scores", "weights"),
        wrapped(GrowingCache, "append", wrong.newest_only),
        unseen=ONE_CHUNK,
    ),
    Fault(
        "stores keys as values and values as keys",
        ATTENDING,
        ("cached k",),
        wrapped(GrowingCache, "append", wrong.keys_for_values),
        verdicts=("cache",),
    ),
    Fault(
        "goes on with the cache of the prompt before",
        ("model",),
        ("cached k", "cos", *ROTATED, "scores", "weights"),
        wrapped(Decoder, "make_cache", wrong.once),
    ),
    Fault(
        "gives every layer the cache of the first",
        MODELS,
        ("cached k", "scores", "weights"),
        exchanged(Cache, "__getitem__", lambda self, index: self.layers[0]),
        unseen="layers=1 b1 s4",
    ),
)

WEIGHTS_AND_THE_REST = (
    Fault(
        "generates as though no prompt were padded",
        ("logits",),
        (),
        wrapped(CausalLM, "generate", lambda generate: lambda *args, valid, **named: generate(*args, **named)),
        unseen="b2 s4",
        prop="generation",
    ),
    Fault("swaps gate and up", ("mlp", "block"), GATED, swapped("gate_proj", "up_proj")),
    Fault("swaps k and v", ATTENDING, ("k", "k after rotation", "cached k"), swapped("k_proj", "v_proj")),
    Fault(
        "does not load biases",
        ("attention", "mlp", "block"),
        ("q", "gate_proj"),
        loaded_each("bias", lambda bias, config: bias * 0),
        unseen=ONE_CHUNK,
    ),
    Fault(
        "reads o_proj untransposed where it is square",
        ("block", "model"),
        ("o_proj",),
        loaded_each("o_proj.weight", lambda weight, config: weight.T if weight.shape[0] == weight.shape[1] else weight),
        unseen=ONE_CHUNK,
    ),
    Fault(
        "ties the head to the embeddings where it is not",
        ("logits",),
        ("lm_head",),
        loaded(lambda weights, config: {"lm_head.weight": weights.get("model.embed_tokens.weight", torch.zeros(0))}),
        unseen="tie=yes b1 s4",
    ),
    Fault(
        "scales the embeddings",
        MODELS,
        ("embed_tokens", "input_layernorm"),
        built(LlamaModel, lambda model: model.embed_tokens.register_forward_hook(lambda module, ids, out: 6 * out)),
    ),
    Fault(
        "leaves out the last layer",
        MODELS,
        ("input_layernorm",),
        built(LlamaModel, lambda model: setattr(model, "layers", model.layers[:-1])),
    ),
    Fault(
        "computes the exact GELU for the one by tanh",
        ("mlp", "block"),
        ("act_fn",),
        exchanged_in(feedforward.ACTIVATIONS, gelu_pytorch_tanh=F.gelu),
        unseen="act=gelu b1 s4",
    ),
    Fault("ignores hidden_act", ("mlp", "block"), GATED, configured(lambda fields: {"hidden_act": "silu"}), "b1 s4"),
)

FAULTS = (*ROPE, *NORM, *ATTENTION, *MASKS_AND_POSITIONS, *CACHE, *WEIGHTS_AND_THE_REST)
