"""Drawn numbers are the same on every platform. What differs from the record here makes every fixture differ."""

import math
from collections.abc import Iterator
from hashlib import blake2b, sha256

import pytest
import torch
from torch import Tensor

from parity.tiny import draw

WORD = 2**64


def digest(x: Tensor) -> str:
    """Of the bytes, in little-endian order."""
    array = x.numpy()
    return sha256(array.astype(array.dtype.newbyteorder("<")).tobytes()).hexdigest()[:16]


def philox(first: int, second: int) -> Iterator[int]:
    """Philox4x64-10 (Salmon et al. 2011, section 4.3), written out in whole numbers."""
    counter = 0
    while True:
        counter = counter + 1
        a, b, c, d = counter, 0, 0, 0
        for turn in range(10):
            key = (first + turn * 0x9E3779B97F4A7C15) % WORD, (second + turn * 0xBB67AE8584CAA73B) % WORD
            left, right = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
            a, b, c, d = right // WORD ^ b ^ key[0], right % WORD, left // WORD ^ d ^ key[1], left % WORD
        yield from (a, b, c, d)


@pytest.mark.parametrize(
    ("shape", "seed", "stream", "recorded"),
    [((1000,), 0, "weights", "dda12863c66e289a"), ((7, 11), 2**40, "x", "8427eaf7eed3a7aa")],
)
def test_normal_numbers_equal_the_recorded(shape: tuple[int, ...], seed: int, stream: str, recorded: str) -> None:
    assert digest(draw.normal(shape, seed, stream)) == recorded


def test_tokens_equal_the_recorded() -> None:
    assert digest(draw.tokens((3, 5), 61, 0, "ids")) == "bd1fa50e82272f63"


def test_rounded_numbers_equal_the_recorded() -> None:
    assert digest(draw.bfloat16(draw.normal(1000, 0, "weights"))) == "8ed60052530a83a7"


def test_normal_numbers_are_what_the_docstring_says() -> None:
    key = blake2b(b"3:x", digest_size=16).digest()
    numbers = philox(int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little"))
    halves = [half for _, number in zip(range(50), numbers, strict=False) for half in (number % 2**32, number >> 32)]
    sums = torch.tensor([sum(half.to_bytes(4, "little")) for half in halves], dtype=torch.float32)
    assert torch.equal((sums - 510) * (1 / math.sqrt((2**16 - 1) / 3)), draw.normal(100, 3, "x"))


def test_normal_numbers_are_normal_enough() -> None:
    x = draw.normal(10**6, 0, "moments").double()
    error = 5 / math.sqrt(len(x))  # five standard errors of the first moment, the others' are within twice that
    assert abs(x.mean()) < error
    assert abs(x.var() - 1) < 2 * error
    assert abs((x**4).mean() - 2.7) < 10 * error
    assert x.abs().max() < 3.5


def test_seeds_and_streams_are_independent() -> None:
    streams = torch.stack([draw.normal(10**5, seed, stream) for seed in (0, 1) for stream in ("x", "weights")])
    correlation = torch.corrcoef(streams) - torch.eye(4)
    assert correlation.abs().max() < 5 / math.sqrt(10**5)


def test_a_longer_draw_begins_with_the_shorter() -> None:
    assert torch.equal(draw.normal(7, 0, "x"), draw.normal(1000, 0, "x")[:7])


def test_nothing_carries_over_from_one_draw_to_the_next() -> None:
    first = draw.normal(3, 0, "x")
    draw.tokens(5, 61, 0, "ids")
    assert torch.equal(first, draw.normal(3, 0, "x"))


def test_every_token_occurs() -> None:
    assert draw.tokens(10**4, 61, 0, "ids").unique().tolist() == list(range(61))


def test_torch_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    draw.normal(10, 0, "x")
    assert torch.equal(before, torch.get_rng_state())
