"""Decoded image files: kept whole or not at all, cropped as torchvision does it, in workers and on the device."""

import errno
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import ks_2samp
from support.small_runs import SETTINGS, killed_at, write
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from main import main
from pycil_wsc.config.loading import load, resolve
from pycil_wsc.data.batches import loader
from pycil_wsc.data.batches.augmentation import augment, crops
from pycil_wsc.data.batches.epoch_order import Share
from pycil_wsc.data.batches.loader import DeviceSource, FolderSource, open_source
from pycil_wsc.data.configured import for_training
from pycil_wsc.data.images import map as image_map
from pycil_wsc.data.images import parallel
from pycil_wsc.data.images.datasets import load_dataset, sized
from pycil_wsc.data.images.image_files import decode
from pycil_wsc.data.images.map import decoded
from pycil_wsc.data.images.sources import read_source
from pycil_wsc.data.types import Split
from pycil_wsc.errors import UnusableRun, Unwritable, UserError
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.runs import speed
from pycil_wsc.runs.class_incremental import ClassIncrementalRuns
from pycil_wsc.runs.run import Run

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
    return sized(load_dataset(f"folder:{folder}", "."), 32)


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


def test_of_a_very_long_image_the_middle_is_cached(folder, tmp_path):
    stripes = np.arange(4 * 3000 * 3, dtype=np.uint8).reshape(4, 3000, 3)
    Image.fromarray(stripes).save(folder / "val" / "b" / "0.png")
    dataset = sized(load_dataset(f"folder:{folder}", "."), 32)
    whole = decoded(dataset, tmp_path, 0, on_device=False)
    found = collected(open_source(dataset.info, whole.test, CPU, 0), dataset.test)
    expected = collected(FolderSource(dataset.info, dataset.test, CPU, 0), dataset.test)
    assert all(map(torch.equal, found, expected))


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
    monkeypatch.setattr("pycil_wsc.data.images.parallel.CHUNK", 3)
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


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_another_command_has_replaced_is_not_read_with_the_old_places(workers, dataset, tmp_path):
    """Loader processes may map the file long after the index was read."""
    before = decoded(dataset, tmp_path, 0, False)
    Image.new("RGB", (300, 60), "red").save(dataset.train.images[0])
    decoded(dataset, tmp_path, 0, False)
    source = FolderSource(before.info, before.train, torch.device("cpu"), workers)
    with pytest.raises(UserError, match="another command has decoded the images again; start this one again"):
        list(source.batches(np.arange(2), before.train.targets, 2))


