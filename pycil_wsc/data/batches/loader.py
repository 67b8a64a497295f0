"""Batches of (images, targets) on the device, augmented and normalised.

``ArraySource`` keeps the whole split as uint8 on the device and gathers by index. ``FolderSource`` decodes files in
worker processes that live as long as the run. ``DeviceSource`` crops decoded images on the device. They share one
interface::

    for images, targets in source.batches(indices, targets, batch_size, train=True, seed=7): ...
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing import get_start_method
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pycil_wsc.allocator import return_freed_memory
from pycil_wsc.data.batches.augmentation import augment, crops
from pycil_wsc.data.batches.augmentation.auto_augment import AutoAugment
from pycil_wsc.data.batches.augmentation.rand_augment import RandAugment
from pycil_wsc.data.batches.epoch_order import WHOLE, Parts, Share, batch_slices, chunks, epoch_order, size_of
from pycil_wsc.data.images.image_files import decode
from pycil_wsc.data.images.parallel import at_most_one_per_core, worker_ended
from pycil_wsc.data.types import DatasetInfo, ImageMap, Split
from pycil_wsc.devices import free_memory
from pycil_wsc.errors import UserError
from pycil_wsc.lazy import Lazy
from pycil_wsc.seeding import restored

v2: Any = Lazy("torchvision.transforms.v2")

OPERATIONS = {"autoaugment": AutoAugment, "timm": RandAugment}  # by augmentation: what each image draws for itself
PIECE = 2**26  # pixels copied at a time
_held = weakref.WeakValueDictionary()  # the pixels of files on devices, as long as a source has them


def open_source(info: DatasetInfo, split: Split, device: torch.device, num_workers: int) -> Source:
    """Create the source of one split of a data set."""
    if split.in_memory:
        return ArraySource(info, split, device)
    if split.decoded and split.on_device and fits(split.decoded, device):
        return DeviceSource(info, split.decoded, device)
    return FolderSource(info, split, device, at_most_one_per_core(num_workers))


class BatchSource(Protocol):
    """What gives the batches of a phase: a :class:`Source` of images, or rows of something else in their place."""

    def batches(
        self,
        indices: np.ndarray,
        targets: np.ndarray,
        batch_size: int,
        *,
        train: bool = False,
        seed: int = 0,
        shuffle: bool = True,
        share: Share = WHOLE,
    ) -> Iterator[tuple[Tensor, ...]]: ...


class Source:
    """Batches of one split of a data set. Subclasses implement :meth:`images_of`."""

    def __init__(self, info: DatasetInfo, device: torch.device) -> None:
        self.info, self.device = info, device
        self.normalise = augment.Normalise(info.mean, info.std, device)

    def close(self) -> None:
        """End the worker processes, if there are any; the next pass starts new ones."""

    def batches(
        self,
        indices: np.ndarray,
        targets: np.ndarray,
        batch_size: int,
        *,
        train: bool = False,
        seed: int = 0,
        shuffle: bool = True,
        share: Share = WHOLE,
        augmentation: str | None = None,
        slices: Sequence[slice] | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of one epoch: images float32 (B, 3, H, W) and targets int64 (B,).

        Args:
            indices: int64 array, the samples of the epoch.
            targets: int64 array, the targets of the whole split.
            batch_size: images per batch.
            train: augment and shuffle the images, both from ``seed``, and merge a last batch of one image into the
                previous one.
            seed: seed of the epoch.
            shuffle: False: do not shuffle, even with ``train``.
            share: the part of each batch to load. Its images do not depend on how the batches are shared.
            augmentation: with ``train``, another one than that of ``info``.
            slices: the batches as parts of the order, in place of those of ``batch_size``.

        Raises:
            UserError: if a file cannot be read; names the file.
        """
        order = epoch_order(indices, train and shuffle, seed)
        labels = torch.from_numpy(targets[order]).to(self.device)
        batches = batch_slices(len(order), batch_size, join=train) if slices is None else slices
        parts = [(batch, share.rows(i)) for i, batch in enumerate(batches)]
        kind = (augmentation or self.info.augmentation) if train else None
        for images, batch, rows in self.images_of(order, parts, kind, seed):
            yield self.normalise(images), labels[batch][rows]

    def images_of(
        self, order: np.ndarray, parts: Parts, augmentation: str | None, seed: int
    ) -> Iterator[tuple[Tensor, slice, slice]]:
        """Yield (images uint8 (B, side, side, 3) on the device, batch, rows) for each of ``parts`` with rows.

        ``augmentation``: None for test images.
        """
        raise NotImplementedError

    def augmented(
        self, cropped: Iterator[Tensor], parts: Parts, augmentation: str | None, seed: int
    ) -> Iterator[tuple[Tensor, slice, slice]]:
        """What :meth:`images_of` yields, from the crops of each of ``parts`` with rows."""
        generator = torch.Generator(self.device).manual_seed(seed)
        choices = self.choices(augmentation, parts, seed)
        flips = bool(augmentation) and self.info.flip
        for number, (batch, rows) in enumerate(parts):
            mirror = augment.coins(size_of(batch), generator, self.device) if flips else None  # for the whole batch
            if rows is None:
                continue
            images = next(cropped)
            if mirror is not None:
                images = augment.flip(images, mirror[rows])
            if choices is not None:
                images = choices.applied(images, number)
            yield images, batch, rows
        next(cropped, None)  # run the generator to its end

    def choices(self, augmentation: str | None, parts: Parts, seed: int) -> AutoAugment | RandAugment | None:
        """The operations that each image of an epoch draws, if it does."""
        kind = OPERATIONS.get(augmentation or "")
        if kind is None:
            return None
        sizes = [(size_of(batch), slice(0, 0) if rows is None else rows) for batch, rows in parts]
        return kind(sizes, seed, self.device)


