"""Gaps of single models, shown on the reference alone."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from parity import oracle, reference
from parity.demonstrations.tools import F64, SEED, apart, eager_from_sdpa, filled, from_one_pass, outputs, pair_at
from parity.pair import gradients, run_truth
from parity.reference import Reference
from parity.scenario import Scenario


def gpt2_scales(inside: bool) -> float:
    scenario = Scenario(config=(("scaled", not inside),), schedule=(5,), seed=SEED)
    pair = pair_at("gpt2", "attention", scenario)
    side, case = filled(pair), pair.case(scenario)
    return eager_from_sdpa(side, lambda: side(case, case.steps[0], case.x)["output"])


def gpt2_upcast(inside: bool) -> float:
    """Infinitely far where eager refuses to run."""
    scenario = Scenario(config=(("upcast", inside),), schedule=(5,), seed=SEED)
    pair = pair_at("gpt2", "attention", scenario)
    as_asked = Reference(replace(pair.family, exact={}), pair.layer, pair.reference_config, F64)
    side, case = filled(pair, as_asked), pair.case(scenario)
    try:
        return eager_from_sdpa(side, lambda: side(case, case.steps[0], case.x)["output"])
    except RuntimeError:
        return math.inf


def bloom_gelu(inside: bool) -> float:
    """Beside the gradient of what the reference computes forward, for negative inputs and for others."""
    source = reference.modeling("bloom")
    x = (torch.linspace(-4, -1, 50) if inside else torch.linspace(0, 4, 50)).double().requires_grad_()
    values = source.BloomGelu().train()(x), source.bloom_gelu_forward(x)
    return apart(*(torch.autograd.grad(value.sum(), x)[0] for value in values))


def jitter_in_place(inside: bool) -> float:
    """What the caller gave, after the call and before it."""
    scenario = Scenario(config=(("jitter", 0.1 if inside else 0.0),), schedule=(5,), seed=SEED)
    pair = pair_at("mixtral", "moe", scenario)
    x = pair.case(scenario).x
    given = x.clone()
    with torch.no_grad(), torch.random.fork_rng():
        filled(pair).module.train()(given)
    return apart(given, x)


def qwen3_moe_dense(inside: bool) -> float:
    """Infinitely far where it fails."""
    pair = pair_at("qwen3_moe", "logits", Scenario(config=(("layers", 2), ("only", "both" if inside else "first"))))
    side, ids = filled(pair), torch.zeros(1, 3, dtype=torch.long)
    with torch.no_grad(), oracle.lifted():
        try:
            return apart(side.module(ids, output_router_logits=True).logits, side.module(ids).logits)
        except IndexError:
            return math.inf


def mamba_chunks(inside: bool) -> float:
    return from_one_pass("mamba", Scenario(schedule=(3, 2) if inside else (3, 1, 1), seed=SEED))


def mamba_mask(inside: bool) -> float:
    """A decoding step under the mask of all tokens, and of the new one, from one pass over a padded row."""
    scenario = Scenario(batch=2, schedule=(4, 1), padding=(2, 0), seed=SEED)
    pair = pair_at("mamba", "model", scenario)
    side, case = filled(pair), pair.case(scenario)
    assert case.valid is not None
    masks = case.valid[:, :4], case.valid if inside else case.valid[:, 4:]
    cache = side.new_cache()
    with torch.no_grad(), oracle.lifted():
        whole = side.module(case.ids, attention_mask=case.valid.long()).last_hidden_state
        for ids, mask in zip(case.ids.split([4, 1], dim=1), masks, strict=True):
            last = side.module(ids, attention_mask=mask.long(), cache=cache, use_cache=True).last_hidden_state
    return apart(last[:, -1], whole[:, -1])


def rwkv_rows(inside: bool) -> float:
    """Single tokens of two rows beside each row by itself; another number of tokens is infinitely far."""
    scenario = Scenario(batch=2 if inside else 1, schedule=(2, 1), seed=SEED)
    pair = pair_at("rwkv", "model", scenario)
    chunks, whole = outputs(pair, scenario), outputs(pair, replace(scenario, schedule=(3,)))
    return apart(chunks, whole) if chunks.shape == whole.shape else math.inf


def rwkv_rescaled(inside: bool) -> float:
    """The gradient of a weight that is halved, from that which is not, twice as large in one place."""
    found = []
    for rescale in (0, 1 if inside else 0):
        scenario = Scenario(config=(("rescale", rescale), ("eps", 1e-6)), schedule=(4,), seed=SEED)
        pair = pair_at("rwkv", "model", scenario)
        record = run_truth(pair, pair.case(scenario), gradients)
        found += [v for q, v in zip(record.quantities, record.values, strict=True) if "1.attention.output" in q.name]
    return apart(*found)


def rwkv_eps(inside: bool) -> float:
    """As built, and with the configuration's epsilon written into every norm."""
    scenario = Scenario(config=(("eps", 1e-2 if inside else 1e-5),), schedule=(4,), seed=SEED)
    pair = pair_at("rwkv", "model", scenario)
    built = outputs(pair, scenario)
    for module in pair.reference(F64).module.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = pair.reference_config.layer_norm_epsilon
    return apart(outputs(pair, scenario), built)


def rwkv_width(inside: bool) -> float:
    """With a state from without."""
    scenario = Scenario(config=(("inner", "twice" if inside else "same"),), schedule=(4,), seed=SEED)
    pair = pair_at("rwkv", "attention", scenario)
    side, case = filled(pair), pair.case(scenario)
    with torch.no_grad(), oracle.lifted():
        without = side(case, case.steps[0], case.x)["output"]
        try:
            return apart(side(case, case.steps[0], case.x, cache=side.new_cache())["output"], without)
        except RuntimeError:
            return math.inf


def rwkv_one_layer(inside: bool) -> float:
    try:
        pair_at("rwkv", "model", Scenario(config=(("layers", 1 if inside else 2),))).reference(F64)
    except ZeroDivisionError:
        return math.inf
    return 0.0
