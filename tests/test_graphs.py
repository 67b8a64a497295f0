"""The recorded step: the same numbers as the step it was recorded from, on any batch."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pycil_wsc.config import resolve
from pycil_wsc.consolidation import WeightSpaceConsolidation
from pycil_wsc.learners.graphs import Passes, RecordedPasses
from pycil_wsc.trainer import Run
from utils.data import load_dataset


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 3))


def data(step, size):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(3, (size,), generator=generator)


def as_a_graph(net):
    """What a CUDA graph does: recording computes nothing, and each replay writes into the memory that recording left."""

    def record(function):
        before = copy.deepcopy(net.state_dict())
        function()
        net.load_state_dict(before)
        for p in net.parameters():
            p.grad.fill_(torch.nan)

        def replay():
            memory = [p.grad for p in net.parameters()]
            net.zero_grad(set_to_none=True)
            function()
            for p, place in zip(net.parameters(), memory):
                place.copy_(p.grad)
                p.grad = place

        return replay

    return record


def train(make, sizes):
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    wsc = WeightSpaceConsolidation(net.named_parameters(), warmup_steps=7, average_every=2).attach(optimizer)

    def compute(images, targets):
        logits = net(images)
        return cross_entropy(logits, targets), logits

    passes, told = make(net, compute, optimizer), []
    for step, size in enumerate(sizes):
        loss, right = passes(*data(step, size))
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
            return as_a_graph(net)(function)

        return RecordedPasses(compute, optimizer, net.parameters(), record)

    plain, losses = train(lambda net, compute, optimizer: Passes(compute, optimizer), sizes)
    ours, our_losses = train(recording, sizes)
    assert len(recorded) == 1, "a phase is recorded once"
    assert our_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), plain.state_dict().values()))


def test_a_loss_that_cannot_be_recorded_is_computed_as_usual(caplog):
    def refuse(function):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    plain, losses = train(lambda net, compute, optimizer: Passes(compute, optimizer), [8] * 9)
    with caplog.at_level("WARNING", "pycil_wsc"):
        ours, our_losses = train(lambda net, compute, optimizer: RecordedPasses(compute, optimizer, net.parameters(), refuse), [8] * 9)
    assert [record.getMessage() for record in caplog.records] == [
        "cuda_graph: the loss cannot be recorded, so every step is launched as usual (operation not permitted when stream is capturing)"
    ]
    assert our_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), plain.state_dict().values()))


def test_on_the_cpu_nothing_is_recorded_and_results_are_the_same(settings, tmp_path):
    results = []
    for name, keys in (("plain", {}), ("asked", {"cuda_graph": True})):
        config = resolve(settings | {"out": str(tmp_path / name)} | keys)
        results.append(Run(config, load_dataset(config.dataset, ".")).execute()["matrix"])
    assert results[0] == results[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["replay", "icarl", "wa", "bic", "der", "foster", "memo", "joint", "wsc"])
def test_on_a_gpu_recorded_runs_are_the_plain_ones_to_rounding(method, settings, tmp_path):
    results = []
    for name, keys in (("plain", {}), ("recorded", {"cuda_graph": True})):
        config = resolve(settings | {"out": str(tmp_path / name), "device": "cuda", "model_name": method, "precision": "fp32", "deterministic": True, "batch_size": 4} | keys)
        results.append(Run(config, load_dataset(config.dataset, ".")).execute())
    for plain, recorded in zip(*(result["train_loss"] for result in results)):
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
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    for name, wanted in (("yes", True), ("no", False)):
        config = resolve(settings | {"out": str(tmp_path / name), "deterministic": wanted})
        Run(config, load_dataset(config.dataset, ".")).execute()
    assert asked == [True, False]
