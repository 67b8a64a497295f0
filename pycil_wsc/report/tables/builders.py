"""The tables of a group of runs, as views of its table of rows."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from pycil_wsc.errors import UserError, one_line
from pycil_wsc.report.groups import DEFAULT, Group, Options
from pycil_wsc.report.rows import (
    AVERAGE,
    MEASURES,
    PAPER,
    SCHEDULES,
    Column,
    by_memory,
    measured,
    melted,
    memory_text,
    scores,
    undeclared,
)
from pycil_wsc.report.stats import apart, best, is_ahead
from pycil_wsc.report.studies import STUDIES, Study
from pycil_wsc.report.tables.table import PUBLISHED, Table, aggregate, seeds_of
from pycil_wsc.report.tables.trials import tuning
from pycil_wsc.report.texts import method_rank, texts
from pycil_wsc.results import ALL
from pycil_wsc.results.identity import distinguishing_keys

TRAINING, SPENT, *_, HELD = MEASURES["cost"]


def tables(group: Group) -> Iterator[Table]:
    """Every :class:`Table` for which the group has runs."""
    title = "All runs: accuracy, plasticity and forgetting (%)"
    measures = partial(_listing, name="measures", title=title, columns=MEASURES["accuracy"])
    studies = [partial(accuracy, study=study) for study in STUDIES]
    builders: list[Callable[[Group], Table | None]] = [studies[0], differences, *studies[1:], measures, further, cost]
    if group.tasks:
        spent = MEASURES["cost of language models"]
        notes = texts("language_cost")
        costs = partial(_listing, name="cost", title="Cost", columns=spent, below=notes)
        builders = [after_last_task, partial(after_last_task, version="fixed"), after_each_task, costs]
    elif group.setting.validation_split:
        builders = [tuning, measures, further, cost]
    for build in builders:
        with group.attempt("a table"):
            table = build(group)
            if table:
                yield table


def console_text(group: Group, methods: Sequence[str], titled: bool) -> str:
    """The average accuracies of all image runs of the group, or the scores of its language models, as text.

    The rows of images are in the order of ``methods``.
    """
    if group.tasks:
        table = after_last_task(group)
        return "\n".join([table.to_text(titled=True), table.notes[0]])
    unit = "/class" if group.setting.fixed_memory else " in total"
    rows = by_memory(group.named(group.rows, "exemplars"), unit)
    rows = rows.sort_values("learner", key=lambda names: names.map(methods.index), kind="stable")
    columns = [Column(memory_text(memory) + unit) for memory in sorted(rows["memory"].unique())]
    cells = aggregate(rows, ["exemplars", "expands"], columns)
    counts = sorted(set(cells["averaged_over"]) - {0})
    over = f"{'/'.join(map(str, counts))} seed{'s' if counts != [1] else ''}"
    title = f"Average accuracy (CNN, top-1 %), mean ± standard error over {over}"
    return Table(group, "", title, ["exemplars"], columns, cells).to_text(titled)


# ---- average accuracies by row and memory size -----------------------------------------------------------------------


def accuracy(group: Group, study: Study) -> Table | None:
    """Average accuracy, with the paper's numbers; None if no run belongs to the study."""
    rows = group.rows_in(study)
    if rows.empty:
        return None
    shown = rows.loc[~rows["entry"].isin(study.plain)]
    corner = study.corner
    costs = MEASURES.get(study.costs, [])
    memories = [Column(memory_text(memory)) for memory in sorted(shown["memory"].unique())]
    columns = [*memories, *costs]
    values = pd.concat([by_memory(rows), melted(rows, costs)])
    cells = aggregate(values, ["entry", corner, "expands"], columns)
    _add_paper(cells, rows, group, study)
    of_memories = cells["column"].isin([column.label for column in memories])
    comparable = _comparable(group, study, rows)
    eligible = cells.loc[of_memories & ~cells["expands"].astype(bool) & cells[corner].isin(comparable)]
    rivals = False  # whether a column has several rows with several seeds
    for _, column in eligible.groupby("column"):
        rivals = rivals or int((column["averaged_over"] > 1).sum()) > 1
        cells.loc[best(column[seeds_of(cells)].astype(float)), "best"] = True
    others = [group.shown(name) for name in cells[corner].unique() if name not in comparable]
    accuracies = cells.loc[of_memories]
    compared = cells.loc[cells["compared"]]
    below = [
        *texts("seeds", accuracies, group.options.spread_name),
        *texts("bold", accuracies, len(comparable) > 0, rivals, others),
        *texts("paper", accuracies, compared, _other_schedules(rows, group), _other_settings(rows, group)),
    ]
    below += [study.note] if study.note else []
    below += texts("missing", _gaps(accuracies, corner, group.shown if corner == "method" else str))
    return Table(group, study.slug, study.title, [corner], columns, cells, below, group.memory_title, len(costs))


