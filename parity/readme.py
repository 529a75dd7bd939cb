"""Keeps the generated parts of README.md true: `python -m parity.readme` writes them, a test compares them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from parity import family as families
from parity import gaps
from parity import property as properties
from parity.family import Layer
from parity.listing import covered

README = Path(__file__).parents[1] / "README.md"


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


def sentences() -> str:
    """What each property says."""
    return "\n".join(f"* **{prop.name}**: {prop.sentence}" for prop in properties.properties().values())


def contradictions() -> str:
    """A row per known gap inside the reference."""
    rows = ["| gap | known in | the reference | reason |", "|---|---|---|---|"]
    rows += [f"| {gap.name} | {gap.range} | {gap.sentence} | {gap.reason} |" for gap in gaps.GAPS]
    return "\n".join(rows)


BLOCKS: Mapping[str, Callable[[], str]] = MappingProxyType(
    {"coverage": coverage, "properties": sentences, "gaps": contradictions}
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
