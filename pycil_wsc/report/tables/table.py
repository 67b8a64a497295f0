"""A table is a frame with a row per cell, aggregated over seeds. Text, CSV, Markdown and LaTeX are views of it."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pycil_wsc.errors import one_line
from pycil_wsc.report.groups import Group
from pycil_wsc.report.rows import Column
from pycil_wsc.report.texts import LATEX, MARKDOWN

DAGGER = "†"  # marks methods that expand
MEASURED = ["mean", "standard_error", "standard_deviation", "averaged_over", "best"]
PUBLISHED = ["paper_mean", "paper_standard_error"]
COMPARED = ["compared", "differs_by"]


def aggregate(values: pd.DataFrame, heads: Sequence[str], columns: Sequence[Column]) -> pd.DataFrame:
    """The cells of a table, each a row of the frame, with statistics over the seeds and each seed's value.

    Args:
        values: a row per run and column, with the columns ``heads``, ``column``, ``memory``, ``seed`` and ``value``.
        heads: what a row of the table has in common: its labels, and whether its method ``expands``.
        columns: the table's columns.
    """
    keys = [*heads, "column"]
    values = values.dropna(subset="value").astype({"value": float})
    grouped = values.groupby(keys, sort=False)
    means = grouped["value"].agg(mean="mean", standard_error="sem", standard_deviation="std", averaged_over="count")
    one_size = values[grouped["memory"].transform("nunique") == 1]  # else a seed has several values
    by_seed = one_size.groupby([*keys, "seed"], sort=False)["value"].mean().unstack("seed").sort_index(axis="columns")
    by_seed = by_seed.rename(columns=lambda seed: f"seed_{int(seed)}")
    rows = values[[*heads]].drop_duplicates()
    grid = rows.merge(pd.DataFrame({"column": [column.label for column in columns]}), how="cross")
    grid = grid.join(means, on=keys).join(by_seed, on=keys)
    grid["averaged_over"] = grid["averaged_over"].fillna(0).astype(int)
    return grid.assign(best=False, compared=False, paper_mean=np.nan, paper_standard_error=np.nan, differs_by=np.nan)


def seeds_of(cells: pd.DataFrame) -> list[str]:
    return [name for name in cells.columns if name.startswith("seed_")]


class Text(NamedTuple):
    """A cell as text: our mean and its spread, the paper's number, and an arrow with the difference from it."""

    measured: str
    paper: str
    apart: str
    best: bool


@dataclass(frozen=True)
class Table:
    """``cells`` by :func:`aggregate` under ``columns``, with ``notes`` below.

    ``labels``: the columns of the frame that head a row. A first label that names methods is displayed by its name in
    the group; the CSV keeps the label.
    """

    group: Group
    name: str
    title: str
    labels: Sequence[str]
    columns: Sequence[Column]
    cells: pd.DataFrame
    notes: Sequence[str] = ()
    over: str = ""  # heading above the columns
    beside: int = 0  # number of last columns that are not under this heading

    @property
    def slug(self) -> str:
        return f"{self.name}-{self.group.slug}"

    @property
    def head(self) -> list[str]:
        return [*self.labels, *(column.label for column in self.columns)]

    @functools.cached_property
    def rows(self) -> list[tuple[list[str], list[Text]]]:
        """(the labels as text, the cells as text) of each row. The first label is marked if the method expands."""
        rows = []
        width = len(self.columns)
        cells = list(self.cells.drop(columns=seeds_of(self.cells)).itertuples())
        heads = self.cells[[*self.labels, "expands"]].iloc[::width].itertuples(index=False, name=None)
        for number, (first, *others, expands) in enumerate(heads):
            shown = self.group.shown(first) if self.labels[0] == "method" else str(first)
            texts = []
            for cell, column in zip(cells[number * width : (number + 1) * width], self.columns):
                texts.append(_as_text(cell, column, self.group.options.spread))
            rows.append(([shown + (f" {DAGGER}" if expands else ""), *map(one_line, others)], texts))
        return rows

    def files(self) -> dict[str, str]:
        """``{suffix: text}``"""
        latex = LATEX.get_template("table.tex.j2").render(table=self)
        return {"md": MARKDOWN.get_template("table.md.j2").render(table=self), "csv": self.to_csv(), "tex": latex}

    def to_csv(self) -> str:
        """One row per non-empty cell, with unrounded numbers and a column per seed."""
        names = [*self.labels, "expands", "column", *MEASURED, *PUBLISHED, *COMPARED, *seeds_of(self.cells)]
        filled = self.cells.loc[(self.cells["averaged_over"] > 0) | self.cells["paper_mean"].notna(), names]
        filled = filled.astype({"expands": int, "best": int, "compared": int})
        for name in (*self.labels, "column"):
            filled[name] = filled[name].map(_without_formula)
        return filled.to_csv(index=False, lineterminator="\n")

    def to_text(self, titled: bool) -> str:
        """Aligned columns for a terminal; ``titled``: with the group's title."""
        title = f"{self.title}. {self.group.title}" if titled else self.title
        labels = self.cells[[*self.labels]].to_numpy(dtype=object)[:: len(self.columns)]
        frame = pd.DataFrame(
            [[cell.measured for cell in cells] for _, cells in self.rows],
            index=[" ".join(map(one_line, names)) for names in labels],
            columns=pd.Index([column.label for column in self.columns], name="/".join(self.labels)),
        )
        return f"{one_line(title)}\n{frame.to_string()}"


def _as_text(cell: Any, column: Column, spread: str) -> Text:
    """The text of a cell, a row of :func:`aggregate`."""
    width = cell.standard_error if spread == "se" else cell.standard_deviation
    decimals = column.decimals
    known = not np.isnan(width) and not column.exact
    while known and width and not round(width, decimals) and decimals < column.decimals + 3:
        decimals += 1  # a spread is not shown as 0
    text = f"{cell.mean:{'+' if column.signed else ''},.{decimals}f}" if cell.averaged_over else "–"
    text += f" ± {width:,.{decimals}f}" if known else ""
    paper = "" if np.isnan(cell.paper_mean) else f"{cell.paper_mean:.2f}"
    paper += "" if np.isnan(cell.paper_standard_error) else f" ± {cell.paper_standard_error:.1f}"
    apart = "" if np.isnan(cell.differs_by) else f"{'▲' if cell.differs_by > 0 else '▼'} {abs(cell.differs_by):.2f}"
    return Text(text, paper, apart, bool(cell.best))


def _without_formula(label: object) -> object:
    """Escape a label that a spreadsheet would read as a formula; numbers are returned unchanged."""
    if not isinstance(label, str):
        return label
    text = one_line(label)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
