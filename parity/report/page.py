"""The page: a table of verdicts, and what is known of every mismatch. Whatever comes from outside is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parity.compare import VERDICTS
from parity.errors import ReportError
from parity.pictures import Picture
from parity.report import plots

TEMPLATE = "page.html.j2"
CODE = ("smallest", "again", "fix")  # lines that are to be pasted


@dataclass(frozen=True)
class Told:
    """One mismatch: its headline, its lines by their labels, pictures, and the course of the layer's quantities."""

    headline: str
    lines: Sequence[tuple[str, str]]
    pictures: Sequence[Picture] = ()
    course: Sequence[tuple[str, float]] = ()
    first: str | None = None


@dataclass(frozen=True)
class Page:
    """What a page says.

    Attributes:
        title: what was held against what.
        versions: of what the numbers depend on, in words.
        holds: whether all of it holds.
        summary: the same in a sentence.
        rows: a name, and for each verdict `holds`, `fails`, `gap` or nothing, with a text.
        notes: what is tolerated or left out.
    """

    title: str
    versions: str
    holds: bool
    summary: str
    rows: Sequence[Mapping[str, Any]]
    mismatches: Sequence[Told] = ()
    notes: Sequence[str] = field(default_factory=tuple)


def render(page: Page) -> str:
    """The page as HTML.

    Raises:
        ReportError: if what pages are made with is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader
    except ImportError as error:
        raise ReportError("pages need jinja2: pip install 'transformer-parity[report]', or leave out --html") from error
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    environment.filters["plots"] = lambda told: list(_plots(told))
    return environment.get_template(TEMPLATE).render(page=page, verdicts=VERDICTS, code=CODE)


def _plots(told: Told) -> Iterable[tuple[str, str]]:
    """The plots of a mismatch: what each shows, and its SVG."""
    if told.course:
        yield "how far the candidate is from each of the reference's quantities", plots.course(told.course, told.first)
    for picture in told.pictures:
        for name, errors in picture.profiles.items():
            if len(errors) > 1:
                yield f"{picture.title}: over {name}s", plots.profile(name, errors)
        yield f"{picture.title}: over {picture.names[0]}s and {picture.names[1]}s", plots.field(picture)
        yield f"{picture.title}: against magnitude", plots.magnitude(picture)
