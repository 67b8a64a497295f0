"""Tables and figures of runs, from their results and the records of their analyses alone.

Results become one table of rows (:mod:`pycil_wsc.report.measures`), in groups of runs that may be compared
(:mod:`pycil_wsc.report.groups`). Every table is a view of it (:mod:`pycil_wsc.report.views`), every figure a drawing of
it (:mod:`pycil_wsc.report.figures`). matplotlib is imported to draw figures only.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pycil_wsc.errors import UserError
from pycil_wsc.files import locked
from pycil_wsc.report.groups import Group, group_runs, memory_text
from pycil_wsc.report.language import score_table
from pycil_wsc.report.measures import named
from pycil_wsc.report.options import DEFAULT, Options
from pycil_wsc.report.tables import Column, Table, aggregate
from pycil_wsc.results import Found, LanguageResult, Record, find_runs, read_result

__all__ = ["Options", "accuracy_table", "find_runs", "read_result", "result_table", "write_report"]


def result_table(results: Iterable[dict[str, Any]]) -> str:
    """The text that a sweep prints: average accuracies of image runs and scores of language models."""
    images, language = [], []
    for record in map(Record.of, results):
        (language if isinstance(record.result, LanguageResult) else images).append(record)
    tables = [_accuracies(images)] if images or not language else []
    return "\n\n".join([*tables, *([score_table(language)] if language else [])])


def accuracy_table(results: Iterable[dict[str, Any]]) -> str:
    """Average accuracy by method (rows) and memory size (columns), with standard errors over seeds, as text."""
    return _accuracies([Record.of(result) for result in results])


def _accuracies(records: list[Record]) -> str:
    groups, _ = group_runs(records)
    titled = len(groups) > 1
    texts = [_group_text(group, group.title if titled or group.setting.validation_split else "") for group in groups]
    return "\n\n".join(texts) or "No finished runs."


def _group_text(group: Group, title: str) -> str:
    of_what = "/class" if group.setting.fixed_memory else " in total"
    names = group.names(group.records)
    rows = named(group.rows, names, "exemplars")
    rows["value"] = rows["average"]
    rows["column"] = [memory_text(memory) + of_what for memory in rows["memory"]]
    columns = [memory_text(memory) + of_what for memory in sorted(rows["memory"].unique())]
    cells = aggregate(rows, ["exemplars"], columns).assign(expands=False)
    seeds = sorted(set(cells["averaged_over"]) - {0})
    over = f"{'/'.join(map(str, seeds))} seed{'s' if seeds != [1] else ''}"
    header = f"Average accuracy (CNN, top-1 %), mean ± standard error over {over}"
    return Table("", header, title, ("exemplars",), tuple(map(Column, columns)), cells).to_text()


def write_report(*folders: str | Path, out: str | Path | None = None, options: Options = DEFAULT) -> Path:
    """Write ``index.html``, ``tables/`` and ``figures/`` for the runs below ``folders``; return the page's path.

    ``out`` is the output folder, by default ``report`` in the first of ``folders``. Unusable files are skipped, listed
    in the report and left unchanged. Raises a :class:`UserError` if ``out`` cannot be written or matplotlib is not
    installed.
    """
    return write_found(find_runs(folders), folders, Path(out) if out else Path(folders[0]) / "report", options)


def write_found(found: Found, folders: Iterable[str | Path], out: Path, options: Options = DEFAULT) -> Path:
    """:func:`write_report` for runs found by :func:`find_runs`."""
    folders = list(folders)
    try:
        from pycil_wsc.report.page import write_page
    except ModuleNotFoundError as error:
        raise UserError(
            f"the report needs {error.name}: pip install -r requirements.txt, then "
            f"python -m pycil_wsc.report {' '.join(map(str, folders))}"
        ) from None
    with locked(out):  # two sweeps that share a folder may end at the same time
        return write_page(found, folders, out, options)