class ArraySource(Source):
    """A split held on the device as uint8 (N, H, W, 3)."""

    def __init__(self, info: DatasetInfo, split: Split, device: torch.device) -> None:
        super().__init__(info, device)
        self.images = torch.from_numpy(np.ascontiguousarray(split.images)).to(device)

    def images_of(
        self, order: np.ndarray, parts: Parts, augmentation: str | None, seed: int
    ) -> Iterator[tuple[Tensor, slice, slice]]:
        if augmentation and (augmentation == "timm" or self.info.crop == "resized"):
            yield from self.augmented(self._boxes(order, parts, seed), parts, augmentation, seed)
            return
        index = torch.from_numpy(order).to(self.device)
        generator = torch.Generator(self.device).manual_seed(seed)
        choices = self.choices(augmentation, parts, seed)
        number = 0
        for chunk in chunks(parts):
            images = self._gathered(index, chunk, generator if augmentation else None)
            start = 0
            for batch, rows in chunk:
                if rows is not None:
                    end = start + len(range(*rows.indices(size_of(batch))))
                    part = images[start:end]
                    start = end
                    if choices is not None:
                        part = choices.applied(part, number)
                    yield self._fitted(part, bool(augmentation)), batch, rows
                number += 1

    def _fitted(self, images: Tensor, train: bool) -> Tensor:
        """Images as they are stored, in the network's size: (B, side, side, 3)."""
        info = self.info
        if info.crop == "resized":
            return augment.centred(images, info.resized_side, info.image_size, info.tested_interpolation)
        if images.shape[1] == info.image_size:
            return images
        return augment.resize(images, info.image_size, info.interpolation if train else info.tested_interpolation)

    def _gathered(self, index: Tensor, chunk: Parts, generator: torch.Generator | None) -> Tensor:
        """The images of all rows of a chunk, uint8 (N, H, W, 3), augmented if there is a ``generator``.

        Crops and brightness are drawn for whole batches, one after the other, so they depend neither on the shares of
        the processes nor on the chunk.
        """
        info = self.info
        samples, places, factors = [], [], []
        for batch, rows in chunk:
            size = size_of(batch)
            if generator is not None and (info.padding or info.flip):
                place = augment.random_places(size, info.padding, info.flip, generator, self.device)
                if rows is not None:
                    places.append([drawn[rows] for drawn in place])
            if generator is not None and info.brightness:
                factor = augment.random_factors(size, info.brightness, generator, self.device)
                if rows is not None:
                    factors.append(factor[rows])
            if rows is not None:
                samples.append(index[batch][rows])
        images = self.images[_joined(samples) if samples else index[:0]]
        if places:
            images = augment.crop_flip(images, info.padding, *map(_joined, zip(*places)))
        if factors:
            images = augment.brightness(images, _joined(factors))
        return images

    def _boxes(self, order, parts, seed):
        """A random box of each image, resized."""
        height, width = self.images.shape[1:3]
        sizes = np.tile([[height, width]], (len(order), 1))
        boxes = crops.random_boxes(sizes, np.random.default_rng([seed, 1]), self.info.crop_scale)
        places = crops.Crops(order * height * width, sizes[:, 1], boxes, self.device)
        for batch, rows in parts:
            if rows is not None:
                yield places.of(self.images.view(-1, 3), batch, rows, self.info.image_size, self.info.interpolation)


