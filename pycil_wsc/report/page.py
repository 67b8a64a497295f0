"""``index.html``: tables and figures on one page that stands alone, with their files beside it."""

from collections import Counter
from html import escape
from pathlib import Path

from pycil_wsc.files import write_atomically, write_json
from pycil_wsc.report.figures import figures
from pycil_wsc.report.groups import group_runs
from pycil_wsc.report.language import language_figures, language_groups, language_tables
from pycil_wsc.report.paper import PAPER
from pycil_wsc.report.studies import STUDIES, tables
from pycil_wsc.report.style import COLUMN, drawing, inline, to_files
from pycil_wsc.report.tables import difference_text, own_text, paper_text, row_labels
from pycil_wsc.report.tuning import winners

STYLE = Path(__file__).with_name("page.css")
LABEL = ' class="label"'
LONG = 30  # rows: a longer table is shown on demand


def write_page(found, folders, out):
    """Write the tables, the figures and the page of what was found; returns the path of ``index.html``."""
    groups, doubles = group_runs(found.records)
    filled = {group: tables(group) for group in groups}
    problems = [*found.problems, *doubles]
    language = language_groups(found.language)
    drawn, told = {}, {}
    with drawing():
        for group in groups:
            drawn[group] = {plot.slug: _figure(plot, group, out) for plot in figures(group)}
        for group in language:
            told[group] = [_figure(plot, group, out) for plot in language_figures(group)]
    for group in (group for group in groups if group.setting.validation_split):
        for name, config in winners(group).items():
            write_json(out / name, config)
    body = [
        _header(found, folders, [*groups, *language], problems),
        "<main>",
        *(_section(group, filled[group], drawn[group].values(), out) for group in groups),
    ]
    body += [_section(group, language_tables(group), told[group], out) for group in language]
    body += [
        _list("missing", "Missing altogether", [*_without_a_run(filled), *_undrawn(drawn)]),
        _list("unfinished", "Runs that have not ended", _entries(found.unfinished)),
    ]
    body += [
        _list("skipped", "Left out, and untouched", _entries(problems)),
        _list("origin", "Where the numbers come from", _origins([*groups, *language])),
        "</main>",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{_title(folders)}</title><style>{STYLE.read_text()}</style>'
    write_atomically(
        out / "index.html",
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        + "\n".join(filter(None, body))
        + "\n</body></html>\n",
    )
    return out / "index.html"


def _title(folders):
    return "Report: " + ", ".join(escape(str(folder)) for folder in folders)


def _header(found, folders, groups, problems):
    count = sum(len(group.records) for group in groups)
    methods = {record.method for group in groups for record in group.records}
    lead = (
        f"{_many(count, 'finished run')} of {_many(len(methods), 'method')}" if count else "No finished run was found."
    )
    notices = [f'<a href="#skipped">{_many(len(problems), "file")} left out</a>'] if problems else []
    notices += (
        [f'<a href="#unfinished">{_many(len(found.unfinished), "run")} not ended</a>'] if found.unfinished else []
    )
    notice = f'<p class="notice">{", ".join(notices)}</p>' if notices else ""
    links = "".join(
        f'<li><a href="#{group.slug}">{escape(group.title)}</a>: {_many(len(group.records), "run")}</li>'
        for group in groups
    )
    return f'<header><h1>{_title(folders)}</h1><p class="lead">{lead}</p>{notice}<nav><ul>{links}</ul></nav></header>'


def _many(count, noun):
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _section(group, filled, drawn, out):
    parts = {"tables": [_table(table, out) for table in filled], "figures": drawn}
    divisions = (f'<div class="{name}">\n' + "\n".join(items) + "\n</div>" for name, items in parts.items())
    return f'<section id="{group.slug}"><h2>{escape(group.title)}</h2>\n{"".join(divisions)}</section>'


# ---- a table -----------------------------------------------------------------------------------------------------------


def _table(table, out):
    for suffix, text in table.files().items():
        write_atomically(out / "tables" / f"{table.slug}.{suffix}", text)
    labels = len(table.corner)
    over = (
        f'<tr class="over"><th colspan="{labels}"></th><th colspan="{len(table.columns) - table.beside}">{escape(table.over)}</th>{"<th></th>" * table.beside}</tr>'
        if table.over
        else ""
    )
    head = "".join(
        f"<th{LABEL if i == 0 else ''}>{escape(text)}</th>" for i, text in enumerate(table.corner)
    ) + "".join(f"<th>{escape(column.label)}</th>" for column in table.columns)
    rows = "".join(
        f"<tr>{_row_head(row)}{''.join(map(_html_cell, row.cells, table.columns))}</tr>\n" for row in table.rows
    )
    body = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}"><table><thead>{over}<tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>'
    whole = body + _notes(*table.notes, *table.missing) + _links("tables", table.slug, ("md", "csv", "tex"))
    if len(table.rows) > LONG:
        whole = f"<details><summary>{_many(len(table.rows), 'row')}</summary>{whole}</details>"
    wide = " wide" if len(table.corner) + len(table.columns) > 5 else ""
    return f'<div class="table{wide}" id="table-{table.slug}"><h3>{escape(table.title)}</h3>{whole}</div>'


