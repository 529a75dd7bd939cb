"""A measure beside its bar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    """One measured number.

    Attributes:
        least, most: what it must reach, or must not pass; without either it is only told.
    """

    name: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None

    @property
    def holds(self) -> bool:
        above = self.least is None or self.value >= self.least
        return above and (self.most is None or self.value <= self.most)

    @property
    def limit(self) -> str:
        """The bar, as it is printed."""
        limits = {">=": self.least, "<=": self.most}
        return ", ".join(f"{sign} {bar:g}" for sign, bar in limits.items() if bar is not None) or "-"

    @property
    def mark(self) -> str:
        """Whether it holds, as it is printed."""
        if self.limit == "-":
            return "-"
        return "[green]yes[/green]" if self.holds else "[red]NO[/red]"

    def record(self) -> dict[str, Any]:
        """The bar, as it is written; a number without a bar holds."""
        bar = self.least if self.least is not None else self.most
        return {"name": self.name, "value": self.value, "unit": self.unit, "bar": bar, "holds": self.holds}
