"""One example as a recipe: small, frozen, printable on one line, and rebuilt from that line.

A scenario never holds a tensor. It says which configuration, which rows, which cache schedule and which seed; whoever
runs it draws the numbers from the seed. Its line is a list of words, in any order; what is not said has its default:

    rope=yarn h6/3 d8 b2 s5,1,1 left0,2 @1000 x0.01 f32 #17

    h6/3        6 query heads over 3 key/value heads        name=value  any other axis of the family's configuration
    d8          head_dim                                    b2          rows of one case
    s5,1,1      chunks: prefill of 5, two decoding steps    left0,2     padding per row (left, right, inner)
    packed3,4   documents of 3 and 4 tokens in each row     @1000       position of the first token
    masked      positions count valid tokens only           x0.01       scale of the inputs
    m5-0,2      memory of 5 tokens, padding of each row     typed       tokens of several types
    w7          tokens are pixels, 7 in a row of an image
    f32         dtypes (f64, f32, bf16, f16; comma)         #17         seed of weights and inputs
    *8          cases stacked into one call
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
)
DTYPE_NAMES: Mapping[str, str] = MappingProxyType(
    {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"} | {name: name for name in DTYPES}
)
SIDES = ("left", "right", "inner")
LETTERS: Mapping[str, str] = MappingProxyType({"h": "heads", "d": "head_dim"})

MOST_TOKENS = 2**20  # of one call; more would not fit into memory

LARGEST = 1e18
"""Of the scales of inputs. Their squares stay finite in float32."""

AxisValue = bool | int | float | str


class ScenarioError(ValueError):
    """A scenario's line that cannot be read, or a recipe that contradicts itself."""


@dataclass(frozen=True)
class Scenario:
    """One example of a property. See the module's text for the words of its line.

    `config` holds the axes of the family's configuration that are not at their first choice. `padding` counts the
    padded tokens of each row, `side` says where they stand. `memory` is the number of tokens an encoder left for the
    layer to attend to, of which the last `memory_padding` are padding. Where tokens are the pixels of an image, it is
    `columns` wide. `stack` repeats the rows with other inputs, so
    that one call of the layer checks that many cases.
    """

    config: tuple[tuple[str, AxisValue], ...] = ()
    batch: int = 1
    schedule: tuple[int, ...] = (2,)
    side: str = "left"
    padding: tuple[int, ...] = ()
    packing: tuple[int, ...] = ()
    offset: int = 0
    masked_positions: bool = False
    memory: int = 0
    memory_padding: tuple[int, ...] = ()
    typed: bool = False
    columns: int = 0
    scale: float = 1.0
    dtypes: tuple[str, ...] = tuple(DTYPES)
    seed: int = 0
    stack: int = field(default=1)

    def __post_init__(self) -> None:
        _require(self.batch > 0, f"batch is {self.batch}, but should be at least 1")
        _require(self.stack > 0, f"stack is {self.stack}, but should be at least 1")
        _require(bool(self.schedule) and min(self.schedule) > 0, f"every chunk needs a token, got {self.schedule}")
        _require(self.side in SIDES, f"padding side is {self.side!r}, but should be one of {', '.join(SIDES)}")
        _require(
            len(self.padding) in (0, self.batch),
            f"{self.side}{_join(self.padding)} pads {len(self.padding)} rows, but b{self.batch} says that there are"
            f" {self.batch}: give one number per row",
        )
        _require(
            all(0 <= count < self.length for count in self.padding),
            f"{self.side}{_join(self.padding)} leaves a row of {self.length} tokens empty: pad fewer",
        )
        _require(not (self.padding and self.packing), "packed rows have no padding: leave one of the two words out")
        _require(
            self.packing == () or sum(self.packing) == self.length,
            f"packed{_join(self.packing)} are {sum(self.packing)} tokens, but a row has {self.length}: make them equal",
        )
        _require(self.packing == () or min(self.packing) > 0, f"every document needs a token, got {self.packing}")
        _require(
            self.rows * self.length <= MOST_TOKENS, f"{self.rows * self.length:,} tokens; {MOST_TOKENS:,} are the most"
        )
        _require(self.offset < 2**31, f"position {self.offset} is beyond every table; the last is {2**31 - 1}")
        _require(self.offset >= 0, f"offset is {self.offset}, but positions start at 0 or later")
        _require(self.memory >= 0, f"memory is {self.memory}, but should be a number of tokens")
        _require(
            len(self.memory_padding) in (0, self.batch),
            f"m{self.memory}-{_join(self.memory_padding)} pads {len(self.memory_padding)} memories, but b{self.batch}"
            f" says that there are {self.batch} rows: give one number per row",
        )
        _require(
            all(0 <= count < self.memory for count in self.memory_padding),
            f"padding {self.memory_padding} leaves a memory of {self.memory} tokens empty",
        )
        _require(self.columns >= 0, f"an image is {self.columns} pixels wide, but should have some")
        _require(
            self.columns == 0 or self.length % self.columns == 0,
            f"{self.length} pixels do not fill an image that is {self.columns} wide",
        )
        _require(
            1 / LARGEST <= self.scale <= LARGEST,
            f"scale is {self.scale:g}, but should lie between {1 / LARGEST:g} and {LARGEST:g}, as errors are squared",
        )
        _require(bool(self.dtypes), "at least one dtype is needed")
        for name in self.dtypes:
            _require(name in DTYPES, f"dtype {name!r} is none of {', '.join(DTYPES)}")

    @property
    def length(self) -> int:
        """Tokens of a row, over all chunks."""
        return sum(self.schedule)

    @property
    def rows(self) -> int:
        """Rows of one call: the cases stacked, each of `batch` rows."""
        return self.batch * self.stack

    @property
    def values(self) -> dict[str, AxisValue]:
        """The configuration's axes that this scenario sets."""
        return dict(self.config)

    def only(self, dtype: str) -> Scenario:
        """The same scenario in one dtype."""
        return replace(self, dtypes=(dtype,))

    def __str__(self) -> str:
        return format_scenario(self)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ScenarioError(message)


