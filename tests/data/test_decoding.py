"""Image files become pixels as a viewer shows them: transparency, orientation, suffixes and very large images."""

import hashlib
import io
import logging
import os
import shutil
import sys
import types
import warnings
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageOps, features
from support.small_learners import FILES, learned
from support.small_runs import SETTINGS, killed_at
from torchvision.transforms import v2

from pycil_wsc import Accept
from pycil_wsc.classifier.predict.images import Transform, as_picture, opened
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images import fingerprint as fingerprints
from pycil_wsc.data.images import image_files
from pycil_wsc.data.images import map as image_map
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.data.images.fingerprint import changed, decoded_otherwise
from pycil_wsc.data.images.image_files import decode, in_colour, line_of, suffixes
from pycil_wsc.data.images.map import decoded
from pycil_wsc.data.images.sources import read_source
from pycil_wsc.errors import UserError
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.runs.run import Run

ORIENTATION = 274
RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (6, 10, 3), np.uint8)
ALPHA = RNG.choice(np.array([0, 0, 100, 255], np.uint8), (6, 10, 1))


def seen_from(path):
    """The pixels of an image file by each way in which one becomes pixels."""
    with Image.open(path) as image:
        yield np.asarray(in_colour(image))
    yield np.asarray(as_picture(path))
    yield np.asarray(as_picture(opened(path.read_bytes())))
    yield np.asarray(decode(str(path)))


def photos(folder, names, image=None, options=None):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = image or Image.fromarray(RNG.integers(0, 256, (12, 16, 3), np.uint8))
        picture.save(path, Image.registered_extensions()[path.suffix], **(options or {}))


# ---- pixels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK"])
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".gif", ".bmp", ".tif", ".ppm"])
def test_images_without_alpha_and_orientation_are_what_pillow_converts_them_to(mode, suffix, tmp_path):
    path = tmp_path / f"image{suffix}"
    try:
        Image.fromarray(COLOURS).convert(mode).save(path)
    except (OSError, ValueError):
        pytest.skip("there is no such file")
    with Image.open(path) as image:
        expected = np.asarray(image.convert("RGB"))
    assert all(np.array_equal(pixels, expected) for pixels in seen_from(path))


@pytest.mark.parametrize("exif", ["upright", "camera", "damaged", "out of range"])
def test_neither_are_those_whose_exif_data_turn_nothing(exif, tmp_path):
    data = Image.Exif()
    data[271] = "a camera"
    data[ORIENTATION] = 9 if exif == "out of range" else 1
    if exif == "camera":
        del data[ORIENTATION]
    content = b"Exif\0\0MM\0*\xff\xff\xff\xff" if exif == "damaged" else data.tobytes()
    photos(tmp_path, ["image.jpg"], Image.fromarray(COLOURS), {"exif": content})
    with Image.open(tmp_path / "image.jpg") as image:
        expected = np.asarray(image.convert("RGB"))
    assert all(np.array_equal(pixels, expected) for pixels in seen_from(tmp_path / "image.jpg"))


@pytest.mark.parametrize("suffix", [".png", ".webp", ".tif"])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_a_transparent_image_is_put_on_white(mode, suffix, tmp_path):
    if (mode, suffix) == ("LA", ".webp"):
        pytest.skip("WebP has colours")
    colours = COLOURS if mode == "RGBA" else COLOURS[..., :1]
    path = tmp_path / f"image{suffix}"
    Image.fromarray(np.concatenate([colours, ALPHA], -1), mode).save(path, lossless=True, exact=True)
    share = ALPHA / 255.0
    expected = np.broadcast_to(share * colours + (1 - share) * 255, (6, 10, 3))
    for pixels in seen_from(path):
        assert np.abs(pixels - expected).max() <= 1  # rounded
        assert (pixels[ALPHA[..., 0] == 0] == 255).all()
        assert (pixels == colours)[ALPHA[..., 0] == 255].all()


