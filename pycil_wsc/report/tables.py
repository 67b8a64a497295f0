"""A table as a record of its cells, and the same table as Markdown, CSV, LaTeX and plain text."""

import csv
import io
import statistics
from dataclasses import dataclass
from typing import NamedTuple

DAGGER = "†"  # marks methods that expand


class Column(NamedTuple):
    label: str
    decimals: int = 2
    exact: bool = False  # a count: the same in every seed


@dataclass(frozen=True)
class Cell:
    """One place of a table: a number per seed, and what the paper has there: (mean, standard error or None)."""

    values: tuple = ()
    paper: tuple | None = None
    compared: bool = False  # the runs have the paper's schedule
    best: bool = False

    @property
    def mean(self):
        return mean_and_error(self.values)[0] if self.values else None

    @property
    def error(self):
        return mean_and_error(self.values)[1] if self.values else None

    @property
    def difference(self):
        """Ours minus the paper's, where it exceeds the two standard errors together; else None."""
        if not self.compared or self.paper is None or None in (self.error, self.paper[1]):
            return None
        difference = self.mean - self.paper[0]
        return difference if abs(difference) > self.error + self.paper[1] else None


class Row(NamedTuple):
    labels: tuple  # one for each of the table's ``corner``
    expands: bool
    cells: tuple


@dataclass(frozen=True)
class Table:
    """``rows`` of cells below ``columns``, with what to say below: ``notes`` and what is ``missing``."""

    slug: str
    title: str
    setting: str
    corner: tuple  # headings of the label columns
    columns: tuple
    rows: tuple
    notes: tuple = ()
    missing: tuple = ()
    over: str = ""  # heading above the columns
    beside: int = 0  # the last columns, which that heading is not for

    def files(self):
        """``{suffix: text}``"""
        return {"md": to_markdown(self), "csv": to_csv(self), "tex": to_latex(self)}


def mean_and_error(values):
    """Mean and standard error of the mean; the error of a single value is None."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.fmean(values), error


def full_title(table):
    return f"{table.title}. {table.setting}" if table.setting else table.title


def own_text(cell, column):
    if not cell.values:
        return "–"
    mean, error = f"{cell.mean:,.{column.decimals}f}", cell.error
    return mean if error is None or column.exact else f"{mean} ± {error:,.{column.decimals}f}"


def paper_text(cell):
    """The paper's number; "" without one."""
    if cell.paper is None:
        return ""
    mean, error = cell.paper
    return f"{mean:.2f}" if error is None else f"{mean:.2f} ± {error:.1f}"


def difference_text(cell):
    """An arrow and how far we are from the paper's number, where that is beyond the standard errors; else ""."""
    return "" if cell.difference is None else f"{'▲' if cell.difference > 0 else '▼'} {abs(cell.difference):.2f}"


def row_labels(row):
    """The row's labels as texts; the first has a mark if the method expands."""
    return [f"{label} {DAGGER}" if row.expands and i == 0 else str(label) for i, label in enumerate(row.labels)]


def to_markdown(table):
    head = [*table.corner, *(column.label for column in table.columns)]
    align = ["---"] * len(table.corner) + ["--:"] * len(table.columns)
    lines = [head, align, *([*row_labels(row), *map(_markdown_cell, row.cells, table.columns)] for row in table.rows)]
    body = "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)
    return "\n\n".join([f"**{full_title(table)}**", body, *table.notes, *table.missing]) + "\n"


def _markdown_cell(cell, column):
    own, paper = own_text(cell, column), ", ".join(filter(None, (paper_text(cell), difference_text(cell))))
    return (f"**{own}**" if cell.best else own) + (f" ({paper})" if paper else "")


def to_csv(table):
    """A line for each cell that holds anything, numbers in full."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        [
            *table.corner,
            "expands",
            "column",
            "mean",
            "standard_error",
            "averaged_over",
            "best",
            "paper_mean",
            "paper_standard_error",
            "compared",
            "differs_by",
        ]
    )
    for row in table.rows:
        for column, cell in zip(table.columns, row.cells):
            if cell.values or cell.paper:
                own = [cell.mean, cell.error, len(cell.values), int(cell.best)]
                writer.writerow(
                    [
                        *row.labels,
                        int(row.expands),
                        column.label,
                        *own,
                        *(cell.paper or ("", "")),
                        int(cell.compared),
                        cell.difference,
                    ]
                )
    return file.getvalue()


def to_latex(table):
    """A ``tabular`` for the packages booktabs and amssymb."""
    head = [_tex(text) for text in (*table.corner, *(column.label for column in table.columns))]
    lines = [[*map(_tex, row_labels(row)), *map(_latex_cell, row.cells, table.columns)] for row in table.rows]
    comments = [f"% {text}" for text in (full_title(table), *table.notes, *table.missing)]
    labels, places, all_places = len(table.corner), len(table.columns) - table.beside, len(table.columns)
    span = rf"\cmidrule(l){{{labels + 1}-{labels + places}}}"
    over = (
        [f"{'& ' * labels}\\multicolumn{{{places}}}{{c}}{{{_tex(table.over)}}}{' &' * table.beside} \\\\", span]
        if table.over
        else []
    )
    tabular = [
        f"\\begin{{tabular}}{{{'l' * labels}{'r' * all_places}}}",
        "\\toprule",
        *over,
        " & ".join(head) + r" \\",
        "\\midrule",
    ]
    return (
        "\n".join(
            [*comments, *tabular, *(" & ".join(line) + r" \\" for line in lines), "\\bottomrule", "\\end{tabular}"]
        )
        + "\n"
    )


def _latex_cell(cell, column):
    own, paper = _tex(own_text(cell, column)), _tex(" ".join(filter(None, (paper_text(cell), difference_text(cell)))))
    own = f"\\textbf{{{own}}}" if cell.best else own
    return f"\\shortstack[r]{{{own}\\\\{{\\scriptsize {paper}}}}}" if paper else own


def _tex(text):
    symbols = {
        "±": r"$\pm$",
        "▲": r"$\blacktriangle$",
        "▼": r"$\blacktriangledown$",
        "†": r"$^\dagger$",
        "–": "--",
        "\\": r"\textbackslash{}",
    }
    return "".join(symbols.get(c, f"\\{c}" if c in "&%$#_{}" else rf"\{c}{{}}" if c in "~^" else c) for c in str(text))


def to_text(table):
    """Aligned columns for a terminal."""
    lines = [["/".join(table.corner), *(column.label for column in table.columns)]]
    lines += [[" ".join(map(str, row.labels)), *map(own_text, row.cells, table.columns)] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    body = [
        "  ".join([line[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(line[1:], widths[1:]))])
        for line in lines
    ]
    return "\n".join([full_title(table), *body])
