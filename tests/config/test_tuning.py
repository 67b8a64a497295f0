"""Hyperparameters are chosen on held-out training data, never on the test set,
with as many trials for each method.
"""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
from support import synthetic
from support.small_runs import results, run_of, without_measurements, write
from support.synthetic import HERE, lines_of

import pycil_wsc
from main import main
from pycil_wsc import report
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.config.loading import load, resolve
from pycil_wsc.data.configured import for_training
from pycil_wsc.data.images.datasets import Dataset, DatasetInfo, Split, load_dataset
from pycil_wsc.data.tasks.validation import hold_out
from pycil_wsc.errors import UserError
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.runs.run import Run

TUNING = f"tuning-{HERE}-validation10"

# ---- the held-out part -----------------------------------------------------------------------------------------------


def numbered(sizes):
    """A data set whose training images contain their indices; the classes have these ``sizes``, in mixed order."""
    targets = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    images = np.arange(len(targets), dtype=np.uint8)[:, None, None, None] + np.zeros((1, 4, 4, 3), np.uint8)
    info = DatasetInfo("numbers", tuple(map(str, range(len(sizes)))), 4, (0.5,) * 3, (0.5,) * 3, "pad", 0, False, 0.0)
    return Dataset(info, Split(images, targets), None)


def test_each_class_gives_its_share_rounded_and_at_least_one_and_keeps_one():
    whole = numbered([50, 25, 14, 3, 2])
    split = hold_out(whole, 0.1, 1993)
    assert np.bincount(split.test.targets).tolist() == [5, 2, 1, 1, 1]
    assert np.bincount(split.train.targets).tolist() == [45, 23, 13, 2, 1]
    assert np.bincount(hold_out(whole, 0.5, 1993).test.targets).tolist() == [25, 12, 7, 2, 1]


def test_the_parts_are_apart_whole_and_in_the_data_sets_order():
    whole = numbered([50, 25, 14, 3, 2])
    split = hold_out(whole, 0.2, 7)
    kept, apart = (part.images[:, 0, 0, 0] for part in (split.train, split.test))
    assert sorted([*kept, *apart]) == list(range(94)) and list(kept) == sorted(kept) and list(apart) == sorted(apart)
    assert (whole.train.targets[kept] == split.train.targets).all() and (
        whole.train.targets[apart] == split.test.targets
    ).all()


