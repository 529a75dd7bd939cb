"""Pictures as SVG, to stand inside a page: their lines and letters take the page's own colour, in light and dark."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from parity.errors import ReportError
from parity.pictures import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, RIGHT, WRONG = "#010203", "#3b82c4", "#d9480f"  # the ink is none that matplotlib uses: the page's stands in for it
EXACT = 1e-17  # what is exact stands at the lower edge of a logarithmic axis
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "parity",
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


def profile(name: str, errors: Sequence[float]) -> str:
    """The error along one axis, as bars."""
    figure, axes = _figure(3.4, 2.0)
    axes.bar(range(len(errors)), [_shown(error) for error in errors], color=RIGHT)
    axes.set(xlabel=name, ylabel="error / truth", yscale="log")
    _whole_numbers(axes)
    return _svg(figure)


def field(picture: Picture) -> str:
    """The error over two axes, as a map of its magnitude."""
    figure, axes = _figure(3.4, 2.4)
    values = [[math.log10(_shown(error)) for error in row] for row in picture.field]
    image = axes.imshow(values, aspect="auto", cmap="viridis", interpolation="nearest")
    bar = figure.colorbar(image, ax=axes)
    bar.set_label("log10 of error / truth", color=INK)
    bar.ax.tick_params(colors=INK)
    bar.outline.set_visible(False)
    axes.set(xlabel=picture.names[1], ylabel=picture.names[0])
    return _svg(figure)


def magnitude(picture: Picture) -> str:
    """The error of each entry against its size."""
    figure, axes = _figure(3.4, 2.4)
    sizes, errors = zip(*picture.magnitude, strict=True)
    axes.scatter([_shown(s) for s in sizes], [_shown(e) for e in errors], s=4, alpha=0.5, color=RIGHT, linewidths=0)
    axes.set(xlabel="|truth|", ylabel="|error|", xscale="log", yscale="log")
    return _svg(figure)


def course(quantities: Sequence[tuple[str, float]], first: str | None) -> str:
    """The largest distance so far along the quantities of a layer, the first one at which the sides part marked."""
    figure, axes = _figure(7.2, 0.22 * len(quantities) + 0.8)
    names = [name for name, _ in quantities]
    largest = [max(distance for _, distance in quantities[: i + 1]) for i in range(len(quantities))]
    marked = [name == first for name in names]
    after = [any(marked[: i + 1]) for i in range(len(names))]
    axes.barh(
        range(len(names)),
        [_shown(distance) for distance in largest],
        left=EXACT,
        color=[WRONG if late else RIGHT for late in after],
        alpha=0.85,
    )
    axes.set_yticks(
        range(len(names)), [f"{name}  ◀" if mark else name for name, mark in zip(names, marked, strict=True)]
    )
    axes.set(xscale="log", xlim=(EXACT, 10 * max(1.0, *map(_shown, largest))), xlabel="largest distance so far / truth")
    axes.invert_yaxis()
    return _svg(figure)


def _shown(error: float) -> float:
    """A number that a logarithmic axis can show."""
    return min(max(error, EXACT), 1e30) if math.isfinite(error) else 1e30


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure of so many inches.

    Raises:
        ReportError: if matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise ReportError(
            "pages need matplotlib: pip install 'transformer-parity[report]', or leave out --html"
        ) from error
    with rc_context(STYLE):
        figure = NewFigure(figsize=(width, height), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
    return figure, axes


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))


def _svg(figure: Any) -> str:
    from matplotlib import rc_context

    written = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    svg = written.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")
