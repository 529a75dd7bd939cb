"""Gaps of attention, shown on the reference alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity import family as families
from parity import oracle, reference
from parity.demonstrations.tools import F64, SEED, apart, eager_from_sdpa, filled, from_one_pass, outputs, pair_at
from parity.pair import forward, run_truth
from parity.scenario import Scenario

ROOT = Path(__file__).parents[2]


def under_mask(mask: Callable[[Tensor], Tensor | None]) -> float:
    """The same of Llama's attention, called on its own with a mask made from the one that is added to scores."""
    scenario = Scenario(schedule=(5,), seed=SEED)
    pair = pair_at("llama", "attention", scenario)
    side, case = filled(pair), pair.case(scenario)
    args, named = side.arguments(case, case.steps[0], case.x, side.tables(case))
    named["attention_mask"] = mask(named["attention_mask"])

    def call() -> Tensor:
        with oracle.lifted():
            return side.output(side.module(*args, **named))["output"]

    return eager_from_sdpa(side, call)


def latent_eps(inside: bool) -> float:
    """As built, and with the configuration's epsilon written into every norm."""
    scenario = Scenario(config=(("eps", 1e-2 if inside else 1e-6),), schedule=(5,), seed=SEED)
    pair = pair_at("deepseek_v3", "attention", scenario)
    built = outputs(pair, scenario)
    for module in pair.reference(F64).module.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = pair.reference_config.rms_norm_eps
    return apart(outputs(pair, scenario), built)


def window_of_one(inside: bool) -> float:
    window = (("window", 1 if inside else 2),)
    return from_one_pass("mistral", Scenario(config=window, schedule=(4, 1, 1, 1), seed=SEED))


def packed_cache(inside: bool) -> float:
    """Two documents in a row beside each alone: with a cache or a mask that hides nothing, whichever is nearer."""
    packed = Scenario(schedule=(6,), packing=(3, 3), seed=SEED)
    pair = pair_at("llama", "model", packed)
    case, alone = pair.case(packed), pair.case(Scenario(schedule=(3,), seed=SEED))
    documents = [run_truth(pair, alone.varied(ids=ids), forward).values[0] for ids in case.ids.split(3, dim=1)]
    if not inside:
        return apart(outputs(pair, packed), torch.cat(documents, dim=1))
    masked = run_truth(pair, case.varied(valid=torch.ones(1, 6, dtype=torch.bool)), forward).values[0]
    cached = outputs(pair, replace(packed, schedule=(5, 1)))
    return min(apart(each, torch.cat(documents, dim=1)) for each in (masked, cached))


def empty_row(inside: bool) -> float:
    """Padded queries, which see nothing before them, and those that are none."""
    scenario = Scenario(schedule=(5,), padding=(2,), seed=SEED)
    pair = pair_at("llama", "model", scenario)
    side, case = filled(pair), pair.case(scenario)

    def call() -> Tensor:
        with oracle.lifted():
            output = side(case, case.steps[0], case.ids)["output"]
        return output[:, :2] if inside else output[:, 2:]

    return eager_from_sdpa(side, call)


def no_mask(inside: bool) -> float:
    return under_mask(lambda mask: None if inside else mask)


def boolean_mask(inside: bool) -> float:
    return under_mask(lambda mask: mask == 0 if inside else mask)


def dynamic_chunks(inside: bool) -> float:
    """Past the limit of 64 tokens, and well within it."""
    dynamic = (("rope", "dynamic"),)
    return from_one_pass("llama", Scenario(config=dynamic, schedule=(6, 1, 1), offset=60 if inside else 1, seed=SEED))


def longrope_chunks(inside: bool) -> float:
    """Across the original limit of 16 tokens, and beyond it from the first."""
    longrope = (("rope", "longrope"),)
    return from_one_pass("llama", Scenario(config=longrope, schedule=(6, 1, 1), offset=10 if inside else 20, seed=SEED))


def dynamic_history(inside: bool) -> float:
    """A prompt past the limit of 64 tokens, and one within it, after a longer one and without that."""
    scenario = Scenario(config=(("rope", "dynamic"),))
    config, x = pair_at("llama", "rotary", scenario).reference_config, torch.zeros(1)

    def tables(*lengths: int) -> Tensor:
        module = reference.layer_class("llama", "LlamaRotaryEmbedding")(config)
        return torch.cat([module(x, torch.arange(length)[None]) for length in lengths][-1])

    length = 70 if inside else 60
    return apart(tables(90, length), tables(length))


def partial_rotary(inside: bool) -> float:
    """How many channels turn under two rope types that say the same."""
    turning, both = [], {"rope_theta": 10000.0, "partial_rotary_factor": 0.5 if inside else 1.0}
    for rope in ({"rope_type": "default"}, {"rope_type": "linear", "factor": 1.0}):
        config = reference.make_config({"model_type": "llama", "head_dim": 8, "rope_parameters": {**rope, **both}})
        module: Any = reference.layer_class("llama", "LlamaRotaryEmbedding")(config)
        turning.append(len(module.inv_freq))
    return abs(turning[0] - turning[1])


def half_buffers(inside: bool) -> float:
    """Read in bfloat16, and read in float32 and then cast, or not."""
    family, directory = families.load("llama"), ROOT / "fixtures" / "llama"
    read, other = (
        reference.load(family, family.layers[-1], directory, dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    other = other.to(torch.bfloat16) if inside else other
    return apart(*(model.get_submodule("model.rotary_emb").get_buffer("inv_freq") for model in (other, read)))
