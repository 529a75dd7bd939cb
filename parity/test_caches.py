"""Caches hold what the reference's caches hold, whatever is done to them, and never rewrite what they handed out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from parity.reference import DynamicCache, make_config
from reimpl import cache as caches
from reimpl.cache import Cache, CrossCache, GrowingCache, LatentCache, SlidingCache

pytestmark = pytest.mark.parity

ROWS_AT_MOST = 6
KV_HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5


def poisoned(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Storage in which a slot that nobody wrote is NaN."""
    return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)


@pytest.fixture(autouse=True)
def _poison_unused_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "allocate", poisoned)
    monkeypatch.setattr(caches, "WORTH_ROOM", 0)


def their_layer(window: int | None) -> Any:
    """The reference's cache of one layer; Mistral has a window on every layer, Llama on none."""
    model_type = "llama" if window is None else "mistral"
    fields = {
        "model_type": model_type,
        "num_hidden_layers": 1,
        **({} if window is None else {"sliding_window": window}),
    }
    return DynamicCache(config=make_config(fields)).layers[0]


def numbered(start: int, *shape: int) -> Tensor:
    """Every number occurs once, so that no two slots can be mistaken for each other."""
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64).view(shape)


class CacheMachine(RuleBasedStateMachine):
    """Drives a cache of ours and the reference's side by side."""

    window: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.theirs = their_layer(self.window)
        self.ours = GrowingCache() if self.window is None else SlidingCache(self.window)
        self.batch, self.written = 1, 0
        self.shown: list[tuple[Tensor, Tensor]] = []
        self.losses: list[Tensor] = []

    @initialize(batch=st.integers(1, 3), capacity=st.none() | st.integers(1, 9))
    def build(self, batch: int, capacity: int | None) -> None:
        self.batch = batch
        if self.window is None:
            self.ours = GrowingCache(capacity)

    def fresh(self, tokens: int, dim: int) -> Tensor:
        new = numbered(self.written, self.batch, KV_HEADS, tokens, dim)
        self.written += new.numel()
        return new

    @rule(tokens=st.integers(1, 6), record=st.booleans())
    def append(self, tokens: int, record: bool) -> None:
        keys, values = self.fresh(tokens, KEY_DIM), self.fresh(tokens, VALUE_DIM)
        with torch.no_grad():
            wanted = self.theirs.update(keys, values)
        with torch.set_grad_enabled(record):
            got = self.ours.append(keys.requires_grad_(record), values.requires_grad_(record))
            if record:
                self.losses.append(got[0].square().sum() + got[1].square().sum())
        for ours, theirs in zip(got, wanted, strict=True):
            assert torch.equal(ours, theirs)
            self.shown.append((ours, ours.detach().clone()))

    @precondition(lambda self: self.ours.length)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(1, self.ours.length), label="length")
        if length == self.ours.length:
            self.ours.crop(length)
        elif self.window is not None and self.ours.length >= self.window:
            with pytest.raises(ValueError, match=f"crop before the window of {self.window} is full"):
                self.ours.crop(length)
        else:
            self.theirs.crop(length - self.ours.length)
            self.ours.crop(length)

    @precondition(lambda self: self.ours.length)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        row = st.integers(0, self.batch - 1)
        index = torch.tensor(data.draw(st.lists(row, min_size=self.batch, max_size=self.batch), label="index"))
        self.theirs.reorder_cache(index)
        self.ours.reorder(index)

    @precondition(lambda self: self.ours.length)
    @rule(times=st.integers(1, 3))
    def repeat(self, times: int) -> None:
        if self.batch * times > ROWS_AT_MOST:
            return
        self.batch *= times
        self.theirs.batch_repeat_interleave(times)
        self.ours.repeat(times)

    @precondition(lambda self: self.ours.length)
    @rule(data=st.data(), boolean=st.booleans())
    def select(self, data: st.DataObject, boolean: bool) -> None:
        chosen = data.draw(st.sets(st.integers(0, self.batch - 1), min_size=1), label="rows")
        rows = torch.tensor(sorted(chosen))
        if boolean:
            rows = torch.zeros(self.batch, dtype=torch.bool).index_fill(0, rows, True)
        self.batch = len(chosen)
        self.theirs.batch_select_indices(rows)
        self.ours.select(rows)

    @precondition(lambda self: self.ours.length)
    @rule(batch=st.integers(1, 3))
    def reset(self, batch: int) -> None:
        """A cache that was reset serves a batch of another size."""
        self.batch = batch
        self.theirs.reset()
        self.ours.reset()

    @invariant()
    def both_hold_the_same(self) -> None:
        assert self.ours.length == self.theirs.get_seq_length()
        if self.ours.length:
            assert torch.equal(self.ours.keys, self.theirs.keys)
            assert torch.equal(self.ours.values, self.theirs.values)

    @invariant()
    def what_was_handed_out_stays(self) -> None:
        for shown, copy in self.shown:
            assert torch.equal(shown, copy)

    def teardown(self) -> None:
        """What autograd saved at a step was not written to by any later one."""
        for loss in self.losses:
            loss.backward(retain_graph=True)


class SlidingMachine(CacheMachine):
    """The same across the window's edge."""

    window = 4


class NarrowMachine(CacheMachine):
    """The same where a single token is kept."""

    window = 2


