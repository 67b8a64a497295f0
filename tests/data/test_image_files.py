"""Folders of image files: which files belong to which class, whatever links and names there are."""

import os
import subprocess
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from pycil_wsc.classifier.predict.images import opened
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.data.images.image_files import decode
from pycil_wsc.data.images.sources import read_source
from pycil_wsc.errors import UserError

NFC, NFD = (unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD"))


def photos(folder, *classes, count=4):
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(folder / name / f"{number}.png")


def samples(folder):
    """(class, path within the folder) of each sample of a task."""
    dataset = read_source(f"folder:{folder}")
    names = [dataset.info.classes[target] for target in dataset.train.targets]
    return [(name, os.path.relpath(path, folder)) for name, path in zip(names, dataset.train.images)]


def test_the_order_is_torchvisions(tmp_path):
    """Nested folders whose names sort otherwise than their paths, other files, and upper case."""
    for name in ("b/10.png", "b/9.PNG", "b/x-1/a.png", "b/x/a.png", "b/x/y/a.png", "b/x.png", "A/1.png", "c d/z.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name, "PNG")
    (tmp_path / "b" / "notes.txt").touch()
    expected = make_dataset(str(tmp_path), {"A": 0, "b": 1, "c d": 2}, IMG_EXTENSIONS)
    found = read_source(f"folder:{tmp_path}").train
    assert list(zip(found.images, found.targets)) == expected and len(expected) == 8


def test_a_file_is_decoded_as_one_of_few_formats_whatever_its_name_is(tmp_path, monkeypatch):
    """Pillow would start Ghostscript for PostScript, and decoders of rare formats fail in any way."""
    monkeypatch.setattr(subprocess, "check_call", lambda *arguments, **options: pytest.fail("started a program"))
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", "gs")
    picture = Image.new("RGB", (8, 8), "red")
    for kind in ("EPS", "PCX", "TGA"):
        picture.save(tmp_path / "a.jpg", kind)
        with pytest.raises(UserError, match="a.jpg: not a readable image"):
            decode(str(tmp_path / "a.jpg"))
        with pytest.raises(UserError, match="not an image file's"):
            opened((tmp_path / "a.jpg").read_bytes())
    for kind in ("PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF"):
        picture.save(tmp_path / "a.jpg", kind)
        assert abs(np.asarray(decode(str(tmp_path / "a.jpg"))) - np.asarray(picture, int)).max() <= 1  # WebP's loss


def test_links_to_folders_above_or_of_other_classes_add_nothing(tmp_path):
    folder = tmp_path / "january"
    photos(folder, "a", "b")
    photos(tmp_path / "february", "a")
    expected = samples(folder)
    assert len(expected) == 8
    for link, target in {"a/loop": "..", "a/self": ".", "b/above": "../..", "b/a": "../a", "b/self": "../b"}.items():
        (folder / link).symlink_to(target)
    assert samples(folder) == expected


def test_each_real_file_of_a_class_is_one_sample(tmp_path):
    photos(tmp_path / "store", "a", "b")
    photos(tmp_path / "task", "b")
    (tmp_path / "task" / "a").symlink_to("../store/a")
    (tmp_path / "task" / "b" / "twice.png").symlink_to("0.png")
    (tmp_path / "task" / "b" / "more").symlink_to("../../store/b")
    (tmp_path / "task" / "b" / "more again").symlink_to("../../store/b")
    found = samples(tmp_path / "task")
    assert [name for name, _ in found] == 4 * ["a"] + 8 * ["b"]
    assert found[4] == ("b", "b/0.png") and ("b", "b/twice.png") not in found


def test_a_class_that_is_a_link_to_another_is_refused(tmp_path):
    photos(tmp_path, "a", "b")
    (tmp_path / "c").symlink_to("a")
    with pytest.raises(UserError, match="'a' and 'c' are the same folder; remove one of the links"):
        read_source(f"folder:{tmp_path}")


def test_names_in_different_unicode_forms_are_one_class(tmp_path):
    photos(tmp_path / "one", NFC, count=2)
    photos(tmp_path / "one", NFD, "d")
    dataset = read_source(f"folder:{tmp_path / 'one'}")
    assert set(dataset.info.classes) == {NFC, "d"} and len(dataset.train) == 2 + 4 + 4
    photos(tmp_path / "two" / "train", NFC)
    photos(tmp_path / "two" / "val", NFD)
    dataset = load_dataset(f"folder:{tmp_path / 'two'}", ".")
    assert dataset.info.classes == (NFC,) and (len(dataset.train), len(dataset.test)) == (4, 4)
    images = np.zeros((2, 8, 8, 3), np.uint8)
    assert read_source((images, [NFC, NFD])).info.classes == (NFC,)
    np.savez(tmp_path / "a.npz", train_x=images, train_y=[0, 1], test_x=images, test_y=[0, 1], classes=[NFC, NFD])
    with pytest.raises(UserError, match="is given twice"):
        load_dataset(f"npz:{tmp_path / 'a.npz'}", ".")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_named_without_opening_it(kind, tmp_path):
    photos(tmp_path, "a")
    odd = tmp_path / "a" / "f.png"
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "device":
        odd.symlink_to("/dev/zero")
    else:
        odd.mkdir()
    for refused in (lambda: read_source(([str(odd)], ["a"])), lambda: decode(str(odd))):
        with pytest.raises(UserError, match=r"a/f.png: is not a file but a folder, a pipe or a device; remove it"):
            refused()
    if kind != "folder":
        with pytest.raises(UserError, match=r"a/f.png: is not a file"):
            read_source(f"folder:{tmp_path}")


@pytest.mark.skipif(not Path("/proc/self/root").exists(), reason="there is no /proc")
def test_a_folder_with_links_to_the_root_is_read_in_no_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError):
        read_source("folder:/proc/self")
    photos(tmp_path, "a")
    (tmp_path / "root").symlink_to("/")
    assert len(samples(tmp_path)) == 4


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    photos(tmp_path, "a", "a/inner")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("inner"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"a/inner: cannot be read \(Permission denied\); make it readable"):
        read_source(f"folder:{tmp_path}")


@pytest.mark.parametrize("parts", [["train"], ["train", "valid"], ["Train", "Val"]])
def test_parts_of_other_names_are_no_classes(parts, tmp_path):
    for part in parts:
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / part / name / "1.png")
    with pytest.raises(UserError, match=f"has a folder {parts[0]} of folders, but not train and val .or test.; name"):
        read_source(f"folder:{tmp_path}")
    assert read_source(f"folder:{tmp_path / parts[0]}").info.classes == ("cat", "dog")


