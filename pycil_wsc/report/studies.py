"""Which tables there are, and which runs stand in them: decided by each run's configuration alone."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from pycil_wsc.report.groups import label, position, unusual
from pycil_wsc.report.paper import PAPER, expands, same_schedule
from pycil_wsc.report.tables import DAGGER, Cell, Column, Row, Table
from pycil_wsc.report.tuning import tuning


class Study(NamedTuple):
    """A table of average accuracies. ``row(record, unusual)`` names the row a run belongs to, or None."""

    slug: str
    title: str
    corner: str
    row: Callable
    studied: tuple = ()  # the keys that the rows stand for
    plain: frozenset = frozenset()  # rows that alone make no study
    order: tuple = ()
    notes: tuple = ()
    costs: dict = {}  # further columns: what the runs of a row cost, over all memory sizes


def tables(group):
    """Every :class:`Table` that the runs of a group fill, even in part."""
    if group.setting.validation_split:
        return [tuning(group), measures(group), cost(group)]
    filled = [accuracy_grid(group, study) for study in STUDIES]
    return [table for table in filled if table] + [measures(group), cost(group)]


def accuracy_grid(group, study):
    """Average accuracy, rows of the study by memory sizes, the paper's beside; None where the runs hold nothing of the study."""
    base = {
        record: study.row(record, unusual(record))
        for record in (group.base() if study is ACCURACIES else group.records)
    }
    present = {name for name in base.values() if name is not None}
    if present <= study.plain:
        return None
    reference, rank = group.reference.get(study.slug, {}), {name: place for place, name in enumerate(study.order)}
    members = defaultdict(lambda: defaultdict(list))
    for record, name in label(base, base.get, study.studied).items():
        members[base[record], name][record.memory].append(record)
    memories = sorted({memory for (kind, _), line in members.items() if kind not in study.plain for memory in line})
    rows, costs = [], []
    for kind, name in sorted(members, key=lambda row: rank.get(row[0], len(rank))):
        theirs = reference.get(kind, {})
        cells = [_cell(group, study, members[kind, name][memory], theirs.get(str(memory))) for memory in memories]
        rows.append(Row((name,), expands(kind), cells))
        costs.append(
            [
                Cell(_values(read, [record for records in members[kind, name].values() for record in records]))
                for read in study.costs.values()
            ]
        )
    rows = _emboldened(rows)
    cells = [cell for row in rows for cell in row.cells]
    notes = (
        _seeds_note(cells),
        *_bold_note(rows),
        *_paper_notes(cells, (record for record in base if base[record] is not None)),
    )
    columns = tuple(Column(f"{memory:,}") for memory in memories)
    missing = _missing(reference, present, memories, rows, cells)
    rows = tuple(row._replace(cells=(*row.cells, *spent)) for row, spent in zip(rows, costs, strict=True))
    return Table(
        f"{study.slug}-{group.slug}",
        study.title,
        group.title,
        (study.corner,),
        (*columns, *study.costs),
        rows,
        (*notes, *study.notes),
        missing,
        group.memory_title,
        len(study.costs),
    )


def _cell(group, study, records, reference):
    as_paper = all(unusual(record) <= set(study.studied) for record in records)
    paper = (reference["mean"], reference.get("se")) if reference and as_paper else None
    return Cell(
        tuple(record.data["avg_acc"] for record in records),
        paper,
        bool(paper and records) and all(map(same_schedule, records)),
    )


def _emboldened(rows):
    """The rows with the best of each column, among those that do not expand, in bold; a table of one row has none."""
    columns = zip(*(row.cells for row in rows))
    best = [
        max((cell.mean for row, cell in zip(rows, column) if cell.values and not row.expands), default=None)
        for column in columns
    ]
    return tuple(
        row._replace(
            cells=tuple(
                replace(cell, best=len(rows) > 1 and not row.expands and bool(cell.values) and cell.mean == top)
                for cell, top in zip(row.cells, best)
            )
        )
        for row in rows
    )


