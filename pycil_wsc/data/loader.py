"""Batches of (images, targets) on the device, already augmented and normalised.

``ArraySource`` keeps the whole split as uint8 on the device and gathers by index. ``FolderSource`` decodes files in
worker
processes that live as long as the run. Both have the same interface::

    for images, targets in source.batches(indices, targets, batch_size, train=True, seed=7): ...
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from pycil_wsc.allocator import return_freed_memory
from pycil_wsc.data import augment
from pycil_wsc.data.image_files import decode
from pycil_wsc.data.types import DatasetInfo, Split
from pycil_wsc.errors import UserError


def open_source(info: DatasetInfo, split: Split, device: torch.device, num_workers: int) -> ArraySource | FolderSource:
    """The source for one split of a data set: in memory, or from files."""
    if split.in_memory:
        return ArraySource(info, split, device)
    return FolderSource(info, split, device, num_workers)


class ArraySource:
    """A split held on the device as uint8 (N, H, W, 3)."""

    def __init__(self, info: DatasetInfo, split: Split, device: torch.device) -> None:
        self.info, self.device = info, device
        self.images = torch.from_numpy(np.ascontiguousarray(split.images)).to(device)
        self.normalise = augment.Normalise(info.mean, info.std, device)

    def batches(
        self,
        indices: np.ndarray,
        targets: np.ndarray,
        batch_size: int,
        *,
        train: bool = False,
        seed: int = 0,
        shuffle: bool = True,
        join: bool = False,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (images float32 (B, 3, H, W), targets int64 (B,)) over ``indices``, an int64 array.

        ``targets`` are those of the whole split. With ``train`` images are augmented and, unless ``shuffle`` is false,
        shuffled, both from ``seed``. With ``join`` a last batch of one image is part of the one before.
        """
        order = epoch_order(indices, train and shuffle, seed)
        index = torch.from_numpy(order).to(self.device)
        labels = torch.from_numpy(targets[order]).to(self.device)
        generator = torch.Generator(self.device).manual_seed(seed)
        for batch in batch_slices(len(order), batch_size, join):
            images = self.images[index[batch]]
            if train:
                images = self._augment(images, generator)
            if self.info.stored_size:
                images = augment.resize(images, self.info.image_size, self.info.interpolation)
            yield self.normalise(images), labels[batch]

    def _augment(self, images, generator):
        if self.info.padding or self.info.flip:
            images = augment.random_crop_flip(images, self.info.padding, self.info.flip, generator)
        if self.info.brightness:
            images = augment.random_brightness(images, self.info.brightness, generator)
        return images


class FolderSource:
    """A split read from image files. Workers decode and crop, the device mirrors and normalises."""

    def __init__(self, info: DatasetInfo, split: Split, device: torch.device, num_workers: int) -> None:
        self.info, self.device = info, device
        self.normalise = augment.Normalise(info.mean, info.std, device)
        self.started = False  # the workers, with the first epoch
        self.plan = []  # the batches of the epoch under way; the workers' loader reads it anew each epoch
        self.loader = DataLoader(
            DecodedImages(split.images, info.image_size, info.interpolation),
            batch_sampler=self.plan,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=device.type == "cuda",
            collate_fn=_stack,
        )

    def batches(
        self,
        indices: np.ndarray,
        targets: np.ndarray,
        batch_size: int,
        *,
        train: bool = False,
        seed: int = 0,
        shuffle: bool = True,
        join: bool = False,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """As :meth:`ArraySource.batches`. A file that cannot be read is a :class:`UserError` that names it."""
        order = epoch_order(indices, train and shuffle, seed)
        crop_seeds = (
            np.random.default_rng([seed, 1]).integers(2**63, size=len(order)) if train else np.full(len(order), -1)
        )
        keys = list(zip(order.tolist(), crop_seeds.tolist()))
        parts = batch_slices(len(keys), batch_size, join)
        self.plan[:] = [keys[batch] for batch in parts]
        generator = torch.Generator(self.device).manual_seed(seed)
        labels = torch.from_numpy(targets[order]).to(self.device)
        if not self.started:
            return_freed_memory()
            self.started = True
        for batch, images in zip(parts, self.loader, strict=True):
            if isinstance(images, str):
                raise UserError(images)
            images = images.to(self.device, non_blocking=True)
            if train and self.info.flip:
                images = augment.random_flip(images, generator)
            yield self.normalise(images), labels[batch]


class DecodedImages(Dataset):
    """(index, crop seed) -> uint8 (side, side, 3); a seed of -1 is the test transform: resize, then the centre."""

    def __init__(self, paths: np.ndarray, side: int, interpolation: str = "bilinear") -> None:
        self.paths, self.side, mode = paths, side, v2.InterpolationMode(interpolation)
        self.test_crop = v2.Compose([v2.Resize(round(side * 256 / 224), mode), v2.CenterCrop(side)])
        self.train_crop = v2.RandomResizedCrop(side, interpolation=mode)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, key: tuple[int, int]) -> Tensor | str:
        index, seed = key
        try:
            image = decode(str(self.paths[index]))
        except UserError as error:  # an exception would reach the main process wrapped in the worker's traceback
            return str(error)
        if seed < 0:
            image = self.test_crop(image)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.random.default_generator.manual_seed(seed)
                image = self.train_crop(image)
        return torch.from_numpy(np.array(image))


def _stack(samples):
    """The batch, or the message of the first file that could not be read."""
    return next((sample for sample in samples if isinstance(sample, str)), None) or torch.stack(samples)


def epoch_order(indices: np.ndarray, shuffle: bool, seed: int) -> np.ndarray:
    """``indices`` as they are, or shuffled by ``seed``."""
    return np.random.default_rng(seed).permutation(indices) if shuffle else np.asarray(indices)


def mixed_order(new: np.ndarray, old: np.ndarray, share: float, batch_size: int, seed: int) -> np.ndarray:
    """As many samples as ``new`` and ``old`` hold, in an order in which each batch has ``share`` of ``new`` ones,
    rounded, the rest of ``old``.

    Both are gone through in random order, by ``seed``, again and again: of two samples of one kind neither comes more
    than once more often than the other. ``new`` and ``old``: int64 arrays with at least one sample each.
    """
    total, rng = len(new) + len(old), np.random.default_rng(seed)
    sizes = [min(batch_size, total - start) for start in range(0, total, batch_size)]
    counts = [round(share * size) for size in sizes]
    new_stream, old_stream = (
        _stream(samples, number, rng) for samples, number in ((new, sum(counts)), (old, total - sum(counts)))
    )
    parts = []
    for size, count in zip(sizes, counts):
        parts += [new_stream[:count], old_stream[: size - count]]
        new_stream, old_stream = new_stream[count:], old_stream[size - count :]
    return np.concatenate(parts)


def _stream(samples, number, rng):
    """``number`` samples: whole permutations, one after another."""
    rounds = -(-number // len(samples))
    return np.concatenate([rng.permutation(samples) for _ in range(rounds)] or [samples[:0]])[:number]


def num_batches(num_samples: int, batch_size: int, join: bool = False) -> int:
    return len(batch_slices(num_samples, batch_size, join))


def batch_slices(num_samples: int, batch_size: int, join: bool = False) -> list[slice]:
    """Where each batch begins and ends. With ``join`` a last one of a single sample is part of the one before."""
    starts = list(range(0, num_samples, batch_size))
    if join and len(starts) > 1 and num_samples - starts[-1] == 1:
        starts.pop()
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], num_samples])]
