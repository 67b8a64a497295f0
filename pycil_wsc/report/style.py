"""The style of figures: each method has the same colour, marker and line in every figure.

The colours are Okabe and Ito's colour-blind-safe palette and a few others. Markers and line styles also distinguish the
methods. Methods that expand have dashed lines and hollow markers.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pycil_wsc.report.paper import expands

INK, SURFACE = "#24292f", "#fefefe"
LOOKS = {  # the colour and the marker of each method
    "der": ("#e69f00", "s"),
    "foster": ("#8b5a2b", "D"),
    "memo": ("#332288", "^"),
    "finetune": ("#6f6f6f", "x"),
    "replay": ("#0072b2", "o"),
    "icarl": ("#009e73", "v"),
    "bic": ("#cc79a7", "P"),
    "wa": ("#56b4e9", "p"),
    "joint": (INK, "h"),
    "wsc": ("#d55e00", "*"),
}
FURTHER = [
    ("#117733", "<"),
    ("#aa4499", ">"),
    ("#999933", "d"),
    ("#661100", "H"),
    ("#6699cc", "8"),
    ("#44aa99", "X"),  # there are six merging and untrained methods of language models
]  # for the user's own methods
THEMED = {INK: "currentColor", SURFACE: "var(--surface)"} | {
    LOOKS[dark][0]: f"var(--{dark}, {LOOKS[dark][0]})" for dark in ("memo", "foster", "finetune", "replay")
}
COLUMN, PAGE = 5.9, 12.0  # inches at 96 pixels: widths of one column and of the whole page
RC: dict[Any, Any] = {  # Any: the type of the keys differs between versions of matplotlib
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.6,
    "figure.facecolor": SURFACE,
    "axes.facecolor": "none",
    "savefig.facecolor": SURFACE,
    "lines.markersize": 5,
    "lines.linewidth": 1.5,
    "pdf.fonttype": 42,  # embed fonts, so that text remains text
    "svg.fonttype": "path",
    "svg.hashsalt": "pycil_wsc",
    "path.simplify_threshold": 0.4,
    "text.parse_math": False,
}


Style = dict[str, Any]  # keyword arguments of plot


@contextmanager
def drawing() -> Iterator[None]:
    """A context in which figures are drawn and saved in this style."""
    with matplotlib.rc_context(RC):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; ``width`` and ``height`` are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08)  # type: ignore[union-attr, call-arg]
    return figure


def panels(count: int, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure and ``count`` of its axes, in rows of at most four."""
    rows, columns = arranged(count)
    figure = new_figure(min(PAGE, max(COLUMN, 2.55 * columns + 1.3)), 2.4 * rows + 0.3)
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel()
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
    own = [base for base in dict.fromkeys(bases.values()) if base not in LOOKS]
    seen: dict[str, int] = {}
    styles: dict[str, Style] = {}
    for name, method in names.items():
        base = bases[name]
        colour, marker = LOOKS[base] if base in LOOKS else FURTHER[own.index(base) % len(FURTHER)]
        variant = seen[method] = seen.get(method, -1) + 1
        red, green, blue = (c + (1 - c) * (0, 0.38, 0.62)[variant % 3] for c in to_rgb(colour))
        colour = to_hex((red, green, blue))
        dashes: Any = (0, (4, 2)) if expands(method) else "-" if variant == 0 else (0, (1, 1.2))
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
    size, spacing = RC["legend.fontsize"], 0.55
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


def inline(svg: str, prefix: str, text: str) -> str:
    """The SVG as an element of a page, described by ``text``.

    The ``prefix`` makes its ids unique on the page. Text and background colours follow the page's theme.
    """
    body = svg[svg.index("<svg") :]
    width = float(_found(r'width="([\d.]+)pt"', body)[1]) * 96 / 72
    box = _found(r'viewBox="[^"]+"', body)[0]
    body = re.sub(
        r"^<svg[^>]*>", lambda _: f'<svg {box} width="{width:.0f}" role="img" aria-label="{text}">', body, count=1
    )
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", body)
    for colour, themed in THEMED.items():
        body = body.replace(colour, themed)
    return body


def _found(pattern: str, text: str) -> re.Match[str]:
    match = re.search(pattern, text)
    assert match, pattern
    return match
