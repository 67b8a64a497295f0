"""The report of language models: numbers equal the results, with the paper's beside them."""

import csv
import json
import re
from itertools import combinations

import pytest
from matplotlib.text import Text
from support import synthetic
from support.odd_names import ODD

from pycil_wsc import report
from pycil_wsc.errors import UnusableRun
from pycil_wsc.llm.config import METHODS
from pycil_wsc.report.figures.plots import figures
from pycil_wsc.report.figures.style import line_styles
from pycil_wsc.report.groups import group_runs
from pycil_wsc.results import Found, Record

TASKS = ["C-STANCE", "FOMC", "MeetingBank", "Py150", "ScienceQA", "NumGLUE-cm", "NumGLUE-ds", "20Minuten"]


def with_summaries(matrix):
    """The scores of one version of the metrics: after each task, the mean and the backward transfer."""
    op = [sum(row) / len(row) for row in matrix]
    bwt = [sum(now - learned[-1] for now, learned in zip(row, matrix)) / len(row) for row in matrix]
    return {"matrix": matrix, "last_average": op[-1], "op": op, "bwt": bwt}


def made_up(method="wsc", ratio=0.2, seed=1, tasks=TASKS, model="meta-llama/Llama-3.2-1B-Instruct", **changes):
    """A result with the last row's scores .1, .2, ... and ``seed`` hundredths more."""
    matrix = [[round(0.1 * (i + 1) + 0.01 * seed, 4) for i in range(t + 1)] for t in range(len(tasks))]
    scores = with_summaries(matrix) | {"new_score": 0.5, "forgetting": 0.125}
    return {
        "kind": "llm",
        "config": {
            "llm.method": method,
            "llm.replay_ratio": ratio,
            "llm.data": "trace/1000",
            "llm.model": model,
            "seed": seed,
        },
        "tasks": tasks,
        "avg_score": scores["last_average"],
        "scores": {"trace": scores, "fixed": scores | {"forgetting": 0.25}},
        "trivial": {version: {"FOMC": {"majority": 0.494}} for version in ("trace", "fixed")},
        "warnings": ["FOMC: eval and test hold the same prompts"],
        "train_minutes": 10.0 * seed,
        "relative_vram_minutes": 20.0 * seed,
        "relative_vram_minutes_streamed": 20.0 * seed,
        "models_resident": 2,
        "models_resident_streamed": 2,
        "peak_memory_bytes": 2**30,
        "tokens_trained": 12345,
        "tokens_per_second": 100.0,
        "padding": 0.05,
    } | changes


def write(folder, *results):
    for number, result in enumerate(results):
        place = folder / str(number)
        place.mkdir(parents=True)
        (place / "result.json").write_text(json.dumps(result))
        (place / "metrics.jsonl").write_text(json.dumps({"task": 0, "trace": [0.5]}) + "\n")


def rows(path):
    return {(row["method"], row["memory"], row["column"]): row for row in csv.DictReader(path.open())}


def test_runs_with_adapters_are_named_by_their_rank_and_not_by_the_rate_that_goes_with_it():
    full, adapted = made_up(), made_up()
    full["config"] |= {"llm.lr": 1e-4, "llm.lora_rank": 0}
    adapted["config"] |= {"llm.lr": 1e-3, "llm.lora_rank": 8}
    ((group,), _) = group_runs([Record.of(full), Record.of(adapted)])
    (plot, *_) = figures(group)
    labels = " ".join(text.get_text() for text in plot.figure.findobj(Text))
    assert "llm.lora_rank=8" in labels and "llm.lr" not in labels


@pytest.mark.slow
def test_a_task_may_have_the_name_of_another_column_of_the_report(tmp_path):
    tasks = ["forgetting", "average", "average (task)", "minutes", "overall", "name", "memory", "time", "value"]
    report.write_report(tmp_path, out=tmp_path / "out", runs=Found(language=[Record.of(made_up(tasks=tasks))]))
    page = (tmp_path / "out" / "index.html").read_text()
    assert "failed" not in page.lower()
    (path,) = (tmp_path / "out" / "tables").glob("scores-trace-*.csv")
    means = {column: float(row["mean"]) for (_, _, column), row in rows(path).items()}
    shown = ["forgetting (task)", "average (task)", "average (task) (task)", "minutes (task)", *tasks[4:]]
    assert [means[name] for name in shown] == pytest.approx([10 * number + 1 for number in range(1, 10)])
    assert means["forgetting"] == pytest.approx(12.5)


def test_no_two_methods_of_language_models_look_alike():
    styles = line_styles({name: name for name in METHODS}).values()
    assert len({(style["color"], style["marker"]) for style in styles}) == len(METHODS)