@pytest.mark.parametrize(
    "damaged, left", [("*.npz", 0.5), ("*.npz", 0), ("*.uint8", 0.5), ("*.uint8", 0), ("*.uint8", None)]
)
def test_a_truncated_or_deleted_file_is_made_again(damaged, left, dataset, tmp_path):
    """``left``: the fraction of the file that is left, None if it is deleted."""
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
        with pytest.raises(UserError, match="cache_images: the decoded images take 0.0 GB"):
            decoded(dataset, tmp_path, 0, False)
    with open(path := dataset.train.images[3], "r+b") as file:
        file.truncate(os.stat(path).st_size // 2)
    with pytest.raises(UserError, match="3.png: not a readable image"):
        decoded(dataset, tmp_path, 0, False)
    # cut within the pixels, or within the header, which is found before any image is decoded
    for place, share, named in ((4, 0.5, 3), (6, 0.01, 6), (7, 0.01, 6)):
        path = dataset.train.images[place]
        os.truncate(path, int(share * os.stat(path).st_size))
        with pytest.raises(UserError) as error:
            decoded(dataset, tmp_path, 0, False)
        assert str(error.value).startswith(f"{dataset.train.images[named]}: not a readable image")
        assert str(error.value).endswith("; 1 other image(s) cannot be read either") == (place != 6)
    assert not [path for path in tmp_path.rglob("*decoded-*") if path.is_file()]


def test_a_disk_that_fills_up_while_images_are_decoded_is_one_line_and_nothing_is_left(dataset, tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch.object(image_map, "_decode_into", side_effect=full), pytest.raises(Unwritable, match="No space left"):
        decoded(dataset, tmp_path, 0, False)
    assert not [path for path in tmp_path.rglob("*decoded-*") if path.is_file()]


@pytest.mark.parametrize("kind", ["uint8", "npz"])
def test_a_folder_in_the_place_of_a_cached_file_is_one_line(kind, dataset, tmp_path):
    decoded(dataset, tmp_path, 0, False)
    (file,) = tmp_path.rglob(f"decoded-*.{kind}")
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match=f"cache_images: {file} is a folder"):
        decoded(dataset, tmp_path, 0, False)


@pytest.fixture
def read(monkeypatch):
    """The names of the image files that are decoded."""
    names = []
    monkeypatch.setattr(image_map, "decode", lambda path: (names.append(path), decode(path))[1])
    return names


def test_images_that_have_not_changed_are_copied_from_an_earlier_file(dataset, tmp_path, read):
    """Of a data set that has grown since, and of one of whose images one has changed; as if all were decoded."""
    first = np.array([*range(3), *range(5, 8)])
    train, test = (Split(split.images[first], split.targets[first]) for split in (dataset.train, dataset.test))
    decoded(replace(dataset, train=train, test=test), tmp_path, 0, False)
    assert sorted(read) == sorted([*train.images, *test.images])
    decoded(dataset, tmp_path, 0, False)
    assert sorted(read) == sorted([*dataset.train.images, *dataset.test.images]), "each is decoded once"
    decoded(dataset, tmp_path, 0, False)
    assert len(read) == len(dataset.train) + len(dataset.test)
    Image.new("RGB", (37, 60), "red").save(changed := dataset.test.images[2])
    read.clear()
    grown = decoded(dataset, tmp_path, 0, False)
    assert read == [changed]
    for path, image in zip([*dataset.train.images, *dataset.test.images], [*images(grown.train), *images(grown.test)]):
        assert np.array_equal(image, np.asarray(v2.Resize(37)(Image.open(path)))), path


def test_what_was_decoded_outlives_an_error_of_one_image(dataset, tmp_path, read):
    decoded(dataset, tmp_path, 0, False)
    Image.new("RGB", (37, 60), "red").save(changed := dataset.test.images[2])
    content = Path(changed).read_bytes()
    os.truncate(changed, len(content) // 2)
    with pytest.raises(UserError, match="not a readable image"):
        decoded(dataset, tmp_path, 0, False)
    Path(changed).write_bytes(content)
    read.clear()
    decoded(dataset, tmp_path, 0, False)
    assert read == [changed]


def images(split):
    return [split.decoded.image(number) for number in range(len(split))]


@pytest.mark.parametrize("seconds, same_size", [(-3600, True), (3600, True), (0, False)])
def test_an_image_that_is_replaced_is_decoded_again(seconds, same_size, dataset, tmp_path):
    """By one that is older or newer, as with ``mv`` or ``rsync -a``; or of the same time, as from some archives."""
    decoded(dataset, tmp_path, 0, False)
    replaced = dataset.train.images[0]
    before = os.stat(replaced)
    time = before.st_mtime_ns + seconds * 10**9
    Image.new("RGB", (80, 60), "red").save(replaced)
    if same_size:
        os.truncate(replaced, before.st_size)  # zeros after the image
    assert (os.stat(replaced).st_size == before.st_size) == same_size
    os.utime(replaced, ns=(time, time))
    assert (decoded(dataset, tmp_path, 0, False).train.decoded.image(0) == [255, 0, 0]).all()


def test_each_interpolation_has_its_own_file(dataset, tmp_path):
    """One of timm's models may want another than the rest."""
    for mode in ("bicubic", "bilinear", "bicubic"):
        whole = decoded(replace(dataset, info=replace(dataset.info, interpolation=mode)), tmp_path, 0, False)
        resize = v2.Resize(37, v2.InterpolationMode(mode))
        for path, image in zip(whole.train.images, images(whole.train)):
            assert np.array_equal(image, np.asarray(resize(Image.open(path))))
    bilinear, bicubic = sorted((tmp_path / "resized").iterdir())
    assert bilinear.name.endswith("-37") and bicubic.name == f"{bilinear.name}-bicubic"


def test_names_that_are_relative_or_not_normalised_are_the_same_images(folder, tmp_path, monkeypatch, read):
    monkeypatch.chdir(tmp_path)
    info = sized(load_dataset(f"folder:{folder}", "."), 32).info
    names = [f"{folder}/train/a/0.png", f"{folder}/train/b/1.png"]
    for given in (names, [f"{folder}/./train/a/0.png", f"{folder}//train/b/1.png"], [*map(os.path.relpath, names)]):
        found = decoded(replace(read_source((given, ["a", "b"])), info=info), tmp_path, 0, False).train
        for path, image in zip(names, images(found), strict=True):
            assert np.array_equal(image, np.asarray(v2.Resize(37)(Image.open(path))))
    assert read == names, "each is decoded once"


def test_arrays_in_memory_stay_as_they_are(tmp_path):
    digits = load_dataset("digits", ".")
    assert decoded(digits, tmp_path, 1, False) is digits and not list(tmp_path.iterdir())


UNGUARDED = """
from pycil_wsc.data.images import parallel
from pycil_wsc.errors import UserError

with parallel.process_pool(1, parallel.CHUNK + 1) as pool:
    try:
        print(list(parallel.map_parts(sum, [1] * (parallel.CHUNK + 1), pool, "decoding images")))
    except UserError as error:
        print(error)
"""


READS_FILES = """
import multiprocessing
import torch
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.data.batches.loader import open_source
from pycil_wsc.errors import UserError

multiprocessing.set_start_method("spawn", force=True)
dataset = load_dataset("folder:FOLDER", ".")
source = open_source(dataset.info, dataset.train, torch.device("cpu"), 1)
try:
    print(len(list(source.batches(range(4), dataset.train.targets, 2))))
except UserError as error:
    print(error)
"""


def output_of(folder, script):
    """What a script prints, with the package on its path."""
    (folder / "script.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, folder / "script.py"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment).stdout


def test_a_script_without_a_guard_is_told_to_have_one(tmp_path):
    """Each worker process imports the script, which must not start processes then."""
    output = output_of(tmp_path, UNGUARDED)
    assert output.startswith("decoding images: a worker process ended unexpectedly; ")
    assert "`if __name__ == '__main__':`" in output and output.count("\n") == 1


@pytest.mark.slow
def test_so_is_one_whose_data_workers_import_it(dataset, tmp_path):
    folder = Path(dataset.train.images[0]).parents[2]
    output = output_of(tmp_path, READS_FILES.replace("FOLDER", str(folder)))
    assert output.startswith("reading images: a worker process ended unexpectedly; ") and output.count("\n") == 1


def test_a_script_with_a_guard_has_its_worker_processes(tmp_path):
    guarded = "if __name__ == '__main__':\n" + textwrap.indent(UNGUARDED, "    ")
    assert output_of(tmp_path, guarded) == f"{[parallel.CHUNK, 1]}\n"


def test_a_whole_file_is_used_where_nothing_can_be_written(dataset, tmp_path, monkeypatch):
    """As on a disk that is mounted read-only."""
    before = decoded(dataset, tmp_path, 0, False)

    def unwritable(folder, *_):
        raise Unwritable(f"{folder}: cannot be written")

    monkeypatch.setattr("pycil_wsc.files.locked", unwritable)
    after = decoded(dataset, tmp_path, 0, False)
    assert after.train.decoded.path == before.train.decoded.path
    assert np.array_equal(after.train.decoded.image(3), before.train.decoded.image(3))


def test_an_image_that_vanished_is_named(dataset, tmp_path):
    os.unlink(dataset.train.images[3])
    with pytest.raises(UserError, match="3.png: No such file or directory; replace the image, or remove it"):
        decoded(dataset, tmp_path, 0, False)


@pytest.mark.parametrize("where", ["memory", "device"])
def test_a_run_learns_from_decoded_images(where, folder, tmp_path):
    keys = {"dataset": f"folder:{folder}", "image_size": 32, "cache_images": where, "data_root": str(tmp_path)}
    keys |= {"init_cls": 1, "increment": 1, "num_workers": 0, "out": str(tmp_path / "runs"), "epochs": 1}
    config = resolve(SETTINGS | keys | {"init_epoch": 1, "milestones": [], "init_milestones": []})
    kind, data = ClassIncrementalRuns(), Datasets()
    assert not list(tmp_path.rglob("decoded-*")), "a plan decodes nothing"
    result = kind.execute(config, data.of(config), lambda progress: None)
    assert len(result["curve"]) == 2 and list(tmp_path.rglob("decoded-*.npz"))


@pytest.mark.parametrize("first", [True, False])
def test_a_run_does_not_resume_with_images_cropped_by_the_other_program(first, folder, tmp_path, monkeypatch):
    """When another process has taken the device's memory meanwhile, or has given it back."""
    keys = {"dataset": f"folder:{folder}", "image_size": 32, "cache_images": "device", "data_root": str(tmp_path)}
    keys |= {"init_cls": 1, "increment": 1, "num_workers": 0, "out": str(tmp_path / "runs"), "epochs": 1}
    config = resolve(SETTINGS | keys | {"init_epoch": 2, "milestones": [], "init_milestones": []})

    def run():
        return Run(config, for_training(Datasets().of(config), config))

    monkeypatch.setattr(loader, "fits", lambda *_: first)
    with killed_at(1):
        run().execute()
    monkeypatch.setattr(loader, "fits", lambda *_: not first)
    with pytest.raises(UnusableRun, match="^cache_images: the run began elsewhere: its images .* fit into the free"):
        run().execute()
    monkeypatch.setattr(loader, "fits", lambda *_: first)
    assert len(run().execute()["curve"]) == 2


def test_true_is_memory_and_a_data_root_may_be_below_the_home_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    keys = {"dataset": f"folder:{folder}", "image_size": 32, "data_root": "~/data", "num_workers": 0}
    found = []
    for value in (True, "memory"):
        config = resolve(keys | {"cache_images": value})
        found.append(for_training(Datasets().of(config), config).train)
    assert not found[0].on_device and found[0].decoded.path == found[1].decoded.path
    assert found[0].decoded.path.is_relative_to(tmp_path / "home" / "data") and not (tmp_path / "~").exists()


def test_speed_is_measured_on_the_images_that_the_run_reads(folder, tmp_path, monkeypatch):
    seen, opened = [], speed.open_source
    monkeypatch.setattr(speed, "open_source", lambda *a: (seen.append(a[1]), opened(*a))[1])
    keys = {"dataset": f"folder:{folder}", "image_size": 32, "data_root": str(tmp_path), "cache_images": "memory"}
    keys |= {"convnet_type": "tiny", "num_workers": 1, "init_cls": 1, "increment": 1, "epochs": 1, "init_epoch": 1}
    keys |= {"model_name": "replay", "memory_per_class": 2, "device": "cpu", "out": str(tmp_path / "runs")}
    assert main(["--config", write(tmp_path, keys), "--dry-run", "--measure"]) == 0
    (config,) = load(write(tmp_path, keys))
    (split,) = seen
    assert split.decoded.path == for_training(Datasets().of(config), config).train.decoded.path
