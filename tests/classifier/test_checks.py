"""`learner.check`: what is found in images before they are learned, and how often the test of shift errs."""

import io
import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images
from support.months import NAMES, TEMPLATES, photos
from support.small_learners import FILES, QUICK, learned

from pycil_wsc import Learner
from pycil_wsc.classifier.check import near_duplicates, shift
from pycil_wsc.classifier.check.doubtful_labels import doubtful
from pycil_wsc.classifier.check.shift import compared
from pycil_wsc.classifier.store.perceptual import NONE, perceptual_hash
from pycil_wsc.classifier.store.versions import FILE
from pycil_wsc.errors import UserError
from pycil_wsc.state import load_state, save_state

pytestmark = pytest.mark.usefixtures("uncounted", "undrawn")


def noisy(count, seed, names=("ant", "cat"), brighter=0):
    """(images, labels) with ``count`` noisy images of each class."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(names, count)
    templates = np.stack([TEMPLATES[NAMES.index(name)] for name in labels])
    images = templates + rng.integers(0, 56, templates.shape) + brighter
    return images.clip(0, 255).astype(np.uint8), labels


@pytest.fixture(scope="module")
def learner():
    """Of 100 images of each of two classes, 20 of which it holds out."""
    return learned(noisy(100, 0), held_out=20, convnet_options={"width": 16}, **QUICK)


def test_fine_images_are_fine(learner):
    report = learner.check(noisy(30, 1))
    assert report.fine and report.classes == {"ant": 30, "cat": 30} and report.images == 60
    assert report.shift.images == 60 and report.shift.known == 40 and not report.shift.alarm
    assert str(report).splitlines()[0] == "60 images of 2 classes" and "like the known images" in str(report)
    assert learner.check(noisy(30, 1)) == report, "the permutations are those of the seed"


def test_brighter_images_are_a_shift_and_other_shares_of_the_classes_are_none(learner):
    shifted = learner.check(noisy(30, 1, brighter=40))
    assert shifted.shift.alarm and shifted.shift.p <= 0.01 and not shifted.fine and "unlike" in str(shifted)
    images, labels = noisy(60, 2)
    uneven = np.r_[0:5, 60:120]
    report = learner.check((images[uneven], labels[uneven]))
    assert not report.shift.alarm and report.shift.distance < shifted.shift.distance


def test_new_classes_alone_are_not_tested(learner):
    report = learner.check(noisy(20, 3, names=("bee",)))
    assert report.shift is None and "too few images of classes that have held-out ones" in report.untested
    assert "held_out=20" in learned(noisy(10, 0), **QUICK).check(noisy(10, 1)).untested
    assert "nothing has been learned yet" in str(Learner("wsc").check(noisy(10, 1)))


def test_unreadable_files_duplicates_and_near_empty_classes_are_found(tmp_path):
    source = photos(tmp_path / "january", ["cat", "ant"], 1, 10)
    learner = learned(source, held_out=2, **FILES)
    february = tmp_path / "february"
    photos(february, ["cat", "bee"], 2)
    (february / "cat/broken.png").write_bytes(b"no image")
    (february / "empty").mkdir()
    exemplar = learner._held.train.images[list(learner._held.train.targets).index(learner.classes.index("cat"))]
    held_out = learner._saved.bookkeeping.held_out.images[-1]
    shutil.copy(exemplar, february / "cat/again.png")
    shutil.copy(held_out, february / "bee/known.png")
    shutil.copy(february / "bee/0.png", february / "bee/twice.png")
    report = learner.check(f"folder:{february}")
    assert report.classes == {"bee": 6, "cat": 5, "empty": 0} and report.near_empty == {"empty": 0}
    ((path, why),) = report.unreadable
    assert path == str(february / "cat/broken.png") and "not a readable image" in why
    twins = dict(report.duplicates)
    assert twins[str(february / "cat/again.png")] == "an exemplar of 'cat'"
    assert twins[str(february / "bee/twice.png")] == str(february / "bee/0.png") and len(twins) == 2
    ((image, former),) = report.relabelled
    assert image == str(february / "bee/known.png") and former in ("ant", "cat")
    assert not report.fine and len(str(report).splitlines()) == 8 + len(report.near_duplicates)
    assert learner.check(f"folder:{february}", fewest=6).near_empty == {"cat": 5, "empty": 0}
    with pytest.raises(UserError, match="nowhere"):
        learner.check(f"folder:{tmp_path / 'nowhere'}")


def test_links_that_lead_nowhere_and_pipes_are_found_with_all_others(tmp_path):
    learner = learned(photos(tmp_path / "january", ["cat", "ant"], 1), **FILES)
    february = tmp_path / "february"
    photos(february, ["cat", "bee"], 2)
    (february / "bee/broken.png").write_bytes(b"no image")
    (february / "bee/gone.png").symlink_to("nowhere.png")
    (february / "cat/loop.png").symlink_to("loop.png")
    os.mkfifo(february / "cat/pipe.png")
    (february / "cat/zero.png").symlink_to("/dev/zero")
    sources = [
        f"folder:{february}",
        ([str(path) for path in sorted(february.glob("*/*.png"))], ["bee"] * 6 + ["cat"] * 7),
    ]
    for source in sources:
        for one in (learner, Learner("wsc")):
            report = one.check(source)
            reasons = {Path(path).name: why for path, why in report.unreadable}
            assert reasons.keys() == {"broken.png", "gone.png", "loop.png", "pipe.png", "zero.png"}
            assert "No such file" in reasons["gone.png"] and "a pipe or a device" in reasons["pipe.png"]
            assert report.classes == {"bee": 4, "cat": 4} and report.images == 13
    only = tmp_path / "only"
    (only / "cat").mkdir(parents=True)
    (only / "cat/gone.png").symlink_to("nowhere.png")
    assert len(learner.check(f"folder:{only}").unreadable) == 1
    for name in ("gone.png", "pipe.png"):  # an image that is there no more does not make the others new
        (tmp_path / "january/cat" / name).symlink_to("nowhere.png")
    assert learner.check(f"folder:{tmp_path / 'january'}").learned_before == 1


def test_images_that_a_task_was_learned_from_are_recognised_as_a_whole(learner):
    report = learner.check(noisy(100, 0))
    assert report.learned_before == 1 and "those of task 1" in str(report) and not report.fine
    assert learner.check(noisy(99, 0)).learned_before is None
    assert len(report.duplicates) == 8 + 40, "the exemplars and the held-out images"


def test_the_same_image_with_two_classes_is_found_and_told_when_it_is_learned(capsys):
    images, labels = noisy(5, 2)
    images[7] = images[1]
    learner = learned((images, labels), **QUICK, quiet=False)
    assert "1 image comes with two classes: image 7 ('ant' and 'cat'); leave it out of one" in capsys.readouterr().out
    report = Learner("replay", **QUICK).check((images, labels))
    assert report.contradictory == [(7, "cat", "ant")] and not report.fine
    assert "two classes: 7 is of 'cat' and of 'ant'" in str(report)
    assert not learner.check(noisy(5, 3)).contradictory


def test_images_that_a_method_learns_once_are_duplicates_of_learned_ones():
    learner = learned(noisy(10, 0), name="ncm", adapt=False)
    images, labels = noisy(12, 0)
    twins = dict(learner.check((images, labels)).duplicates)
    known = [
        number for number, image in enumerate(images) if any(np.array_equal(image, old) for old in noisy(10, 0)[0])
    ]
    assert list(twins) == known and set(twins.values()) <= {"a learned image of 'ant'", "a learned image of 'cat'"}


def test_what_learn_takes_is_checked_and_what_it_refuses_is_refused(tmp_path):
    """``val`` of a new task also has the classes of earlier ones."""
    learner = learned(photos(tmp_path / "january", ["cat", "ant"], 1), **FILES)
    photos(tmp_path / "february/train", ["bee"], 2)
    photos(tmp_path / "february/val", ["bee", "cat"], 3)
    source = f"folder:{tmp_path / 'february'}"
    assert learner.check(source).classes["bee"] and learner.learn(source)["classes"] == ["bee"]
    with pytest.raises(UserError, match="has arrays, earlier tasks had image files"):
        learner.check(noisy(4, 0))


# ---- how often the test errs -----------------------------------------------------------------------------------------


DRAWS = 100


def drawn(learner, count, first_seed, brighter=0):
    """(features, numbers of the classes) of ``count`` images of each of two classes, in each draw."""
    draws = [noisy(count, 2 * draw + first_seed, brighter=brighter) for draw in range(DRAWS)]
    classifier = learner.answers.classifier
    large = replace(classifier.learner.config, batch_size=100)  # features do not depend on the batch
    with patch.object(classifier.learner, "config", large):
        features = classifier.features(np.concatenate([images for images, _ in draws]))
    numbers = [np.array([learner.classes.index(label) for label in labels]) for _, labels in draws]
    return list(zip(np.split(features, DRAWS), numbers))


def p_values(new, known):
    rngs = map(np.random.default_rng, range(DRAWS))
    return np.array([compared(*sides, 0.01, rng).p for *sides, rng in zip(new, known, rngs)])


@pytest.mark.slow
def test_in_100_draws_without_a_shift_at_most_five_are_alarms_and_with_one_nearly_all(learner, monkeypatch):
    """30 known and 40 new images of each class. The level holds with any number of permutations."""
    monkeypatch.setattr(shift, "PERMUTATIONS", 199)
    known = drawn(learner, 30, 1000)
    without = p_values(drawn(learner, 40, 1001), known)
    shifted = p_values(drawn(learner, 40, 1001, brighter=30), known)
    assert (without <= 0.01).sum() <= 5 and (shifted <= 0.01).sum() >= 95
    assert 30 <= (without <= 0.5).sum() <= 70, "p-values are uniform without a shift"


def test_the_statistic_is_the_discrepancy_of_two_means_by_its_definition():
    """One class: mean of the kernel within each side, less twice that across."""
    rng = np.random.default_rng(0)
    new, known = rng.normal(0, 1, (9, 3)), rng.normal(1, 1, (12, 3))
    rows = np.concatenate([new, known])
    squares = np.array([[((a - b) ** 2).sum() for b in rows] for a in rows])
    width = np.median(squares[np.triu_indices(21, 1)])
    kernel = np.exp(-squares / width)
    expected = kernel[:9, :9].mean() + kernel[9:, 9:].mean() - 2 * kernel[:9, 9:].mean()
    one = np.zeros(9, int), np.zeros(12, int)
    shift = compared((new, one[0]), (known, one[1]), 0.01, rng)
    assert shift.distance == pytest.approx(np.sqrt(expected)) and shift.p == 1 / 1000 and shift.alarm
    assert compared((new[:7], one[0][:7]), (known, one[1]), 0.01, rng) is None
    assert compared((new, one[0]), (known, one[1] + 1), 0.01, rng) is None, "no class in common"


# ---- what is nearly the same, or looks like something else -----------------------------------------------------------


def picture(seed, side=64):
    """A smooth random picture, as photographs are: PIL."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)


