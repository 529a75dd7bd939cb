"""Weights on which mistakes show, for a model of which nothing is known beforehand.

`initialise` tells roles by names on disk, for the families that we have written. Here the owner of a tensor tells more:
the kind of module it belongs to, its shape, and what the class itself initialises it with (a gain with ones, or with
zeros where one is added to it; a bias with zeros).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from parity.tiny import draw
from parity.tiny.initialise import BIAS, GAIN, QUERY_OR_KEY, ROUTER, SHARPENED, Distribution

ZERO_GAIN = Distribution(0.0, 0.5, -0.9, 0.9)
"""Of a norm that multiplies by 1 + weight."""
LEARNT_SCALE = 0.25
"""How far a parameter moves whose own start matters: decay rates, time steps, temperatures."""
CORRECTION_BIAS = Distribution(-1.2, 0.4)
"""DeepSeek's. A tiny model has few experts, so that nearly all biased scores must be negative for a 0 to win."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)


def state(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """A tensor for each name in the model's state, float64 and representable in bfloat16; tied ones are one object."""
    owners, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    drawn: dict[int, Tensor] = {}
    tensors = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in drawn:
            path, _, own = name.rpartition(".")
            drawn[id(value)] = sensitive(name, own, value.detach(), owners.get(path, model), name in parameters, seed)
        tensors[name] = drawn[id(value)]
    return tensors


def sensitive(name: str, own: str, initial: Tensor, owner: nn.Module, learnt: bool, seed: int) -> Tensor:
    """One tensor of a state; what is not floating point, and a buffer whose meaning is not known, stays."""
    if not initial.is_floating_point():
        return initial.clone()
    distribution = role(name, own, initial, owner, learnt)
    if distribution is None:
        return draw.bfloat16(initial).double()
    numbers = draw.normal(tuple(initial.shape), seed, name).double()
    mean = initial.double() if math.isnan(distribution.mean) else distribution.mean
    return draw.bfloat16((numbers * distribution.scale + mean).clamp(distribution.low, distribution.high)).double()


AROUND_INITIAL = Distribution(math.nan, LEARNT_SCALE)
"""A mean that is not a number stands for what the class itself starts with."""


def role(name: str, own: str, initial: Tensor, owner: nn.Module, learnt: bool) -> Distribution | None:
    """The distribution of a tensor, or None for one that is to stay as it is."""
    if "e_score_correction_bias" in name:
        return CORRECTION_BIAS
    if not learnt:
        return {"running_mean": BIAS, "running_var": GAIN}.get(own)
    if isinstance(owner, nn.Embedding):
        return Distribution(0.0, 1.0)
    constant = initial.numel() > 0 and bool((initial == initial.flatten()[0]).all())
    if own.endswith("bias") or (initial.ndim == 1 and constant and initial[0] == 0 and own != "weight"):
        return BIAS
    if initial.ndim == 1 and own == "weight":
        return ZERO_GAIN if constant and initial[0] == 0 else GAIN
    if initial.ndim < 2 or _starts_by_rule(own):
        return GAIN if constant and initial.numel() and initial.flatten()[0] == 1 else AROUND_INITIAL
    return Distribution(0.0, matrix_scale(name, tuple(initial.shape), owner))


def _starts_by_rule(own: str) -> bool:
    return own in ("A_log", "D", "dt_bias", "A", "decay", "time_decay")


def matrix_scale(name: str, shape: tuple[int, ...], owner: nn.Module) -> float:
    """1 / sqrt(fan in), times 1.5 for a router and 1.6 for what makes queries and keys."""
    if isinstance(owner, CONVOLUTIONS):
        fan_in = math.prod(shape[1:])
    elif isinstance(owner, Conv1D):
        fan_in = shape[0]
    else:
        fan_in = shape[-1]
    words = name.split(".")[-2:]
    factor = 1.5 if ROUTER.intersection(words) else SHARPENED if QUERY_OR_KEY.intersection(words) else 1.0
    return factor / math.sqrt(fan_in)


def load(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill a model of any dtype, every name of it.

    Raises:
        KeyError: for a name of the model that has no tensor.
    """
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            value.copy_(tensors[name])
