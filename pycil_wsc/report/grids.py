"""Tables of average accuracies, with the rows of a study and a column per memory size, and their notes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pycil_wsc.report.groups import Group, changed_keys, distinguishing_keys
from pycil_wsc.report.paper import PAPER, expands, same_schedule
from pycil_wsc.report.runs import Record, memory_text
from pycil_wsc.report.stats import best, paired
from pycil_wsc.report.tables import DAGGER, Cell, Column, Measure, Row, Table, measured


@dataclass(frozen=True)
class Study:
    """A table of average accuracies. ``row(record, changed)`` names the row that a run belongs to, or None."""

    slug: str
    title: str
    corner: str
    row: Callable[[Record, set[str]], str | None]
    studied: tuple[str, ...] = ()  # the keys that distinguish the rows
    options: tuple[str, ...] = ()  # further keys that apply to some of the rows only
    plain: frozenset[str] = frozenset()  # rows that do not make a study without others
    order: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    costs: Mapping[Column, Measure] = field(default_factory=dict)  # costs of a row's runs, over all memory sizes
    of_all_runs: bool = True  # False: only of the runs that belong to no study


Line = dict[float, list[Record]]  # the runs of a row by memory size


def accuracy_grid(group: Group, study: Study) -> Table | None:
    """Average accuracy, with the paper's numbers; None if no run belongs to the study."""
    records = group.records if study.of_all_runs else group.base()
    kinds = {record: study.row(record, changed_keys(record)) for record in records}
    present = {kind for kind in kinds.values() if kind is not None}
    if present <= study.plain:
        return None
    lines = _lines(group, study, kinds)
    memories = sorted({memory for (kind, _), line in lines.items() if kind not in study.plain for memory in line})
    reference, comparable = group.reference.get(study.slug, {}), _comparable(group, study, lines)
    rows, costs = [], []
    for (kind, name), line in lines.items():
        theirs = reference.get(kind, {})
        cells = tuple(_cell(study, line.get(memory, []), theirs.get(str(memory))) for memory in memories)
        rows.append(Row((name,), expands(kind), cells, (kind, name) in comparable))
        every = [record for found in line.values() for record in found]
        costs.append(tuple(Cell(measured(read, every)) for read in study.costs.values()))
    rows = _mark_best(rows)
    cells = [cell for row in rows for cell in row.cells]
    notes = [*seeds_note(rows, group.options.spread_name), *_bold_notes(group, rows)]
    shown = group.shown if study.corner == "method" else str
    notes += _paper_notes(cells, [record for record in kinds if kinds[record] is not None], group.shown)
    return Table(
        f"{study.slug}-{group.slug}",
        study.title,
        group.title,
        (study.corner,),
        (*(Column(memory_text(memory)) for memory in memories), *study.costs),
        tuple(row._replace(cells=(*row.cells, *cost)) for row, cost in zip(rows, costs, strict=True)),
        (*notes, *study.notes),
        _missing(memories, rows, shown),
        group.memory_title,
        len(study.costs),
        group.options.spread,
        shown,
    )


def _lines(group: Group, study: Study, kinds: Mapping[Record, str | None]) -> dict[tuple[str, str], Line]:
    """``{(kind of row, name): runs}``, in the study's order."""
    lines: dict[tuple[str, str], Line] = defaultdict(lambda: defaultdict(list))

    def base(record: Record) -> str | None:
        kind = kinds[record]
        return group.name_of(record) if kind == record.method else kind if kind is None else str(kind)

    for record, name in group.names(kinds, base, study.studied).items():
        lines[str(kinds[record]), name][record.memory].append(record)
    rank = {kind: place for place, kind in enumerate(study.order)}
    return {row: lines[row] for row in sorted(lines, key=lambda row: rank.get(row[0], len(rank)))}


def _cell(study: Study, records: list[Record], reference: Mapping[str, float] | None) -> Cell:
    as_paper = all(changed_keys(record) <= set(study.studied) for record in records)
    paper = (reference["mean"], reference.get("se")) if reference and as_paper else None
    compared = bool(paper and records) and all(map(same_schedule, records))
    return Cell({record.seed: record.average for record in records}, paper, compared)


