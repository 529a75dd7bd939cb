"""Which query may attend to which key: boolean, True = may attend, combined with `&`.

The last query stands beside the last key (aligned bottom-right), so that a chunk which follows a filled cache sees all
of the cache. Attention accepts such a tensor, `None` (every query may attend to every key) or the marker `CAUSAL`.

One rule for a row without any key, as padding on the left makes under a causal mask: all its weights are zero, so
attention gives 0 there. Nothing reads that value, but a NaN would reach valid rows through the gradient.
"""

from enum import Enum
from typing import Final, Literal, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Marker(Enum):
    """Masks that a kernel can apply without a tensor."""

    CAUSAL = "causal"


CAUSAL: Final = Marker.CAUSAL
Mask: TypeAlias = Bool[Tensor, "#batch #heads q k"] | Literal[Marker.CAUSAL] | None
MemoryMask: TypeAlias = Bool[Tensor, "#batch #heads q memory"] | None


def causal(q_len: int, k_len: int, device: torch.device | None = None) -> Bool[Tensor, "q_len k_len"]:
    """A query attends to its own position and those before."""
    return torch.ones(q_len, k_len, dtype=torch.bool, device=device).tril_(k_len - q_len)


def sliding(q_len: int, k_len: int, window: int, device: torch.device | None = None) -> Bool[Tensor, "q_len k_len"]:
    """A query attends to its own position and the `window - 1` before it (Beltagy et al. 2020, arXiv:2004.05150)."""
    if window < 1:
        raise ValueError(f"a sliding window holds at least the query itself: got window={window}")
    return causal(q_len, k_len, device).triu_(k_len - q_len - window + 1)


def padding(valid: Bool[Tensor, "batch k"]) -> Bool[Tensor, "batch 1 1 k"]:
    """No query attends to a key that is padding; `valid` covers the cached keys too."""
    return valid[:, None, None, :]


def bidirectional(valid: Bool[Tensor, "batch k"] | None, q_len: int) -> Bool[Tensor, "batch 1 q_len k"] | None:
    """Every query attends to every key that is not padding, as within an encoder and from a decoder to its memory.

    None where nothing is padding.
    """
    return None if valid is None or valid.all() else padding(valid).expand(-1, -1, q_len, -1)


def packed(document: Int[Tensor, "batch seq"]) -> Bool[Tensor, "batch 1 seq seq"]:
    """A query attends to the keys of its own document only, several of which share a row."""
    return document[:, None, :, None] == document[:, None, None, :]


def documents_from_positions(positions: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """Numbers the documents in each row: a new one begins where a position does not follow the one before."""
    begins = positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1
    return begins.cumsum(-1)
