"""The report's tables: numbers equal those of the runs, and marks are correct."""

import functools
import html.parser
import json
import math
import re
from pathlib import Path
from statistics import fmean as mean

import pytest
import scipy.stats
from support import synthetic
from support.synthetic import HERE, lines_of

from pycil_wsc import report
from pycil_wsc.report import duplicates, groups
from pycil_wsc.results import Record
from pycil_wsc.results.identity import STUDIED

RECORDS = Path(__file__).parents[2] / "results" / "studies" / "cifar100_short"
PAPER = json.loads((Path(report.__file__).parent / "paper.json").read_text())


# ---- every number comes from the runs --------------------------------------------------------------------------------


def standard_error(values):
    return scipy.stats.sem(values) if len(values) > 1 else None


def method(config):
    return config["model_name"] + ("+wsc" if config.get("consolidate") else "")


def as_usual(config, *free):
    return all(config.get(key, value) == value for key, value in STUDIED.items() if key not in free)


def is_wsc(config, *free):
    return config["model_name"] == "wsc" and config["memory_per_class"] > 0 and as_usual(config, *free)


def ablated(config, row):
    if row == "replay":
        return method(config) == "replay" and config["memory_per_class"] > 0 and as_usual(config)
    reset, average = ("none" if row == "wsc without reset" else "blend"), row != "wsc without averaging"
    return is_wsc(config, "wsc.reset", "wsc.average") and (config["wsc.reset"], config["wsc.average"]) == (
        reset,
        average,
    )


def ruled(config, row):
    rule, average = row.removesuffix(" without averaging"), not row.endswith(" without averaging")
    return is_wsc(config, "wsc.reset", "wsc.average") and (config["wsc.reset"], config["wsc.average"]) == (
        rule,
        average,
    )


def retained(config, row):
    rate, average = float(row.split()[0]), not row.endswith(" without averaging")
    return is_wsc(config, "wsc.retain", "wsc.average") and (config["wsc.retain"], config["wsc.average"]) == (
        rate,
        average,
    )


def listed(config, row):
    """Rows like ``wsc wsc.retain=0.5``; keys that are not named have their default values."""
    name, *keys = row.split(" ")
    named = dict(key.split("=") for key in keys)
    same = all(str(config.get(key)).lower() == value.lower() for key, value in named.items())
    return method(config) == name and same and as_usual(config, *named)


MEMBERS = {
    "accuracy": lambda config, row: (
        method(config) == row != "joint" and config["memory_per_class"] > 0 and as_usual(config)
    ),
    "zero-memory": lambda config, row: method(config) == row and config["memory_per_class"] == 0,
    "reservoir": lambda config, row: method(config) == row and config["exemplars"] == "reservoir",
    "retraining": lambda config, row: method(config) == row and config["memory_per_class"] > 0 and as_usual(config),
    "ablation": ablated,
    "importance": lambda config, row: is_wsc(config, "wsc.importance") and config["wsc.importance"] == row,
    "reset-frequency": lambda config, row: is_wsc(config, "wsc.reset_every") and config["wsc.reset_every"] == row,
    "reset-rule": ruled,
    "retain-rate": retained,
    "measures": listed,
    "cost": listed,
}
COLUMNS = {
    "average": lambda result: mean(result["curve"]),
    "last": lambda result: result["curve"][-1],
    "newest task": lambda result: mean([row[-1] for row in result["matrix"]]),
    "forgetting": lambda result: mean(
        [
            max(row[k] for row in result["matrix"][k:]) - result["matrix"][-1][k]
            for k in range(len(result["matrix"]) - 1)
        ]
    ),
    "last, top-5": lambda result: result["top5_curve"][-1],
    "task known": lambda result: mean(result["task_known_curve"]),
    "task known, last": lambda result: result["task_known_curve"][-1],
    "NME average": lambda result: mean(result["nme_curve"]),
    "weakest tenth": lambda result: result["weakest_tenth"],
    "training, s": lambda result: result["train_seconds"],
    "total, s": lambda result: result["total_seconds"],
    "training images": lambda result: result["images_trained"],
    "peak memory, MiB": lambda result: result["peak_memory_bytes"] / 1024 / 1024,
    "parameters": lambda result: result["parameters"],
    "scoring, s": lambda result: result["importance_seconds"],
    "scoring, MiB": lambda result: result["importance_bytes"] / 1024 / 1024,
    "scoring, passes": lambda result: result["importance_passes"],
}
ALL_TABLES = {f"{study}-{HERE}" for study in (*MEMBERS, "difference")} | {
    f"{study}-cifar100-b5-inc5-resnet32" for study in ("accuracy", "difference", "measures", "cost")
}


