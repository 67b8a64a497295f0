"""The tables of a group of runs, as views of its table of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from pycil_wsc.report import notes
from pycil_wsc.report.groups import Group
from pycil_wsc.report.names import changed_keys, clean, distinguishing_keys
from pycil_wsc.report.paper import PAPER, same_schedule
from pycil_wsc.report.rows import (
    ACCURACIES,
    COSTS,
    LANGUAGE_COSTS,
    SPENT,
    TRAINING,
    USE,
    Column,
    memory_text,
    named,
    rows_of,
    scores,
    scores_after,
)
from pycil_wsc.report.stats import best, is_above, is_ahead
from pycil_wsc.report.studies import ACCURACY, STUDIES, Study
from pycil_wsc.report.tables import Failed, Table, aggregate, seeds_of
from pycil_wsc.report.tuning import tuning
from pycil_wsc.results import ALL, Record


def tables(group: Group) -> Iterator[Table | Failed]:
    """Every :class:`Table` for which the group has runs, or a :class:`Failed` if one fails."""
    studies = [partial(accuracy, study=study) for study in STUDIES]
    builders: list[Callable[[Group], Table | None]] = [studies[0], differences, *studies[1:], measures, cost]
    if group.tasks:
        builders = [after_last_task, partial(after_last_task, version="fixed"), after_each_task, language_cost]
    elif group.setting.validation_split:
        builders = [tuning, measures, cost]
    for build in builders:
        try:
            table = build(group)
        except Exception as error:
            yield Failed(f"a table of {group.title}", f"{type(error).__name__}: {error}")
        else:
            yield from [table] if table else []


def console_text(group: Group, titled: bool) -> str:
    """The average accuracies of all image runs of the group, or the scores of its language models, as text."""
    if group.tasks:
        table = after_last_task(group)
        return "\n".join([table.to_text(table.full_title), *notes.of_seeds(table.cells, group.options)])
    unit = "/class" if group.setting.fixed_memory else " in total"
    rows = _by_memory(named(group.rows, group.names(group.records), "exemplars"), unit=unit)
    columns = [Column(memory_text(memory) + unit) for memory in sorted(rows["memory"].unique())]
    cells = aggregate(rows, ["exemplars", "expands"], columns).assign(expands=False)
    seeds = sorted(set(cells["averaged_over"]) - {0})
    over = f"{'/'.join(map(str, seeds))} seed{'s' if seeds != [1] else ''}"
    title = f"Average accuracy (CNN, top-1 %), mean ± standard error over {over}"
    table = Table(group, "", title, ["exemplars"], columns, cells)
    return table.to_text(table.full_title if titled else title)


# ---- average accuracies by row and memory size -----------------------------------------------------------------------


def accuracy(group: Group, study: Study) -> Table | None:
    """Average accuracy, with the paper's numbers; None if no run belongs to the study."""
    rows = _rows_of_study(group, study)
    own = rows.loc[~rows["kind"].isin(study.plain)]
    if own.empty:
        return None
    memories = [Column(memory_text(memory)) for memory in sorted(own["memory"].unique())]
    columns = [*memories, *study.costs]
    values = pd.concat([_by_memory(rows), _melted(rows, study.costs)])
    cells = aggregate(values, ["kind", study.corner, "expands"], columns)
    comparable = _comparable(group, study, rows)
    _add_paper(cells, rows, group, study)
    accuracies = cells["column"].isin([column.label for column in memories])
    _mark_best(cells, accuracies & ~cells["expands"].astype(bool) & cells[study.corner].isin(comparable))
    of_memories = cells.loc[accuracies]
    below = [
        *notes.of_seeds(of_memories, group.options),
        *notes.of_bold(of_memories, study.corner, comparable, group.shown),
        *notes.of_paper(of_memories, rows["record"], group.shown),
        *study.notes,
    ]
    missing = notes.of_missing(of_memories, study.corner, group.shown if study.corner == "method" else str)
    heads, beside = [study.corner], len(study.costs)
    return Table(group, study.slug, study.title, heads, columns, cells, below, missing, group.memory_title, beside)


def _rows_of_study(group: Group, study: Study) -> pd.DataFrame:
    """The lines of the runs that belong to the study, with their ``kind`` of row and its name, in the study's order."""
    kinds: dict[Record, str] = {}
    for record in group.base() if study.studied is None else group.records:
        kind = study.row(record)
        if kind is not None:
            kinds[record] = kind

    def base(record: Record) -> str:
        return group.name_of(record) if kinds[record] == record.method else kinds[record]

    rows = named(group.rows, group.names(kinds, base, study.studied or ()), study.corner)
    rows["kind"] = rows["record"].map(kinds)
    place = {kind: number for number, kind in enumerate(study.order)}
    return rows.sort_values("kind", key=lambda kinds: kinds.map(place).fillna(len(place)), kind="stable")


