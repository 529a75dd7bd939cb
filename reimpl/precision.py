"""In what precision the delicate steps run: statistics of a norm, a softmax, angles."""

import torch
from torch import Tensor


def wide(x: Tensor) -> torch.dtype:
    """At least float32, so that half precision is left for a delicate step; float64 stays what it is."""
    return torch.promote_types(x.dtype, torch.float32)
