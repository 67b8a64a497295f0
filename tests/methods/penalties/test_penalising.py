"""The penalty of EWC, MAS and SI, against a slow twin."""

import pytest
import torch
from reference import penalties
from support.methods import BATCH, flat, grown, negative_log_likelihood
from support.small_runs import batch_of

from pycil_wsc.training.learner import grow_for

NEW = torch.tensor([4, 6, 5, 4, 5, 6])  # of the second task


@pytest.mark.parametrize("name, strength", [("ewc", 0.5 * 7), ("mas", 7), ("si", 7)])
def test_the_penalty_is_the_twins(name, strength, digits, tmp_path):
    key = "c" if name == "si" else "lamda"
    learner, tasks = grown(name, 1, digits, tmp_path, **{key: 7.0, "convnet_options.width": 4})
    generator = torch.Generator().manual_seed(3)
    for part in (learner.importance, learner.anchor):
        for place, parameter in learner.trained().items():
            part[place] = torch.rand(parameter.shape, generator=generator)
    grow_for(learner, tasks[1])
    learner.begin_task(tasks[1])
    learner.eval()
    loss, logits = learner.loss(batch_of(BATCH, NEW))
    importance, anchor = flat(learner.importance), flat(learner.anchor)
    columns = {place: len(values) for place, values in anchor.items()}
    twin = penalties.penalty(importance, anchor, flat(learner.trained()), columns)
    assert loss.item() - negative_log_likelihood(logits[:, 4:], NEW - 4).item() == pytest.approx(
        strength * twin, rel=1e-4
    )