@pytest.mark.parametrize("kind", ["palette", "palette of alphas", "gif", "one colour", "one grey"])
def test_so_is_one_whose_transparency_is_not_a_channel(kind, tmp_path):
    path = tmp_path / ("image.gif" if kind == "gif" else "image.png")
    pixels = np.array([[0, 1], [1, 0]], np.uint8)
    if kind in ("one colour", "one grey"):
        values = np.array([10, 200], np.uint8)[pixels]
        image = Image.fromarray(np.stack([values] * 3, -1) if kind == "one colour" else values)
        transparent = (10, 10, 10) if kind == "one colour" else 10
    else:
        image = Image.fromarray(pixels, "P")
        image.putpalette([10, 10, 10, 200, 200, 200])
        transparent = bytes([0, 255]) if kind == "palette of alphas" else 0
    image.save(path, transparency=transparent)
    expected = np.array([255, 200])[pixels]
    assert all(np.array_equal(pixels, np.stack([expected] * 3, -1)) for pixels in seen_from(path))


def test_pictures_that_look_the_same_have_the_same_pixels():
    hidden = np.concatenate([COLOURS, ALPHA], -1)
    other = hidden.copy()
    other[ALPHA[..., 0] == 0, :3] = RNG.integers(0, 256, 3)
    first, second = (np.asarray(in_colour(Image.fromarray(pixels, "RGBA"))) for pixels in (hidden, other))
    assert not np.array_equal(hidden, other) and np.array_equal(first, second)


def turned_photo(path, orientation, image=None):
    data = Image.Exif()
    data[ORIENTATION] = orientation
    (image or Image.fromarray(COLOURS)).save(path, exif=data)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif", ".avif"])
def test_a_photograph_is_turned_as_its_exif_data_say(orientation, suffix, tmp_path):
    if suffix == ".avif" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    path = tmp_path / f"image{suffix}"
    turned_photo(path, orientation)
    with Image.open(path) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    assert expected.shape == ((10, 6, 3) if orientation > 4 else (6, 10, 3))
    assert all(np.array_equal(pixels, expected) for pixels in seen_from(path))


def test_an_image_is_not_turned_twice(tmp_path):
    turned_photo(tmp_path / "image.jpg", 6)
    once = decode(str(tmp_path / "image.jpg"))
    assert np.array_equal(np.asarray(in_colour(once)), np.asarray(once))
    with Image.open(tmp_path / "image.jpg") as image:  # converted by its owner, which keeps the EXIF data
        assert np.array_equal(np.asarray(in_colour(image.convert("RGB"))), np.asarray(once))


def test_training_prediction_and_the_cache_see_the_same_image(tmp_path):
    """Four orientations and a transparent image, by files, by the transform, and decoded before."""
    for part in ("train", "val"):
        for number, orientation in enumerate([1, 3, 6, 8]):
            path = tmp_path / "own" / part / "a" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            turned_photo(path, orientation, Image.fromarray(RNG.integers(0, 256, (40, 60, 3), np.uint8)))
        masked = np.concatenate([np.tile(COLOURS, (5, 5, 1)), np.tile(ALPHA, (5, 5, 1))], -1)
        Image.fromarray(masked, "RGBA").save(tmp_path / "own" / part / "a" / "4.png")
    dataset = load_dataset(f"folder:{tmp_path / 'own'}", ".")
    dataset = replace(dataset, info=replace(dataset.info, image_size=32))
    cached = decoded(dataset, tmp_path, 0, False).test
    transform = Transform(dataset.info)
    crop = v2.CenterCrop(32)
    shapes = set()
    for number, path in enumerate(cached.images):
        image = cached.decoded.image(number)
        shapes.add(image.shape)
        assert np.array_equal(image, np.asarray(v2.Resize(37)(decode(path))))
        assert np.array_equal(transform.fitted(path), np.asarray(crop(Image.fromarray(image))))
    assert shapes == {(37, 55, 3), (55, 37, 3), (37, 61, 3)}


# ---- what was computed before ----------------------------------------------------------------------------------------


def test_what_was_decoded_in_another_way_is_decoded_again(tmp_path, monkeypatch):
    photos(tmp_path / "own", ["train/a/0.png", "val/a/0.png"])
    dataset = load_dataset(f"folder:{tmp_path / 'own'}", ".")
    read = []
    monkeypatch.setattr(image_map, "decode", lambda path: (read.append(path), decode(path))[1])
    monkeypatch.setattr(image_map, "DECODING", 1)
    for expected in (2, 2):
        decoded(dataset, tmp_path, 0, False)
        assert len(read) == expected
    monkeypatch.setattr(image_map, "DECODING", 2)
    decoded(dataset, tmp_path, 0, False)
    assert len(read) == 4


