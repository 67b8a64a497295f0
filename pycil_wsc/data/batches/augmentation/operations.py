"""Which operations the images of an epoch draw, as by AutoAugment and RandAugment, and their application."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

Operation = Callable[[Tensor, float], Tensor]  # uint8 maps (B, C, H, W) and a value -> maps of the same shape
Drawn = Iterable[tuple[str, float, np.ndarray]]  # an operation's name, its value, and the images that it changes


class Choices:
    """The operations that the images of an epoch draw.

    All are drawn on the host and copied to the device at once, so that no step waits or copies.

    Args:
        operations: by name.
        drawn: of each batch, in the order in which they are applied. No image occurs twice in one of them.
        device: where the images are.
    """

    def __init__(self, operations: dict[str, Operation], drawn: Iterable[Drawn], device: torch.device) -> None:
        self.operations = operations
        self.groups: list[list[tuple[str, float, slice]]] = []  # per batch: operation, value, rows of `members`
        members = [np.empty(0, np.int64)]
        end = 0
        for of_batch in drawn:
            groups = []
            for name, value, images in of_batch:
                groups.append((name, value, slice(end, end + len(images))))
                members.append(images)
                end += len(images)
            self.groups.append(groups)
        self.members = torch.from_numpy(np.concatenate(members)).to(device)

    def applied(self, images: Tensor, batch: int) -> Tensor:
        """The images of batch ``batch`` with their operations: uint8 (B, H, W, C) -> the same shape."""
        maps = images.permute(0, 3, 1, 2).contiguous()
        with torch.autocast(maps.device.type, enabled=False):  # whatever the network computes in
            for name, value, places in self.groups[batch]:
                index = self.members[places]
                maps[index] = self.operations[name](maps[index], value)
        return maps.permute(0, 2, 3, 1)
