"""Batches hold every sample once, with its label, and random numbers depend on the seed only."""

import multiprocessing
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import functional as F
from torchvision.transforms import v2

from pycil_wsc import seeding
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.batches.augmentation import augment
from pycil_wsc.data.batches.epoch_order import Share, batch_slices, mixed_order
from pycil_wsc.data.batches.loader import ArraySource, FolderSource, open_source
from pycil_wsc.data.images.datasets import load_dataset, sized
from pycil_wsc.errors import UserError
from pycil_wsc.runs.planning import planned_images
from pycil_wsc.runs.run import Run

CPU = torch.device("cpu")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture
def digits():
    dataset = load_dataset("digits", ".")
    return open_source(dataset.info, dataset.train, CPU, 0), dataset.train, dataset.info


def collect(batches):
    images, targets = zip(*batches)
    return torch.cat(images), torch.cat(targets)


def test_test_batches_are_the_normalised_images_in_order(digits):
    source, split, info = digits
    indices = np.arange(5, 300, 3)
    images, targets = collect(source.batches(indices, split.targets, 32))
    expected = [F.normalize(F.to_tensor(Image.fromarray(split.images[i])), info.mean, info.std) for i in indices]
    torch.testing.assert_close(images, torch.stack(expected), rtol=0, atol=2e-6)
    assert targets.tolist() == split.targets[indices].tolist()


def test_training_batches_hold_every_sample_once_shuffled_by_the_seed(digits):
    source, split, _ = digits
    indices, numbers = np.arange(200), np.arange(len(split))  # each sample's number as its label
    batches = list(source.batches(indices, numbers, 64, train=True, seed=3))
    assert [len(targets) for _, targets in batches] == [64, 64, 64, 8]
    order = torch.cat([targets for _, targets in batches]).tolist()
    assert sorted(order) == indices.tolist() and order != indices.tolist()
    again, other = (collect(source.batches(indices, numbers, 64, train=True, seed=seed)) for seed in (3, 4))
    assert torch.equal(again[0], torch.cat([images for images, _ in batches])) and again[1].tolist() == order
    assert other[1].tolist() != order


