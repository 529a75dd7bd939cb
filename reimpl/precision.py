"""In what precision the delicate steps run: statistics of a norm, a softmax, angles, the scores of a router."""

from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def wide(x: Tensor) -> torch.dtype:
    """At least float32, so that half precision is left for a delicate step; float64 stays what it is."""
    return torch.promote_types(x.dtype, torch.float32)


def convert(module: M, dtype: torch.dtype) -> M:
    """Every parameter in a dtype, in place; those of a part that says `wide_parameters` in at least float32.

    Buffers stay what they are: they are no part of what is trained, and delicate where they are read.
    """
    for part in module.modules():
        kept = torch.promote_types(dtype, torch.float32) if getattr(part, "wide_parameters", False) else dtype
        for parameter in part.parameters(recurse=False):
            parameter.data = parameter.data.to(kept)
    return module
