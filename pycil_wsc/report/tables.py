"""A table is a frame with a line per cell, aggregated over seeds. Text, CSV, Markdown and LaTeX are views of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from pycil_wsc.report.groups import Group
from pycil_wsc.report.names import clean
from pycil_wsc.report.rows import Column
from pycil_wsc.report.texts import LATEX, MARKDOWN

DAGGER = "†"  # marks methods that expand
MEASURED = ["mean", "standard_error", "standard_deviation", "averaged_over", "best"]
PUBLISHED = ["paper_mean", "paper_standard_error", "compared", "differs_by"]


class Failed(NamedTuple):
    """A table or figure that failed, and the reason."""

    what: str
    why: str


def aggregate(values: pd.DataFrame, heads: Sequence[str], columns: Sequence[Column]) -> pd.DataFrame:
    """The cells of a table: a line for every row and column, with statistics over the seeds and each seed's value.

    Args:
        values: a line per run and column, with the columns ``heads``, ``column``, ``memory``, ``seed`` and ``value``.
        heads: what a row of the table has in common: its labels, and whether its method ``expands``.
        columns: the table's columns.
    """
    keys = [*heads, "column"]
    values = values.dropna(subset="value").astype({"value": float})
    grouped = values.groupby(keys, sort=False)
    cells = grouped["value"].agg(mean="mean", standard_error="sem", standard_deviation="std", averaged_over="count")
    rows = values[[*heads]].drop_duplicates()
    grid = rows.merge(pd.DataFrame({"column": [column.label for column in columns]}), how="cross")
    if values.empty:
        return grid.reindex(columns=[*keys, *MEASURED, *PUBLISHED])
    one_size = values[grouped["memory"].transform("nunique") == 1]  # else a seed has several values
    by_seed = one_size.pivot_table(index=keys, columns="seed", values="value", sort=False)
    by_seed = by_seed[sorted(by_seed.columns)].rename(columns=lambda seed: f"seed_{int(seed)}")
    grid = grid.merge(cells.reset_index(), how="left", on=keys).merge(by_seed.reset_index(), how="left", on=keys)
    grid["averaged_over"] = grid["averaged_over"].fillna(0).astype(int)
    grid[["best", "compared"]] = False
    grid[["paper_mean", "paper_standard_error", "differs_by"]] = np.nan
    return grid


def seeds_of(cells: pd.DataFrame) -> list[str]:
    return [name for name in cells.columns if name.startswith("seed_")]


@dataclass(frozen=True)
class Table:
    """``cells`` by :func:`aggregate` under ``columns``, with ``notes`` and notes on ``missing`` runs below.

    ``labels``: the columns of the frame that head a row. A first label that names methods is displayed by its name in
    the group; the CSV keeps the label.
    """

    group: Group
    kind: str
    title: str
    labels: Sequence[str]
    columns: Sequence[Column]
    cells: pd.DataFrame
    notes: Sequence[str] = ()
    missing: Sequence[str] = ()
    over: str = ""  # heading above the columns
    beside: int = 0  # number of last columns that are not under this heading

    @property
    def slug(self) -> str:
        return f"{self.kind}-{self.group.slug}"

    @property
    def full_title(self) -> str:
        return f"{self.title}. {self.group.title}"

    @property
    def head(self) -> list[str]:
        return [*self.labels, *(column.label for column in self.columns)]

    def rows(self) -> Iterator[tuple[list[str], list[Text]]]:
        """(the labels as text, the cells as text) of each row. The first label is marked if the method expands."""
        width = len(self.columns)
        lines = list(self.cells[[*self.labels, "expands", *MEASURED, *PUBLISHED]].itertuples(index=False, name=None))
        for start in range(0, len(lines), width):
            first, *others, expands = lines[start][: len(self.labels) + 1]
            shown = self.group.shown(first) if self.labels[0] == "method" else str(first)
            cells = []
            for line, column in zip(lines[start : start + width], self.columns):
                cells.append(_as_text(line[len(self.labels) + 1 :], column, self.group.options.spread))
            yield [shown + (f" {DAGGER}" if expands else ""), *map(clean, others)], cells

    def files(self) -> dict[str, str]:
        """``{suffix: text}``"""
        markdown = MARKDOWN.get_template("table.md.j2").render(table=self)
        latex = LATEX.get_template("table.tex.j2").render(table=self)
        return {"md": markdown, "csv": self.to_csv(), "tex": latex}

    def to_csv(self) -> str:
        """One line per non-empty cell, with unrounded numbers and a column per seed."""
        names = [*self.labels, "expands", "column", *MEASURED, *PUBLISHED, *seeds_of(self.cells)]
        filled = self.cells.loc[(self.cells["averaged_over"] > 0) | self.cells["paper_mean"].notna(), names].copy()
        for name in ("expands", "best", "compared"):
            filled[name] = filled[name].astype(int)
        for name in (*self.labels, "column"):
            filled[name] = filled[name].map(_without_formula)
        return filled.to_csv(index=False, lineterminator="\n")

    def to_text(self, title: str) -> str:
        """Aligned columns for a terminal."""
        labels = self.cells[[*self.labels]].to_numpy(dtype=object)[:: len(self.columns)]
        frame = pd.DataFrame(
            [[cell.own for cell in cells] for _, cells in self.rows()],
            index=[" ".join(map(clean, names)) for names in labels],
            columns=pd.Index([column.label for column in self.columns], name="/".join(self.labels)),
        )
        return f"{clean(title)}\n{frame.to_string()}"


class Text(NamedTuple):
    """A cell as text: our mean and its spread, the paper's number, and an arrow with the difference from it."""

    own: str
    paper: str
    apart: str
    best: bool


def _as_text(cell: Sequence[float], column: Column, spread: str) -> Text:
    """The text of a cell's values, those of ``MEASURED`` and ``PUBLISHED``."""
    mean, error, deviation, count, best, paper, paper_error, _, difference = cell
    width = error if spread == "se" else deviation
    decimals = column.decimals
    known = not np.isnan(width) and not column.exact
    while known and width and not round(width, decimals) and decimals < column.decimals + 3:
        decimals += 1  # a spread is not shown as 0
    own = f"{mean:{'+' if column.signed else ''},.{decimals}f}" + (f" ± {width:,.{decimals}f}" if known else "")
    theirs = "" if np.isnan(paper) else f"{paper:.2f}" + ("" if np.isnan(paper_error) else f" ± {paper_error:.1f}")
    apart = "" if np.isnan(difference) else f"{'▲' if difference > 0 else '▼'} {abs(difference):.2f}"
    return Text(own if count else "–", theirs, apart, bool(best))


def _without_formula(label: object) -> object:
    """Escape a label that a spreadsheet would read as a formula; numbers are returned unchanged."""
    if not isinstance(label, str):
        return label
    text = clean(label)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