def _comparable(group: Group, study: Study, lines: Mapping[tuple[str, str], Line]) -> set[tuple[str, str]]:
    """The rows that differ only in the subject of the table.

    If a study's runs were trained with different settings, those of the most frequent setting.
    """
    first = {row: next(iter(line.values()))[0] for row, line in lines.items()}
    if group.variants_of:
        keys = distinguishing_keys([group.variant_of[record] for record in first.values()], set())
        return set(lines) if len(keys) <= 1 and len(group.variants_of) == 1 else set()
    if not any(key.startswith("wsc.") for key in study.studied):
        return set(lines)
    rest = {
        row: group.rest(record, (*study.studied, *study.options))
        for row, record in first.items()
        if record.method == "wsc"
    }
    most: list[tuple[Hashable, int]] = Counter(rest.values()).most_common(1)
    return {row for row in lines if row not in rest or rest[row] == most[0][0]}


def _mark_best(rows: Sequence[Row]) -> list[Row]:
    """Mark the best cells of each column, among comparable rows of methods that do not expand."""
    chosen = [place for place, row in enumerate(rows) if not row.expands and row.comparable]
    columns = range(len(rows[0].cells)) if rows else ()
    bold = {(place, i) for i in columns for place in best({place: rows[place].cells[i].seeds for place in chosen})}
    return [
        row._replace(cells=tuple(replace(cell, best=(place, i) in bold) for i, cell in enumerate(row.cells)))
        for place, row in enumerate(rows)
    ]


def difference_grid(group: Group, study: Study) -> Table | None:
    """Average accuracy of each row of ``study`` minus the baseline's, over equal seeds.

    None if there is no baseline or no other row.
    """
    lines: dict[str, Line] = defaultdict(lambda: defaultdict(list))
    names = row_names(group, study)
    for record, name in names.items():
        lines[name][record.memory].append(record)
    baseline = baseline_of(group, names)
    if baseline is None or group.variants_of:
        return None
    theirs = {memory: _accuracies(found) for memory, found in lines[baseline].items()}
    rows = []
    for name, line in lines.items():
        differences = {memory: paired(_accuracies(found), theirs.get(memory, {})) for memory, found in line.items()}
        if name != baseline and any(differences.values()):
            cells = tuple(
                Cell(found.by_seed) if (found := differences.get(memory)) else Cell() for memory in sorted(theirs)
            )
            rows.append(Row((name,), expands(next(iter(line.values()))[0].method), cells))
    if not rows:
        return None
    cells = [cell for row in rows for cell in row.cells]
    several = any(len(cell.seeds) > 1 for cell in cells)
    error = f"; ± is its {group.options.spread_name}" if several else "; one seed has no standard error"
    shown = group.shown(baseline)
    return Table(
        f"difference-{group.slug}",
        f"Difference from {shown}: average accuracy (percentage points)",
        group.title,
        ("method",),
        tuple(Column(memory_text(memory), signed=True) for memory in sorted(theirs)),
        tuple(rows),
        (f"The difference from {shown} with the same seed, averaged over the seeds that both methods have{error}.",),
        (),
        group.memory_title,
        0,
        group.options.spread,
        group.shown,
    )


def row_names(group: Group, study: Study) -> dict[Record, str]:
    """``{record: name of its row}`` for the runs in the :func:`difference_grid` of a study."""
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


def _accuracies(records: Iterable[Record]) -> dict[Hashable, float]:
    return {record.seed: record.average for record in records}


# ---- notes below a table ---------------------------------------------------------------------------------------------


def seeds_note(rows: Sequence[Row], spread: str) -> list[str]:
    """A note on the number of seeds and on what ± is."""
    seeds = max((len(cell.seeds) for row in rows for cell in row.cells), default=1)
    one = "One seed: an indication only; there is no standard error."
    return [f"Mean ± {spread} over {seeds} seeds." if seeds > 1 else one]


