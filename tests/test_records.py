"""The numbers in the README's and the pages' tables are those of the records under results/."""

import json
import re
import statistics
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MEASURES = {  # what a column of a table of runs says of a run; others (names, the paper's values) are not numbers of ours
    "average accuracy": lambda run, runs: with_student(run),
    "last accuracy": lambda run, runs: f"{run['last_acc']:.2f}",
    "newest task": lambda run, runs: f"{run['new_acc']:.2f}",
    "forgetting": lambda run, runs: f"{run['forgetting']:.2f}",
    "NME average": lambda run, runs: f"{np.mean(run['nme_curve']):.2f}" if run["nme_curve"] else "–",
    "minutes": lambda run, runs: f"{run['total_seconds'] / 60:.0f}",
    "training images": lambda run, runs: f"{run['images_trained']:,}",
    "parameters": lambda run, runs: f"{run['parameters']:,}",
    "operations over Replay": lambda run, runs: over_replay(run, runs),
    "scoring, s": lambda run, runs: f"{run['importance_seconds']:.1f}",
    "scoring, MiB": lambda run, runs: f"{run['importance_bytes'] / 2**20:.1f}",
    "scoring, passes": lambda run, runs: f"{run['importance_passes']:.2f}",
}


def seeds_table(header):
    return "1993" in header


def tables(page):
    """[(folder of records, header, rows)] of the tables before which their section links to a folder of runs."""
    found, text = [], page.read_text()
    for match in re.finditer(r"^\|.*\|\n\|[-|: ]+\|\n((?:\|.*\|\n)+)", text, re.MULTILINE):
        header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in match[0].strip().split("\n"))
        section = text[text.rfind("\n## ", 0, match.start()) : match.start()]
        links = re.findall(r"\((?:\.\./)?(results/\w+)\)", section)
        if links and (seeds_table(header) or set(header) & set(MEASURES)):
            found.append((ROOT / links[-1], header, rows))
    return found


ALL = [(page, *table) for page in PAGES for table in tables(page)]


def records(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def with_student(run):
    return f"{run['avg_acc']:.2f}" + (f" (student {np.mean(run['student_curve']):.2f})" if run.get("student_curve") else "")


def over_replay(run, runs):
    """Operations of a run, over those of the Replay run with as many exemplars."""
    memory = run["config"]["memory_per_class"]
    replay = [r for r in runs if (r["config"]["model_name"], r["config"]["memory_per_class"]) == ("replay", memory)]
    return f"{run['train_flops'] / replay[0]['train_flops']:.2f}" if replay else "–"


def named(run, column, cell):
    """Whether a row whose ``column`` has ``cell`` may be of the run."""
    if column == "method":
        return cell.split(",")[0] == run["config"]["model_name"]
    if column == "exemplars per class":
        return cell == str(run["config"]["memory_per_class"])
    return not column.startswith("`") or cell.split()[0].strip("`") == run["config"][column.strip("`")]


@pytest.mark.parametrize("page, folder, header, rows", [table for table in ALL if not seeds_table(table[2])], ids=lambda value: value.name if isinstance(value, Path) else "")
def test_each_row_is_a_run(page, folder, header, rows):
    runs = records(folder)
    for row in rows:
        candidates = [run for run in runs if all(named(run, column, cell) for column, cell in zip(header, row))]
        said = {column: cell for column, cell in zip(header, row) if column in MEASURES}
        assert any(all(MEASURES[column](run, runs) == cell for column, cell in said.items()) for run in candidates), row


@pytest.mark.parametrize("page, folder, header, rows", [table for table in ALL if seeds_table(table[2])], ids=lambda value: value.name if isinstance(value, Path) else "")
def test_means_and_standard_errors_are_those_of_the_runs(page, folder, header, rows):
    runs = records(folder)
    for method, precision, *cells in rows:
        mine = {run["config"]["seed"]: run["avg_acc"] for run in runs if (run["config"]["model_name"], run["precision"]) == (method, precision)}
        values = [mine[seed] for seed in sorted(mine)]
        assert cells == [*(f"{value:.2f}" for value in values), f"{np.mean(values):.2f} ± {statistics.stdev(values) / len(values) ** 0.5:.2f}"]


def test_every_run_of_the_comparison_of_all_methods_is_in_its_table():
    (table,) = [table for table in ALL if table[1].name == "cifar100_short_all"]
    assert len(table[3]) == len(records(table[1]))


def test_there_are_such_tables():
    assert {folder.name for _, folder, _, _ in ALL} >= {"cifar100_short", "cifar100_short_all", "cifar100_short_study", "cifar100_short_precision"}