class CroppedSource(Source):
    """A split of images of different sizes. Subclasses implement :meth:`cropped`; flips are done on the device."""

    def images_of(
        self, order: np.ndarray, parts: Parts, augmentation: str | None, seed: int
    ) -> Iterator[tuple[Tensor, slice, slice]]:
        cropped = self.cropped(order, parts, bool(augmentation), np.random.default_rng([seed, 1]))
        yield from self.augmented(cropped, parts, augmentation, seed)

    def cropped(self, order: np.ndarray, parts: Parts, train: bool, rng: np.random.Generator) -> Iterator[Tensor]:
        """Yield the crops of each of ``parts`` with rows: uint8 (B, side, side, 3) on the device."""
        raise NotImplementedError


class FolderSource(CroppedSource):
    """A split of image files, read (or mapped, if decoded before) and cropped by worker processes."""

    def __init__(self, info: DatasetInfo, split: Split, device: torch.device, num_workers: int) -> None:
        super().__init__(info, device)
        self.images = MappedImages(split.decoded, info) if split.decoded else DecodedImages(split.images, info)
        self.num_workers = num_workers
        self.started = False  # whether the workers run; they start with the first epoch
        self.busy = False  # whether a pass is under way
        self.plan = []  # the batches of the current epoch, which the loader reads at each epoch's start
        self.loader = self._loader(self.plan, persistent=num_workers > 0)

    def _loader(self, plan, persistent):
        return DataLoader(
            self.images,
            batch_sampler=plan,
            num_workers=self.num_workers,
            persistent_workers=persistent,
            pin_memory=self.device.type != "cpu",
            collate_fn=_stack,
            generator=torch.Generator(),  # draws the workers' seeds; torch's global one is for the network
        )

    def close(self) -> None:
        self.loader = self._loader(self.plan, persistent=self.num_workers > 0)

    def cropped(self, order: np.ndarray, parts: Parts, train: bool, rng: np.random.Generator) -> Iterator[Tensor]:
        keys = self.images.keys(order, train, rng)
        wanted = [keys[batch][rows] for batch, rows in parts if rows is not None]
        plan = [part for part in wanted if part]
        if not self.started:
            return_freed_memory()
            self.started = True
        beside = self.busy  # another pass is under way: an epoch while an importance is computed, or its other view
        if beside:
            loader = self._loader(plan, persistent=False)
        else:
            self.plan[:] = plan  # in place: the loader holds this list
            loader = self.loader
            self.busy = True
        try:
            with restored([]):  # no other thread draws: workers that are forked then would inherit a locked generator
                decoded = iter(loader)
            for part in wanted:
                images = next(decoded) if part else torch.empty(0, *[self.info.image_size] * 2, 3)
                if isinstance(images, str):
                    raise UserError(images)
                # not from pageable memory: MPS, for one, may read that after it has gone to other images
                yield images.to(self.device, non_blocking=images.is_pinned())
            next(decoded, None)  # run the loader's iterator to its end
        except RuntimeError as error:
            if get_start_method() == "fork" or "exited unexpectedly" not in str(error):
                raise
            raise worker_ended("reading images") from None  # which began by importing the main script
        finally:
            if not beside:
                self.busy = False