# ---- what is said below a table ----------------------------------------------------------------------------------------


def _seeds_note(cells):
    seeds = max(len(cell.values) for cell in cells)
    return (
        f"Mean ± standard error over {seeds} seeds."
        if seeds > 1
        else "One seed: a direction, not a value; there is no standard error."
    )


def _bold_note(rows):
    if any(cell.best for row in rows for cell in row.cells):
        mark = any(row.expands for row in rows)
        yield (
            f"Bold: the best method that does not expand ({DAGGER} marks those that do)."
            if mark
            else "Bold: the best of each column."
        )


def _paper_notes(cells, records):
    if not any(cell.paper for cell in cells):
        return
    yield "Beside each value, in brackets or below it, the paper's."
    compared = [cell for cell in cells if cell.compared and cell.values]
    if any(cell.error is not None and cell.paper[1] is not None for cell in compared):
        yield "▲ and ▼: ours is above or below the paper's by more than the two standard errors together, and by how much."
    elif compared:
        lacking = (
            "the paper gives no standard error here"
            if any(cell.error is not None for cell in compared)
            else "one seed has no standard error"
        )
        yield f"Differences are not marked: {lacking}."
    other = {}
    for record in records:
        theirs, ours = PAPER["schedules"].get(record.method), [record.config["init_epoch"], record.config["epochs"]]
        if theirs and theirs != ours:
            other.setdefault((tuple(ours), tuple(theirs)), {})[record.method] = True
    for (ours, theirs), methods in other.items():
        length = "a shorter" if sum(ours) < sum(theirs) else "another"
        yield (
            f"{', '.join(methods)}: {length} schedule than the paper's ({ours[0]} epochs for the first task and {ours[1]} for each later one, "
            f"not {theirs[0]} and {theirs[1]}), so the paper's numbers stand there for orientation, not for comparison."
        )


def _missing(reference, present, memories, rows, cells):
    """The paper's rows and columns without a run, gaps, and rows with fewer seeds than others, in one sentence."""
    parts = []
    if rows_missing := [name for name in reference if name not in present]:
        parts.append(f"no run of {', '.join(rows_missing)}")
    theirs = dict.fromkeys(int(memory) for line in reference.values() for memory in line)
    if columns_missing := [memory for memory in theirs if memory not in memories]:
        parts.append(f"no run with {_listed(columns_missing)} exemplars")
    gaps, fewer, seeds = defaultdict(list), defaultdict(list), max(len(cell.values) for cell in cells)
    for row in rows:
        counts = {memory: len(cell.values) for memory, cell in zip(memories, row.cells)}
        gaps[tuple(memory for memory in memories if not counts[memory])].append(row.labels[0])
        for count in sorted({count for count in counts.values() if 0 < count < seeds}):
            places = [memory for memory in memories if counts[memory] == count]
            fewer[count].append(
                row.labels[0] + ("" if all(counts[m] in (0, count) for m in memories) else f" at {_listed(places)}")
            )
    parts += [f"{', '.join(names)} at {_listed(places)}" for places, names in gaps.items() if places]
    parts += [f"{seeds - count} of {seeds} seeds of {', '.join(names)}" for count, names in fewer.items()]
    return (f"Missing: {'; '.join(parts)}.",) if parts else ()


def _listed(memories):
    return ", ".join(f"{memory:,}" for memory in memories)


# ---- the studies -------------------------------------------------------------------------------------------------------


def _is_wsc(record):
    return record.method == "wsc" and record.memory > 0


def _accuracy_row(record, _):
    return record.method if record.memory and record.method != "joint" else None


def _zero_memory_row(record, unusual):
    return record.method if not record.memory and not unusual else None


def _reservoir_row(record, unusual):
    return record.method if unusual == {"exemplars"} and record.memory else None