def _comparable(group: Group, study: Study, rows: pd.DataFrame) -> set[str]:
    """The rows that differ only in the subject of the table.

    If a study's runs were trained with different settings, those of the most frequent setting.
    """
    first = rows.drop_duplicates(study.corner)
    names = set(first[study.corner])
    if group.variants_of:
        keys = distinguishing_keys(list(first["variant"]))
        return names if len(keys) <= 1 and len(group.variants_of) == 1 else set()
    if not any(key.startswith("wsc.") for key in study.studied):
        return names
    of_wsc = first.loc[first["learner"] == "wsc"]
    rest = rest_of(of_wsc, (*study.studied, *study.options))
    most = [setting for setting, _ in Counter(rest).most_common(1)]
    return names - set(of_wsc.loc[[setting not in most for setting in rest], study.corner])


def rest_of(rows: pd.DataFrame, studied: Sequence[str]) -> list[tuple[tuple[str, str], ...]]:
    """The values that decide each run's result, except ``studied`` keys, method, memory size and seed."""
    return [tuple(pair for pair in frozen if pair[0] not in studied) for frozen in rows["frozen"]]


def _add_paper(cells: pd.DataFrame, rows: pd.DataFrame, group: Group, study: Study) -> None:
    """Add the paper's numbers to the cells whose runs differ from the paper's in nothing but the study's subject.

    Ours are compared with them if they are of the paper's schedule and settings.
    """
    place = [rows[study.corner], rows["memory"].map(memory_text)]
    unlike = rows["changed"].map(lambda changed: not changed <= set(study.studied)).groupby(place).any()
    unusual = ((rows["schedule"] != rows["learner"].map(SCHEDULES)) | rows["others"].map(bool)).groupby(place).any()
    numbers = group.reference.get(study.slug, {})
    for i, entry, *cell in cells[["entry", study.corner, "column"]].itertuples(name=None):
        theirs = numbers.get(entry, {}).get(cell[1].replace(",", ""))
        if theirs and not unlike.get(tuple(cell)):
            cells.loc[i, PUBLISHED] = theirs["mean"], theirs.get("se", np.nan)
            cells.loc[i, "compared"] = not unusual.get(tuple(cell), True)
    theirs = cells[[*PUBLISHED]].set_axis(["mean", "standard_error"], axis=1).assign(averaged_over=PAPER["seeds"])
    marked = cells["compared"] & apart(cells, theirs)
    cells.loc[marked, "differs_by"] = cells["mean"] - cells["paper_mean"]


def _other_schedules(rows: pd.DataFrame, group: Group) -> list[tuple[bool, int, int, list[str], list[str]]]:
    """(whether shorter than the paper's, epochs of the first and of later tasks, methods, the paper's schedules)."""
    rows = rows.assign(theirs=rows["learner"].map(SCHEDULES)).dropna(subset="theirs")
    rows = rows.loc[rows["schedule"] != rows["theirs"]]
    rows = rows.assign(shorter=rows["schedule"].map(sum) < rows["theirs"].map(sum))
    of_schedule = rows.groupby(["shorter", "schedule"], sort=False)[["learner", "theirs"]].agg(set).reset_index()
    lines = []
    for shorter, (first, later), methods, schedules in of_schedule.itertuples(index=False, name=None):
        names = [group.shown(method) for method in sorted(methods, key=method_rank)]
        theirs = sorted("{} and {}".format(*schedule) for schedule in schedules)
        lines.append((shorter, first, later, names, theirs))
    return lines


