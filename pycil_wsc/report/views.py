"""The tables of a group of class-incremental runs, as views of its table of rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from pycil_wsc.report.groups import Group, changed_keys, distinguishing_keys, memory_text, method_rank
from pycil_wsc.report.measures import ACCURACIES, COSTS, SPENT, named
from pycil_wsc.report.names import clean
from pycil_wsc.report.paper import PAPER, same_schedule
from pycil_wsc.report.stats import Summary, best, is_above, is_ahead
from pycil_wsc.report.studies import STUDIES, Study
from pycil_wsc.report.tables import DAGGER, Column, Failed, Table, aggregate, melted, seeds_of
from pycil_wsc.report.tuning import tuning
from pycil_wsc.results import ALL, Record


def tables(group: Group) -> Iterator[Table | Failed]:
    """Every :class:`Table` for which the group has runs."""
    if group.setting.validation_split:
        return build_tables(group, [tuning, measures, cost])
    main, *studies = [partial(accuracy, study=study) for study in STUDIES]
    return build_tables(group, [main, differences, *studies, measures, cost])


def build_tables(group: Any, builders: Iterable[Callable[[Any], Table | None]]) -> Iterator[Table | Failed]:
    """Yield the table of each of ``builders``, or a :class:`Failed` if one fails."""
    for build in builders:
        try:
            table = build(group)
        except Exception as error:
            yield Failed(f"a table of {group.title}", f"{type(error).__name__}: {error}")
        else:
            yield from [table] if table else []


# ---- average accuracies by row and memory size -----------------------------------------------------------------------


def accuracy(group: Group, study: Study) -> Table | None:
    """Average accuracy, with the paper's numbers; None if no run belongs to the study."""
    rows = _rows_of_study(group, study)
    if set(rows["kind"]) <= study.plain:
        return None
    memories = sorted(rows.loc[~rows["kind"].isin(study.plain), "memory"].unique())
    columns = [memory_text(memory) for memory in memories]
    heads = ["kind", study.corner, "expands"]
    values = rows.assign(value=rows["average"], column=rows["memory"].map(memory_text))
    cells = aggregate(values, heads, columns)
    _add_paper(cells, values, group, study)
    comparable = _comparable(group, study, rows)
    _mark_best(cells, study.corner, comparable)
    costs = aggregate(melted(rows, [column.label for column in study.costs]), heads, _labels(study.costs))
    notes = [*seeds_note(cells, group.options.spread_name), *_bold_notes(group, cells, study.corner, comparable)]
    shown = group.shown if study.corner == "method" else str
    notes += _paper_notes(cells, rows["record"], group.shown)
    return Table(
        f"{study.slug}-{group.slug}",
        study.title,
        group.title,
        (study.corner,),
        (*map(Column, columns), *study.costs),
        beside(cells, costs, heads) if study.costs else cells,
        (*notes, *study.notes),
        _missing(cells, study.corner, shown),
        group.memory_title,
        len(study.costs),
        group.options.spread,
        shown,
    )


def _rows_of_study(group: Group, study: Study) -> pd.DataFrame:
    """The lines of the runs that belong to the study, with their ``kind`` of row and its name, in the study's order."""
    records = group.records if study.of_all_runs else group.base()
    kinds: dict[Record, str] = {}
    for record in records:
        if (kind := study.row(record, changed_keys(record))) is not None:
            kinds[record] = str(kind)

    def base(record: Record) -> str:
        return group.name_of(record) if kinds[record] == record.method else kinds[record]

    names = group.names(kinds, base, study.studied)
    rows = named(group.rows, names, study.corner)
    place = {kind: number for number, kind in enumerate(study.order)}
    by_name = {record: number for number, record in enumerate(names)}
    rows["kind"] = rows["record"].map(kinds)
    order = sorted(rows.index, key=lambda i: (place.get(rows.at[i, "kind"], len(place)), by_name[rows.at[i, "record"]]))
    return rows.loc[order]


