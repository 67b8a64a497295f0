"""What several tests share: see ``test_consolidation.py``."""

import torch
from torch import nn

from pycil_wsc.consolidation import (
    Blend,
    WeightSpaceConsolidation,
)


def small_net(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    return net.to(dtype)


def start(lr=0.1, momentum=0.9, dtype=torch.float32, **options):
    """-> a small network, its optimiser, and a consolidation that follows it."""
    net = small_net(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
    return net, optimizer, consolidated(net, optimizer, **options)


def train(net, optimizer, steps):
    for step in steps:
        train_step(net, optimizer, step)


def train_step(net, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    dtype = next(net.parameters()).dtype
    inputs = torch.randn(8, 4, generator=generator).to(dtype)
    targets = torch.randint(3, (8,), generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(inputs), targets).backward()
    optimizer.step()


def consolidated(net, optimizer, **options):
    return WeightSpaceConsolidation(net.named_parameters(), **{"reset": Blend(), **options}).attach(optimizer)


def snapshot(net):
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}