def test_the_key_of_a_cached_image_is_not_that_of_earlier_versions(tmp_path):
    """They made it of the side, the interpolation, and the path, size and time of the file."""
    photos(tmp_path, ["0.png"])
    path = str(tmp_path / "0.png")
    status = os.stat(path)
    earlier = hashlib.sha256(b"37 bilinear%s\0%d %d" % (path.encode(), status.st_size, status.st_mtime_ns)).hexdigest()
    (key,) = image_map._keys(np.array([path]), 37, "bilinear")
    assert key != earlier[:32].encode()


def test_records_that_do_not_say_how_files_were_decoded_are_of_the_same_data(tmp_path):
    photos(tmp_path, [f"{part}/a/0.png" for part in ("train", "val")])
    now = load_dataset(f"folder:{tmp_path}", ".").fingerprint
    earlier = {name: value for name, value in now.items() if name != "decoding"}
    other = earlier | {"sha256": "0" * 16}
    stream, older, others = ({"tasks": [now, now]}, {"tasks": [earlier]}, {"tasks": [other]})
    stream, older, others = now | stream, earlier | older, other | others
    for before, differing, after in ((earlier, other, now), (older, others, stream)):
        assert not changed(before, after) and decoded_otherwise(before, after)
        assert changed(differing, after)
    for same in (now, stream):
        assert not decoded_otherwise(same, same)
    arrays = read_source((np.zeros((2, 8, 8, 3), np.uint8), ["a", "b"])).fingerprint
    assert "decoding" not in arrays and not decoded_otherwise(arrays, arrays)


def test_a_run_that_an_earlier_version_began_goes_on_and_says_what_is_read_otherwise(tmp_path, monkeypatch, caplog):
    photos(tmp_path / "own", [f"{part}/{name}/{n}.png" for part in ("train", "val") for name in "ab" for n in range(3)])
    keys = {"dataset": f"folder:{tmp_path / 'own'}", "image_size": 16, "init_cls": 1, "increment": 1, "num_workers": 0}
    keys |= {"init_epoch": 2, "epochs": 1, "milestones": [], "init_milestones": [], "out": str(tmp_path / "runs")}
    config = resolve(SETTINGS | keys)
    with monkeypatch.context() as earlier, killed_at(1):
        earlier.setattr(fingerprints, "DECODING", 1)
        Run(config, Datasets().of(config)).execute()
    with caplog.at_level(logging.WARNING, "pycil_wsc"):
        assert len(Run(config, Datasets().of(config)).execute()["curve"]) == 2
    assert "checkpoint.pt: was begun by a version that read transparent images" in caplog.text


# ---- which files -----------------------------------------------------------------------------------------------------


def test_files_are_images_by_what_can_be_decoded_here(tmp_path):
    wanted = {
        ".jpg",
        ".jpeg",
        ".jfif",
        ".jpe",
        ".mpo",
        ".png",
        ".webp",
        ".gif",
        ".bmp",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
    }
    assert wanted <= suffixes() and suffixes().isdisjoint({".eps", ".pdf", ".svg", ".txt", ".tga", ".pfm", ""})
    assert (".avif" in suffixes()) == features.check("avif")
    for suffix in sorted(suffixes() & Image.registered_extensions().keys()):
        kind = Image.registered_extensions()[suffix]
        if kind in Image.SAVE:
            Image.fromarray(COLOURS).save(tmp_path / f"image{suffix}", kind)
            assert decode(str(tmp_path / f"image{suffix}")).size == (10, 6), suffix


@pytest.fixture
def mixed(tmp_path):
    """A class of JPEG files under two suffixes, one of GIFs, one of files that nothing here reads, and odd files."""
    photos(tmp_path / "own", [*(f"a/{n}.jpg" for n in range(2)), *(f"a/{n}.jfif" for n in range(10))])
    photos(tmp_path / "own", [f"b/{n}.gif" for n in range(3)])
    (tmp_path / "own" / "c").mkdir()
    for name in ("a/notes.txt", "a/LICENCE", "c/0.jp2", "c/1.JP2", "c/Thumbs.db", "c/.hidden", "b/._0.gif"):
        (tmp_path / "own" / name).write_bytes(b"\0")
    return tmp_path / "own"


NUMBERS = "2 .jp2, 1 without a suffix, 1 .txt"
LEFT_OUT = f"4 files are left out that are not read as images: {NUMBERS}"