def test_the_seed_alone_decides_the_split():
    whole = numbered([50, 50])
    first, again, other = (hold_out(whole, 0.1, seed).test.images[:, 0, 0, 0].tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_a_class_without_samples_is_left_out_of_a_task_and_is_one_line_elsewhere():
    assert np.bincount(hold_out(numbered([4, 0, 8]), 0.25, 1, one_task=True).test.targets).tolist() == [1, 0, 2]
    with pytest.raises(UserError, match="class '1' of numbers has 0 training samples, so none can be held out"):
        hold_out(numbered([4, 0, 8]), 0.25, 1)
    with pytest.raises(UserError, match="class '1' of numbers has 1 training sample, so none can be held out"):
        hold_out(numbered([4, 1, 8]), 0.25, 1, one_task=True)


def test_what_is_trained_and_tested_on_is_the_split(settings, undisturbed):
    run = run_of(settings, validation_split=0.25, save_weights=True)
    result = run.execute()
    split = hold_out(load_dataset(settings["dataset"], "."), 0.25, 1993)
    assert len(split.test) == 18 and run.train_source.images.numpy().tobytes() == split.train.images.tobytes()
    assert np.sum(result["confusion"], 1).tolist() == [3] * 6
    assert result["last_acc"] == pytest.approx(
        100 * np.mean(pycil_wsc.load(run.folder).predict(split.test.images) == split.test.targets)
    )
    assert result["images_trained"] == 18 * 3 + (18 + 8) * 4 + (18 + 16) * 4
    assert result["tested_on"] == "validation" and undisturbed()[1]["tested_on"] == "test"


def test_only_so_many_images_of_each_class_are_learned(settings):
    """They are drawn by the seed from what is not held out; fewer images are a part of more."""
    whole = load_dataset(settings["dataset"], ".")
    kept = hold_out(whole, 0.25, 1993).train
    drawn = {}
    for number in (2, 5):
        run = run_of(settings, validation_split=0.25, images_per_class=number)
        pixels = [image.tobytes() for image in run.train_source.images.numpy()]
        assert np.bincount(run.manager.train_targets).tolist() == [number] * 6
        assert [
            run.manager.class_order[label] for label in run.manager.train_targets
        ] == run.dataset.train.targets.tolist()
        drawn[number] = dict(zip(pixels, run.dataset.train.targets.tolist()))
    known = {image.tobytes(): label for image, label in zip(kept.images, kept.targets.tolist())}
    assert drawn[2].items() < drawn[5].items() < known.items()
    other = run_of(settings | {"seed": 1994}, images_per_class=5).dataset.train
    assert {image.tobytes() for image in other.images} != drawn[5].keys()
    assert len(run_of(settings, images_per_class=100).dataset.train) == len(whole.train)


@pytest.mark.slow
def test_a_poisoned_test_set_tunes_the_same(settings, tmp_path):
    with np.load(settings["dataset"].removeprefix("npz:")) as arrays:
        poisoned = dict(arrays)
    poisoned["test_x"], poisoned["test_y"] = 255 - poisoned["test_x"][::2], poisoned["test_y"][::-2]
    np.savez(tmp_path / "poisoned.npz", **poisoned)
    choices = {"validation_split": 0.25, "wsc.retain": [0.2, 0.9]}
    chosen = []
    for number, data in enumerate((settings["dataset"], f"npz:{tmp_path / 'poisoned.npz'}")):
        place = settings | choices | {"dataset": data, "out": str(tmp_path / f"runs{number}")}
        assert main(["--config", write(tmp_path, place)]) == 0
        tuned = json.loads((tmp_path / f"runs{number}" / "run" / "report" / "tuned_wsc.json").read_text())
        chosen.append(
            (
                tuned | {"dataset": None},
                [
                    without_measurements(result) | {"config": None, "identity": None, "data": None}
                    for _, result in sorted(results(place).items(), key=lambda item: item[1]["config"]["wsc.retain"])
                ],
            )
        )
    assert chosen[0] == chosen[1] and len(chosen[0][1]) == 2


def test_the_held_out_part_is_taken_once_for_runs_that_share_it(settings, monkeypatch):
    seen = []

    def noted(dataset, share, seed, **options):
        seen.append(seed)
        return hold_out(dataset, share, seed, **options)

    monkeypatch.setattr("pycil_wsc.data.configured.hold_out", noted)
    data = Datasets()
    datasets = [
        data.of(resolve(settings | {"validation_split": 0.25, "lrate": rate, "seed": seed}))
        for seed in (1, 2)
        for rate in (0.1, 0.2, 0.3)
    ]
    assert seen == [1, 2] and datasets[0] is datasets[2] is not datasets[3]
    assert data.of(resolve(settings | {"validation_split": 0.25, "seed": 2, "memory_per_class": 5})) is datasets[3]
    assert len(data.of(resolve(settings | {"validation_split": 0.5, "seed": 2})).test) == 2 * len(datasets[3].test)


def test_a_run_refuses_a_data_set_without_its_held_out_part(settings):
    config = resolve(settings | {"validation_split": 0.25})
    with pytest.raises(ValueError, match="held-out part"):
        Run(config, load_dataset(config.dataset, "."))
    with pytest.raises(ValueError, match="held-out part"):
        Run(resolve(settings), Datasets().of(config))


@pytest.mark.slow
def test_the_first_task_is_not_shared_with_runs_on_all_training_data(settings, tmp_path):
    run_of(settings, model_name="replay").execute()
    shared = run_of(settings, validation_split=0.25).execute()
    alone = run_of(settings, validation_split=0.25, cache_first_task=False, out=str(tmp_path / "alone")).execute()
    assert without_measurements(shared) | {"config": None} == without_measurements(alone) | {"config": None}
    assert shared["train_seconds_spent"] == shared["train_seconds"]


def test_the_split_decides_the_result_and_has_limits():
    usual = resolve({})
    assert (
        run_folder(resolve({"validation_split": 0.0}))
        == run_folder(usual)
        != run_folder(resolve({"validation_split": 0.1}))
    )
    with pytest.raises(UserError, match="validation_split: 0.6 is above 0.5"):
        resolve({"validation_split": 0.6})


def test_images_are_decoded_of_the_training_files_alone(tmp_path):
    from PIL import Image

    for part in ("train", "val"):
        for label in "ab":
            for number in range(4):
                path = tmp_path / "images" / part / label / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (40, 30), (number * 20, 0, 0)).save(path) if part == "train" else path.write_bytes(
                    b"poison"
                )
    config = resolve(
        {
            "dataset": f"folder:{tmp_path / 'images'}",
            "image_size": 8,
            "validation_split": 0.25,
            "init_cls": 1,
            "increment": 1,
            "cache_images": "memory",
            "num_workers": 1,
            "data_root": str(tmp_path / "root"),
        }
    )
    dataset = for_training(Datasets().of(config), config)
    assert len(dataset.train.decoded) == len(dataset.train) == 6
    assert len(dataset.test.decoded) == len(dataset.test) == 2


