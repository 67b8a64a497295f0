"""Which device a process computes on, and with which algorithms."""

import subprocess
import sys
import types

import pytest
import simulated_device
import torch
from structure import ROOT

from pycil_wsc import devices
from pycil_wsc.config.loading import resolve
from pycil_wsc.devices import numbered, resolved_device
from pycil_wsc.errors import UserError
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.runs.run import Run
from pycil_wsc.training.processes import Processes, backends


@pytest.fixture
def chosen(monkeypatch):
    """The numbers of the GPUs that become current, on a machine that seems to have four, of which 2 is current."""
    numbers = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", numbers.append)
    return numbers


@pytest.mark.parametrize("name, number", [("auto", 2), ("cuda", 2), ("cuda:1", 1), ("gpu:3", 3)])
def test_a_gpu_has_a_number_and_becomes_the_current_one(name, number, chosen):
    device = resolved_device(name)
    assert Processes().device(device) == torch.device("cuda", number) == numbered(device)
    assert chosen == [number]


@pytest.mark.parametrize("name", ["cuda:4", "gpu:4", "mps", "xpu:0", "cpu:1", "cdua"])
def test_a_device_that_is_not_there_is_named_beside_those_that_are(name, chosen):
    with pytest.raises(UserError, match=r"is not available \(on this machine: cuda:0, .*cuda:3\); use auto or cpu"):
        resolved_device(name)


def test_each_of_several_processes_has_its_own_gpu(chosen, monkeypatch):
    processes = Processes()
    processes.count = 4
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert processes.device(torch.device("cuda")) == torch.device("cuda", 3)
    assert chosen == [3]


def test_the_cpu_stays_the_cpu(chosen):
    assert Processes().device(torch.device("cpu")) == torch.device("cpu") and chosen == []


@pytest.mark.parametrize("kind, backend", [("cuda", "nccl"), ("xpu", "xccl"), ("mps", "gloo")])
def test_processes_send_through_torchs_own_backend_for_the_device_and_the_cpu(kind, backend, monkeypatch):
    assert backends() == "cpu:gloo"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
    assert backends() == f"cpu:gloo,{kind}:{backend}"


def test_a_device_that_torch_cannot_send_from_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("vulkan"))
    with pytest.raises(
        UserError, match="^torchrun: torch knows no way to send tensors between devices of type 'vulkan'$"
    ):
        backends()


@pytest.mark.parametrize("native", [True, False])
def test_bf16_is_asked_of_devices_whose_function_takes_no_argument(native, monkeypatch):
    module = types.SimpleNamespace(is_bf16_supported=lambda: native)
    monkeypatch.setattr(devices, "_module", lambda device: module)
    monkeypatch.setattr(devices, "computes_bf16", lambda device: True)
    assert devices.computes_bf16_natively.__wrapped__(torch.device("meta")) is native


@pytest.mark.parametrize(
    "error, lack",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),  # of a context that cannot be made
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
    ],
)
def test_a_lack_of_memory_is_told_from_other_errors(error, lack):
    assert devices.out_of_memory(error) is lack


@pytest.mark.parametrize("wanted, selected", [("auto", [1]), ("cuda", [1]), ("cpu", []), ("cuda:0", [])])
def test_a_worker_selects_a_gpu_only_if_its_run_computes_on_one_and_names_none(wanted, selected, monkeypatch):
    found = []
    monkeypatch.setattr(devices, "count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", found.append)
    devices.take_turns(3, wanted)
    assert found == selected


@pytest.mark.slow
def test_everything_on_the_simulated_accelerator():
    """The tests of ``test_accelerators.py``, in a process without others: see ``shared_fixtures.py``."""
    if reason := simulated_device.reason_to_skip():
        pytest.skip(reason)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
    ended = subprocess.run([*command, "tests/training/test_accelerators.py"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-10_000:]


def result_of(settings, name, **keys):
    config = resolve(settings | keys | {"prefix": name, "cache_first_task": False})
    return Run(config, Datasets().of(config), lambda progress: None).execute()


@pytest.mark.parametrize("before", [True, False])
def test_deterministic_is_asked_of_torch_for_its_run_alone(before, settings, monkeypatch):
    """What the process had asked for holds again when the run has ended."""
    asked, enabled = [], torch.are_deterministic_algorithms_enabled
    monkeypatch.setattr(Replay, "after_step", lambda learner: asked.append(enabled()))
    torch.use_deterministic_algorithms(before, warn_only=True)
    try:
        for name, wanted in (("yes", True), ("no", False)):
            result_of(settings, name, deterministic=wanted, model_name="replay", max_tasks=1, init_epoch=1)
            assert set(asked) == {wanted}
            assert enabled() == before
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            asked.clear()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_deterministic_runs_are_equal_to_the_bit(settings):
    first, second = (result_of(settings, name, device="cuda", deterministic=True) for name in ("first", "second"))
    assert first["train_loss"] == second["train_loss"]
    assert first["matrix"] == second["matrix"]
