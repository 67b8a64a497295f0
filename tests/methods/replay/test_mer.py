"""MER: ER's steps, of which a part is kept, as in Mammoth."""

import pytest
from reference import mammoth_steps as twin
from support.steps import RATE, assert_same, drawn, pair, recorded, run_of

from pycil_wsc.config.loading import resolve

KEYS = {"beta": 0.5, "gamma": 0.7, "replay_batch_size": 8}


@pytest.mark.parametrize("times", [1, 3])
def test_a_part_of_each_step_is_kept_and_a_part_of_all_on_one_batch(times, digits, tmp_path):
    run = run_of("mer", digits, tmp_path, steps_per_batch=times, batch_size=48, **KEYS)
    steps = recorded(run, 1)
    for first in range(0, len(steps), times):
        group = steps[first : first + times]
        network = group[0].before
        twin.mer(network, [(pair(step.batch), drawn(step)) for step in group], RATE, 0.5, 0.7)
        assert_same(network, group[-1].after)


def test_a_batch_is_one_image_unless_another_size_is_given(digits, tmp_path):
    run = run_of("mer", digits, tmp_path)
    assert run.learner.config.batch_size == 64, "as given"
    assert resolve({"model_name": "mer"}).batch_size == 1