def split(slug):
    return re.fullmatch(r"(.+?)-(cifar100-b(\d+)-inc\d+)-resnet32", slug).groups()


def test_the_runs_of_all_studies_fill_all_tables(made):
    assert {path.stem for path in (made[0] / "tables").glob("*.csv")} == ALL_TABLES
    assert {path.name for path in (made[0] / "tables").iterdir()} == {
        f"{slug}.{suffix}" for slug in ALL_TABLES for suffix in ("csv", "md", "tex")
    }


@pytest.mark.parametrize("slug", sorted(slug for slug in ALL_TABLES if not slug.startswith("difference")))
def test_every_number_of_a_table_is_computed_from_the_runs(made, slug):
    folder, results, _ = made
    study, _, increment = split(slug)
    lines = lines_of(folder, slug)
    assert lines
    for line in lines:
        row = next(iter(line.values()))
        members = [
            r for r in results if MEMBERS[study](r["config"], row) and r["config"]["increment"] == int(increment)
        ]
        read = COLUMNS.get(line["column"], lambda result: mean(result["curve"]))
        if not line["column"].startswith("scoring"):
            memory = int(line.get("exemplars per class") or line["column"].replace(",", ""))
            members = [r for r in members if r["config"]["memory_per_class"] == memory]
        values = [read(result) for result in members]
        assert int(line["averaged_over"]) == len(values)
        if values:
            assert float(line["mean"]) == pytest.approx(mean(values), rel=1e-9)
            if not line["column"].startswith("scoring"):
                assert seeds_of(line) == pytest.approx({r["config"]["seed"]: read(r) for r in members})
            error = standard_error(values)
            assert (
                line["standard_error"] == ""
                if error is None
                else float(line["standard_error"]) == pytest.approx(error, rel=1e-6, abs=1e-9)
            )


def seeds_of(line):
    """The values of a line of a table by seed."""
    return {int(key.removeprefix("seed_")): float(line[key]) for key in line if key.startswith("seed_") and line[key]}


def paired(ours, theirs):
    """Mean of the differences over equal seeds, its standard error (None for one seed) and their number."""
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    return mean(differences), standard_error(differences), len(differences)


@pytest.mark.parametrize("slug", [f"difference-{HERE}", "difference-cifar100-b5-inc5-resnet32"])
def test_differences_from_replay_are_over_equal_seeds(made, slug):
    folder = made[0]
    accuracies = {
        (line["method"], line["column"]): seeds_of(line)
        for line in lines_of(folder, slug.replace("difference", "accuracy"))
    }
    lines = lines_of(folder, slug)
    assert {line["method"] for line in lines} == {name for name, _ in accuracies} - {"replay"}
    for line in lines:
        difference, error, seeds = paired(
            accuracies[line["method"], line["column"]], accuracies["replay", line["column"]]
        )
        assert float(line["mean"]) == pytest.approx(difference) and int(line["averaged_over"]) == seeds
        reach = scipy.stats.t.ppf(0.975, seeds - 1) * error if seeds > 1 else math.inf
        assert line["best"] == str(int(difference > reach)), "ahead: the 95 % interval is above 0"
        assert line["standard_error"] == "" if error is None else float(line["standard_error"]) == pytest.approx(error)


@pytest.mark.parametrize("study", ["measures", "cost"])
def test_no_run_is_left_out_of_the_whole_lists(made, study):
    folder, results, _ = made
    slugs = (f"{study}-{HERE}", f"{study}-cifar100-b5-inc5-resnet32")
    first = "average" if study == "measures" else "training, s"
    assert sum(
        int(line["averaged_over"]) for slug in slugs for line in lines_of(folder, slug) if line["column"] == first
    ) == len(results)


class Tables(html.parser.HTMLParser):
    """The tables of a page: ``{id: [[text of each cell]]}``."""

    def __init__(self, page):
        super().__init__()
        self.tables, self.cell = {}, None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "div" and attrs.get("class") in ("table", "table wide"):
            self.rows = self.tables[attrs["id"]] = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.cell = True
        elif self.cell:
            self.rows[-1][-1] += f"<{tag}>"

    def handle_endtag(self, tag):
        self.cell = None if tag in ("td", "th") else self.cell

    def handle_data(self, data):
        if self.cell:
            self.rows[-1][-1] += data