def beside(cells: pd.DataFrame, others: pd.DataFrame, heads: Sequence[str]) -> pd.DataFrame:
    """The cells of two tables with the same rows, in one table."""
    order = {tuple(head): place for place, head in enumerate(cells[[*heads]].drop_duplicates().to_numpy())}
    lacking = [head for head in order if head not in set(map(tuple, others[[*heads]].to_numpy()))]
    empty = [dict(zip(heads, head)) | {"column": name} for head in lacking for name in others["column"].unique()]
    both = pd.concat([cells, others, pd.DataFrame(empty)], ignore_index=True)
    both["averaged_over"] = both["averaged_over"].fillna(0).astype(int)
    both[["best", "compared"]] = both[["best", "compared"]].fillna(False).astype(bool)
    ranks = [order[tuple(head)] for head in both[[*heads]].to_numpy()]
    return both.iloc[np.argsort(ranks, kind="stable")].reset_index(drop=True)


def _labels(columns: Iterable[Column]) -> list[str]:
    return [column.label for column in columns]


def _add_paper(cells: pd.DataFrame, values: pd.DataFrame, group: Group, study: Study) -> None:
    """Add the paper's numbers to the cells whose runs differ from the paper's in nothing but the study's subject."""
    reference = group.reference.get(study.slug, {})
    unlike: set[tuple[str, str]] = set()
    rescheduled: set[tuple[str, str]] = set()
    for record, name, column in zip(values["record"], values[study.corner], values["column"]):
        if not changed_keys(record) <= set(study.studied):
            unlike.add((name, column))
        if not same_schedule(record):
            rescheduled.add((name, column))
    for i, (kind, name, column) in enumerate(zip(cells["kind"], cells[study.corner], cells["column"])):
        theirs = reference.get(kind, {}).get(column.replace(",", ""))
        if not theirs or (name, column) in unlike:
            continue
        error = theirs.get("se", np.nan)
        compared = bool(cells.at[i, "averaged_over"]) and (name, column) not in rescheduled
        cells.loc[i, ["paper_mean", "paper_standard_error"]] = theirs["mean"], error
        cells.at[i, "compared"] = compared
        if not compared:
            continue
        mean, own_error, count = cells.loc[i, ["mean", "standard_error", "averaged_over"]]
        published = Summary(theirs["mean"], error, PAPER["seeds"])
        measured = Summary(mean, own_error, count)
        if is_above(measured, published) or is_above(published, measured):
            cells.at[i, "differs_by"] = mean - theirs["mean"]


def _comparable(group: Group, study: Study, rows: pd.DataFrame) -> set[str]:
    """The rows that differ only in the subject of the table.

    If a study's runs were trained with different settings, those of the most frequent setting.
    """
    first = rows.drop_duplicates(study.corner).set_index(study.corner)["record"].to_dict()
    if group.variants_of:
        keys = distinguishing_keys([group.variant_of[record] for record in first.values()], set())
        return set(first) if len(keys) <= 1 and len(group.variants_of) == 1 else set()
    if not any(key.startswith("wsc.") for key in study.studied):
        return set(first)
    own = {name: record for name, record in first.items() if record.method == "wsc"}
    rest = {name: group.rest(record, (*study.studied, *study.options)) for name, record in own.items()}
    most, _ = Counter(rest.values()).most_common(1)[0] if rest else (None, 0)
    return {name for name in first if name not in rest or rest[name] == most}


def _mark_best(cells: pd.DataFrame, corner: str, comparable: set[str]) -> None:
    """Mark the best cells of each column, among comparable rows of methods that do not expand."""
    chosen = cells.loc[~cells["expands"].astype(bool) & cells[corner].isin(comparable)]
    seeds = seeds_of(cells)
    for _, column in chosen.groupby("column"):
        candidates: dict[Hashable, pd.Series] = {}
        for place in column.index:
            candidates[place] = column.loc[place, seeds].dropna().astype(float)
        cells.loc[list(best(candidates)), "best"] = True


