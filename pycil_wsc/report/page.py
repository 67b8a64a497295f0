"""Writes ``index.html``, a self-contained page of tables and figures, and their files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from pycil_wsc.files import write_atomically, write_json
from pycil_wsc.report.experiment import command, experiment
from pycil_wsc.report.figures import Plot, figures, language_figures
from pycil_wsc.report.groups import Group, group_runs
from pycil_wsc.report.language import LanguageGroup, language_groups, language_tables
from pycil_wsc.report.names import clean
from pycil_wsc.report.options import Options
from pycil_wsc.report.paper import PAPER
from pycil_wsc.report.style import COLUMN, drawing, inline, to_files
from pycil_wsc.report.tables import Failed, Table
from pycil_wsc.report.tuning import obsolete, winners
from pycil_wsc.report.views import tables
from pycil_wsc.results import Found

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
    sections = [_section(group, tables, *_figures_of(group, groups), out) for group in groups]
    sections += [_section(group, language_tables, language_figures, "", out) for group in language]
    for group in (group for group in groups if group.setting.validation_split):
        for name, config in winners(group).items():
            write_json(out / name, config)
        for path in (out / name for name in obsolete(group)):
            if path.is_file():
                path.unlink()
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else clean(value),
    )
    every = [*groups, *language]
    page = environment.get_template("page.html.j2").render(
        style=Markup((folder / "page.css").read_text(encoding="utf-8")),
        title="Report: " + ", ".join(Path(folder).resolve().name or str(folder) for folder in folders),
        folders=folders,
        sections=sections,
        runs=sum(len(group.records) for group in every),
        methods=len({record.method for group in every for record in group.records}),
        failed=[failure for section in sections for failure in section["failed"]],
        unfinished=found.unfinished,
        problems=[*found.problems, *duplicates, *language_duplicates],
        origins=_origins(every),
        source=PAPER["source"] if any(group.reference for group in every) else "",
        meanings=MEANINGS,
    )
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


def _section(
    group: AnyGroup, tabulate: Callable[[Any], Iterable[Table | Failed]], draw: Draw, undrawn: str, out: Path
) -> dict[str, Any]:
    """What the page shows of one group. Writes the files of its tables, figures and configuration."""
    shown: dict[str, Any] = {"group": group, "undrawn": undrawn, "tables": [], "figures": [], "failed": []}
    with drawing():
        for table in tabulate(group):
            if isinstance(table, Failed):
                shown["failed"].append(table)
                continue
            for suffix, text in table.files().items():
                write_atomically(out / "tables" / f"{table.slug}.{suffix}", text)
            shown["tables"].append(table)
        for plot in draw(group):
            found = plot if isinstance(plot, Failed) else _figure(plot, group, out)
            shown["failed" if isinstance(found, Failed) else "figures"].append(found)
    if isinstance(group, Group):
        path, content = out / "configs" / f"{group.slug}.json", experiment(group)
        write_json(path, content)
        listing = json.dumps(content, indent=2, ensure_ascii=False)
        shown["command"] = command(path)
        shown["listing"] = [clean(line) for line in listing.split("\n")]
    return shown


def _figure(plot: Plot, group: AnyGroup, out: Path) -> dict[str, Any] | Failed:
    slug = f"{plot.slug}-{group.slug}"
    try:
        contents = to_files(plot.figure)
    except Exception as error:
        return Failed(f"{plot.title} of {group.title}", f"{type(error).__name__}: {error}")
    for suffix, content in contents.items():
        write_atomically(out / "figures" / f"{slug}.{suffix}", content)
    drawn = Markup(inline(str(contents["svg"]), slug, str(Markup.escape(clean(plot.title)))))
    return {"slug": slug, "plot": plot, "svg": drawn, "wide": plot.figure.get_figwidth() > COLUMN + 0.5}


def _origins(groups: Sequence[AnyGroup]) -> list[tuple[int, tuple[str, ...]]]:
    """Each combination of device, precision, version of torch and commit, with its number of runs."""
    keys = ("device", "precision", "torch", "commit")
    counts = Counter(
        tuple(str(record.data.get(key) or "unknown") for key in keys) for group in groups for record in group.records
    )
    return [(count, origin) for origin, count in counts.items()]
