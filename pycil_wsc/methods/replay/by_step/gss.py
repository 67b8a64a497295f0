import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy
from typing_extensions import Unpack

from pycil_wsc import seeding
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.memory.stream_memory import NONE, StreamMemory
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.replay.by_step.pixels import Pixels
from pycil_wsc.methods.replay.er import ER
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments
from pycil_wsc.training.phase import PhaseRun
from pycil_wsc.training.replay_plan import Draw, draw_sizes, planned_images
from pycil_wsc.training.step.backward import Backward

EMPTY_SCORE = 0.1  # of the images of the first batch, as in Mammoth


@register_learner("gss", epochs=70, milestones=[30, 50])
class GSS(ER):
    """Gradient-based sample selection (Aljundi et al., NeurIPS 2019, https://arxiv.org/abs/1903.08671), greedily, as
    Mammoth has it.

    ER's step. An image replaces an exemplar, drawn by its score, the more likely the less its gradient is like those
    of drawn exemplars; a batch whose own gradient is like one of them is not kept. As in Mammoth, these gradients are
    those of pixels on the 0..1 scale, without normalisation and augmentation, in evaluation mode. What is chosen
    depends on the weights, so that each step waits for the device.
    """

    @dataclass(frozen=True)
    class Options:
        gss_batch_size: int | None = key(
            None, "exemplars whose gradients an image's is compared with; null: those of a replayed batch", low=1
        )

    class Plan(ER.Plan):
        fills_by_step = False

        def draws(self, task: Task) -> tuple[Draw, ...]:
            return ()  # of a memory that is not known in advance: see before_step

        def check(self) -> str | None:
            if self.config.fixed_memory:
                return "fixed_memory: 'gss' chooses among memory_size exemplars of all classes; set it to false"
            if self.config.steps_per_batch > 1:
                return "steps_per_batch: 'gss' takes one step on each batch; leave the key out"
            return super().check()

        def planned_images(self, task: Task, memory: ExemplarMemory, targets: np.ndarray) -> int:
            assert isinstance(memory, StreamMemory)
            labels = itertools.repeat(targets[task.train_indices], self.planned_epochs(task))
            return planned_images(memory, labels, self.config.batch_size, 1, draw_sizes((Draw(),), self.config), True)

    memory: StreamMemory

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.pixels = Pixels(self.batches.source.info, self.device)
        self.scores = np.zeros(0, np.float32)  # of each filled slot
        self.steps = 0  # in all tasks
        self.drawn = 0  # exemplars replayed in the epoch, in all processes
        self.task_index = 0
        self.batch: Batch | None = None  # of the step
        (self.replay_size,) = draw_sizes((Draw(),), self.config)

    def begin_phase(self, task: Task, run: PhaseRun) -> None:
        self.task_index = task.index
        self.drawn = 0

    def before_step(self, batch: Batch) -> Batch:
        self.steps += 1
        if not len(self.memory):
            return batch
        slots = self._rng("replay").permutation(len(self.memory))[: self.replay_size]
        self.drawn += len(slots)
        return replace(batch, replay=(self.batches.from_slots(slots, self.task_index, "gss", self.steps),))

    def after_backward(self, batch: Batch, backward: Backward) -> None:
        self.batch = batch

    def after_step(self) -> None:
        """Choose which images of the batch enter the memory, and where."""
        assert self.batch is not None
        samples = self._samples(self.batch)
        labels = self.manager.train_targets[samples]
        room = max(0, self.memory.size - len(self.memory))
        likeness, likenesses = self._likenesses(samples)
        places = np.full(len(samples), NONE)
        places[:room] = len(self.memory) + np.arange(min(room, len(samples)))
        self.scores = np.concatenate([self.scores, np.full(min(room, len(samples)), likeness, np.float32)])
        rng = self._rng("choice")
        for row in range(room, len(samples)) if likeness < 1 else ():
            shares = self.scores.astype(np.float64)
            slot = rng.choice(len(shares), p=shares / shares.sum())
            if rng.random() < self.scores[slot] / (self.scores[slot] + likenesses[row]):
                places[row] = slot
                self.scores[slot] = likenesses[row]
        self.memory.enter(samples, labels, places)

    def _samples(self, batch: Batch) -> np.ndarray:
        """The samples of the whole batch: int64 (n,)."""
        if self.processes.count == 1:
            return batch.indices.cpu().numpy()
        whole = torch.zeros(batch.whole or len(batch), dtype=torch.int64, device=self.device)
        rows = torch.arange(len(whole), device=self.device)[self.processes.share_of_each_batch.rows(0)]
        return self.processes.sum_(whole.index_copy_(0, rows, batch.indices)).cpu().numpy()

    def _likenesses(self, samples: np.ndarray) -> tuple[float, np.ndarray]:
        """One more than the largest cosine of a gradient with that of a drawn exemplar, at least 0.

        That of the whole batch, and of each of its images, (n,), or zeros if they do not matter.
        """
        singles = np.zeros(len(samples), np.float32)
        if not len(self.memory):
            return EMPTY_SCORE, singles
        number = min(self.config.options.gss_batch_size or self.replay_size, len(self.memory))
        drawn = self._rng("comparison").choice(len(self.memory), number, replace=False)
        self.network.eval()
        references = torch.stack(self._of_each(*self._loaded(self.memory.slots[drawn])))

        def likeness(gradients: Tensor) -> np.ndarray:
            cosines = cosine_similarity(gradients[:, None], references[None], dim=2)
            return (cosines.max(1).values + 1).clamp(min=0).cpu().numpy()

        images, labels = self._loaded(samples)
        (whole,) = likeness(self._gradient(images, labels)[None])
        room = max(0, self.memory.size - len(self.memory))
        if whole < 1 and room < len(samples):
            singles[room:] = likeness(torch.stack(self._of_each(images[room:], labels[room:])))
        self.network.train()
        return float(whole), singles

    def _loaded(self, samples: np.ndarray) -> tuple[Tensor, Tensor]:
        """The images as they are stored, (n, 3, H, W) on the 0..1 scale, and their classes, in every process."""
        images, labels = next(self.batches.plain(samples, len(samples)))
        return self.pixels(images), labels

    def _of_each(self, images: Tensor, labels: Tensor) -> list[Tensor]:
        return [self._gradient(image[None], label[None]) for image, label in zip(images, labels, strict=True)]

    def _gradient(self, images: Tensor, labels: Tensor) -> Tensor:
        """The gradient of their mean loss: (parameters,)."""
        parameters = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        with self.precision.autocast():
            logits = self.network(images).float()
        gradients = torch.autograd.grad(cross_entropy(logits, labels), parameters)
        return torch.cat([gradient.flatten() for gradient in gradients])

    def _rng(self, what: str) -> np.random.Generator:
        return np.random.default_rng(seeding.derived_seed(self.config.seed, "gss", what, self.steps))

    def after_epoch(self, task: Task, run: PhaseRun, epoch: int, loss: float) -> None:
        """Count what the loop does not know of."""
        self.spent.images += self.drawn
        self.spent.operations += (self.spent.per_image or 0) * self.drawn
        self.drawn = 0

    def get_extra_state(self) -> State:
        return super().get_extra_state() | {"scores": self.scores.tolist(), "steps": self.steps}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.scores = np.array(state["scores"], np.float32)
        self.steps = state["steps"]