def format_scenario(scenario: Scenario) -> str:
    """The scenario's line, which `parse_scenario` reads back."""
    letters = {name: letter for letter, name in LETTERS.items()}
    words = [
        f"{letters[name]}{value}" if name in letters else f"{name}={_format_value(value)}"
        for name, value in scenario.config
    ]
    words += [f"b{scenario.batch}", "s" + _join(scenario.schedule)]
    if any(scenario.padding):
        words.append(scenario.side + _join(scenario.padding))
    if scenario.packing:
        words.append("packed" + _join(scenario.packing))
    if scenario.masked_positions:
        words.append("masked")
    if scenario.memory:
        words.append(f"m{scenario.memory}" + f"-{_join(scenario.memory_padding)}" * any(scenario.memory_padding))
    if scenario.typed:
        words.append("typed")
    if scenario.columns:
        words.append(f"w{scenario.columns}")
    if scenario.offset:
        words.append(f"@{scenario.offset}")
    if scenario.scale != 1.0:
        words.append("x" + _format_scale(scenario.scale))
    if scenario.dtypes != tuple(DTYPES):
        words.append(",".join(scenario.dtypes))
    words.append(f"#{scenario.seed}")
    if scenario.stack > 1:
        words.append(f"*{scenario.stack}")
    return " ".join(words)


def parse_scenario(line: str) -> Scenario:
    """Read a scenario's line.

    Raises:
        ScenarioError: naming the word that is not understood, or what the words contradict.
    """
    fields: dict[str, Any] = {}
    config: dict[str, AxisValue] = {}
    for word in line.split():
        try:
            read = _parse_word(word)
        except ValueError as error:
            raise ScenarioError(
                f"scenario word {word!r} is not understood: {error}; words are, for example, {_EXAMPLE}"
            ) from None
        axes = read.pop("config", {})
        _require(
            not (axes.keys() & config.keys() or read.keys() & fields.keys()),
            f"scenario word {word!r} says again what another word has said; leave one of them out",
        )
        config |= axes
        fields |= read
    return Scenario(config=tuple(config.items()), **fields)


_EXAMPLE = "'rope=yarn h6/3 d8 b2 s5,1,1 left0,2 @1000 x0.01 f32 #17'"


def _parse_word(word: str) -> dict[str, Any]:
    """The fields of a scenario that a word sets."""
    if "=" in word:
        name, _, text = word.partition("=")
        return {"config": {name: _parse_value(text)}}
    if word in _FLAGS:
        return {_FLAGS[word]: True}
    if all(part in DTYPE_NAMES for part in word.split(",")):
        return {"dtypes": tuple(DTYPE_NAMES[part] for part in word.split(","))}
    if word[0] in LETTERS and word[1:2].isdigit():
        return {"config": {LETTERS[word[0]]: _parse_value(word[1:])}}
    if match := re.fullmatch(r"(left|right|inner)([\d,]+)", word):
        return {"side": match[1], "padding": _split(match[2])}
    if match := re.fullmatch(r"m(\d+)(?:-([\d,]+))?", word):
        return {"memory": int(match[1]), "memory_padding": _split(match[2]) if match[2] else ()}
    for pattern, (name, read) in _WORDS.items():
        if match := re.fullmatch(pattern, word):
            return {name: read(match[1])}
    raise ValueError("no such word")


def _join(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def _split(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _format_scale(scale: float) -> str:
    short = f"{scale:g}"
    return short if float(short) == scale else repr(scale)


def _format_value(value: AxisValue) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"{value}"


def _parse_value(text: str) -> AxisValue:
    if text in ("yes", "no"):
        return text == "yes"
    for convert in (int, float):
        try:
            value = convert(text)
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    return text


_FLAGS: Mapping[str, str] = MappingProxyType({"masked": "masked_positions", "typed": "typed"})
_WORDS: Mapping[str, tuple[str, Callable[[str], object]]] = MappingProxyType(
    {
        r"b(\d+)": ("batch", int),
        r"s([\d,]+)": ("schedule", _split),
        r"w(\d+)": ("columns", int),
        r"packed([\d,]+)": ("packing", _split),
        r"@(\d+)": ("offset", int),
        r"x([\d.e+-]+)": ("scale", float),
        r"#(\d+)": ("seed", int),
        r"\*(\d+)": ("stack", int),
    }
)
