"""What a method may use: phases, batches, outputs of the network, and the mean over a part of a batch."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pycil_wsc import registry, seeding
from pycil_wsc.consolidation import recompute_batch_norm
from pycil_wsc.data.batches.loader import BatchSource, Source
from pycil_wsc.data.batches.order import batch_slices, epoch_order, mixed_order, new_in_batches, num_batches
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.memory.values import ExemplarValues
from pycil_wsc.data.tasks.tasks import Task, TaskSequence
from pycil_wsc.devices import computes_bf16
from pycil_wsc.errors import UnusableRun
from pycil_wsc.networks.layers import freeze, mark_frozen
from pycil_wsc.networks.nets import Backbone, make_backbone
from pycil_wsc.state import State
from pycil_wsc.training.batch import Batch
from pycil_wsc.training.batch_norm.synced import synced_batch_norm
from pycil_wsc.training.learner_config import LearnerConfig
from pycil_wsc.training.optimization import parameter_groups, task_schedule
from pycil_wsc.training.phase import Phase
from pycil_wsc.training.precision import resolved_precision, undefined_in_bf16
from pycil_wsc.training.processes import Processes
from pycil_wsc.training.spending import Spending


class Toolbox(nn.Module):
    """The parts of a learner that are the same for all methods, and are not overridden."""

    network: Any  # the module that `build` returns
    loss: Callable[[Batch], tuple[Tensor, Tensor]]  # and the following hooks: of the method
    new_samples: Callable[[Task], np.ndarray]
    extract: Callable[[Tensor], Tensor]
    classify: Callable[[Tensor], Tensor]
    mixes: bool  # a class attribute of the method
    stored_bytes: Callable[[LearnerConfig, int], int]

    def __init__(
        self,
        config: LearnerConfig,
        manager: TaskSequence,
        train_source: Source,
        device: torch.device,
        processes: Processes,
    ):
        super().__init__()
        self.config, self.manager, self.train_source, self.device = config, manager, train_source, device
        self.processes = processes  # they share every batch and hold the same weights
        self.memory = configured_memory(config, self.stored_bytes)
        self.images_trained = self.train_flops = 0
        self.spending = Spending()
        self.step_cost: int | None = None  # operations per image of the current phase
        self.exemplar_cost: int | None = None  # and per exemplar of a batch, before the step
        self._needs_fp32: bool | None = None  # not a cached property: before Python 3.12 these share a lock

    @functools.cached_property
    def stored(self) -> ExemplarValues:
        """Values that the method stores for each exemplar. Made at the first use: PyCIL's scripts give data last."""
        return ExemplarValues(len(self.manager.train_targets), self.device)

    # ---- phases and batches ------------------------------------------------------------------------------------------

    def main_phase(
        self,
        task: Task,
        parameters: Iterable[nn.Parameter] | None = None,
        epochs: int | None = None,
        weight_decay: float | None = None,
    ) -> Phase:
        """The usual phase: the configured optimiser and schedule over the task's data and the memory.

        Args:
            task: the task; the keys of the first one begin with ``init``.
            parameters: those that the phase trains; None: all of :attr:`network`.
            epochs: None: the configured number.
            weight_decay: None: the configured one.
        """
        c = self.config
        first = task.index == 0
        usual_epochs, usual_decay = (c.init_epoch, c.init_weight_decay) if first else (c.epochs, c.weight_decay)
        num_epochs: int = usual_epochs if epochs is None else epochs
        decay: float = usual_decay if weight_decay is None else weight_decay
        optimizer = self.optimizer(parameters or self.network.parameters(), decay)
        indices = self.training_indices(task)
        interval = 1 if c.schedule_unit == "epoch" else 1 / self.num_batches(len(indices))
        lr = task_schedule(c, first, num_epochs, interval)
        return Phase(num_epochs, optimizer, lr, indices, self.loss, self.network, mixed=self.mixes)

    def optimizer(self, parameters: Iterable[nn.Parameter], weight_decay: float) -> torch.optim.Optimizer:
        """A new optimiser, as configured, of the trainable ``parameters``; the loop sets its learning rate.

        It has a group for each ``lr_scale``, the factor of the schedule's learning rate: ``backbone_lr_factor *
        layer_decay ** depth`` for a layer at this distance from the head, and 1 for all others.
        """
        depths = {}
        for network in self.children():
            depths |= getattr(network, "depths", dict)()
        groups = parameter_groups(parameters, weight_decay, depths, self.config)
        return registry.optimizers[self.config.optimizer](groups, self.config)

    def first_class(self, task: Task) -> int:
        """The first class, in learning order, of the task's images: ``num_old`` if all its classes are new."""
        return int(self.manager.train_targets[task.train_indices].min())

    def training_indices(self, task: Task) -> np.ndarray:
        """The task's samples, as in :meth:`new_samples`, and all exemplars: (n,)."""
        return np.concatenate([self.new_samples(task), self.memory.indices])

    def training_batches(
        self,
        indices: np.ndarray,
        task: int,
        *address: str | int,
        mixed: bool = True,
        views: int = 1,
        source: BatchSource | None = None,
        targets: np.ndarray | None = None,
        batch_size: int | None = None,
        augmentation: str | None = None,
        draw: Callable[[torch.Generator], tuple[Tensor, ...]] | None = None,
    ) -> Iterator[Batch]:
        """Shuffled, augmented batches over ``indices``: this process's part of each.

        All random numbers are derived from ``task``, the task's index, and ``address``. A last batch of one image
        is joined to the previous one: its batch-norm statistics would be those of that image alone. ``mixed``: follow
        ``replay_ratio``. ``views``, ``source``, ``targets`` and ``draw`` are those of :class:`Phase`; so are
        ``batch_size`` and ``augmentation``.
        """
        c, share = self.config, self.processes.share_of_each_batch
        size: int = c.batch_size if batch_size is None else batch_size
        of_task = self._of_task(task)
        seed = seeding.derived_seed(c.seed, "batches", task, *address)
        newest = of_task[indices] if source is None else np.ones(len(indices), bool)
        if mixed and c.replay_ratio is not None and newest.any() and not newest.all():
            order = mixed_order(indices[newest], indices[~newest], c.replay_ratio, size, seed)
        else:
            order = epoch_order(indices, True, seed)
        from_memory = ~of_task[order] if source is None else np.zeros(len(order), bool)
        numbers, old = (torch.from_numpy(each).to(self.device) for each in (order, from_memory))
        seeds = [
            seed,
            *(seeding.derived_seed(c.seed, "batches", task, *address, "view", view) for view in range(1, views)),
        ]
        augmented = functools.partial(self.train_source.batches, augmentation=augmentation or c.augmentation)
        batches = augmented if source is None else source.batches
        passes = [
            batches(
                order,
                self.manager.train_targets if targets is None else targets,
                size,
                train=True,
                seed=each,
                shuffle=False,
                share=share,
            )
            for each in seeds
        ]
        parts = batch_slices(len(order), size, join=True)
        generator = torch.Generator(self.device).manual_seed(seeding.derived_seed(c.seed, "draws", task, *address))
        for number, ((images, labels, *beside), *others) in enumerate(zip(*passes, strict=True)):
            part, rows = parts[number], share.rows(number)
            drawn = () if draw is None else draw(generator)
            more = tuple(view for view, _ in others)
            own = images, labels, numbers[part][rows], old[part][rows], more
            replayed = int(from_memory[part][rows].sum())
            yield Batch(*own, whole=part.stop - part.start, drawn=(*drawn, *beside), replayed=replayed)

    def exemplars_per_epoch(self, task: Task, phase: Phase) -> int:
        """How many images of the batches of an epoch are exemplars, in all processes."""
        c = self.config
        if phase.source is not None:
            return 0
        newest = int(self._of_task(task.index)[phase.indices].sum())
        total = len(phase.indices)
        if phase.mixed and c.replay_ratio is not None and 0 < newest < total:
            newest = sum(new_in_batches(total, c.replay_ratio, phase.batch_size or c.batch_size))
        return total - newest

    def _of_task(self, task: int) -> np.ndarray:
        """Whether each training sample is one of the task's own: bool (N,)."""
        of_task = np.zeros(len(self.manager.train_targets), bool)
        of_task[self.manager.tasks[task].train_indices] = True
        return of_task

    def num_batches(self, samples: int, batch_size: int | None = None) -> int:
        """The number of training batches in an epoch over ``samples`` images; by default of the configured size."""
        return num_batches(samples, batch_size or self.config.batch_size, join=True)

    # ---- losses ------------------------------------------------------------------------------------------------------

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy with ``label_smoothing``: (B, classes) float32, (B,) -> scalar."""
        return cross_entropy(logits, targets, label_smoothing=self.config.label_smoothing)

    def mean_over(self, values: Tensor, chosen: Tensor, batch: Batch | None = None) -> Tensor:
        """The mean of ``values`` (n,) where ``chosen``, bool (n,), is set; 0 if it is nowhere.

        The mean is over the whole batch, of which several processes have a part each. ``batch``: if n is not its number
        of images. Does not synchronise with the device, as an index by ``chosen`` would.
        """
        total, count = torch.where(chosen, values, 0).sum(), chosen.sum()
        if self.processes.count > 1:
            own = len(values if batch is None else batch)
            count, whole = self.processes.sum(torch.stack([count, torch.full_like(count, own)]))
            total = total * whole / max(own, 1)  # a loss is weighed by the process's share of the batch
        return total / count.clamp(min=1)

    def over_whole_batch(self, losses: Tensor, own: int) -> Tensor:
        """The values of mean losses over the whole batch, from those of this process's ``own`` images: (n,) -> (n,)."""
        losses = losses.detach()
        if self.processes.count == 1:
            return losses
        count = torch.full((1,), float(own), device=losses.device)
        sums = self.processes.sum(torch.cat([losses.nan_to_num() * count, count]))  # nan: the mean of no image
        return sums[:-1] / sums[-1]

    def sum_over(self, values: Tensor, batch: Batch) -> Tensor:
        """The sum of ``values`` (any shape) over the whole ``batch``, of which processes have a part each: a scalar."""
        total = values.sum()
        if batch.whole is not None:  # a loss is weighed by the process's share of the batch
            total = total * (batch.whole / max(len(batch), 1))
        return total

    def norm_over(self, values: Tensor, batch: Batch) -> Tensor:
        """The Euclidean norm of ``values`` (any shape) over the whole ``batch``, as for :meth:`sum_over`: a scalar."""
        if self.processes.count == 1:
            return values.norm()
        own = values.square().sum()
        half = own / (2 * self.processes.sum(own.detach()).sqrt().clamp(min=1e-12))
        return self.sum_over(half + half.detach(), batch)  # the halves add up to the norm; its gradient is that of one

    # ---- outputs of the network --------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward_over(self, source: Source, indices: np.ndarray, targets: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
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

    def logits(self, indices: np.ndarray) -> Tensor:
        """Logits of training samples with the test transform, in evaluation mode: float32 (n, classes), on the CPU."""
        parts = []
        for features, _ in self.forward_over(self.train_source, indices, self.manager.train_targets):
            with torch.inference_mode(), self.autocast():
                parts.append(self.classify(features).float())
        return self.gathered(parts, len(indices))

    def gathered(self, parts: list[Tensor], rows: int) -> Tensor:
        """The outputs for all ``rows`` images, from the ``parts`` of all processes: (rows, ...), on the CPU."""
        if self.processes.count > 1:
            parts = self.processes.gather([part.cpu() for part in parts], num_batches(rows, self.config.batch_size))
        return torch.cat(parts).cpu()

    def collect_statistics(self, task: Task) -> None:
        """Collect the network's batch-norm statistics anew, in one pass over the task's training data: for weights that
        are an average.
        """
        address = ("dropout", task.index, "batch norm", self.processes.rank)
        with self.autocast(), synced_batch_norm(self.processes), self.seeded(*address, device=self.device):
            batches = self.training_batches(self.training_indices(task), task.index, "batch norm", mixed=self.mixes)
            recompute_batch_norm(self.network, (batch.images for batch in batches))

    # ---- the machine -------------------------------------------------------------------------------------------------

    def new_backbone(self, pretrained: bool | str | None = None) -> Backbone:
        """A new backbone as configured, with its frozen parts marked; ``pretrained`` overrides the configuration."""
        side = self.train_source.info.image_size if self.train_source else None  # PyCIL's scripts build before loading
        return configured_backbone(self.config, side, self.config.pretrained if pretrained is None else pretrained)

    def autocast(self) -> contextlib.AbstractContextManager:
        return (
            torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bf16" else contextlib.nullcontext()
        )

    def without_autocast(self) -> contextlib.AbstractContextManager:
        lowered = torch.is_autocast_enabled(self.device.type)  # not in a program that is exported
        return torch.autocast(self.device.type, enabled=False) if lowered else contextlib.nullcontext()

    @property
    def precision(self) -> str:
        """``fp32`` or ``bf16``; fp32 on a CPU where the backbone's gradients are undefined in bf16."""
        precision = resolved_precision(self.config.precision, self.device)
        if precision != "bf16" or self.device.type != "cpu":
            return precision
        if self._needs_fp32 is None:
            self._needs_fp32 = self._undefined_in_bf16()
        return "fp32" if self._needs_fp32 else precision

    def arithmetic(self) -> dict[str, str]:
        """What decides how a run computes, as the configuration and the device leave it open: a part of its state."""
        return {"precision": self.precision, "source": type(self.train_source).__name__}

    def keep_arithmetic(self, state: State) -> None:
        """Compute as the stopped run with this ``state`` began, where the configuration leaves it open.

        Raises :class:`UnusableRun` if the device does not have its precision, or the images do not fit on it any more
        or fit only now: those on the device are cropped by another program, whose results differ by a rounding.
        """
        ours = self.arithmetic()
        precision, source = (state.get(name, ours[name]) for name in ours)  # missing in earlier versions' checkpoints
        if source != ours["source"]:
            change = "no longer" if source == "DeviceSource" else "only now"
            raise UnusableRun(
                f"cache_images: the run began elsewhere: its images {change} fit into the free memory of "
                f"'{self.device}'; make it as much as it was, or delete the checkpoint to start again"
            )
        if precision == "bf16" and not computes_bf16(self.device):
            raise UnusableRun(
                f"precision: the run began in bf16, which '{self.device}' does not have; resume it elsewhere"
            )
        if self.config.precision == "auto":
            self.config = replace(self.config, precision=precision)

    def _undefined_in_bf16(self) -> bool:
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

    def seeded(self, *address: str | int, **device: torch.device) -> contextlib.AbstractContextManager:
        return seeding.seeded(self.config.seed, *address, **device)

    def placed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``tensors`` on the device, such as those of a saved state."""
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def place(self) -> None:
        """Move all networks to the device, in the memory format that ``channels_last`` sets."""
        memory_format = torch.channels_last if self.config.channels_last else torch.preserve_format
        self.to(self.device, memory_format=memory_format)  # pyright: ignore[reportCallIssue]

    def freeze(self) -> None:
        """Turn off gradients of the parts that the configuration freezes."""
        freeze(self)


def configured_memory(config: LearnerConfig, stored_bytes: Callable[[LearnerConfig, int], int]) -> ExemplarMemory:
    """An empty memory as configured; ``stored_bytes``: the method's hook."""
    capacity = functools.partial(capacity_of, config, stored_bytes)
    return ExemplarMemory(config.fixed_memory, config.memory_per_class, config.memory_size, config.exemplars, capacity)


def capacity_of(config: LearnerConfig, stored_bytes: Callable[[LearnerConfig, int], int], num_seen: int) -> int:
    """The number of exemplars in all once ``num_seen`` classes are known, with ``fixed_memory`` false.

    ``memory_bytes`` also pays for what is stored with each, so that fewer fit the more classes there are.
    """
    size = config.memory_size
    if config.memory_bytes is None or not size:
        return size
    # an image takes memory_bytes / memory_size bytes, or a little less
    return config.memory_bytes * size // (config.memory_bytes + size * stored_bytes(config, num_seen))


def configured_backbone(config: LearnerConfig, image_size: int | None, pretrained: bool | str) -> Backbone:
    """A new backbone for images of side ``image_size``, with its frozen parts marked. Raises :class:`UserError`."""
    checkpointing = config.grad_checkpointing
    backbone = make_backbone(config.convnet_type, config.convnet_options, pretrained, image_size, checkpointing)
    mark_frozen(backbone, config.freeze)
    return backbone