def definition_of_phash(image):
    """Sums of cosines instead of a fast transform."""
    grey = np.asarray(image.convert("L").resize((32, 32), Image.Resampling.LANCZOS), float)
    places = np.arange(32)
    waves = np.cos(np.pi * np.outer(np.arange(8), 2 * places + 1) / 64)
    low = (waves @ grey @ waves.T).ravel()
    return int("".join("01"[int(value > np.median(low))] for value in low), 2)


def test_the_perceptual_hash_is_that_of_its_definition():
    for seed in range(5):
        assert as_number(perceptual_hash(picture(seed))) == definition_of_phash(picture(seed))
    assert perceptual_hash(Image.new("RGB", (64, 64), "red")) == NONE, "all of one colour are alike"
    assert perceptual_hash(picture(0, side=8)) == NONE


def as_number(picture_hash):
    bits = np.unpackbits(picture_hash.reshape(1).view(np.uint8))
    return int("".join(map(str, bits)), 2)


def test_the_perceptual_hash_is_that_of_the_package_imagehash():
    imagehash = pytest.importorskip("imagehash")
    photographs = map(Image.fromarray, load_sample_images().images)
    parts = [photo.crop((x, y, x + 150, y + 120)) for photo in photographs for x in range(0, 450, 50) for y in (0, 250)]
    for image in parts + [part.resize((64, 64)) for part in parts] + [picture(0, 17), picture(1, 300)]:
        assert as_number(perceptual_hash(image)) == int(str(imagehash.phash(image)), 16)


