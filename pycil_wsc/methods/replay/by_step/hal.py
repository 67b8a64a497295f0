import copy
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from typing_extensions import Unpack

from pycil_wsc import seeding
from pycil_wsc.data.memory.stream_memory import StreamMemory
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.replay.er import ER
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.training.batch_norm.synced import synced_batch_norm
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments
from pycil_wsc.training.optimizers.parameter_groups import clip
from pycil_wsc.training.phase import Phase
from pycil_wsc.training.replay_plan import seed_of
from pycil_wsc.training.step.backward import Backward


@register_learner("hal", epochs=70, milestones=[30, 50])
class HAL(ER):
    """Hindsight anchor learning (Chaudhry et al., AAAI 2021, https://arxiv.org/abs/2002.08165) as Mammoth has it.

    ER's step, and one from the weights before it that keeps it from changing the logits of anchors: an image of each
    class, found by gradient steps after its task. The memory is a ring for each task.

    An anchor maximises forgetting, the loss after training on the memory less that before, near the mean features of
    the task. As in Mammoth the weights before are overwritten by those after, so that both losses cancel and the
    features alone are matched; ``hindsight`` ``paper`` keeps both. The step on the anchors also has the gradients of
    ER's.
    """

    @dataclass(frozen=True)
    class Options:
        hal_lambda: float = key(0.1, "weight of the anchors' logits (0.1 in Mammoth)", low=0, decides="later tasks")
        feature_decay: float = key(
            0.5, "fraction of the mean features that a step keeps (Mammoth's beta)", low=0, high=1
        )
        feature_weight: float = key(0.1, "weight of the anchors' distance from them (Mammoth's gamma)", low=0)
        anchor_steps: int = key(100, "gradient steps that find an anchor (100 in Mammoth)", low=1)
        hindsight: str = key(
            "mammoth",
            "what anchors maximise: nothing, as both losses cancel (`mammoth`), or forgetting (`paper`)",
            choices=("mammoth", "paper"),
        )

    memory: StreamMemory

    class Plan(ER.Plan):
        ring = True

        def check(self) -> str | None:
            if self.config.fixed_memory:
                return "fixed_memory: 'hal' divides memory_size among the tasks; set it to false"
            return super().check()

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.optimizer_of_phase: Optimizer | None = None
        self.anchors: Tensor | None = None  # (classes, 3, H, W)
        self.features: Tensor | None = None  # (d,): the running mean
        self.batch: Batch | None = None  # of the step

    def phases(self, task: Task) -> Iterator[Phase]:
        for phase in super().phases(task):
            self.optimizer_of_phase = phase.optimizer
            yield phase

    def before_step(self, batch: Batch) -> Batch:
        if self.features is None:  # the first step of the task
            image = batch.images[: 1 if self.processes.first else 0]  # one image moves batch norm, as in Mammoth
            with torch.no_grad(), self.precision.autocast(), synced_batch_norm(self.processes):
                features = self.network.extract(image)
            self.features = features.new_zeros(features.shape[1], dtype=torch.float32)
        return batch

    def after_backward(self, batch: Batch, backward: Backward) -> None:
        self.batch = batch
        if self.anchors is None:
            return
        parameters: list[Tensor] = [parameter for parameter in self.network.parameters() if parameter.grad is not None]
        present = [parameter.grad for parameter in parameters if parameter.grad is not None]
        before = [parameter.detach().clone() for parameter in parameters]
        assert self.optimizer_of_phase is not None
        clip(self.optimizer_of_phase, self.config.clip_norm)
        self.optimizer_of_phase.step()
        with torch.no_grad():
            after = self._logits(self.network, self.anchors)
            torch._foreach_copy_(parameters, before)
        with torch.enable_grad():
            distance = (after - self._logits(self.network, self.anchors)).square().mean()
            gradients = torch.autograd.grad(self.config.options.hal_lambda * distance, parameters)
        torch._foreach_add_(present, list(gradients))

    @torch.no_grad()
    def after_step(self) -> None:
        assert self.batch is not None and self.features is not None
        with self.precision.autocast(), synced_batch_norm(self.processes):
            features = self.network.extract(self.batch.images).float()
        mean = self.processes.sum_(features.sum(0)) / (self.batch.whole or len(self.batch))
        self.features.lerp_(mean, 1 - self.config.options.feature_decay)

    def _logits(self, network: nn.Module, images: Tensor) -> Tensor:
        with self.precision.autocast():
            return network(images).float()

    def end_task(self, task: Task) -> None:
        super().end_task(task)
        anchors = self._found(task)
        self.anchors = anchors if self.anchors is None else torch.cat([self.anchors, anchors])
        self.features = None
        self.batch = None

    def _found(self, task: Task) -> Tensor:
        """An anchor of each class of the task: (classes, 3, H, W)."""
        options = self.config.options
        assert self.features is not None
        before = copy.deepcopy(self.network).train()
        after = self._trained_on_memory(task, before)
        if options.hindsight == "mammoth":
            before = after
        side = self.batches.source.info.image_size
        labels = np.unique(self.manager.train_targets[task.train_indices])
        with seeding.seeded(self.config.seed, "anchors", task.index):
            starts = torch.rand(len(labels), 3, side, side)
        anchors = []
        for start, label in zip(starts.to(self.device), torch.from_numpy(labels).to(self.device), strict=True):
            anchor = start[None].requires_grad_()
            for _ in range(options.anchor_steps):
                loss = options.feature_weight * (self._extracted(before, anchor) - self.features).square().sum()
                if before is not after:  # else the losses cancel
                    forgotten = cross_entropy(self._logits(after, anchor), label[None])
                    loss = loss - forgotten + cross_entropy(self._logits(before, anchor), label[None])
                (gradient,) = torch.autograd.grad(loss, anchor)
                anchor = (anchor - self._rate(task) * gradient).detach().requires_grad_()
            anchors.append(anchor.detach())
        return torch.cat(anchors)

    def _trained_on_memory(self, task: Task, network: nn.Module) -> nn.Module:
        """A copy of ``network`` after a step on one batch from the memory."""
        config = self.config
        trained = copy.deepcopy(network)
        address = (task.index, "anchors")
        rng = np.random.default_rng(seed_of(config, "slots", *address))
        slots = rng.permutation(len(self.memory))[: config.batch_size]
        images, targets = next(
            self.batches.source.batches(
                self.memory.slots[slots],
                self.manager.train_targets,
                len(slots),
                train=True,
                seed=seed_of(config, "replay", *address),
                shuffle=False,
                augmentation=config.augmentation,
            )
        )
        parameters: list[Tensor] = [parameter for parameter in trained.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(self.over.cross_entropy(self._logits(trained, images), targets), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, list(gradients), alpha=-self._rate(task))
        return trained

    def _rate(self, task: Task) -> float:
        return self.config.lrate if task.index else self.config.init_lr

    def _extracted(self, network: nn.Module, images: Tensor) -> Tensor:
        with self.precision.autocast():
            return network.extract(images).float()  # pyright: ignore[reportCallIssue]

    def get_extra_state(self) -> State:
        return super().get_extra_state() | {"anchors": self.anchors, "features": self.features}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.anchors, self.features = (
            None if state[name] is None else state[name].to(self.device) for name in ("anchors", "features")
        )