def test_the_table_has_the_results_numbers_and_the_papers_beside_them(tmp_path, undrawn):
    write(tmp_path, *(made_up(seed=seed) for seed in (1, 2, 3)), made_up("finetune", 0.0, 1))
    report.write_report(tmp_path)
    (path,) = (tmp_path / "report" / "tables").glob("scores-trace-*.csv")
    cell = rows(path)["wsc", "20", "FOMC"]
    assert (float(cell["mean"]), cell["averaged_over"]) == (pytest.approx(22), "3") and float(
        cell["standard_error"]
    ) == pytest.approx(1 / 3**0.5)
    assert (float(cell["paper_mean"]), float(cell["paper_standard_error"])) == (13, 3), "0.13 +- 0.03 in the paper"
    assert (
        float(rows(path)["wsc", "20", "average"]["paper_mean"]) == 38
        and float(rows(path)["finetune", "0", "NumGLUE-ds"]["paper_mean"]) == 51
    )
    assert (
        float(rows(path)["wsc", "20", "forgetting"]["mean"]) == 12.5
        and rows(path)["wsc", "20", "forgetting"]["paper_mean"] == ""
    )
    (fixed,) = (tmp_path / "report" / "tables").glob("scores-fixed-*.csv")
    assert float(rows(fixed)["wsc", "20", "forgetting"]["mean"]) == 25 and not any(
        row["paper_mean"] for row in rows(fixed).values()
    )
    (cost,) = (tmp_path / "report" / "tables").glob("cost-*.csv")
    assert (
        float(rows(cost)["wsc", "20", "peak memory (MiB)"]["mean"]) == 1024
        and float(rows(cost)["wsc", "20", "padding (%)"]["mean"]) == 5
    )


def test_scores_after_each_task_with_overall_performance_and_backward_transfer(tmp_path, undrawn):
    matrix = [[0.5], [0.25, 0.75], [0.0, 0.5, 1.0]]
    result = made_up(tasks=TASKS[:3])
    result["scores"] = dict.fromkeys(("trace", "fixed"), with_summaries(matrix) | {"new_score": 0.5, "forgetting": 0.0})
    write(tmp_path, result)
    report.write_report(tmp_path)
    (path,) = (tmp_path / "report" / "tables").glob("stages-*.csv")
    table = {(row["after task"], row["column"]): float(row["mean"]) for row in csv.DictReader(path.open())}
    assert table["2 FOMC", "C-STANCE"] == 25 and ("1 C-STANCE", "FOMC") not in table
    assert [table[stage, "overall"] for stage in ("1 C-STANCE", "2 FOMC", "3 MeetingBank")] == [50, 50, 50]
    assert [table[stage, "backward transfer"] for stage in ("1 C-STANCE", "2 FOMC", "3 MeetingBank")] == [0, -12.5, -25]
    for version in ("trace", "fixed"):
        (path,) = (tmp_path / "report" / "tables").glob(f"scores-{version}-*.csv")
        assert float(rows(path)["wsc", "20", "backward transfer"]["mean"]) == -25
    assert "backward transfer" in report.result_table([result])


@pytest.mark.parametrize("spread, name", [("se", "standard error"), ("sd", "standard deviation")])
def test_every_table_says_what_the_spread_is_and_over_how_many_seeds(spread, name, tmp_path, undrawn):
    write(tmp_path, *(made_up(seed=seed) for seed in (1, 2, 3)))
    report.write_report(tmp_path, options=report.Options(spread=spread))
    texts = {path.name: path.read_text() for path in (tmp_path / "report" / "tables").glob("*.md")}
    assert len(texts) == 4 and all(f"Mean ± {name} over 3 seeds." in text for text in texts.values())
    papers = [file for file, text in texts.items() if "The paper's values, with ± standard error, are in" in text]
    assert len(papers) == 1 and papers[0].startswith("scores-trace-")


def test_the_table_that_a_sweep_prints_says_what_the_spread_is_and_over_how_many_seeds():
    results = [made_up(seed=seed) for seed in (1, 2)]
    assert report.result_table(results).endswith("\nMean ± standard error over 2 seeds.")
    assert report.result_table(results[:1]).endswith("\nOne seed: an indication only; there is no standard error.")


@pytest.mark.parametrize("changes", [{"model": "tiny-llama"}, {"tasks": TASKS[:3]}])
def test_other_models_and_tasks_have_no_numbers_of_the_paper_beside_them(changes, tmp_path, undrawn):
    write(tmp_path, made_up(**changes))
    report.write_report(tmp_path)
    (path,) = (tmp_path / "report" / "tables").glob("scores-trace-*.csv")
    assert not any(row["paper_mean"] for row in rows(path).values())


