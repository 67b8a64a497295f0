import contextlib
import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pycil_wsc import seeding
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.networks.heads import part_of
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.training.batch_norm.synced import synced_batch_norm
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments


@register_learner("cls_er", epochs=70, milestones=[30, 50])
class CLSER(Replay):
    """Complementary learning systems with ER (Arani et al., ICLR 2022, https://arxiv.org/abs/2201.12604), as the
    authors' code has it.

    Two moving averages of the weights are updated after a random fraction of the steps, the plastic one more often than
    the stable one. Logits of a replayed batch are drawn to those of the average that gives the label the higher
    probability. The averages see the replayed batches in training mode, from which they have their statistics of batch
    norm. The stable average is tested, and the next task goes on from the weights that were trained.

    With ``memory_update`` "task", exemplars are among the images of a batch, and both averages are in evaluation mode:
    their statistics of batch norm are averages, too.
    """

    @dataclass(frozen=True)
    class Options:
        consistency: float = key(
            0.1, "weight of the distance from the averages' logits (0.1 is the default of the authors' program)", low=0
        )
        plastic_rate: float = key(
            0.9,
            "fraction of the steps that update the plastic average (0.9 is the default of the authors' program)",
            low=0,
            high=1,
        )
        stable_rate: float = key(
            0.7,
            "fraction of the steps that update the stable average (0.7 is the default of the authors' program)",
            low=0,
            high=1,
        )
        plastic_decay: float = key(
            0.999,
            "fraction of the plastic average that an update keeps, in the n-th step at most n / (n + 1) (0.999 is the "
            "default of the authors' program)",
            low=0,
            below=1,
        )
        stable_decay: float = key(
            0.999,
            "fraction of the stable average that an update keeps, in the n-th step at most n / (n + 1) (0.999 is the "
            "default of the authors' program)",
            low=0,
            below=1,
        )

    class Plan(Replay.Plan):
        needs_exemplars = True
        memory_updates = ("step", "task")
        task_free = True
        averages = True
        plain_first_task = False  # its average is tested

        def time_constants(self, network: nn.Module) -> dict[str, float]:
            """Of both averages, which are updated in a part of the steps only."""
            options = self.config.options
            updates = {"plastic_decay": options.plastic_rate, "stable_decay": options.stable_rate}
            return {name: 1 / (1 - getattr(options, name)) / rate for name, rate in updates.items() if rate}

    plastic: IncrementalNet
    stable: IncrementalNet

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.steps = 0  # optimiser steps in all tasks
        self.working: list[Tensor] = []  # the network's weights, while it has those of the stable average

    @torch.no_grad()
    def grow(self, task: Task) -> None:
        super().grow(task)
        for name in ("plastic", "stable"):
            grown = copy.deepcopy(self.network).requires_grad_(False)
            if task.index:
                for old, new in zip(tensors(getattr(self, name)), tensors(grown), strict=True):
                    part_of(new, old).copy_(old)
            setattr(self, name, grown)

    @torch.no_grad()
    def begin_task(self, task: Task) -> None:
        super().begin_task(task)
        for tensor, grown in zip(self.working, tensors(self.network)):
            part_of(grown, tensor).copy_(tensor)
        self.working = []

    @torch.no_grad()
    def before_step(self, batch: Batch) -> Batch:
        """Add the logits of the surer average, (B, classes) float32: of a replayed batch, or of the exemplars in the
        batch, with 0 in the rows of the task's own images.
        """
        if self.config.by_step:
            wanted = tuple(self._surer(replayed.images, replayed.targets[:, None]) for replayed in batch.replay)
            return replace(batch, drawn=(*batch.drawn, *wanted))
        if not len(self.memory):
            return batch
        rows = batch.exemplar_rows
        wanted = torch.zeros(len(batch), self.network.head.out_features, device=self.device)
        if len(rows):
            wanted.index_copy_(0, rows, self._surer(batch.images[rows], batch.targets[rows, None]))
        return replace(batch, drawn=(*batch.drawn, wanted))

    def _surer(self, images, labels):
        """The logits of the average that gives the labels (B, 1) the higher probability: (B, classes)."""
        synced = contextlib.nullcontext()
        if self.config.by_step:
            synced = synced_batch_norm(self.processes)
            self.stable.train()
            self.plastic.train()
        with self.precision.autocast(), synced:
            stable, plastic = self.stable(images).float(), self.plastic(images).float()
        surer = stable.softmax(1).gather(1, labels) > plastic.softmax(1).gather(1, labels)
        return torch.where(surer, stable, plastic)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.config.by_step:
            return self.joined_loss(batch)
        if not len(self.memory):
            return super().loss(batch)
        *_, wanted = batch.drawn
        logits = self.network(batch.images).float()
        distances = (logits - wanted).square().mean(1)
        replayed = self.over.mean(distances, batch.from_memory)
        return self.over.cross_entropy(logits, batch.targets) + self.config.options.consistency * replayed, logits

    def joined_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """With ``memory_update`` "step": of the batch and a replayed one, which the network sees twice."""
        consistency = batch.targets.new_zeros((), dtype=torch.float32)
        for replayed, wanted in zip(batch.replay, batch.drawn):
            distances = (self.network(replayed.images).float() - wanted).square().mean(1)
            consistency = consistency + self.over.mean(distances, batch=batch)
        both = batch.joined()
        logits = self.network(both.images).float()
        errors = self.over.cross_entropy(logits, both.targets, reduction="none")
        loss = self.over.mean(errors, batch=batch) + self.config.options.consistency * consistency
        return loss, logits[: len(batch)]

    @torch.no_grad()
    def after_step(self) -> None:
        self.steps += 1
        options = self.config.options
        seed = seeding.derived_seed(self.config.seed, "averages", self.steps)
        first, second = np.random.default_rng(seed).random(2)
        if first < options.plastic_rate:
            self._update(self.plastic, options.plastic_decay)
        if second < options.stable_rate:
            self._update(self.stable, options.stable_decay)

    def _update(self, average, decay):
        decay = min(1 - 1 / (self.steps + 1), decay)
        averaged: list[Tensor] = list(average.parameters())
        trained: list[Tensor] = list(self.network.parameters())
        if not self.config.by_step:
            averaged = tensors(average)
            trained = tensors(self.network)
        torch._foreach_lerp_(averaged, trained, 1 - decay)

    def extract(self, images: Tensor) -> Tensor:
        """Of the stable average, also while a task is trained."""
        return self.stable.extract(images)

    def classify(self, features: Tensor) -> Tensor:
        return self.outputs.known(self.stable.classify(features))

    @torch.no_grad()
    def end_task(self, task: Task) -> None:
        super().end_task(task)
        self.working = [value.clone() for value in tensors(self.network)]
        torch._foreach_copy_(tensors(self.network), tensors(self.stable))

    def get_extra_state(self) -> State:
        names = [name for name, value in self.network.state_dict().items() if value.is_floating_point()]
        working = dict(zip(names, self.working)) if self.working else {}
        return super().get_extra_state() | {"steps": self.steps, "working": working}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.steps = state["steps"]
        self.working = [value.to(self.device) for value in state["working"].values()]


def tensors(network: nn.Module) -> list[Tensor]:
    """The weights and floating-point statistics of a network."""
    return [value for value in network.state_dict().values() if value.is_floating_point()]
