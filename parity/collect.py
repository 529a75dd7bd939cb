"""Every number that a candidate's operations read or produce, and whether a quantity of the reference is among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parity.compare import TRUTH_BOUND

MASKED = torch.finfo(torch.float64).min / 2  # what lies below was taken out by a mask


class Collect(TorchDispatchMode):
    """Keeps the numbers of every tensor that an operation reads or produces, as long as the context lasts.

    What is read matters, too: a cache that is written in place is never produced as a whole.

    Args:
        weights: tensors which are not worth keeping; no quantity consists of them.
    """

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._kept: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._keep(func, (args, kwargs))
        result = func(*args, **(kwargs or {}))
        self._keep(func, result)
        return result

    def _keep(self, func: Any, tensors: Any) -> None:
        if func.is_view:
            return
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            if tensor.untyped_storage().data_ptr() in self._weights:
                continue
            place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor._version)
            if place not in self._kept:  # the tensor is kept beside its copy, so that no other one takes its place
                self._kept[place] = tensor, tensor.detach().double().flatten().clone()

    @cached_property
    def _numbers(self) -> Tensor:
        """All numbers collected, sorted, between two infinities."""
        ends = torch.tensor([-math.inf, math.inf], dtype=torch.float64)
        return torch.cat([ends, *(copy for _, copy in self._kept.values())]).nan_to_num(nan=math.inf).sort().values

    def has(self, value: Tensor, scale: float = 0.0) -> bool:
        """Whether all numbers of a tensor are among those collected, by the bound that decides in float64.

        Args:
            scale: what the bound is relative to, where that is more than the tensor's own root mean square.
        """
        flat, nearest = self._nearest(value)
        return bool((nearest <= _bound(flat, scale)).all())

    def distance(self, value: Tensor) -> float:
        """How far a tensor's numbers are from the nearest collected ones, relative to its root mean square."""
        flat, nearest = self._nearest(value)
        size = flat.square().mean().sqrt()
        return (nearest.square().mean().sqrt() / size).item() if flat.numel() and size else 0.0

    def _nearest(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers of a tensor that no mask took out, and how far the nearest collected one is from each."""
        flat = value[value > MASKED].detach().double().contiguous()
        at = torch.searchsorted(self._numbers, flat).clamp(1, len(self._numbers) - 1)
        return flat, torch.minimum((self._numbers[at] - flat).abs(), (self._numbers[at - 1] - flat).abs())

    def has_in_order(self, value: Tensor) -> bool:
        """Whether the last of a tensor's rows stands somewhere as a row, too, which a wrong order would break up."""
        row = value.detach().double().reshape(-1, value.shape[-1])[-1]
        bound = _bound(row)
        tables = (copy.view(-1, len(row)) for _, copy in self._kept.values() if copy.numel() % len(row) == 0)
        return any(bool(((table - row).abs() <= bound).all(dim=1).any()) for table in tables)


def _bound(numbers: Tensor, scale: float = 0.0) -> Tensor:
    own = numbers.square().mean().sqrt().item() if numbers.numel() else 0.0
    return TRUTH_BOUND * (numbers.abs() + max(scale, own))


class Unfused(TorchFunctionMode):
    """Repeats every fused attention step by step, so that its scores and weights can be collected."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            with torch.no_grad():
                _scores_and_weights(*args, **kwargs)
        return func(*args, **kwargs)


def _scores_and_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """What `F.scaled_dot_product_attention` says that it computes on its way, under the names of its arguments."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.mT
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    scores.softmax(-1)