def test_every_file_is_either_taken_or_counted(mixed):
    task = read_source(f"folder:{mixed}")
    names = [task.info.classes[label] for label in task.train.targets]
    assert Counter(names) == {"a": 12, "b": 3}
    assert task.left_out == {".jp2": 2, ".txt": 1, "": 1} and line_of(task.left_out) == LEFT_OUT


def test_learn_says_what_was_left_out(mixed, tmp_path, capsys):
    learned(f"folder:{mixed}", **FILES | {"quiet": False})
    said = capsys.readouterr().out
    assert said.count(LEFT_OUT) == 1 and "not learned, as there is no image: 'c'\n" in said
    photos(tmp_path / "fine", ["a/0.png", "a/1.png", "b/0.png", "b/1.png"])
    learned(f"folder:{tmp_path / 'fine'}", **FILES | {"quiet": False})
    said = capsys.readouterr().out
    assert "left out" not in said and "not learned" not in said


def test_check_says_so_and_pictures_that_cannot_be_read_are_a_finding(mixed, tmp_path):
    learner = learned(f"folder:{mixed}", **FILES)
    report = learner.check(f"folder:{mixed}")
    assert report.left_out == {".jp2": 2, ".txt": 1, "": 1} and f"left out: {NUMBERS}" in str(report).splitlines()
    assert not report.fine
    photos(tmp_path / "fine", [f"a/{number}.png" for number in range(5)])
    (tmp_path / "fine" / "a" / "notes.txt").touch()
    report = learner.check(f"folder:{tmp_path / 'fine'}")
    assert report.fine and "left out: 1 .txt" in str(report).splitlines()
    (tmp_path / "fine" / "a" / "5.heic").touch()
    assert learner.check(f"folder:{tmp_path / 'fine'}").fine == (".heic" in suffixes())


def test_an_experiment_says_so_once_and_a_stream_counts_all_of_its_tasks(mixed, tmp_path, capsys):
    photos(
        tmp_path / "data", [f"{part}/{name}/{n}.png" for part in ("train", "val") for name in "ab" for n in range(2)]
    )
    (tmp_path / "data" / "train" / "a" / "0.heif2").touch()
    keys = {"dataset": f"folder:{tmp_path / 'data'}", "image_size": 16, "init_cls": 1, "increment": 1, "num_workers": 0}
    keys |= {"init_epoch": 1, "epochs": 1, "milestones": [], "init_milestones": [], "out": str(tmp_path / "runs")}
    config = resolve(SETTINGS | keys)
    Run(config, Datasets().of(config)).execute()
    log = next((tmp_path / "runs").rglob("log.txt")).read_text()
    assert log.count("1 file is left out that is not read as an image: 1 .heif2") == 1


def test_predict_evaluate_and_the_gate_say_so_too(mixed, tmp_path, caplog, capsys):
    learner = learned(f"folder:{mixed}", **FILES)
    for ask in (learner.predict, learner.evaluate):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "pycil_wsc"):
            ask(f"folder:{mixed}")
        assert f"{mixed}: {LEFT_OUT}" in caplog.text
    learner.quiet = False
    photos(tmp_path / "fine", ["d/0.png", "d/1.png"])
    learner.learn(f"folder:{tmp_path / 'fine'}", accept=Accept(on=f"folder:{mixed}"))
    assert f"accept: {LEFT_OUT}" in capsys.readouterr().out


def test_a_class_without_images_is_told_which_files_it_has(mixed):
    shutil.rmtree(mixed / "a")
    shutil.rmtree(mixed / "b")
    with pytest.raises(
        UserError, match=r"own: no image files \(.*\.jpg.*\), only 2 \.jp2 in its class folders; add some"
    ):
        read_source(f"folder:{mixed}")
    (mixed / "c" / "0.jp2").rename(mixed / "c" / "0.heic")
    if ".heic" not in suffixes():
        with pytest.raises(UserError, match=r"only 1 \.heic, 1 \.jp2 \(\.heic: pip install pillow-heif\) in its class"):
            read_source(f"folder:{mixed}")