def _other_settings(rows: pd.DataFrame, group: Group) -> dict[str, list[str]]:
    """The keys whose values are not the paper's, of each method that has some."""
    keys: dict[str, set[str]] = defaultdict(set)
    for method, others in zip(rows["learner"], rows["others"]):
        keys[method] |= others
    return {group.shown(method): sorted(keys[method]) for method in sorted(keys, key=method_rank) if keys[method]}


def _gaps(cells: pd.DataFrame, corner: str, shown: Callable[[str], str]) -> dict[str, list[str]]:
    """Missing cells, and cells with fewer seeds than others, of each row."""
    gaps: dict[str, list[str]] = defaultdict(list)
    most = cells["averaged_over"].max()
    for name, column, count in zip(cells[corner], cells["column"], cells["averaged_over"]):
        if count < most:
            gaps[shown(str(name))].append(f"{column} ({most - count} of {most} seeds)" if count else column)
    return gaps


# ---- differences from the baseline -----------------------------------------------------------------------------------


def differences(group: Group) -> Table | None:
    """Average accuracy of each row minus the baseline's, over equal seeds; None without a baseline or other rows."""
    rows = by_memory(group.rows_in(STUDIES[0]))
    baseline = baseline_of(group, rows)
    if baseline is None or group.variants_of:
        return None
    is_baseline = rows["method"] == baseline
    theirs = rows.loc[is_baseline, ["memory", "seed", "value"]]
    pairs = rows[~is_baseline].merge(theirs, on=["memory", "seed"], suffixes=("", "_of_baseline"))
    if pairs.empty:
        return None
    pairs["value"] -= pairs["value_of_baseline"]
    columns = [Column(memory_text(memory), signed=True) for memory in sorted(theirs["memory"].unique())]
    cells = aggregate(pairs, ["method", "expands"], columns)
    cells["best"] = is_ahead(cells.loc[:, seeds_of(cells)])
    shown = group.shown(baseline)
    below = texts("differences", cells, shown, group.options.spread_name)
    title = f"Difference from {shown}: average accuracy (percentage points)"
    return Table(group, "difference", title, ["method"], columns, cells, below, over=group.memory_title)


def baseline_of(group: Group, rows: pd.DataFrame) -> str | None:
    """The row that the option ``baseline`` names: by a method or a row, as in the configuration or as displayed.

    If a method has several rows, the one with the most runs.
    """
    runs: Counter[str] = Counter()
    for method, name in zip(rows["learner"], rows["method"]):
        if group.options.baseline in (method, name, group.shown(method), group.shown(name)):
            runs[name] += 1
    return runs.most_common(1)[0][0] if runs else None


def check_baseline(groups: Iterable[Group], options: Options) -> None:
    """Raise a :class:`UserError` if another baseline was chosen than the default and no group has it."""
    if options.baseline == DEFAULT.baseline:
        return
    rows_of = {group: group.rows_in(STUDIES[0]) for group in groups if not group.tasks}
    if any(baseline_of(group, rows) for group, rows in rows_of.items()):
        return
    present: set[str] = set().union(*(rows["own"] for rows in rows_of.values()))
    raise UserError(
        f"--baseline {options.baseline}: no method or row of the table of average accuracies; "
        f"available: {', '.join(sorted(present)) or 'none'}"
    )


# ---- lists of all runs -----------------------------------------------------------------------------------------------


def further(group: Group) -> Table | None:
    """What the image runs of the group recorded beside the usual measures; None if that is nothing."""
    columns = undeclared(group.records)
    title = "All runs: further measures"
    return _listing(group, "further", title, columns, texts("further")) if columns else None