def differences(group: Group, study: Study = STUDIES[0]) -> Table | None:
    """Average accuracy of each row of ``study`` minus the baseline's, over equal seeds.

    None if there is no baseline or no other row.
    """
    names = row_names(group, study)
    baseline = baseline_of(group, names)
    if baseline is None or group.variants_of:
        return None
    rows = named(group.rows, names, "method")
    rows["place"] = rows["method"].map({name: place for place, name in enumerate(names.values())})
    rows = rows.sort_values("place", kind="stable")
    theirs = rows.loc[rows["method"] == baseline, ["memory", "seed", "average"]]
    pairs = rows[rows["method"] != baseline].merge(theirs, on=["memory", "seed"], suffixes=("", "_of_baseline"))
    if pairs.empty:
        return None
    pairs["value"] = pairs["average"] - pairs["average_of_baseline"]
    pairs["column"] = pairs["memory"].map(memory_text)
    columns = [memory_text(memory) for memory in sorted(theirs["memory"].unique())]
    cells = aggregate(pairs, ["method", "expands"], columns)
    seeds = cells[seeds_of(cells)]
    cells["best"] = [is_ahead(line.dropna()) for _, line in seeds.iterrows()]
    several = cells["averaged_over"].max() > 1
    shown = group.shown(baseline)
    error = f"; ± is its {group.options.spread_name}" if several else "; with one seed, nothing is ahead"
    notes = [f"The difference from {shown} with the same seed, averaged over the seeds that both methods have{error}."]
    if cells["best"].any():
        notes.append(f"Bold: ahead of {shown}; the 95 % interval of the difference (Student's t) is above 0.")
    return Table(
        f"difference-{group.slug}",
        f"Difference from {shown}: average accuracy (percentage points)",
        group.title,
        ("method",),
        tuple(Column(column, signed=True) for column in columns),
        cells,
        tuple(notes),
        over=group.memory_title,
        spread=group.options.spread,
        shown=group.shown,
    )


def row_names(group: Group, study: Study) -> dict[Record, str]:
    """``{record: name of its row}`` for the runs in the table of :func:`differences`."""
    return group.names(record for record in group.base() if study.row(record, changed_keys(record)) is not None)


def baseline_of(group: Group, names: Mapping[Record, str]) -> str | None:
    """The row that the option ``baseline`` names: by a method or a row, as in the configuration or as displayed.

    If a method has several rows, the one with the most runs.
    """
    runs = Counter(
        name
        for record, name in names.items()
        if group.options.baseline in (record.method, name, group.shown(record.method), group.shown(name))
    )
    return runs.most_common(1)[0][0] if runs else None


# ---- lists of all runs -----------------------------------------------------------------------------------------------


def measures(group: Group) -> Table:
    """The accuracies of all runs of the group."""
    return _listing(group, "measures", "All runs: accuracy, plasticity and forgetting (%)", list(ACCURACIES), ())


def cost(group: Group) -> Table:
    """The costs of all runs of the group."""
    machines = sorted({clean(record.data.get("device") or "unknown") for record in group.records})
    where = f"Times and memory were measured on {'; '.join(machines)}"
    notes = [
        "Total: includes testing, choice of exemplars and saving.",
        f"{where}: compare times only between runs on the same machine." if len(machines) > 1 else f"{where}.",
    ]
    columns = list(COSTS)
    spent = group.rows[SPENT.label]
    if (spent.notna() & (spent != group.rows["training, s"])).any():
        notes.append("Training in this run: excludes a first task that another run had already trained.")
    else:
        columns.remove(SPENT)
    return _listing(group, "cost", "All runs: cost", columns, tuple(notes))


def _listing(group: Group, slug: str, title: str, columns: list[Column], notes: tuple[str, ...]) -> Table:
    names = group.names(group.records)
    place = {name: number for number, name in enumerate(dict.fromkeys(names.values()))}
    labels = ("method", group.memory_title, "seeds")
    rows = named(group.rows, names, "method")
    rows = rows.assign(place=rows["method"].map(place)).sort_values(["place", "memory"], kind="stable")
    rows[labels[1]] = rows["memory"].astype(object).where(rows["memory"] != ALL, "all")
    rows["seeds"] = rows.groupby(["learner", "method", "memory"])["seed"].transform("count")
    columns = [column for column in columns if rows[column.label].notna().any()]
    cells = aggregate(melted(rows, _labels(columns)), ["learner", *labels, "expands"], _labels(columns))
    grows = [f"{DAGGER} marks methods whose network grows with the tasks."] if rows["expands"].any() else []
    return Table(
        f"{slug}-{group.slug}",
        title,
        group.title,
        labels,
        tuple(columns),
        cells,
        (*seeds_note(cells, group.options.spread_name), *notes, *grows),
        spread=group.options.spread,
        shown=group.shown,
    )


# ---- notes below a table ---------------------------------------------------------------------------------------------