@pytest.mark.slow
def test_the_page_has_tables_figures_traps_and_trivial_answers(tmp_path, unrendered):
    write(tmp_path, *(made_up(method, ratio) for method in ("replay", "wsc") for ratio in (0.2, 0.8)))
    page = report.write_report(tmp_path).read_text()
    for text in (
        "trace/1000, 8 tasks",
        "Average score after each task",
        "Average score against memory",
        "Relative VRAM usage against memory",
        "Scores of trivial answers, without a model (%): FOMC: majority 49.4",
        "eval and test hold the same prompts",
    ):
        assert text in page
    assert {path.suffix for path in (tmp_path / "report" / "figures").iterdir()} == {
        ".svg",
        ".pdf",
        ".png",
    } and "another version" not in page
    names = {path.name.partition("-trace-1000")[0] for path in (tmp_path / "report" / "figures").glob("*.svg")}
    assert names == {"curves", "score-memory", "vram-memory"}


def test_titles_of_panels_and_the_legend_do_not_overlap():
    from pycil_wsc.report.figures.style import drawing

    runs = [Record.of(made_up(method, ratio)) for method in ("finetune", "avg_offline") for ratio in (0.0, 0.2)]
    ((group,), _) = group_runs(runs)
    with drawing():
        curves = next(iter(figures(group))).figure
        curves.draw_without_rendering()
        texts = [axes._left_title for axes in curves.axes] + curves.legends  # the position of titles in this style
        boxes = [text.get_window_extent() for text in texts]
        assert [text.get_text().split()[0] for text in texts[:2]] == ["0", "20"]
        assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]


def test_settings_that_differ_have_rows_of_their_own():
    plain, other = made_up(), made_up()
    other["config"] |= {"wsc.covers": "all"}
    plain["config"] |= {"wsc.covers": "replay"}
    text = report.result_table([plain, other])
    assert "wsc wsc.covers=replay 20" in text and "wsc wsc.covers=all 20" in text


def test_runs_with_the_tasks_in_another_order_have_tables_of_their_own(tmp_path, undrawn):
    write(tmp_path, made_up(tasks=TASKS[:3]), made_up(tasks=TASKS[1:4], seed=2))
    page = report.write_report(tmp_path).read_text()
    paths = list((tmp_path / "report" / "tables").glob("scores-trace-*.csv"))
    assert sorted(min(row["column"] for row in csv.DictReader(path.open())) for path in paths) == ["C-STANCE", "FOMC"]
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_data_of_another_content_have_tables_of_their_own():
    def of(seed, content):
        known = {"data": {"train": 8000, "test": 400, "sha256": content}} if content else {}
        return Record.of(made_up(seed=seed, **known))

    slugs = [group.slug for group in group_runs([of(1, "a" * 16), of(2, "b" * 16)])[0]]
    assert len(slugs) == len(set(slugs)) == 2
    (group,), _ = group_runs([of(1, "a" * 16), of(2, "a" * 16), of(3, "")])
    assert len(group.records) == 3, "an older record joins the known content"


def test_images_and_language_models_have_tables_of_their_own():
    images = synthetic.result()
    text = report.result_table([images, made_up()])
    assert "Average accuracy" in text and "Scores after the last task" in text
    assert "Scores" not in report.result_table([images]) and "accuracy" not in report.result_table([made_up()])


@pytest.mark.slow
@pytest.mark.parametrize("part", ["result", "config"])
def test_no_odd_value_in_a_result_stops_the_report(part, tmp_path, undrawn):
    whole = made_up()
    places = [(key, value) for key in (whole if part == "result" else whole["config"]) for value in ODD]
    results = [made_up(seed=seed) for seed in range(2, len(places) + 2)]
    for result, (key, value) in zip(results, places):
        (result if part == "result" else result["config"])[key] = value
    write(tmp_path, whole, *results)
    page = report.write_report(tmp_path).read_text()
    assert '<th class="label" scope="row">WSC</th>' in page and "is a result of another version" in page
    assert "Failed tables and figures" not in page


@pytest.mark.parametrize(
    "changes",
    [{"scores": {}}, {"avg_score": "high"}, {"tasks": TASKS[:2]}, {"config": {}}, {"peak_memory_bytes": None}],
)
def test_a_result_that_is_not_whole_is_named_and_left_out(changes, tmp_path, undrawn):
    write(tmp_path, made_up(), made_up(seed=2) | changes)
    assert "another version" in report.write_report(tmp_path).read_text()
    with pytest.raises(UnusableRun, match="another version"):
        report.read_result(tmp_path / "1" / "result.json")
    assert report.read_result(tmp_path / "0" / "result.json") == made_up()
