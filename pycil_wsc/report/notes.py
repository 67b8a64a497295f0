"""The notes below a table. They are about its cells: a line per row and column, see :mod:`pycil_wsc.report.tables`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import pandas as pd

from pycil_wsc.report.names import method_rank
from pycil_wsc.report.options import Options
from pycil_wsc.report.paper import PAPER
from pycil_wsc.report.tables import DAGGER
from pycil_wsc.results import Record

Shown = Callable[[str], str]  # the display name of a row


def of_seeds(cells: pd.DataFrame, options: Options) -> list[str]:
    """The number of seeds and what ± is."""
    seeds = cells["averaged_over"].max()
    one = "One seed: an indication only; there is no standard error."
    return [f"Mean ± {options.spread_name} over {seeds} seeds." if seeds > 1 else one]


def of_growth(rows: pd.DataFrame, further: str = "") -> list[str]:
    return [f"{DAGGER} marks methods whose network grows with the tasks{further}."] if rows["expands"].any() else []


def of_bold(cells: pd.DataFrame, corner: str, comparable: set[str], shown: Shown) -> list[str]:
    """What is bold, and which rows are not compared."""
    notes = of_growth(cells, "; they are never bold")
    if cells["best"].any():
        notes.append(
            "Bold: the best of each column, and all that it is not ahead of: the 95 % interval of the difference "
            "(Student's t), paired over equal seeds, includes 0."
        )
    apart = [shown(name) for name in cells[corner].unique() if name not in comparable]
    if apart and not comparable:
        notes.append("The rows differ in more than one key, so none is in bold.")
    elif apart:
        notes.append(f"Not compared, because other keys differ too: {', '.join(apart)}.")
    return notes


def of_differences(cells: pd.DataFrame, baseline: str, options: Options) -> list[str]:
    """What the differences from the baseline are, and which are in bold."""
    several = cells["averaged_over"].max() > 1
    error = f"; ± is its {options.spread_name}" if several else "; with one seed, nothing is ahead"
    notes = [
        f"The difference from {baseline} with the same seed, averaged over the seeds that both methods have{error}."
    ]
    if cells["best"].any():
        notes.append(f"Bold: ahead of {baseline}; the 95 % interval of the difference (Student's t) is above 0.")
    return notes


def of_published(cells: pd.DataFrame) -> list[str]:
    """The paper's values, if there are any. Their ± is the standard error, whichever spread ours has."""
    error = ", with ± standard error," if cells["paper_standard_error"].notna().any() else ""
    return [f"The paper's values{error} are in brackets or below ours."] if cells["paper_mean"].notna().any() else []


def of_paper(cells: pd.DataFrame, records: Iterable[Record], shown: Shown) -> list[str]:
    """The paper's values, which differences from them are marked, and which runs have another schedule."""
    notes = of_published(cells)
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
    return notes + _of_schedules(records, shown)


def _of_schedules(records: Iterable[Record], shown: Shown) -> list[str]:
    """Methods that were not trained for the paper's number of epochs."""
    other: dict[tuple[str, int, int], set[str]] = defaultdict(set)
    for record in records:
        theirs = PAPER["schedules"].get(record.method)
        first, later = record.config["init_epoch"], record.config["epochs"]
        if theirs and theirs != [first, later]:
            other["a shorter" if first + later < sum(theirs) else "another", first, later].add(record.method)
    notes = []
    for (kind, first, later), methods in other.items():
        ranked = sorted(methods, key=method_rank)
        theirs = sorted({"{} and {}".format(*PAPER["schedules"][method]) for method in ranked})
        notes.append(
            f"{', '.join(map(shown, ranked))}: {kind} schedule than the paper's, {first} epochs for the first task and "
            f"{later} for each later one (the paper has {' or '.join(theirs)}), so the paper's numbers are for "
            "orientation only."
        )
    return notes


def of_missing(cells: pd.DataFrame, corner: str, shown: Shown) -> list[str]:
    """Missing cells, and cells with fewer seeds than others."""
    gaps: dict[str, list[str]] = defaultdict(list)
    most = cells["averaged_over"].max()
    for name, column, count in zip(cells[corner], cells["column"], cells["averaged_over"]):
        if count < most:
            gaps[shown(str(name))].append(f"{column} ({most - count} of {most} seeds)" if count else column)
    return of_gaps(gaps)


def of_gaps(gaps: Mapping[str, Sequence[str]]) -> list[str]:
    """The note on missing runs, for the places at which each name lacks them."""
    parts = [f"{name} at {', '.join(places)}" for name, places in gaps.items() if places]
    return [f"Missing: {'; '.join(parts)}."] if parts else []


def of_data(record: Record, version: str) -> list[str]:
    """Scores that need no model, and what is wrong with the data, as a run of a language model recorded them."""
    tasks = (record.data.get("trivial") or {}).get(version, {})
    guesses = []
    for task, scores in tasks.items():
        guesses.append(f"{task}: " + ", ".join(f"{name} {100 * score:.1f}" for name, score in scores.items()))
    notes = [f"Scores of trivial answers, without a model (%): {'; '.join(guesses)}."] if guesses else []
    return [*notes, *(f"Data: {line}" for line in record.data.get("warnings") or ())]
