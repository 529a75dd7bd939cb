"""Random numbers that are the same on every platform and in every version of numpy and torch.

A stream is named by a seed and a word. The two are hashed into the key of Philox (Salmon et al., *Parallel random
numbers: as easy as 1, 2, 3*, 2011), whose raw output numpy promises never to change. A normal number is the
standardised sum of four random bytes (Irwin-Hall: kurtosis -0.3, nothing beyond 3.5). The sum is a small integer and
exact in float32, so one IEEE multiplication is all the rounding there is, and no `log` or `cos` of some platform's
library takes part. Torch's own generators promise none of this. Bytes suffice: the sums take about as many values as
bfloat16 tells apart in that range, and wider lanes cost twice the time.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LANES = 4
LANE_VALUES = 2**8
MEAN = LANES * (LANE_VALUES - 1) // 2
DEVIATION = math.sqrt(LANES * (LANE_VALUES**2 - 1) / 12)

# Making a generator takes 8 us, setting the state of one takes 1 us, and every drawn example pays.
_PHILOX = np.random.Philox(key=0)
_FRESH = _PHILOX.state
# Numpy converts a Python number anew in every operation.
_BYTE, _HALF, _EVEN_BYTES, _BOTH_HALVES = (np.uint32(word) for word in (8, 16, 0x00FF00FF, 0x00010001))
_MEAN, _STANDARD = np.int32(MEAN), np.float32(1 / DEVIATION)


def raw(count: int, seed: int, stream: str) -> NDArray[np.uint64]:
    """The first `count` raw numbers of a stream."""
    key = blake2b(f"{seed}:{stream}".encode(), digest_size=16).digest()
    _FRESH["state"]["key"] = np.frombuffer(key, dtype="<u8")
    _PHILOX.state = _FRESH
    return _PHILOX.random_raw(count)


def byte_sums(numbers: NDArray[np.uint32]) -> NDArray[np.int32]:
    """The sum of the four bytes of each number; `numbers` is used up."""
    odd_bytes = numbers >> _BYTE
    odd_bytes &= _EVEN_BYTES
    numbers &= _EVEN_BYTES
    odd_bytes += numbers
    odd_bytes *= _BOTH_HALVES  # the upper half now holds the sum of both halves
    odd_bytes >>= _HALF
    return odd_bytes.view(np.int32)


def centred(count: int, seed: int, stream: str) -> NDArray[np.float32]:
    """`count` normal numbers not yet divided by DEVIATION: whole numbers."""
    words = raw((count + 1) // 2, seed, stream).astype("<u8", copy=False).view("<u4")[:count]
    sums = byte_sums(words)
    sums -= _MEAN
    return sums.astype(np.float32)


def normal(shape: int | Sequence[int], seed: int, stream: str) -> Tensor:
    """Normal numbers N(0, 1) in float32."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    numbers = centred(math.prod(shape), seed, stream)
    numbers *= _STANDARD
    return torch.from_numpy(numbers).view(shape)


def tokens(shape: int | Sequence[int], vocabulary: int, seed: int, stream: str) -> Tensor:
    """Token ids below `vocabulary`, int64."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    ids = raw(math.prod(shape), seed, stream) % np.uint64(vocabulary)
    return torch.from_numpy(ids.astype(np.int64)).view(shape)


def bfloat16(x: Tensor) -> Tensor:
    """The nearest numbers that bfloat16 can represent, in float32: exact in every dtype but float16's narrow range."""
    return x.to(torch.float32).to(torch.bfloat16).to(torch.float32)