def cost(group: Group) -> Table:
    """The costs of all image runs of the group."""
    machines = sorted({one_line(record.data.get("device") or "unknown") for record in group.records})
    spent = measured(group.rows, SPENT)
    spared = bool((~np.isnan(spent) & (spent != measured(group.rows, TRAINING))).any())
    columns = [column for column in MEASURES["cost"] if spared or column != SPENT]
    known = not np.isnan(measured(group.rows, HELD)).all()
    if known:
        columns.append(AVERAGE)
    table = _listing(group, "cost", "All runs: cost", columns, texts("cost", machines, spared, known))
    if known:
        _mark_best_of_their_size(table.cells)
    return table


def _mark_best_of_their_size(cells: pd.DataFrame) -> None:
    """Set ``best`` in the column of the bytes that are held where no row with as few or fewer is more accurate."""
    sizes = cells.loc[cells["column"] == HELD.label, "mean"].dropna()
    accuracies = cells.loc[cells["column"] == AVERAGE.label, "mean"]
    accuracies.index -= 1  # the cell to the right
    for place, size in sizes.items():
        rivals = sizes.index[sizes <= size]
        if len(sizes) > 1 and accuracies[place] >= accuracies[rivals].max():
            cells.loc[place, "best"] = True


def after_last_task(group: Group, version: str = "trace") -> Table:
    """The paper's main table of language models: scores on each task after the last one, and their summaries."""
    columns = [*scores(group.tasks, version), *(MEASURES["use"] if version == "trace" else [])]
    title = f"Scores after the last task (%), {'TRACE’s metrics' if version == 'trace' else 'fixed metrics'}"
    data = group.records[0].data
    about_data = texts("data", (data.get("trivial") or {}).get(version, {}), data.get("warnings") or ())
    numbers = group.reference if version == "trace" else {}
    return _listing(group, f"scores-{version}", title, columns, about_data, numbers=numbers)


def after_each_task(group: Group) -> Table:
    """A language model's scores on each task after each task, and their mean (TRACE's overall performance)."""
    rows = group.named(group.rows).reset_index(drop=True)
    stages = []
    for stage, task in enumerate(group.tasks):
        stages.append(melted(rows.assign(**{"after task": f"{stage + 1} {task}"}), scores(group.tasks, stage=stage)))
    values = pd.concat(stages).sort_index(kind="stable")  # the stages of each run in succession
    columns = scores(group.tasks, stage=0)
    title = "Scores after each task (%), TRACE’s metrics"
    return _listing(group, "stages", title, columns, values=values)


def _listing(
    group: Group,
    name: str,
    title: str,
    columns: Sequence[Column],
    below: Sequence[str] = (),
    values: pd.DataFrame | None = None,
    numbers: Mapping[str, Any] | None = None,
) -> Table:
    """The measures ``columns`` of all runs, averaged over those with the same name, memory and ``after task``.

    ``values``: a row per run and measure, if these are not the ``columns`` of each run. ``numbers``: the paper's, by
    method, memory and column.
    """
    if values is None:
        values = melted(group.named(group.rows), columns)
    if group.tasks:
        labels = ["method", "memory", *values.columns.intersection(["after task"])]
        values["memory"] = [f"{memory:g}" for memory in values["memory"]]
    else:
        labels = ["method", group.memory_title, "seeds"]
        values[group.memory_title] = values["memory"].astype(object).where(values["memory"] != ALL, "all")
        values["seeds"] = values.groupby(["column", "method", "memory"])["seed"].transform("count")
    known = set(values.dropna(subset="value")["column"])
    columns = [column for column in columns if column.label in known]
    cells = aggregate(values, ["learner", *labels, "expands"], columns)
    for i, method, memory, column in cells[[*labels[:2], "column"]].itertuples(name=None):
        theirs = (numbers or {}).get(method, {}).get(memory, {}).get(column)
        if theirs:
            cells.loc[i, PUBLISHED] = theirs["mean"], theirs.get("se", np.nan)
    seeds = texts("seeds", cells, group.options.spread_name)
    below = [*seeds, *texts("published", cells), *below, *texts("growth", values)]
    return Table(group, name, title, labels, columns, cells, below)
