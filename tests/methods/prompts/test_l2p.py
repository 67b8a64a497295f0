"""L2P: the prompts of the nearest keys, against slow references; as PILOT's code."""

import pytest
import torch
from reference import prompts as twin
from support.prompts import HEADS, assert_same, expected_loss, prompted, queries, random_batch
from support.small_runs import batch_of

from pycil_wsc.networks.tuning.pools import PromptPool

pytest.importorskip("timm")


@pytest.mark.parametrize("vote", [True, False])
def test_l2ps_images_get_the_prompts_of_the_nearest_keys_or_those_that_most_choose(vote, tmp_path):
    learner = prompted("l2p", tmp_path, batchwise_prompt=vote, head_type="prompt")
    given = random_batch(learner)
    pool = learner.network.prompts
    weights, asked = queries(learner, given.images)
    own = [twin.nearest(pool.keys, query, 2) for query in asked]
    chosen = [twin.elected(own, 2)] * len(own) if vote else own
    features = [
        twin.l2p_features(weights, HEADS, image, pool.prompts[numbers].flatten(0, 1))
        for image, numbers in zip(given.images, chosen)
    ]
    logits, loss = expected_loss(learner, features, given.targets, first=2)
    pulls = [twin.pull(pool.keys, query, numbers) for query, numbers in zip(asked, chosen)]
    assert_same(learner, given, logits, loss - 0.1 * sum(pulls) / len(pulls))
    alone = [
        twin.l2p_features(weights, HEADS, image, pool.prompts[n].flatten(0, 1)) for image, n in zip(given.images, own)
    ]
    with torch.no_grad():
        torch.testing.assert_close(learner.extract(given.images), torch.stack(alone), rtol=1e-4, atol=1e-5)


def test_ties_of_votes_are_broken_as_in_pilot():
    """Among those that are chosen, in ascending order, as torch.topk does."""
    pool = PromptPool(6, (1, 4), 4, 2)
    for rows in ([[5, 1], [1, 4], [4, 5]], [[3, 2], [2, 5], [0, 3]], [[0, 1], [2, 3]]):
        best = torch.tensor(rows)
        numbers, counts = torch.unique(best, return_counts=True, sorted=True)
        missing = 6 - len(numbers)
        counts = torch.cat([counts, torch.zeros(missing, dtype=counts.dtype)])
        expected = numbers[counts.topk(2).indices]
        similarity = torch.zeros(len(rows), 6).scatter(1, best, torch.tensor([[2.0, 1.0]]).expand(len(rows), 2))
        assert pool.chosen(similarity, lambda votes: votes)[0].tolist() == expected.tolist()


def test_with_exemplars_all_classes_are_told_apart(tmp_path):
    learner = prompted("l2p", tmp_path, memory_per_class=2)
    tasks = learner.manager.tasks
    learner._choose_exemplars(tasks[0])
    learner.begin_task(tasks[1])
    given = batch_of(random_batch(learner).images, torch.tensor([0, 1, 2, 3, 0]))
    loss, logits = learner.loss(given)
    similarity = learner.network.prompts.similarity(learner.network.queries(given.images))
    chosen = learner.network.prompts.chosen(similarity, lambda votes: votes)
    pull = similarity.gather(1, chosen).sum(1).mean()
    expected = torch.nn.functional.cross_entropy(logits, given.targets) - 0.1 * pull
    torch.testing.assert_close(loss, expected)
