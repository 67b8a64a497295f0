"""The numbers in the README's and the pages' tables are those of the records under results/."""

import csv
import json
import re
import statistics
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
SPEED = ROOT / "docs" / "speed.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# columns of a table of runs -> a run's value; other columns (names, the paper's values) are not checked
MEASURES = {
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
        if links and (seeds_table(header) or set(header) & set(MEASURES)) and "C-STANCE" not in header:
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
    return not column.startswith("`") or cell.split()[0].strip("`") == str(run["config"][column.strip("`")])


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


@pytest.mark.parametrize("name", ["cifar100_short_all", "cifar100_paper_schedule"])
def test_every_run_of_these_folders_is_in_their_table(name):
    (table,) = [table for table in ALL if (table[0].name, table[1].name) == ("results.md", name)]
    assert len(table[3]) == len(records(table[1]))


def test_the_quickstarts_table_is_that_of_its_runs():
    text = (ROOT / "docs" / "getting_started.md").read_text()
    runs = records(ROOT / "results" / "quickstart")
    for method in "replay", "wsc":
        cells = []
        for memory in 10, 100:
            named = {"model_name": method, "memory_per_class": memory}
            values = [run["avg_acc"] for run in runs if named.items() <= run["config"].items()]
            assert len(values) == 3
            cells.append(f"{np.mean(values):.2f} ± {statistics.stdev(values) / 3**0.5:.2f}")
        assert re.search(rf"^{method} +{'  '.join(cells)}$", text, re.MULTILINE), cells


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
    """A method's entry in a table of speeds: one value, or the ends of a range."""
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


def rows_after(page, mark):
    """(header, rows) of the first table after ``mark`` on a page."""
    table = re.search(r"(?:^\|.*\|\n)+", page.read_text().partition(mark)[2], re.MULTILINE)[0].strip()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n"))
    return header, rows


def generated(mark):
    """(header, rows) of a generated table on the page of speeds; None if it says that there is none."""
    between = SPEED.read_text().partition(f"<!-- records: {mark} -->\n")[2].partition("<!-- end -->")[0]
    return None if between == "None yet.\n" else rows_after(SPEED, f"<!-- records: {mark} -->")


def test_the_table_of_scaling_is_the_record():
    """Speeds, perfect scaling and communication from the seconds of a step, with the other processes and alone."""
    path, table = ROOT / "results/scaling-cpu.json", generated("scaling-cpu")
    assert path.exists() == (table is not None)
    if table is None:
        return
    shapes, found = json.loads(path.read_text())["shapes"], {}
    names = {"CIFAR, ResNet-32": "cifar", "ImageNet, ResNet-18": "imagenet"}
    for name, size, number, *cells in table[1]:
        shape = shapes[names[name]]
        rate = int(size) / shape["one"]["step_seconds"]
        assert shape["batch_size"] == int(size)
        if number == "1":
            assert says(cells[0], rate) and cells[1:] == ["1.00", "", "", ""]
            continue
        together, threads = shape["processes"][number], shape["threads"][number]
        speeds = [int(size) / each["step_seconds"] for each in (together, threads)]
        over = [speed / (int(number) * rate) for speed in speeds]
        share = max(0, 1 - together["alone_seconds"] / together["step_seconds"])
        assert says(" ".join(cells), speeds[0], over[0], 100 * share, speeds[1], over[1])
        found.setdefault(name, []).append(number)
    assert found == {name: ["2", "4"] for name in names}


def test_the_table_of_the_start_on_many_files_is_the_record():
    path, table = ROOT / "results/image-folder-cpu.json", generated("image-folder-cpu")
    assert path.exists() == (table is not None)
    if table is None:
        return
    caches = json.loads(path.read_text())["caches"]
    assert [tuple(row[:2]) for row in table[1]] == [
        (f"`{name if name in ('false', 'true') else json.dumps(name)}`", start)
        for name in caches
        for start in caches[name]
    ]
    for (name, start, *cells), each in zip(table[1], (each for starts in caches.values() for each in starts.values())):
        cpu, mib = each["cpu_seconds"], 2**20
        parts = [cpu[part] for part in ("start", "imports", "listing", "fingerprint", "cache", "step")]
        memory = each["peak_memory_bytes"] / mib, each["all_memory_bytes"] / mib
        assert says(" ".join(cells), each["seconds"]["start"], *parts, *memory), (name, start)


def test_the_speeds_of_a_language_model_are_the_records():
    def speeds(name):
        record = json.loads((ROOT / f"results/language-model-smollm2-{name}cpu.json").read_text())
        return [method["tokens_per_second"] for method in record["methods"].values()]

    one, packed, fp32, threads, wsc = speeds("")
    values = [one, packed, fp32, threads, sum(speeds("two-1-") + speeds("two-2-")), wsc]
    _, rows = rows_after(ROOT / "docs/language_models.md", "language-model-smollm2-two-2-cpu.json)):")
    assert [row[1:] for row in rows] == [[f"{value:.0f}", f"{value / one:.2f}"] for value in values]


def test_what_a_backbones_settings_cost_is_the_record():
    settings = json.loads((ROOT / "results/backbone-settings-cpu.json").read_text())["settings"]
    _, rows = rows_after(ROOT / "docs/pretrained.md", "benchmarks/backbone_settings.py --out")
    measured = [[f"{settings[name][f'{part}_over_default']:.2f}" for part in ("speed", "peak")] for name in settings]
    names = [next(name for name in ("channels_last", "grad_checkpointing", "bf16") if name in row) for row, *_ in rows]
    assert list(settings) == ["default", "contiguous", "grad_checkpointing", "bf16"]
    assert names == ["channels_last", *list(settings)[2:]] and [cells for _, *cells in rows] == measured[1:]


def test_the_table_of_language_models_is_the_records():
    header, rows = rows_after(ROOT / "docs/language_models.md", "](../results/trace_small_model).")
    assert {row[0] for row in rows} == {path.stem for path in (ROOT / "results/trace_small_model").glob("*.json")}
    for method, *cells in rows:
        record = json.loads((ROOT / f"results/trace_small_model/{method}.json").read_text())
        scores = record["scores"]["trace"]
        values = [100 * score for score in (*scores["matrix"][-1], record["avg_score"], scores["forgetting"])]
        minutes = [record["train_minutes"], record["relative_vram_minutes"]]
        assert header[1:9] == record["tasks"]
        assert cells == [*(f"{value:.2f}" for value in values), *(f"{value:.1f}" for value in minutes)]


def test_the_generated_tables_of_language_models_show_what_the_checked_one_shows(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    from trace_tables import runs

    checked_header, checked = rows_after(ROOT / "docs/language_models.md", "](../results/trace_small_model).")
    header, without_learning, *rows = runs("trace_small_model")
    generated = [dict(zip(header, row, strict=True)) for row in rows]
    assert [row["method"] for row in generated] == [f"{row[0]}, seed 1234" for row in checked]
    for row, cells in zip(generated, checked, strict=True):
        for name, cell in zip(checked_header[1:], cells[1:], strict=True):
            assert row[name] == cell
    best = dict(zip(header, without_learning, strict=True))
    assert (best["C-STANCE"], best["20Minuten"], best["average"]) == ("40.00", "38.47", "30.36")


def test_the_table_of_the_consolidations_cost_is_the_record():
    ways = json.loads((ROOT / "results/consolidation-overhead-cpu.json").read_text())["ways"]
    names = {
        "SGD, own": "sgd, own moments",
        "AdamW, own": "adamw, own moments",
        "AdamW, the optimiser's": "adamw, its moments",
    }
    _, rows = rows_after(ROOT / "docs/wsc.md", "results/consolidation-overhead-cpu.json")
    assert [row[0] for row in rows] == list(names)
    for name, *cells in rows:
        way = ways[names[name]]
        ratios = [way["warmup_step_ratio"], way["later_step_ratio"], way["task_ratio"]]
        assert cells[:3] == [f"x {ratio:.3f}" for ratio in ratios]
        assert says(cells[3], 1000 * way["reset_seconds"]) and says(
            cells[4], way["extra_copies"], way["peak_over_without"]
        )


@pytest.mark.parametrize("loop", ["sgd", "narrow", "deep", "slow", "cosine", "adam", "memory 20"])
def test_the_table_of_short_tasks_is_the_record(loop):
    """Each cell: the mean over the seeds of the gain over Replay of the same seed, and its standard error."""
    trials = ROOT / "results/short_tasks/digits_test.csv"
    seeds = {
        (row["epochs"], row["method"]): np.array([float(row[str(seed)]) for seed in range(12)])
        for row in csv.DictReader(trials.read_text().splitlines())
        if row["loop"] == loop
    }
    header, rows = rows_after(ROOT / "docs/wsc.md", "(images/short_tasks.svg)")
    epochs = [cell.split()[0] for cell in header[2:]]
    mine = {method: cells for name, method, *cells in rows if name == loop}
    assert mine["Replay"] == [f"{seeds[each, 'replay'].mean():.1f}" for each in epochs]
    for name, method in ("before", "before"), ("as in the paper", "letter"), ("default", "default"):
        gains = [seeds[each, method] - seeds[each, "replay"] for each in epochs]
        assert mine[name] == [f"{gain.mean():+.1f} ± {gain.std(ddof=1) / 12**0.5:.1f}" for gain in gains]


def test_the_table_of_short_tasks_on_cifar_is_the_record():
    _, rows = rows_after(ROOT / "docs/wsc.md", "../results/short_tasks/cifar50_test.csv")
    records = list(csv.DictReader((ROOT / "results/short_tasks/cifar50_test.csv").read_text().splitlines()))
    counts = {"late": "default", "since_reset": "before", "absolute": "as in the paper"}
    found = {
        (run["exemplars per class"], run["epochs"], counts.get(run["wsc.average_count"].strip('"'), "Replay")): run[
            "average accuracy"
        ]
        for run in records
    }
    assert len(found) == len(records) == 4 * len(rows)
    for memory, epochs, *cells in rows:
        names = ("Replay", "before", "as in the paper", "default")
        assert cells == [found[memory, epochs, name] for name in names]


def test_the_table_of_the_classifier_kept_up_to_date_is_the_record():
    record = json.loads((ROOT / "results/keep-up-to-date-cpu.json").read_text())
    page = ROOT / "docs/your_classifier.md"
    _, rows = rows_after(page, "results/keep-up-to-date-cpu.json")
    assert [row[0] for row in rows] == list(record["ways"])
    for name, *cells in rows:
        way = record["ways"][name]
        later = sum(way["seconds"][1:])
        assert cells[:4] == [f"{accuracy:.1f}" for accuracy in way["accuracy"]]
        assert cells[4:] == [f"{later:.0f}", f"{sum(way['images'][1:]):,}"]


def images_per_class(number):
    """A data set of 100 classes without pixels, of which only the labels matter."""
    from pycil_wsc.data.types import Dataset, DatasetInfo, Split

    classes, grey = tuple(map(str, range(100))), (0.5, 0.5, 0.5)
    labels = np.repeat(np.arange(100), number)
    split = Split(np.empty((len(labels), 0), np.uint8), labels)
    return Dataset(DatasetInfo("labels", classes, 32, grey, grey, "pad", 0, False, 0.0), split, split)


def operations(config, index):
    """Of a training image of task ``index``, from 0, in multiples of Replay's: the table of docs/methods.md.

    MEMO's are counted by torch, with ResNet-32 at 32 pixels and ResNet-18 at 224.
    """
    if index == 0:
        return 1
    if config.model_name == "foster":
        phases = config.epochs, config.options.compression_epochs
        return np.average([4 / 3, 5 / 3], weights=phases)
    memo = {"resnet32": (2.958 - 1) / 9, "resnet18": (2.390 - 1) / 9}[config.convnet_type]
    distilling = dict.fromkeys(["icarl", "wa", "bic"], 4 / 3)
    return (distilling | {"der": (index + 3) / 3, "memo": 1 + memo * index}).get(config.model_name, 1)


def test_the_papers_tables_have_as_many_training_images_as_the_page_says():
    """At the number of images per class of CIFAR-100 and ImageNet-100. All seeds have as many."""
    from pycil_wsc.config.loading import load
    from pycil_wsc.data.tasks import tasks_of
    from pycil_wsc.runs.planning import plan_of

    data = {"cifar100": images_per_class(500), "imagenet100": images_per_class(1300)}
    _, rows = rows_after(ROOT / "docs/paper.md", "# The paper's tables and figures")
    for _, file, _, images, weighed, _ in rows:
        configs = load(ROOT / file.strip("`"))
        seeds = {config.seed for config in configs}
        once = [config for config in configs if config.seed == min(seeds)]
        assert len(once) * len(seeds) == len(configs)
        plans = [plan_of(config, tasks_of(data[config.dataset], config)) for config in once]
        assert images == f"{len(seeds) * sum(map(sum, plans)) / 1e6:,.0f}", file
        costs = [[operations(config, index) for index in range(len(plan))] for config, plan in zip(once, plans)]
        total = len(seeds) * sum(np.dot(plan, cost) for plan, cost in zip(plans, costs)) / 1e6
        rounded = 0.01 if "imagenet" in file else 0.001  # the table's numbers are those of CIFAR-100's network
        assert float(weighed.replace(",", "")) == pytest.approx(total, rel=rounded, abs=0.5), file


def test_the_papers_tables_have_as_many_runs_and_hours_as_the_page_says():
    """Hours: the images weighed by their operations, at the rates of Replay in the records of speed."""
    from pycil_wsc.config.loading import load

    _, rows = rows_after(ROOT / "docs/paper.md", "# The paper's tables and figures")
    rates = {
        shape: json.loads((ROOT / f"results/throughput-{record}.json").read_text())["methods"]["replay"]
        for shape, record in (("CIFAR", "cpu"), ("ImageNet", "imagenet-cpu"))
    }
    for experiment, file, runs, _, weighed, hours in rows:
        assert len(load(ROOT / file.strip("`"))) == int(runs)
        rate = rates["ImageNet" if "ImageNet" in experiment else "CIFAR"]["images_per_second"]["engine"]["median"]
        number = float(weighed.replace(",", "")) * 1e6
        assert float(hours.replace(",", "")) == pytest.approx(number / rate / 3600, rel=0.005, abs=0.6)