def _row_head(row):
    name, *numbers = row_labels(row)
    variant = ' class="label variant"' if "=" in name else LABEL
    return f'<th{variant} scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(number)}</td>" for number in numbers)


def _html_cell(cell, column):
    own, paper, apart = own_text(cell, column), paper_text(cell), difference_text(cell)
    below = (f'<span class="paper">{paper}</span>' if paper else "") + (
        f'<span class="paper apart">{apart}</span>' if apart else ""
    )
    return f"<td>{f'<b>{own}</b>' if cell.best else own}{below}</td>"


# ---- a figure ----------------------------------------------------------------------------------------------------------


def _figure(plot, group, out):
    slug, files = f"{plot.slug}-{group.slug}", to_files(plot.figure)
    for suffix, content in files.items():
        write_atomically(out / "figures" / f"{slug}.{suffix}", content)
    wide = ' class="wide"' if plot.figure.get_figwidth() > COLUMN + 0.5 else ""
    drawn = inline(files["svg"], slug, escape(plot.title, quote=True))
    figure = f'<figure id="figure-{slug}"{wide}><h3>{escape(plot.title)}</h3><div class="scroll">{drawn}</div><figcaption>{_notes(*plot.notes)}{_links("figures", slug, ("svg", "png"))}</figcaption></figure>'
    return f"<details><summary>{escape(plot.title)}</summary>{figure}</details>" if plot.folded else figure


def _notes(*notes):
    return (
        '<div class="notes">'
        + "".join(f"<p{' class=missing' if note.startswith('Missing') else ''}>{escape(note)}</p>" for note in notes)
        + "</div>"
        if notes
        else ""
    )


def _links(folder, slug, suffixes):
    return (
        '<p class="files">'
        + " · ".join(f'<a href="{folder}/{slug}.{suffix}">{suffix}</a>' for suffix in suffixes)
        + "</p>"
    )


# ---- what is not there, and where the rest is from ---------------------------------------------------------------------


def _list(slug, title, entries):
    return (
        f'<section id="{slug}"><h2>{title}</h2><ul class="plain">{"".join(f"<li>{entry}</li>" for entry in entries)}</ul></section>'
        if entries
        else ""
    )


def _entries(pairs):
    return [f"<code>{escape(str(path))}</code>: {escape(str(reason))}" for path, reason in pairs]


def _without_a_run(filled):
    """The paper's tables on the data sets of these runs for which there is no run at all."""
    here = {group.setting.dataset for group in filled if not group.setting.validation_split}
    there = {table.slug for group in filled for table in filled[group] if group.reference}
    titles = {study.slug: study.title for study in STUDIES}
    lacking = [
        (place, study) for place, studies in PAPER["tables"].items() if place.split("-")[0] in here for study in studies
    ]
    return [
        f"{escape(titles[study])}: no run at <code>{escape(place)}</code>"
        for place, study in lacking
        if not any(slug.startswith(f"{study}-{place}-") for slug in there)
    ]


def _undrawn(drawn):
    """The figures that no run of a group has the numbers for."""
    expected = {
        "accuracy-memory": "Figures against memory size: no run with exemplars",
        "retain-rate": "Accuracy over the retain rate: no memory size with runs of two rates",
        "training-loss": "Training loss: no run has recorded it",
        "confusion": "Confusion matrix: no run has recorded it",
    }
    return [
        f"{text} at <code>{group.slug}</code>"
        for group, plots in drawn.items()
        if not group.setting.validation_split
        for slug, text in expected.items()
        if not any(plot.startswith(slug) for plot in plots)
    ]


def _origins(groups):
    """Device, precision, version of torch and commit, each with its number of runs."""
    keys = ("device", "precision", "torch", "commit")
    counts = Counter(
        tuple(str(record.data.get(key) or "unknown") for key in keys) for group in groups for record in group.records
    )
    entries = [
        f"{_many(count, 'run')}: {escape(device)}, {escape(precision)}, torch {escape(torch)}, commit <code>{escape(commit)}</code>"
        for (device, precision, torch, commit), count in counts.items()
    ]
    return (
        [*entries, f"The paper's numbers are reference data: {escape(PAPER['source'])}"]
        if any(group.reference for group in groups)
        else entries
    )
