"""Keeps the generated parts of README.md true: `python -m parity.readme` writes them, a test compares them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from parity import family as families
from parity import gaps, sizes
from parity import property as properties
from parity.corrections import corrections
from parity.family import Layer
from parity.function import functions
from parity.listing import covered
from parity.mistakes import find
from parity.published import MODELS

README = Path(__file__).parents[1] / "README.md"
MISTAKES, DIAGNOSED = (README.parent / "fixtures" / f"{name}.json" for name in ("mistakes", "diagnosed"))


def coverage() -> str:
    """A row per layer: the class it must equal, and the properties that hold it against that class."""
    rows = ["| family | layer | reference | properties |", "|---|---|---|---|"]
    for model_type in families.names():
        family = families.load(model_type)
        for layer in family.layers:
            names = ", ".join(covered(family, layer)) + _left_out(layer)
            rows.append(f"| {model_type} | {layer.name} | `{layer.reference}` | {names} |")
    return "\n".join(rows)


def _left_out(layer: Layer) -> str:
    """The dtypes in which nothing is said, by reason."""
    reasons = dict.fromkeys(layer.left_out.values())
    of_reason = {each: ", ".join(name for name, why in layer.left_out.items() if why == each) for each in reasons}
    return "".join(f"; not in {names}: {reason}" for reason, names in of_reason.items())


def beside_layers() -> str:
    """A row per function that is no layer: what holds, and against what."""
    rows = ["| function | ours | reference | what is held |", "|---|---|---|---|"]
    rows += [f"| {each.name} | `{each.ours}` | {each.reference} | {each.sentence} |" for each in functions().values()]
    return "\n".join(rows)


def published() -> str:
    """A row per published model: how large it is."""
    rows = [f"| {' | '.join(sizes.COLUMNS)} |", "|---|---:|---:|---:|---:|"]
    rows += [f"| {name} | {' | '.join(sizes.cells(sizes.of(fields)))} |" for name, fields in MODELS.items()]
    return "\n".join(rows)


def often_read() -> str:
    """A row per figure that is often given otherwise than it comes out."""
    rows = ["| often read | counted | printed by |", "|---|---|---|"]
    rows += [f"| {each.read} | {each.found} | `{each.command}` |" for each in corrections()]
    return "\n".join(rows)


def sentences() -> str:
    """What each property says."""
    return "\n".join(f"* **{prop.name}**: {prop.sentence}" for prop in properties.properties().values())


def contradictions() -> str:
    """A row per known gap inside the reference."""
    rows = ["| gap | known in | the reference | reason |", "|---|---|---|---|"]
    rows += [f"| {gap.name} | {gap.range} | {gap.sentence} | {gap.reason} |" for gap in gaps.GAPS]
    return "\n".join(rows)


def found_mistakes() -> str:
    """A row per kind of mistake, as `make mistakes ARGS=--record` has recorded it last, and what was named of it."""
    record, named = json.loads(MISTAKES.read_text(encoding="utf-8")), _named_by_kind()
    dtypes, checks = ("float64", "float32", "bfloat16"), ("assert_close", "cosine > 0.99", "greedy tokens")
    head = ("kind", "mistakes", "made", *dtypes, "named", *checks)
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    totals = [0, 0, *[[0, 0] for _ in (*dtypes, "named", *checks)]]
    for kind, each in record["kinds"].items():
        shares = [*each["caught"].values(), named.get(kind, [0, 0]), *each["passed"].values()]
        rows.append(_row(kind, [len(each["mistakes"]), each["made"], *shares]))
        totals = [_sum(*pair) for pair in zip(totals, [len(each["mistakes"]), each["made"], *shares], strict=True)]
    return "\n".join([*rows, _row("all", totals)])


def _named_by_kind() -> dict[str, list[int]]:
    """Of the single mistakes that were seen in float32 and bfloat16, how many were named, by kind."""
    kinds: dict[str, list[int]] = {}
    for layer in json.loads(DIAGNOSED.read_text(encoding="utf-8"))["layers"].values():
        for each in (layer[dtype] for dtype in ("f32", "bf16")):
            for name in (*each["named"], *each["called"]):
                count = kinds.setdefault(find(name).kind, [0, 0])
                count[0] += name in each["named"]
                count[1] += 1
    return kinds


def named_mistakes() -> str:
    """A row per layer with a second implementation, as `parity mistakes --diagnose --record` has recorded it last."""
    record = json.loads(DIAGNOSED.read_text(encoding="utf-8"))
    columns = {"float32": "f32", "bfloat16": "bf16", "pairs": "pairs"}
    rows = [f"| layer | {' | '.join(columns)} |", "|---" * 4 + "|"]
    totals = [[0, 0] for _ in columns]
    for name, layer in record["layers"].items():
        found = [layer.get(what, {"named": [], "called": {}}) for what in columns.values()]
        shares = [[len(each["named"]), len(each["named"]) + len(each["called"])] for each in found]
        rows.append(_row(name, shares))
        totals = [_sum(*pair) for pair in zip(totals, shares, strict=True)]
    bars = [f"* {each['name']}: {each['value']:.3g} {each['unit']} (bar {each['bar']:g})" for each in record["bars"]]
    return "\n".join([*rows, _row("all", totals), "", *bars])


def _row(name: str, cells: Sequence[Any]) -> str:
    return f"| {name} | {' | '.join(map(_cell, cells))} |"


def _cell(cell: Any) -> str:
    """A share of a number; nothing where that is 0."""
    if not isinstance(cell, list):
        return str(cell)
    return f"{cell[0]} of {cell[1]}" if cell[1] else "-"


def _sum(one: Any, other: Any) -> Any:
    return [a + b for a, b in zip(one, other, strict=True)] if isinstance(one, list) else one + other


BLOCKS: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "coverage": coverage,
        "functions": beside_layers,
        "sizes": published,
        "corrections": often_read,
        "properties": sentences,
        "gaps": contradictions,
        "mistakes": found_mistakes,
        "diagnosis": named_mistakes,
    }
)


def rendered(text: str) -> str:
    """The text with every generated block made anew.

    Raises:
        ValueError: if a block's marks are missing, naming it.
    """
    for name, make in BLOCKS.items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"README.md has no block '<!-- generated: {name} -->' ... '<!-- end -->'")
        text = pattern.sub(lambda found, make=make: f"{found[1]}{make()}\n{found[2]}", text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    README.write_text(rendered(README.read_text(encoding="utf-8")), encoding="utf-8")
