"""Which GPU a process computes on. Torch's own functions decide which arguments they accept."""

import pytest
import torch

from pycil_wsc.engine.environment import numbered
from pycil_wsc.engine.processes import Processes


@pytest.fixture
def chosen(monkeypatch):
    """The numbers of the GPUs that become current, on a machine that seems to have some, of which 2 is current."""
    numbers = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", numbers.append, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    return numbers


@pytest.mark.parametrize("name, number", [("cuda", 2), ("cuda:1", 1)])
def test_a_gpu_has_a_number_and_becomes_the_current_one(name, number, chosen):
    assert Processes().device(torch.device(name)) == torch.device("cuda", number) == numbered(torch.device(name))
    assert chosen == [number]


def test_each_of_several_processes_has_its_own_gpu(chosen, monkeypatch):
    processes = Processes()
    processes.count = 4
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert processes.device(torch.device("cuda")) == torch.device("cuda", 3)
    assert chosen == [3]


def test_the_cpu_stays_the_cpu(chosen):
    assert Processes().device(torch.device("cpu")) == torch.device("cpu") and chosen == []
