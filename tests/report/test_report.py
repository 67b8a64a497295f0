"""The report's page and figures; unusable files are listed, skipped and left unchanged."""

import json
import math
import re
from unittest.mock import patch
from xml.etree import ElementTree

import numpy as np
import pytest
from support import fresh, synthetic
from support.odd_names import ODD
from support.synthetic import HERE, lines_of

from pycil_wsc import report
from pycil_wsc.data.data_options import ALL
from pycil_wsc.errors import UnusableRun
from pycil_wsc.report import __main__ as command
from pycil_wsc.report.groups import Options, group_runs
from pycil_wsc.results import Record

# ---- the page and the figures ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """The folder of a report with some of its figures, lines and maps, in all their formats, written once."""
    from pycil_wsc.report import page

    def some(group):
        return (plot for plot in figures(group) if plot.slug in ("curves", "matrix-m20", "confusion-m20"))

    figures = page.figures
    folder = tmp_path_factory.mktemp("runs")
    made = [synthetic.result(name, 20, seed, classes=20, confusion=True) for name in ("der", "wsc") for seed in (1, 2)]
    synthetic.write(folder, *made)
    with patch.object(page, "figures", some):
        return report.write_report(folder).parent


@pytest.mark.slow
def test_the_page_stands_alone(rendered):
    page = (rendered / "index.html").read_text()
    addresses = re.findall(r"""(?:src|srcset|href)\s*=\s*["']([^"']*)""", page) + re.findall(r"url\(([^)]*)\)", page)
    assert addresses and not [
        address
        for address in addresses
        if not address.startswith(("#", "tables/", "figures/", "configs/", "data:image/svg+xml;base64,"))
    ]
    assert not re.search(r"<script|<link|@import|<iframe|<object", page)
    assert not re.search(r"https?://(?!www\.w3\.org/)", page)
    for address in addresses:
        if address.startswith(("tables/", "figures/", "configs/")):
            assert (rendered / address).stat().st_size > 0


def test_names_inside_the_page_do_not_clash_and_references_are_met(rendered):
    page = (rendered / "index.html").read_text()
    defined = re.findall(r'\bid="([^"]+)"', page)
    used = set(re.findall(r'href="#([^"]+)"', page) + re.findall(r"url\(#([^)]+)\)", page))
    assert len(defined) == len(set(defined)) and used <= set(defined)


@pytest.mark.slow
def test_missing_runs_are_named(tmp_path, unrendered):
    results = synthetic.main_table(seeds=(1, 2, 3), memories=(20, 40), methods=("replay", "wa", "wsc"))
    gone = {("wa", 40, 1), ("wa", 40, 2), ("wa", 40, 3), ("wsc", 20, 3)}
    synthetic.write(
        tmp_path,
        *(
            r
            for r in results
            if (r["config"]["model_name"], r["config"]["memory_per_class"], r["config"]["seed"]) not in gone
        ),
    )
    page = report.write_report(tmp_path)
    sentence = "Missing: WA at 40; WSC at 20 (1 of 3 seeds)."
    assert sentence in (page.parent / "tables" / f"accuracy-{HERE}.md").read_text()
    assert sentence in page.read_text()


@pytest.mark.parametrize("seeds, runs", [([1993], "1 run"), ([1993, 1994], "2 runs")])
def test_one_run_is_not_many(seeds, runs, tmp_path, undrawn):
    synthetic.write(tmp_path, *(synthetic.result(seed=seed) for seed in seeds))
    page = report.write_report(tmp_path).read_text()
    assert f"{runs.replace(' ', ' finished ')} of 1 method<" in page  # the lead
    assert f"</a>: {runs}</li>" in page  # the list of settings
    assert f"<li>{runs}: " in page  # what they ran on


def test_seeds_that_several_methods_lack_are_each_ones_own(tmp_path, undrawn):
    results = synthetic.main_table(seeds=(1, 2), memories=(10, 20), methods=("replay", "wa", "wsc"))
    gone = [("wsc", 10, 2), ("wa", 10, 2), ("wa", 20, 2)]
    kept = [
        r
        for r in results
        if (r["config"]["model_name"], r["config"]["memory_per_class"], r["config"]["seed"]) not in gone
    ]
    synthetic.write(tmp_path, *kept)
    text = (report.write_report(tmp_path).parent / "tables" / f"accuracy-{HERE}.md").read_text()
    assert "Missing: WA at 10 (1 of 2 seeds), 20 (1 of 2 seeds); WSC at 10 (1 of 2 seeds)." in text


