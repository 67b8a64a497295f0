"""The style of figures: each method has the same colour, marker and line in every figure.

The colours are Okabe and Ito's colour-blind-safe palette and a few others. Markers and line styles also distinguish the
methods. Methods that expand have dashed lines and hollow markers.
"""

from __future__ import annotations

import base64
import io
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rcParams, style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D

from pycil_wsc.report.paper import expands

INK, SURFACE = "#24292f", "#fefefe"
LOOKS = json.loads(Path(__file__).with_name("methods.json").read_text(encoding="utf-8"))
COLUMN, PAGE = 5.9, 12.0  # inches at 96 pixels: widths of one column and of the whole page
Style = dict[str, Any]  # keyword arguments of plot


@contextmanager
def drawing() -> Iterator[None]:
    """A context in which figures are drawn and saved in this style."""
    with style.context(Path(__file__).with_name("figures.mplstyle")):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; ``width`` and ``height`` are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08)  # type: ignore[union-attr, call-arg]
    return figure


def panels(count: int) -> tuple[Figure, list[Axes]]:
    """A figure and ``count`` of its axes, which share their scales, in rows of at most four."""
    rows, columns = arranged(count)
    figure = new_figure(min(PAGE, max(COLUMN, 2.55 * columns + 1.3)), 2.4 * rows + 0.3)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for empty in axes[count:]:
        empty.set_visible(False)
    return figure, list(axes[:count])


def arranged(count: int) -> tuple[int, int]:
    """(rows, columns) of ``count`` panels, with at most four columns and rows of similar length."""
    rows = -(-count // 4)
    return rows, -(-count // rows)


def line_styles(names: Mapping[str, str]) -> dict[str, Style]:
    """``{name: keyword arguments of plot}`` for ``{name: method}``; a method's other variants are paler and dashed."""
    bases = {name: method.removesuffix("+wsc") for name, method in names.items()}
    looks = {base: look for base, look in LOOKS["methods"].items() if "marker" in look}
    own = [base for base in dict.fromkeys(bases.values()) if base not in looks]
    seen: dict[str, int] = {}
    styles: dict[str, Style] = {}
    for name, method in names.items():
        base = bases[name]
        look = looks[base] if base in looks else LOOKS["further"][own.index(base) % len(LOOKS["further"])]
        colour, marker = look["colour"], look["marker"]
        variant = seen[method] = seen.get(method, -1) + 1
        red, green, blue = (c + (1 - c) * (0, 0.38, 0.62)[variant % 3] for c in to_rgb(colour))
        colour = to_hex((red, green, blue))
        dashes: object = (0, (4, 2)) if expands(method) else "-" if variant == 0 else (0, (1, 1.2))
        dashes = (0, (6, 1.5, 1, 1.5)) if method != base else dashes
        styles[name] = {
            "color": colour,
            "marker": marker,
            "linestyle": dashes,
            "markerfacecolor": SURFACE if expands(method) else colour,
            "markeredgecolor": colour if method == base else INK,
        }
        styles[name] |= {"linewidth": 2.1, "markersize": 7, "zorder": 3} if base == "wsc" else {}
    return styles


def legend(
    figure: Figure, styles: Mapping[str, Style], shown: Callable[[str], str] = str, title: str | None = None
) -> None:
    """Draw one legend for all panels, to the right of the axes, with the series in the given order.

    The figure is made taller if the legend needs it.
    """
    handles = [Line2D([], [], label=wrapped(shown(name)), **style) for name, style in styles.items()]
    size, spacing = FontProperties(size=rcParams["legend.fontsize"]).get_size_in_points(), 0.55
    lines = sum(1 + str(handle.get_label()).count("\n") for handle in handles) + 1.5 * bool(title)
    needed = (1.25 * size * lines + spacing * size * len(handles)) / 72 + 0.35
    if figure.get_figheight() < needed:
        figure.set_figheight(needed)
    figure.legend(
        handles=handles,
        loc="outside right upper",
        title=title,
        alignment="left",
        handlelength=2.6,
        labelspacing=spacing,
        borderaxespad=0.3,
    )


def wrapped(name: str, width: int = 26) -> str:
    """Wrap a name to several lines, with each key of a variant on its own line."""
    first, *keys = re.split(r" (?=[\w.]+=)", name)
    lines = textwrap.wrap(first, width) or [first]
    return "\n  ".join([*lines, *(line for key in keys for line in textwrap.wrap(key, width))])


def to_files(figure: Figure) -> dict[str, str | bytes]:
    """The figure as ``{"svg": text, "png": bytes, "pdf": bytes}``."""
    figure.get_layout_engine().execute(figure)  # type: ignore[union-attr]
    figure.set_layout_engine("none")  # laid out once, not again for each format
    svg, png, pdf, dots = io.StringIO(), io.BytesIO(), io.BytesIO(), figure.dpi
    # Figure.savefig would draw each format twice, for layouts that depend on the format
    FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    figure.dpi = dots
    FigureCanvasPdf(figure).print_pdf(pdf, metadata={"CreationDate": None, "Creator": None, "Producer": None})
    figure.dpi = 300
    FigureCanvasAgg(figure).print_png(png, metadata={"Software": None}, pil_kwargs={"compress_level": 4})
    return {"svg": re.sub(r' (d|x|y)="[^"]+"', _rounded, svg.getvalue()), "png": png.getvalue(), "pdf": pdf.getvalue()}


def _rounded(attribute: re.Match[str]) -> str:
    """Round coordinates to a hundredth of a point, which reduces the file to a third of its size."""
    return re.sub(r"(\.\d\d)\d+", r"\1", attribute[0])


def inline(svg: str | bytes) -> str:
    """The address of an SVG that a page contains."""
    text = svg.encode() if isinstance(svg, str) else svg
    return "data:image/svg+xml;base64," + base64.b64encode(text).decode()
