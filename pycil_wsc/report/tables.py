"""A table is a frame with a line per cell, aggregated over seeds. Text, CSV, Markdown and LaTeX are views of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pycil_wsc.report.names import clean

DAGGER = "†"  # marks methods that expand
MEASURED = ["mean", "standard_error", "standard_deviation", "averaged_over", "best"]
PUBLISHED = ["paper_mean", "paper_standard_error", "compared", "differs_by"]


class Column(NamedTuple):
    label: str
    decimals: int = 2
    exact: bool = False  # a count: the same in every seed
    signed: bool = False  # a difference


class Failed(NamedTuple):
    """A table or figure that failed, and the reason."""

    what: str
    why: str


def aggregate(values: pd.DataFrame, heads: Sequence[str], columns: Iterable[str]) -> pd.DataFrame:
    """The cells of a table: a line for every row and column, with statistics over the seeds and each seed's value.

    Args:
        values: a line per run and column, with the columns ``heads``, ``column``, ``memory``, ``seed`` and ``value``.
        heads: what a row of the table has in common: its labels, and whether its method ``expands``.
        columns: the labels of the table's columns, in order.
    """
    keys = [*heads, "column"]
    values = values.dropna(subset="value").astype({"value": float})
    grouped = values.groupby(keys, sort=False)
    cells = grouped["value"].agg(mean="mean", standard_error="sem", standard_deviation="std", averaged_over="count")
    rows = values[[*heads]].drop_duplicates()
    grid = rows.merge(pd.DataFrame({"column": list(columns)}), how="cross")
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


def melted(rows: pd.DataFrame, columns: Iterable[str]) -> pd.DataFrame:
    """A line per run and column, of a frame with a line per run."""
    columns = list(columns)
    others = [name for name in rows.columns if name not in columns]
    return rows.melt(id_vars=others, value_vars=columns, var_name="column", value_name="value")


def seeds_of(cells: pd.DataFrame) -> list[str]:
    return [name for name in cells.columns if name.startswith("seed_")]


@dataclass(frozen=True)
class Table:
    """``cells`` by :func:`aggregate` under ``columns``, with ``notes`` and notes on ``missing`` runs below.

    ``labels``: the columns of the frame that head a row. ``spread``: whether ± is the standard error (``se``) or the
    standard deviation (``sd``). ``shown``: the display name of a first label; the CSV keeps the label.
    """

    slug: str
    title: str
    setting: str
    labels: tuple[str, ...]
    columns: tuple[Column, ...]
    cells: pd.DataFrame
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    over: str = ""  # heading above the columns
    beside: int = 0  # number of last columns that are not under this heading
    spread: str = "se"
    shown: Callable[[Any], str] = str

    @property
    def full_title(self) -> str:
        return f"{self.title}. {self.setting}" if self.setting else self.title

    @property
    def head(self) -> list[str]:
        return [*self.labels, *(column.label for column in self.columns)]

    def rows(self) -> Iterator[tuple[list[str], list[Text]]]:
        """(the labels as text, the cells as text) of each row. The first label is marked if the method expands."""
        width = len(self.columns)
        wanted = self.cells[[*self.labels, "expands", *MEASURED, *PUBLISHED]].to_numpy(dtype=object)
        for start in range(0, len(wanted), width):
            first, *others = wanted[start][: len(self.labels)]
            mark = f" {DAGGER}" if wanted[start][len(self.labels)] else ""
            cells = [
                Text.of(line[len(self.labels) + 1 :], column, self.spread)
                for line, column in zip(wanted[start : start + width], self.columns)
            ]
            yield [self.shown(first) + mark, *map(clean, others)], cells

    def files(self) -> dict[str, str]:
        """``{suffix: text}``"""
        return {"md": self.to_markdown(), "csv": self.to_csv(), "tex": self.to_latex()}

    def to_csv(self) -> str:
        """One line per non-empty cell, with unrounded numbers and a column per seed."""
        names = [*self.labels, "expands", "column", *MEASURED, *PUBLISHED, *seeds_of(self.cells)]
        filled = self.cells.loc[(self.cells["averaged_over"] > 0) | self.cells["paper_mean"].notna(), names].copy()
        for name in ("expands", "best", "compared"):
            filled[name] = filled[name].astype(int)
        for name in (*self.labels, "column"):
            filled[name] = filled[name].map(_without_formula)
        return filled.to_csv(index=False, lineterminator="\n")

    def to_text(self) -> str:
        """Aligned columns for a terminal."""
        lines = [["/".join(self.labels), *self.head[len(self.labels) :]]]
        raw = self.cells[[*self.labels]].to_numpy(dtype=object)[:: len(self.columns)]
        for labels, (_, cells) in zip(raw, self.rows()):
            lines.append([" ".join(map(clean, labels)), *(cell.own for cell in cells)])
        widths = [max(map(len, column)) for column in zip(*lines)]
        body = []
        for first, *others in lines:
            rest = [text.rjust(width) for text, width in zip(others, widths[1:])]
            body.append("  ".join([first.ljust(widths[0]), *rest]))
        return "\n".join([clean(self.full_title), *body])

    def to_markdown(self) -> str:
        lines = [[_markdown(text) for text in self.head], ["---"] * len(self.labels) + ["--:"] * len(self.columns)]
        for labels, cells in self.rows():
            line = [_markdown(label) for label in labels]
            for cell in cells:
                paper = ", ".join(filter(None, (cell.paper, cell.apart)))
                line.append((f"**{cell.own}**" if cell.best else cell.own) + (f" ({paper})" if paper else ""))
            lines.append(line)
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        notes = [_markdown(note) for note in (*self.notes, *self.missing)]
        return "\n\n".join([f"**{_markdown(self.full_title)}**", body, *notes]) + "\n"

    def to_latex(self) -> str:
        """A ``tabular`` for the packages booktabs, amssymb and graphicx, scaled down to the line width if needed.

        The paper's numbers are below ours, in a smaller font.
        """
        labels, places = len(self.labels), len(self.columns) - self.beside
        body = []
        if self.over:
            over = f"\\multicolumn{{{places}}}{{c}}{{{_latex(self.over)}}}"
            body.append(f"{'& ' * labels}{over}{' &' * self.beside} \\\\")
            body.append(rf"\cmidrule(lr){{{labels + 1}-{labels + places}}}")
        body += [" & ".join(map(_latex, self.head)) + r" \\", r"\midrule"]
        for names, cells in self.rows():
            own = [re.sub(r"^-(?=\d)", "$-$", _latex(cell.own)) for cell in cells]
            own = [f"\\textbf{{{text}}}" if cell.best else text for text, cell in zip(own, cells)]
            body.append(" & ".join([*map(_latex, names), *own]) + r" \\")
            paper = [_latex(f"{cell.paper} {cell.apart}".strip()) for cell in cells]
            if any(paper):
                small = [f"{{\\scriptsize {text}}}" if text else "" for text in paper]
                body.append(" & ".join([*[""] * labels, *small]) + r" \\[2pt]")
        comments = [f"% {clean(text)}" for text in (self.full_title, *self.notes, *self.missing)]
        frame = f"\\begin{{tabular}}{{@{{}}{'l' * labels}{'r' * len(self.columns)}@{{}}}}"
        tabular = [frame, r"\toprule", *body, r"\bottomrule", r"\end{tabular}%"]
        fitted = [r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%", *tabular, "}"]
        return "\n".join([*comments, "% needs: booktabs, amssymb, graphicx", *fitted]) + "\n"


class Text(NamedTuple):
    """A cell as text: our mean and its spread, the paper's number, and an arrow with the difference from it."""

    own: str
    paper: str
    apart: str
    best: bool

    @classmethod
    def of(cls, line: Sequence[Any], column: Column, spread: str) -> Text:
        mean, error, deviation, count, best, paper, paper_error, _, difference = line
        width = error if spread == "se" else deviation
        theirs = "" if np.isnan(paper) else f"{paper:.2f}" + ("" if np.isnan(paper_error) else f" ± {paper_error:.1f}")
        apart = "" if np.isnan(difference) else f"{'▲' if difference > 0 else '▼'} {abs(difference):.2f}"
        return cls(_own(mean, width, column) if count else "–", theirs, apart, bool(best))


def _own(mean: float, width: float, column: Column) -> str:
    decimals = column.decimals
    known = not np.isnan(width) and not column.exact
    while known and width and not round(width, decimals) and decimals < column.decimals + 3:
        decimals += 1  # a spread is not shown as 0
    text = f"{mean:{'+' if column.signed else ''},.{decimals}f}"
    return f"{text} ± {width:,.{decimals}f}" if known else text


def _without_formula(label: object) -> object:
    """Escape a label that a spreadsheet would read as a formula; numbers are returned unchanged."""
    if not isinstance(label, str):
        return label
    text = clean(label)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def _markdown(text: str) -> str:
    """``text`` with Markdown and HTML escaped."""
    text = clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{c}" if c in "\\`*[]|" else c for c in text)


LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # after a line's end, a bracket or asterisk would be read as its argument
    "*": "{*}",
    "±": r"$\pm$",
    "▲": r"$\blacktriangle$",
    "▼": r"$\blacktriangledown$",
    "†": r"$^\dagger$",
    "–": "--",
    "−": "--",
    "\ufffd": "?",
} | {c: f"\\{c}" for c in "&%$#_{}"}


def _latex(text: object) -> str:
    return "".join(LATEX.get(c, c) for c in clean(text))
