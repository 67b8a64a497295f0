"""DualPrompt: general prompts and those of a task, against slow references; as PILOT's code."""

import pytest
import torch
from reference import prompts as twin
from reference import tuning
from support.prompts import HEADS, assert_same, expected_loss, prompted, queries, random_batch

pytest.importorskip("timm")


def test_a_task_of_dualprompt_has_its_own_keys_and_values_in_training_and_the_nearest_in_a_test(tmp_path):
    learner = prompted("dualprompt", tmp_path, top_k=1)
    given, net = random_batch(learner), learner.network
    weights, asked = queries(learner, given.images)

    def features(image, number):
        own = net.prompts.prompts[number].unflatten(0, net.per_prompt)[0]  # of block 1: keys, values
        shared = net.general  # of block 0
        pairs = twin.prefixes_of({0: (shared[0], shared[1]), 1: (own[0], own[1])})
        return tuning.features(weights, HEADS, image, prefixes=pairs)

    logits, loss = expected_loss(learner, [features(image, 1) for image in given.images], given.targets, first=2)
    pulls = [twin.pull(net.prompts.keys, query, [1]) for query in asked]
    assert_same(learner, given, logits, loss - 0.1 * sum(pulls) / len(pulls))
    nearest = [twin.nearest(net.prompts.keys, query, 1)[0] for query in asked]
    with torch.no_grad():
        expected = torch.stack([features(image, number) for image, number in zip(given.images, nearest)])
        torch.testing.assert_close(learner.extract(given.images), expected, rtol=1e-4, atol=1e-5)


def test_dualprompts_halves_are_those_of_pilots_reshape(tmp_path):
    learner = prompted("dualprompt", tmp_path, top_k=1, prompts_by_halves=True)
    given, net = random_batch(learner, count=4), learner.network
    weights, _ = queries(learner, given.images)
    own = net.prompts.prompts[1].unflatten(0, net.per_prompt)[0]
    with torch.no_grad():
        found = net.with_prompts(given.images, torch.ones(4, 1, dtype=torch.int64))
        for index, image in enumerate(given.images):
            both = own[0] if index < 2 else own[1]
            pairs = twin.prefixes_of({0: (net.general[0], net.general[1]), 1: (both, both)})
            expected = tuning.features(weights, HEADS, image, prefixes=pairs)
            torch.testing.assert_close(found[index], expected, rtol=1e-4, atol=1e-5)
