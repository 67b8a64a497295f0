import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from pycil_wsc import seeding
from pycil_wsc.data.memory.memory import ExemplarMemory
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.networks import layers
from pycil_wsc.networks.heads import IncrementalHead
from pycil_wsc.networks.nets import Backbone, ExpandingNet
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.optimizers.schedules import cosine_lr
from pycil_wsc.training.phase import Phase


@register_learner("beef", scheduler="cosine", epochs=170, weight_decay=5e-4)
class BEEF(BaseLearner):
    """BEEF (Wang et al., ICLR 2023): each task trains a block on its own, as an energy-based model; then all are fused.

    Langevin dynamics moves images, rotated by 180 degrees, to where the block takes them for images of its own classes;
    it then learns that they are not. Fusion trains a scale and a shift for each earlier task, on as many images of each
    class as the memory has. Where PyCIL differs from the paper, this follows PyCIL.
    """

    network: "EnergyNet"

    @dataclass(frozen=True)
    class Options:
        energy_weight: float = key(0.01, "weight of the energy-based loss", low=0)
        logits_alignment: float = key(
            1.7,
            "the newest block's logits of earlier tasks are divided by this in training",
            above=0,
            decides="later tasks",
        )
        fusion_epochs: int = key(60, "epochs of the second phase", low=1, decides="later tasks")
        fusion_lr: float = key(
            0.05,
            "initial learning rate of the second phase, with cosine annealing",
            low=0,
            decides="later tasks",
        )
        langevin_steps: int = key(3, "Langevin dynamics: steps from an image to its sample", low=1)
        langevin_step_size: float = key(0.01, "Langevin dynamics: factor of the gradient in a step", low=0)
        langevin_noise: float = key(0.001, "Langevin dynamics: standard deviation of a step's noise", low=0)

    class Plan(BaseLearner.Plan):
        epoch_keys = ("epochs", "fusion_epochs")
        own_schedules = ("fusion_epochs",)
        one_phase = False
        expands = True

        def planned_images(self, task: Task, memory: ExemplarMemory, targets: np.ndarray) -> int:
            expansion = len(task.train_indices) + len(memory)
            if not task.index:
                return self.config.init_epoch * expansion
            fusion = sum(fusion_counts(task, memory, targets))
            return self.config.epochs * expansion + self.config.options.fusion_epochs * fusion

    sampling: Callable[..., Tensor]  # :meth:`sampled`, never compiled
    samples_drawn = 0  # batches of the task that were sampled, which address their noise

    def build(self) -> nn.Module:
        # torch cannot trace the gradients of the sampling: it compiles what comes before it and what comes after
        sampled = BEEF.sampled
        self.sampling = torch.compiler.disable(sampled) if self.config.compile else sampled  # type: ignore
        return EnergyNet(self.new_backbone())

    def grow(self, task: Task) -> None:
        self.index = task.index
        self.samples_drawn = 0
        self.network.grow(task.num_seen)
        self.network.blocks[:-1].requires_grad_(False)

    def phases(self, task: Task) -> Iterator[Phase]:
        network = self.network
        if not task.index:
            yield self.main_phase(task)
            return
        expansion = self.main_phase(task, [p for name, p in network.named_parameters() if name != "fusion"])
        yield replace(expansion, name="expansion")
        if indices := self.fusion_indices(task):
            options = self.config.options
            assert network.own_head is not None
            network.own_head.requires_grad_(False)
            yield replace(
                self.main_phase(task, [network.fusion], options.fusion_epochs),
                name="fusion",
                lr=cosine_lr(options.fusion_lr, options.fusion_epochs, self.config.min_lr),
                indices=np.concatenate(indices),
                loss=self.fusion_loss,
                mixed=False,
            )

    def fusion_indices(self, task: Task) -> list[np.ndarray]:
        """For each class, as many random images of the task and the memory as the memory's quota; none without it."""
        counts = fusion_counts(task, self.memory, self.manager.train_targets)
        indices = self.batches.indices(task)
        targets = self.manager.train_targets[indices]
        rng = np.random.default_rng(seeding.derived_seed(self.config.seed, "fusion", task.index))
        return [rng.permutation(indices[targets == k])[:count] for k, count in enumerate(counts) if count]

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        network = self.network
        earlier = len(self.network.sizes) - 1
        features = network.extract(batch.images)
        logits = network.classify(features).float()
        newest = network.classify_newest(features).float()
        targets = batch.targets
        if earlier:
            tasks = torch.cat([network.tasks, earlier + torch.arange(network.sizes[-1], device=self.device)])
            targets = tasks[targets]  # earlier tasks are one class each
            newest = torch.cat([newest[:, :earlier] / self.config.options.logits_alignment, newest[:, earlier:]], 1)
        loss = self.over.cross_entropy(newest, targets)
        return loss + self.config.options.energy_weight * self.energy_loss(batch, targets, newest.shape[1]), logits

    def energy_loss(self, batch: Batch, own_targets: Tensor, columns: int) -> Tensor:
        """The cross-entropy of samples, whose targets are the forward prototypes of their images' classes.

        As in PyCIL, no sample is compared with any class of the batch; in the paper, only with its own.
        """
        samples = self.sampling(self, batch)
        blocks = self.network.blocks
        trained = blocks[1:] if len(blocks) > 1 else blocks  # batch norms count the samples, but those of the first one
        logits = self.network.energies([block(samples) for block in trained][-1]).float()
        present = torch.zeros(logits.shape[1], device=self.device).index_fill(0, own_targets, 1)
        logits = torch.where(self.processes.sum(present) > 0, 1e-9, logits)
        return torch.nn.functional.cross_entropy(logits, batch.targets + columns)

    def sampled(self, batch: Batch) -> Tensor:
        """Samples of the newest block in evaluation mode, one for each image: (B, 3, H, W)."""
        options = self.config.options
        network = self.network
        training = self.network.training
        images = batch.images.rot90(2, (2, 3))
        own_rows = slice(self.processes.rank, None, self.processes.count)
        noise = options.langevin_noise * self.noise(batch.whole or len(images), images)[:, own_rows]
        network.eval()
        samples = langevin(network.foreign_mass, images, noise, options.langevin_step_size, self.processes.sum)
        network.train(training)
        return samples

    def noise(self, whole: int, like: Tensor) -> Tensor:
        """Normal noise for a batch of ``whole`` images, the same in all processes: (steps, B, 3, H, W)."""
        self.samples_drawn += 1
        address = self.config.seed, "noise", self.index, self.samples_drawn
        generator = seeding.generator(*address, device=self.device)
        shape = self.config.options.langevin_steps, whole, *like.shape[1:]
        return torch.randn(shape, generator=generator, device=self.device)

    def fusion_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            features = self.network.extract(batch.images)
        logits = self.network.classify(features).float()
        return self.over.cross_entropy(logits, batch.targets), logits

    def get_extra_state(self) -> State:
        return super().get_extra_state() | {"samples_drawn": self.samples_drawn}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        self.samples_drawn = state["samples_drawn"]


