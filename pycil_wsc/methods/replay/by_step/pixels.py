"""Images on the scale of their pixels, as Mammoth's memory holds them."""

import torch
from torch import Tensor

from pycil_wsc.data.types import DatasetInfo


class Pixels:
    """Undoes the normalisation: (B, 3, H, W) -> the same on the 0..1 scale."""

    def __init__(self, info: DatasetInfo, device: torch.device) -> None:
        self.mean = torch.tensor(info.mean, device=device)[:, None, None]
        self.std = torch.tensor(info.std, device=device)[:, None, None]

    def __call__(self, images: Tensor) -> Tensor:
        return images * self.std + self.mean

    def normalised(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) on the 0..1 scale -> the same as a network gets them."""
        return (images - self.mean) / self.std