NAMES = {
    "der": "DER",
    "replay": "Replay",
    "bic": "BiC",
    "wsc": "WSC",
    "icarl": "iCaRL",
    "icarl+wsc": "iCaRL + WSC",
    "finetune": "Finetune",
    "joint": "Joint",
    "wa": "WA",
}


def as_shown(label, corner="method"):
    """A row's name on the page: the method as written in its paper."""
    method, _, rest = label.partition(" ")
    return f"{NAMES[method]} {rest}".strip() if corner == "method" else label


@functools.lru_cache(maxsize=1)
def page_tables(path):
    """``{id: rows of cells}`` of all tables of a page."""
    return Tables(path.read_text()).tables


def printed(folder, slug, form):
    """``{labels: cells as text}`` of one table in one of its forms.
    LaTeX has the paper's numbers in a row of their own.
    """
    if form == "html":
        rows = page_tables(folder / "index.html")[f"table-{slug}"]
    else:
        text = (folder / "tables" / f"{slug}.{form}").read_text()
        row = r"^\| (.*) \|$" if form == "md" else r"^(.*) \\\\(?:\[2pt\])?$"
        rows = [re.split(r" ?& ?" if form == "tex" else r" \| ", line) for line in re.findall(row, text, re.MULTILINE)]
    labels = 3 if slug.startswith(("measures", "cost")) else 1
    found = {}
    for row in rows:
        cleaned = [
            re.sub(r"†|\$\^\\dagger\$|\\(?=[_\[\]])|[{}](?=\[)|(?<=\[)}", "", cell).strip() for cell in row[:labels]
        ]
        if any(cleaned):
            last = found[tuple(cleaned)] = row[labels:]
        elif form == "tex" and "multicolumn" not in " ".join(row):
            last[:] = [f"{own} {paper}" for own, paper in zip(last, row[labels:], strict=True)]
    return found


@pytest.mark.parametrize("form", ["md", "tex", "html"])
@pytest.mark.parametrize("slug", sorted(ALL_TABLES))
def test_every_form_of_a_table_shows_the_same_numbers(made, slug, form):
    rows = printed(made[0], slug, form)
    study = split(slug)[0]
    decimals = 0 if study == "cost" else 2
    labels = 3 if study in ("measures", "cost") else 1
    header = next(
        row
        for label, row in rows.items()
        if label[0] in ("method", "wsc.importance", "wsc.reset", "wsc.reset_every", "wsc.retain")
    )
    for line in lines_of(made[0], slug):
        corner, *_ = line
        label = (as_shown(line[corner], corner), *list(line.values())[1:labels])
        shown = rows[label][header.index(line["column"])]
        numbers = [f"{abs(float(line['mean'])):,.{decimals}f}"] if line["mean"] else []
        if study == "difference":
            assert re.search(r"[+-]", shown)[0] == ("-" if float(line["mean"]) < 0 else "+")
        if line["standard_error"] and line["column"] not in ("training images", "parameters"):
            numbers.append(f"{float(line['standard_error']):,.{decimals}f}")
        if line["paper_mean"]:
            numbers.append(f"{float(line['paper_mean']):.2f}")
            numbers += [f"{float(line['paper_standard_error']):.1f}"] if line["paper_standard_error"] else []
        numbers += [f"{abs(float(line['differs_by'])):.2f}"] if line["differs_by"] else []
        assert re.findall(r"\d[\d,]*(?:\.\d+)?", shown) == numbers
        assert any(bold in shown for bold in ("**", r"\textbf", "<b>")) == (line["best"] == "1")
        assert ("▲" in shown or r"\blacktriangle$" in shown) == (
            line["differs_by"] != "" and float(line["differs_by"]) > 0
        )


# ---- the paper's numbers and the marks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "slug",
    sorted(slug for slug in ALL_TABLES if not slug.startswith(("measures", "cost", "retain-rate", "difference"))),
)
def test_the_papers_number_stands_beside_and_a_difference_that_chance_does_not_explain_is_marked(made, slug):
    study, place, _ = split(slug)
    for line in lines_of(made[0], slug):
        row = next(iter(line.values()))
        theirs = PAPER["tables"][place][study].get(row, {}).get(line["column"], {})
        assert line["paper_mean"] == str(theirs.get("mean", "")) and line["paper_standard_error"] == str(
            theirs.get("se", "")
        )
        apart = None
        if line["standard_error"] and "se" in theirs:
            ours = len(seeds_of(line))
            spreads = float(line["standard_error"]) * math.sqrt(ours), theirs["se"] * math.sqrt(5)
            test = scipy.stats.ttest_ind_from_stats(
                float(line["mean"]), spreads[0], ours, theirs["mean"], spreads[1], 5, equal_var=False
            )
            apart = float(line["mean"]) - theirs["mean"] if test.pvalue < 0.05 else None
        assert line["differs_by"] == "" if apart is None else float(line["differs_by"]) == pytest.approx(apart)


