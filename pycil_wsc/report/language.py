"""Language models: a group of comparable runs, and its tables. Scores are in percent."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from pycil_wsc.report.groups import distinct_names, number_slugs
from pycil_wsc.report.measures import LANGUAGE_COSTS, USE, Measure, backward_transfer, rows_of, scores
from pycil_wsc.report.names import clean, method_name
from pycil_wsc.report.options import DEFAULT, Options
from pycil_wsc.report.paper import PAPER
from pycil_wsc.report.tables import Column, Failed, Table, aggregate, melted
from pycil_wsc.report.views import build_tables, paper_note, seeds_note
from pycil_wsc.results import Problem, Record
from pycil_wsc.results.duplicates import Variant, distinct

# the paper's order, after the untrained model
ORDER = ("zero_shot", "finetune", "replay", "slerp", "avg_online", "avg_offline", "task_arithmetic", "magmax", "wsc")


class LanguageGroup:
    """Runs with the same data, tasks and model."""

    memory_title = "% of each earlier task replayed"

    def __init__(
        self, records: Iterable[Record], variant_of: Mapping[Record, Variant], options: Options = DEFAULT
    ) -> None:
        self.variant_of, self.options, self.number = variant_of, options, 1
        self.records = sorted(records, key=lambda record: (_rank(record.method), record.memory, record.seed))
        first = self.records[0]
        self.data, self.model = clean(first.config["llm.data"]), clean(first.config["llm.model"])
        self.tasks = [clean(task) for task in first.data["tasks"]]
        in_paper = options.paper and first.data["tasks"] == PAPER["trace"]["tasks"] and "Llama-3.2" in self.model
        self.reference = PAPER["trace"]["scores"] if in_paper else {}
        names = self.names(self.records)
        rows = rows_of(self.records, lambda method: False)
        self.rows = rows.assign(method=rows["record"].map(names), memory_text=[f"{m:g}" for m in rows["memory"]])

    def base(self) -> list[Record]:
        return self.records

    def names(self, records: Iterable[Record]) -> dict[Record, str]:
        return distinct_names(
            records, lambda record: clean(record.config.get("label") or record.method), self.variant_of
        )

    def shown(self, name: str) -> str:
        return method_name(name, self.options.labels)

    @property
    def slug(self) -> str:
        name = f"{self.data}-{self.model}-{len(self.tasks)}"
        name = re.sub(r"[^\w.]+", "-", name, flags=re.ASCII).strip("-.")[-80:]
        return name + (f"-{self.number}" if self.number > 1 else "")

    @property
    def title(self) -> str:
        data, model = (method_name(name, self.options.labels) for name in (self.data, self.model))
        return f"{data}, {len(self.tasks)} task{'s' * (len(self.tasks) != 1)}, {model}"


def _rank(method: str) -> int:
    return ORDER.index(method) if method in ORDER else len(ORDER)


def language_groups(records: Iterable[Record], options: Options = DEFAULT) -> tuple[list[LanguageGroup], list[Problem]]:
    """One :class:`LanguageGroup` per setting, and the duplicate results that were left out."""
    variants: dict[Record, Variant] = {}
    settings: dict[Any, list[Record]] = defaultdict(list)
    for record in records:
        variants[record] = Variant(record.identity.own)
        settings[record.config["llm.data"], record.config["llm.model"], tuple(record.data["tasks"])].append(record)
    groups, problems = [], []
    for _, found in sorted(settings.items()):
        kept, duplicates = distinct({record: variants[record] for record in found})
        groups.append(LanguageGroup(kept, variants, options))
        problems += duplicates
    number_slugs(groups)
    return groups, problems


def score_table(records: Iterable[Record]) -> str:
    """The score table that a sweep prints, with the note on ±."""
    tables = [after_last_task(group) for group in language_groups(records)[0]]
    return "\n\n".join("\n".join([table.to_text(), *seeds_note(table.cells, "standard error")]) for table in tables)


def language_tables(group: LanguageGroup) -> Iterator[Table | Failed]:
    """Tables of scores by both versions of the metrics, of scores after each task, and of costs."""
    fixed = partial(after_last_task, version="fixed")
    return build_tables(group, [after_last_task, fixed, after_each_task, costs])


def after_last_task(group: LanguageGroup, version: str = "trace") -> Table:
    """The paper's main table: scores on each task after the last one, and their summaries."""
    summaries = {**scores(version), **(USE if version == "trace" else {})}
    reads: dict[str, Measure] = {column.label: read for column, read in summaries.items()}
    lines = []
    for row, record in zip(group.rows.to_dict("records"), group.rows["record"]):
        last = record.data["scores"][version]["matrix"][-1]
        row |= {task: 100 * score for task, score in zip(group.tasks, last)}
        lines.append(row | {name: read(record.data) for name, read in reads.items()})
    columns = (*map(Column, group.tasks), *summaries)
    title = f"Scores after the last task (%), {'TRACE’s metrics' if version == 'trace' else 'fixed metrics'}"
    of_paper = group.reference if version == "trace" else {}
    notes = _data_notes(group, version)
    return _table(group, f"scores-{version}", title, pd.DataFrame(lines), columns, notes, of_paper)


