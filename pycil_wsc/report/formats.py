"""Writes a table as Markdown, CSV, LaTeX and plain text."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from pycil_wsc.report.names import clean
from pycil_wsc.report.tables import DAGGER, Cell, Column, Row, Table


def files(table: Table) -> dict[str, str]:
    """``{suffix: text}``"""
    return {"md": to_markdown(table), "csv": to_csv(table), "tex": to_latex(table)}


# ---- text of cells, shared by all formats ----------------------------------------------------------------------------


def own_text(cell: Cell, column: Column, spread: str = "se") -> str:
    """Our mean and its spread over the seeds, or a dash without a run."""
    if cell.mean is None:
        return "–"
    mean = f"{cell.mean:{'+' * column.signed},.{column.decimals}f}"
    width = cell.error if spread == "se" else cell.deviation
    return mean if width is None or column.exact else f"{mean} ± {width:,.{column.decimals}f}"


def paper_text(cell: Cell) -> str:
    """The paper's number, or "" if there is none."""
    if cell.paper is None:
        return ""
    mean, error = cell.paper
    return f"{mean:.2f}" if error is None else f"{mean:.2f} ± {error:.1f}"


def difference_text(cell: Cell) -> str:
    """An arrow and our difference from the paper's number, or "" if it is within the standard errors."""
    return "" if cell.difference is None else f"{'▲' if cell.difference > 0 else '▼'} {abs(cell.difference):.2f}"


def row_labels(table: Table, row: Row) -> list[str]:
    """The row's labels as text; the first is marked if the method expands."""
    first, *others = row.labels
    return [table.shown(first) + f" {DAGGER}" * row.expands, *(clean(label) for label in others)]


# ---- Markdown --------------------------------------------------------------------------------------------------------


def to_markdown(table: Table) -> str:
    head = [*table.corner, *(column.label for column in table.columns)]
    align = ["---"] * len(table.corner) + ["--:"] * len(table.columns)
    lines = [list(map(_markdown, head)), align]
    lines += [
        [
            *map(_markdown, row_labels(table, row)),
            *(_markdown_cell(table, cell, column) for cell, column in zip(row.cells, table.columns)),
        ]
        for row in table.rows
    ]
    body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        "\n\n".join([f"**{_markdown(table.full_title)}**", body, *map(_markdown, (*table.notes, *table.missing))])
        + "\n"
    )


def _markdown_cell(table: Table, cell: Cell, column: Column) -> str:
    own = own_text(cell, column, table.spread)
    paper = ", ".join(filter(None, (paper_text(cell), difference_text(cell))))
    return (f"**{own}**" if cell.best else own) + (f" ({paper})" if paper else "")


def _markdown(text: str) -> str:
    """``text`` with Markdown and HTML escaped."""
    text = clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{c}" if c in "\\`*[]|" else c for c in text)


# ---- CSV -------------------------------------------------------------------------------------------------------------


def to_csv(table: Table) -> str:
    """One line per non-empty cell, with unrounded numbers and a column per seed."""
    seeds = _seeds(table)
    head = ["expands", "column", "mean", "standard_error", "standard_deviation", "averaged_over", "best"]
    head += ["paper_mean", "paper_standard_error", "compared", "differs_by", *(f"seed_{seed}" for seed in seeds)]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*map(_csv_label, table.corner), *head])
    for row in table.rows:
        for column, cell in zip(table.columns, row.cells):
            if cell.seeds or cell.paper:
                own = [cell.mean, cell.error, cell.deviation, len(cell.seeds), int(cell.best)]
                theirs = [*(cell.paper or ("", "")), int(cell.compared), cell.difference]
                labels = [_csv_label(label) for label in (*row.labels, int(row.expands), column.label)]
                writer.writerow([*labels, *own, *theirs, *(cell.seeds.get(seed) for seed in seeds)])
    return file.getvalue()


def _seeds(table: Table) -> list[int]:
    cells = [cell for row in table.rows for cell in row.cells]
    return sorted({seed for cell in cells for seed in cell.seeds if isinstance(seed, int)})


def _csv_label(label: object) -> object:
    """Escape a label that a spreadsheet would read as a formula; numbers are returned unchanged."""
    if not isinstance(label, str):
        return label
    text = clean(label)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


# ---- LaTeX -----------------------------------------------------------------------------------------------------------

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


def to_latex(table: Table) -> str:
    """A ``tabular`` for the packages booktabs, amssymb and graphicx, scaled down to the line width if needed."""
    comments = [f"% {clean(text)}" for text in (table.full_title, *table.notes, *table.missing)]
    labels, places = len(table.corner), len(table.columns)
    body = [
        *_latex_over(table),
        _latex_line(map(_latex, (*table.corner, *(c.label for c in table.columns)))),
        "\\midrule",
    ]
    for row in table.rows:
        body += _latex_row(table, row)
    tabular = [
        f"\\begin{{tabular}}{{@{{}}{'l' * labels}{'r' * places}@{{}}}}",
        "\\toprule",
        *body,
        "\\bottomrule",
        "\\end{tabular}%",
    ]
    fitted = ["\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%", *tabular, "}"]
    return "\n".join([*comments, "% needs: booktabs, amssymb, graphicx", *fitted]) + "\n"


def _latex_over(table: Table) -> list[str]:
    if not table.over:
        return []
    labels, places = len(table.corner), len(table.columns) - table.beside
    heading = f"{'& ' * labels}\\multicolumn{{{places}}}{{c}}{{{_latex(table.over)}}}{' &' * table.beside} \\\\"
    return [heading, rf"\cmidrule(lr){{{labels + 1}-{labels + places}}}"]


def _latex_row(table: Table, row: Row) -> list[str]:
    """The line of our numbers and, in a smaller font, the line of the paper's, if there are any."""
    own = [_latex_number(text) for text in _own_texts(row.cells, table.columns, table.spread)]
    own = [f"\\textbf{{{text}}}" if cell.best else text for text, cell in zip(own, row.cells)]
    paper = [_latex(" ".join(filter(None, (paper_text(cell), difference_text(cell))))) for cell in row.cells]
    lines = [_latex_line([*map(_latex, row_labels(table, row)), *own])]
    if any(paper):
        small = [f"{{\\scriptsize {text}}}" if text else "" for text in paper]
        lines.append(_latex_line([*[""] * len(row.labels), *small]) + "[2pt]")
    return lines


def _latex_line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _latex_number(text: str) -> str:
    """``text`` with a minus sign instead of a hyphen."""
    return re.sub(r"^-(?=\d)", "$-$", _latex(text))


def _latex(text: object) -> str:
    return "".join(LATEX.get(c, c) for c in clean(text))


# ---- a terminal ------------------------------------------------------------------------------------------------------


def to_text(table: Table) -> str:
    """Aligned columns for a terminal."""
    lines = [["/".join(table.corner), *(column.label for column in table.columns)]]
    lines += [
        [" ".join(clean(label) for label in row.labels), *_own_texts(row.cells, table.columns, table.spread)]
        for row in table.rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines)]
    body = [
        "  ".join([line[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(line[1:], widths[1:]))])
        for line in lines
    ]
    return "\n".join([clean(table.full_title), *body])


def _own_texts(cells: Sequence[Cell], columns: Sequence[Column], spread: str) -> list[str]:
    return [own_text(cell, column, spread) for cell, column in zip(cells, columns)]
