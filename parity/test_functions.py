"""Functions beside layers equal torch's, another library's, or their paper's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from parity.function import Function, find, functions, hold
from parity.functions import balance as balancing
from reimpl import balance, bpe, loss, position, schedule, softmax
from reimpl.marian import MarianEmbeddings

pytestmark = pytest.mark.parity
every_function = pytest.mark.parametrize("function", functions().values(), ids=functions())


@every_function
def test_equals_its_reference(function: Function) -> None:
    outcome = hold(function)
    if outcome.difference is not None:
        raise outcome.difference
    assert outcome.worst


def late_ties(self: Any, pair: tuple[str, str]) -> tuple[int, int, int, tuple[str, str]]:
    """Of equal counts the pair made last."""
    return -self.counts[pair], -self.vocabulary[pair[0]], -self.vocabulary[pair[1]], pair


def without_maximum(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.zeros_like(x.sum(dim, keepdim=True))


def unsmoothed(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return torch.log_softmax(x, dim) * (1 + 1e-6)


MISTAKES: dict[str, tuple[str, Any, str, Any]] = {
    "ties go to the newest pair": ("bpe", bpe._Corpus, "_entry", late_ties),
    "the largest entry stays": ("softmax", softmax, "_largest", without_maximum),
    "a logarithm that is off by a millionth": ("loss", loss, "log_softmax", unsmoothed),
    "the paper's first step is skipped": (
        "schedule",
        schedule,
        "learning_rate",
        lambda step, size, warmup: (size * (step + 1)) ** -0.5,
    ),
    "positions begin anew after what is cached": (
        "positions",
        MarianEmbeddings,
        "embed",
        lambda self, ids, words, seen: (
            words * self.scale + position.sinusoidal(torch.arange(words.shape[1]), words.shape[-1])
        ),
    ),
    "the bias goes the wrong way": ("balance", balance, "moved", lambda bias, load, speed: bias - speed),
}


@pytest.mark.parametrize(("name", "owner", "attribute", "wrong"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_caught(
    name: str, owner: Any, attribute: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, attribute, wrong)
    difference = hold(find(name), examples=100, seed=0, smallest=False).difference
    assert difference is not None
    assert find(name).reference in str(difference)


def test_without_its_bias_the_skewed_stream_is_not_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balancing, "SPEED", 0.0)
    stream = balancing.Stream(8, 1, 1, 1, skew=2.0, seed=0)
    failed = [judgement.quantity.name for judgement in balancing.judge(stream) if not judgement.holds]
    assert failed == ["violation of balance"]


def test_pairs_are_counted_where_they_overlap_and_merged_where_they_do_not() -> None:
    learned = bpe.train({"aaa": 1, "bcbc": 1}, size=4)
    assert learned.merges == [("a", "a")]  # twice in aaa, as often as b c, and its id is smaller
    assert learned.encode("aaaaa") == ["aa", "aa", "a"]


def test_an_end_mark_is_added_once() -> None:
    """A second one is merged with the first, and a word that is encoded with one alone lacks what was learned."""
    words = ("low", "lower", "lowest")
    once, twice = (dict.fromkeys((f"{word}{marks}" for word in words), 1) for marks in ("_", "__"))
    assert ("_", "_") in bpe.train(twice, size=15).merges
    learned = bpe.train(once, size=15)
    assert ("_", "_") not in learned.merges
    assert bpe.train(twice, size=15).encode("low_") != learned.encode("low_") == ["low_"]