TestGrowing, TestSliding, TestNarrow = CacheMachine.TestCase, SlidingMachine.TestCase, NarrowMachine.TestCase


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_a_window_of_one_keeps_nothing(sizes: list[int]) -> None:
    """The reference keeps everything here, the gap window-of-one, so there is nothing to hold ours against."""
    cache = SlidingCache(1)
    for tokens in sizes:
        new = numbered(cache.length, 1, 1, tokens, 1)
        assert torch.equal(cache.append(new, new)[0], new)
    assert cache.length == sum(sizes)
    assert cache.keys.shape[-2] == 0


def test_a_window_that_is_full_can_be_cropped_to_nothing() -> None:
    cache = SlidingCache(3)
    cache.append(numbered(0, 1, 1, 7, 1), numbered(0, 1, 1, 7, 1))
    cache.crop(0)
    seen, _ = cache.append(numbered(7, 1, 1, 2, 1), numbered(7, 1, 1, 2, 1))
    assert seen.flatten().tolist() == [7, 8]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.data())
def test_a_latent_cache_holds_all_it_was_given(sizes: list[int], data: st.DataObject) -> None:
    latents, rope_keys = numbered(0, 2, sum(sizes), 5), numbered(1000, 2, sum(sizes), 3)
    cache = LatentCache()
    with torch.no_grad():
        for first, second in zip(latents.split(sizes, 1), rope_keys.split(sizes, 1), strict=True):
            cache.append(first, second)
    kept = data.draw(st.integers(0, sum(sizes)), label="kept")
    cache.crop(kept)
    cache.reorder(torch.tensor([1, 0]))
    assert torch.equal(cache.latents, latents[:, :kept].flip(0))
    assert torch.equal(cache.rope_keys, rope_keys[:, :kept].flip(0))


def test_a_cross_cache_is_filled_once() -> None:
    memory = numbered(0, 2, 1, 4, 3)
    cache = CrossCache()
    cache.append(memory, memory)
    with pytest.raises(ValueError, match="a memory of 4 tokens is cached already; reset"):
        cache.append(memory, memory)
    cache.crop(1)
    assert torch.equal(cache.keys, memory)


OPERATIONS: dict[str, Callable[[Cache | GrowingCache], None]] = {
    "crop": lambda cache: cache.crop(1),
    "select": lambda cache: cache.select(torch.tensor([1])),
    "reorder": lambda cache: cache.reorder(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.repeat(2),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_done_to_a_cache_is_done_to_every_layer(operation: str) -> None:
    layers, alone = [GrowingCache(), SlidingCache(9)], GrowingCache()
    cache = Cache(layers)
    for layer in (*layers, alone):
        layer.append(numbered(0, 2, 1, 4, 3), numbered(50, 2, 1, 4, 3))
    OPERATIONS[operation](cache)
    OPERATIONS[operation](alone)
    assert cache.length == alone.length
    for layer in layers:
        assert layer.length == alone.length
        if alone.length:
            assert torch.equal(layer.keys, alone.keys)
            assert torch.equal(layer.values, alone.values)


TWO, THREE = numbered(0, 2, 1, 1, 3), numbered(0, 3, 1, 1, 3)
REFUSALS: dict[str, tuple[Callable[[GrowingCache], object], str]] = {
    "another batch": (
        lambda cache: cache.append(THREE, THREE),
        "the last but one, must agree",
    ),
    "another width": (lambda cache: cache.append(TWO, TWO[..., :2]), "the last but one, must agree"),
    "crop beyond the end": (lambda cache: cache.crop(5), "cannot crop to 5 tokens: the cache has seen 4"),
    "crop below zero": (lambda cache: cache.crop(-1), "cannot crop to -1 tokens"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_refusal_changes_nothing(what: str) -> None:
    act, message = REFUSALS[what]
    cache = GrowingCache()
    kept = numbered(0, 2, 1, 4, 3)
    cache.append(kept, kept)
    with pytest.raises(ValueError, match=message):
        act(cache)
    assert cache.length == 4
    assert torch.equal(cache.keys, kept)
    assert torch.equal(cache.values, kept)


def test_an_empty_cache_says_so() -> None:
    with pytest.raises(ValueError, match="nothing was appended to this cache yet"):
        _ = GrowingCache().keys


def test_a_window_without_room_for_the_token_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="at least the token itself"):
        SlidingCache(0)


def test_a_step_writes_one_row_and_copies_none() -> None:
    cache = GrowingCache(capacity=64)
    with torch.no_grad():
        cache.append(numbered(0, 1, 1, 8, 3), numbered(0, 1, 1, 8, 3))
        places = {cache.append(numbered(0, 1, 1, 1, 3), numbered(0, 1, 1, 1, 3))[0].data_ptr() for _ in range(56)}
    assert len(places) == 1


@torch.no_grad()
def test_rows_that_a_crop_gives_back_are_not_written_again() -> None:
    cache = GrowingCache(capacity=64)
    cache.append(numbered(0, 1, 1, 4, 3), numbered(0, 1, 1, 4, 3))
    shown, _ = cache.append(numbered(12, 1, 1, 4, 3), numbered(12, 1, 1, 4, 3))
    cache.crop(5)
    cache.append(-numbered(0, 1, 1, 2, 3), -numbered(0, 1, 1, 2, 3))
    assert torch.equal(shown, numbered(0, 1, 1, 8, 3))
