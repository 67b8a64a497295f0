"""Tables and figures of runs, from ``result.json``, ``metrics.jsonl`` and ``analyses.jsonl`` alone.

matplotlib is imported only to draw figures: the table that a sweep prints does not need it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pycil_wsc.errors import UserError
from pycil_wsc.files import locked
from pycil_wsc.report.formats import to_text
from pycil_wsc.report.groups import Group, group_runs
from pycil_wsc.report.language import score_table
from pycil_wsc.report.options import DEFAULT, Options
from pycil_wsc.report.runs import memory_text
from pycil_wsc.report.stats import mean_and_error
from pycil_wsc.report.tables import Cell, Column, Row, Table
from pycil_wsc.results import Found, Record, find_runs, read_result
from pycil_wsc.results.schema import is_language_model

__all__ = ["Options", "accuracy_table", "find_runs", "mean_and_error", "read_result", "result_table", "write_report"]


def result_table(results: Iterable[dict[str, Any]]) -> str:
    """The text that a sweep prints: :func:`accuracy_table` and, for language models, the scores on each task."""
    results = list(results)
    images = [result for result in results if not is_language_model(result)]
    language = [result for result in results if is_language_model(result)]
    tables = [accuracy_table(images)] if images or not language else []
    return "\n\n".join([*tables, *([score_table(language)] if language else [])])


def accuracy_table(results: Iterable[dict[str, Any]]) -> str:
    """Average accuracy by method (rows) and memory size (columns), with standard errors over seeds, as text."""
    groups, _ = group_runs(map(Record.of, results))
    titled = len(groups) > 1
    texts = [_group_text(group, group.title if titled or group.setting.validation_split else "") for group in groups]
    return "\n\n".join(texts) or "No finished runs."


def _group_text(group: Group, title: str) -> str:
    names = group.names(group.records)
    memories = sorted({record.memory for record in names})
    lines = {
        name: [
            Cell({r.seed: r.average for r in names if (names[r], r.memory) == (name, memory)}) for memory in memories
        ]
        for name in dict.fromkeys(names.values())
    }
    seeds = sorted({len(cell.seeds) for line in lines.values() for cell in line if cell.seeds})
    over = f"{'/'.join(map(str, seeds))} seed{'s' if seeds != [1] else ''}"
    header = f"Average accuracy (CNN, top-1 %), mean ± standard error over {over}"
    of_what = "/class" if group.setting.fixed_memory else " in total"
    columns = [memory_text(memory) + of_what for memory in memories]
    rows = tuple(Row((name,), False, tuple(line)) for name, line in lines.items())
    return to_text(Table("", header, title, ("exemplars",), tuple(map(Column, columns)), rows))


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
