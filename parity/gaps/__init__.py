"""Known divergences inside the reference: places where it contradicts itself, so that no candidate can be blamed.

Each has a name, the versions in which it is known, a sentence and a reason. A mismatch in such a place that is gone
right outside of it is a known gap, not a failure; one that stays is the candidate's own. `parity/test_gaps.py` shows
every gap on the installed reference alone, and fails once it has closed.

Most gaps no drawn scenario meets, as something steps around them: that place names the gap, the gap names the place.
"""

from __future__ import annotations

from parity.gaps.attention import (
    BOOLEAN_MASK,
    DYNAMIC_CHUNKS,
    DYNAMIC_HISTORY,
    EMPTY_ROW,
    HALF_BUFFERS,
    LATENT_EPS,
    LONGROPE_CHUNKS,
    NO_MASK,
    PACKED_CACHE,
    PARTIAL_ROTARY,
    WINDOW_OF_ONE,
)
from parity.gaps.gap import Gap, Place
from parity.gaps.models import (
    BLOOM_GELU,
    GPT2_SCALES,
    GPT2_UPCAST,
    JITTER_IN_PLACE,
    MAMBA_CHUNKS,
    MAMBA_MASK,
    QWEN3_MOE_DENSE,
    RWKV_EPS,
    RWKV_ONE_LAYER,
    RWKV_RESCALED,
    RWKV_ROWS,
    RWKV_WIDTH,
)
from parity.gaps.of_torch import ENCODER_NAN, ENCODER_ZEROS, HALF_FOURIER

GAPS = (
    LATENT_EPS,
    WINDOW_OF_ONE,
    PACKED_CACHE,
    EMPTY_ROW,
    NO_MASK,
    BOOLEAN_MASK,
    DYNAMIC_CHUNKS,
    DYNAMIC_HISTORY,
    LONGROPE_CHUNKS,
    PARTIAL_ROTARY,
    HALF_BUFFERS,
    GPT2_SCALES,
    GPT2_UPCAST,
    BLOOM_GELU,
    JITTER_IN_PLACE,
    QWEN3_MOE_DENSE,
    MAMBA_CHUNKS,
    MAMBA_MASK,
    RWKV_ROWS,
    RWKV_RESCALED,
    RWKV_EPS,
    RWKV_WIDTH,
    RWKV_ONE_LAYER,
    HALF_FOURIER,
    ENCODER_NAN,
    ENCODER_ZEROS,
)


def at(place: Place) -> list[Gap]:
    """The gaps that are known in what is installed and that a scenario leads into."""
    return [gap for gap in GAPS if gap.known and gap.applies(place)]


__all__ = ["ENCODER_NAN", "GAPS", "WINDOW_OF_ONE", "Gap", "Place", "at"]