# ---- the report ------------------------------------------------------------------------------------------------------


def trial(method, average, seed=1993, memory=200, **keys):
    return synthetic.result(method, memory, seed, validation_split=0.1, **keys) | {
        "avg_acc": average,
        "tested_on": "validation",
    }


TRIALS = [
    trial("replay", 70.0, lrate=0.1, weight_decay=1e-4),
    trial("replay", 73.0, lrate=0.1, weight_decay=5e-4),
    trial("replay", 64.5, lrate=0.2, weight_decay=1e-4),
    trial("wsc", 75.0),
    trial("wsc", 74.0, wsc__blend=0.25),
    trial("wsc", 76.5, wsc__retain=0.5, wsc__blend=0.25),
]


def test_the_best_trial_of_each_method_is_named_and_its_configuration_written(tmp_path, undrawn):
    synthetic.write(tmp_path, *TRIALS)
    page = report.write_report(tmp_path)
    lines = lines_of(page.parent, TUNING)
    assert {(line["method"], line["trials"], line["best trial"]) for line in lines} == {
        ("replay", "3", "lrate=0.1 weight_decay=0.0005"),
        ("wsc", "3", "wsc.retain=0.5 wsc.blend=0.25"),
    }
    means = {(line["method"], line["column"]): float(line["mean"]) for line in lines}
    assert means == {
        ("replay", "best trial"): 73,
        ("replay", "median of the trials"): 70,
        ("replay", "worst trial"): 64.5,
        ("wsc", "best trial"): 76.5,
        ("wsc", "median of the trials"): 75,
        ("wsc", "worst trial"): 74,
    }
    tuned = {name: json.loads((page.parent / f"tuned_{name}.json").read_text()) for name in ("replay", "wsc")}
    assert (tuned["replay"]["lrate"], tuned["replay"]["weight_decay"], tuned["replay"]["model_name"]) == (
        0.1,
        5e-4,
        "replay",
    )
    assert (tuned["wsc"]["wsc.retain"], tuned["wsc"]["wsc.blend"]) == (0.5, 0.25)
    assert all(
        "validation_split" not in config and "device" not in config and config["prefix"] == "tuned"
        for config in tuned.values()
    )
    assert (
        "tuned_replay.json, tuned_wsc.json" in page.read_text()
        and "different numbers of trials" not in page.read_text()
    )


