"""Learners that train in a moment, and what several files of tests do with them."""

import os
import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.months import MONTHS, month
from support.small_runs import Killed, suited

from pycil_wsc.classifier.learner import Learner

SMALL = {  # those of small_runs.SETTINGS that are for a learner
    "memory_per_class": 4,
    "convnet_type": "tiny",
    "device": "cpu",
    "init_epoch": 3,
    "epochs": 4,
    "batch_size": 8,
    "wsc": {"average_every": 1},
    "checkpoint_seconds": 0,
    "buffer_size": 64,
    "projection": 64,
    "proj_hidden_dim": 32,
    "proj_output_dim": 16,
    "anchor_steps": 2,
    "quiet": True,
}
QUICK = {"epochs": 1, "init_epoch": 1, "precision": "fp32"}
FILES = QUICK | {"image_size": 16, "num_workers": 0}


@pytest.fixture(scope="module")
def months(tmp_path_factory):
    """Three months of arrays, which the tests of a file share."""
    folder = tmp_path_factory.mktemp("months")
    return [month(folder / f"{number}.npz", names, number) for number, names in enumerate(MONTHS)]


@pytest.fixture(scope="module")
def january(tmp_path_factory):
    """A learner of the first month, and the folder that it is saved in."""
    folder = tmp_path_factory.mktemp("january")
    learner = learned(month(folder / "0.npz", MONTHS[0], 0))
    learner.save(folder / "shelf")
    return learner, folder / "shelf"


@pytest.fixture
def shelf(january, tmp_path):
    """The test's own copy of the saved learner."""
    return shutil.copytree(january[1], tmp_path / "shelf")


def arrays(source, part="train"):
    """(images, label names) of a month."""
    content = np.load(source.removeprefix("npz:"))
    return content[f"{part}_x"], content["classes"][content[f"{part}_y"]]


def learned(*sources, name="wsc", **keys):
    own = {"class_means": "exemplars"} if name == "coil" else {}  # by default of images that are gone
    learner = Learner(name, **SMALL | own | suited(name) | keys)
    for source in sources:
        learner.learn(source)
    return learner


def assert_same(one, other):
    """Bit-identical: weights and all else that a method keeps, and exemplars."""
    ours, theirs = (learner._state["learner"] for learner in (one, other))
    assert ours.keys() == theirs.keys() and one.classes == other.classes
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs[name]), name
    assert ours["_extra_state"]["memory"] == theirs["_extra_state"]["memory"]
    assert np.array_equal(one._held.train.images, other._held.train.images)
    lines, same = (
        [{k: v for k, v in line.items() if "seconds" not in k} for line in learner._state["history"]]
        for learner in (one, other)
    )
    assert lines == same


def dies_at(moment, function):
    """Run ``function``, but die just before its change of the disk number ``moment``; returns whether it survived."""
    count = [0]

    def dying(original):
        def call(*arguments, **keys):
            if count[0] == moment:
                raise Killed
            count[0] += 1
            return original(*arguments, **keys)

        return call

    with (
        patch("os.replace", dying(os.replace)),
        patch("os.fsync", dying(os.fsync)),
        patch("os.link", dying(os.link)),
        patch.object(Path, "mkdir", dying(Path.mkdir)),
        patch.object(Path, "unlink", dying(Path.unlink)),
        patch.object(Path, "rmdir", dying(Path.rmdir)),
    ):
        try:
            function()
        except Killed:
            return False
    return True