def after_each_task(group: LanguageGroup) -> Table:
    """Scores on each task after each task, and their mean (TRACE's overall performance)."""
    lines = []
    for row, record in zip(group.rows.to_dict("records"), group.rows["record"]):
        matrix = record.data["scores"]["trace"]["matrix"]
        for stage, task in enumerate(group.tasks):
            line = row | {"after task": f"{stage + 1} {task}", "stage": stage}
            line |= {name: 100 * score for name, score in zip(group.tasks, matrix[stage])}
            line |= {"overall": record.curve[stage], "backward transfer": backward_transfer(matrix[: stage + 1])}
            lines.append(line)
    rows = pd.DataFrame(lines)
    place = {pair: number for number, pair in enumerate(zip(group.rows["method"], group.rows["memory_text"]))}
    rows["place"] = [place[pair] for pair in zip(rows["method"], rows["memory_text"])]
    rows = rows.sort_values(["place", "stage"], kind="stable")  # all stages of a method and memory follow each other
    columns = (*map(Column, group.tasks), Column("overall"), Column("backward transfer"))
    return _table(group, "stages", "Scores after each task (%), TRACE’s metrics", rows, columns)


def costs(group: LanguageGroup) -> Table:
    note = (
        "Relative VRAM usage is training minutes times models resident: as the paper counts them (methods that merge "
        "at the end keep one model per task), and as they are needed here (streamed)."
    )
    return _table(group, "cost", "Cost", group.rows, tuple(LANGUAGE_COSTS), [note])


def _table(
    group: LanguageGroup,
    slug: str,
    title: str,
    rows: pd.DataFrame,
    columns: Sequence[Column],
    notes: Sequence[str] = (),
    of_paper: Mapping[str, Any] = {},
) -> Table:
    """A table of a group, of columns of ``rows``; ``of_paper`` has the paper's numbers by method and memory."""
    rows = rows.assign(share=rows["memory"], memory=rows["memory_text"])
    labels = ("method", "memory", *(["after task"] if "after task" in rows else []))
    names = [column.label for column in columns]
    cells = aggregate(melted(rows, names), [*labels, "expands"], names)
    for i, (name, memory, column) in enumerate(zip(cells["method"], cells["memory"], cells["column"])):
        mean, error = of_paper.get(name, {}).get(memory, {}).get(column, (None, None))
        cells.loc[i, ["paper_mean", "paper_standard_error"]] = [np.nan if v is None else v for v in (mean, error)]
    spread = group.options
    return Table(
        f"{slug}-{group.slug}",
        title,
        group.title,
        labels,
        tuple(columns),
        cells,
        (*seeds_note(cells, spread.spread_name), *paper_note(cells), *notes),
        spread=spread.spread,
        shown=group.shown,
    )


def _data_notes(group: LanguageGroup, version: str) -> list[str]:
    data = group.records[0].data
    guesses = "; ".join(
        f"{task}: " + ", ".join(f"{name} {100 * score:.1f}" for name, score in scores.items())
        for task, scores in (data.get("trivial") or {}).get(version, {}).items()
    )
    notes = [f"Scores of trivial answers, without a model (%): {guesses}."] if guesses else []
    return [*notes, *(f"Data: {line}" for line in data.get("warnings") or ())]
