"""Masks are those which a model of transformers hands to its attention layers.

A hook reads them off a model of one layer, at every chunk of a cached sequence.
"""

import inspect
from collections.abc import Mapping
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from parity import reference
from reimpl.mask import causal, documents_from_positions, packed, padding, sliding

pytestmark = pytest.mark.parity

SCHEDULES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
WINDOWS = st.integers(2, 7)  # with 1 the reference's cached and uncached masks differ: gap window-of-one


class Theirs:
    """A model of one layer, Llama or with a window Mistral, and the mask which that layer was given last."""

    def __init__(self, window: int | None) -> None:
        family = {"model_type": "llama"} if window is None else {"model_type": "mistral", "sliding_window": window}
        sizes = {"hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 1, "num_key_value_heads": 1}
        self.config = reference.make_config(family | sizes | {"head_dim": 4, "num_hidden_layers": 1, "vocab_size": 3})
        self.config._attn_implementation = "eager"  # which always gets its masks, and as tensors
        self.model = self._class()(self.config).eval()
        self.model.get_submodule("layers.0.self_attn").register_forward_pre_hook(self._see, with_kwargs=True)
        self.accepted = inspect.signature(self.model.forward).parameters

    def _class(self) -> type[nn.Module]:
        model_type = self.config.model_type
        return reference.layer_class(model_type, f"{model_type.capitalize()}Model")

    def _see(self, layer: nn.Module, args: Any, named: Mapping[str, Any]) -> None:
        self.seen = named["attention_mask"] == 0  # 0 is added to a score that counts

    @torch.no_grad()
    def mask(self, rows: int, length: int, **named: Any) -> Tensor:
        """May attend, [rows, 1, queries, keys]."""
        self.model(torch.zeros(rows, length, dtype=torch.long), **named)
        return self.seen

    def masks(self, schedule: list[int], valid: Tensor | None = None) -> list[Tensor]:
        """One mask per chunk of a sequence that goes through a cache."""
        kept = reference.modeling(self.config.model_type).DynamicCache(config=self.config)
        caches = {name: kept for name in reference.CACHE_NAMES if name in self.accepted}
        rows = 1 if valid is None else len(valid)
        return [
            self.mask(rows, size, attention_mask=None if valid is None else valid[:, :stop].long(), **caches)
            for size, stop in zip(schedule, accumulate(schedule), strict=True)
        ]


theirs = cache(Theirs)


@st.composite
def padded(draw: st.DrawFn) -> tuple[list[int], Tensor]:
    """A schedule and which tokens of two rows are valid: padding on the left, on the right or anywhere."""
    schedule = draw(SCHEDULES)
    row = st.lists(st.booleans(), min_size=sum(schedule), max_size=sum(schedule))
    return schedule, torch.tensor(draw(st.lists(row | row.map(sorted), min_size=2, max_size=2)))


def spans(schedule: list[int], window: int | None = None) -> list[tuple[int, int, int]]:
    """First key, queries, and one past the last key of every chunk; a sliding cache keeps window - 1 tokens."""
    return [
        (0 if window is None else max(0, stop - size - window + 1), size, stop)
        for stop, size in zip(accumulate(schedule), schedule, strict=True)
    ]


def check(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for step, (our_mask, their_mask) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(our_mask.expand(their_mask.shape), their_mask), f"chunk {step}: {our_mask}, not {their_mask}"


@given(schedule=SCHEDULES)
def test_a_chunk_sees_itself_and_the_whole_cache(schedule: list[int]) -> None:
    check([causal(size, stop) for _, size, stop in spans(schedule)], theirs(None).masks(schedule))


@given(schedule=SCHEDULES, window=WINDOWS)
def test_a_chunk_sees_its_window_across_the_caches_edge(schedule: list[int], window: int) -> None:
    ours = [sliding(size, stop - first, window) for first, size, stop in spans(schedule, window)]
    check(ours, theirs(window).masks(schedule))


@given(drawn=padded())
def test_padding_is_seen_by_no_query(drawn: tuple[list[int], Tensor]) -> None:
    schedule, valid = drawn
    ours = [causal(size, stop) & padding(valid[:, :stop]) for _, size, stop in spans(schedule)]
    check(ours, theirs(None).masks(schedule, valid))


@given(drawn=padded(), window=WINDOWS)
def test_padding_within_a_window_is_seen_by_no_query(drawn: tuple[list[int], Tensor], window: int) -> None:
    schedule, valid = drawn
    ours = [
        sliding(size, stop - first, window) & padding(valid[:, first:stop])
        for first, size, stop in spans(schedule, window)
    ]
    check(ours, theirs(window).masks(schedule, valid))


@st.composite
def packed_positions(draw: st.DrawFn) -> Tensor:
    """Two rows of documents, which may begin at any position, also at one that continues the document before."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    row = st.tuples(*(st.integers(0, 5) for _ in lengths))
    return torch.tensor(
        [
            [start + step for start, length in zip(starts, lengths, strict=True) for step in range(length)]
            for starts in draw(st.tuples(row, row))
        ]
    )


@given(positions=packed_positions(), window=WINDOWS | st.none())
def test_packed_documents_see_only_themselves(positions: Tensor, window: int | None) -> None:
    rows, length = positions.shape
    ours = causal(length, length) if window is None else sliding(length, length, window)
    their_mask = theirs(window).mask(rows, length, position_ids=positions, use_cache=False)
    check([ours & packed(documents_from_positions(positions))], [their_mask])


def test_a_window_without_the_query_is_refused() -> None:
    with pytest.raises(ValueError, match="got window=0"):
        sliding(2, 2, 0)
