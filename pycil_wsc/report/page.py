"""Writes ``index.html``, a self-contained page of tables and figures, and their files."""

import base64
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pycil_wsc.files import write_atomically, write_json
from pycil_wsc.report.figures.plots import figures
from pycil_wsc.report.figures.style import NARROW, drawing, to_files, to_narrow_svg
from pycil_wsc.report.groups import Group
from pycil_wsc.report.rerun import experiment
from pycil_wsc.report.rows import PAPER
from pycil_wsc.report.tables.builders import tables
from pycil_wsc.report.tables.trials import write_winners
from pycil_wsc.report.texts import HTML
from pycil_wsc.results import Found

DRAWN = 8  # figures are drawn for this many groups, those with the most runs
WIDE = 600  # pixels: wider figures have the whole page's width


def write_page(groups: Sequence[Group], runs: Found, folders: Sequence[str | Path], out: Path) -> Path:
    """Write the tables, the figures and the page; returns the path of ``index.html``.

    Failed tables and figures are listed on the page. Raises a :class:`UserError` if ``out`` cannot be written.
    """
    tested = [group for group in groups if not group.setting.validation_split and not group.tasks]
    smaller = sorted(tested, key=lambda group: -len(group.records))[DRAWN:]
    sections = [_section(group, group in smaller and not group.options.all_figures, out) for group in groups]
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
        unfinished=runs.unfinished,
        problems=runs.problems,
        origins=origins,
        source=PAPER["source"] if any(group.reference for group in groups) else "",
    )
    write_atomically(out / "index.html", page)
    return out / "index.html"


def _section(group: Group, undrawn: bool, out: Path) -> dict[str, Any]:
    """What the page shows of a group. Writes its tables, configuration and, unless ``undrawn``, figures."""
    section: dict[str, Any] = {"group": group, "tables": list(tables(group)), "command": "", "undrawn": undrawn}
    for table in section["tables"]:
        _write(out / "tables", table.slug, table.files())
    shown: list[dict[str, Any]] = []
    section["figures"] = shown
    with drawing():
        for plot in () if undrawn else figures(group):
            with group.attempt(plot.title):
                files = to_files(plot.figure)
                slug = f"{plot.slug}-{group.slug}"
                width = round(96 * plot.figure.get_figwidth())
                _write(out / "figures", slug, files)
                narrow = _address(to_narrow_svg(plot.figure)) if width > 96 * NARROW else ""
                image = _address(files["svg"])
                size = {"width": width, "wide": width > WIDE}
                shown.append({"slug": slug, "plot": plot, "image": image, "narrow": narrow, **size})
    if group.setting.validation_split:
        write_winners(group, out)
    if not group.tasks:
        path = out / "configs" / f"{group.slug}.json"
        content = experiment(group.records)
        write_json(path, content)
        section["command"] = f"python main.py --config {shlex.quote(str(path))}"
        section["listing"] = json.dumps(content, indent=2, ensure_ascii=False).split("\n")
    return section


def _write(folder: Path, slug: str, files: Mapping[str, str | bytes]) -> None:
    for suffix, content in files.items():
        write_atomically(folder / f"{slug}.{suffix}", content)


def _address(svg: bytes) -> str:
    """An image as the address of itself."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