def all_pairs(hashes, others, earlier=False):
    """(place, place of the nearest of the others), each compared with each; ``earlier``: others before it alone."""
    pairs = []
    for place, one in enumerate(hashes.tolist()):
        distances = [bin(one ^ other).count("1") for other in others.tolist()[: place if earlier else None]]
        if distances and min(distances) <= near_duplicates.NEAR:
            pairs.append((place, distances.index(min(distances))))
    return pairs


@pytest.mark.parametrize("pairs", [1, 50, near_duplicates.PAIRS])
def test_near_hashes_are_those_that_a_comparison_of_each_with_each_finds(pairs, monkeypatch):
    """However many are compared at once."""
    monkeypatch.setattr(near_duplicates, "PAIRS", pairs)
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**63, 300, dtype=np.uint64)
    for row in range(100, 300):  # up to eight bits away from an earlier one, some of which are near each other
        flipped = rng.permutation(64)[: rng.integers(9)].tolist()
        hashes[row] = hashes[row % 40] ^ np.uint64(sum(1 << bit for bit in flipped))
    assert near_duplicates.repeated(hashes) == all_pairs(hashes, hashes, earlier=True)
    assert near_duplicates.near_pairs(hashes[150:], hashes[:150]) == all_pairs(hashes[150:], hashes[:150])
    assert not near_duplicates.near_pairs(hashes, hashes[:0]) and not near_duplicates.repeated(hashes[:0])


