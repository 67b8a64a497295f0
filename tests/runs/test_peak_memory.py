"""Peak memory of a training step with old networks beside the new one."""

import argparse

import peak_memory
import pytest
import throughput
import torch


@pytest.fixture(autouse=True)
def two_steps(monkeypatch):
    monkeypatch.setattr(peak_memory, "STEPS", 2)  # the second has the optimiser's state beside it


def peaks(name, tasks=3):
    args = argparse.Namespace(tasks=tasks, batch_size=16, precision="fp32", device="cpu")
    return peak_memory.measured(name, throughput.random_images(args.tasks, 2), torch.device("cpu"), args)


@pytest.mark.slow
@pytest.mark.parametrize("name, tasks", [("icarl", 2), ("bic", 2), ("der", 3), ("foster", 2)])
def test_old_networks_leave_no_activations(name, tasks):
    """DER has one old network more in each task, the others have one in all."""
    first, *later = peaks(name, tasks)
    assert len(later) == tasks - 1 and max(later) < 1.05 * first


@pytest.mark.slow
def test_the_old_blocks_of_memo_do_because_its_trunk_learns_through_them():
    first, second, third = peaks("memo")
    assert 1.1 * first < second and third - second == pytest.approx(second - first, rel=0.1)
