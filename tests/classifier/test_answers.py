"""What a learner answers: names, probabilities, "none of these", and images in any form."""

import io
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from support.months import photos
from support.small_learners import FILES, QUICK, arrays, learned, months

from pycil_wsc.classifier.predict.answers import Answers
from pycil_wsc.data.images.sources import read_source
from pycil_wsc.errors import UserError

__all__ = ["months"]
pytestmark = pytest.mark.usefixtures("uncounted", "undrawn")


@pytest.fixture(scope="module")
def of_arrays(months):
    """A learner of three months of arrays, and the test images of all of them."""
    return learned(*months, **QUICK), np.concatenate([arrays(source, "test")[0] for source in months])


@pytest.fixture(scope="module")
def of_files(tmp_path_factory):
    """A learner of image files, and files of other sizes in two folders, sorted by name."""
    folder = tmp_path_factory.mktemp("files")
    learner = learned(photos(folder / "january", ["cat", "ant"], 1), **FILES)
    rng = np.random.default_rng(0)
    for number in range(11):
        pixels = rng.integers(0, 256, (20 + number, 30 - number, 3), dtype=np.uint8)
        path = folder / "new" / "ab"[number % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return learner, sorted((folder / "new").rglob("*.png"))


def softmax(logits):
    """By its definition, in float64."""
    powers = np.exp(logits.numpy().astype(np.float64))
    return powers / powers.sum(1, keepdims=True)


def test_probabilities_are_the_softmax_of_the_logits_with_a_column_for_each_class(of_arrays):
    learner, images = of_arrays
    logits, probabilities = learner.logits(images), learner.predict_proba(images)
    assert logits.dtype == torch.float32 and probabilities.dtype == np.float64
    np.testing.assert_allclose(probabilities, softmax(logits), rtol=1e-9)
    assert np.array(learner.classes)[probabilities.argmax(1)].tolist() == learner.predict(images).tolist()
    assert learner.predict_proba(images[:0]).shape == (0, len(learner.classes))


def test_below_the_threshold_the_answer_is_none_of_these(of_arrays):
    learner, images = of_arrays
    names, greatest = learner.predict(images), learner.predict_proba(images).max(1)
    threshold = float(np.sort(greatest)[len(greatest) // 3])
    expected = [name if value >= threshold else "new?" for name, value in zip(names, greatest)]
    answers = learner.predict(images, threshold=threshold, otherwise="new?")
    assert answers.tolist() == expected and 0 < (answers == "new?").sum() < len(answers)
    assert "unknown" in learner.predict(images, threshold=1.0)
    assert learner.predict(images, threshold=0).tolist() == names.tolist()


def test_the_top_classes_are_those_of_the_greatest_probabilities(of_arrays):
    learner, images = of_arrays
    names, values = learner.top(images, 3)
    rows = learner.predict_proba(images)
    order = np.argsort(-rows, axis=1)[:, :3]
    assert names.tolist() == np.array(learner.classes)[order].tolist()
    assert np.array_equal(values, np.take_along_axis(rows, order, 1)) and names.shape == (len(images), 3)


def test_of_equally_likely_classes_the_one_of_predict_is_on_top(of_arrays):
    """By :func:`pycil_wsc.training.outputs.best_classes`; torch breaks ties in another way for another k."""
    answers, images = of_arrays[0].answers, of_arrays[1][:7]
    equal = Answers(answers.classifier, [f"class {number}" for number in range(12)])
    for worst in range(12):
        logits = torch.ones(len(images), 12)
        logits[:, worst] = 0
        with patch.object(answers.classifier, "outputs", lambda images: iter([(None, logits)])):
            for k in range(1, 13):
                names, values = equal.top(images, k)
                assert names[:, 0].tolist() == equal.predict(images).tolist()
                assert values[0, :11].tolist() == pytest.approx(np.sort(softmax(logits)[0])[::-1][: min(k, 11)])
                assert len(set(names[0])) == k


def test_the_top_classes_are_five_or_all_that_there_are(of_arrays):
    learner, images = of_arrays
    assert learner.top(images)[0].shape == (len(images), 4)
    more = learned((images[:12], list("abcdef") * 2), **QUICK)
    assert more.top(images)[1].shape == (len(images), 5)


# ---- images in any form ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 3])
def test_files_folders_pil_images_arrays_and_generators_are_one(of_files, workers):
    """And the same as the public network after the public transform; files of eleven sizes, in batches of eight."""
    learner, files = of_files
    pictures = [Image.open(file).convert("RGB") for file in files]
    with torch.inference_mode():
        expected = learner.model(torch.stack([learner.transform(file) for file in files]))
    classifier = learner.answers.classifier
    classifier.workers = workers
    root = files[0].parent.parent
    forms = [files, list(map(str, files)), np.array(list(map(str, files))), root, str(root), f"folder:{root}"]
    forms += [pictures, [np.asarray(picture) for picture in pictures], (picture for picture in pictures)]
    forms += [[torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures]]
    for form in forms:
        torch.testing.assert_close(learner.logits(form), expected, atol=1e-5, rtol=1e-5)


def test_a_learner_of_arrays_fits_files_and_pil_images_to_their_size(of_arrays, of_files):
    (learner, images), (_, files) = of_arrays, of_files
    with torch.inference_mode():
        expected = learner.model(torch.stack([learner.transform(file) for file in files]))
    torch.testing.assert_close(learner.logits(files), expected, atol=1e-5, rtol=1e-5)
    pictures = (Image.fromarray(image) for image in images)
    assert torch.equal(learner.logits(pictures), learner.logits(images))
    first = torch.from_numpy(images).permute(0, 3, 1, 2)
    assert torch.equal(learner.logits(first), learner.logits(images))


@pytest.mark.parametrize("workers", [0, 2])
def test_images_are_read_as_they_are_needed_and_then_forgotten(of_files, workers):
    """Of 200 images, never more than three batches of eight are in memory."""
    learner, _ = of_files
    learner.answers.classifier.workers = workers
    alive, most = weakref.WeakSet(), []

    class Picture(np.ndarray):
        __hash__ = object.__hash__

    def pictures():
        for number in range(200):
            picture = np.full((20, 20, 3), number, np.uint8).view(Picture)
            alive.add(picture)
            most.append(len(alive))
            yield picture

    answers = learner.each(pictures())
    next(answers)
    assert len(most) <= 3 * 8 + 1, "the first answer does not wait for the last image"
    assert len(list(answers)) == 199 and len(most) == 200 and max(most) <= 3 * 8 + 1


def test_few_whole_images_wait_for_the_threads_that_read_them(of_files, monkeypatch):
    """With batches of 100 and two threads. Names of files, which are small, may all wait."""
    learner, _ = of_files
    classifier = learner.answers.classifier
    monkeypatch.setattr(classifier, "workers", 2)
    monkeypatch.setattr(classifier.learner, "config", replace(classifier.learner.config, batch_size=100))
    alive, most = weakref.WeakSet(), []

    class Picture(np.ndarray):
        __hash__ = object.__hash__

    def pictures():
        for number in range(250):
            picture = np.full((20, 20, 3), number, np.uint8).view(Picture)
            alive.add(picture)
            most.append(len(alive))
            yield picture

    assert len(learner.predict(pictures())) == 250 and max(most) <= 2 * 2 + 4


def test_arrays_that_cannot_be_written_are_taken_without_a_warning(of_arrays, recwarn):
    learner, images = of_arrays
    images.setflags(write=False)
    learner.predict(images)
    assert not [warning for warning in recwarn if "writ" in str(warning.message)]


def test_whatever_a_decoder_raises_is_one_line(of_files, monkeypatch):
    """That of AVIF raises RuntimeError for damaged files."""
    learner, files = of_files

    def fails(image, *arguments):
        raise RuntimeError("Failed to decode image")

    loaded = Image.open(files[0])
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "convert", fails)
        answers = list(learner.each([files[0], loaded]))
    assert "not a readable image (Failed to decode image)" in answers[0].problem
    assert "cannot be decoded (Failed to decode image)" in answers[1].problem


def test_a_file_that_cannot_be_read_stops_predict_by_name_and_each_goes_on(of_files, tmp_path):
    learner, files = of_files
    (tmp_path / "b.jpg").write_bytes(b"no image")
    some = [files[0], tmp_path / "b.jpg", tmp_path / "gone.jpg", files[1]]
    with pytest.raises(UserError, match=r"b\.jpg: not a readable image"):
        learner.predict(some)
    answers = list(learner.each(some))
    assert [answer.image for answer in answers] == list(map(str, some))
    assert [answer.name is None for answer in answers] == [False, True, True, False]
    assert "not a readable image" in answers[1].problem and "No such file" in answers[2].problem
    assert [answers[0].name, answers[3].name] == learner.predict([files[0], files[1]]).tolist()
    best = learner.predict_proba([files[0], files[1]]).max(1)
    assert np.allclose([answers[0].probability, answers[3].probability], best, rtol=1e-4)


def test_an_image_without_a_name_is_named_by_its_position(of_arrays):
    learner, images = of_arrays
    wrong = images[2] / 255
    with pytest.raises(UserError, match=r"^image 2: float64 of shape \(8, 8, 3\)"):
        learner.predict([images[0], images[1], wrong])


def test_a_pil_image_that_cannot_be_decoded_is_like_a_file(of_files):
    learner, files = of_files
    content = files[0].read_bytes()
    whole, cut = (Image.open(io.BytesIO(part)) for part in (content, content[: len(content) // 2]))
    with pytest.raises(UserError, match="^image 1: cannot be decoded") as error:
        learner.predict([whole, cut])
    assert "\n" not in str(error.value)
    answers = list(learner.each([whole, cut, whole]))
    assert [answer.name is None for answer in answers] == [False, True, False] and answers[0].name == answers[2].name


@pytest.mark.parametrize("workers", [0, 2])
def test_pil_images_whose_files_are_closed_are_one_line_each(workers, of_files):
    """Pillow raises an AssertionError; with threads, the more images than these have places for were waited for."""
    learner, files = of_files
    learner.answers.classifier.workers = workers
    images = []
    for file in files:
        with Image.open(file) as image:
            images.append(image)
    answers = list(learner.each(images))
    assert len(answers) == 11 > 4 * workers
    assert {answer.problem for answer in answers} == {
        "image: cannot be decoded (its file is closed); open it again, or replace it"
    }


def test_a_folder_is_asked_about_the_images_that_would_be_learned(of_files, tmp_path, monkeypatch):
    """Not about those of other programs, and also about those behind links; ``~`` is the home folder."""
    learner, files = of_files
    photos(tmp_path / "home", ["cat", "ant"], 1)
    photos(tmp_path / "more", ["ant"], 2)
    for folder in ("ant/@eaDir", ".cache"):
        shutil.copytree(tmp_path / "home" / "cat", tmp_path / "home" / folder)
    (tmp_path / "home" / "cat" / "._0.png").write_bytes(b"\0\5\x16\7")
    (tmp_path / "home" / "ant" / "linked").symlink_to(tmp_path / "more" / "ant")
    (tmp_path / "home" / "ant" / "linked" / "loop").symlink_to(tmp_path / "home")
    monkeypatch.setenv("HOME", str(tmp_path))
    train = read_source("folder:~/home").train
    answers = list(learner.each("folder:~/home"))
    assert {answer.image for answer in answers} == set(train.images.tolist())
    assert len(answers) == len(train) == len(learner.predict("~/home"))


def closed():
    image = Image.new("RGB", (9, 9))
    image.close()
    return image


@pytest.mark.parametrize("ask", ["predict", "top", "tested"])
def test_of_a_batch_only_the_answers_are_kept(ask, of_arrays, monkeypatch):
    """Logits of a million images and a thousand classes would take four gigabytes."""
    learner, images = of_arrays
    answers, alive, most = learner.answers, weakref.WeakSet(), []
    outputs = answers.classifier.outputs

    def watched(images):
        for features, logits in outputs(images):
            alive.add(logits)
            most.append(len(alive))
            yield features, logits

    monkeypatch.setattr(answers.classifier, "outputs", watched)
    arguments = {"predict": (0.5,), "top": (2,), "tested": (np.zeros(5 * len(images), int),)}[ask]
    getattr(answers, ask)(np.concatenate(5 * [images]), *arguments)
    assert len(most) > 5 and max(most) <= 2, "that of this batch, and of the one before"


def test_each_answers_a_folder_by_the_names_of_its_files(of_files):
    learner, files = of_files
    answers = list(learner.each(files[0].parent.parent, threshold=1.0, otherwise="?"))
    assert [answer.image for answer in answers] == list(map(str, files))
    assert {answer.name for answer in answers} == {"?"}


@pytest.mark.parametrize(
    "message, ask",
    [
        ("threshold: 2 is not a probability from 0 to 1", lambda learner: learner.predict([], threshold=2)),
        ("threshold: 'x' is not a probability", lambda learner: learner.each([], threshold="x")),
        ("otherwise: 'cat' is a learned class", lambda learner: learner.predict([], threshold=0.5, otherwise="cat")),
        ("k: 0 is not a whole number from 1 to the 2 learned classes", lambda learner: learner.top([], 0)),
        ("k: 3 is not a whole number", lambda learner: learner.top([], 3)),
        ("'nowhere' is not a folder; give uint8 (B, 16, 16, 3), a folder", lambda learner: learner.predict("nowhere")),
        (f"{__file__!r} is one file; give a list of files: [", lambda learner: learner.predict(__file__)),
        ("otherwise: 3 is not a name", lambda learner: learner.predict([], threshold=0.5, otherwise=3)),
        ("images: a int; give uint8 (B, 16, 16, 3), a folder", lambda learner: learner.predict(3)),
        ("image 0: is a float; give a PIL image", lambda learner: learner.predict([0.5])),
        ("images: float32 of shape (1, 16, 16, 3)", lambda learner: learner.predict(np.zeros((1, 16, 16, 3), "f"))),
        ("more than 8 bits per channel", lambda learner: learner.predict([Image.new("F", (9, 9))])),
        ("image 0: has 0 x 9 pixels", lambda learner: learner.predict([Image.new("RGB", (0, 9))])),
        ("image 0: cannot be decoded (Operation on closed image)", lambda learner: learner.predict([closed()])),
    ],
)
def test_bad_questions_are_one_line(message, ask, of_files):
    with pytest.raises(UserError) as error:
        ask(of_files[0])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_empty_folder_has_no_answers(of_files, tmp_path):
    Path(tmp_path, "empty").mkdir()
    assert of_files[0].predict(tmp_path).shape == (0,)