def test_a_run_counts_as_begun_before_its_first_task_has_ended(tmp_path, undrawn):
    synthetic.write(tmp_path / "done", synthetic.result())
    for name, file in (("begun", "log.txt"), ("one", "metrics.jsonl")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(json.dumps({"task": 0, "cnn_top1": 1.0}) + "\n" if name == "one" else "")
    (tmp_path / "waiting").mkdir()
    page = report.write_report(tmp_path).read_text()
    assert "2 runs begun and not finished</a>; runs that have not begun are not counted" in page
    assert "begun</code>: 0 tasks done" in page and "one</code>: 1 task done" in page


def test_a_small_spread_is_not_shown_as_none_and_one_thread_is_one(tmp_path, undrawn):
    made = [
        synthetic.result(seed=seed) | {"train_seconds": 9 + 0.1 * seed, "device": "CPU, 1 threads"} for seed in (1, 2)
    ]
    synthetic.write(tmp_path, *made, synthetic.result(seed=3) | {"train_seconds": 9.3, "device": "CPU, 1 thread"})
    page = report.write_report(tmp_path).read_text()
    assert ">9.2 ± 0.1<" in page and "measured on CPU, 1 thread." in page and "1 threads" not in page


def test_nothing_is_said_of_tables_and_figures_that_nobody_asked_for(tmp_path, undrawn):
    synthetic.write(tmp_path, synthetic.result("replay", 20))
    text = report.write_report(tmp_path).read_text().partition("</style>")[2]
    assert not re.search("no run|foster|importance|confusion", text, re.IGNORECASE)


def drawn(*results):
    """``{slug: axes}`` of the figures of some results of one setting."""
    from pycil_wsc.report.figures.plots import figures

    ((group,), _) = group_runs([Record.of(result) for result in results])
    return {plot.slug: plot.figure.axes for plot in figures(group)}


def test_the_figures_show_the_means_over_the_seeds():
    results = [
        synthetic.result("replay", memory, seed, confusion=True, classes=20) for memory in (20, 200) for seed in (1, 2)
    ]
    plots, few = drawn(*results), results[:2]

    def mean(read, of=few):
        return np.mean([read(result) for result in of], axis=0)

    for slug, key in (
        ("accuracy-memory", "avg_acc"),
        ("forgetting-memory", "forgetting"),
        ("new-task-memory", "new_acc"),
    ):
        (line, *_) = plots[slug][0].lines
        assert list(line.get_xdata(orig=False)) == [20, 200]
        np.testing.assert_allclose(
            line.get_ydata(orig=False), [mean(lambda r: r[key]), mean(lambda r: r[key], results[2:])]
        )
    np.testing.assert_allclose(plots["curves"][0].lines[0].get_ydata(orig=False), mean(lambda r: r["curve"]))
    np.testing.assert_allclose(
        plots["training-loss"][0].lines[0].get_ydata(orig=False), mean(lambda r: np.concatenate(r["train_loss"]))
    )
    shown = plots["matrix-m20"][0].images[0].get_array().filled(np.nan)
    np.testing.assert_allclose(shown[np.tril_indices(2)], mean(lambda r: np.concatenate(r["matrix"])))
    shares = [np.array(r["confusion"]) / np.sum(r["confusion"], axis=1, keepdims=True) for r in few]
    np.testing.assert_allclose(plots["confusion-m20"][0].images[0].get_array(), 100 * np.mean(shares, axis=0))
    seconds = mean(lambda r: r["train_seconds"])
    assert plots["accuracy-time"][0].lines[0].get_xdata(orig=False)[0] * {"seconds": 1, "minutes": 60, "hours": 3600}[
        unit_of(plots["accuracy-time"][0].get_xlabel())
    ] == pytest.approx(seconds)


def test_confusion_matrices_of_runs_with_other_class_orders_are_averaged_by_class():
    """Two runs that confuse no classes but 3 with 0, learned in different orders."""
    from pycil_wsc.report.figures.heat_maps import confusion_maps
    from pycil_wsc.report.figures.series import Series

    def axes_of(*results):
        ((group,), _) = group_runs([Record.of(result) for result in results])
        (plot,) = confusion_maps(Series(group))
        return plot.figure.axes[0]

    made, orders = [], ([3, 1, 0, 2], [0, 2, 3, 1])
    for seed, order in enumerate(orders, 1):
        by_class = np.diag([10.0] * 4)
        by_class[3] = [4 * seed, 0, 0, 10 - 4 * seed]
        result = synthetic.result("replay", 20, seed, classes=4, increment=2, class_names=None)
        result |= {"class_order": order, "class_names": [f"c{label}" for label in order]}
        made.append(result | {"confusion": by_class[np.ix_(order, order)].tolist()})
    axes = axes_of(*made)
    expected = np.diag([100.0] * 4)
    expected[3] = [60, 0, 0, 40]
    np.testing.assert_allclose(axes.images[0].get_array(), expected)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["c0", "c1", "c2", "c3"]
    assert axes.get_ylabel() == "true class (sorted by label)"
    assert axes_of(made[0]).get_ylabel() == "true class (learning order)"


def test_runs_with_uneven_tasks_are_compared_with_those_that_have_the_same_ones():
    tasks = [[], [4, 6], [4, 6], [6, 4]]
    results = [synthetic.result(classes=10, increment=5, seed=seed, increments=each) for seed, each in enumerate(tasks)]
    found, _ = group_runs([Record.of(result) for result in results])
    titles = {group.title.partition(", resnet32")[0]: len(group.records) for group in found}
    assert titles == {
        "CIFAR-100, 2 tasks of 5 classes": 1,
        "CIFAR-100, 2 tasks of 4, 6 classes": 2,
        "CIFAR-100, 2 tasks of 6, 4 classes": 1,
    }


def test_a_memory_of_all_images_has_a_place_of_its_own_beside_the_numbers():
    results = [synthetic.result("replay", memory, classes=20, max_tasks=2) for memory in (20, 200, ALL)]
    plots = drawn(*results)
    axes = plots["accuracy-memory"][0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["20", "200", "all"]
    assert list(axes.lines[0].get_xdata(orig=False)) == list(axes.get_xticks()) == [20, 200, 400]
    assert plots["curves"][2].get_title(loc="left") + plots["curves"][2].get_title() == "all exemplars per class"
    assert "matrix-mall" in plots


def test_a_curve_is_a_mean_over_the_same_seeds_everywhere():
    """Seeds of a budget in seconds differ in their epochs: the line is where they meet, at the ends of tasks."""
    short, long = (synthetic.result("replay", 20, seed, classes=20, losses=seed) for seed in (2, 3))
    (line,) = drawn(short, long)["training-loss"][0].lines
    assert list(line.get_xdata(orig=False)) == [1, 2]
    ends = np.mean([[losses[-1] for losses in result["train_loss"]] for result in (short, long)], axis=0)
    np.testing.assert_allclose(line.get_ydata(orig=False), ends)


@pytest.mark.parametrize("slug", ["training-loss", "dormant"])
def test_the_notes_of_a_figure_count_the_runs_that_recorded_what_it_shows(slug):
    from pycil_wsc.report.figures.plots import figures

    records = [Record.of(synthetic.result("replay", 20, seed, classes=20)) for seed in range(5)]
    records[0].analyses.extend({"task": t, "share_new": 1.0, "dormant": {"share": 0.1}} for t in range(2))
    for record in records[1:]:
        del record.data["train_loss"]
    ((group,), _) = group_runs(records)
    notes = {plot.slug: plot.notes[0] for plot in figures(group)}
    assert notes[slug] == "One seed." and notes["curves"] == "Means over 5 seeds; bands: ± standard error."


def unit_of(text):
    return re.search(r"\((.+)\)", text)[1]


def over_retain_rate(*results, spread="se"):
    """The figure of the retain rate of some results of one setting."""
    from pycil_wsc.report.figures.plots import retain_rates
    from pycil_wsc.report.figures.series import Series

    ((group,), _) = group_runs([Record.of(result) for result in results], Options(spread=spread))
    (plot,) = retain_rates(Series(group))
    return plot


def test_a_retain_rate_is_drawn_over_percent_with_a_line_for_each_memory_size():
    results = [synthetic.result("wsc", memory, wsc__retain=rate) for memory in (20, 200) for rate in (0.1, 0.2, 1)]
    (axes,) = over_retain_rate(*results).figure.axes
    lines = [line for line in axes.lines if len(line.get_xdata(orig=False)) == 3]
    assert [list(line.get_xdata(orig=False)) for line in lines] == [[10, 20, 100]] * 2
    np.testing.assert_allclose(
        [line.get_ydata(orig=False) for line in lines], np.reshape([result["avg_acc"] for result in results], (2, 3))
    )


def test_runs_that_differ_in_another_key_are_other_lines_over_the_retain_rate():
    """Runs of a single rate draw no line, so their keys are not in the others' names."""
    results = [
        synthetic.result("wsc", 20, seed, wsc__retain=rate, wsc__blend=blend)
        for seed in (1, 2)
        for rate in (0.2, 1)
        for blend in (0.25, 0.5)
    ]
    other = synthetic.result("wsc", 20, 1, wsc__blend=0.75)
    (axes,) = over_retain_rate(*results, other).figure.axes
    lines = [line for line in axes.lines if len(line.get_xdata(orig=False)) == 2]
    means = np.mean(np.reshape([result["avg_acc"] for result in results], (2, 2, 2)), axis=0)
    np.testing.assert_allclose([line.get_ydata(orig=False) for line in lines], means.T)
    assert len({line.get_marker() for line in lines}) == 2
    (legend,) = axes.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["20\n  wsc.blend=0.25", "20\n  wsc.blend=0.5"]
    (few,) = over_retain_rate(*results[::2], other).figure.legends
    assert [text.get_text() for text in few.get_texts()] == ["20"]


@pytest.mark.parametrize("spread, half, name", [("se", 1, "standard error"), ("sd", 2**0.5, "standard deviation")])
def test_error_bars_over_the_retain_rate_show_the_chosen_spread(spread, half, name):
    made = [
        synthetic.result("wsc", 20, seed, wsc__retain=rate) | {"avg_acc": 50.0 + 2 * seed}
        for seed in (1, 2)
        for rate in (0.2, 1)
    ]
    plot = over_retain_rate(*made, spread=spread)
    (bars,) = plot.figure.axes[0].collections
    assert [upper - lower for (_, lower), (_, upper) in bars.get_segments()] == pytest.approx([2 * half] * 2)
    assert plot.notes == [f"Error bars: ± {name}."]


@pytest.mark.slow
def test_axes_are_labelled_and_measured_quantities_have_units(made):
    plain = {"task", "after task", "classes of task", "tasks learned", "exemplars per class"}
    for figure, labels in made[2].items():
        assert len(labels) >= 2 and all(unit_of(label) for label in labels - plain), figure


def test_the_runs_of_all_studies_fill_all_figures(made):
    plots = "accuracy-time accuracy-memory forgetting-memory new-task-memory time-memory".split()
    plots += "retain-rate curves training-loss cost".split()
    plots += [f"matrix-m{memory}" for memory in (0, 20, 200)] + ["confusion-m20"]
    names = {path.name for path in (made[0] / "figures").iterdir()}
    assert {f"{plot}-{HERE}.{suffix}" for plot in plots for suffix in ("svg", "pdf", "png")} <= names


def test_figures_are_svg_pdf_and_png_of_300_dots_per_inch(rendered):
    paths = list((rendered / "figures").iterdir())
    assert {path.suffix for path in paths} == {".svg", ".pdf", ".png"}
    for path in paths:
        content = path.read_bytes()
        if path.suffix == ".png":
            place = content.index(b"pHYs") + 4
            dots_per_metre = int.from_bytes(content[place : place + 4], "big")
            assert content.startswith(b"\x89PNG") and dots_per_metre == round(300 / 0.0254)
        elif path.suffix == ".pdf":
            assert content.startswith(b"%PDF") and b"/Type3" not in content
        else:
            ElementTree.fromstring(content)


def test_a_figure_is_saved_with_all_digits_of_its_factors_and_two_of_its_positions(rendered):
    """matplotlib draws the outlines of letters at 1/64 of their size: 0.01 would be 64 % of it."""
    for path in (rendered / "figures").glob("*.svg"):
        letters = ElementTree.parse(path).getroot().iterfind(".//{*}defs/{*}path[@transform]")
        assert {letter.get("transform") for letter in letters} == {"scale(0.015625)"}
        content = path.read_text()
        assert "scale(0.085 -0.085)" in content  # tick labels of 8.5 points
        assert not re.search(r'translate\([^)]*\.\d{3}| [dxy]="[^"]*\.\d{3}', content)


@pytest.mark.slow
def test_of_many_settings_those_with_the_most_runs_have_figures(tmp_path, monkeypatch):
    results = [synthetic.result(name, 20, losses=1, lrate=rate) for name in ("replay", "wsc") for rate in (0.1, 0.2)]
    results += [synthetic.result("wa", 20, losses=1, lrate=0.2), synthetic.result("wa", 20, losses=1, init_cls=50)]
    synthetic.write(tmp_path, *results)
    calls = []
    monkeypatch.setattr("pycil_wsc.report.page.DRAWN", 2)
    monkeypatch.setattr("pycil_wsc.report.page.figures", lambda group: calls.append(group.slug) or ())
    page = report.write_report(tmp_path).read_text()
    assert sorted(calls) == [f"{HERE}-lrate0.1", f"{HERE}-lrate0.2"]
    assert page.count("Not drawn: the figures of this section, because other sections have more runs.") == 1
    calls.clear()
    page = report.write_report(tmp_path, options=report.Options(all_figures=True)).read_text()
    assert len(calls) == 3 and "Not drawn" not in page


@pytest.mark.slow
def test_methods_without_memory_stand_beside_those_of_a_single_memory_size():
    """A row each, not lines through one point."""
    results = [synthetic.result("finetune", 0), synthetic.result("replay", 20), synthetic.result("wsc", 20)]
    results += [synthetic.result("wsc", 0)]
    plots = drawn(*results)
    assert not [slug for slug in plots if slug.endswith("-memory")]
    shown = sorted(line.get_xdata()[0] for line in plots["methods"][0].lines)
    np.testing.assert_allclose(shown, sorted(result["avg_acc"] for result in results))


def test_of_many_memory_sizes_the_smallest_and_the_largest_have_maps_and_the_others_are_named():
    from pycil_wsc.report.figures.heat_maps import matrix_maps
    from pycil_wsc.report.figures.series import Series

    results = [Record.of(synthetic.result("replay", memory, classes=20)) for memory in (20, 40, 60, 80, 1000)]
    plots = list(matrix_maps(Series(group_runs(results)[0][0])))
    assert [plot.slug for plot in plots] == ["matrix-m20", "matrix-m1000"]
    assert plots[0].notes[-1] == "Not drawn: 40, 60, 80 exemplars per class; --all-figures draws them."
    every = list(matrix_maps(Series(group_runs(results, report.Options(all_figures=True))[0][0])))
    four = list(matrix_maps(Series(group_runs(results[:4])[0][0])))
    assert (len(every), len(four)) == (5, 4)
    assert not any("Not drawn" in note for plot in [*every, *four] for note in plot.notes)


MANY = ("der", "foster", "memo", "finetune", "replay", "icarl", "bic", "wa", "joint", "wsc", "icarl+wsc", "a" * 40)


def over_sizes(group):
    """The figures that another memory size changes: a panel for each, and the measures against it."""
    from pycil_wsc.report.figures.plots import draw_curve, over_memory
    from pycil_wsc.report.figures.series import SPECS, Series

    series = Series(group)
    yield from draw_curve(series, SPECS["curves"][0])
    yield from over_memory(series, SPECS["accuracies"])


@pytest.mark.slow
@pytest.mark.parametrize("memories", [(20,), (20, 200)])
def test_with_many_methods_and_long_names_every_text_lies_inside_the_canvas(memories):
    from pycil_wsc.report.figures.plots import figures
    from pycil_wsc.report.figures.style import drawing, stack

    runs = [synthetic.result(name, memory, losses=1, classes=20) for name in MANY for memory in memories]
    runs += [synthetic.result("wa", 20, losses=1, classes=20, milestones=[i, i + 9, 150]) for i in (2, 3, 4)]
    (group,) = group_runs([Record.of(run) for run in runs])[0]
    with drawing():
        for plot in figures(group) if len(memories) == 1 else over_sizes(group):
            check_canvas(plot)
            stack(plot.figure)  # as on a narrow screen
            check_canvas(plot)


def check_canvas(plot):
    plot.figure.get_layout_engine().execute(plot.figure)
    drawn, (width, height) = plot.figure.get_tightbbox(), plot.figure.get_size_inches()
    assert drawn.x0 >= -0.02 and drawn.y0 >= -0.02, plot.slug
    assert drawn.x1 <= width + 0.02 and drawn.y1 <= height + 0.02, plot.slug


@pytest.mark.slow
def test_names_with_markup_are_text(tmp_path, unrendered):
    synthetic.write(tmp_path, synthetic.result("<i>$x_{</i>", convnet_type="../../<b>"))
    page = report.write_report(tmp_path)
    assert "&lt;i&gt;$x_{&lt;/i&gt;" in page.read_text() and "<i>" not in page.read_text()
    assert "<i>" not in (page.parent / "tables" / "measures-cifar100-b10-inc10-b.md").read_text()
    assert all(path.resolve().is_relative_to(page.parent.resolve()) for path in page.parent.rglob("*"))


def linear(colour):
    """sRGB as light intensities."""
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def lab(rgb):
    """CIE L*a*b* of light intensities, D65."""
    x, y, z = (
        sum(w * min(1, max(0, v)) for w, v in zip(row, rgb))
        for row in ((0.4339, 0.3762, 0.1899), (0.2127, 0.7152, 0.0722), (0.0178, 0.1095, 0.8727))
    )
    fx, fy, fz = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


SIGHT = {  # Machado, Oliveira and Fernandes 2009, severity 1
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


@pytest.mark.parametrize("sight", SIGHT)
def test_the_colours_of_the_methods_are_told_apart_by_every_sight(sight):
    from pycil_wsc.report.figures.style import LOOKS

    own = {name: look for name, look in LOOKS["methods"].items() if "colour" in look}
    seen = {
        name: lab([sum(w * v for w, v in zip(row, linear(look["colour"]))) for row in SIGHT[sight]])
        for name, look in own.items()
    }
    distances = {(a, b): math.dist(seen[a], seen[b]) for a in seen for b in seen if a < b}
    assert min(distances.values()) > 10  # a difference of 2 is just noticeable
    assert len({look["marker"] for look in own.values()}) == len(own) == 10


def test_methods_that_expand_are_dashed_and_hollow():
    from pycil_wsc.report.figures.style import line_styles

    names = ("der", "foster", "memo", "replay", "wsc", "a method of one's own")
    styles = line_styles({name: name for name in names}, expanding={"der", "foster", "memo"})
    hollow = {name for name, style in styles.items() if style["markerfacecolor"] != style["color"]}
    dashed = {name for name, style in styles.items() if style["linestyle"] != "-"}
    assert hollow == dashed == {"der", "foster", "memo"}


def test_the_console_table_needs_no_matplotlib(tmp_path):
    source = "import sys; from pycil_wsc import report; report.result_table([]); print('matplotlib' in sys.modules)"
    assert fresh.printed(source, tmp_path / "table.py", forgotten=["matplotlib"]) == "False\n"


# ---- files that cannot be used ---------------------------------------------------------------------------------------


def corrupt(folder):
    """``{path: (content, the report's message)}``, written below ``folder``."""
    whole = synthetic.result("wsc", 200)
    other = {key: value for key, value in whole.items() if key != "matrix"}
    spoilt = synthetic.result("wa", 200) | {"train_loss": "none", "confusion": [[1, 2]]}
    texts = {
        "truncated/result.json": (json.dumps(whole)[:900], "is not a complete result"),
        "empty/result.json": ("", "is not a complete result"),
        "binary/result.json": (b"\xff\xfe\x00\x01", "is not a complete result"),
        "nested/result.json": ("[" * 100000, "is not a complete result"),
        "version/result.json": (json.dumps(other), "another version (&#39;matrix&#39; is missing)"),
        "tasks/result.json": (
            json.dumps(whole | {"config": whole["config"] | {"max_tasks": "x"}}),
            "another version (&#39;config.max_tasks&#39; is not as expected)",
        ),
        "spoilt/result.json": (json.dumps(spoilt), "&#39;train_loss&#39; is not as expected; left out"),
    }
    for name, (content, _) in texts.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return {folder / name: text for name, text in texts.items()}


@pytest.mark.parametrize("arguments", [[], ["runs", "--spread", "x"]])
def test_a_wrong_command_line_is_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("error: ")


def test_files_that_cannot_be_used_are_named_skipped_and_left_as_they_are(tmp_path, capsys, undrawn):
    synthetic.write(tmp_path, synthetic.result(), synthetic.result(seed=1994))
    files = corrupt(tmp_path / "odd")
    (tmp_path / "odd" / "begun").mkdir()
    (tmp_path / "odd" / "begun" / "metrics.jsonl").write_text('{"task": 0, "cnn_top1": 80.0}\n')
    assert command.main([str(tmp_path)]) == 0
    page, errors = (tmp_path / "report" / "index.html").read_text(), capsys.readouterr().err
    for path, (content, reason) in files.items():
        assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
        assert re.search(f"<code>{re.escape(str(path))}</code>: [^<]*{re.escape(reason)}", page)
        assert f"problem: {path}: " in errors
    problems = errors.count("problem: ")  # the file 'spoilt' has two
    assert problems == len(files) + 1 and f'<a href="#problems">{problems} problems</a>' in page
    assert '<section id="problems"><h2>Problems</h2>' in page
    assert f"<code>{tmp_path / 'odd' / 'begun'}</code>: 1 task done" in page
    assert {line["method"] for line in lines_of(tmp_path / "report", f"measures-{HERE}")} == {"replay", "wa"}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["result", "config"])
def test_no_odd_value_in_a_result_stops_the_report(part, tmp_path, monkeypatch):
    monkeypatch.setattr("pycil_wsc.report.page.to_files", lambda figure: {"svg": b'<svg width="1pt" viewBox="0"'})
    monkeypatch.setattr("pycil_wsc.report.page.DRAWN", 1)  # the largest group of each setting
    whole = synthetic.result("wsc", confusion=True, classes=20)
    places = [(key, value) for key in (whole if part == "result" else whole["config"]) for value in ODD][::3]
    results = [synthetic.result("wsc", seed=seed, confusion=True, classes=20) for seed in range(len(places))]
    for result, (key, value) in zip(results, places):
        (result if part == "result" else result["config"])[key] = value
    for number, result in enumerate([synthetic.result(classes=20), *results]):
        (tmp_path / f"run{number}").mkdir()
        (tmp_path / f"run{number}" / "result.json").write_text(json.dumps(result))
    page = report.write_report(tmp_path).read_text()
    assert '<th class="label" scope="row">Replay</th>' in page and "is a result of another version" in page
    assert "Failed tables and figures" not in page


def test_a_result_that_a_sweep_meets_is_whole_or_named(tmp_path):
    (path,) = synthetic.write(tmp_path, synthetic.result())
    assert report.read_result(path) == json.loads(path.read_text())
    for path, (_, reason) in corrupt(tmp_path / "odd").items():
        if path.name == "result.json" and "left out" not in reason:
            with pytest.raises(UnusableRun, match=re.escape(str(path))):
                report.read_result(path)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_folder_without_results_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert command.main([str(tmp_path)]) == 2
    assert command.main([str(tmp_path / "nowhere")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("error: ") and str(tmp_path) in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_several_folders_go_into_one_report(tmp_path, capsys, undrawn):
    for name, method_name in (("a", "replay"), ("b", "wsc")):
        synthetic.write(tmp_path / name, synthetic.result(method_name))
    assert command.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == f"Report: {tmp_path / 'report' / 'index.html'}\n"
    assert [line["method"] for line in lines_of(tmp_path / "report", f"accuracy-{HERE}")] == ["replay", "wsc"]


def test_a_sweep_whose_runs_all_failed_gets_a_page_that_says_so(tmp_path):
    assert "No finished run was found." in report.write_report(tmp_path).read_text()
