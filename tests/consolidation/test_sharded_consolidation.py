"""Consolidation attached to a model that FSDP2 shards over two processes: as on the whole model."""

import pytest
import torch
from support.small_processes import in_two_processes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from pycil_wsc.consolidation import (
    Average,
    Blend,
    WeightSpaceConsolidation,
    moment_score,
)
from pycil_wsc.studies.rival_resets import Random, ShrinkPerturb

SOURCES = ["own", "optimizer"]


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def follow(model, source):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    wsc = WeightSpaceConsolidation(
        model.named_parameters(),
        warmup_steps=3,
        importance=moment_score(source=source),
        average=Average(every=2),
        reset=Blend(),
    )
    return optimizer, wsc


def train(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(8, 5, generator=generator), torch.randint(3, (8,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def whole(model):
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in model.named_parameters()
    }


def sharded_training(source):
    """The weights at the end, of a training that is stopped before the reset, and after it,
    and resumed from whole states.
    """
    from pycil_wsc.training.processes import Processes

    Processes(timeout_minutes=1)
    model = new_model()
    fully_shard(model)
    optimizer, wsc = follow(model, source)
    wsc.attach(optimizer)
    train(model, optimizer, range(2))
    for steps in (range(2, 5), range(5, 9)):
        state = full(wsc.state_dict())
        wsc.detach()
        _, wsc = follow(model, source)
        wsc.load_state_dict(state)
        wsc.attach(optimizer)
        train(model, optimizer, steps)
    wsc.finish()
    return {name: tensor.tolist() for name, tensor in whole(model).items()}


def full(state):
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    return state.full_tensor() if hasattr(state, "full_tensor") else state


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_a_sharded_model_is_consolidated_like_a_whole_one(source):
    model = new_model()
    optimizer, wsc = follow(model, source)
    wsc.attach(optimizer)
    train(model, optimizer, range(9))
    wsc.finish()
    for weights in in_two_processes(sharded_training, source, seconds=100):
        for name, tensor in whole(model).items():
            torch.testing.assert_close(torch.tensor(weights[name]), tensor, rtol=1e-4, atol=1e-5)


def fresh():
    """New values that differ from row to row."""
    return {name: torch.arange(p.numel(), dtype=torch.float32).view_as(p) for name, p in new_model().named_parameters()}


def reset_weights(rule, shard):
    if shard:
        from pycil_wsc.training.processes import Processes

        Processes(timeout_minutes=1)
    model = new_model()
    if shard:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options = {"warmup_steps": 3, "average": None, "reset": {"random": Random, "shrink": ShrinkPerturb}[rule](fresh)}
    wsc = WeightSpaceConsolidation(model.named_parameters(), **options).attach(optimizer)
    train(model, optimizer, range(3))
    wsc.finish()
    return {name: tensor.tolist() for name, tensor in whole(model).items()}


@pytest.mark.parametrize("rule", ["random", "shrink"])
def test_new_initial_values_of_a_sharded_model_are_those_of_its_rows(rule):
    expected = reset_weights(rule, False)
    for weights in in_two_processes(reset_weights, rule, True, seconds=100):
        for name, values in expected.items():
            torch.testing.assert_close(torch.tensor(weights[name]), torch.tensor(values), rtol=1e-4, atol=1e-5)


def test_an_optimiser_that_was_replaced_is_named_at_the_end():
    model = new_model()
    optimizer, wsc = follow(model, "own")
    wsc.attach(optimizer)
    train(model, torch.optim.AdamW(model.parameters()), range(4))
    with pytest.raises(RuntimeError, match="before any step of the optimizer that attach\\(\\) follows"):
        wsc.finish()


def test_an_optimiser_with_quantised_moments_is_refused_at_once():
    model = new_model()
    kind = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "torchao.optim.adam"})
    _, wsc = follow(model, "optimizer")
    with pytest.raises(ValueError, match="AdamW8bit keeps its moments quantised"):
        wsc.attach(kind(model.parameters()))
    follow(model, "own")[1].attach(kind(model.parameters()))
