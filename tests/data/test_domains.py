"""Domains of one data set: each task has all classes, and its images rotated or permuted."""

import json

import numpy as np
import pytest
from PIL import Image
from support.small_runs import main

import pycil_wsc
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.data.tasks.domains import angle_of, in_domains
from pycil_wsc.data.tasks.tasks import tasks_of
from pycil_wsc.errors import UserError
from pycil_wsc.runs.class_incremental import ClassIncrementalRuns

KEYS = {"dataset": "digits", "model_name": "replay", "convnet_type": "mlp", "convnet_options.side": 8, "device": "cpu"}
KEYS |= {"memory_per_class": 5, "init_epoch": 1, "epochs": 1, "images_per_class": 10, "precision": "fp32"}


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits", ".")


def part(stream, task, split="train"):
    """The images and labels of a task."""
    of_task = getattr(stream.arrivals, split) == task
    return getattr(stream, split).images[of_task], getattr(stream, split).targets[of_task]


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_quarter_turn_moves_every_pixel_and_the_first_domain_is_the_original(digits, split):
    stream = in_domains(digits, ["original", "rotated:90", "rotated:180"], seed=1)
    given = getattr(digits, split)
    for task in range(3):
        images, labels = part(stream, task, split)
        assert np.array_equal(images, np.rot90(given.images, task, (1, 2)))
        assert np.array_equal(labels, given.targets)


def test_other_angles_are_pils_rotation_by_the_nearest_pixel(digits):
    images, _ = part(in_domains(digits, ["rotated:30"], seed=1), 0)
    expected = [np.asarray(Image.fromarray(image).rotate(30)) for image in digits.train.images[:200]]
    assert np.mean(images[:200] != np.stack(expected)) < 0.02  # pixels half-way between two


def test_a_permutation_is_one_for_all_images_of_a_task_and_another_for_the_next(digits):
    stream = in_domains(digits, ["permuted", "permuted"], seed=1)
    given = digits.train.images.reshape(len(digits.train), 64, 3)
    columns = {pixel.tobytes(): place for place, pixel in enumerate(given.transpose(1, 0, 2))}
    orders = []
    for task in range(2):
        images, _ = part(stream, task)
        shown = images.reshape(len(images), 64, 3).transpose(1, 0, 2)
        orders.append([columns[pixel.tobytes()] for pixel in shown])  # pixels that are always black look alike
    assert orders[0] != orders[1] and len(set(orders[0])) == len(columns)
    test, _ = part(stream, 0, "test")
    dark = digits.test.images.reshape(len(test), 64, 3)
    assert np.array_equal(test.reshape(len(test), 64, 3).sum((0, 2))[:8], dark[:, orders[0]].sum((0, 2))[:8])


def test_drawn_domains_follow_the_seed(digits):
    angles = [angle_of("rotated", seed, task) for seed in (1, 2) for task in (0, 1)]
    assert len(set(angles)) == 4 and all(0 <= angle < 180 for angle in angles)
    first, again, other = (in_domains(digits, ["rotated", "permuted"], seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.train.images, again.train.images)
    assert not np.array_equal(first.train.images, other.train.images)
    assert first.fingerprint["sha256"] == other.fingerprint["sha256"], "seeds of one data set are compared"
    assert first.fingerprint["tasks"] != other.fingerprint["tasks"]


def test_every_task_has_all_classes_and_is_tested_on_its_own_domain(digits, tmp_path):
    config = resolve(KEYS | {"domains": ["original", "rotated:90", "permuted"], "out": str(tmp_path)})
    kind = ClassIncrementalRuns()
    data = kind.loader()(config)
    tasks = tasks_of(data, config).tasks
    assert [(task.num_new, len(task.train_indices)) for task in tasks] == [(10, 100), (0, 100), (0, 100)]
    assert [len(task.test_indices) for task in tasks] == [len(digits.test) * number for number in (1, 2, 3)]
    result = kind.execute(config, data, lambda progress: None)
    assert [len(row) for row in result["matrix"]] == [1, 2, 3]
    assert result["task_known_curve"] == result["curve"], "every task has all classes"
    assert run_folder(config).parts[-4] == "digits-3domains"


def test_a_dry_run_of_the_example_shows_its_tasks_without_a_download(tmp_path, capsys):
    assert main(["--config", "exps/studies/domains.json", "--dry-run", "--out", str(tmp_path)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("digits-5domains: 5 tasks: 10, 0, 0, 0, 0 new classes")


@pytest.mark.parametrize(
    "keys, line",
    [
        ({"domains": ["rotate"]}, "domains: 'rotate' is not 'original', 'rotated', 'rotated:DEGREES' or 'permuted'"),
        ({"domains": ["permuted:3"]}, "domains: 'permuted:3' is not"),
        ({"domains": "rotated"}, "domains: expected a list of strings"),
        ({"domains": ["original"], "increment": 2}, "increment: cannot be combined with 'domains'"),
        ({"domains": ["original"], "increments": [5, 5]}, "increments: cannot be combined with 'domains'"),
        ({"domains": ["original"], "shuffle": False}, "shuffle: cannot be combined with 'domains'"),
    ],
)
def test_bad_domains_get_one_line(keys, line):
    with pytest.raises(UserError, match=f"^{line}"):
        resolve(KEYS | keys)


@pytest.mark.slow
def test_the_weights_of_such_a_run_are_loaded_with_its_tasks(tmp_path):
    keys = {"domains": ["original", "permuted"], "out": str(tmp_path), "prefix": "run", "save_weights": True}
    (tmp_path / "keys.json").write_text(json.dumps(KEYS | keys))
    assert main(["--config", str(tmp_path / "keys.json")]) == 0
    (found,) = tmp_path.rglob("result.json")
    assert pycil_wsc.load(found.parent).learner.manager.boundaries == [0, 10, 10]
