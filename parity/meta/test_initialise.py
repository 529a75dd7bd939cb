"""Every tensor is drawn by its role, and a tensor without a role is refused."""

import math

import pytest
import torch
from torch import Tensor

from parity.tiny import draw, initialise

HIDDEN = 36
UNIT = 1 / math.sqrt(HIDDEN)
SHARP = 1.6 * UNIT


def planned_scale(name: str, shape: tuple[int, ...], model_type: str) -> Tensor:
    plan = initialise.plan({name: shape}, model_type)
    return (plan.scale.double() * draw.DEVIATION).view(shape)


def roughly(expected: float | list[float]) -> object:
    return pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "shape", "model_type", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (48, HIDDEN), "llama", SHARP),
        ("model.layers.0.self_attn.k_proj.weight", (24, HIDDEN), "llama", SHARP),
        ("model.layers.0.self_attn.v_proj.weight", (24, HIDDEN), "llama", UNIT),
        ("model.layers.0.self_attn.o_proj.weight", (HIDDEN, 48), "llama", 1 / math.sqrt(48)),
        ("model.layers.0.self_attn.q_proj.bias", (48,), "llama", 0.5),
        ("model.layers.0.input_layernorm.weight", (HIDDEN,), "llama", 0.5),
        ("model.embed_tokens.weight", (61, HIDDEN), "llama", 1),
        ("lm_head.weight", (61, HIDDEN), "llama", UNIT),
        ("model.layers.0.self_attn.q_a_proj.weight", (20, HIDDEN), "deepseek_v3", UNIT),
        ("model.layers.0.self_attn.q_b_proj.weight", (48, 20), "deepseek_v3", 1.6 / math.sqrt(20)),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (32, HIDDEN), "deepseek_v3", SHARP),
        ("model.layers.0.mlp.gate.weight", (8, HIDDEN), "deepseek_v3", 1.5 * UNIT),
        ("model.layers.0.mlp.gate.e_score_correction_bias", (8,), "deepseek_v3", 0.4),
        ("model.layers.0.mlp.gate_proj.weight", (44, HIDDEN), "deepseek_v3", UNIT),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", (44, HIDDEN), "deepseek_v3", UNIT),
        ("model.layers.0.block_sparse_moe.gate.weight", (8, HIDDEN), "mixtral", 1.5 * UNIT),
        ("model.layers.0.block_sparse_moe.experts.3.w1.weight", (44, HIDDEN), "mixtral", UNIT),
        ("bert.encoder.layer.0.attention.self.query.weight", (HIDDEN, HIDDEN), "bert", SHARP),
        ("bert.embeddings.position_embeddings.weight", (64, HIDDEN), "bert", 1),
        ("bert.embeddings.LayerNorm.weight", (HIDDEN,), "bert", 0.5),
        ("transformer.wpe.weight", (64, HIDDEN), "gpt2", 1),
        ("transformer.h.0.mlp.c_fc.weight", (HIDDEN, 44), "gpt2", UNIT),
        ("model.shared.weight", (61, HIDDEN), "marian", 1),
        ("poolformer.encoder.patch_embeddings.0.projection.weight", (6, 3, 5, 5), "poolformer", 1 / math.sqrt(75)),
        ("layers.0.channel_mixer.per_token_up.weight", (3, 12, 16), "rankmixer", 1 / math.sqrt(16)),
        ("poolformer.encoder.block.0.0.layer_scale_1", (6,), "poolformer", 0.5),
        ("final_logits_bias", (1, 61), "marian", 0.5),
    ],
)
def test_scale_follows_the_role(name: str, shape: tuple[int, ...], model_type: str, expected: float) -> None:
    scale = planned_scale(name, shape, model_type)
    assert scale.min() == roughly(expected)
    assert scale.max() == roughly(expected)


@pytest.mark.parametrize(
    ("name", "shape", "model_type", "axis", "expected"),
    [
        ("transformer.h.0.attn.c_attn.weight", (HIDDEN, 3 * HIDDEN), "gpt2", 1, [SHARP, SHARP, UNIT]),
        ("transformer.h.0.crossattention.c_attn.weight", (HIDDEN, 2 * HIDDEN), "gpt2", 1, [SHARP, UNIT]),
        ("layers.0.self_attn.in_proj_weight", (3 * HIDDEN, HIDDEN), "transformer", 0, [SHARP, SHARP, UNIT]),
    ],
)
def test_packed_projections_are_sharpened_by_block(
    name: str, shape: tuple[int, ...], model_type: str, axis: int, expected: list[float]
) -> None:
    blocks = planned_scale(name, shape, model_type).split(HIDDEN, dim=axis)
    assert [block.min().item() for block in blocks] == roughly(expected)
    assert [block.max().item() for block in blocks] == roughly(expected)


def test_gains_stay_between_a_tenth_and_nearly_two() -> None:
    gains = initialise.fill(initialise.plan({"norm.weight": (10_000,)}, "llama"), seed=0)["norm.weight"]
    assert gains.min() == draw.bfloat16(torch.tensor(0.1))
    assert gains.max() == draw.bfloat16(torch.tensor(1.9))
    assert gains.mean().item() == pytest.approx(1, abs=0.02)


def test_correction_biases_are_mostly_negative() -> None:
    name = "mlp.gate.e_score_correction_bias"
    biases = initialise.fill(initialise.plan({name: (10_000,)}, "deepseek_v3"), seed=0)[name]
    assert biases.mean().item() == pytest.approx(-0.5, abs=0.02)
    assert 0.8 < (biases < 0).double().mean() < 1


def test_seeds_differ_and_repeat() -> None:
    plan = initialise.plan({"q_proj.weight": (48, HIDDEN), "norm.weight": (HIDDEN,)}, "llama")
    assert torch.equal(plan.flat(1), plan.flat(1))
    assert not torch.equal(plan.flat(1), plan.flat(2))


@pytest.mark.parametrize(
    ("name", "shape"), [("self_attn.sinks", (6,)), ("experts.gate_up_proj", (4, 88, 36)), ("fold.weight", (4, 1, 3))]
)
def test_a_tensor_without_a_role_is_refused_by_name(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=name):
        initialise.plan({name: shape}, "llama")
