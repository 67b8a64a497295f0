"""Tables and figures of language models' runs. Scores are in percent."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pycil_wsc.report.formats import to_text
from pycil_wsc.report.grids import paper_note, seeds_note
from pycil_wsc.report.groups import distinct_names, number_slugs
from pycil_wsc.report.listings import build_tables
from pycil_wsc.report.names import clean, method_name
from pycil_wsc.report.options import DEFAULT, Options
from pycil_wsc.report.paper import PAPER
from pycil_wsc.report.runs import Problem, Record
from pycil_wsc.report.tables import Cell, Column, Failed, Measure, Row, Table, measured
from pycil_wsc.results.duplicates import Variant, distinct

SCORE_MEASURES: Mapping[Column, Measure] = {
    Column("average"): lambda result: 100 * result["avg_score"],
    Column("new task"): lambda result: 100 * result["scores"]["trace"]["new_score"],
    Column("forgetting"): lambda result: 100 * result["scores"]["trace"]["forgetting"],
    Column("backward transfer"): lambda result: backward_transfer(result["scores"]["trace"]["matrix"]),
    Column("minutes", 1): lambda result: result["train_minutes"],
    Column("relative VRAM", 1): lambda result: result["relative_vram_minutes"],
}
FIXED: Mapping[Column, Measure] = {  # the same measures by the fixed metrics
    Column("average"): lambda result: 100 * result["scores"]["fixed"]["last_average"],
    Column("new task"): lambda result: 100 * result["scores"]["fixed"]["new_score"],
    Column("forgetting"): lambda result: 100 * result["scores"]["fixed"]["forgetting"],
    Column("backward transfer"): lambda result: backward_transfer(result["scores"]["fixed"]["matrix"]),
}
COSTS: Mapping[Column, Measure] = {
    Column("models resident", 2, True): lambda result: result["models_resident"],
    Column("streamed", 2, True): lambda result: result["models_resident_streamed"],
    Column("relative VRAM, streamed", 1): lambda result: result["relative_vram_minutes_streamed"],
    Column("peak memory (MiB)", 0): lambda result: result["peak_memory_bytes"] / 2**20,
    Column("tokens trained", 0, True): lambda result: result["tokens_trained"],
    Column("tokens per second", 0): lambda result: result["tokens_per_second"],
    Column("padding (%)", 1): lambda result: 100 * result["padding"],
}
NAMED_FIRST = "llm.lora_rank"  # by which runs are named, if they differ in it; the rate usually differs then, too
# the paper's order, after the untrained model
ORDER = ("zero_shot", "finetune", "replay", "slerp", "avg_online", "avg_offline", "task_arithmetic", "magmax", "wsc")


class LanguageGroup:
    """Runs with the same data, tasks and model."""

    memory_title = "% of each earlier task replayed"

    def __init__(
        self,
        data: str,
        model: str,
        tasks: tuple[str, ...],
        records: Iterable[Record],
        variant_of: Mapping[Record, Variant],
        options: Options = DEFAULT,
    ) -> None:
        self.data, self.model, self.tasks = clean(data), clean(model), [clean(task) for task in tasks]
        self.variant_of, self.options, self.number = variant_of, options, 1
        self.records = sorted(records, key=lambda record: (_rank(record.method), record.memory, record.seed))
        in_paper = options.paper and list(tasks) == PAPER["trace"]["tasks"] and "Llama-3.2" in model
        self.reference = PAPER["trace"]["scores"] if in_paper else {}

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


def overall(matrix: Sequence[Sequence[float]]) -> list[float]:
    """Overall performance after each task, in percent: the mean score on the tasks so far.

    ``matrix``: scores in 0..1, a row per trained task.
    """
    return [100 * sum(row) / len(row) for row in matrix]


def backward_transfer(matrix: Sequence[Sequence[float]]) -> float:
    """The mean over all tasks of (final score - score when learned), in percentage points; 0 for the newest task."""
    return sum(100 * (last - row[-1]) for last, row in zip(matrix[-1], matrix)) / len(matrix)


def _rank(method: str) -> int:
    return ORDER.index(method) if method in ORDER else len(ORDER)


def language_groups(records: Iterable[Record], options: Options = DEFAULT) -> tuple[list[LanguageGroup], list[Problem]]:
    """One :class:`LanguageGroup` per setting, and the duplicate results that were left out."""
    variants: dict[Record, Variant] = {}
    for record in records:
        values = sorted(record.identity.own.items(), key=lambda item: item[0] != NAMED_FIRST)
        variants[record] = Variant(values)
    settings: dict[Any, list[Record]] = defaultdict(list)
    for record in variants:
        settings[record.config["llm.data"], record.config["llm.model"], tuple(record.data["tasks"])].append(record)
    groups, problems = [], []
    for (data, model, tasks), found in sorted(settings.items()):
        kept, duplicates = distinct({record: variants[record] for record in found})
        groups.append(LanguageGroup(data, model, tasks, kept, variants, options))
        problems += duplicates
    number_slugs(groups)
    return groups, problems


def score_table(results: Iterable[dict[str, Any]]) -> str:
    """The score table that a sweep prints, with the note on ±."""
    tables = [_scores(group) for group in language_groups(map(Record.of, results))[0]]
    return "\n\n".join("\n".join([to_text(table), *seeds_note(table.rows, "standard error")]) for table in tables)


def language_tables(group: LanguageGroup) -> Iterator[Table | Failed]:
    """Tables of scores by both versions of the metrics, of scores after each task, and of costs."""
    return build_tables(group, [_scores, partial(_scores, measures=FIXED, version="fixed"), _stages, _costs])


def _scores(group: LanguageGroup, measures: Mapping[Column, Measure] = SCORE_MEASURES, version: str = "trace") -> Table:
    """The paper's main table: scores on each task after the last one, and ``measures``."""
    rows = []
    for (name, memory), records in _cells(group).items():
        paper = group.reference.get(name, {}).get(f"{memory:g}", {}) if version == "trace" else {}
        cells = [
            _cell(records, lambda result, i=i: 100 * result["scores"][version]["matrix"][-1][i], paper.get(task))
            for i, task in enumerate(group.tasks)
        ]
        cells += [_cell(records, read, paper.get(column.label)) for column, read in measures.items()]
        rows.append(Row((name, f"{memory:g}"), False, tuple(cells)))
    return Table(
        f"scores-{version}-{group.slug}",
        f"Scores after the last task (%), {'TRACE’s metrics' if version == 'trace' else 'fixed metrics'}",
        group.title,
        ("method", "memory"),
        (*map(Column, group.tasks), *measures),
        tuple(rows),
        (*_spread_notes(group, rows), *_data_notes(group, version)),
        spread=group.options.spread,
        shown=group.shown,
    )