@pytest.mark.parametrize("order", [1, -1])
def test_trials_are_named_by_the_optimiser_first_whichever_order_their_keys_have(order, tmp_path, undrawn):
    """The rates alone would tell these trials apart, but each of them means nothing without its optimiser."""
    trials = []
    for optimizer, rate, average in (("sgd", 0.01, 70.0), ("sgd", 0.03, 60.0), ("adamw", 3e-4, 65.0)):
        made = trial("replay", average, init_lr=rate, lrate=rate, optimizer=optimizer)
        trials.append(made | {"config": dict(list(made["config"].items())[::order])})
    synthetic.write(tmp_path, *trials)
    lines = lines_of(report.write_report(tmp_path).parent, TUNING)
    assert {line["best trial"] for line in lines} == {"optimizer=sgd init_lr=0.01"}


def test_a_mean_over_seeds_and_memories_decides_and_a_trial_that_lacks_some_is_left_out(tmp_path, undrawn):
    many = [
        trial("wsc", value, seed, memory, wsc__retain=retain)
        for retain, values in ((0.2, (70, 72, 74, 76)), (0.5, (80, 60, 80, 60)))
        for value, (seed, memory) in zip(values, ((1, 20), (1, 200), (2, 20), (2, 200)))
    ]
    synthetic.write(tmp_path, *many, trial("wsc", 99.0, 1, 20, wsc__retain=0.1), trial("replay", 50.0))
    page = report.write_report(tmp_path)
    text = (page.parent / "tables" / f"{TUNING}.md").read_text()
    assert json.loads((page.parent / "tuned_wsc.json").read_text())["wsc.retain"] == 0.2
    assert "Missing: runs of some trials, which were left out: 1 of wsc." in text
    assert (
        "The methods have different numbers of trials, so the comparison is not fair: replay 1, wsc 2." in text
        and "the only one" in text
    )


@pytest.mark.parametrize("reverse", [False, True])
def test_trials_over_other_seeds_or_memories_are_not_ranked(reverse, tmp_path, undrawn):
    """Most trials have seeds 1 and 2; the others have as many runs."""
    over = {0.1: ((1, 200), (2, 200)), 0.2: ((1, 200), (2, 200)), 0.5: ((3, 200), (4, 200)), 0.9: ((1, 20), (2, 20))}
    many = [
        trial("wsc", 70 + 10 * retain, seed, memory, wsc__retain=retain)
        for retain, runs in over.items()
        for seed, memory in runs
    ]
    synthetic.write(tmp_path, *(many[::-1] if reverse else many))
    page = report.write_report(tmp_path)
    assert json.loads((page.parent / "tuned_wsc.json").read_text())["wsc.retain"] == 0.2
    text = (page.parent / "tables" / f"{TUNING}.md").read_text()
    assert "Missing: runs of some trials, which were left out: 2 of wsc." in text


def test_a_further_seed_of_one_trial_does_not_choose_it(tmp_path, undrawn):
    synthetic.write(tmp_path, *TRIALS[:3], trial("replay", 64.4, 1994, lrate=0.2, weight_decay=1e-4))
    page = report.write_report(tmp_path)
    assert json.loads((page.parent / "tuned_replay.json").read_text())["weight_decay"] == 5e-4
    assert {line["trials"] for line in lines_of(page.parent, TUNING)} == {"3"}