def _by_memory(rows: pd.DataFrame, unit: str = "") -> pd.DataFrame:
    """A line per run, whose column is the size of its memory and whose value is the average accuracy."""
    return rows.assign(column=rows["memory"].map(memory_text) + unit, value=rows["average"])


def _melted(rows: pd.DataFrame, columns: Iterable[Column]) -> pd.DataFrame:
    """A line per run and measure."""
    labels = [column.label for column in columns]
    others = [name for name in rows.columns if name not in labels]
    return rows.melt(id_vars=others, value_vars=labels, var_name="column", value_name="value")


def _comparable(group: Group, study: Study, rows: pd.DataFrame) -> set[str]:
    """The rows that differ only in the subject of the table.

    If a study's runs were trained with different settings, those of the most frequent setting.
    """
    first = rows.drop_duplicates(study.corner).set_index(study.corner)["record"].to_dict()
    if group.variants_of:
        keys = distinguishing_keys([group.variant_of[record] for record in first.values()])
        return set(first) if len(keys) <= 1 and len(group.variants_of) == 1 else set()
    studied = study.studied or frozenset()
    if not any(key.startswith("wsc.") for key in studied):
        return set(first)
    own = {name: record for name, record in first.items() if record.method == "wsc"}
    rest = {name: group.rest(record, (*studied, *study.options)) for name, record in own.items()}
    most, _ = Counter(rest.values()).most_common(1)[0] if rest else (None, 0)
    return {name for name in first if name not in rest or rest[name] == most}


def _add_paper(cells: pd.DataFrame, rows: pd.DataFrame, group: Group, study: Study) -> None:
    """Add the paper's numbers to the cells whose runs differ from the paper's in nothing but the study's subject.

    Ours are compared with them if they are of the paper's schedule.
    """
    unlike: set[tuple[str, str]] = set()
    rescheduled: set[tuple[str, str]] = set()
    for record, name, memory in zip(rows["record"], rows[study.corner], rows["memory"]):
        if not changed_keys(record) <= (study.studied or frozenset()):
            unlike.add((name, memory_text(memory)))
        if not same_schedule(record):
            rescheduled.add((name, memory_text(memory)))
    reference = group.reference.get(study.slug, {})
    for i, (kind, name, column) in enumerate(zip(cells["kind"], cells[study.corner], cells["column"])):
        theirs = reference.get(kind, {}).get(column.replace(",", ""))
        if not theirs or (name, column) in unlike:
            continue
        published = theirs["mean"], theirs.get("se", np.nan), PAPER["seeds"]
        cells.loc[i, ["paper_mean", "paper_standard_error"]] = published[:2]
        measured = mean, _, count = tuple(cells.loc[i, ["mean", "standard_error", "averaged_over"]])
        if count and (name, column) not in rescheduled:
            cells.at[i, "compared"] = True
            if is_above(measured, published) or is_above(published, measured):
                cells.at[i, "differs_by"] = mean - theirs["mean"]


def _mark_best(cells: pd.DataFrame, eligible: pd.Series) -> None:
    """Mark the best of the eligible cells of each column."""
    for _, column in cells.loc[eligible, ["column", *seeds_of(cells)]].groupby("column"):
        candidates = {place: seeds.dropna().astype(float) for place, seeds in column.drop(columns="column").iterrows()}
        cells.loc[best(candidates), "best"] = True


# ---- differences from the baseline -----------------------------------------------------------------------------------


def differences(group: Group) -> Table | None:
    """Average accuracy of each row minus the baseline's, over equal seeds; None without a baseline or other rows."""
    names = row_names(group)
    baseline = baseline_of(group, names)
    if baseline is None or group.variants_of:
        return None
    rows = _by_memory(named(group.rows, names, "method"))
    is_baseline = rows["method"] == baseline
    theirs = rows.loc[is_baseline, ["memory", "seed", "value"]]
    pairs = rows[~is_baseline].merge(theirs, on=["memory", "seed"], suffixes=("", "_of_baseline"))
    if pairs.empty:
        return None
    pairs["value"] -= pairs["value_of_baseline"]
    columns = [Column(memory_text(memory), signed=True) for memory in sorted(theirs["memory"].unique())]
    cells = aggregate(pairs, ["method", "expands"], columns)
    cells["best"] = [is_ahead(seeds.dropna()) for _, seeds in cells[seeds_of(cells)].iterrows()]
    shown = group.shown(baseline)
    below = notes.of_differences(cells, shown, group.options)
    title = f"Difference from {shown}: average accuracy (percentage points)"
    return Table(group, "difference", title, ["method"], columns, cells, below, over=group.memory_title)