def _retraining_row(record, unusual):
    return record.method if record.method in ("joint", "replay", "wsc") and record.memory and not unusual else None


def _ablation_row(record, unusual):
    if record.method == "replay" and record.memory and not unusual:
        return "replay"
    without = {
        (): "wsc",
        ("wsc.reset",): "wsc without reset",
        ("wsc.average",): "wsc without averaging",
        ("wsc.average", "wsc.reset"): "wsc with neither",
    }
    gone = unusual <= {"wsc.reset", "wsc.average"} and (
        "wsc.reset" not in unusual or position(record, "wsc.reset") == "none"
    )
    return without[tuple(sorted(unusual))] if _is_wsc(record) and gone else None


def _importance_row(record, unusual):
    return position(record, "wsc.importance") if _is_wsc(record) and unusual <= {"wsc.importance"} else None


def _reset_rule_row(record, unusual):
    if not _is_wsc(record) or position(record, "wsc.reset") == "none":
        return None
    return (
        "blend without averaging"
        if unusual == {"wsc.average"}
        else position(record, "wsc.reset")
        if unusual <= {"wsc.reset"}
        else None
    )


def _reset_frequency_row(record, unusual):
    if not _is_wsc(record) or not unusual <= {"wsc.reset_every"}:
        return None
    often = position(record, "wsc.reset_every")
    return often if isinstance(often, str) else f"every {often} epochs"


def retain_row(record, unusual):
    """Names like ``0.5`` and ``0.5 without averaging``."""
    if not _is_wsc(record) or not unusual <= {"wsc.retain", "wsc.average"}:
        return None
    return f"{position(record, 'wsc.retain'):g}" + (" without averaging" if "wsc.average" in unusual else "")


SCORING = {
    Column("scoring, s"): lambda data: data["importance_seconds"],
    Column("scoring, MiB"): lambda data: data["importance_bytes"] / 2**20,
    Column("scoring, passes"): lambda data: data["importance_passes"],
}
ACCURACIES = Study("accuracy", "Average accuracy (CNN, top-1 %)", "method", _accuracy_row)
RETAIN = Study(
    "retain-rate",
    "Share of the parameters that is kept at the reset: average accuracy (%)",
    "wsc.retain",
    retain_row,
    ("wsc.retain", "wsc.average"),
    frozenset({"0.2", "0.2 without averaging"}),
    tuple(f"{share / 100:g}{end}" for end in ("", " without averaging") for share in range(101)),
)
STUDIES = (
    ACCURACIES,
    Study(
        "ablation",
        "Ablation of reset and averaging: average accuracy (%)",
        "method",
        _ablation_row,
        ("wsc.reset", "wsc.average"),
        frozenset({"replay", "wsc"}),
        ("replay", "wsc without reset", "wsc without averaging", "wsc with neither", "wsc"),
    ),
    Study(
        "importance",
        "Importance of a parameter: average accuracy (%)",
        "wsc.importance",
        _importance_row,
        ("wsc.importance",),
        frozenset({"moment"}),
        ("drift", "fisher", "hessian", "first_moment", "second_moment", "moment"),
        (
            "Scoring, in a run: seconds of training; the most bytes held beside the weights and those before the task; passes over the data.",
        ),
        SCORING,
    ),
    Study(
        "reset-rule",
        "Rule of the reset: average accuracy (%)",
        "wsc.reset",
        _reset_rule_row,
        ("wsc.reset", "wsc.average"),
        frozenset({"blend", "blend without averaging"}),
        ("random", "revert", "shrink_perturb", "continual_backprop", "blend without averaging", "blend"),
    ),
    Study(
        "reset-frequency",
        "Frequency of the reset: average accuracy (%)",
        "wsc.reset_every",
        _reset_frequency_row,
        ("wsc.reset_every",),
        frozenset({"once"}),
        ("iteration", "epoch", "once"),
    ),
    RETAIN,
    Study(
        "retraining",
        "Full retraining (joint) and continual learning: average accuracy (%)",
        "method",
        _retraining_row,
        (),
        frozenset({"replay", "wsc"}),
        ("joint", "replay", "wsc"),
    ),
    Study("zero-memory", "No memory: average accuracy (%)", "method", _zero_memory_row),
    Study(
        "reservoir",
        "Exemplars chosen by reservoir sampling: average accuracy (%)",
        "method",
        _reservoir_row,
        ("exemplars",),
    ),
)


