"""SI's importance, against a slow twin."""

import numpy as np
import torch
from reference import penalties
from support.methods import SILENT, after, flat, grown
from torch.nn.functional import cross_entropy

NEW = torch.tensor([4, 6, 5, 4, 5, 6])  # of the second task


def test_sis_importance_is_the_sum_over_the_path_of_the_loss_without_the_penalty(digits, tmp_path):
    learner, tasks = after("si", 1, digits, tmp_path, c=5.0, **{"convnet_options.width": 4})
    earlier = flat(learner.importance)
    paths = {}
    remember, step = learner.after_backward, learner.after_step
    seen = {}

    def watched(batch, backward):
        remember(batch, backward)
        parameters = learner.trained()
        logits = learner.network(batch.images)
        loss = cross_entropy(logits[:, 4:], batch.targets - 4)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        seen["before"] = flat(parameters), flat(dict(zip(parameters, gradients)))

    def stepped():
        step()
        before, gradients = seen["before"]
        for name, values in flat(learner.trained()).items():
            for place, value in enumerate(values):
                record = gradients[name][place], before[name][place], value
                paths.setdefault((name, place), []).append(record)

    learner.after_backward, learner.after_step = watched, stepped
    learner.learn(tasks[1], SILENT)
    assert len(paths["head.bias", 0]) > 3
    for name, ours in flat(learner.importance).items():
        expected = [penalties.path_importance(paths[name, place], 0.1) for place in range(len(ours))]
        for place, value in enumerate(earlier[name]):
            expected[place] += value
        np.testing.assert_allclose(ours, expected, rtol=1e-2, atol=2e-6)


def test_a_path_that_increased_the_loss_takes_from_sis_importance_down_to_zero(digits, tmp_path):
    learner, tasks = grown("si", 2, digits, tmp_path, **{"convnet_options.width": 4})
    learner.begin_task(tasks[1])
    head = learner.network.head.bias
    learner.importance = {"head.bias": torch.tensor([2.0, 2.0, 2.0, 2.0])}
    learner.path["head.bias"] = torch.tensor([0.2, -0.2, -3.0, 0.0, -1.0, 1.0, 0.0])
    with torch.no_grad():
        head += 0.2
    learner.end_task(tasks[1])
    expected = [2 + 0.2 / 0.14, 2 - 0.2 / 0.14, 0, 2, 0, 1 / 0.14, 0]
    torch.testing.assert_close(learner.importance["head.bias"], torch.tensor(expected))
