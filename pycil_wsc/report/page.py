"""Writes ``index.html``, a self-contained page of tables and figures, and their files."""

import base64
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pycil_wsc.files import write_atomically, write_json
from pycil_wsc.report.figures import figures
from pycil_wsc.report.groups import Group
from pycil_wsc.report.rows import PAPER
from pycil_wsc.report.series import Plot
from pycil_wsc.report.style import drawing, to_files
from pycil_wsc.report.texts import HTML
from pycil_wsc.report.trials import write_winners
from pycil_wsc.report.views import tables
from pycil_wsc.results import Found
from pycil_wsc.results.repetition import experiment

DRAWN = 4  # figures are drawn for this many groups of a setting, those with the most runs
LARGE = 1000  # runs; a larger report has figures of accuracies only, for one group in each of DRAWN settings


def write_page(groups: Sequence[Group], found: Found, folders: Sequence[str | Path], out: Path) -> Path:
    """Write the tables, the figures and the page; returns the path of ``index.html``.

    Failed tables and figures are listed on the page. Raises a :class:`UserError` if ``out`` cannot be written.
    """
    sections = [_section(group, groups, out) for group in groups]
    records = list(dict.fromkeys(record for group in groups for record in group.records))  # some are in two groups
    keys = ("device", "precision", "torch", "commit")
    origins = Counter(tuple(str(record.data.get(key) or "unknown") for key in keys) for record in records)
    page = HTML.get_template("page.html.j2").render(
        title="Report: " + ", ".join(Path(folder).resolve().name or str(folder) for folder in folders),
        folders=folders,
        sections=sections,
        runs=len(records),
        methods=len({record.method for record in records}),
        failed=[failure for group in groups for failure in group.failed],
        unfinished=found.unfinished,
        problems=found.problems,
        origins=origins,
        source=PAPER["source"] if any(group.reference for group in groups) else "",
    )
    write_atomically(out / "index.html", page)
    return out / "index.html"


def _section(group: Group, groups: Sequence[Group], out: Path) -> dict[str, Any]:
    """What the page shows of one group. Writes the files of its tables, figures and configuration."""
    section: dict[str, Any] = {"group": group, "tables": list(tables(group)), "command": ""}
    for table in section["tables"]:
        _write(out / "tables", table.slug, table.files())
    plots, section["undrawn"] = _figures_of(group, groups)
    section["figures"] = shown = []
    with drawing():
        for plot in plots:
            with group.attempt(plot.title):
                files = to_files(plot.figure)
                slug, width = f"{plot.slug}-{group.slug}", round(96 * plot.figure.get_figwidth())
                _write(out / "figures", slug, files)
                image = "data:image/svg+xml;base64," + base64.b64encode(files["svg"]).decode()
                shown.append({"slug": slug, "plot": plot, "image": image, "width": width})
    if group.setting.validation_split:
        write_winners(group, out)
    if not group.tasks:
        path, content = out / "configs" / f"{group.slug}.json", experiment(group.records)
        write_json(path, content)
        section["command"] = f"python main.py --config {shlex.quote(str(path))}"
        section["listing"] = json.dumps(content, indent=2, ensure_ascii=False).split("\n")
    return section


def _figures_of(group: Group, groups: Sequence[Group]) -> tuple[Iterable[Plot], str]:
    """The figures of a group, and a note on those that are not drawn.

    If a setting has many groups, only those with the most runs have figures. In a report of very many runs, only the
    largest group of a setting has figures, and only those of accuracies. Trials have none.
    """
    if group.options.all_figures or group.setting.validation_split or group.tasks:
        return figures(group), ""
    tested = [other for other in groups if not other.setting.validation_split and not other.tasks]
    ranked = sorted(tested, key=lambda other: -len(other.records))
    siblings = [other for other in ranked if other.setting == group.setting]
    large = sum(len(other.records) for other in ranked) > LARGE
    settings = list(dict.fromkeys(other.setting for other in ranked))
    if large and group.setting not in settings[:DRAWN] or group not in siblings[: 1 if large else DRAWN]:
        return (), "Not drawn: the figures of this section, because other sections have more runs."
    note = "Not drawn, because the report is large: time, forgetting, loss, cost, analyses, studies and matrices."
    return figures(group, brief=large), note if large else ""


def _write(folder: Path, slug: str, files: Mapping[str, str | bytes]) -> None:
    for suffix, content in files.items():
        write_atomically(folder / f"{slug}.{suffix}", content)
