"""A decoder caches the memory that it attends to once, row by row, and refuses one that it cannot attend to."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import family as families
from parity.compare import TRUTH_BOUND
from parity.pair import Pair
from parity.scenario import Scenario
from reimpl.bert import BertConfig
from reimpl.cache import Cache
from reimpl.config import ConfigError

pytestmark = pytest.mark.parity

ROWS, TOKENS = 3, 6
DECODERS = [("gpt2", "model"), ("bert", "decoder_model")]
CHANGES: dict[str, tuple[Callable[[Cache], None], Tensor]] = {
    "reordered": (lambda cache: cache.reorder(torch.tensor([2, 0, 1])), torch.tensor([2, 0, 1])),
    "selected": (lambda cache: cache.select(torch.tensor([True, False, True])), torch.tensor([0, 2])),
    "repeated": (lambda cache: cache.repeat(2), torch.tensor([0, 0, 1, 1, 2, 2])),
}

of_each_decoder = pytest.mark.parametrize(("model_type", "layer"), DECODERS)


def decoder(model_type: str, layer: str) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Our model with attention to a memory; ids, a memory, and which of its tokens are valid."""
    family = families.load(model_type)
    pair = Pair(family, family.layer(layer), {"cross": True, "layers": 2})
    case = pair.case(Scenario(batch=ROWS, schedule=(TOKENS,), memory=4, memory_padding=(0, 1, 2)))
    side = pair.candidate(torch.float64)
    pair.ready(side, case.scenario.seed)
    assert case.memory is not None
    assert case.memory_valid is not None
    return side.module, case.ids, case.memory, case.memory_valid


def hidden(model: Any, ids: Tensor, memory: Tensor, memory_valid: Tensor, cache: Cache | None = None) -> Tensor:
    with torch.no_grad():
        output = model(ids, memory=memory, memory_valid=memory_valid, cache=cache)
    return output[0] if isinstance(output, tuple) else output


def agree(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=TRUTH_BOUND, atol=TRUTH_BOUND)


@pytest.mark.parametrize("change", CHANGES)
@of_each_decoder
def test_rows_of_the_cache_carry_their_memory(model_type: str, layer: str, change: str) -> None:
    model, ids, memory, valid = decoder(model_type, layer)
    whole, cache, (change_rows, rows) = hidden(model, ids, memory, valid), model.make_cache(), CHANGES[change]
    hidden(model, ids[:, :-1], memory, valid, cache)
    change_rows(cache)
    gone = torch.full_like(memory[rows], torch.nan)
    agree(hidden(model, ids[rows, -1:], gone, valid[rows], cache), whole[rows, -1:])


@of_each_decoder
def test_a_cropped_cache_keeps_its_memory(model_type: str, layer: str) -> None:
    model, ids, memory, valid = decoder(model_type, layer)
    cache = model.make_cache()
    whole = hidden(model, ids, memory, valid, cache)
    cache.crop(2)
    agree(hidden(model, ids[:, 2:], torch.full_like(memory, torch.nan), valid, cache), whole[:, 2:])


@of_each_decoder
def test_one_that_nothing_attends_to_is_refused(model_type: str, layer: str) -> None:
    family = families.load(model_type)
    pair = Pair(family, family.layer(layer), {})
    memory = torch.zeros(1, 3, pair.config.hidden_size, dtype=torch.float64)
    with pytest.raises(ValueError, match="no layer attends to it: set add_cross_attention"):
        pair.candidate(torch.float64).module(torch.zeros(1, 2, dtype=torch.long), memory=memory)


def test_an_encoder_attends_to_none_and_has_no_cache() -> None:
    family = families.load("bert")
    encoder = Pair(family, family.layer("model"), {})
    with pytest.raises(ValueError, match="none can be cached: set is_decoder"):
        encoder.candidate(torch.float64).module.make_cache()
    with pytest.raises(ConfigError, match="only a decoder attends to a memory"):
        BertConfig.from_dict(encoder.reference_config.to_dict() | {"add_cross_attention": True})
