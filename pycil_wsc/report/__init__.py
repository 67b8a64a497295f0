"""Tables and figures of runs, from their results and the records of their analyses alone.

A number goes from a result to the page in this order:

1. :mod:`pycil_wsc.results` reads the records. :mod:`~pycil_wsc.report.comparable` divides them into those that may be
   compared, and :mod:`~pycil_wsc.report.duplicates` counts each run once. :mod:`~pycil_wsc.report.rows` makes a table
   of them, a row per run, and says where in a result each measure is (``measures.json``).
2. A group of :mod:`~pycil_wsc.report.groups` has the rows of comparable runs, and names them by the keys that
   distinguish them (:mod:`~pycil_wsc.report.texts`). :mod:`~pycil_wsc.report.studies` and ``studies.json`` say which
   runs belong to the paper's tables.
3. ``tables/`` has a function for each table in ``builders``; a ``table`` averages over the seeds, and
   :mod:`~pycil_wsc.report.stats` decides what is ahead. ``trials`` are those of a search for hyperparameters.
4. ``figures/`` has the same rows as ``series``, and draws them as ``plots`` and ``heat_maps`` in one ``style``;
   ``curves`` are what runs recorded in the course of their training.
5. :mod:`~pycil_wsc.report.page` writes the page, beside it the configuration that repeats its runs
   (:mod:`~pycil_wsc.report.rerun`).

matplotlib is imported to draw figures only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from pycil_wsc.errors import UserError
from pycil_wsc.files import locked
from pycil_wsc.report.groups import DEFAULT, Options, group_runs
from pycil_wsc.report.tables.builders import check_baseline, console_text
from pycil_wsc.results import Found, Record, find_runs, read_result

__all__ = ["Options", "find_runs", "read_result", "result_table", "write_report"]


def result_table(results: Iterable[Mapping[str, object]]) -> str:
    """The text that a sweep prints.

    Average accuracy by method (rows) and memory size (columns), with standard errors over seeds, and scores of language
    models. The methods are in the order of the ``results``, which a sweep has from its configuration.
    """
    records = [Record.of(result) for result in results]
    groups, _ = group_runs(records)
    methods = list(dict.fromkeys(record.method for record in records))
    several = sum(not group.tasks for group in groups) > 1
    texts = [console_text(group, methods, several or bool(group.setting.validation_split)) for group in groups]
    return "\n\n".join(texts) or "No finished runs."


def write_report(
    *folders: str | Path, out: str | Path | None = None, options: Options = DEFAULT, runs: Found | None = None
) -> Path:
    """Write ``index.html``, ``tables/`` and ``figures/`` for the runs below ``folders``; return the page's path.

    ``out`` is the output folder, by default ``report`` in the first of ``folders``. ``runs``: what :func:`find_runs`
    found in them, if that is known. Unusable files are skipped, listed in the report and left unchanged. Raises a
    :class:`UserError` if ``out`` cannot be written, matplotlib is not installed or no row is the chosen baseline.
    """
    out = Path(out) if out else Path(folders[0]) / "report"
    runs = runs or find_runs(folders)
    try:
        from pycil_wsc.report.page import write_page
    except ModuleNotFoundError as error:
        raise UserError(
            f"the report needs {error.name}: pip install -r requirements.txt, then "
            f"python -m pycil_wsc.report {' '.join(map(str, folders))}"
        ) from None
    groups, duplicates = group_runs([*runs.records, *runs.language], options)
    check_baseline(groups, options)
    runs = replace(runs, problems=[*runs.problems, *duplicates])
    with locked(out):  # two sweeps that share a folder may end at the same time
        return write_page(groups, runs, folders, out)