@pytest.mark.parametrize(
    "keys", [{"convnet_options": {"width": 8}}, {"lrate": 0.01}, {"batch_size": 1024}, {"wsc.blend": 1.0}], ids=str
)
def test_runs_with_other_settings_than_the_papers_are_not_marked(keys, tmp_path, undrawn):
    """They have its numbers beside, and a note that names the key."""
    results = [synthetic.result("wsc", classes=100, seed=seed) for seed in (1, 2, 3)]
    for result in results:
        result["config"] |= keys
        result["avg_acc"] = 90.0 + result["config"]["seed"]
    synthetic.write(tmp_path, *results)
    folder = report.write_report(tmp_path).parent
    (line,) = (line for line in lines_of(folder, f"accuracy-{HERE}") if line["column"] == "20")
    assert float(line["paper_mean"]) > 50 and line["differs_by"] == ""
    text = (folder / "tables" / f"accuracy-{HERE}.md").read_text()
    assert (
        f"WSC: other values than the paper's of {next(iter(keys))}, so the paper's numbers are for orientation" in text
    )
    for result in results:
        del result["config"][next(iter(keys))]
    synthetic.write(tmp_path / "usual", *results)
    folder = report.write_report(tmp_path / "usual").parent
    (line,) = (line for line in lines_of(folder, f"accuracy-{HERE}") if line["column"] == "20")
    assert float(line["differs_by"]) == pytest.approx(92 - float(line["paper_mean"]))


@pytest.mark.parametrize("part", [{"max_tasks": 2}, {"classes": list(range(20))}])
def test_runs_on_a_part_of_the_data_have_a_table_of_their_own_without_the_papers_numbers(part, tmp_path, undrawn):
    results = [synthetic.result(classes=20, seed=seed) for seed in (1, 2, 3)]
    for result in results:
        result["config"] |= part
    other = synthetic.result(classes=20, seed=4)
    other["config"] |= {name: 1 if name == "max_tasks" else value[::-1] for name, value in part.items()}
    synthetic.write(tmp_path, *results, other, *(synthetic.result(seed=seed) for seed in (1, 2, 3)))
    folder = report.write_report(tmp_path).parent
    paths = sorted((folder / "tables").glob("accuracy*.csv"))
    lines = [line for path in paths for line in lines_of(folder, path.stem) if line["column"] == "20"]
    assert sorted(line["paper_mean"] for line in lines) == ["", "", "48.63"]
    titles = {path.with_suffix(".md").read_text().splitlines()[0] for path in paths}
    assert len(titles) == 3 and sum(f"{next(iter(part))}=" in title for title in titles) == 2


def test_a_limit_above_the_number_of_tasks_restricts_nothing(tmp_path, undrawn):
    synthetic.write(tmp_path, synthetic.result(max_tasks=11), synthetic.result("wsc"))
    lines = lines_of(report.write_report(tmp_path).parent, f"accuracy-{HERE}")
    assert [line["paper_mean"] for line in lines] == ["48.63", "52.16"]


def test_some_differences_are_marked_and_some_are_not(made):
    marks = {
        line["differs_by"] != ""
        for line in lines_of(made[0], f"accuracy-{HERE}")
        if line["paper_mean"] and line["mean"]
    }
    assert marks == {True, False}


def test_the_papers_numbers_are_the_papers():
    tables = PAPER["tables"]
    assert tables["cifar100-b10-inc10"]["accuracy"]["wsc"]["500"] == {"mean": 78.16, "se": 0.6}
    assert tables["cifar100-b10-inc10"]["accuracy"]["foster"]["40"] == {"mean": 65.58, "se": 1.5}
    assert tables["imagenet100-b10-inc10"]["accuracy"]["bic"]["50"]["mean"] == 65.98
    assert tables["cifar100-b5-inc5"]["accuracy"]["memo"]["200"] == {"mean": 70.14}
    assert tables["cifar100-b10-inc10"]["reset-rule"]["shrink_perturb"]["200"] == {"mean": 70.32}
    assert tables["cifar100-b10-inc10"]["ablation"]["wsc without reset"]["80"] == {"mean": 65.01}


