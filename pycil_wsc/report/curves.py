"""Figures with a panel per memory size and a line per method, and helpers for their axes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pycil_wsc.report.groups import memory_text
from pycil_wsc.report.series import Plot, Read, Series
from pycil_wsc.report.style import Style, legend, panels
from pycil_wsc.results import Record

Curve = tuple[Any, Any] | tuple[Any, Any, Any]  # x values, y values and, optionally, their spread


def curves(
    series: Series,
    slug: str,
    title: str,
    read: Read,
    curve: Callable[[list[Record]], Curve],
    labels: tuple[str, str],
    notes: Sequence[str] = (),
    markers: bool = False,
    from_zero: bool = False,
) -> Iterator[Plot]:
    """A :class:`Plot` of ``curve(records)`` for the records in which ``read`` finds a value, if there are any.

    ``labels``: of the two axes. The spread of a curve is drawn as a band.
    """
    memories = [memory for memory in series.memories if any(memory in series.of(name, read) for name in series.methods)]
    if not memories:
        return
    figure, axes = panels(len(memories), sharex=True, sharey=True)
    styles: dict[str, Style] = {
        name: style if markers else style | {"marker": ""}
        for name, style in series.styles.items()
        if series.of(name, read)
    }
    banded = False
    for memory, ax in zip(memories, axes):
        for name, style in styles.items():
            if records := series.of(name, read).get(memory):
                places, values, *spread = curve(records)
                smaller: Style = {"markersize": style.get("markersize", 5) - 1.5} if markers else {"linewidth": 1}
                ax.plot(places, values, **style | smaller)
                if spread and np.any(spread[0]):
                    banded = True
                    low, high = values - spread[0], values + spread[0]
                    ax.fill_between(places, low, high, color=style["color"], alpha=0.18, linewidth=0)
        ax.set_title(textwrap.fill(f"{memory_text(memory)} {series.group.memory_title}", 26))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if from_zero:
        axes[0].set_ylim(0, 1.05 * axes[0].get_ylim()[1])  # shared by all panels; set after drawing
    label_outside(axes, *labels)
    legend(figure, styles, series.shown)
    yield Plot(slug, title, figure, series.notes(*notes, read=read, errors="bands" * banded))


def concatenated(tasks: Sequence[Sequence[float] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the tasks' values, with every task one unit wide: (x values, y values)."""
    places = [task + (np.arange(len(values)) + 1) / len(values) for task, values in enumerate(tasks)]
    return np.concatenate(places), np.concatenate(tasks)


def mean_series(series: Sequence[Sequence[float]]) -> np.ndarray:
    """The elementwise mean of lists of numbers, up to the length of the shortest."""
    shortest = min(map(len, series))
    return np.mean([values[:shortest] for values in series], axis=0)


def label_outside(axes: Sequence[Axes], x: str, y: str) -> None:
    """Label only the panels at the left and bottom edges."""
    columns = axes[0].get_gridspec().ncols  # type: ignore[union-attr]
    for number, ax in enumerate(axes):
        below = number + columns < len(axes)
        ax.set_ylabel("" if number % columns else y)
        ax.set_xlabel("" if below else x)
        ax.tick_params(labelbottom=not below)
