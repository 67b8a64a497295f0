"""HAL: the step on the anchors, the anchors, and the ring of each task, as in Mammoth."""

import copy

import numpy as np
import pytest
import torch
from reference import mammoth_steps as twin
from support.steps import RATE, assert_same, drawn, pair, recorded, run_of

from pycil_wsc import seeding

KEYS = {"anchor_steps": 3, "hal_lambda": 0.5, "feature_decay": 0.3, "feature_weight": 0.2}


@pytest.fixture(scope="module")
def learned(digits, tmp_path_factory):
    run = run_of("hal", digits, tmp_path_factory.mktemp("hal"), **KEYS)
    learner, features = run.learner, []
    after_step = learner.after_step

    def watched():
        before = learner.features.clone()
        after_step()
        features.append((before, learner.features.clone(), learner.anchors))

    learner.after_step = watched
    return run, recorded(run), features


def test_a_step_keeps_the_logits_of_anchors_and_the_mean_features_follow(learned):
    _, steps, features = learned
    assert 0 < sum(anchors is None for _, _, anchors in features) < len(steps)
    for step, (before, after, anchors) in zip(steps, features, strict=True):
        found = twin.hal(step.before, pair(step.batch), drawn(step), anchors, before, RATE, 0.5, 0.3)
        assert_same(step.before, step.after)
        torch.testing.assert_close(found, after, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hindsight", ["mammoth", "paper"])
def test_an_anchor_matches_the_features_and_in_the_paper_maximises_forgetting_too(hindsight, digits, tmp_path):
    run = run_of("hal", digits, tmp_path, **KEYS, hindsight=hindsight)
    learner, (task, *_) = run.learner, run.manager.tasks
    trained = learner._trained_on_memory
    networks = []

    def watched(task, network):
        networks.append((copy.deepcopy(network), trained(task, network)))
        networks.append(learner.features.clone())
        return networks[0][1]

    learner._trained_on_memory = watched
    recorded(run, 1)
    (before, after), features = networks
    with torch.no_grad():
        assert not torch.equal(before.head.weight, after.head.weight)
    if hindsight == "mammoth":  # whose weights before are overwritten by those after
        before = after
    with seeding.seeded(learner.config.seed, "anchors", 0):
        starts = torch.rand(4, 3, 8, 8)
    for label, start in enumerate(starts):
        expected = twin.hal_anchor(before, after, start, label, features, RATE, 0.2, 3)
        torch.testing.assert_close(learner.anchors[label], expected, rtol=1e-4, atol=1e-6)
        assert (expected - start).abs().max() > 1e-4
    assert len(learner.anchors) == task.num_seen


def test_each_task_has_a_ring_of_its_share_from_which_the_oldest_leaves(learned):
    run, steps, _ = learned
    learner, manager = run.learner, run.manager
    share = 40 // len(manager.tasks)
    presented = [step.batch.indices.tolist() for step in steps]
    for index in range(2):
        stream = [each for batch in presented for each in batch if manager.train_tasks[each] == index]
        ring = {}
        for number, sample in enumerate(stream):
            ring[number % share] = sample
        own = learner.memory.slots[index * share : (index + 1) * share]
        assert own.tolist() == [ring[place] for place in range(share)]
    assert len(learner.memory) == 2 * share
    assert np.isin(manager.train_tasks[learner.memory.slots], (0, 1)).all()
