"""EMA: the average, and its decay."""

import math

import pytest
import torch
from support.at_task_end import after
from support.methods import SILENT


def weights(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()])


@pytest.mark.parametrize("decay", [0.0, 0.6, 0.999])
def test_the_moving_average_keeps_its_decay_from_the_first_step_on(decay, digits, tmp_path):
    """Shares fall by ``decay`` with each step back, and add up to 1; statistics of batch norm included."""
    learner, tasks = after("ema", 0, digits, tmp_path, decay=decay)
    step, seen = learner.after_step, []

    def watched():
        step()
        seen.append({name: value.double().clone() for name, value in learner.network.state_dict().items()})

    learner.after_step = watched
    learner.learn(tasks[0], SILENT)
    powers = [decay**age for age in reversed(range(len(seen)))]
    assert len(seen) > 8
    shares = [power / math.fsum(powers) for power in powers]
    for name, value in learner.network.state_dict().items():
        if value.is_floating_point():
            expected = sum(share * weights[name] for share, weights in zip(shares, seen))
            torch.testing.assert_close(value.double(), expected, rtol=1e-3, atol=1e-4)
