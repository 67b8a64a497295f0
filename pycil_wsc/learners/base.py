"""The training loop of all learners. A method defines its loss and overrides the hooks that it needs."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pycil_wsc import registry, seeding
from pycil_wsc.data.loader import mixed_order, num_batches
from pycil_wsc.data.memory import ExemplarMemory, normalise
from pycil_wsc.data.tasks import Task
from pycil_wsc.engine.optimization import clip, parameter_groups, set_rate, task_schedule
from pycil_wsc.engine.phase import Phase, Resume
from pycil_wsc.engine.precision import resolved_precision, undefined_in_bf16
from pycil_wsc.engine.processes import SINGLE_PROCESS, Processes
from pycil_wsc.engine.recorded_passes import Passes, RecordedPasses, cuda_graph
from pycil_wsc.engine.shared_passes import SharedPasses
from pycil_wsc.engine.step_cost import StepCost
from pycil_wsc.keys import NoOptions
from pycil_wsc.networks.layers import freeze, mark_frozen
from pycil_wsc.networks.nets import IncrementalNet, make_backbone


class BaseLearner(nn.Module):
    """A continual learner. Its networks are submodules, so ``state_dict`` holds everything that it has learned.

    A method must implement ``loss`` and may override the other hooks. ``learn`` is never overridden.
    """

    Options: type = NoOptions  # frozen dataclass of the method's own keys (`pycil_wsc.keys.key`)
    uses_memory = True
    starts_anew = False  # each task begins with new initial weights
    needs_new_classes = False  # cannot learn a task that brings only new images of known classes
    one_phase = True  # each task trains one network in one phase, as consolidation requires
    consolidates = False
    plain_first_task = False  # the first task is plain cross-entropy, so learners may share its trained weights
    network: Any  # the module that `build` returns
    epoch_keys: tuple[str, ...] = ("epochs",)  # the keys whose sum is the number of epochs of a later task

    def __init__(
        self, config: Any, manager: Any, train_source: Any, device: torch.device, processes: Processes = SINGLE_PROCESS
    ):
        super().__init__()
        self.config, self.manager, self.train_source, self.device = config, manager, train_source, device
        self.processes = processes  # they share every batch and hold the same weights
        self.memory = ExemplarMemory(config.fixed_memory, config.memory_per_class, config.memory_size, config.exemplars)
        self.images_trained = self.train_flops = 0
        with self.seeded("weights"):
            self.network = self.build()
        self.place()

    # ---- hooks of a method -------------------------------------------------------------------------------------------

    def build(self) -> nn.Module:
        """The network before the first task."""
        return IncrementalNet(self.new_backbone())

    def loss(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, H, W), (B,) -> (scalar loss, (B, classes) logits)."""
        raise NotImplementedError

    def grow(self, task: Task) -> None:
        """Extend the network to the task's classes. When a run resumes, called for each earlier task first."""
        self.network.grow(task.num_seen)

    def begin_task(self, task: Task) -> None:
        """Called before training, after :meth:`grow`."""

    def phases(self, task: Task) -> Iterator[Phase]:
        """The task's phases, in order; a generator may prepare each just before it starts."""
        yield self.main_phase(task)

    def after_step(self) -> None:
        """Called after each ``optimizer.step()``, before the gradients are cleared."""

    def after_epoch(self, task: Task, phase: Phase, epoch: int, loss: float) -> None:
        """Called after each epoch of a phase with its mean training loss."""

    def end_task(self, task: Task) -> None:
        """Called after training, before exemplars are chosen and the network is tested."""

    def extract(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, d) features, for herding, nearest mean and ``classify``."""
        return self.network.extract(images)

    def classify(self, features: Tensor) -> Tensor:
        """(B, d) features -> (B, classes) logits."""
        return self.network.classify(features)

    def predict(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, classes) logits."""
        return self.classify(self.extract(images))

    def also_tested(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """Further networks to test: name -> (images -> logits)."""
        return {}

    def costs(self) -> dict[str, Any]:
        """Further costs to record in the result, by name: numbers, or lists of one number per task."""
        return {}

    @classmethod
    def check(cls, config: Any) -> str | None:
        """One line that says what is wrong with the learner's own options, or None."""

    @classmethod
    def check_backbone(cls, backbone: nn.Module, config: Any) -> None:
        """Raise :class:`UserError` if the method cannot use ``backbone``. Called before anything is trained."""

    @classmethod
    def also_reads(cls, config: Any) -> set[str]:
        """Which of ``memory_size`` and ``memory_per_class`` the method reads whatever ``fixed_memory`` is."""
        return set()

    @classmethod
    def planned_epochs(cls, config: Any, task: Task) -> int:
        """The number of epochs of a task, for the cost that ``--dry-run`` prints."""
        values = vars(config) | vars(config.options)
        return sum(values[key] for key in cls.epoch_keys) if task.index else config.init_epoch

    @classmethod
    def planned_images(cls, config: Any, task: Task, memory: ExemplarMemory) -> int:
        """The images that the task trains on, over all epochs, with the exemplars in ``memory``. A run checks this."""
        return cls.planned_epochs(config, task) * (len(task.train_indices) + len(memory))

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def learn(
        self,
        task: Task,
        monitor: Any,
        resume: Resume | None = None,
        trained: Mapping[str, Any] | None = None,
    ) -> None:
        """Learn one task.

        Args:
            task: the next task.
            monitor: notified of the task's start, of every step and epoch, and of its end.
            resume: the position and state from which a stopped run resumes.
            trained: the result of training (:meth:`trained_state`), to load instead of training.
        """
        self.grow_for(task)
        self.begin_task(task)
        if not resume:
            monitor.task_started(task)
        if trained:
            self.load_trained_state(trained)
        else:
            self.train_for(task, monitor, resume)
        self.end_task(task)
        monitor.task_trained(task)
        rng = np.random.default_rng(seeding.derived_seed(self.config.seed, "exemplars", task.index))
        self.memory.update(task, self.manager.train_targets, self.features, rng, self.processes.map)

    def train_for(self, task: Task, monitor: Any, resume: Resume | None) -> None:
        if resume:
            self.set_extra_state(resume.learner["_extra_state"])  # the phases' indices depend on the memory
        for number, phase in enumerate(self.phases(task)):
            if resume and number < resume.phase:
                continue
            first = 0
            if resume and number == resume.phase:
                self.load_state_dict(resume.learner)
                phase.optimizer.load_state_dict(resume.optimizer)
                first = resume.epoch
            self.fit(task, number, phase, first, monitor)

    def grow_for(self, task: Task) -> None:
        with self.seeded("weights", task.index):
            self.grow(task)
        freeze(self)
        self.place()

    def fit(self, task: Task, number: int, phase: Phase, first: int, monitor: Any) -> None:
        batches, cost = self.num_batches(len(phase.indices)), StepCost()
        passes = self.passes(phase)
        monitor.phase_started(task, phase, first)
        self.zero_grad(set_to_none=True)
        for epoch in range(first, phase.epochs):
            set_rate(phase.optimizer, phase.lr(epoch))
            self.eval()
            phase.network.train()
            total_loss = torch.zeros((), device=self.device)
            correct = torch.zeros((), device=self.device, dtype=torch.int64)
            with self.seeded("dropout", task.index, number, epoch, self.processes.rank, device=self.device):
                for step, (images, targets) in enumerate(
                    self.training_batches(phase.indices, task.index, number, epoch, mixed=phase.mixed)
                ):
                    if self.config.schedule_unit == "iteration":
                        set_rate(phase.optimizer, phase.lr(epoch + step / batches))
                    with cost.measured(len(images)) if cost.unknown else contextlib.nullcontext():
                        loss, right = passes(images, targets)
                    clip(phase.optimizer, self.config.clip_norm)
                    phase.optimizer.step()
                    self.after_step()
                    passes.clear()
                    total_loss += loss
                    correct += right
                    monitor.step(len(images))
            self.images_trained += len(phase.indices)
            self.train_flops += (cost.per_image or 0) * len(phase.indices)
            mean_loss = self.processes.sum_(total_loss).item() / batches
            accuracy = 100 * self.processes.sum_(correct).item() / len(phase.indices)
            self.after_epoch(task, phase, epoch, mean_loss)
            monitor.epoch_ended(task, number, phase, epoch, mean_loss, accuracy)

    def passes(self, phase: Phase) -> Passes:
        """The forward and backward pass of a step of ``phase``."""

        def compute(images, targets):
            with self.autocast():
                return phase.loss(images, targets)

        if self.processes.count > 1:
            return SharedPasses(compute, phase.optimizer, self.processes, self.config.sync_batch_norm)
        if self.records_passes:
            learning = [p for p in self.parameters() if p.requires_grad]
            return RecordedPasses(compute, phase.optimizer, learning, functools.partial(cuda_graph, self.device))
        return Passes(compute, phase.optimizer)

    @property
    def records_passes(self) -> bool:
        return self.config.cuda_graph and self.device.type == "cuda"

    def training_batches(
        self, indices: np.ndarray, *address: Any, mixed: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled, augmented batches over ``indices``: this process's part of each.

        All random numbers are derived from ``address``, which begins with the task's index. A last batch of one image
        is joined to the one before: its batch-norm statistics would be those of that image alone. ``mixed``: follow
        ``replay_ratio``.
        """
        c, targets = self.config, self.manager.train_targets
        seed, shuffle = seeding.derived_seed(c.seed, "batches", *address), True
        if mixed and c.replay_ratio is not None:
            newest = np.isin(indices, self.manager.tasks[address[0]].train_indices)
            if newest.any() and not newest.all():
                indices = mixed_order(indices[newest], indices[~newest], c.replay_ratio, c.batch_size, seed)
                shuffle = False
        share = self.processes.share_of_each_batch
        return self.train_source.batches(
            indices, targets, c.batch_size, train=True, seed=seed, shuffle=shuffle, share=share
        )

    def num_batches(self, samples: int) -> int:
        """The number of training batches in an epoch over ``samples`` images."""
        return num_batches(samples, self.config.batch_size, join=True)

    # ---- building blocks of methods ----------------------------------------------------------------------------------

    def main_phase(
        self,
        task: Task,
        parameters: Iterable[nn.Parameter] | None = None,
        epochs: int | None = None,
        weight_decay: float | None = None,
    ) -> Phase:
        """The usual phase: the configured optimiser and schedule over the task's data and the memory."""
        c = self.config
        first = task.index == 0
        usual_epochs, usual_decay = (c.init_epoch, c.init_weight_decay) if first else (c.epochs, c.weight_decay)
        num_epochs: int = usual_epochs if epochs is None else epochs
        decay: float = usual_decay if weight_decay is None else weight_decay
        optimizer = self.optimizer(parameters or self.network.parameters(), decay)
        indices = self.training_indices(task)
        interval = 1 if c.schedule_unit == "epoch" else 1 / self.num_batches(len(indices))
        lr = task_schedule(c, first, num_epochs, interval)
        return Phase(num_epochs, optimizer, lr, indices, self.loss, self.network)

    def new_backbone(self, pretrained: bool | str | None = None) -> nn.Module:
        """A new backbone as configured, with its frozen parts marked; ``pretrained`` overrides the configuration."""
        side = self.train_source.info.image_size if self.train_source else None  # PyCIL's scripts build before loading
        return configured_backbone(self.config, side, self.config.pretrained if pretrained is None else pretrained)

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy with ``label_smoothing``: (B, classes) float32, (B,) -> scalar."""
        return cross_entropy(logits, targets, label_smoothing=self.config.label_smoothing)

    def training_indices(self, task: Task) -> np.ndarray:
        """The task's samples and all exemplars: (n,)."""
        return np.concatenate([task.train_indices, self.memory.indices])

    def optimizer(self, parameters: Iterable[nn.Parameter], weight_decay: float) -> torch.optim.Optimizer:
        """A new optimiser of the trainable ``parameters``; ``fit`` sets its learning rate."""
        depths = {}
        for network in self.children():
            depths_of: Any = getattr(network, "depths", dict)
            depths |= depths_of()
        groups = parameter_groups(parameters, weight_decay, depths, self.config)
        return registry.optimizers[self.config.optimizer](groups, self.config)

    def autocast(self) -> contextlib.AbstractContextManager:
        return (
            torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bf16" else contextlib.nullcontext()
        )

    @property
    def precision(self) -> str:
        """``fp32`` or ``bf16``; fp32 on a CPU where the backbone's gradients are undefined in bf16."""
        precision = resolved_precision(self.config.precision, self.device)
        return "fp32" if precision == "bf16" and self.device.type == "cpu" and self._needs_fp32 else precision

    @functools.cached_property
    def _needs_fp32(self):
        """Whether the backbone's gradients are undefined in bf16 on the CPU; logs a warning if so."""
        name, side = self.config.convnet_type, self.train_source.info.image_size
        with self.seeded("probe"):  # does not advance the generator of the weights
            needed = undefined_in_bf16(self.new_backbone(pretrained=False), side)
        if needed:
            logging.getLogger("pycil_wsc").warning(
                "precision: images of side %d are too small for '%s' in bf16 on the CPU (gradients of a convolution "
                "would be undefined); computing in fp32",
                side,
                name,
            )
        return needed

    def seeded(self, *address: Any, **device: torch.device) -> contextlib.AbstractContextManager:
        return seeding.seeded(self.config.seed, *address, **device)

    def place(self) -> None:
        """Move all networks to the device, in the memory format that ``channels_last`` sets."""
        memory_format = torch.channels_last if self.config.channels_last else torch.preserve_format
        self.to(self.device, memory_format=memory_format)  # pyright: ignore[reportCallIssue]

    @torch.inference_mode()
    def forward_over(self, source: Any, indices: np.ndarray, targets: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (features, targets) of ``indices`` with the test transform, in evaluation mode: float32 (B, d),
        (B,). With several processes, each has its share of the batches; :meth:`gathered` combines them.
        """
        self.eval()
        share = self.processes.share_of_batches
        for images, labels in source.batches(indices, targets, self.config.batch_size, share=share):
            with self.autocast():
                features = self.extract(images)
            yield features.float(), labels

    def features(self, indices: np.ndarray) -> np.ndarray:
        """Features of training samples: float32 numpy (n, d)."""
        parts = [f for f, _ in self.forward_over(self.train_source, indices, self.manager.train_targets)]
        return self.gathered(parts, len(indices)).numpy()

    def gathered(self, parts: list[Tensor], rows: int) -> Tensor:
        """The outputs for all ``rows`` images, from the ``parts`` of all processes: (rows, ...), on the CPU."""
        if self.processes.count > 1:
            parts = self.processes.gather([part.cpu() for part in parts], num_batches(rows, self.config.batch_size))
        return torch.cat(parts).cpu()

    def class_means(self, num_seen: int) -> np.ndarray | None:
        """Normalised mean of each class's normalised exemplar features: (num_seen, d).

        None if a class has no exemplars.
        """
        memory = self.memory.classes
        if any(len(memory.get(c, ())) == 0 for c in range(num_seen)):
            return None
        indices = self.memory.indices
        features, targets = normalise(self.features(indices)), self.manager.train_targets[indices]
        return normalise(np.stack([features[targets == c].mean(0) for c in range(num_seen)]))

    def trained_state(self) -> dict[str, Any]:
        """The result of training the first task, in a form that every learner with the same backbone can load."""
        return {
            "tensors": self._first_task_tensors(),
            "images_trained": self.images_trained,
            "train_flops": self.train_flops,
        }

    def load_trained_state(self, state: Mapping[str, Any]) -> None:
        for mine, trained in zip(self._first_task_tensors(), state["tensors"], strict=True):
            mine.copy_(trained)
        self.images_trained, self.train_flops = state["images_trained"], state["train_flops"]

    def _first_task_tensors(self):
        return [tensor for part in self.network.first_parts() for tensor in part.state_dict().values()]

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "memory": self.memory.state_dict(),
            "images_trained": self.images_trained,
            "train_flops": self.train_flops,
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        self.memory.load_state_dict(state["memory"])
        self.images_trained, self.train_flops = state["images_trained"], state["train_flops"]


def configured_backbone(config: Any, image_size: int | None, pretrained: bool | str) -> nn.Module:
    """A new backbone for images of side ``image_size``, with its frozen parts marked. Raises :class:`UserError`."""
    timm_options = {
        "pretrained": pretrained,
        "image_size": image_size,
        "grad_checkpointing": config.grad_checkpointing,
    }
    backbone = make_backbone(config.convnet_type, config.convnet_options, **timm_options)
    mark_frozen(backbone, config.freeze)
    return backbone
