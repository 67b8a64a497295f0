"""The recorded step: the same numbers as the step it was recorded from, on any batch."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from small_runs import ROOT, batch_of, results, without_measurements, write
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.consolidation import Average, Blend, WeightSpaceConsolidation
from pycil_wsc.data.datasets import load_dataset
from pycil_wsc.engine.recorded_passes import Passes, RecordedPasses
from pycil_wsc.errors import UnusableRun
from pycil_wsc.learners.base import BaseLearner
from pycil_wsc.runs.run import Run


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 3))


def data(step, size):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(3, (size,), generator=generator)


class Tape(TorchDispatchMode):
    """What a CUDA graph does, on the CPU: the operators are recorded,
    and no Python beside them runs when they are replayed.

    Each writes into the memory that recording left. As on a GPU, what waits for the device cannot be recorded.
    """

    def __init__(self):
        super().__init__()
        self.operators, self.written, self.made = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero"):
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        before = [(tensor, tensor.detach().clone()) for tensor in tensors((args, kwargs))]
        results = func(*args, **kwargs)
        self.written += [
            (tensor, content) for tensor, content in before if not torch.equal(tensor, content)
        ]  # batch norm does not declare it
        self.operators.append((func, *tree_map(detached, (args, kwargs, results))))
        known = {place(tensor) for tensor in tensors((args, kwargs))}
        self.made += [tensor.detach() for tensor in tensors(results) if place(tensor) not in known]
        return results

    @torch.no_grad()
    def forget(self):
        """Recording computes nothing: overwritten memory is restored, and new tensors are undefined."""
        for tensor in self.made:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 99)
        for tensor, content in reversed(self.written):
            tensor.data.copy_(content)

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, made in self.operators:
            for old, new in zip(tensors(made), tensors(func(*args, **kwargs))):
                if place(old) != place(new):
                    old.copy_(new)


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def place(tensor):
    return tensor.untyped_storage().data_ptr()


def detached(value):
    return value.detach() if isinstance(value, torch.Tensor) else value


def as_a_graph(function):
    with Tape() as tape:
        function()
    tape.forget()
    return tape.replay


def train(make, sizes):
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    wsc = WeightSpaceConsolidation(net.named_parameters(), warmup_steps=7, average=Average(every=2), reset=Blend())
    wsc.attach(optimizer)

    def compute(batch):
        logits = net(batch.images)
        return cross_entropy(logits, batch.targets), logits

    passes, told = make(net, compute, optimizer), []
    for step, size in enumerate(sizes):
        loss, right = passes(batch_of(*data(step, size)))
        told.append((loss.item(), right.item()))
        optimizer.step()
        passes.clear()
    wsc.finish()
    return net, told


@pytest.mark.parametrize("sizes", [[8] * 12, [8, 8, 8, 8, 8, 5] * 3, [8, 5] * 8])
def test_replayed_steps_are_the_steps(sizes):
    recorded = []

    def recording(net, compute, optimizer):
        def record(function):
            recorded.append(function)
            return as_a_graph(function)

        return RecordedPasses(compute, optimizer, net.parameters(), record)

    plain, losses = train(lambda net, compute, optimizer: Passes(compute, optimizer), sizes)
    ours, our_losses = train(recording, sizes)
    assert len(recorded) == 1, "a phase is recorded once"
    assert our_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), plain.state_dict().values()))


@pytest.mark.parametrize(
    "problem, raised, says",
    [
        (
            RuntimeError("operation not permitted when stream is capturing\nand more"),
            UnusableRun,
            r"cuda_graph: .*cannot be recorded \(operation not permitted when stream is capturing\); set it to false",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "CUDA out of memory"),
    ],
)
def test_a_loss_that_cannot_be_recorded_stops_the_run_and_the_message_says_what_to_set(problem, raised, says):
    def refuse(function):
        raise problem

    with pytest.raises(raised, match=says):
        train(
            lambda net, compute, optimizer: RecordedPasses(compute, optimizer, net.parameters(), refuse),
            [8] * (RecordedPasses.eager + 1),
        )


METHODS = [(name, {}) for name in sorted(registry.learners)]
METHODS += [
    ("wsc", {"wsc.reset": "continual_backprop", "wsc.maturity": 2, "wsc.replacement_rate": 0.05}),
    ("der", {"consolidate": True}),
    ("wsc", {"optimizer": "adamw", "clip_norm": 0.5}),
]


@pytest.mark.parametrize("method, keys", METHODS)
def test_runs_whose_passes_are_recorded_are_the_plain_ones(method, keys, settings, tmp_path, monkeypatch, caplog):
    """No Python of a loss, a network or a hook runs in a replayed step:
    what depends on it would go wrong here as on a GPU.
    """
    settings |= {"model_name": method, "batch_size": 4, "init_epoch": 1, "epochs": 2, "wsc.warmup": 0.5} | keys
    settings["max_tasks"] = tasks = 3 if method in ("der", "foster", "memo") else 2  # where networks grow, once more
    recorded = []
    monkeypatch.setattr(
        "pycil_wsc.learners.loop.cuda_graph", lambda device, function: recorded.append(function) or as_a_graph(function)
    )
    results = []
    for name, records in (("plain", False), ("recorded", True)):
        monkeypatch.setattr(BaseLearner, "records_passes", records)
        config = resolve(settings | {"out": str(tmp_path / name)})
        results.append(without_measurements(Run(config, load_dataset(config.dataset, ".")).execute()))
        results[-1].pop("config")
    assert results[0] == results[1] and not caplog.records
    assert len(recorded) >= tasks, "a phase of each task at least"


SHORT = {"model_name": "finetune", "batch_size": 4, "init_epoch": 1, "epochs": 1}  # long enough to be recorded


def test_on_the_cpu_nothing_is_recorded_and_results_are_the_same(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("pycil_wsc.learners.loop.cuda_graph", lambda *_: pytest.fail("recorded"))
    settings |= SHORT
    results = []
    for name, keys in (("plain", {}), ("asked", {"cuda_graph": True})):
        config = resolve(settings | {"out": str(tmp_path / name)} | keys)
        results.append(Run(config, load_dataset(config.dataset, ".")).execute()["matrix"])
    assert results[0] == results[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method, more", METHODS)
def test_on_a_gpu_recorded_runs_are_the_plain_ones_to_rounding(method, more, settings, tmp_path):
    runs, settings = [], settings | more
    for name, keys in (("plain", {}), ("recorded", {"cuda_graph": True})):
        config = resolve(
            settings
            | {
                "out": str(tmp_path / name),
                "device": "cuda",
                "model_name": method,
                "precision": "fp32",
                "deterministic": True,
                "batch_size": 4,
            }
            | keys
        )
        runs.append(Run(config, load_dataset(config.dataset, ".")).execute())
    for plain, recorded in zip(*(result["train_loss"] for result in runs)):
        assert np.allclose(plain, recorded, rtol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_deterministic_runs_are_equal_to_the_bit(settings, tmp_path):
    results = []
    for name in ("first", "second"):
        config = resolve(settings | {"out": str(tmp_path / name), "device": "cuda", "deterministic": True})
        results.append(Run(config, load_dataset(config.dataset, ".")).execute())
    assert results[0]["train_loss"] == results[1]["train_loss"] and results[0]["matrix"] == results[1]["matrix"]


def test_deterministic_is_asked_of_torch_for_this_run_alone(settings, tmp_path, monkeypatch):
    asked = []
    settings |= SHORT | {"max_tasks": 1}
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    for name, wanted in (("yes", True), ("no", False)):
        config = resolve(settings | {"out": str(tmp_path / name), "deterministic": wanted})
        Run(config, load_dataset(config.dataset, ".")).execute()
    assert asked == [True, False]


WAITS = """
import sys

from pycil_wsc.learners.replay import Replay
from pycil_wsc.launch.command import main

whole = Replay.loss


def waits(self, batch):
    loss, logits = whole(self, batch)
    return loss * (loss.item() / loss.item()), logits


if __name__ == "__main__":
    Replay.loss = waits
    sys.exit(main())
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_loss_that_waits_stops_its_run_alone(settings, tmp_path):
    """In a process of its own, as torch does not recover from a failed recording."""
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    settings |= {"model_name": ["replay", "finetune"], "convnet_type": "resnet8", "batch_size": 4}
    file = write(tmp_path, settings | {"device": "cuda", "cuda_graph": True})
    call = [sys.executable, script, "--config", file]
    ended = subprocess.run(call, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 1 and ended.stderr.count("the loss cannot be recorded") == 1, ended.stderr
    assert [result["config"]["model_name"] for result in results(settings).values()] == ["finetune"]
