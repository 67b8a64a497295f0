"""GSS: which images replace which exemplars, as in Mammoth."""

import copy

import numpy as np
import pytest
import torch
from reference import mammoth_steps as twin
from support.steps import RATE, assert_same, drawn, pair, recorded, run_of
from torch.nn.functional import cross_entropy

from pycil_wsc import seeding


@pytest.fixture(scope="module")
def learned(digits, tmp_path_factory):
    keys = {"memory_size": 30, "batch_size": 20, "replay_batch_size": 6, "gss_batch_size": 1}
    run = run_of("gss", digits, tmp_path_factory.mktemp("gss"), **keys)
    learner, seen = run.learner, []
    after_step = learner.after_step

    def watched():
        state = learner.memory.slots.copy(), learner.scores.tolist(), learner.steps
        after_step()
        seen.append((*state, learner.memory.slots.copy(), learner.scores.tolist()))

    learner.after_step = watched
    return run, recorded(run, 1), seen


def test_a_step_is_ers_with_exemplars_of_the_moment(learned):
    _, steps, seen = learned
    for step, (slots, *_) in zip(steps, seen):
        for replayed in step.batch.replay:
            assert len(replayed) == 6 and set(replayed.indices.tolist()) <= set(slots.tolist())
        twin.er(step.before, pair(step.batch), drawn(step), RATE)
        assert_same(step.before, step.after)


def test_images_unlike_the_drawn_exemplars_replace_others_by_their_scores(learned, digits):
    run, steps, seen = learned
    targets = run.manager.train_targets
    replaced = 0

    def gradient(network, samples):
        """Of pixels on the 0..1 scale."""
        images = torch.from_numpy(digits.train.images[samples]).permute(0, 3, 1, 2) / 255
        loss = cross_entropy(network(images), torch.from_numpy(targets[samples]))
        return torch.cat([each.flatten() for each in twin.gradients_of(network, loss)]).tolist()

    for step, (slots, scores, number, expected_slots, expected_scores) in zip(steps[:12], seen[:12]):
        samples = step.batch.indices.numpy()
        network = copy.deepcopy(step.after)
        choice = np.random.default_rng(seeding.derived_seed(run.learner.config.seed, "gss", "choice", number))
        drawing = np.random.default_rng(seeding.derived_seed(run.learner.config.seed, "gss", "comparison", number))
        whole, alone = 0.1, [0.0] * len(samples)
        if len(slots):
            compared = slots[drawing.choice(len(slots), min(1, len(slots)), replace=False)]
            references = [gradient(network, compared[[place]]) for place in range(len(compared))]
            whole = twin.likeness(gradient(network, samples), references)
            alone = [twin.likeness(gradient(network, samples[[row]]), references) for row in range(len(samples))]
        pick = lambda shares: int(choice.choice(len(shares), p=shares))  # noqa: E731, B023
        places = twin.gss(scores, 30, whole, alone, pick, choice.random)
        content = dict(enumerate(slots.tolist()))
        for sample, place in zip(samples.tolist(), places):
            if place is not None:
                replaced += place in content
                content[place] = sample
        assert [content[place] for place in range(len(content))] == expected_slots.tolist()
        assert scores == pytest.approx(expected_scores, rel=1e-4)
    assert replaced, "some image has taken the place of another"


def test_replayed_images_are_counted(learned):
    run, steps, _ = learned
    assert run.learner.spent.images == run.plan[0]
    assert run.plan[0] == sum(len(step.batch) + sum(map(len, step.batch.replay)) for step in steps)