def test_a_large_photograph_and_a_small_one_of_it_are_found_by_files(tmp_path):
    """A JPEG is decoded at a smaller size in both places."""
    photograph = Image.fromarray(load_sample_images().images[0]).resize((1280, 854))
    for name, image in (("january/a/1", photograph), ("february/a/2", photograph.resize((960, 640)))):
        (tmp_path / name).parent.mkdir(parents=True)
        image.save(tmp_path / f"{name}.jpg", quality=80)
    learner = learned(f"folder:{tmp_path}/january", name="ncm", adapt=False, image_size=16)
    assert learner.check(f"folder:{tmp_path}/february").near_duplicates == [
        (str(tmp_path / "february/a/2.jpg"), "a learned image of 'a'")
    ]


def test_of_very_many_images_the_near_ones_are_found():
    rng = np.random.default_rng(1)
    hashes = rng.integers(0, 2**63, 30_000, dtype=np.uint64)
    hashes[29_999] = hashes[7] ^ np.uint64(0b1000_0001)
    assert near_duplicates.repeated(hashes) == [(29_999, 7)]
    assert near_duplicates.near_pairs(hashes[29_000:], hashes[:29_000]) == [(999, 7)]


def saved_again(image):
    """An array of an image that was saved as JPEG."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=60)
    return np.asarray(Image.open(file))


def test_near_duplicates_of_images_that_are_learned_and_not_kept_are_found_until_their_class_is_removed(tmp_path):
    pictures = [picture(seed, side=32) for seed in range(20)]
    images, labels = np.stack([np.asarray(each) for each in pictures]), np.repeat(["cat", "dog"], 10)
    learner = learned((images, labels), name="ncm", adapt=False, held_out=2)
    learner.save(tmp_path / "shelf")
    learner = Learner.load(tmp_path / "shelf", quiet=True)
    again = np.stack([saved_again(each) for each in pictures]), labels
    held_out = {image.tobytes() for image in learner._saved.bookkeeping.held_out.images}
    found = dict(learner.check(again).near_duplicates)
    expected = {
        row: f"{'a held-out' if image.tobytes() in held_out else 'a learned'} image of '{label}'"
        for row, (image, label) in enumerate(zip(images, labels))
    }
    assert found == expected
    learner.remove("cat")
    assert sorted(dict(learner.check(again).near_duplicates)) == list(range(10, 20))
    assert len(learner._saved.bookkeeping.perceptual.digests) == 10


def test_a_learner_of_an_earlier_version_which_noted_no_perceptual_hashes_checks_the_rest(tmp_path):
    images, labels = np.stack([np.asarray(picture(seed, side=32)) for seed in range(20)]), np.repeat(["cat", "dog"], 10)
    learned((images, labels), name="ncm", adapt=False).save(tmp_path)
    content = load_state(tmp_path / FILE)
    del content["ledger"]["perceptual"]
    save_state(tmp_path / FILE, content)
    learner = Learner.load(tmp_path, quiet=True)
    again = np.stack(
        [saved_again(picture(seed, side=32)) for seed in (0, 15)] + [images[3], saved_again(picture(0, 32))]
    )
    found = learner.check((again, ["cat", "dog", "cat", "cat"]))
    assert found.near_duplicates == [] and dict(found.duplicates) == {2: "a learned image of 'cat'", 3: 0}
    learner.learn((np.stack([np.asarray(picture(seed, side=32)) for seed in range(20, 24)]), ["cat", "dog"] * 2))
    found = learner.check((np.stack([saved_again(picture(20, 32))]), ["cat"]))
    assert found.near_duplicates == [(0, "a learned image of 'cat'")]


def test_an_image_that_is_held_out_under_another_class_is_told_so(learner):
    aside = learner._saved.bookkeeping.held_out
    rows = np.flatnonzero(aside.targets == learner.classes.index("cat"))[:2]
    found = learner.check((aside.images[rows], ["ant"] * 2))
    assert found.relabelled == [(0, "cat"), (1, "cat")] and not found.duplicates
    assert "another class: 0 was 'cat' before" in str(found)


def test_images_that_were_saved_again_or_resized_are_found_also_in_the_test_and_others_are_not(tmp_path):
    for number in range(12):
        folder = tmp_path / "photos" / "train" / ("cat" if number < 6 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        picture(number).save(folder / f"{number}.png")
        (tmp_path / "photos" / "val" / folder.name).mkdir(parents=True, exist_ok=True)
    train, val = tmp_path / "photos/train", tmp_path / "photos/val"
    picture(3).save(train / "cat/again.jpg", quality=60)
    picture(8).resize((40, 40), Image.Resampling.BICUBIC).save(train / "cat/smaller.png")
    picture(1).save(val / "cat/1.jpg", quality=90)
    picture(100).save(val / "dog/new.png")
    shutil.copy(train / "dog/9.png", val / "dog/copy.png")
    report = Learner("ncm", image_size=16, convnet_type="tiny", quiet=True).check(f"folder:{tmp_path / 'photos'}")
    near = {frozenset(map(os.path.basename, pair)) for pair in report.near_duplicates}
    assert near == {frozenset({"3.png", "again.jpg"}), frozenset({"8.png", "smaller.png"})} and not report.duplicates
    in_test = {tuple(map(os.path.basename, pair)) for pair in report.in_test}
    assert in_test == {("1.png", "1.jpg"), ("9.png", "copy.png")} and not report.fine
    assert "is nearly" in str(report) and "is the test image" in str(report)


def test_names_that_differ_by_case_or_spaces_are_told(learner):
    images, _ = noisy(10, 4)
    report = learner.check((images, np.repeat(["Ant ", "dog_fish"], 10)))
    assert report.similar_names == [("Ant ", "ant")] and "similar names: 'Ant ' and 'ant'" in str(report)
    assert not learner.check((images, np.repeat(["ant", "dog 1"], 10))).similar_names


def test_planted_label_errors_are_doubted_first_and_few_others():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 30)
    features = np.eye(4)[labels] @ rng.normal(size=(4, 20)) + 0.3 * rng.normal(size=(120, 20)) + 5
    wrong = np.array([3, 40, 77, 100])
    given = labels.copy()
    given[wrong] = (labels[wrong] + 1) % 4
    rows, likelier = doubtful(features, given)
    assert set(rows[:4].tolist()) == set(wrong.tolist()) and len(rows) == 4
    assert np.array_equal(likelier, labels[rows])
    assert not len(doubtful(features, labels)[0])
    assert not len(doubtful(features[:4], labels[:4])[0]), "too few of a class"


def test_few_label_errors_of_known_classes_are_found_beside_the_kept_features():
    learner = learned(noisy(60, 0, NAMES[:4]), name="ncm", adapt=False, held_out=5, convnet_options={"width": 16})
    wrong, _ = noisy(4, 1, NAMES[:1])
    assert [image for image, *_ in learner.check((wrong, [NAMES[1]] * 4)).doubtful] == [0, 1, 2, 3]
    wrong, _ = noisy(10, 2, NAMES[2:3])
    doubted = learner.check((wrong, [NAMES[3]] * 10)).doubtful
    assert sorted(doubted) == [(number, NAMES[3], NAMES[2]) for number in range(10)]
    assert not learner.check(noisy(10, 3, NAMES[:4])).doubtful


def test_check_counts_the_files_that_exif_data_turn_and_finds_nothing_wrong_with_them(tmp_path):
    source = photos(tmp_path / "april", ["ant", "bee"], seed=0, count=6)
    for number, orientation in enumerate([6, 3, 1, 9]):  # upright, and no orientation at all
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = tmp_path / "april" / "ant" / f"{number}.png"
        Image.open(path).save(path, exif=exif)
    report = Learner("ncm").check(source)
    assert report.turned == 2 and replace(report, near_duplicates=[]).fine
    assert "turned: 2 of 12 images, by their EXIF orientation" in str(report).splitlines()
    assert "turned" not in str(Learner("ncm").check(noisy(10, 1)))
