"""Writes ``index.html``, a self-contained page of tables and figures, and their files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from pycil_wsc.files import write_atomically, write_json
from pycil_wsc.report.experiment import command, experiment
from pycil_wsc.report.figures import figures
from pycil_wsc.report.formats import difference_text, files, own_text, paper_text, row_labels
from pycil_wsc.report.groups import Group, group_runs
from pycil_wsc.report.language import LanguageGroup, language_figures, language_groups, language_tables
from pycil_wsc.report.listings import tables
from pycil_wsc.report.names import clean
from pycil_wsc.report.options import Options
from pycil_wsc.report.paper import PAPER
from pycil_wsc.report.runs import Found, Problem
from pycil_wsc.report.series import Plot
from pycil_wsc.report.style import COLUMN, drawing, inline, to_files
from pycil_wsc.report.tables import Cell, Column, Failed, Row, Table
from pycil_wsc.report.tuning import obsolete, winners

STYLE = Path(__file__).with_name("page.css")
LABEL = ' class="label"'
LONG = 30  # rows; a longer table is collapsed
DRAWN = 4  # figures are drawn for this many groups of a setting, those with the most runs
LARGE = 1000  # runs; a larger report has figures of accuracies only, for one group in each of DRAWN settings
AnyGroup = Group | LanguageGroup
Draw = Callable[[Any], Iterable[Plot | Failed]]
MEANINGS = {
    "accuracy": "top-1 accuracy in percent on the test images of all classes seen so far, "
    "by the classifier's logits (CNN).",
    "average": "the mean of the accuracies after each task (average incremental accuracy).",
    "last": "the accuracy after the last task.",
    "newest task": "the accuracy on the newest task's classes, among all classes seen, "
    "averaged over the tasks (plasticity).",
    "forgetting": "the best accuracy on a task minus the accuracy on it after the last task, "
    "averaged over all tasks but the last, in percentage points.",
    "top-5": "how often the true class is among the five highest logits.",
    "task known": "the average if the task of each image is given and only the classes of this task are considered "
    "(task-incremental).",
    "NME": "accuracy by the nearest mean of exemplars instead of the logits.",
    "training": "seconds spent in training steps; total: includes testing, choice of exemplars and saving.",
    "training images": "the number of images passed forward and backward, exemplars included.",
}


def write_page(found: Found, folders: Sequence[Any], out: Path, options: Options) -> Path:
    """Write the tables, the figures and the page; returns the path of ``index.html``.

    Failed tables and figures are listed on the page. Raises a :class:`UserError` if ``out`` cannot be written.
    """
    groups, duplicates = group_runs(found.records, options)
    language, language_duplicates = language_groups(found.language, options)
    problems, failures = [*found.problems, *duplicates, *language_duplicates], list[Problem]()
    sections = [_section(group, tables, *_figures_of(group, groups), out, failures) for group in groups]
    sections += [_section(group, language_tables, language_figures, "", out, failures) for group in language]
    for group in (group for group in groups if group.setting.validation_split):
        for name, config in winners(group).items():
            write_json(out / name, config)
        for path in (out / name for name in obsolete(group)):
            if path.is_file():
                path.unlink()
    body = [
        _header(found, folders, [*groups, *language], problems),
        "<main>",
        *sections,
        _list("failed", "Failed tables and figures", _entries(failures)),
        _list("unfinished", "Unfinished runs", _entries(found.unfinished)),
        _list("problems", "Problems", _entries(problems)),
        _list("origin", "Origin of the numbers", _origins([*groups, *language])),
        "</main>",
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_title(folders)}</title><style>{STYLE.read_text(encoding='utf-8')}</style>"
    )
    text = "\n".join(filter(None, body))
    page = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{text}\n</body></html>\n'
    write_atomically(out / "index.html", page)
    return out / "index.html"


def _figures_of(group: Group, groups: Sequence[Group]) -> tuple[Draw, str]:
    """The function that draws a group's figures, and a note on figures that are not drawn.

    If a setting has many groups, only those with the most runs have figures. In a report of very many runs, only the
    largest group of a setting has figures, and only those of accuracies.
    """
    if group.options.all_figures or group.setting.validation_split:
        return figures, ""
    ranked = sorted((g for g in groups if not g.setting.validation_split), key=lambda other: -len(other.records))
    siblings = [other for other in ranked if other.setting == group.setting]
    large = sum(len(other.records) for other in ranked) > LARGE
    if large:  # the first of each setting
        settings = list(dict.fromkeys(other.setting for other in ranked))[:DRAWN]
        chosen = siblings[:1] if group.setting in settings else []
    else:
        chosen = siblings[:DRAWN]
    if group not in chosen:
        return lambda group: (), "Not drawn: the figures of this section, because other sections have more runs."
    if large:
        note = "Not drawn, because the report is large: time, forgetting, loss, cost, analyses, studies and matrices."
        return partial(figures, brief=True), note
    return figures, ""


def _text(text: object) -> str:
    """``text`` escaped for HTML."""
    return escape(clean(text))


def _title(folders: Sequence[Any]) -> str:
    return "Report: " + ", ".join(_text(Path(folder).resolve().name or folder) for folder in folders)


def _header(found: Found, folders: Sequence[Any], groups: Sequence[AnyGroup], problems: Sequence[Problem]) -> str:
    records = {record for group in groups for record in group.records}
    methods = {record.method for record in records}
    lead = f"{_many(len(records), 'finished run')} of {_many(len(methods), 'method')}"
    where = ", ".join(f"<code>{_text(folder)}</code>" for folder in folders)
    notices = [f'<a href="#problems">{_many(len(problems), "problem")}</a>'] if problems else []
    if found.unfinished:
        notices.append(f'<a href="#unfinished">{_many(len(found.unfinished), "unfinished run")}</a>')
    notice = f'<p class="notice">{", ".join(notices)}</p>' if notices else ""
    links = "".join(
        f'<li><a href="#{group.slug}">{_text(group.title)}</a>: {_many(len(group.records), "run")}</li>'
        for group in groups
    )
    return (
        f'<header><h1>{_title(folders)}</h1><p class="lead">{lead if records else "No finished run was found."}</p>'
        f'<p class="lead">Found in {where}</p>{notice}<nav><ul>{links}</ul></nav></header>'
    )


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _section(
    group: AnyGroup,
    tabulate: Callable[[Any], Iterable[Table | Failed]],
    draw: Draw,
    undrawn: str,
    out: Path,
    failures: list[Problem],
) -> str:
    """The tables and figures of one group, and the note ``undrawn``; failures are added to ``failures``."""
    with drawing():
        found = {
            "tables": [table if isinstance(table, Failed) else _table(table, out) for table in tabulate(group)],
            "figures": [plot if isinstance(plot, Failed) else _figure(plot, group, out) for plot in draw(group)],
        }
    failures += [item for items in found.values() for item in items if isinstance(item, Failed)]
    parts = {name: [item for item in items if isinstance(item, str)] for name, items in found.items()}
    divisions = (f'<div class="{name}">\n' + "\n".join(items) + "\n</div>" for name, items in parts.items())
    note = _notes(f"{undrawn} --all-figures draws them.") if undrawn else ""
    content = "".join(divisions) + note + _reading(group, out)
    return f'<section id="{group.slug}"><h2>{_text(group.title)}</h2>\n{content}</section>'


def _reading(group: AnyGroup, out: Path) -> str:
    """Collapsed sections that explain the measures and how to reproduce the runs."""
    if isinstance(group, LanguageGroup):
        return ""
    measures = "".join(f"<dt>{name}</dt><dd>{_text(meaning)}</dd>" for name, meaning in MEANINGS.items())
    path, content = out / "configs" / f"{group.slug}.json", experiment(group)
    write_json(path, content)
    listing = json.dumps(content, indent=2, ensure_ascii=False)
    return (
        f"<details><summary>What the measures are</summary><dl>{measures}</dl></details>"
        "<details><summary>Configuration and command</summary>"
        f'<p>The configuration of every run shown above, in <a href="configs/{group.slug}.json">one file</a>. '
        f"To run them again: <code>{_text(command(path))}</code></p><pre>{_text_lines(listing)}</pre></details>"
    )


def _text_lines(text: str) -> str:
    return "\n".join(_text(line) for line in text.split("\n"))


# ---- a table ---------------------------------------------------------------------------------------------------------


def _table(table: Table, out: Path) -> str:
    for suffix, text in files(table).items():
        write_atomically(out / "tables" / f"{table.slug}.{suffix}", text)
    labels = len(table.corner)
    over = (
        f'<tr class="over"><th colspan="{labels}"></th><th colspan="{len(table.columns) - table.beside}">'
        f"{_text(table.over)}</th>{'<th></th>' * table.beside}</tr>"
        if table.over
        else ""
    )
    head = "".join(f"<th{LABEL if i == 0 else ''}>{_text(text)}</th>" for i, text in enumerate(table.corner))
    head += "".join(f"<th>{_text(column.label)}</th>" for column in table.columns)
    rows = "".join(f"<tr>{_row_head(table, row)}{_row_cells(table, row)}</tr>\n" for row in table.rows)
    body = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(table.title)}"><table><thead>{over}'
        f"<tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>"
    )
    whole = body + _notes(*table.notes, *table.missing) + _links("tables", table.slug, ("md", "csv", "tex"))
    if len(table.rows) > LONG:
        whole = f"<details><summary>{_many(len(table.rows), 'row')}</summary>{whole}</details>"
    wide = " wide" if len(table.corner) + len(table.columns) > 5 else ""
    return f'<div class="table{wide}" id="table-{table.slug}"><h3>{_text(table.title)}</h3>{whole}</div>'


def _row_head(table: Table, row: Row) -> str:
    name, *numbers = row_labels(table, row)
    variant = ' class="label variant"' if "=" in name else LABEL
    return f'<th{variant} scope="row">{_text(name)}</th>' + "".join(f"<td>{_text(number)}</td>" for number in numbers)


def _row_cells(table: Table, row: Row) -> str:
    return "".join(_html_cell(cell, column, table.spread) for cell, column in zip(row.cells, table.columns))


def _html_cell(cell: Cell, column: Column, spread: str) -> str:
    own, paper, apart = own_text(cell, column, spread), paper_text(cell), difference_text(cell)
    below = f'<span class="paper">{paper}</span>' if paper else ""
    below += f'<span class="paper apart">{apart}</span>' if apart else ""
    return f"<td>{f'<b>{own}</b>' if cell.best else own}{below}</td>"


# ---- a figure --------------------------------------------------------------------------------------------------------


def _figure(plot: Plot, group: AnyGroup, out: Path) -> str | Failed:
    slug = f"{plot.slug}-{group.slug}"
    try:
        contents = to_files(plot.figure)
    except Exception as error:
        return Failed(f"{plot.title} of {group.title}", f"{type(error).__name__}: {error}")
    for suffix, content in contents.items():
        write_atomically(out / "figures" / f"{slug}.{suffix}", content)
    wide = ' class="wide"' if plot.figure.get_figwidth() > COLUMN + 0.5 else ""
    drawn = inline(str(contents["svg"]), slug, _text(plot.title))
    caption = f"{_notes(*plot.notes)}{_links('figures', slug, ('svg', 'pdf', 'png'))}"
    figure = (
        f'<figure id="figure-{slug}"{wide}><h3>{_text(plot.title)}</h3><div class="scroll">{drawn}</div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )
    return f"<details><summary>{_text(plot.title)}</summary>{figure}</details>" if plot.folded else figure


def _notes(*notes: str) -> str:
    if not notes:
        return ""
    lines = (f"<p{' class=missing' if note.startswith('Missing') else ''}>{_text(note)}</p>" for note in notes)
    return f'<div class="notes">{"".join(lines)}</div>'


def _links(folder: str, slug: str, suffixes: Sequence[str]) -> str:
    links = (f'<a href="{folder}/{slug}.{suffix}">{suffix}</a>' for suffix in suffixes)
    return f'<p class="files">{" · ".join(links)}</p>'


# ---- problems, failures and the origin of the numbers ----------------------------------------------------------------


def _list(slug: str, title: str, entries: Sequence[str]) -> str:
    if not entries:
        return ""
    items = "".join(f"<li>{entry}</li>" for entry in entries)
    return f'<section id="{slug}"><h2>{title}</h2><ul class="plain">{items}</ul></section>'


def _entries(pairs: Iterable[tuple[Any, str]]) -> list[str]:
    return [f"<code>{_text(item)}</code>: {_text(reason)}" for item, reason in pairs]


def _origins(groups: Sequence[AnyGroup]) -> list[str]:
    """Each combination of device, precision, version of torch and commit, with its number of runs."""
    keys = ("device", "precision", "torch", "commit")
    records = {record for group in groups for record in group.records}
    counts = Counter(tuple(str(record.data.get(key) or "unknown") for key in keys) for record in records)
    entries = [
        f"{_many(count, 'run')}: {_text(device)}, {_text(precision)}, torch {_text(torch)}, "
        f"commit <code>{_text(commit)}</code>"
        for (device, precision, torch, commit), count in counts.items()
    ]
    paper = f"The paper's numbers are reference data: {_text(PAPER['source'])}"
    return [*entries, paper] if any(group.reference for group in groups) else entries