def is_ahead(one, other):
    """Whether the 95 % interval of the paired difference is above 0."""
    difference, error, count = paired(one, other)
    return difference > scipy.stats.t.ppf(0.975, count - 1) * error


@pytest.mark.parametrize(
    "slug", sorted(slug for slug in ALL_TABLES if not slug.startswith(("measures", "cost", "difference")))
)
def test_of_each_column_those_that_no_other_is_ahead_of_are_bold(made, slug):
    columns = {}
    for line in lines_of(made[0], slug):
        columns.setdefault(line["column"], []).append(line)
    for lines in (lines for column, lines in columns.items() if not column.startswith("scoring")):
        seeds = {place: seeds_of(line) for place, line in enumerate(lines) if line["expands"] == "0"}
        seeds = {place: values for place, values in seeds.items() if len(values) > 1}
        behind = {place for place in seeds if any(is_ahead(seeds[other], seeds[place]) for other in seeds)}
        bold_places = seeds.keys() - behind if behind else set()
        for place, line in enumerate(lines):
            assert line["best"] == str(int(place in bold_places)), line
        assert {next(iter(line.values())) for line in lines if line["expands"] == "1"} <= {"der", "foster", "memo"}


def test_expanding_methods_are_marked(made):
    text = (made[0] / "tables" / f"accuracy-{HERE}.md").read_text()
    assert "| DER † |" in text and "Replay †" not in text and "† marks methods whose network grows" in text


def test_a_shorter_schedule_is_said_and_not_compared(tmp_path, undrawn):
    synthetic.write(
        tmp_path / "runs", *(synthetic.result("replay", 20, seed, init_epoch=20, epochs=5) for seed in (1993, 1994))
    )
    folder = report.write_report(tmp_path / "runs").parent
    (line,) = lines_of(folder, f"accuracy-{HERE}")
    assert (line["paper_mean"], line["compared"], line["differs_by"]) == ("48.63", "0", "")
    text = (folder / "tables" / f"accuracy-{HERE}.md").read_text()
    assert (
        "a shorter schedule than the paper's, 20 epochs for the first task and 5 for each later one "
        "(the paper has 200 and 70)" in text
    )
    assert "(48.63 ± 1.1)" in text


# ---- rows ------------------------------------------------------------------------------------------------------------


def rows_of(*results):
    return [line.split("  ")[0].strip() for line in report.result_table(results).splitlines()[2:]]


def test_the_terminals_table_has_the_order_of_the_configuration():
    order = ["wsc", "icarl+wsc", "finetune", "icarl", "a_method_of_ones_own", "der"]
    assert rows_of(*(synthetic.result(name, seed=seed) for seed in (1, 2) for name in order)) == order


def test_a_registered_metric_and_what_a_method_records_are_shown(tmp_path, undrawn):
    """Numbers and means of lists, under the name that the result has; anything else is not."""
    made = [synthetic.result("replay", 20, seed) | {"backward.transfer": -2.0 * seed} for seed in (1, 2)]
    made += [synthetic.result("wsc", 20, seed) | {"units_replaced": [seed, 3], "note": "none"} for seed in (1, 2)]
    synthetic.write(tmp_path, *made)
    folder = report.write_report(tmp_path).parent
    shown = {(line["method"], line["column"]): line["mean"] for line in lines_of(folder, f"further-{HERE}")}
    assert shown == {("replay", "backward.transfer"): "-3.0", ("wsc", "units_replaced"): "2.25"}
    assert "further measures" in (folder / "index.html").read_text()


def test_the_accuracy_on_the_weakest_tenth_is_a_measure_of_the_page_where_runs_have_it(tmp_path, undrawn):
    made = [synthetic.result("replay", 20, seed) | {"weakest_tenth": 1.5 * seed} for seed in (1, 2)]
    synthetic.write(tmp_path, *made, synthetic.result("wsc", 20))
    page = report.write_report(tmp_path)
    lines = [line for line in lines_of(page.parent, f"measures-{HERE}") if line["column"] == "weakest tenth"]
    assert {line["method"]: line["mean"] for line in lines if line["mean"]} == {"replay": "2.25"}
    assert "<th>weakest tenth</th>" in re.sub("<th [^>]*>", "<th>", page.read_text())


def test_runs_that_differ_in_another_key_are_rows_of_their_own_with_as_few_keys_as_tell_them_apart():
    short = {"init_epoch": 20, "init_milestones": [5], "epochs": 5, "milestones": [2]}
    assert rows_of(synthetic.result("replay"), synthetic.result("replay", **short)) == [
        "replay init_epoch=200",
        "replay init_epoch=20",
    ]


