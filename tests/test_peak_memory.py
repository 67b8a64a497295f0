"""Peak memory of a training step with old networks beside the new one."""

import argparse

import peak_memory
import pytest
import throughput
import torch


@pytest.fixture(autouse=True)
def two_steps(monkeypatch):
    monkeypatch.setattr(peak_memory, "STEPS", 2)  # the second has the optimiser's state beside it


def peaks(name):
    args = argparse.Namespace(tasks=3, batch_size=32, precision="fp32", device="cpu")
    return peak_memory.measured(name, throughput.random_images(args.tasks, 2), torch.device("cpu"), args)


@pytest.mark.parametrize("name", ["icarl", "wa", "bic", "der", "foster"])
def test_old_networks_leave_no_activations(name):
    first, *later = peaks(name)
    assert max(later) < 1.05 * first


def test_the_old_blocks_of_memo_do_because_its_trunk_learns_through_them():
    first, second, third = peaks("memo")
    assert 1.1 * first < second and third - second == pytest.approx(second - first, rel=0.1)