def test_trials_are_ranked_by_the_number_that_is_shown(tmp_path, undrawn):
    """Each seed counts once, also in a search that was stopped: here the mean of 60 and 50 is less than that of 58.5
    and 52, though that of 60, 60 and 50 is more than that of 58.5, 58.5 and 52.
    """
    values = {0.1: {(1, 20): 50.0, (1, 200): 70.0, (2, 20): 50.0}, 0.2: {(1, 20): 52.0, (1, 200): 65.0, (2, 20): 52.0}}
    runs = []
    for rate, of_rate in values.items():
        runs += [trial("replay", value, *run, lrate=rate) for run, value in of_rate.items()]
    synthetic.write(tmp_path, *runs)
    page = report.write_report(tmp_path)
    assert json.loads((page.parent / "tuned_replay.json").read_text())["lrate"] == 0.2
    shown = {line["column"]: float(line["mean"]) for line in lines_of(page.parent, TUNING)}
    assert shown["best trial"] == 55.25 and 55 in shown.values()


def test_the_spread_of_the_best_trial_is_that_over_seeds(tmp_path, undrawn):
    values = {(1, 20): 50.0, (1, 200): 70.0, (2, 20): 51.0, (2, 200): 71.0, (3, 20): 55.0, (3, 200): 75.0}
    synthetic.write(tmp_path, *(trial("wsc", value, *run) for run, value in values.items()))
    (best,) = (
        line for line in lines_of(report.write_report(tmp_path).parent, TUNING) if line["column"] == "best trial"
    )
    error = np.std([60, 61, 65], ddof=1) / 3**0.5
    assert (float(best["mean"]), float(best["standard_error"])) == pytest.approx((62, error))
    assert best["averaged_over"] == "3"


@pytest.mark.parametrize("reverse", [False, True])
def test_of_trials_over_as_many_other_seeds_those_of_the_first_seeds_are_ranked(reverse, tmp_path, undrawn):
    many = [trial("wsc", 70 + seed, seed, wsc__retain=retain) for seed, retain in ((1, 0.2), (2, 0.5))]
    synthetic.write(tmp_path, *(many[::-1] if reverse else many))
    page = report.write_report(tmp_path)
    assert json.loads((page.parent / "tuned_wsc.json").read_text())["wsc.retain"] == 0.2


def test_trials_on_a_part_of_the_data_are_apart_and_obsolete_choices_go(tmp_path, undrawn):
    synthetic.write(tmp_path, *TRIALS)
    page = report.write_report(tmp_path)
    assert json.loads((page.parent / "tuned_wsc.json").read_text())["wsc.retain"] == 0.5
    (page.parent / "tuned_mine.json").write_text("{}")
    part = trial("wsc", 95.0, classes=20, max_tasks=2, wsc__retain=0.9)
    synthetic.write(tmp_path / "part", part)
    assert "still in them (max_tasks): remove these to use all of the data" in report.write_report(tmp_path).read_text()
    files = sorted(page.parent.glob("tuned_[rw]*.json"))
    assert (
        (page.parent / "tuned_mine.json").exists()
        and len(files) == 3
        and not {"tuned_wsc.json", "tuned_replay.json"} & {path.name for path in files}
    )
    chosen = [json.loads(path.read_text()) for path in files if "wsc" in path.name]
    assert {(config.get("max_tasks"), config["wsc.retain"]) for config in chosen} == {(None, 0.5), (2, 0.9)}


@pytest.mark.slow
def test_validation_and_test_accuracy_never_meet_in_a_table_or_figure(tmp_path, unrendered):
    tested = [synthetic.result(name, 200) | {"avg_acc": value} for name, value in (("replay", 71.0), ("wsc", 72.0))]
    synthetic.write(tmp_path, *TRIALS, *tested)
    page = report.write_report(tmp_path)
    held_out = {f"{trial['avg_acc']:g}" for trial in TRIALS}
    for path in (page.parent / "tables").glob("*.csv"):
        means = {f"{float(line['mean']):g}" for line in lines_of(page.parent, path.stem) if line["mean"]}
        assert not ("validation" in path.stem and means & {"71", "72"}) and (
            "validation" in path.stem or not means & held_out
        ), path.stem
    names = {path.stem for path in (page.parent / "tables").iterdir()}
    assert {name for name in names if "validation" in name} == {
        f"{slug}-{HERE}-validation10" for slug in ("tuning", "measures", "cost")
    }
    assert [line["mean"] for line in lines_of(page.parent, f"accuracy-{HERE}") if line["mean"]] == ["71.0", "72.0"]
    assert not [path for path in (page.parent / "figures").iterdir() if "validation" in path.name]
    assert "tested on 10 % held out of the training data" in page.read_text()
    text = report.result_table([*TRIALS, *tested])
    (of_test,) = (block for block in text.split("\n\n") if "held out" not in block)
    assert "71.00" in of_test and "72.00" in of_test and "73.00" not in of_test
    assert "held out of the training data" in report.result_table(TRIALS)


