"""Runs of language models: their tables and their figures. Scores are shown in percent."""

import re
from dataclasses import dataclass
from functools import cached_property

from pycil_wsc.report.groups import label
from pycil_wsc.report.measures import COSTS, MEASURES, backward_transfer, overall
from pycil_wsc.report.paper import PAPER
from pycil_wsc.report.runs import Record
from pycil_wsc.report.tables import Cell, Column, Row, Table, to_text

NOT_NAMED = {
    f"llm.{name}"
    for name in (
        "method",
        "replay_ratio",
        "micro_tokens",
        "padding",
        "eval_batch",
        "attn_implementation",
        "gradient_checkpointing",
        "shard",
        "timeout_minutes",
        "checkpoint_minutes",
        "pool",
    )
}
# the paper's, after the model that was not trained
ORDER = ("zero_shot", "finetune", "replay", "slerp", "avg_online", "avg_offline", "task_arithmetic", "magmax", "wsc")


@dataclass(frozen=True, eq=False)
class LanguageRecord(Record):
    @cached_property
    def method(self):
        return self.config["llm.method"]

    @cached_property
    def memory(self):
        """Percent of each earlier task that is replayed."""
        return round(100 * self.config["llm.replay_ratio"], 6)


class LanguageGroup:
    """The runs on the same tasks of the same data with the same model."""

    not_named, memory_title = NOT_NAMED, "% of each earlier task replayed"

    def __init__(self, data, model, tasks, records):
        self.data, self.model, self.tasks = data, model, tasks
        self.records = sorted(
            records,
            key=lambda record: (
                ORDER.index(record.method) if record.method in ORDER else len(ORDER),
                record.memory,
                record.config["seed"],
            ),
        )
        self.reference = (
            PAPER["trace"]["scores"] if list(tasks) == PAPER["trace"]["tasks"] and "Llama-3.2" in model else {}
        )

    def base(self):
        return self.records

    @property
    def slug(self):
        return re.sub(r"[^\w.]+", "-", f"{self.data}-{self.model}-{len(self.tasks)}").strip("-.")[-80:]

    @property
    def title(self):
        return f"{self.data}, {len(self.tasks)} task{'s' * (len(self.tasks) != 1)}, {self.model}"


def language_groups(records):
    """One :class:`LanguageGroup` for each setting."""
    settings = {}
    for record in (LanguageRecord(record.data, record.path) for record in records):
        settings.setdefault(
            (record.config["llm.data"], record.config["llm.model"], tuple(record.data["tasks"])), []
        ).append(record)
    return [LanguageGroup(*setting, members) for setting, members in sorted(settings.items())]


def score_table(results):
    """What a sweep prints, as text."""
    return "\n\n".join(to_text(_scores(group, MEASURES)) for group in language_groups(map(Record, results)))


def language_tables(group):
    """The tables of a group: scores by either version of the metrics, scores after each task, costs."""
    return [_scores(group, MEASURES), _scores(group, MEASURES[:4], "fixed"), _stages(group), _costs(group)]


def _scores(group, measures, version="trace"):
    """The paper's big table: scores on each task after the last, and ``measures``."""
    rows = []
    for name, memory, records in _cells(group):
        paper = group.reference.get(name, {}).get(f"{memory:g}", {}) if version == "trace" else {}
        cells = [
            _cell(records, lambda result, i=i: 100 * result["scores"][version]["matrix"][-1][i], paper.get(task))
            for i, task in enumerate(group.tasks)
        ]
        cells += [
            _cell(records, value if version == "trace" else _fixed(column), paper.get(column.label))
            for column, value in measures
        ]
        rows.append(Row((name, f"{memory:g}"), False, tuple(cells)))
    title = (
        f"Scores after the last task (%), {'TRACE’s metrics' if version == 'trace' else 'metrics as they should be'}"
    )
    columns = (*map(Column, group.tasks), *(column for column, _ in measures))
    return Table(
        f"scores-{version}-{group.slug}",
        title,
        group.title,
        ("method", "memory"),
        columns,
        tuple(rows),
        _notes(group, version),
    )


