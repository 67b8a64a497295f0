"""The style of figures: each method has the same colour, marker and line in every figure.

The colours are Okabe and Ito's colour-blind-safe palette and a few others. Markers and line styles also distinguish the
methods. Methods that expand have dashed lines and hollow markers.
"""

import io
import re
import textwrap
from collections.abc import Container, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from pycil_wsc.report.texts import data_file
from pycil_wsc.results.identity import without_consolidation

INK = "#24292f"
SURFACE = "#fefefe"
LOOKS = data_file("methods.json")
COLUMN = 5.9  # inches at 96 pixels: the width of one column
PAGE = 12.0  # of the whole page
NARROW = 3.8  # and of a telephone's screen
TICKS = 4  # intervals of an axis on it
Style = dict[str, Any]  # keyword arguments of plot


def drawing() -> AbstractContextManager[None]:
    """A context in which figures are drawn and saved in this style."""
    return style.context(Path(__file__).with_name("figures.mplstyle"))


def panels(titles: Sequence[str], labels: tuple[str, str], height: float = 2.4) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, one per title, which share their scales and their labels, in rows of at most four."""
    rows, columns = arranged(len(titles))
    figure = Figure((min(PAGE, max(COLUMN, 2.55 * columns + 1.3)), height * rows + 0.3))
    axes = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel())
    for empty in axes[len(titles) :]:
        empty.set_visible(False)
    for number, (ax, title) in enumerate(zip(axes, titles)):  # only panels at the left and bottom edges are labelled
        below = number + columns < len(titles)
        ax.set_title(textwrap.fill(title, 26))
        ax.set_ylabel("" if number % columns else labels[1])
        ax.set_xlabel("" if below else labels[0])
        ax.tick_params(labelbottom=not below)
    return figure, axes[: len(titles)]


def arranged(count: int) -> tuple[int, int]:
    """(rows, columns) of ``count`` panels, with at most four columns and rows of similar length."""
    rows = -(-count // 4)
    return rows, -(-count // rows)


def line_styles(names: Mapping[str, str], expanding: Container[str] = ()) -> dict[str, Style]:
    """``{name: keyword arguments of plot}`` for ``{name: method}``; a method's other variants are paler and dashed.

    ``expanding``: the methods that expand.
    """
    looks = {method: look for method, look in LOOKS["methods"].items() if "marker" in look}
    further = 0  # methods without a look of their own
    seen: dict[str, int] = {}
    styles: dict[str, Style] = {}
    for name, method in names.items():
        base = without_consolidation(method)
        if base not in looks:
            looks[base] = LOOKS["further"][further % len(LOOKS["further"])]
            further += 1
        variant = seen.get(method, 0)  # 0 for the first name of a method
        seen[method] = variant + 1
        expands = method in expanding
        pale = (0, 0.38, 0.62)[variant % 3]
        red, green, blue = (c + (1 - c) * pale for c in to_rgb(looks[base]["colour"]))
        colour = to_hex((red, green, blue))
        dashes: object = (0, (4, 2)) if expands else "-" if variant == 0 else (0, (1, 1.2))
        styles[name] = {
            "color": colour,
            "marker": looks[base]["marker"],
            "linestyle": dashes if method == base else (0, (6, 1.5, 1, 1.5)),
            "markerfacecolor": SURFACE if expands else colour,
            "markeredgecolor": colour if method == base else INK,
        }
        styles[name] |= {"linewidth": 2.1, "markersize": 7, "zorder": 3} if base == "wsc" else {}
    return styles


def legend(figure: Figure, styles: Mapping[str, Style], labels: Mapping[str, str], title: str | None = None) -> None:
    """Draw one legend for all panels to the right of the axes, and make the figure as high as it needs."""
    handles = [Line2D([], [], label=wrapped(labels.get(name, name)), **style) for name, style in styles.items()]
    lines = sum(1.5 + str(handle.get_label()).count("\n") for handle in handles)
    figure.set_figheight(max(figure.get_figheight(), 0.7 + 0.155 * lines))
    figure.legend(handles=handles, loc="outside right upper", title=title, alignment="left", handlelength=2.6)


def wrapped(name: str, width: int = 26) -> str:
    """Wrap a name to several lines, with each key of a variant on its own line."""
    first, *keys = re.split(r" (?=[\w.]+=)", name)
    lines = textwrap.wrap(first, width) or [first]
    for key in keys:
        lines += textwrap.wrap(key, width)
    return "\n  ".join(lines)


# by suffix, with the metadata that are left out, so that equal runs have equal files
FORMATS = {"svg": {"Date": None}, "png": {"Software": None}, "pdf": {"CreationDate": None, "Producer": None}}


def to_files(figure: Figure) -> dict[str, bytes]:
    """The figure as ``{suffix: content}``."""
    _lay_out_once(figure)
    files = {suffix: _saved(figure, suffix) for suffix in FORMATS}
    files["svg"] = _shortened(files["svg"])
    return files


def to_narrow_svg(figure: Figure) -> bytes:
    """The figure as SVG for a narrow screen. It rearranges the figure itself, so the other files are made before."""
    stack(figure)
    _lay_out_once(figure)
    return _shortened(_saved(figure, "svg"))


def stack(figure: Figure) -> None:
    """Place the panels of a figure one below the other, and its legend below them, in the width of a telephone."""
    for empty in [ax for ax in figure.axes if not ax.get_visible()]:
        empty.remove()
    panels = [ax for ax in figure.axes if ax.get_subplotspec()]  # without colour bars
    heights = [ax.get_window_extent().height / figure.dpi for ax in panels]
    below = next(label for label in (ax.get_xlabel() for ax in reversed(panels)) if label)
    grid = figure.add_gridspec(len(panels), 1)
    for row, ax in enumerate(panels):
        ax.set_subplotspec(grid[row])
        ax.tick_params(labelleft=True, labelbottom=True)
        ax.set_xlabel(ax.get_xlabel() or below)
        ax.set_ylabel(panels[0].get_ylabel())
        if isinstance(ax.xaxis.get_major_locator(), MaxNLocator):
            ax.locator_params(axis="x", nbins=TICKS)
    legend_height = 0.0
    for legend in figure.legends:
        legend_height += legend.get_window_extent().height / figure.dpi
        legend.set_loc("outside lower left")
    figure.set_layout_engine("constrained")
    figure.set_size_inches(NARROW, sum(heights) + 0.75 * len(panels) + legend_height)


def _lay_out_once(figure: Figure) -> None:
    """Lay the figure out now, and not again for each format."""
    figure.get_layout_engine().execute(figure)  # type: ignore[union-attr]
    figure.set_layout_engine("none")


def _saved(figure: Figure, suffix: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, dpi=300, metadata=FORMATS[suffix])
    return buffer.getvalue()


def _shortened(svg: bytes) -> bytes:
    """``svg`` with positions in hundredths of a point, which has a third of the size.

    Factors are kept whole: a glyph's outline is scaled by 1/64, and 0.01 would be 64 % of that.
    """
    positions = rb' (?:d|x|y)="[^"]*"|translate\([^)]*\)'
    return re.sub(positions, lambda match: re.sub(rb"(\.\d\d)\d+", rb"\1", match[0]), svg)