def fusion_counts(task: Task, memory: ExemplarMemory, targets: np.ndarray) -> list[int]:
    """The images of each class on which the blocks are fused; none if the memory is empty."""
    quota = memory.quota(task.num_old) if len(memory) else 0
    indices = np.concatenate([task.train_indices, memory.indices])
    return np.bincount(targets[indices], minlength=task.num_seen).clip(max=quota).tolist()


@torch.enable_grad()
def langevin(
    mass: Callable[[Tensor], Tensor],
    images: Tensor,
    noise: Tensor,
    step_size: float,
    sum_of_processes: Callable[[Tensor], Tensor],
) -> Tensor:
    """Move images down the gradient of the logarithm of ``mass``, with noise: (B, 3, H, W) -> the same shape.

    Args:
        mass: images -> (), a sum over images; the logarithm is that of the sum over all images of all processes.
        noise: (steps, B, 3, H, W), added in each step.
        step_size: factor of the gradient.
        sum_of_processes: adds a tensor up over all processes.
    """
    for added in noise:
        images = images.detach().requires_grad_(True)
        total = mass(images)
        gradient = torch.autograd.grad(total, images)[0] / sum_of_processes(total.detach())
        images = images.detach() - step_size * gradient + added
    return images.detach()


class EnergyNet(ExpandingNet):
    """A block for each task. The newest sees an earlier task as one class: its backward prototype.

    ``head`` classifies by the older blocks, or is the first task's own. ``own_head`` has a row for each earlier task
    and for each new class; ``energy_head`` a row for each class seen, the forward prototypes, by which the block knows
    images that are not its own. Fusion scales and shifts the backward prototypes: ``fusion`` (2, earlier tasks).
    """

    made_anew = ("own_head", "energy_head", "fusion")

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self.sizes: list[int] = []  # new classes of each task
        self.register_buffer("tasks", torch.empty(0, dtype=torch.int64))  # the task of each old class
        self.own_head: IncrementalHead | None = None
        self.energy_head = IncrementalHead(self.out_dim)
        self.fusion = nn.Parameter(torch.empty(2, 0))

    def grow(self, num_classes: int, aux_classes: int = 0) -> None:
        """Grow to ``num_classes`` in total, with a new block, a copy of the first one, unless it is the first task."""
        earlier, num_old = len(self.sizes), sum(self.sizes)
        if earlier:
            weight, _ = self.merged()
            self.head = IncrementalHead(weight.shape[1], num_old)
            self.head.weight.data.copy_(weight.detach())
            self.head.requires_grad_(False)
            self.blocks.append(copy.deepcopy(self.blocks[0]).requires_grad_(True))
            self.own_head = IncrementalHead(self.out_dim, earlier + num_classes - num_old)
            self.fusion = nn.Parameter(torch.zeros(2, earlier))
            self.tasks = torch.repeat_interleave(torch.tensor(self.sizes)).to(self.tasks)
        else:
            self.head.grow(num_classes)
        self.energy_head = IncrementalHead(self.out_dim, num_classes)
        self.sizes.append(num_classes - num_old)

    def merged(self) -> tuple[Tensor, Tensor]:
        """Weight (classes, blocks x d) and bias (classes,) of the fused classifier.

        As in PyCIL, the biases of older blocks do not count.
        """
        if self.own_head is None:
            return self.head.weight, self.head.bias
        earlier = len(self.sizes) - 1
        scale, shift = (1 + self.fusion[0])[self.tasks], self.fusion[1][self.tasks]
        weight, bias = self.own_head.weight, self.own_head.bias
        newest = torch.cat([scale[:, None] * weight[:earlier][self.tasks], weight[earlier:]])
        biases = torch.cat([scale * bias[:earlier][self.tasks] + shift, bias[earlier:]])
        older = self.head.weight
        older = torch.cat([older, older.new_zeros(len(newest) - len(older), older.shape[1])])
        return torch.cat([older, newest], 1), biases

    def classify(self, features: Tensor) -> Tensor:
        return linear(features, *self.merged())

    def classify_newest(self, features: Tensor) -> Tensor:
        """Features -> (B, earlier tasks + new classes) logits from the newest block's features; classes in the first
        task.
        """
        head = self.head if self.own_head is None else self.own_head
        return head(features[:, -self.out_dim :])

    def energies(self, features: Tensor) -> Tensor:
        """Features -> :meth:`classify_newest`, beside the logits of the forward prototypes (B, classes)."""
        newest = self.classify_newest(features)
        return torch.cat([newest, self.energy_head(features[:, -self.out_dim :])], 1)

    def foreign_mass(self, images: Tensor) -> Tensor:
        """The probabilities, added up, with which the newest block takes ``images`` for none of its own: ()."""
        logits = self.energies(self.blocks[-1](images)).float()
        return logits.softmax(1)[:, -self.energy_head.out_features :].sum()

    def train(self, mode: bool = True) -> "EnergyNet":
        """As in PyCIL, the batch norms of all blocks but the first collect statistics in later tasks."""
        super().train(mode)
        self.blocks[1:].train(mode)
        layers.eval_frozen(self)
        return self
