"""Running scenarios through a whole reference model, as its users do: prefill, chunks, decoding, padding, windows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parity.check.record import Recorder
from parity.tiny import draw, models

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states", "layer_past")
"""What models call what they remember, in their arguments and in their outputs."""
FIRST_TOKEN, LAST_TOKENS = 6, 8
"""Ids below the one and the last ones of the vocabulary may have a meaning."""


class Undriven(ValueError):
    """A scenario that a model does not go through, with the reason."""


@dataclass(frozen=True)
class Text:
    """One scenario of a whole model.

    Attributes:
        steps: how many tokens are given at once; more than one step needs a cache.
        padding: tokens of each row that are padding.
        side: where a decoder's rows are padded; an encoder's always are behind.
        cached: whether a cache is filled.
        masked: whether a mask of all tokens so far is given, as generation does; where there is padding it always is.
        counted: whether positions are given that leave padding out.
        offset: the position of the first token, where it is given.
        scale: what the inputs of the class under test are multiplied with.
    """

    name: str
    sentence: str
    steps: tuple[int, ...]
    padding: tuple[int, ...] = (0, 0)
    cached: bool = True
    masked: bool = False
    seed: int = 0
    side: str = "left"
    counted: bool = True
    offset: int = 0
    scale: float = 1.0

    @property
    def one_pass(self) -> bool:
        """Whether it makes sense without a cache."""
        return len(self.steps) == 1 or self.name in ONE_PASS

    @property
    def length(self) -> int:
        return sum(self.steps)

    @property
    def rows(self) -> int:
        return len(self.padding)


TEXTS: Mapping[str, Text] = {
    text.name: text
    for text in (
        Text("prefill", "all tokens at once, without a cache", (11,), cached=False),
        Text("decode", "a prefill that fills a cache, then token by token", (9, 1, 1), masked=True),
        Text("chunks", "several chunks of several tokens into one cache", (7, 3, 4)),
        Text("padded", "rows of different length, with padding", (9, 1, 1), padding=(3, 0, 1)),
        Text("window", "more tokens than any window of the tiny model holds", (19, 1, 1)),
        Text("single", "a row of its own that starts with a single token", (1, 1), padding=(0,)),
    )
}
ONE_PASS = ("prefill", "padded", "single")
"""The scenarios that make sense without a cache; their first step only."""


def names(task: str) -> list[str]:
    """The scenarios that make sense for a task."""
    return [name for name in TEXTS if task != "masked" or name in ONE_PASS]


def vocabulary(config: Any) -> int:
    """How many token ids a model knows."""
    text = config.get_text_config()
    sizes = [getattr(text, name, None) for name in ("vocab_size", "src_vocab_size", "tgt_vocab_size", "n_words")]
    return min([size for size in sizes if isinstance(size, int)] or [64])


def ids(config: Any, rows: int, length: int, seed: int, stream: str) -> Tensor:
    """Token ids without a special meaning, [rows, length]."""
    span = max(vocabulary(config) - FIRST_TOKEN - LAST_TOKENS, 8)
    return FIRST_TOKEN + draw.tokens((rows, length), span, seed, stream)


def drive(model: nn.Module, task: str, text: Text, recorder: Recorder) -> None:
    """Run a scenario through a model while the recorder is on.

    Raises:
        Undriven: with the step and the reason, where the model cannot go through it.
    """
    steps = list(STEPS[task](model, text))
    accepted = inspect.signature(model.forward).parameters
    if text.offset and "position_ids" not in accepted:
        raise Undriven("the reference takes no positions")
    remembered: dict[str, Any] = {}
    with torch.no_grad(), recorder.on():
        for step, (arguments, valid, valid_so_far) in enumerate(steps):
            recorder.begin(step, valid, valid_so_far, sum(text.steps[:step]))
            named = {name: value for name, value in {**arguments, **remembered}.items() if name in accepted}
            try:
                output = model(**named)
            except Exception as error:
                raise Undriven(f"the reference raises {type(error).__name__} in step {step}: {_line(error)}") from error
            if step + 1 == len(steps) or (text.one_pass and not keeps_cache(output)):
                break
            remembered |= carried(output, accepted)


def keeps_cache(output: Any) -> bool:
    """Whether a model returned what it remembers."""
    return any(getattr(output, name, None) is not None for name in CACHE_NAMES)


def carried(output: Any, accepted: Mapping[str, Any]) -> dict[str, Any]:
    """What the next step is given of an output: the cache by the name that the model has for it, an encoder's result.

    Raises:
        Undriven: if the output has no cache.
    """
    kept = {}
    values = [getattr(output, name, None) for name in CACHE_NAMES]
    cache = next((value for value in values if value is not None), None)
    own = next((name for name in CACHE_NAMES if name in accepted), None)
    if cache is None or own is None:
        raise Undriven("the reference returns no cache to go on with")
    kept[own] = cache
    if getattr(output, "encoder_last_hidden_state", None) is not None and "encoder_outputs" in accepted:
        kept["encoder_outputs"] = models.encoded(output.encoder_last_hidden_state)
    return kept


Steps = Iterator[tuple[dict[str, Any], Tensor | None, Tensor | None]]


def _causal(model: nn.Module, text: Text) -> Steps:
    """Chunks of one text with the mask of all tokens so far, as generation gives them."""
    tokens = ids(model.config, text.rows, text.length, text.seed, "tokens")
    valid = _valid(text, text.length, text.side == "left")
    stop = 0
    for count in text.steps:
        start, stop = stop, stop + count
        arguments: dict[str, Any] = {"input_ids": tokens[:, start:stop], "use_cache": text.cached}
        if text.masked or not valid.all():
            arguments["attention_mask"] = valid[:, :stop].long()
        if not valid.all() and text.counted:
            positions = valid[:, :stop].long().cumsum(1).sub(1).clamp(min=0)
            arguments["position_ids"] = positions[:, start:stop]
        elif text.offset:
            arguments["position_ids"] = (text.offset + torch.arange(start, stop)).expand(text.rows, -1)
        yield arguments, _unless_all(valid[:, start:stop]), _unless_all(valid[:, :stop])


def _one_pass(model: nn.Module, text: Text) -> Steps:
    """All tokens at once, right-padded, of two types."""
    if not text.one_pass:
        raise Undriven("the reference sees all tokens at once and keeps no cache")
    length = text.steps[0]
    tokens = ids(model.config, text.rows, length, text.seed, "tokens")
    valid = _valid(text, length, left=False)
    pad = getattr(model.config, "pad_token_id", None)
    tokens = tokens if pad is None else tokens.where(valid, pad)
    arguments: dict[str, Any] = {"input_ids": tokens, "attention_mask": valid.long()}
    if (getattr(model.config, "type_vocab_size", None) or 0) > 1:
        arguments["token_type_ids"] = draw.tokens((text.rows, length), 2, text.seed, "types")
    yield arguments, _unless_all(valid), _unless_all(valid)


def _seq2seq(model: nn.Module, text: Text) -> Steps:
    """A right-padded source of its own length, and chunks of a target."""
    length = text.steps[0] + 4
    source = ids(model.config, text.rows, length, text.seed, "source")
    seen = torch.arange(length) < length - torch.tensor(text.padding)[:, None]
    pad = getattr(model.config, "pad_token_id", None)
    source = source if pad is None else source.where(seen, pad)
    target = ids(model.config, text.rows, text.length, text.seed, "target")
    stop = 0
    for count in text.steps:
        start, stop = stop, stop + count
        arguments = {"input_ids": source, "attention_mask": seen.long(), "use_cache": text.cached}
        yield arguments | {"decoder_input_ids": target[:, start:stop]}, _unless_all(seen), _unless_all(seen)


def _valid(text: Text, length: int, left: bool) -> Tensor:
    """Which tokens are no padding, [rows, length]."""
    padding = torch.tensor(text.padding)[:, None]
    places = torch.arange(length)
    return places >= padding if left else places < length - padding


def _unless_all(valid: Tensor) -> Tensor | None:
    return None if bool(valid.all()) else valid


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]


STEPS: Mapping[str, Callable[[nn.Module, Text], Steps]] = {"causal": _causal, "masked": _one_pass, "seq2seq": _seq2seq}
"""What a model is given step by step, by its task."""
