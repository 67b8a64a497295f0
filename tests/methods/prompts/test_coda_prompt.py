"""CODA-Prompt: weighted components, against slow references; as PILOT's code."""

import pytest
import torch
from reference import prompts as twin
from reference import tuning
from support.prompts import HEADS, assert_same, expected_loss, prompted, queries, random_batch

from pycil_wsc.networks.tuning.pools import orthogonal

pytest.importorskip("timm")


@pytest.mark.parametrize("weight", [0, 0.5])
def test_codas_prompts_are_components_weighted_by_the_images_attention(weight, tmp_path):
    learner = prompted("coda_prompt", tmp_path, prompt_param=[6, 4, weight])
    given, net = random_batch(learner), learner.network
    weights, asked = queries(learner, given.images)
    parts = [part._trained() for part in net.components]  # earlier tasks' components are constants
    features = []
    for image, query in zip(given.images, asked):
        prompts = [twin.coda_prompt(query, *part) for part in parts]
        pairs = twin.prefixes_of({index: (prompt[:2], prompt[2:]) for index, prompt in enumerate(prompts)})
        features.append(tuning.features(weights, HEADS, image, prefixes=pairs))
    logits, loss = expected_loss(learner, features, given.targets, first=2)
    for rows in (rows.flatten(1) for part in parts for rows in part):
        loss = loss + weight * ((rows @ rows.T - torch.eye(len(rows))) ** 2).mean()
    assert_same(learner, given, logits, loss)
    learner.loss(given)[0].backward()
    gradient = net.components[0].keys.grad
    assert not gradient[:2].any() and gradient[2:].all(), "two components of each of three tasks"


def test_codas_new_components_are_orthonormal_and_orthogonal_to_all_before():
    torch.manual_seed(0)
    before = torch.linalg.qr(torch.randn(9, 3)).Q.T * torch.tensor([[1.0], [2.0], [0.5]])
    new = orthogonal(before, 4)
    torch.testing.assert_close(new @ new.T, torch.eye(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(new @ before.T, torch.zeros(4, 3), atol=1e-5, rtol=0)


def test_codas_rate_is_that_of_its_code_one_epoch_late(tmp_path):
    learner = prompted("coda_prompt", tmp_path, tasks=1, init_epoch=5)
    (phase,) = learner.phases(learner.manager.tasks[0])
    assert [phase.lr(epoch) for epoch in range(5)] == pytest.approx(twin.coda_rates(learner.config.init_lr, 5))
    one = prompted("coda_prompt", tmp_path, tasks=1, init_epoch=1)
    (phase,) = one.phases(one.manager.tasks[0])
    assert phase.lr(0) == one.config.init_lr