def _bold_notes(group: Group, rows: Sequence[Row]) -> list[str]:
    notes = []
    if any(row.expands for row in rows):
        notes.append(f"{DAGGER} marks methods whose network grows with the tasks; they are never bold.")
    if any(cell.best for row in rows for cell in row.cells):
        notes.append(
            "Bold: the best of each column, and all that are within one standard error of the difference to it, "
            "paired over equal seeds."
        )
    apart = [group.shown(row.labels[0]) for row in rows if not row.comparable]
    if apart and len(apart) == len(rows):
        notes.append("The rows differ in more than one key, so none is in bold.")
    elif apart:
        notes.append(f"Not compared, because other keys differ too: {', '.join(apart)}.")
    return notes


def _paper_notes(cells: Sequence[Cell], records: Sequence[Record], shown: Callable[[str], str]) -> list[str]:
    notes = paper_note(cells)
    if not notes:
        return []
    compared = [cell for cell in cells if cell.compared and cell.seeds]
    errors = any(cell.error is not None for cell in compared)
    if any(cell.error is not None and cell.paper and cell.paper[1] is not None for cell in compared):
        notes.append(
            "▲ and ▼: the difference, if ours is above or below the paper's by more than the sum of the two standard "
            "errors."
        )
    elif compared:
        lacking = "the paper gives no standard error here" if errors else "one seed has no standard error"
        notes.append(f"Differences are not marked: {lacking}.")
    return notes + _schedule_notes(records, shown)


def paper_note(cells: Sequence[Cell]) -> list[str]:
    """A note on the paper's values, if there are any. Their ± is the standard error, whichever spread ours has."""
    papers = [cell.paper for cell in cells if cell.paper]
    error = ", with ± standard error," if any(error is not None for _, error in papers) else ""
    return [f"The paper's values{error} are in brackets or below ours."] if papers else []


def _schedule_notes(records: Sequence[Record], shown: Callable[[str], str]) -> list[str]:
    """Notes on methods that were not trained for the paper's number of epochs."""
    other: dict[tuple[Any, ...], dict[str, bool]] = {}
    for record in records:
        theirs, ours = PAPER["schedules"].get(record.method), [record.config["init_epoch"], record.config["epochs"]]
        if theirs and theirs != ours:
            other.setdefault((sum(ours) < sum(theirs), *ours), {})[record.method] = True
    notes = []
    for (shorter, first, later), methods in other.items():
        theirs = sorted({"{} and {}".format(*PAPER["schedules"][method]) for method in methods})
        notes.append(
            f"{', '.join(map(shown, methods))}: {'a shorter' if shorter else 'another'} schedule than the paper's, "
            f"{first} epochs for the first task and {later} for each later one (the paper has {' or '.join(theirs)}), "
            "so the paper's numbers are for orientation only."
        )
    return notes


def _missing(memories: Sequence[float], rows: Sequence[Row], shown: Callable[[str], str]) -> tuple[str, ...]:
    """A note on missing cells and on rows with fewer seeds than others."""
    gaps: dict[tuple[float, ...], list[str]] = defaultdict(list)
    fewer: dict[int, list[str]] = defaultdict(list)
    seeds = max((len(cell.seeds) for row in rows for cell in row.cells), default=0)
    for row in rows:
        counts = {memory: len(cell.seeds) for memory, cell in zip(memories, row.cells)}
        name = shown(row.labels[0])
        gaps[tuple(memory for memory in memories if not counts[memory])].append(name)
        for count in sorted({count for count in counts.values() if 0 < count < seeds}):
            places = [memory for memory in memories if counts[memory] == count]
            everywhere = all(counts[memory] in (0, count) for memory in memories)
            fewer[count].append(name + ("" if everywhere else f" at {_listed(places)}"))
    parts = [f"{', '.join(names)} at {_listed(places)}" for places, names in gaps.items() if places]
    parts += [f"{seeds - count} of {seeds} seeds of {', '.join(names)}" for count, names in fewer.items()]
    return (f"Missing: {'; '.join(parts)}.",) if parts else ()


def _listed(memories: Iterable[float]) -> str:
    return ", ".join(map(memory_text, memories))
