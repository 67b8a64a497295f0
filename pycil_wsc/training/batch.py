"""What a loss gets: the images of a step, and where they come from."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch on the device, or a process's part of one.

    Args:
        images: float32 (B, 3, H, W), augmented and normalised; rows of features in a phase over stored features.
        targets: int64 (B,), classes numbered in learning order.
        indices: int64 (B,), the samples' numbers in the training set.
        from_memory: bool (B,), whether a sample is an exemplar, and not one of the task's own.
        views: further augmentations of the same images, if the phase has several (``Phase.views``).
        whole: the images of the whole batch, if this is a process's part of it; None: as many as these.
        drawn: random tensors, the same in all processes, if the phase draws any (``Phase.draw``), what its source has
            beside images and targets, and what ``before_step`` adds.
        replayed: how many of these images are exemplars, if the host knows it.
    """

    images: Tensor
    targets: Tensor
    indices: Tensor
    from_memory: Tensor
    views: tuple[Tensor, ...] = ()
    whole: int | None = None
    drawn: tuple[Tensor, ...] = ()
    replayed: int | None = None

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def exemplar_rows(self) -> Tensor:
        """The rows of the exemplars, in their order: int64 (k,). Waits for the device only without ``replayed``."""
        number = int(self.from_memory.sum()) if self.replayed is None else self.replayed
        exemplars_first = (~self.from_memory).to(torch.uint8).argsort(stable=True)
        return exemplars_first[:number]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What is on the device: the first four arguments, ``views`` and ``drawn``."""
        return self.images, self.targets, self.indices, self.from_memory, self.views, self.drawn


def rotated(batch: Batch) -> tuple[Tensor, Tensor]:
    """The images rotated by 0, 90, 180 and 270 degrees: (4 B, 3, H, W), and each rotation as 0 to 3: int64 (4 B,).

    The four rotations of an image are consecutive, so ``targets.repeat_interleave(4)`` are their classes.
    """
    turned = torch.stack([torch.rot90(batch.images, turns, (2, 3)) for turns in range(4)], 1)
    turns = torch.arange(4, device=batch.targets.device).repeat(len(batch))
    return turned.flatten(0, 1), turns
