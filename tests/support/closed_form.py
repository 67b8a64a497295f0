"""Learners whose classifier is computed from features, and these features."""

import numpy as np
import torch
from support.methods import SILENT, SMALL

from pycil_wsc.config.loading import resolve
from pycil_wsc.runs.run import Run

KEYS = {"buffer_size": 96, "IL_batch_size": 100, "projection": 96, "gamma": 0.1, "gamma_comp": 0.2}
ADAPTERS = {"tuning": "adapter", "ffn_num": 3}  # with a transformer, as in PILOT
PROJECTED = {"projection": 24}  # of RanPAC with a transformer


def learned(name, digits, tmp_path, **keys):
    """A learner after three tasks, and of each task: float64 features (n, d) in the order of the classes, and (n,)."""
    run = Run(resolve(SMALL | KEYS | {"model_name": name, "out": str(tmp_path)} | keys), digits)
    learner = run.learner
    parts = []
    for task in run.manager.tasks[:3]:
        learner.learn(task, SILENT)
        targets = run.manager.train_targets[task.train_indices]
        indices = task.train_indices[np.argsort(targets, kind="stable")]
        parts.append((learner.outputs.features(indices).astype(float), run.manager.train_targets[indices]))
    return learner, parts


def joined(parts):
    """The features of all tasks (n, d), and their classes (n,)."""
    features, labels = zip(*parts, strict=True)
    return np.concatenate(features), np.concatenate(labels)


def features_of_class(learner, label):
    """The features of a class's training images: float64 (n, d)."""
    indices = np.flatnonzero(learner.manager.train_targets == label)
    return learner.outputs.features(indices).astype(np.float64)


def logits_of(learner, features):
    """(n, d) -> float64 (n, classes)."""
    with torch.no_grad():
        return learner.classify(torch.from_numpy(features).float()).double().numpy()


def assert_near(logits, expected):
    """To 1e-4 of the largest logit."""
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
