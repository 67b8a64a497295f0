"""PyCIL's helper functions."""

import os
from collections.abc import Iterable

import numpy as np
from torch import Tensor, nn

from pycil_wsc.results import metrics


def count_parameters(model: nn.Module, trainable: bool = False) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable)


def tensor2numpy(x: Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()


def target2onehot(targets: Tensor, n_classes: int) -> Tensor:
    """(B,) -> float32 (B, n_classes)."""
    return nn.functional.one_hot(targets.long(), n_classes).float()


def makedirs(path: str | os.PathLike) -> None:
    os.makedirs(path, exist_ok=True)


def accuracy(y_pred: np.ndarray, y_true: np.ndarray, nb_old: int, increment: int = 10) -> dict[str, float]:
    """Accuracies in percent, with two decimals: "total", "old", "new", and per ``increment`` classes ("00-09")."""
    if len(y_pred) != len(y_true):
        raise ValueError(f"accuracy: {len(y_pred)} predictions for {len(y_true)} targets")

    def share(mask: np.ndarray) -> float:
        return round(metrics.accuracy(y_pred[mask][:, None], y_true[mask]), 2) if mask.any() else 0

    groups = range(0, int(y_true.max()) + 1, increment)
    grouped = {
        f"{low:02d}-{low + increment - 1:02d}": share((y_true >= low) & (y_true < low + increment)) for low in groups
    }
    everything = np.ones(len(y_true), bool)
    return {"total": share(everything), **grouped, "old": share(y_true < nb_old), "new": share(y_true >= nb_old)}


def split_images_labels(imgs: Iterable[tuple[str, int]]) -> tuple[np.ndarray, np.ndarray]:
    """The (path, label) pairs of torchvision's ``ImageFolder.imgs`` as two arrays."""
    paths, labels = zip(*imgs)
    return np.array(paths), np.array(labels)
