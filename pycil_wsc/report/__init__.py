"""Runs -> tables and figures. Reads ``result.json`` and ``metrics.jsonl`` and nothing else.

Drawing needs matplotlib and is imported only where something is drawn: the table that a sweep prints needs neither.
"""

from pathlib import Path

from pycil_wsc.errors import UserError
from pycil_wsc.files import locked
from pycil_wsc.report.groups import group_runs, label
from pycil_wsc.report.language import score_table
from pycil_wsc.report.measures import of_a_language_model
from pycil_wsc.report.runs import Record, find_runs, read_result
from pycil_wsc.report.tables import Cell, Column, Row, Table, mean_and_error, to_text

__all__ = ["accuracy_table", "find_runs", "mean_and_error", "read_result", "result_table", "write_report"]


def result_table(results):
    """What a sweep prints of its runs: :func:`accuracy_table`, and of language models the scores on each task."""
    results = list(results)
    images, language = ([result for result in results if of_a_language_model(result) is kind] for kind in (False, True))
    return "\n\n".join(
        [accuracy_table(images)] * bool(images or not language) + [score_table(language)] * bool(language)
    )


def accuracy_table(results):
    """Average accuracy of each method (rows) at each memory size (columns), as text: mean and standard error over seeds."""
    groups, _ = group_runs([Record(result) for result in results])
    return (
        "\n\n".join(
            _group_text(group, group.title if len(groups) > 1 or group.setting.validation_split else "")
            for group in groups
        )
        or "No run has ended."
    )


def _group_text(group, title):
    names = label(group.records, lambda record: record.method)
    memories = sorted({record.memory for record in names})
    values = {
        name: [tuple(r.data["avg_acc"] for r in names if (names[r], r.memory) == (name, memory)) for memory in memories]
        for name in dict.fromkeys(names.values())
    }
    seeds = sorted({len(cell) for row in values.values() for cell in row if cell})
    header = f"Average accuracy (CNN, top-1 %), mean ± standard error over {'/'.join(map(str, seeds))} seed{'s' if seeds != [1] else ''}"
    columns = tuple(
        Column(f"{memory}/class" if group.setting.fixed_memory else f"{memory} in all") for memory in memories
    )
    rows = tuple(Row((name,), False, tuple(map(Cell, row))) for name, row in values.items())
    return to_text(Table("", header, title, ("exemplars",), columns, rows))


def write_report(*folders, out=None):
    """Write ``index.html``, ``tables/`` and ``figures/`` of the runs below ``folders``; returns the path of ``index.html``.

    ``out``: where to; else ``report`` in the folder given. Data that cannot be used are named in the report, skipped, and left as they are.
    """
    return write_found(find_runs(folders), folders, Path(out) if out else Path(folders[0]) / "report")


def write_found(found, folders, out):
    """:func:`write_report` of what :func:`find_runs` has found."""
    try:
        from pycil_wsc.report.page import write_page
    except ModuleNotFoundError as error:
        raise UserError(
            f"the report needs {error.name}: pip install -r requirements.txt, then python -m pycil_wsc.report {' '.join(map(str, folders))}"
        ) from None
    with locked(out):  # two sweeps that share a folder may end at the same time
        return write_page(found, folders, out)
