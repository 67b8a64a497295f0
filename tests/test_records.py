"""The numbers in the README's and the pages' tables are those of the records under results/."""

import json
import re
import statistics
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
SPEED = ROOT / "docs" / "speed.md"
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
        header, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in match[0].strip().split("\n")
        )
        section = text[text.rfind("\n## ", 0, match.start()) : match.start()]
        links = re.findall(r"\((?:\.\./)?(results/\w+)\)", section)
        if links and (seeds_table(header) or set(header) & set(MEASURES)):
            found.append((ROOT / links[-1], header, rows))
    return found


ALL = [(page, *table) for page in PAGES for table in tables(page)]


def records(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def with_student(run):
    return f"{run['avg_acc']:.2f}" + (
        f" (student {np.mean(run['student_curve']):.2f})" if run.get("student_curve") else ""
    )


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


@pytest.mark.parametrize(
    "page, folder, header, rows",
    [table for table in ALL if not seeds_table(table[2])],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_each_row_is_a_run(page, folder, header, rows):
    runs = records(folder)
    for row in rows:
        candidates = [run for run in runs if all(named(run, column, cell) for column, cell in zip(header, row))]
        said = {column: cell for column, cell in zip(header, row) if column in MEASURES}
        assert any(all(MEASURES[column](run, runs) == cell for column, cell in said.items()) for run in candidates), row


@pytest.mark.parametrize(
    "page, folder, header, rows",
    [table for table in ALL if seeds_table(table[2])],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_means_and_standard_errors_are_those_of_the_runs(page, folder, header, rows):
    runs = records(folder)
    for method, precision, *cells in rows:
        mine = {
            run["config"]["seed"]: run["avg_acc"]
            for run in runs
            if (run["config"]["model_name"], run["precision"]) == (method, precision)
        }
        values = [mine[seed] for seed in sorted(mine)]
        assert cells == [
            *(f"{value:.2f}" for value in values),
            f"{np.mean(values):.2f} ± {statistics.stdev(values) / len(values) ** 0.5:.2f}",
        ]


def test_every_run_of_the_comparison_of_all_methods_is_in_its_table():
    (table,) = [table for table in ALL if table[1].name == "cifar100_short_all"]
    assert len(table[3]) == len(records(table[1]))


def test_there_are_such_tables():
    assert {folder.name for _, folder, _, _ in ALL} >= {
        "cifar100_short",
        "cifar100_short_all",
        "cifar100_short_study",
        "cifar100_short_precision",
    }


def says(cell, *values):
    """Whether the numbers in ``cell`` are ``values``, to as many places as it gives."""
    told = re.findall(r"\d[\d,]*(?:\.\d+)?", cell)
    return told == [f"{value:,.{len(number.partition('.')[2])}f}" for number, value in zip(told, values, strict=True)]


def speeds(record, name, column):
    """What a table of speeds says of a method: one value, or the ends of a range."""
    method, replay = record["methods"][name], record["methods"]["replay"]
    rates = method["images_per_second"]
    if column == "range":
        return rates["engine"]["min"], rates["engine"]["max"]
    if column in ("bare", "plain", "decode"):
        return (rates[column]["median"],)
    return {
        "images per second": (rates["engine"]["median"],),
        "time over Replay's": (replay["images_per_second"]["engine"]["median"] / rates["engine"]["median"],),
        "peak memory, MiB": (method["peak_memory_bytes"]["engine"] / 2**20,),
    }.get(column) or (method["engine_" + column.replace(" ", "_")],)


def parts(record, name, column):
    (part,) = (part for part in record["images_per_second"].values() if part["removed"] == name)
    return {
        "images per second": (part["median"],),
        "range": (part["min"], part["max"]),
        "over the whole": (part["over_whole"],),
    }[column]


def costs(record, name, column):
    method = record["methods"][name]
    if column == "range":
        return method["seconds"]["task"]["min"], method["seconds"]["task"]["max"]
    if column == "overhead":
        return (100 * method["overhead_share"]["median"],)
    return (method["over_replay"],) if column == "over Replay" else (method["seconds"][column]["median"],)


def peaks(record, names, column):
    values = {record["peak_bytes"][name][int(column) - 1] / 2**20 for name in names.split(", ")}
    return (min(values),) if max(values) - min(values) < 1 else (min(values), max(values))


@pytest.mark.parametrize(
    "record, first, value",
    [
        ("throughput-methods-cpu", "method", speeds),
        ("throughput-imagenet-cpu", "method", speeds),
        ("throughput-imagenet-cached-cpu", "method", speeds),
        ("engine-ablation-cpu", "removed", parts),
        ("engine-ablation-imagenet-cpu", "removed", parts),
        ("run-cost-cpu", "method", costs),
        ("run-cost-short-cpu", "method", costs),
        ("peak-memory-cpu", "method", peaks),
    ],
)
def test_tables_of_speed_and_memory_are_the_records(record, first, value):
    after = SPEED.read_text().partition(f"results/{record}.json")[2]
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.search(r"(?:^\|.*\|\n)+", after, re.MULTILINE)[0].strip().split("\n")
    )
    record = json.loads((ROOT / "results" / f"{record}.json").read_text())
    assert header[0] == first and rows
    for name, *cells in rows:
        for column, cell in zip(header[1:], cells, strict=True):
            assert says(cell, *value(record, name, column)), (name, column, cell)