def test_trials_on_two_data_sets_have_files_of_their_own(tmp_path, undrawn):
    synthetic.write(tmp_path, TRIALS[0], trial("replay", 60.0, dataset="cifar10", lrate=0.3))
    page = report.write_report(tmp_path)
    names = {path.name: json.loads(path.read_text())["dataset"] for path in page.parent.glob("tuned_*.json")}
    assert names == {
        f"tuned_replay-{HERE}-validation10.json": "cifar100",
        "tuned_replay-cifar10-b10-inc10-resnet32-validation10.json": "cifar10",
    }


@pytest.mark.slow
def test_the_winners_configuration_runs_at_other_memory_sizes_on_the_test_set(settings, tmp_path, capsys, undrawn):
    runs = [{"model_name": "replay", "lrate": [0.05, 0.1]}, {"model_name": "wsc", "wsc.retain": [0.3, 0.6]}]
    assert (
        main(
            [
                "--config",
                write(
                    tmp_path,
                    {key: value for key, value in settings.items() if key != "model_name"}
                    | {"validation_split": 0.25, "runs": runs},
                ),
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "average accuracy on held-out training data" in printed and "tested on 25 % held out" in printed
    all_results = list(results(settings).values())
    for name, key in (("replay", "lrate"), ("wsc", "wsc.retain")):
        of_method = [result for result in all_results if result["config"]["model_name"] == name]
        best = max(of_method, key=lambda result: result["avg_acc"])
        path, out = tmp_path / "runs" / "run" / "report" / f"tuned_{name}.json", tmp_path / f"tuned-{name}"
        assert (
            main(["--config", str(path), "--set", "memory_per_class=[2,6]", "--out", str(out), "--device", "cpu"]) == 0
        )
        again = list(results({"out": out}).values())
        assert sorted(result["config"]["memory_per_class"] for result in again) == [2, 6]
        for result in again:
            assert result["tested_on"] == "test" and result["config"][key] == best["config"][key]
            same = {
                option: value
                for option, value in best["config"].items()
                if option not in ("prefix", "device", "checkpoint_seconds", "memory_per_class", "validation_split")
            }
            assert same.items() <= result["config"].items()


# ---- the shipped experiments -----------------------------------------------------------------------------------------


def test_the_shipped_search_gives_every_method_as_many_trials_on_held_out_data():
    configs = [*load("exps/studies/tune_wsc.json"), *load("exps/studies/tune_baselines.json")]
    counts = Counter(config.model_name for config in configs)
    assert set(counts) == {"replay", "wsc", "icarl", "bic", "wa", "der", "foster", "memo"} and set(counts.values()) == {
        32
    }
    assert {(config.validation_split, config.seed, config.memory_per_class, config.dataset) for config in configs} == {
        (0.1, 1993, 200, "cifar100")
    }
    wsc = [dataclasses.asdict(config.wsc) for config in configs if config.model_name == "wsc"]
    assert {name for name in wsc[0] if len({str(options[name]) for options in wsc}) > 1} == {
        "warmup",
        "average_power",
        "average_lr",
        "retain",
        "blend",
    }
    assert {config.prefix for config in configs} == {"tune"}