# ---- every run ---------------------------------------------------------------------------------------------------------

MEASURES = {
    Column("average"): lambda data: data["avg_acc"],
    Column("last"): lambda data: data["last_acc"],
    Column("newest task"): lambda data: data["new_acc"],
    Column("forgetting"): lambda data: data["forgetting"],
    Column("last, top-5"): lambda data: data["top5_curve"][-1],
    Column("NME average"): lambda data: sum(data["nme_curve"]) / len(data["nme_curve"]),
}
SPENT = Column("training spent here, s", 0)
COSTS = {
    Column("training, s", 0): lambda data: data["train_seconds"],
    SPENT: lambda data: data["train_seconds_spent"],
    Column("total, s", 0): lambda data: data["total_seconds"],
    Column("training images", 0, exact=True): lambda data: data["images_trained"],
    Column("peak memory, MiB", 0): lambda data: data["peak_memory_bytes"] / 2**20,
    Column("parameters", 0, exact=True): lambda data: data["parameters"],
}


def measures(group):
    """All accuracies of every run of the group."""
    return _listing(group, "measures", "All runs: accuracy, plasticity and forgetting (%)", MEASURES, ())


def cost(group):
    """What every run of the group cost."""
    machines = sorted({str(record.data.get("device", "unknown")) for record in group.records})
    note = (
        f"Total: with tests, choice of exemplars and saving. Times and memory were taken on {'; '.join(machines)}"
        + (": compare times only between runs of one machine." if len(machines) > 1 else ".")
    )
    if any(
        record.data.get("train_seconds_spent", record.data["train_seconds"]) != record.data["train_seconds"]
        for record in group.records
    ):
        return _listing(
            group,
            "cost",
            "All runs: cost",
            COSTS,
            (note, "Spent here: without a first task that another run had trained already."),
        )
    return _listing(
        group,
        "cost",
        "All runs: cost",
        {column: read for column, read in COSTS.items() if column is not SPENT},
        (note,),
    )


def _listing(group, slug, title, measured, notes):
    members = defaultdict(list)
    names = label(group.records, lambda record: record.method)
    place = {name: number for number, name in enumerate(dict.fromkeys(names.values()))}
    for record, name in sorted(names.items(), key=lambda item: (place[item[1]], item[0].memory)):
        members[record.method, name, record.memory].append(record)
    lines = {key: [Cell(_values(read, records)) for read in measured.values()] for key, records in members.items()}
    kept = [i for i in range(len(measured)) if any(line[i].values for line in lines.values())]
    rows = tuple(
        Row((name, memory, len(members[method, name, memory])), expands(method), tuple(line[i] for i in kept))
        for (method, name, memory), line in lines.items()
    )
    cells = [cell for row in rows for cell in row.cells]
    marks = [f"{DAGGER} marks methods that expand."] if any(row.expands for row in rows) else []
    columns = tuple(list(measured)[i] for i in kept)
    return Table(
        f"{slug}-{group.slug}",
        title,
        group.title,
        ("method", group.memory_title, "seeds"),
        columns,
        rows,
        (_seeds_note(cells), *notes, *marks),
    )


def _values(read, records):
    """What each of the records has of one measure; older ones may lack it."""
    values = []
    for record in records:
        try:
            values.append(read(record.data))
        except (KeyError, TypeError):
            continue
    return tuple(value for value in values if value is not None)