def _fixed(column):
    """The measure of that name by the fixed metrics."""
    if column.label == "backward transfer":
        return lambda result: backward_transfer(result["scores"]["fixed"]["matrix"])
    key = {"average": "last_average", "new task": "new_score", "forgetting": "forgetting"}[column.label]
    return lambda result: 100 * result["scores"]["fixed"][key]


def _stages(group):
    """Scores on each task after each task, and their mean: TRACE's overall performance and backward transfer on the way."""
    rows = []
    for name, memory, records in _cells(group):
        for stage, task in enumerate(group.tasks):

            def after(value, stage=stage):
                return lambda result: value(result["scores"]["trace"]["matrix"][: stage + 1])

            cells = [
                _cell(records, after(lambda matrix, i=i: 100 * matrix[-1][i])) if i <= stage else Cell()
                for i in range(len(group.tasks))
            ]
            measures = (lambda matrix: overall(matrix)[-1], backward_transfer)
            cells += [_cell(records, after(measure)) for measure in measures]
            rows.append(Row((name, f"{memory:g}", f"{stage + 1} {task}"), False, tuple(cells)))
    columns = (*map(Column, group.tasks), Column("overall"), Column("backward transfer"))
    return Table(
        f"stages-{group.slug}",
        "Scores after each task (%), TRACE’s metrics",
        group.title,
        ("method", "memory", "after task"),
        columns,
        tuple(rows),
    )


def _costs(group):
    rows = [
        Row((name, f"{memory:g}"), False, tuple(_cell(records, value) for _, value in COSTS))
        for name, memory, records in _cells(group)
    ]
    note = "Relative VRAM usage is training minutes times models resident: as the paper counts them (methods that merge at the end keep one model per task), and as they are needed here (streamed)."
    return Table(
        f"cost-{group.slug}",
        "Cost",
        group.title,
        ("method", "memory"),
        tuple(column for column, _ in COSTS),
        tuple(rows),
        (note,),
    )


def _cells(group):
    """(name, memory, records) of every method at every memory size."""
    cells = {}
    for record, name in label(group.records, lambda record: record.method, NOT_NAMED).items():
        cells.setdefault((name, record.memory), []).append(record)
    return [(*place, records) for place, records in cells.items()]


def _cell(records, value, paper=None):
    return Cell(tuple(value(record.data) for record in records), tuple(paper) if paper else None)


def _notes(group, version):
    trivial = group.records[0].data["trivial"][version]
    guesses = "; ".join(
        f"{task}: " + ", ".join(f"{name} {100 * score:.1f}" for name, score in scores.items())
        for task, scores in trivial.items()
    )
    return (
        f"Answers that need no learning score (%): {guesses}.",
        *(f"Data: {line}" for line in group.records[0].data["warnings"]),
    )


def language_figures(group):
    """Overall performance after each task; score and relative VRAM against the memory."""
    from pycil_wsc.report.curves import curves
    from pycil_wsc.report.figures import against_memory  # matplotlib, only where something is drawn
    from pycil_wsc.report.series import Series

    series = Series(group)
    yield from curves(
        series,
        "score-tasks",
        "Average score after each task",
        lambda record: record.data["scores"]["trace"]["matrix"],
        _overall_curve,
        ("tasks learned", "average score (%)"),
        markers=True,
    )
    if any(series.memories):
        yield against_memory(
            series,
            "score-memory",
            "Average score against memory",
            "average score (%)",
            lambda record: 100 * record.data["avg_score"],
        )
        vram = "relative VRAM usage (minutes x models)"
        yield against_memory(
            series,
            "vram-memory",
            "Relative VRAM usage against memory",
            vram,
            lambda record: record.data["relative_vram_minutes"],
        )


def _overall_curve(records):
    """(tasks learned, mean over the records of the overall performance)."""
    series = [overall(record.data["scores"]["trace"]["matrix"]) for record in records]
    return range(1, len(series[0]) + 1), [sum(values) / len(values) for values in zip(*series)]
