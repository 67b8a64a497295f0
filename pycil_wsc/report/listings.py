"""All tables of a group: the studies, and lists of all runs with their metrics and costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from pycil_wsc.report.grids import accuracy_grid, difference_grid, seeds_note
from pycil_wsc.report.groups import Group
from pycil_wsc.report.names import clean
from pycil_wsc.report.paper import expands
from pycil_wsc.report.runs import ALL, Record
from pycil_wsc.report.studies import STUDIES
from pycil_wsc.report.tables import DAGGER, Cell, Column, Failed, Measure, Row, Table, measured
from pycil_wsc.report.tuning import tuning

MEASURES: Mapping[Column, Measure] = {
    Column("average"): lambda data: data["avg_acc"],
    Column("last"): lambda data: data["last_acc"],
    Column("newest task"): lambda data: data["new_acc"],
    Column("forgetting"): lambda data: data["forgetting"],
    Column("last, top-5"): lambda data: data["top5_curve"][-1],
    Column("task known"): lambda data: sum(data["task_known_curve"]) / len(data["task_known_curve"]),
    Column("NME average"): lambda data: sum(data["nme_curve"]) / len(data["nme_curve"]),
}
SPENT = Column("training in this run, s", 0)
COSTS: Mapping[Column, Measure] = {
    Column("training, s", 0): lambda data: data["train_seconds"],
    SPENT: lambda data: data["train_seconds_spent"],
    Column("total, s", 0): lambda data: data["total_seconds"],
    Column("training images", 0, exact=True): lambda data: data["images_trained"],
    Column("peak memory, MiB", 0): lambda data: data["peak_memory_bytes"] / 2**20,
    Column("parameters", 0, exact=True): lambda data: data["parameters"],
}


def tables(group: Group) -> Iterator[Table | Failed]:
    """Every :class:`Table` for which the group has runs."""
    if group.setting.validation_split:
        return build_tables(group, [tuning, measures, cost])
    main, *studies = STUDIES
    grids = [partial(accuracy_grid, study=study) for study in studies]
    differences = partial(difference_grid, study=main)
    return build_tables(group, [partial(accuracy_grid, study=main), differences, *grids, measures, cost])


def build_tables(group: Any, builders: Iterable[Callable[[Any], Table | None]]) -> Iterator[Table | Failed]:
    """Yield the table of each of ``builders``, or a :class:`Failed` if one fails."""
    for build in builders:
        try:
            table = build(group)
        except Exception as error:
            yield Failed(f"a table of {group.title}", f"{type(error).__name__}: {error}")
        else:
            yield from [table] if table else []


def measures(group: Group) -> Table:
    """The accuracies of all runs of the group."""
    return _listing(group, "measures", "All runs: accuracy, plasticity and forgetting (%)", MEASURES, ())


def cost(group: Group) -> Table:
    """The costs of all runs of the group."""
    machines = sorted({clean(record.data.get("device", "unknown")) for record in group.records})
    where = f"Times and memory were measured on {'; '.join(machines)}"
    notes = [
        "Total: includes testing, choice of exemplars and saving.",
        f"{where}: compare times only between runs on the same machine." if len(machines) > 1 else f"{where}.",
    ]
    if any(_loaded_first_task(record) for record in group.records):
        notes.append("Training in this run: excludes a first task that another run had already trained.")
        return _listing(group, "cost", "All runs: cost", COSTS, tuple(notes))
    shown = {column: read for column, read in COSTS.items() if column is not SPENT}
    return _listing(group, "cost", "All runs: cost", shown, tuple(notes))


def _loaded_first_task(record: Record) -> bool:
    return record.data.get("train_seconds_spent") not in (None, record.data["train_seconds"])


def _listing(group: Group, slug: str, title: str, reads: Mapping[Column, Measure], notes: tuple[str, ...]) -> Table:
    members: dict[tuple[str, str, float], list[Record]] = defaultdict(list)
    names = group.names(group.records)
    place = {name: number for number, name in enumerate(dict.fromkeys(names.values()))}
    for record, name in sorted(names.items(), key=lambda item: (place[item[1]], item[0].memory)):
        members[record.method, name, record.memory].append(record)
    lines = {row: [Cell(measured(read, records)) for read in reads.values()] for row, records in members.items()}
    kept = [i for i in range(len(reads)) if any(line[i].seeds for line in lines.values())]
    rows = tuple(
        Row(
            (name, "all" if memory == ALL else memory, len(members[method, name, memory])),
            expands(method),
            tuple(line[i] for i in kept),
        )
        for (method, name, memory), line in lines.items()
    )
    marks = [f"{DAGGER} marks methods whose network grows with the tasks."] if any(row.expands for row in rows) else []
    return Table(
        f"{slug}-{group.slug}",
        title,
        group.title,
        ("method", group.memory_title, "seeds"),
        tuple(list(reads)[i] for i in kept),
        rows,
        (*seeds_note(rows, group.options.spread_name), *notes, *marks),
        spread=group.options.spread,
        shown=group.shown,
    )