def seeds_note(cells: pd.DataFrame, spread: str) -> list[str]:
    """A note on the number of seeds and on what ± is."""
    seeds = cells["averaged_over"].max()
    one = "One seed: an indication only; there is no standard error."
    return [f"Mean ± {spread} over {seeds} seeds." if seeds > 1 else one]


def _bold_notes(group: Group, cells: pd.DataFrame, corner: str, comparable: set[str]) -> list[str]:
    notes = []
    if cells["expands"].any():
        notes.append(f"{DAGGER} marks methods whose network grows with the tasks; they are never bold.")
    if cells["best"].any():
        notes.append(
            "Bold: the best of each column, and all that it is not ahead of: the 95 % interval of the difference "
            "(Student's t), paired over equal seeds, includes 0."
        )
    names = list(cells[corner].unique())
    apart = [group.shown(name) for name in names if name not in comparable]
    if apart and len(apart) == len(names):
        notes.append("The rows differ in more than one key, so none is in bold.")
    elif apart:
        notes.append(f"Not compared, because other keys differ too: {', '.join(apart)}.")
    return notes


def _paper_notes(cells: pd.DataFrame, records: Iterable[Record], shown: Callable[[str], str]) -> list[str]:
    notes = paper_note(cells)
    if not notes:
        return []
    compared = cells.loc[cells["compared"] & (cells["averaged_over"] > 0)]
    if (compared["standard_error"].notna() & compared["paper_standard_error"].notna()).any():
        notes.append(
            "▲ and ▼: the difference, if ours is above or below the paper's and its 95 % interval (Welch) excludes 0."
        )
    elif len(compared):
        errors = compared["standard_error"].notna().any()
        lacking = "the paper gives no standard error here" if errors else "one seed has no standard error"
        notes.append(f"Differences are not marked: {lacking}.")
    return notes + _schedule_notes(records, shown)


def paper_note(cells: pd.DataFrame) -> list[str]:
    """A note on the paper's values, if there are any. Their ± is the standard error, whichever spread ours has."""
    error = ", with ± standard error," if cells["paper_standard_error"].notna().any() else ""
    return [f"The paper's values{error} are in brackets or below ours."] if cells["paper_mean"].notna().any() else []


def _schedule_notes(records: Iterable[Record], shown: Callable[[str], str]) -> list[str]:
    """Notes on methods that were not trained for the paper's number of epochs."""
    other: dict[tuple[Any, ...], dict[str, bool]] = {}
    for record in records:
        theirs, ours = PAPER["schedules"].get(record.method), [record.config["init_epoch"], record.config["epochs"]]
        if theirs and theirs != ours:
            other.setdefault((sum(ours) < sum(theirs), *ours), {})[record.method] = True
    notes = []
    for (shorter, first, later), found in other.items():
        methods = sorted(found, key=method_rank)
        theirs = sorted({"{} and {}".format(*PAPER["schedules"][method]) for method in methods})
        notes.append(
            f"{', '.join(map(shown, methods))}: {'a shorter' if shorter else 'another'} schedule than the paper's, "
            f"{first} epochs for the first task and {later} for each later one (the paper has {' or '.join(theirs)}), "
            "so the paper's numbers are for orientation only."
        )
    return notes


def _missing(cells: pd.DataFrame, corner: str, shown: Callable[[str], str]) -> tuple[str, ...]:
    """A note on missing cells and on rows with fewer seeds than others."""
    gaps: dict[tuple[str, ...], list[str]] = defaultdict(list)
    fewer: dict[int, list[str]] = defaultdict(list)
    most = cells["averaged_over"].max()
    for name, row in cells.groupby(corner, sort=False):
        counts = dict(zip(row["column"], row["averaged_over"]))
        gaps[tuple(column for column, count in counts.items() if not count)].append(shown(str(name)))
        for count in sorted({count for count in counts.values() if 0 < count < most}):
            places = [column for column, own in counts.items() if own == count]
            everywhere = all(own in (0, count) for own in counts.values())
            fewer[count].append(shown(str(name)) + ("" if everywhere else f" (at {', '.join(places)})"))
    parts = [f"{', '.join(names)} at {', '.join(places)}" for places, names in gaps.items() if places]
    for count, names in fewer.items():
        each = "each of" if len(names) > 1 else "of"
        parts.append(f"{most - count} of {most} seeds {each} {', '.join(names)}")
    return (f"Missing: {'; '.join(parts)}.",) if parts else ()