def row_names(group: Group) -> dict[Record, str]:
    """``{record: name of its row}`` for the runs in the table of :func:`differences`."""
    return group.names(record for record in group.base() if ACCURACY.row(record) is not None)


def baseline_of(group: Group, names: Mapping[Record, str]) -> str | None:
    """The row that the option ``baseline`` names: by a method or a row, as in the configuration or as displayed.

    If a method has several rows, the one with the most runs.
    """
    runs: Counter[str] = Counter()
    for record, name in names.items():
        if group.options.baseline in (record.method, name, group.shown(record.method), group.shown(name)):
            runs[name] += 1
    return runs.most_common(1)[0][0] if runs else None


# ---- lists of all runs -----------------------------------------------------------------------------------------------


def measures(group: Group) -> Table:
    """The accuracies of all image runs of the group."""
    return _listing(group, "measures", "All runs: accuracy, plasticity and forgetting (%)", ACCURACIES)


def cost(group: Group) -> Table:
    """The costs of all image runs of the group."""
    machines = sorted({clean(record.data.get("device") or "unknown") for record in group.records})
    where = f"Times and memory were measured on {'; '.join(machines)}"
    below = [
        "Total: includes testing, choice of exemplars and saving.",
        f"{where}: compare times only between runs on the same machine." if len(machines) > 1 else f"{where}.",
    ]
    spent = group.rows[SPENT.label]
    was_spared = (spent.notna() & (spent != group.rows[TRAINING.label])).any()
    if was_spared:
        below.append("Training in this run: excludes a first task that another run had already trained.")
    columns = [column for column in COSTS if was_spared or column != SPENT]
    return _listing(group, "cost", "All runs: cost", columns, below)


def after_last_task(group: Group, version: str = "trace") -> Table:
    """The paper's main table of language models: scores on each task after the last one, and their summaries."""
    columns = [*scores(group.tasks, version), *(USE if version == "trace" else [])]
    title = f"Scores after the last task (%), {'TRACE’s metrics' if version == 'trace' else 'fixed metrics'}"
    table = _listing(group, f"scores-{version}", title, columns, rows=rows_of(group.records, columns))
    reference = group.reference if version == "trace" else {}
    cells = table.cells
    for i, (name, memory, column) in enumerate(zip(cells["method"], cells["memory"], cells["column"])):
        mean, error = reference.get(name, {}).get(memory, {}).get(column, (None, None))
        cells.loc[i, ["paper_mean", "paper_standard_error"]] = np.array([mean, error], dtype=float)
    return replace(table, notes=[*table.notes, *notes.of_published(cells), *notes.of_data(group.records[0], version)])


def after_each_task(group: Group) -> Table:
    """A language model's scores on each task after each task, and their mean (TRACE's overall performance)."""
    stages = []
    for stage, task in enumerate(group.tasks):
        rows = rows_of(group.records, scores_after(group.tasks, stage))
        stages.append(rows.assign(**{"after task": f"{stage + 1} {task}"}))
    columns, title = scores_after(group.tasks, 0), "Scores after each task (%), TRACE’s metrics"
    return _listing(group, "stages", title, columns, rows=pd.concat(stages), further=["after task"])


def language_cost(group: Group) -> Table:
    """The costs of all runs of language models."""
    note = (
        "Relative VRAM usage is training minutes times models resident: as the paper counts them (methods that merge "
        "at the end keep one model per task), and as they are needed here (streamed)."
    )
    return _listing(group, "cost", "Cost", LANGUAGE_COSTS, [note])


def _listing(
    group: Group,
    kind: str,
    title: str,
    columns: Sequence[Column],
    below: Sequence[str] = (),
    rows: pd.DataFrame | None = None,
    further: Sequence[str] = (),
) -> Table:
    """The measures ``columns`` of all runs, averaged over those with the same name, memory and ``further`` labels."""
    rows = named(group.rows if rows is None else rows, group.names(group.records), "method")
    if group.tasks:
        labels = ["method", "memory", *further]
        rows["memory"] = [f"{memory:g}" for memory in rows["memory"]]
    else:
        labels = ["method", group.memory_title, "seeds"]
        rows[group.memory_title] = rows["memory"].astype(object).where(rows["memory"] != ALL, "all")
        rows["seeds"] = rows.groupby(["learner", "method", "memory"])["seed"].transform("count")
    columns = [column for column in columns if rows[column.label].notna().any()]
    cells = aggregate(_melted(rows, columns), ["learner", *labels, "expands"], columns)
    below = [*notes.of_seeds(cells, group.options), *below, *notes.of_growth(rows)]
    return Table(group, kind, title, labels, columns, cells, below)
