"""Domains of one data set as tasks: the same classes in each, with all images rotated, or their pixels permuted."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from pycil_wsc import seeding
from pycil_wsc.data.types import Arrivals, Dataset, Split
from pycil_wsc.errors import UserError

HALF_TURN = 180.0  # degrees: drawn angles are below it, as in Mammoth


def in_domains(dataset: Dataset, domains: Sequence[str], seed: int) -> Dataset:
    """The stream whose task t has all images of ``dataset``, arrays in memory, as ``domains[t]`` says.

    * ``original``: as they are
    * ``rotated:30``: rotated by so many degrees, counter-clockwise; ``rotated``: by an angle in [0, 180), drawn by
      ``seed`` and t
    * ``permuted``: with their pixels in another order, drawn likewise

    A rotated pixel is its nearest neighbour, and black where there is none: Mammoth's rotated and permuted MNIST.
    """
    if not dataset.train.in_memory:
        raise UserError(
            f"domains: '{dataset.info.name}' has image files, of which no domains are made; give a folder for each "
            "domain in the key tasks"
        )
    splits = []
    for split in (dataset.train, dataset.test):
        parts = [_transformed(split.images, domain, seed, task) for task, domain in enumerate(domains)]
        splits.append(Split(np.concatenate(parts), np.tile(split.targets, len(domains))))
    of_train, of_test = (np.repeat(np.arange(len(domains)), len(split)) for split in (dataset.train, dataset.test))
    seen = (dataset.info.num_classes,) * len(domains)
    return replace(
        dataset,
        train=splits[0],
        test=splits[1],
        fingerprint=_fingerprint(dataset, domains, seed),
        arrivals=Arrivals(seen, of_train, of_test),
    )


def angle_of(domain: str, seed: int, task: int) -> float | None:
    """The angle of a rotated domain in degrees; None for another one."""
    kind, _, given = domain.partition(":")
    if kind != "rotated":
        return None
    return float(given) if given else float(_drawn(seed, task).uniform(0, HALF_TURN))


def _transformed(images: np.ndarray, domain: str, seed: int, task: int) -> np.ndarray:
    """uint8 (N, H, W, 3) -> the same in the domain."""
    angle = angle_of(domain, seed, task)
    if angle is not None:
        return _rotated(images, angle)
    if domain == "permuted":
        count, height, width, channels = images.shape
        order = _drawn(seed, task).permutation(height * width)
        return images.reshape(count, height * width, channels)[:, order].reshape(images.shape)
    return images


def _rotated(images: np.ndarray, angle: float) -> np.ndarray:
    from torchvision.transforms.functional import rotate  # imported here because it takes a second

    if not len(images):
        return images
    turned = rotate(torch.from_numpy(images).permute(0, 3, 1, 2), angle)
    return turned.permute(0, 2, 3, 1).contiguous().numpy()


def _drawn(seed: int, task: int) -> np.random.Generator:
    return np.random.default_rng(seeding.derived_seed(seed, "domain", task))


def _fingerprint(dataset, domains, seed):
    """That of the data set, and in ``tasks`` one of each domain, whose hash covers how it was made."""
    whole = dataset.fingerprint
    if whole is None:
        return None
    tasks = []
    for task, domain in enumerate(domains):
        made = domain if domain == "original" or ":" in domain else f"{domain} {seed} {task}"
        digest = hashlib.sha256(f"{whole['sha256']} {made}".encode()).hexdigest()[:16]
        tasks.append(whole | {"sha256": digest})
    return whole | {"tasks": tasks}
