"""Small copies of image files: made once, with the right size and content, without replacing the originals."""

import os
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from pycil_wsc.config.loading import resolve
from pycil_wsc.data.datasets import load_dataset
from pycil_wsc.data.resized import resized
from pycil_wsc.data.sources import read_source
from pycil_wsc.errors import UserError
from pycil_wsc.runs.attempt import Datasets
from pycil_wsc.runs.kind import for_training

SIZES = {"wide.jpg": (200, 100), "high.jpg": (90, 300), "small.jpg": (64, 80), "exact.png": (73, 73)}


@pytest.fixture
def folder(tmp_path):
    """Two classes of four smooth images."""
    x, y = np.meshgrid(np.linspace(0, 255, 300), np.linspace(0, 255, 300))
    for part in ("train", "val"):
        for label in ("a", "b"):
            (tmp_path / "own" / part / label).mkdir(parents=True)
            for name, (width, height) in SIZES.items():
                pixels = np.stack([x, y, (x + y) / 2], -1)[:height, :width].astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / "own" / part / label / name, quality=95)
    return tmp_path / "own"


@pytest.fixture
def dataset(folder):
    return load_dataset(f"folder:{folder}", ".", 64)  # the short side of the test transform: 64 * 256 / 224 = 73


@pytest.mark.parametrize("chunk", [1, 32])
def test_copies_have_the_short_side_and_the_picture_and_small_images_stay(
    chunk, dataset, folder, tmp_path, monkeypatch
):
    """Copied by worker processes, or by this one."""
    monkeypatch.setattr("pycil_wsc.data.parallel.CHUNK", chunk)
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    small = resized(dataset, tmp_path, 1)
    for split, copies in ((dataset.train, small.train), (dataset.test, small.test)):
        assert np.array_equal(split.targets, copies.targets)
        for path, copy in zip(split.images, copies.images, strict=True):
            if min(SIZES[os.path.basename(path)]) <= 73:
                assert copy == path
                continue
            image, original = Image.open(copy), Image.open(path)
            assert min(image.size) == 73 and max(image.size) == round(73 * max(original.size) / min(original.size))
            expected = np.asarray(original.resize(image.size, Image.Resampling.BOX), float)
            assert abs(np.asarray(image, float) - expected).mean() < 2
    assert before == {path: path.read_bytes() for path in folder.rglob("*.*")}


def test_copies_are_made_once_and_again_when_a_file_is_newer(dataset, folder, tmp_path):
    paths = [path for path in resized(dataset, tmp_path, 1).train.images if "resized" in path]
    stamps = [os.stat(path).st_mtime_ns for path in paths]
    resized(dataset, tmp_path, 1)
    assert stamps == [os.stat(path).st_mtime_ns for path in paths]
    Image.new("RGB", (200, 100), "red").save(folder / "train" / "a" / "wide.jpg")
    resized(dataset, tmp_path, 1)
    changed = [path for path, stamp in zip(paths, stamps) if os.stat(path).st_mtime_ns != stamp]
    assert len(changed) == 1 and Image.open(changed[0]).getpixel((30, 30))[1] < 10


def test_an_empty_file_that_a_power_failure_left_is_made_again(dataset, tmp_path):
    whole = resized(dataset, tmp_path, 1).train.images
    copies = [copy for copy in (tmp_path / "resized").rglob("train/**/*.jpg.jpg") if copy.stat().st_size > 1]
    before = {copy: copy.read_bytes() for copy in copies}
    for copy in copies:
        copy.write_bytes(b"")
    assert np.array_equal(resized(dataset, tmp_path, 1).train.images, whole)
    assert before == {copy: copy.read_bytes() for copy in copies} and len(copies) == 4


def test_names_that_are_not_normalised_have_their_copies(folder, tmp_path):
    paths = [f"{folder}/./train/a/wide.jpg", f"{folder}//train/b/wide.jpg", f"{folder}/val/a/high.jpg"]
    labels = ["a", "b", "a"]
    dataset = replace(read_source((paths, labels)), info=load_dataset(f"folder:{folder}", ".", 64).info)
    copies = resized(dataset, tmp_path, 1).train.images
    assert len({os.path.realpath(copy) for copy in copies}) == 3
    assert all(Image.open(copy).size != Image.open(path).size for copy, path in zip(copies, paths))


def test_a_broken_file_is_named_and_the_rest_kept(dataset, folder, tmp_path):
    (folder / "train" / "b" / "high.jpg").write_bytes(b"no image")
    with pytest.raises(UserError, match="b/high.jpg: not a readable image"):
        resized(dataset, tmp_path, 1)
    assert list((tmp_path / "resized").rglob("wide.jpg.jpg"))


def test_the_configuration_asks_for_copies_and_a_plan_makes_none(folder, tmp_path):
    config = resolve(
        {
            "dataset": f"folder:{folder}",
            "image_size": 64,
            "data_root": str(tmp_path),
            "cache_images": True,
            "num_workers": 1,
        }
    )
    data = Datasets()
    assert "resized" not in str(data.of(config).train.images) and not (tmp_path / "resized").exists()
    assert "resized" in str(for_training(data.of(config), config).train.images)
    assert config.run_folder != resolve(config.to_dict() | {"cache_images": False}).run_folder, (
        "other pixels are another run"
    )


def test_arrays_in_memory_stay_as_they_are(tmp_path):
    digits = load_dataset("digits", ".")
    assert resized(digits, tmp_path, 1) is digits and not list(tmp_path.iterdir())
