"""Decoded image files: kept whole or not at all, cropped as torchvision does it, in workers and on the device."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import ks_2samp
from small_runs import SETTINGS
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from pycil_wsc.config.loading import resolve
from pycil_wsc.data import augment, crops, image_map
from pycil_wsc.data.datasets import load_dataset
from pycil_wsc.data.image_map import decoded
from pycil_wsc.data.loader import DeviceSource, FolderSource, open_source
from pycil_wsc.data.order import Share
from pycil_wsc.errors import UserError
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.runs.class_incremental import ClassIncremental

SIZES = [(80, 60), (50, 90), (40, 40), (200, 37), (37, 120)]  # width, height; the short side becomes 37
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """Two classes of five smooth images."""
    x, y = np.meshgrid(np.linspace(0, 255, 200), np.linspace(0, 255, 200))
    for part in ("train", "val"):
        for label in ("a", "b"):
            (tmp_path / "own" / part / label).mkdir(parents=True)
            for number, (width, height) in enumerate(SIZES):
                pixels = np.stack([x, y, (x + y) / 2 if label == "a" else x], -1)[:height, :width].astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / "own" / part / label / f"{number}.png")
    return tmp_path / "own"


@pytest.fixture
def dataset(folder):
    return load_dataset(f"folder:{folder}", ".", 32)


def collected(source, split, train=False, share=None):
    rng = {"train": train, "seed": 5} | ({"share": share} if share else {})
    batches = list(source.batches(np.arange(len(split)), split.targets, 4, **rng))
    return torch.cat([images for images, _ in batches]), torch.cat([targets for _, targets in batches])


# ---- crops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("height, width", [(256, 256), (256, 341), (400, 256), (256, 1500)])
def test_boxes_are_distributed_as_torchvisions(height, width):
    """Kolmogorov-Smirnov, on place, size, area and ratio; of a very wide image nearly all boxes are the centred one."""
    ours = crops.random_boxes(np.tile([[height, width]], (3000, 1)), np.random.default_rng(0))
    torch.manual_seed(0)
    transform, image = v2.RandomResizedCrop(224), torch.empty(3, height, width)
    params = [transform.make_params([image]) for _ in range(3000)]
    theirs = np.array([[each[name] for name in ("top", "left", "height", "width")] for each in params])
    assert (ours[:, :2] >= 0).all() and (ours[:, :2] + ours[:, 2:] <= [height, width]).all()
    for measure in (
        *(lambda b, k=k: b[:, k] for k in range(4)),
        lambda b: b[:, 2] * b[:, 3],
        lambda b: b[:, 2] / b[:, 3],
    ):
        assert ks_2samp(measure(ours), measure(theirs)).pvalue > 1e-3


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_batch_of_crops_is_torchvisions_crops(interpolation):
    rng, mode = np.random.default_rng(0), v2.InterpolationMode(interpolation)
    sizes = np.array([[height, width] for width, height in SIZES])
    images = [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    pixels = torch.from_numpy(np.concatenate([image.reshape(-1, 3) for image in images]))
    starts = np.concatenate([[0], np.cumsum(sizes.prod(1))[:-1]])
    for _ in range(4):
        boxes = crops.random_boxes(sizes, rng)
        places = crops.Crops(starts, sizes[:, 1], boxes, CPU)
        batch = places.of(pixels, slice(None), slice(None), 32, interpolation)
        for image, box, crop in zip(images, boxes.tolist(), batch, strict=True):
            channels = torch.from_numpy(image).permute(2, 0, 1)
            expected = functional.resized_crop(channels, *box, [32, 32], mode, antialias=True).permute(1, 2, 0)
            difference = (crop.int() - expected.int()).abs()  # torchvision rounds twice, with weights of 8 bits or more
            assert difference.max() <= 2 and difference.float().mean() < 0.3


# ---- the file --------------------------------------------------------------------------------------------------------


def test_images_are_those_of_the_test_transform(dataset, tmp_path):
    whole = decoded(dataset, tmp_path, 0, on_device=False)
    for split in (whole.train, whole.test):
        assert split.decoded is not None and len(split.decoded) == len(split)
        for number, path in enumerate(split.images):
            expected = np.asarray(v2.Resize(37)(Image.open(path)))
            assert np.array_equal(split.decoded.image(number), expected)
    plain = collected(FolderSource(dataset.info, dataset.test, CPU, 0), dataset.test)
    for on_device, kind in ((False, FolderSource), (True, DeviceSource)):
        split = decoded(dataset, tmp_path, 0, on_device).test
        source = open_source(dataset.info, split, CPU, 0)
        assert type(source) is kind and all(map(torch.equal, collected(source, split), plain))


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_images_draws_no_random_number_of_the_network(workers, dataset):
    """Else a resumed run, which starts its workers again, would have other dropout."""
    source, before = FolderSource(dataset.info, dataset.train, CPU, workers), torch.get_rng_state()
    collected(source, dataset.train, train=True)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_pass_within_another_changes_neither(mapped, workers, dataset, tmp_path):
    """A reset in the middle of an epoch scores parameters with the same images."""
    split = decoded(dataset, tmp_path, 0, on_device=False).train if mapped else dataset.train
    source = FolderSource(dataset.info, split, CPU, workers)
    alone, within = collected(source, split, train=True), collected(source, split)
    batches = source.batches(np.arange(len(split)), split.targets, 4, train=True, seed=5)
    seen = [next(batches)]
    assert all(map(torch.equal, collected(source, split), within))
    seen += batches
    assert all(map(torch.equal, map(torch.cat, zip(*seen)), alone))
    assert all(map(torch.equal, collected(source, split), within))


def test_a_device_holds_the_images_of_both_splits_once(dataset, tmp_path):
    whole = decoded(dataset, tmp_path, 0, on_device=True)
    train, test = (open_source(dataset.info, split, CPU, 0) for split in (whole.train, whole.test))
    assert isinstance(train, DeviceSource) and train.pixels is test.pixels


def test_workers_decode_as_this_process_does_and_name_a_broken_file(dataset, folder, tmp_path, monkeypatch, forked):
    monkeypatch.setattr("pycil_wsc.data.parallel.CHUNK", 3)
    here, theirs = (decoded(dataset, tmp_path / str(workers), workers, False).train.decoded for workers in (0, 2))
    assert here.path != theirs.path and all(
        np.array_equal(*pair)
        for pair in ((here.starts, theirs.starts), (here.sizes, theirs.sizes), (here.pixels, theirs.pixels))
    )
    (folder / "train" / "b" / "3.png").write_bytes(b"no image")
    with pytest.raises(UserError, match="b/3.png: not a readable image"):
        decoded(dataset, tmp_path / "2", 1, False)


def test_workers_and_device_crop_alike_and_shares_are_parts(dataset, tmp_path):
    """The crops and flips are those that the seed draws."""
    split = decoded(dataset, tmp_path, 0, on_device=True).train
    workers, device = FolderSource(dataset.info, split, CPU, 0), DeviceSource(dataset.info, split.decoded, CPU)
    images, targets = collected(workers, split, train=True)
    order, flips = np.random.default_rng(5).permutation(len(split)), torch.Generator().manual_seed(5)
    boxes = crops.random_boxes(split.decoded.sizes[order], np.random.default_rng([5, 1]))
    mirror = torch.cat([augment.coins(number, flips, torch.device("cpu")) for number in (4, 4, 2)])
    assert targets.tolist() == split.targets[order].tolist() and 0 < mirror.sum() < len(split)
    normalise = augment.Normalise(dataset.info.mean, dataset.info.std, CPU)
    for image, number, box, mirrored in zip(images, order, boxes.tolist(), mirror, strict=True):
        channels = torch.from_numpy(split.decoded.image(number)).permute(2, 0, 1)
        crop = functional.resized_crop(channels, *box, [32, 32], antialias=True).permute(1, 2, 0)
        assert torch.equal(image, normalise((crop.flip(1) if mirrored else crop)[None])[0])
    others, same = collected(device, split, train=True)
    assert torch.equal(targets, same) and (images - others).abs().max() < 2.01 / 255 / min(dataset.info.std)
    for source, whole in ((workers, images), (device, others)):
        parts = [collected(source, split, True, Share(rank, 3, of_each=True))[0] for rank in range(3)]
        assert sum(map(len, parts)) == len(whole)
        assert torch.equal(parts[1][:1], whole[1:2]), "the second process has the second image of the first batch"
        batches = collected(source, split, True, Share(1, 2))[0]
        assert torch.allclose(batches, whole[4:8])


def test_an_interrupted_file_is_not_taken_for_a_whole_one(dataset, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(image_map, "_write_index", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            decoded(dataset, tmp_path, 0, False)
    (path,) = tmp_path.rglob("decoded-*.uint8")
    path.write_bytes(bytes(path.stat().st_size))
    whole = decoded(dataset, tmp_path, 0, False).train
    assert whole.decoded.image(0).any()
    stamp = path.stat().st_mtime_ns
    decoded(dataset, tmp_path, 0, False)
    assert path.stat().st_mtime_ns == stamp, "a whole one is used again"
    Image.new("RGB", (80, 60), "red").save(whole.images[0])
    assert (decoded(dataset, tmp_path, 0, False).train.decoded.image(0) == [255, 0, 0]).all(), "a file has changed"


@pytest.mark.parametrize(
    "damaged, left", [("*.npz", 0.5), ("*.npz", 0), ("*.uint8", 0.5), ("*.uint8", 0), ("*.uint8", None)]
)
def test_a_truncated_or_deleted_file_is_made_again(damaged, left, dataset, tmp_path):
    """``left``: the share of the file that is left, None if it is deleted."""
    whole = decoded(dataset, tmp_path, 0, False).train.decoded.pixels.copy()
    (path,) = tmp_path.rglob(f"decoded-{damaged}")
    if left is None:
        path.unlink()
    else:
        os.truncate(path, int(left * path.stat().st_size))
    again = decoded(dataset, tmp_path, 0, False).train.decoded
    assert np.array_equal(again.pixels, whole)


def test_a_full_disk_and_a_broken_file_are_one_line(dataset, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(image_map.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
        with pytest.raises(UserError, match="cache_images: 20 decoded images take 0.0 GB"):
            decoded(dataset, tmp_path, 0, False)
    with open(path := dataset.train.images[3], "r+b") as file:
        file.truncate(os.stat(path).st_size // 2)
    with pytest.raises(UserError, match="3.png: not a readable image"):
        decoded(dataset, tmp_path, 0, False)
    assert not list(tmp_path.rglob("decoded-*.npz"))


@pytest.mark.parametrize("kind", ["uint8", "npz"])
def test_a_folder_in_the_place_of_a_cached_file_is_one_line(kind, dataset, tmp_path):
    decoded(dataset, tmp_path, 0, False)
    (file,) = tmp_path.rglob(f"decoded-*.{kind}")
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match=f"cache_images: {file} is a folder"):
        decoded(dataset, tmp_path, 0, False)


def test_an_image_that_vanished_is_named(dataset, tmp_path):
    os.unlink(dataset.train.images[3])
    with pytest.raises(UserError, match="3.png: No such file or directory; replace the image, or remove it"):
        decoded(dataset, tmp_path, 0, False)


@pytest.mark.parametrize("where", ["memory", "device"])
def test_a_run_learns_from_decoded_images(where, folder, tmp_path):
    keys = {"dataset": f"folder:{folder}", "image_size": 32, "cache_images": where, "data_root": str(tmp_path)}
    keys |= {"init_cls": 1, "increment": 1, "num_workers": 0, "out": str(tmp_path / "runs"), "epochs": 1}
    config = resolve(SETTINGS | keys | {"init_epoch": 1, "milestones": [], "init_milestones": []})
    kind, data = ClassIncremental(), Datasets()
    result = kind.execute(config, data.of(config), lambda progress: None)
    assert len(result["curve"]) == 2 and list(tmp_path.rglob("decoded-*.npz"))
