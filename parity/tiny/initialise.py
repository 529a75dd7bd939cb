"""Weights on which mistakes show.

Default initialisation (deviation 0.02, gains 1, biases 0) hides them: attention is uniform, a swapped or forgotten gain
changes nothing. Here every tensor gets the distribution of its role, which is read from its name on disk and its shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.tiny import draw

Shape = tuple[int, ...]

SHARPENED = 1.6
"""How much larger query and key projections are, so that attention is far from uniform."""

QUERY_OR_KEY = {
    *("q_proj", "k_proj"),  # llama and most others
    *("query", "key"),  # bert
    *("q_b_proj", "kv_a_proj_with_mqa"),  # deepseek: the latter's other part is normalised, so no scale shows
    "q_attn",  # gpt2's cross-attention
    "query_key_value",  # bloom: packed head by head, so that values are as large
}
PACKED: dict[str, tuple[str, ...]] = {"c_attn": ("q", "k", "v"), "in_proj_weight": ("q", "k", "v")}
PACKED_CROSS = ("k", "v")  # gpt2's cross-attention keeps its query apart
EMBEDDING = re.compile(r"embed|^wte$|^wpe$|^shared$")
ROUTER = {"gate", "router"}
STORED_IN_OUT = {"gpt2": {"c_attn", "q_attn", "c_fc", "c_proj"}}  # Conv1D's weight; everywhere else it is [out, in]


@dataclass(frozen=True)
class Distribution:
    """mean + scale * N(0, 1), clipped. The scale is one number, or broadcasts over the tensor."""

    mean: float
    scale: float | Tensor
    low: float = -math.inf
    high: float = math.inf


GAIN = Distribution(1.0, 0.5, 0.1, 1.9)
BIAS = Distribution(0.0, 0.5)
CORRECTION_BIAS = Distribution(-0.5, 0.4)
"""DeepSeek's: mostly negative, so that excluded groups filled with 0 win."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The distributions of all tensors of a module, laid end to end so that one draw fills them all.

    Attributes:
        shapes: by name on disk, in the order of the draw.
        sizes: how many elements each has.
        mean, scale, low, high: one number per element; scale holds the 1 / DEVIATION of the draw, too.
    """

    shapes: dict[str, Shape]
    sizes: list[int]
    mean: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor

    def flat(self, seed: int) -> Tensor:
        """All numbers end to end: float32, representable in bfloat16.

        Multiplication and addition stay two operations: a fused one rounds differently, and not everywhere.
        """
        numbers = torch.from_numpy(draw.centred(self.mean.numel(), seed, "weights"))
        numbers = torch.clamp(numbers.mul_(self.scale).add_(self.mean), self.low, self.high, out=numbers)
        return draw.bfloat16(numbers)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """The views of the tensors in a flat one of any dtype."""
        parts = flat.split_with_sizes(self.sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


def plan(shapes: Mapping[str, Shape], model_type: str) -> Plan:
    """Choose the distribution of each tensor by its role.

    Raises:
        ValueError: for a tensor whose role its name and shape do not tell.
    """
    shapes = {name: tuple(shape) for name, shape in shapes.items()}
    distributions = [distribution(name, shape, model_type) for name, shape in shapes.items()]
    sizes = [math.prod(shape) for shape in shapes.values()]

    def spread(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(torch.tensor(sizes)).float()

    scales = [
        torch.as_tensor(each.scale, dtype=torch.float64).expand(shape).flatten() / draw.DEVIATION
        for each, shape in zip(distributions, shapes.values(), strict=True)
    ]
    return Plan(
        shapes,
        sizes,
        mean=spread([each.mean for each in distributions]),
        scale=torch.cat(scales).float(),
        low=spread([each.low for each in distributions]),
        high=spread([each.high for each in distributions]),
    )


def fill(plan: Plan, seed: int) -> dict[str, Tensor]:
    """Draw all tensors of a plan: float32, representable in bfloat16."""
    return plan.split(plan.flat(seed))


ROLES: tuple[tuple[re.Pattern[str], Distribution], ...] = (
    (re.compile(r"e_score_correction_bias$"), CORRECTION_BIAS),
    (re.compile(r"layer_scale_\d$|^D$"), GAIN),  # poolformer, mamba
    (re.compile(r"^A_log$|^time_decay$"), Distribution(-0.5, 0.7)),  # mamba, rwkv: a state outlives a few tokens
    (re.compile(r"^time_first$"), Distribution(0.0, 1.0)),  # rwkv
    (re.compile(r"^time_mix_"), Distribution(0.5, 0.3, 0.0, 1.0)),  # rwkv: a share
)
"""What the name of a parameter tells without its shape."""
CONVOLUTION = re.compile(r"^conv|^projection$")
PER_TOKEN = re.compile(r"^per_token_")


def distribution(name: str, shape: Shape, model_type: str) -> Distribution:
    """The distribution of one tensor.

    Raises:
        ValueError: if its role is not known.
    """
    *_, module, parameter = ["", *name.split(".")]
    for pattern, role in ROLES:
        if pattern.search(parameter):
            return role
    if parameter.endswith("bias"):
        return BIAS
    if parameter == "weight" and len(shape) == 1:
        return GAIN
    if parameter == "weight" and CONVOLUTION.search(module):
        return Distribution(0.0, 1 / math.sqrt(math.prod(shape[1:])))
    if parameter == "weight" and PER_TOKEN.search(module):
        return Distribution(0.0, 1 / math.sqrt(shape[-1]))
    if not parameter.endswith("weight") or len(shape) != 2:
        raise ValueError(
            f"{name} {list(shape)}: no role is known for such a tensor of {model_type}; add it to {__name__}"
        )
    if EMBEDDING.search(module):
        return Distribution(0.0, 1.0)
    return Distribution(0.0, matrix_scale(module, parameter, shape, module in STORED_IN_OUT.get(model_type, ())))


def matrix_scale(module: str, parameter: str, shape: Shape, in_out: bool) -> float | Tensor:
    """1 / sqrt(fan in), times 1.5 for a router and 1.6 for what makes queries and keys."""
    fan_out, fan_in = reversed(shape) if in_out else shape
    scale = 1 / math.sqrt(fan_in)
    if module in ROUTER:
        return 1.5 * scale
    if module in QUERY_OR_KEY:
        return SHARPENED * scale
    blocks = PACKED.get(module) or PACKED.get(parameter)
    if blocks is None:
        return scale
    if fan_out == len(PACKED_CROSS) * fan_in:
        blocks = PACKED_CROSS
    by_block = torch.tensor([scale if block == "v" else SHARPENED * scale for block in blocks], dtype=torch.float64)
    by_row = by_block.repeat_interleave(fan_out // len(blocks))
    return by_row if in_out else by_row[:, None]