class DecodedImages(Dataset):
    """(index, crop seed) -> uint8 (side, side, 3); the seed -1 means the test transform: resize and centre crop."""

    def __init__(self, paths: np.ndarray, info: DatasetInfo) -> None:
        self.paths, side = paths, info.image_size
        tested, trained = map(v2.InterpolationMode, (info.tested_interpolation, info.interpolation))
        self.test_crop = v2.Compose([v2.Resize(info.resized_side, tested), v2.CenterCrop(side)])
        self.train_crop = v2.RandomResizedCrop(side, scale=(info.crop_scale, 1.0), interpolation=trained)

    def __len__(self) -> int:
        return len(self.paths)

    def keys(self, order: np.ndarray, train: bool, rng: np.random.Generator) -> list[tuple[int, int]]:
        """The keys of the samples in ``order``, with random crops if ``train``."""
        seeds = rng.integers(2**63, size=len(order)) if train else np.full(len(order), -1)
        return list(zip(order.tolist(), seeds.tolist()))

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


class MappedImages(Dataset):
    """(index, top, left, height, width) -> the resized box of a decoded image: uint8 (side, side, 3)."""

    def __init__(self, images: ImageMap, info: DatasetInfo) -> None:
        self.images, self.side, self.scale = images, info.image_size, info.crop_scale
        self.mode = v2.InterpolationMode(info.interpolation)

    def __len__(self) -> int:
        return len(self.images)

    def keys(self, order: np.ndarray, train: bool, rng: np.random.Generator) -> list[tuple[int, ...]]:
        """The keys of the samples in ``order``, with random boxes if ``train``."""
        boxes = crops.boxes(self.images.sizes[order], self.side, rng if train else None, self.scale)
        return list(zip(order.tolist(), *boxes.T.tolist()))

    def __getitem__(self, key: tuple[int, ...]) -> Tensor | str:
        index, top, left, height, width = key
        try:
            image = torch.from_numpy(self.images.image(index)).permute(2, 0, 1)
        except UserError as error:
            return str(error)
        return v2.functional.resized_crop(image, top, left, height, width, [self.side] * 2, self.mode, True).permute(
            1, 2, 0
        )


class DeviceSource(CroppedSource):
    """A split of decoded images that are held on the device and cropped there in batches."""

    def __init__(self, info: DatasetInfo, images: ImageMap, device: torch.device) -> None:
        super().__init__(info, device)
        self.images, self.pixels = images, held_on(device, images)

    def cropped(self, order: np.ndarray, parts: Parts, train: bool, rng: np.random.Generator) -> Iterator[Tensor]:
        images, side = self.images.of(order), self.info.image_size
        boxes = crops.boxes(images.sizes, side, rng if train else None, self.info.crop_scale)
        places = crops.Crops(images.starts, images.sizes[:, 1], boxes, self.device)
        for batch, rows in parts:
            if rows is not None:
                yield places.of(self.pixels, batch, rows, side, self.info.interpolation)


def fits(images: ImageMap, device: torch.device) -> bool:
    """Whether the decoded images are on the device or take at most half of its free memory; always true on the CPU."""
    if device.type == "cpu" or _file_on(device, images) in _held:
        return True
    needed, free = images.pixels.nbytes, free_memory(device)
    if needed > free / 2:
        logging.getLogger("pycil_wsc").warning(
            "cache_images: %.1f GB are more than half of the %.1f GB free on %s; cropping in worker processes instead",
            needed / 1e9,
            free / 1e9,
            device,
        )
    return needed <= free / 2


def held_on(device: torch.device, images: ImageMap) -> Tensor:
    """The pixels of the file on ``device``, which all splits share; on the CPU, the mapped file itself."""
    file = _file_on(device, images)
    if (pixels := _held.get(file)) is None:
        pixels = _held[file] = _copied_to(device, torch.from_numpy(images.pixels))
    return pixels


def _file_on(device, images):
    return images.path, images.written, device


def _copied_to(device, pixels):
    """``pixels`` on ``device``, copied in pieces; on the CPU, themselves."""
    if device.type == "cpu":
        return pixels
    copy = torch.empty_like(pixels, device=device)
    for start in range(0, len(copy), PIECE):
        copy[start : start + PIECE].copy_(pixels[start : start + PIECE])
    return copy


def _joined(tensors):
    """The tensors, one after the other; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _stack(samples):
    """The batch, or the message of the first file that could not be read."""
    return next((sample for sample in samples if isinstance(sample, str)), None) or torch.stack(samples)