def test_runs_with_other_options_of_the_backbone_are_rows_of_their_own():
    made = [synthetic.result(seed=seed, **keys) for keys in ({}, {"convnet_options__width": 4}) for seed in (1, 2)]
    assert rows_of(*made) == ["replay", "replay convnet_options.width=4"]
    kept, problems = duplicates.distinct(duplicates.variants(Record.of(result) for result in made))
    assert (len(kept), problems) == (4, [])


def test_methods_with_other_options_of_the_backbone_are_not_compared():
    narrow = {"convnet_options__width": 4}
    made = [synthetic.result(method, **keys) for keys in ({}, narrow) for method in ("replay", "icarl")]
    (found, _) = groups.group_runs([Record.of(result) for result in made])
    assert [{record.config.get("convnet_options.width") for record in group.records} for group in found] == [
        {None},
        {4},
    ]
    ((apart,), _) = groups.group_runs([Record.of(made[0]), Record.of(made[3])])
    assert sorted(apart.variants_of) == ["icarl", "replay"]  # each by itself


def test_what_the_papers_method_has_goes_without_saying():
    made = [synthetic.result("wsc", 20, **keys) for keys in ({}, {"wsc__reset": "revert"}, {"wsc__retain": 0.5})]
    ((group,), _) = groups.group_runs([Record.of(result) for result in made])
    assert list(group.named(group.rows)["method"]) == ["wsc", "wsc wsc.reset=revert", "wsc wsc.retain=0.5"]


def test_a_minus_sign_in_latex_is_no_hyphen(tmp_path, undrawn):
    averages = {("replay", 20): 50.0, ("replay", 200): 60.0, ("a-b", 20): 47.5}
    made = [synthetic.result(name, memory) | {"avg_acc": value} for (name, memory), value in averages.items()]
    synthetic.write(tmp_path, *made)
    folder = report.write_report(tmp_path).parent
    assert "a-b & $-$2.50 & -- \\\\" in (folder / "tables" / f"difference-{HERE}.tex").read_text()


def test_places_and_seeds_make_no_rows():
    assert rows_of(
        synthetic.result(seed=1), synthetic.result(seed=2, prefix="other", device="cpu", num_workers=9, memory_size=7)
    ) == ["replay"]


def test_time_that_a_run_was_spared_has_a_column_of_its_own(tmp_path, undrawn):
    spared = synthetic.result() | {"train_seconds_spent": 12.0}
    synthetic.write(tmp_path, spared, synthetic.result("wsc"))
    lines = lines_of(report.write_report(tmp_path).parent, f"cost-{HERE}")
    assert [line["mean"] for line in lines if line["column"] == "training in this run, s"] == ["12.0"]


def test_the_median_and_the_worst_trial_are_those_of_no_seed(tmp_path, undrawn):
    runs = [synthetic.result("replay", 20, 7, validation_split=0.1, lrate=rate) for rate in (0.1, 0.2, 0.3)]
    synthetic.write(tmp_path, *runs)
    report.write_report(tmp_path)
    (path,) = (tmp_path / "report" / "tables").glob("tuning-*.csv")
    lines = {line["column"]: line for line in lines_of(tmp_path / "report", path.stem)}
    averages = sorted(run["avg_acc"] for run in runs)
    assert [float(lines[name]["mean"]) for name in ("worst trial", "median of the trials", "best trial")] == averages
    assert {name: seeds_of(line) for name, line in lines.items()} == {
        "best trial": {7: averages[-1]},
        "median of the trials": {},
        "worst trial": {},
    }


def test_settings_have_tables_of_their_own():
    text = report.result_table([synthetic.result(), synthetic.result(dataset="digits", convnet_type="resnet8")])
    assert "CIFAR-100, 10 tasks of 10 classes, resnet32" in text and "Digits, 10 tasks of 10 classes, resnet8" in text


def test_a_sweep_with_one_unusual_value_still_has_its_main_table(tmp_path, undrawn):
    synthetic.write(tmp_path, synthetic.result("replay"), synthetic.result("wsc", wsc__retain=0.5))
    lines = lines_of(report.write_report(tmp_path).parent, f"accuracy-{HERE}")
    assert [(line["method"], line["paper_mean"]) for line in lines] == [("replay", "48.63"), ("wsc wsc.retain=0.5", "")]
