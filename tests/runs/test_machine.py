"""How a run uses its machine."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.small_processes import in_two_processes

from pycil_wsc import devices
from pycil_wsc.training.processes import exchange, from_first, rank_and_count

ROOT = Path(__file__).resolve().parents[2]
IN_A_PROCESS_OF_ITS_OWN = """
import resource, torch
from pycil_wsc.devices import peak_memory, reset_peak_memory
from pycil_wsc.allocator import keep_freed_memory

def faults_of_steps():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

device = torch.device("cpu")
usual = faults_of_steps()
keep_freed_memory(device)
faults_of_steps()
kept = faults_of_steps()
blocks = [torch.ones(2**24) for _ in range(4)]
before = peak_memory(device)
del blocks
reset_peak_memory(device)
print(usual, kept, before - peak_memory(device))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_a_steps_memory_is_the_next_steps_and_not_the_next_runs():
    """Page faults are the operating system's count of memory that it had to hand out."""
    printed = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    usual, kept, given_back = map(int, printed.split())
    assert usual > 20 * 2**26 / 2**21  # every block is new to the process, in pages of 2 MiB at most
    assert kept < usual / 10
    assert given_back > 3 * 2**26  # a new run's peak does not count what was kept of the last


@pytest.mark.parametrize("platform, size", [("darwin", 5_000_000), ("freebsd", 5_000_000 * 1024)])
def test_without_proc_the_peak_is_in_the_units_of_the_operating_system(platform, size, monkeypatch):
    """``getrusage`` counts bytes on macOS and kilobytes elsewhere."""
    monkeypatch.setattr(devices.Path, "exists", lambda path: False)
    monkeypatch.setattr(devices.sys, "platform", platform)
    monkeypatch.setattr(devices.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5_000_000))
    assert devices.peak_memory(torch.device("cpu")) == size


def exchanged():
    rank, _ = rank_and_count()
    words = ("first", "second", "third")
    return [(exchange((word, rank)), from_first((word, rank))) for word in words]


def test_processes_exchange_as_many_messages_as_they_like():
    expected = [([(word, 0), (word, 1)], (word, 0)) for word in ("first", "second", "third")]
    assert in_two_processes(exchanged) == [expected, expected]