def _stages(group: LanguageGroup) -> Table:
    """Scores on each task after each task, and their mean (TRACE's overall performance)."""
    rows = []
    for (name, memory), records in _cells(group).items():
        for stage, task in enumerate(group.tasks):

            def after(value: Callable[[Any], float], stage: int = stage) -> Measure:
                return lambda result: value(result["scores"]["trace"]["matrix"][: stage + 1])

            cells = [
                _cell(records, after(lambda matrix, i=i: 100 * matrix[-1][i])) if i <= stage else Cell()
                for i in range(len(group.tasks))
            ]
            cells += [_cell(records, after(read)) for read in (lambda matrix: overall(matrix)[-1], backward_transfer)]
            rows.append(Row((name, f"{memory:g}", f"{stage + 1} {task}"), False, tuple(cells)))
    return Table(
        f"stages-{group.slug}",
        "Scores after each task (%), TRACE’s metrics",
        group.title,
        ("method", "memory", "after task"),
        (*map(Column, group.tasks), Column("overall"), Column("backward transfer")),
        tuple(rows),
        _spread_notes(group, rows),
        spread=group.options.spread,
        shown=group.shown,
    )


def _costs(group: LanguageGroup) -> Table:
    rows = [
        Row((name, f"{memory:g}"), False, tuple(_cell(records, read) for read in COSTS.values()))
        for (name, memory), records in _cells(group).items()
    ]
    note = (
        "Relative VRAM usage is training minutes times models resident: as the paper counts them (methods that merge "
        "at the end keep one model per task), and as they are needed here (streamed)."
    )
    return Table(
        f"cost-{group.slug}",
        "Cost",
        group.title,
        ("method", "memory"),
        tuple(COSTS),
        tuple(rows),
        (*_spread_notes(group, rows), note),
        spread=group.options.spread,
        shown=group.shown,
    )


def _cells(group: LanguageGroup) -> dict[tuple[str, float], list[Record]]:
    """The runs of every method at every memory size."""
    cells: dict[tuple[str, float], list[Record]] = defaultdict(list)
    for record, name in group.names(group.records).items():
        cells[name, record.memory].append(record)
    return cells


def _cell(records: list[Record], read: Measure, paper: list[float] | None = None) -> Cell:
    return Cell(measured(read, records), (paper[0], paper[1]) if paper else None)


def _spread_notes(group: LanguageGroup, rows: Sequence[Row]) -> tuple[str, ...]:
    cells = [cell for row in rows for cell in row.cells]
    return (*seeds_note(rows, group.options.spread_name), *paper_note(cells))


def _data_notes(group: LanguageGroup, version: str) -> tuple[str, ...]:
    data = group.records[0].data
    guesses = "; ".join(
        f"{task}: " + ", ".join(f"{name} {100 * score:.1f}" for name, score in scores.items())
        for task, scores in data.get("trivial", {}).get(version, {}).items()
    )
    notes = [f"Scores of trivial answers, without a model (%): {guesses}."] if guesses else []
    return (*notes, *(f"Data: {line}" for line in data.get("warnings", ())))


def language_figures(group: LanguageGroup) -> Iterator[Any]:
    """Scores after each task, and score and relative VRAM against the memory."""
    from pycil_wsc.report import figures  # imports matplotlib

    yield from figures.draw_plots(group, [figures.score_curves, figures.scores_over_memory])
