"""Small copies of image files: made once, with the right size and content, without replacing the originals."""

import io
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_runs import write

from main import main
from pycil_wsc.config.forms import run_folder
from pycil_wsc.config.loading import load, resolve
from pycil_wsc.data import parallel
from pycil_wsc.data.configured import for_training
from pycil_wsc.data.datasets import load_dataset
from pycil_wsc.data.resized import resized
from pycil_wsc.data.sources import read_source
from pycil_wsc.errors import UserError
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.learners import speed

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


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 32])
def test_copies_have_the_short_side_and_the_picture_and_small_images_stay(
    chunk, dataset, folder, tmp_path, monkeypatch, forked
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
    paths = [path for path in resized(dataset, tmp_path, 1).train.images if "resized" in path]
    changed = [path for path, stamp in zip(paths, stamps) if os.stat(path).st_mtime_ns != stamp]
    assert len(changed) == 1 and Image.open(changed[0]).getpixel((30, 30))[1] < 10


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_an_image_that_is_replaced_by_an_older_one_has_a_new_copy(seconds, dataset, folder, tmp_path):
    """As by ``mv``, ``cp -p``, ``rsync -a`` or ``tar x``, which keep the time of the file."""
    resized(dataset, tmp_path, 1)
    replaced = folder / "train" / "a" / "wide.jpg"
    time = os.stat(replaced).st_mtime_ns + seconds * 10**9
    Image.new("RGB", (200, 100), "red").save(replaced)
    os.utime(replaced, ns=(time, time))
    for _ in range(2):
        (copy,) = [path for path in resized(dataset, tmp_path, 1).train.images if "a/wide.jpg." in path]
        assert Image.open(copy).getpixel((30, 30))[1] < 10 and os.stat(copy).st_mtime_ns == time


@pytest.mark.parametrize("precision", [100, 10**9])
def test_copies_are_found_again_on_a_file_system_with_coarser_times(precision, dataset, tmp_path, monkeypatch):
    utime = os.utime
    monkeypatch.setattr(os, "utime", lambda path, ns: utime(path, ns=(ns[0], ns[1] // precision * precision)))
    first = resized(dataset, tmp_path, 1).train.images
    made = [os.stat(path).st_ino for path in first]
    assert [os.stat(path).st_ino for path in resized(dataset, tmp_path, 1).train.images] == made
    assert [path for path in first if "resized" in path]


def test_copies_are_made_by_the_interpolation_of_the_test_transform(dataset, tmp_path):
    """One of timm's models may want another than the rest; each has copies of its own."""
    folders = {}
    for name in ("bicubic", "bilinear", "bicubic"):
        copies = resized(replace(dataset, info=replace(dataset.info, interpolation=name)), tmp_path, 1).train.images
        for path, copy in zip(dataset.train.images, copies, strict=True):
            if copy != path:
                buffer = io.BytesIO()
                small = Image.open(path).resize(Image.open(copy).size, Image.Resampling[name.upper()])
                small.save(buffer, "JPEG", quality=95)
                assert np.array_equal(np.asarray(Image.open(copy)), np.asarray(Image.open(buffer)))
                folders.setdefault(name, set()).add(Path(copy).relative_to(tmp_path / "resized").parts[0])
    (bicubic,), (bilinear,) = folders["bicubic"], folders["bilinear"]
    assert bilinear.endswith("-73") and bicubic == f"{bilinear}-bicubic"


def test_an_image_that_vanished_is_named(dataset, folder, tmp_path):
    resized(dataset, tmp_path, 1)
    (folder / "train" / "b" / "small.jpg").unlink()
    with pytest.raises(UserError, match="b/small.jpg: No such file or directory; replace the image, or remove it"):
        resized(dataset, tmp_path, 1)


UNGUARDED = """
from pycil_wsc.data import parallel
from pycil_wsc.errors import UserError

with parallel.process_pool(1, parallel.CHUNK + 1) as pool:
    try:
        print(list(parallel.map_parts(sum, [1] * (parallel.CHUNK + 1), pool, "resizing images")))
    except UserError as error:
        print(error)
"""


def output_of(folder, script):
    """What a script prints, with the package on its path."""
    (folder / "script.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, folder / "script.py"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment).stdout


def test_a_script_without_a_guard_is_told_to_have_one(tmp_path):
    """Each worker process imports the script, which must not start processes then."""
    output = output_of(tmp_path, UNGUARDED)
    assert output.startswith("resizing images: a worker process ended unexpectedly; ")
    assert "`if __name__ == '__main__':`" in output and output.count("\n") == 1


def test_a_script_with_a_guard_has_its_worker_processes(tmp_path):
    guarded = "if __name__ == '__main__':\n" + textwrap.indent(UNGUARDED, "    ")
    assert output_of(tmp_path, guarded) == f"{[parallel.CHUNK, 1]}\n"


def test_an_empty_file_that_a_power_failure_left_is_made_again(dataset, tmp_path):
    whole = resized(dataset, tmp_path, 1).train.images
    copies = [copy for copy in (tmp_path / "resized").rglob("train/**/*.jpg.*.jpg") if copy.stat().st_size > 1]
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


def test_relative_and_absolute_names_have_the_same_copies(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    info = load_dataset(f"folder:{folder}", ".", 64).info
    paths = [f"{folder}/train/a/wide.jpg", f"{folder}/train/b/high.jpg"]
    copies = []
    for first, second in (paths, [paths[0], os.path.relpath(paths[1])], [*map(os.path.relpath, paths)]):
        mixed = replace(read_source(([first, second], ["a", "b"])), info=info)
        copies.append([os.path.realpath(copy) for copy in resized(mixed, tmp_path, 1).train.images])
    assert copies[0] == copies[1] == copies[2] and not set(copies[0]) & set(paths)


def test_a_broken_file_is_named_and_the_rest_kept(dataset, folder, tmp_path):
    (folder / "train" / "b" / "high.jpg").write_bytes(b"no image")
    with pytest.raises(UserError, match="b/high.jpg: not a readable image"):
        resized(dataset, tmp_path, 1)
    assert list((tmp_path / "resized").rglob("wide.jpg.*.jpg"))


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
    assert run_folder(config) != run_folder(resolve(config.to_dict() | {"cache_images": False})), (
        "other pixels are another run"
    )


def test_speed_is_measured_on_the_copies_that_the_run_reads(folder, tmp_path, monkeypatch):
    seen, opened = [], speed.open_source
    monkeypatch.setattr(speed, "open_source", lambda *a: (seen.append(a[1]), opened(*a))[1])
    keys = {"dataset": f"folder:{folder}", "image_size": 64, "data_root": str(tmp_path), "cache_images": True}
    keys |= {"convnet_type": "tiny", "num_workers": 1, "init_cls": 1, "increment": 1, "epochs": 1, "init_epoch": 1}
    keys |= {"model_name": "replay", "memory_per_class": 2, "device": "cpu", "out": str(tmp_path / "runs")}
    assert main(["--config", write(tmp_path, keys), "--dry-run", "--measure"]) == 0
    (config,) = load(write(tmp_path, keys))
    (split,) = seen
    assert any("resized" in path for path in split.images)
    assert split.images.tolist() == for_training(Datasets().of(config), config).train.images.tolist()


@pytest.mark.parametrize("copies", [True, "memory"])
def test_a_data_root_below_the_home_folder_has_the_copies(copies, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    keys = {"dataset": f"folder:{folder}", "image_size": 64, "data_root": "~/data", "num_workers": 0}
    config = resolve(keys | {"cache_images": copies})
    for_training(Datasets().of(config), config)
    assert list((tmp_path / "home" / "data").rglob("*train*")) or list((tmp_path / "home" / "data").rglob("decoded-*"))
    assert not (tmp_path / "~").exists()


def test_arrays_in_memory_stay_as_they_are(tmp_path):
    digits = load_dataset("digits", ".")
    assert resized(digits, tmp_path, 1) is digits and not list(tmp_path.iterdir())


def test_an_image_that_changes_but_not_its_time_is_copied_anew(folder, tmp_path):
    """As from an archive with fixed times. The earlier copy is removed, and one without a size in its name."""
    path = folder / "train" / "a" / "wide.jpg"
    index = 3

    def copy():
        return resized(load_dataset(f"folder:{folder}", ".", 64), tmp_path, 0).train.images[index]

    before, status = copy(), path.stat()
    assert Path(before).name.startswith("wide.jpg")
    old = Path(before).with_name("wide.jpg.jpg")
    old.write_bytes(Path(before).read_bytes())
    Image.new("RGB", (200, 100), (7, 7, 7)).save(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = copy()
    assert np.asarray(Image.open(after)).std() < 2
    assert not Path(before).exists() and not old.exists() and Path(after).exists()