def test_of_a_class_without_images_in_one_part_its_own_files_are_counted(tmp_path):
    names = ["train/a/0.png", "val/a/0.png", "train/b/0.png", "val/b/0.png"]
    photos(tmp_path / "own", names)
    for name in ("train/a/1.txt", "train/b/2.txt", "val/a/3.pdf", "val/b/4.jp2"):
        (tmp_path / "own" / name).write_text("")
    (tmp_path / "own" / "val" / "b" / "0.png").unlink()
    with pytest.raises(UserError, match=r"val: class 'b' has no image files \(.*\), only 1 \.jp2; add some"):
        load_dataset(f"folder:{tmp_path / 'own'}", ".")


def test_a_plugin_adds_its_suffixes(tmp_path, monkeypatch):
    """As pillow-heif does, when it is asked to."""
    from PIL import PngImagePlugin

    def register():
        Image.register_open("HEIF", PngImagePlugin.PngImageFile, lambda prefix: prefix.startswith(b"\x89PNG"))
        Image.register_extension("HEIF", ".heic")

    plugin = types.ModuleType("pillow_heif")
    plugin.register_heif_opener = register
    for name in ("OPEN", "EXTENSION"):
        monkeypatch.setattr(Image, name, dict(getattr(Image, name)))
    monkeypatch.setattr(Image, "ID", list(Image.ID))
    monkeypatch.setitem(sys.modules, "pillow_heif", plugin)
    monkeypatch.setattr(image_files, "DECODED", ("HEIF",))
    for cached in (image_files._decoders, suffixes):
        cached.cache_clear()
    try:
        photos(tmp_path, ["a/0.png"], Image.fromarray(COLOURS))
        (tmp_path / "a" / "0.png").rename(tmp_path / "a" / "0.heic")
        assert ".heic" in suffixes()
        (path,) = read_source(f"folder:{tmp_path}").train.images
        assert np.array_equal(np.asarray(decode(path)), COLOURS)
    finally:
        for cached in (image_files._decoders, suffixes):
            cached.cache_clear()


# ---- very large images -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_limit(monkeypatch):
    """As if an image of more than 200 pixels were one of more than 179 megapixels."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_of_too_many_pixels_is_decoded_at_reduced_size(mode, tmp_path, small_limit):
    x, y = np.meshgrid(np.arange(41), np.arange(30))
    smooth = np.stack([6 * x, 8 * y, 3 * x + 4 * y], -1).astype(np.uint8)
    path = tmp_path / "large.jpg"
    Image.fromarray(smooth).convert(mode).save(path, quality=95)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = decode(str(path))
    assert image.size == (11, 8), "the first of a half, a quarter and an eighth with at most 100 pixels"
    expected = Image.fromarray(smooth).convert(mode).convert("RGB").reduce(4)
    assert np.abs(np.asarray(image).astype(int) - np.asarray(expected))[:7, :10].max() <= 8


def test_it_is_learned_cached_and_turned_as_any_other(tmp_path, small_limit):
    for part in ("train", "val"):
        (tmp_path / "own" / part / "a").mkdir(parents=True)
        turned_photo(tmp_path / "own" / part / "a" / "0.jpg", 6, Image.new("RGB", (40, 32), "red"))
    dataset = load_dataset(f"folder:{tmp_path / 'own'}", ".")
    dataset = replace(dataset, info=replace(dataset.info, image_size=16))
    image = decoded(dataset, tmp_path, 0, False).train.decoded.image(0)
    assert image.shape == (22, 18, 3) and (image[..., 0] > 250).all()


@pytest.mark.parametrize("why", ["PNG", "too large for that"])
def test_other_images_of_too_many_pixels_are_told_the_way_out(why, tmp_path, small_limit, monkeypatch):
    monkeypatch.setattr(image_files, "LARGEST", 1000 if why == "PNG" else 300)
    path = tmp_path / ("large.png" if why == "PNG" else "large.jpg")
    Image.new("RGB", (20, 20)).save(path)
    with pytest.raises(UserError) as caught:
        decode(str(path))
    told = "too large (Image size (400 pixels) exceeds limit of 200 pixels); make it smaller, or save it as JPEG: one "
    told += "of up to 500 megapixels is read at reduced size"
    if why != "PNG":
        told = "has more than 0.0003 megapixels; make it smaller"
    assert str(caught.value) == f"{path}: {told}"


def test_of_what_others_send_none_is_decoded_at_reduced_size(small_limit):
    content = io.BytesIO()
    Image.new("RGB", (20, 20)).save(content, "JPEG")
    with pytest.raises(UserError, match="that are not an image file's"):
        opened(content.getvalue())
