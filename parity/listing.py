"""What there is: families, layers, coverage, configuration spaces, weight rules."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from parity import family as families
from parity import gaps
from parity import property as properties
from parity.family import Family, Layer
from parity.pair import pair_of
from reimpl.weights import Rule, names_on_disk


def covered(family: Family, layer: Layer) -> list[str]:
    """The names of the properties that a layer is held against."""
    return [prop.name for prop in properties.properties().values() if prop.applies(family, layer)]


def print_families(console: Console) -> None:
    """A row per layer: its name, the class it must equal, the properties that cover it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("family", "layer", "reference", "properties"):
        table.add_column(name, no_wrap=True)
    for model_type in families.names():
        family = families.load(model_type)
        for layer in family.layers:
            table.add_row(model_type, layer.name, layer.reference, ", ".join(covered(family, layer)))
    console.print(table)
    for prop in properties.properties().values():
        console.print(f"{prop.name}: {prop.sentence}", highlight=False)


def print_gaps(console: Console) -> None:
    """A row per known divergence inside the reference: where, what it does, why, and whether it is known here."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("gap", "known in", "here", "where", "the reference", "reason"):
        table.add_column(name)
    for gap in gaps.GAPS:
        here = "known" if gap.known else "[dim]-[/dim]"
        table.add_row(gap.name, gap.range, here, gap.where, gap.sentence, gap.reason)
    console.print(table)


def print_family(model_type: str, console: Console) -> None:
    """The axes of a family's configuration space, the layers each matters to, and where every weight comes from.

    Raises:
        FamilyError: for an unknown model type.
    """
    family = families.load(model_type)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("axis", "choices", "meaning", "layers"):
        table.add_column(name)
    for axis in family.axes:
        layers = [layer.name for layer in family.layers if axis.name in layer.axes]
        table.add_row(axis.name, ", ".join(map(str, axis.choices)), axis.meaning, ", ".join(layers))
    console.print(table)
    console.print()
    weights = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("on disk", "shape", "in our module"):
        weights.add_column(name, no_wrap=True)
    pair = pair_of(model_type, family.layers[-1].name)
    places = _places(family.rules(pair.config))
    for name, shape in pair.plan.shapes.items():
        weights.add_row(name, "x".join(map(str, shape)), places.get(name, f"{name} (same)"))
    console.print(weights)


def _places(rules: Iterable[Rule]) -> dict[str, str]:
    """Where tensors on disk go that a rule names, and by which rule."""
    places: dict[str, str] = {}
    for rule in rules:
        module = getattr(rule, "module", ())
        into = module if isinstance(module, str) else ", ".join(module)
        places |= {name: f"{into} ({type(rule).__name__.lower()})" for name in names_on_disk(rule)}
    return places