def test_a_class_may_be_called_train(tmp_path):
    for name in ("train", "bus"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "1.png")
    assert read_source(f"folder:{tmp_path}").info.classes == ("bus", "train")


def test_what_macos_adds_to_a_folder_is_no_image(tmp_path):
    photos(tmp_path, "a", "b")
    (tmp_path / "a" / "._0.png").write_bytes(b"\0\5\x16\7")
    assert len(samples(tmp_path)) == 8


def test_folders_that_programs_add_are_no_classes_and_their_images_no_samples(tmp_path):
    photos(tmp_path, "a", "b", ".ipynb_checkpoints", "@eaDir", "a/@eaDir", "b/.thumbnails", "__MACOSX")
    assert len(samples(tmp_path)) == 8
    assert read_source(f"folder:{tmp_path}").info.classes == ("a", "b")


def test_a_link_to_itself_is_passed_over(tmp_path):
    photos(tmp_path, "a", "b")
    (tmp_path / "a" / "self").symlink_to(tmp_path / "a" / "self")
    assert len(samples(tmp_path)) == 8


def test_a_path_with_dots_names_the_same_data(tmp_path):
    for part in ("train", "val"):
        photos(tmp_path / "data" / part, "a", "b")
    (tmp_path / "scripts").mkdir()
    plain, dotted = (load_dataset(f"folder:{tmp_path / path}", ".") for path in ("data", "scripts/../data"))
    assert plain.fingerprint == dotted.fingerprint is not None


def test_of_a_very_long_image_the_middle_is_decoded(tmp_path):
    pixels = np.zeros((2, 1000, 3), np.uint8)
    pixels[:, 450:550] = 7
    Image.fromarray(pixels).save(tmp_path / "long.png")
    Image.fromarray(pixels[:, :100]).save(tmp_path / "short.png")
    assert np.array_equal(decode(str(tmp_path / "long.png")), pixels[:, 450:550])
    assert decode(str(tmp_path / "short.png")).size == (100, 2)