@pytest.mark.parametrize("share", [Share(), Share(1, 2), Share(1, 3, of_each=True)])
@pytest.mark.parametrize("batch_size", [5, 40, 300])
def test_training_images_of_arrays_are_cropped_flipped_and_brightened_as_the_seed_draws(digits, batch_size, share):
    """Whole batches are drawn one after the other from one generator, whatever their size and share."""
    _, split, info = digits
    info = replace(info, padding=1, flip=True, brightness=0.25)
    source = ArraySource(info, split, CPU)
    count = 411  # the last batch is smaller

    def epoch(seed):
        indices = np.arange(count)
        batches = source.batches(indices, indices, batch_size, train=True, seed=seed, shuffle=False, share=share)
        return list(batches)

    generator, normalise = torch.Generator().manual_seed(3), augment.Normalise(info.mean, info.std, CPU)
    loaded = iter(epoch(3))
    for number, batch in enumerate(batch_slices(count, batch_size, join=True)):
        stored = torch.from_numpy(split.images[batch])
        augmented = augment.random_crop_flip(stored, 1, True, generator)
        augmented = augment.random_brightness(augmented, 0.25, generator)
        assert not torch.equal(augmented, stored)
        rows = share.rows(number)
        if rows is not None:
            images, samples = next(loaded)
            assert torch.equal(images, normalise(augmented[rows]))
            assert samples.tolist() == list(range(batch.start, batch.stop))[rows]
    assert next(loaded, None) is None
    assert not torch.equal(epoch(3)[0][0], epoch(4)[0][0])


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("ant", "bee"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(5):
                size = rng.integers(20, 60, 2)
                Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(
                    tmp_path / part / name / f"{i}.png"
                )
    return sized(load_dataset(f"folder:{tmp_path}", "."), 16)


def test_the_test_transform_of_files_is_torchvisions(folder):
    source = FolderSource(folder.info, folder.test, CPU, 0)
    images, targets = collect(source.batches(np.arange(10), folder.test.targets, 4))
    for i, path in enumerate(folder.test.images):
        image = F.center_crop(F.resize(Image.open(path), round(16 * 256 / 224)), 16)
        torch.testing.assert_close(images[i], F.normalize(F.to_tensor(image), MEAN, STD), rtol=0, atol=2e-6)
    assert targets.tolist() == [0] * 5 + [1] * 5


def test_training_images_of_files_are_torchvisions_crops_flipped_as_the_seed_draws(folder):
    """Each image has a seed for its crop; the flips of all batches are from one generator."""
    source = FolderSource(folder.info, folder.train, CPU, 0)
    images, _ = collect(source.batches(np.arange(10), folder.train.targets, 4, train=True, seed=3, shuffle=False))
    seeds = np.random.default_rng([3, 1]).integers(2**63, size=10)
    generator = torch.Generator().manual_seed(3)
    mirror = torch.cat([augment.coins(number, generator, CPU) for number in (4, 4, 2)])
    assert 0 < mirror.sum() < 10
    for image, path, seed, mirrored in zip(images, folder.train.images, seeds.tolist(), mirror, strict=True):
        torch.manual_seed(seed)
        expected = v2.RandomResizedCrop(16)(Image.open(path))
        expected = F.hflip(expected) if mirrored else expected
        torch.testing.assert_close(image, F.normalize(F.to_tensor(expected), MEAN, STD), rtol=0, atol=2e-6)


def test_crops_of_files_follow_the_seed_whatever_the_workers(folder):
    alone, pool = FolderSource(folder.info, folder.train, CPU, 0), FolderSource(folder.info, folder.train, CPU, 2)
    epochs = [
        collect(source.batches(np.arange(10), np.arange(10), 4, train=True, seed=seed))
        for source, seed in [(alone, 1), (pool, 1), (pool, 2)]
    ]
    assert torch.equal(epochs[0][0], epochs[1][0]) and torch.equal(epochs[0][1], epochs[1][1])
    assert sorted(epochs[2][1].tolist()) == list(range(10)) and not torch.equal(epochs[1][0], epochs[2][0])


def test_there_are_no_more_workers_than_cores(folder, monkeypatch, recwarn):
    """torch would warn of them."""
    monkeypatch.setattr("pycil_wsc.data.images.parallel.cores", lambda: 2)
    source = open_source(folder.info, folder.train, torch.device("cpu"), 1024)
    assert source.loader.num_workers == 2
    assert not [each for each in recwarn if "worker" in str(each.message)]
    assert open_source(folder.info, folder.train, torch.device("cpu"), 1).loader.num_workers == 1


def test_workers_are_forked_while_no_other_thread_draws_random_numbers(folder, monkeypatch):
    """Otherwise they would inherit a generator that is locked for ever, and never answer."""
    start, alone = DataLoader.__iter__, []

    def watched(loader):
        alone.append(seeding._IN_USE._is_owned())
        return start(loader)

    monkeypatch.setattr(DataLoader, "__iter__", watched)
    source = FolderSource(folder.info, folder.train, CPU, 1)
    assert sum(len(images) for images, _ in source.batches(np.arange(10), folder.train.targets, 4)) == 10
    assert alone == [True]


def test_workers_live_from_epoch_to_epoch(folder):
    source = FolderSource(folder.info, folder.train, CPU, 2)
    workers = []
    for seed in (1, 2):
        collect(source.batches(np.arange(10), folder.train.targets, 4, train=True, seed=seed))
        workers.append([worker.pid for worker in source.loader._iterator._workers])
    assert len(workers[0]) == 2 and workers[0] == workers[1]


def test_a_run_leaves_no_worker_processes(settings, folder):
    keys = {"dataset": folder.info.name, "image_size": 16, "num_workers": 1, "init_cls": 1, "increment": 1}
    run = Run(resolve(settings | keys | {"model_name": "finetune", "epochs": 1, "init_epoch": 1}), folder)
    alive = set(multiprocessing.active_children())
    run.execute()
    assert set(multiprocessing.active_children()) <= alive and run.train_source.started


def test_two_views_of_an_epoch_leave_the_workers_to_the_next_one(folder):
    source, indices = FolderSource(folder.info, folder.train, CPU, 1), np.arange(10)
    for epoch in (0, 2):
        views = (source.batches(indices, folder.train.targets, 4, train=True, seed=epoch + view) for view in (0, 1))
        for _ in zip(*views, strict=True):
            pass
        assert not source.busy


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_cannot_be_read_is_named(folder, workers):
    broken = folder.train.images[3]
    with open(broken, "wb") as file:
        file.write(b"not an image")
    source = FolderSource(folder.info, folder.train, CPU, workers)
    with pytest.raises(UserError) as error:
        collect(source.batches(np.arange(10), folder.train.targets, 4))
    assert broken in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("share, batch_size", [(0.5, 8), (0.25, 10), (0.9, 7), (0.0, 8), (1.0, 8)])
def test_each_batch_of_a_mixed_order_has_its_share_of_new_samples_and_all_come_alike(share, batch_size):
    new, old = np.arange(100, 130), np.arange(13)
    order = mixed_order(new, old, share, batch_size, seed=3)
    assert len(order) == 43 and not np.array_equal(order, mixed_order(new, old, share, batch_size, seed=4))
    for start in range(0, 43, batch_size):
        batch = order[start : start + batch_size]
        assert (batch >= 100).sum() == round(share * len(batch))
    for kind in (new, old):
        counts = [(order == sample).sum() for sample in kind]
        assert max(counts) - min(counts) <= 1


def test_a_run_with_a_replay_ratio_trains_on_as_many_images_mixed_as_asked(settings, monkeypatch):
    seen, batches = [], ArraySource.batches

    def spy(self, indices, targets, batch_size, **keywords):
        for images, labels in batches(self, indices, targets, batch_size, **keywords):
            if keywords.get("train"):
                seen.append(labels.tolist())
            yield images, labels

    monkeypatch.setattr(ArraySource, "batches", spy)
    config = resolve(settings | {"model_name": "replay", "replay_ratio": 0.25, "init_epoch": 1, "epochs": 1})
    run = Run(config, load_dataset(config.dataset, "."))
    result = run.execute()
    first, second, third = seen[:3], seen[3:7], seen[7:]  # 24 images in batches of 8, then 24 + 8 and 24 + 16
    assert [len(batch) for batch in seen] == [8] * 12 and result["images_trained"] == planned_images(
        config, run.manager
    ) == 96
    assert set(sum(first, [])) == {0, 1}
    assert [sum(label >= 2 for label in batch) for batch in second] == [2] * 4 and [
        sum(label >= 4 for label in batch) for batch in third
    ] == [2] * 5
