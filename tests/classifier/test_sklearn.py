"""`pycil_wsc.sklearn.ContinualClassifier`: scikit-learn's interface, and labels that were never seen in partial_fit."""

import copy
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks
from support.months import MONTHS, month, photos
from support.small_learners import arrays, dies_at

from pycil_wsc.classifier.learner import Learner
from pycil_wsc.classifier.predict.answers import Answers
from pycil_wsc.errors import UserError
from pycil_wsc.sklearn import ContinualClassifier

pytestmark = pytest.mark.usefixtures("uncounted", "undrawn")
TINY = {"convnet_type": "tiny", "batch_size": 8, "device": "cpu", "memory_per_class": 4}
EXCEPTIONS = {  # those of docs/classifier_details.md
    "check_methods_sample_order_invariance": "float32's rounding depends on an image's place in its batch",
    "check_methods_subset_invariance": "the same, in batches of another size",
}


def small(epochs=2, **arguments):
    keys = {"precision": "fp32"} | arguments.pop("keys", {})
    return ContinualClassifier("replay", **TINY | {"epochs": epochs, "keys": keys} | arguments)


@pytest.fixture(scope="module")
def months(tmp_path_factory):
    """(images, labels) of each month."""
    folder = tmp_path_factory.mktemp("months")
    return [arrays(month(folder / f"{number}.npz", names, number)) for number, names in enumerate(MONTHS)]


@pytest.fixture(scope="module")
def fitted(months):
    """A classifier of rows whose labels are numbers, and the rows."""
    images, names = months[0]
    rows, labels = images[..., 0].reshape(len(images), -1) / 7.0, (names == "ant") * 5
    return small().fit(rows, labels), rows


@parametrize_with_checks([small(4, batch_size=16)], expected_failed_checks=lambda estimator: EXCEPTIONS)
def test_scikit_learns_checks(estimator, check):
    check(estimator)


def test_the_page_lists_the_exceptions():
    page = (Path(__file__).parents[2] / "docs" / "classifier_details.md").read_text()
    listed = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `check_")}
    assert listed == EXCEPTIONS.keys()


def test_partial_fit_learns_labels_never_seen_as_a_learner_does(months):
    """To the bit: the same tasks in a learner with the same keys."""
    classifier = small()
    for images, names in months:
        classifier.partial_fit(images, names)
    learner = Learner("replay", **TINY, epochs=2, precision="fp32", quiet=True)
    for images, names in months:
        learner.learn((images, names))
    images, names = months[2]
    expected = learner.predict_proba(images)[:, np.argsort(learner.classes)]
    assert classifier.classes_.tolist() == sorted(learner.classes) == ["ant", "bee", "cat", "dog"]
    assert np.array_equal(classifier.predict_proba(images), expected)
    assert classifier.predict(images).tolist() == learner.predict(images).tolist()
    assert classifier.score(images, names) == np.mean(learner.predict(images) == names)


def test_familiarity_is_that_of_the_learner(months):
    """Of a label that was never learned it is small."""
    (images, names), (others, _) = months[0], months[2]
    classifier = small(keys={"held_out": 2}).fit(images, names)
    assert np.array_equal(classifier.familiarity(others), classifier.learner_.familiarity(others))
    with pytest.raises(ValueError, match="held_out=20"):
        small().fit(images, names).familiarity(others)


def test_labels_that_were_never_learned_are_refused_as_by_the_learner(months):
    """Where labels are numbers, as -1."""
    (images, names), (others, _) = months[0], months[2]
    classifier = small(keys={"held_out": 4}).fit(images, names)
    expected = classifier.learner_.predict(others, unknown=0.3)
    assert classifier.predict(others, unknown=0.3).tolist() == expected.tolist() and "unknown" in expected
    other = classifier.predict(others, unknown=0.3, otherwise="none of these")
    assert np.array_equal(other == "none of these", expected == "unknown")
    assert classifier.expected_accuracy(others) == classifier.learner_.expected_accuracy(others)
    numbers = small(keys={"held_out": 4}).fit(images, (names == "ant") * 5)
    refused = numbers.predict(others, unknown=0.3)
    assert set(refused.tolist()) <= {-1, 0, 5} and refused.dtype == numbers.classes_.dtype
    assert np.array_equal(refused == -1, numbers.learner_.predict(others, unknown=0.3) == "unknown")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"otherwise": 5}, "^otherwise: 5 is a label; give another value$"),
        ({"otherwise": "other"}, "^otherwise: 'other' is of another type than the labels, which are whole numbers$"),
        ({"unknown": 2}, "^unknown: "),
    ],
)
def test_arguments_of_a_refusal_are_checked(arguments, message, months):
    images, names = months[0]
    classifier = small(keys={"held_out": 4}).fit(images, (names == "ant") * 5)
    with pytest.raises(ValueError, match=message):
        classifier.predict(images, **{"unknown": 0.3} | arguments)


@pytest.mark.parametrize("kind", [np.uint8, np.uint64, np.float32, np.int16])
def test_refused_or_not_labels_are_the_same_numbers(kind, months):
    images, names = months[0]
    largest = np.array((names == "ant") * (2**53 if kind == np.uint64 else 200)).astype(kind)
    classifier = small(keys={"held_out": 4}).fit(images, largest)
    plain, refused = classifier.predict(images), classifier.predict(images, unknown=0.3)
    assert (refused == -1).any() and [label for label in refused.tolist() if label != -1] == [
        label for label, other in zip(plain.tolist(), refused.tolist(), strict=True) if other != -1
    ]
    assert refused.dtype.kind == ("f" if kind == np.float32 else "i")


@pytest.mark.parametrize("labels", [lambda ant: ant, lambda ant: np.where(ant, 2**64 - 1, 0).astype(np.uint64)])
def test_an_otherwise_that_would_change_labels_is_one_line(labels, months):
    """False and True have no third value, and no type has -1 and the largest unsigned number."""
    images, names = months[0]
    classifier = small(keys={"held_out": 4}).fit(images, labels(names == "ant"))
    with pytest.raises(ValueError, match="^otherwise: .* would become .* in NumPy's array"):
        classifier.predict(images, unknown=0.3)


def test_classes_of_the_learner_that_are_no_labels_are_told_before_saving(months, tmp_path):
    images, names = months[0]
    classifier = small().fit(images, (names == "ant") * 5)
    classifier.learner_.rename("5", "7")
    assert classifier.classes_.tolist() == [0, 7]
    classifier.learner_.rename("7", "seven")
    with pytest.raises(UserError, match="^the class 'seven' is no label, as the others are whole numbers; rename it"):
        classifier.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_fit_starts_anew(months):
    (first, names), (second, others) = months[:2]
    again = small().fit(first, names).fit(second, others)
    assert again.classes_.tolist() == sorted(set(others))
    assert np.array_equal(again.predict_proba(second), small().fit(second, others).predict_proba(second))


@pytest.mark.parametrize("kind", [int, float, str, bool])
def test_predictions_are_labels_of_the_type_that_was_learned(kind, months):
    images, names = months[0]
    labels = np.array([kind(name == "ant") for name in names])
    found = small(1).fit(images, labels).predict(images)
    assert found.dtype == labels.dtype and set(found) <= set(labels)


def test_rows_are_the_pixels_of_square_images(months):
    """Of greyscale ones, or of those of ``image_shape``; black and white are the least and the greatest value."""
    images, names = months[0]
    keys = {"flip": False, "padding": 0}
    stretched = images.astype(float) / 255 * 3 - 1
    rows, limits = stretched.reshape(len(images), -1), {"value_range": (-1, 2), "image_shape": (8, 8, 3)}
    by_rows = small(1, **limits).fit(rows, names).predict_proba(rows)
    assert np.array_equal(by_rows, small(1, keys=keys).fit(images, names).predict_proba(images))
    grey = images[..., 0].astype(float)
    scaled = np.round(255 * (grey - grey.min()) / (grey.max() - grey.min())).astype(np.uint8)
    by_rows = small(1).fit(grey.reshape(len(grey), -1), names).predict_proba(grey.reshape(len(grey), -1))
    assert np.array_equal(by_rows, small(1, keys=keys).fit(scaled, names).predict_proba(scaled))


def test_names_of_files_are_learned(tmp_path):
    photos(tmp_path / "january", ["cat", "ant"], 1)
    files = sorted(map(str, (tmp_path / "january").rglob("*.png")))
    labels = [Path(file).parent.name for file in files]
    classifier = small(1, image_size=16, keys={"num_workers": 0}).fit(files, labels)
    assert set(classifier.predict(files)) <= {"cat", "ant"} and not hasattr(classifier, "n_features_in_")
    frame = pd.DataFrame({"path": files, "label": labels})
    same = small(1, image_size=16, keys={"num_workers": 0}).fit(frame["path"], frame["label"])
    for column in (frame["path"], frame["path"].values):
        np.testing.assert_array_equal(same.predict_proba(column), classifier.predict_proba(files))


def test_a_seed_decides_and_clones_are_equal(months):
    images, names = months[0]
    one, other = (small(1, random_state=seed).fit(images, names).predict_proba(images) for seed in (1, 2))
    again = clone(small(1, random_state=1)).fit(images, names).predict_proba(images)
    drawn = small(1, random_state=np.random.RandomState(3)).fit(images, names)
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    assert drawn.learner_.config.seed == np.random.RandomState(3).randint(2**31 - 1)


def test_it_works_in_pipelines_and_grid_searches(fitted):
    _, rows = fitted
    labels = (np.arange(len(rows)) < len(rows) // 2).astype(int)
    pipeline = make_pipeline(FunctionTransformer(np.sqrt), small(1))
    search = GridSearchCV(pipeline, {"continualclassifier__epochs": [1, 2]}, cv=2).fit(rows, labels)
    assert search.best_estimator_[-1].learner_.config.epochs == search.best_params_["continualclassifier__epochs"]


def test_labels_in_any_unicode_form_are_predicted_as_they_were_given(months, tmp_path):
    """Names of classes are in NFC; a second form of a name is the same label."""
    images, names = months[0]
    labels = np.where(names == "ant", "cafe\u0301", "the")
    classifier = small().fit(images, labels)
    assert set(classifier.predict(images)) <= set(labels) == set(classifier.classes_)
    assert classifier.score(images, labels) == np.mean(classifier.predict(images) == labels) > 0.5
    classifier.partial_fit(images[:2], ["caf\u00e9"] * 2, classes=["caf\u00e9", "the"])
    classifier.save(tmp_path)
    for each in (classifier, ContinualClassifier.load(tmp_path)):
        assert each.classes_.tolist() == ["cafe\u0301", "the"] and each.predict_proba(images).shape[1] == 2


# ---- saving ----------------------------------------------------------------------------------------------------------


def test_a_saved_classifier_goes_on_as_if_it_had_never_been(fitted, tmp_path):
    """No file of it is a pickle."""
    classifier, rows = fitted
    classifier.save(tmp_path)
    loaded = ContinualClassifier.load(tmp_path)
    assert loaded.get_params() == classifier.get_params() | {"random_state": classifier.learner_.config.seed}
    assert np.array_equal(loaded.predict_proba(rows), classifier.predict_proba(rows))
    assert loaded.classes_.dtype == classifier.classes_.dtype and loaded.n_features_in_ == rows.shape[1]
    files = [path for path in tmp_path.iterdir() if path.suffix != ".lock" != path.name != ".last_version"]
    assert sorted(path.name for path in files) == ["learner.safetensors"]
    labels = np.arange(len(rows)) % 3
    one, other = (ContinualClassifier.load(tmp_path).partial_fit(rows, labels) for _ in range(2))
    assert np.array_equal(one.predict_proba(rows), other.predict_proba(rows))
    assert one.classes_.tolist() == [0, 1, 2, 5]


@pytest.mark.parametrize("noted", [3, [], {"parameters": {"invented": 1}}, {"parameters": {}, "form": 3}])
def test_a_folder_without_a_complete_classifier_is_one_line(noted, fitted, tmp_path):
    learner = fitted[0].learner_
    with patch.dict(learner.notes, {"ContinualClassifier": noted}):
        learner.save(tmp_path)
    with pytest.raises(UserError, match="is not a saved classifier.*; save") as error:
        ContinualClassifier.load(tmp_path)
    assert "\n" not in str(error.value)


def test_another_learner_is_one_line(fitted, months, tmp_path):
    fitted[0].save(tmp_path)
    small().fit(*months[0]).learner_.save(tmp_path)
    with pytest.raises(UserError, match="has a learner, but no ContinualClassifier; use pycil_wsc.Learner.load"):
        ContinualClassifier.load(tmp_path)


@pytest.mark.parametrize("kind", ["numbers", "strings", "booleans"])
def test_if_the_learner_alone_was_saved_again_its_labels_are_found(kind, months, tmp_path):
    labels = {"numbers": [1.0, 10.0, 2.0], "strings": ["b", "a", "c"], "booleans": [True, False, True]}[kind]
    images = months[0][0]
    classifier = small(1).fit(images[:8], labels[:2] * 4)
    classifier.save(tmp_path)
    classifier.partial_fit(images[8:12], labels[2:] * 4)
    classifier.learner_.save(tmp_path)
    loaded = ContinualClassifier.load(tmp_path)
    assert loaded.classes_.tolist() == classifier.classes_.tolist() == sorted(set(labels))
    assert loaded.predict(images).tolist() == classifier.predict(images).tolist()


@pytest.mark.slow
def test_killed_at_any_moment_of_a_save_the_folder_has_the_classifier_of_before_or_the_new_one(months, tmp_path):
    images = months[0][0]
    old = small(1).fit(images[:8], [0, 1] * 4)
    new = small(1, batch_size=4).fit(images[8:16], ["a", "b"] * 4)
    found = []
    for moment in range(100):
        old.save(tmp_path)
        survived = dies_at(moment, lambda: new.save(tmp_path))
        loaded = ContinualClassifier.load(tmp_path)
        saved = new if loaded.classes_.tolist() == ["a", "b"] else old
        assert loaded.get_params()["batch_size"] == saved.batch_size
        assert np.array_equal(loaded.predict_proba(images), saved.predict_proba(images))
        found.append(saved)
        if survived:
            break
    assert survived and found[0] is old and found[-1] is new


def test_a_rolled_back_classifier_has_its_labels(months, tmp_path):
    images = months[0][0]
    classifier = small(1).fit(images[:8], [0, 1] * 4)
    classifier.save(tmp_path)
    classifier.partial_fit(images[8:12], [2, 3] * 2).save(tmp_path)
    assert ContinualClassifier.load(tmp_path).classes_.tolist() == [0, 1, 2, 3]
    classifier.learner_.rollback()
    assert ContinualClassifier.load(tmp_path).classes_.tolist() == [0, 1]


# ---- what it refuses -------------------------------------------------------------------------------------------------

IMAGES = np.zeros((4, 8, 8, 3), np.uint8)
REFUSED = {
    "^classes: 2 is in y, but not in classes; add it": lambda: small().partial_fit(
        IMAGES, [0, 1, 2, 0], classes=[0, 1]
    ),
    "^image_shape: .3, 4. is not .side, side. or": lambda: small(image_shape=(3, 4)).fit(np.eye(12), np.arange(12) % 2),
    "^images: float32 of shape": lambda: small().fit(IMAGES.astype(np.float32), [0, 1, 0, 1]),
    "inconsistent numbers of samples": lambda: small().fit(IMAGES, [0, 1]),
    "^unknown model_name 'wcs'": lambda: ContinualClassifier("wcs").fit(IMAGES, [0, 1, 0, 1]),
    "^unknown key 'epoch'": lambda: small(keys={"epoch": 3}).fit(IMAGES, [0, 1, 0, 1]),
    "^keys: 3 are not keys with their values; give": lambda: ContinualClassifier(keys=3).fit(IMAGES, [0, 1, 0, 1]),
    "^keys: 'epochs' has an argument of its own; give epochs=... instead": lambda: small(keys={"epochs": 3}).fit(
        IMAGES, [0, 1, 0, 1]
    ),
    "^keys: 'model_name' has an argument of its own; give method=... instead": lambda: small(
        keys={"model_name": "wsc"}
    ).fit(IMAGES, [0, 1, 0, 1]),
    "^keys: 'seed' has an argument of its own; give random_state=": lambda: small(random_state=1, keys={"seed": 2}).fit(
        IMAGES, [0, 1, 0, 1]
    ),
    "^image_shape: 3 is not .side, side. or": lambda: small(image_shape=3).fit(np.eye(9), np.arange(9) % 2),
    "^value_range: 3 is not .black, white., two numbers": lambda: small(value_range=3).fit(np.eye(4), [0, 1, 0, 1]),
    "^value_range: .'a', 1. is not .black": lambda: small(value_range=("a", 1)).fit(np.eye(4), [0, 1, 0, 1]),
    "^image_shape: 88 is not .side, side. or": lambda: small(image_shape="88").fit(np.eye(64), np.arange(64) % 2),
    "^image_shape: .8.0, 8. is not .side": lambda: small(image_shape=(8.0, 8)).fit(np.eye(64), np.arange(64) % 2),
    "^keys: 'out' cannot be given here; leave it out": lambda: small(keys={"out": "a"}).fit(IMAGES, [0, 1, 0, 1]),
    "^y: some labels are strings, and others are not; give": lambda: small().fit(IMAGES, np.array(["a", None] * 2)),
    "^y: labels of the type .S1; give whole numbers or strings": lambda: small().fit(IMAGES, [b"a", b"b"] * 2),
    "^X: row 1 is not a file name, unlike row 0; leave it out": lambda: small().fit(["a.png", None], [0, 1]),
    "^classes: 0 is in y, but not in classes": lambda: small().partial_fit(IMAGES, [0, 3, 0, 3], classes=3),
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_is_a_value_error_in_one_line(line):
    with pytest.raises(ValueError, match=line) as error:
        REFUSED[line]()
    assert "\n" not in str(error.value)


def test_the_pixels_in_another_form_are_refused(fitted):
    """Rows are scaled by the range of their values; the same pixels as images would not be."""
    classifier, rows = fitted
    images = np.zeros((len(rows), 8, 8), np.uint8)
    for call in (classifier.predict, lambda images: copy.deepcopy(classifier).partial_fit(images, [0] * len(images))):
        with pytest.raises(ValueError, match="^X: images, but the classifier was fitted on rows; give rows, or fit it"):
            call(images)


def test_rows_of_bytes_and_of_other_numbers_do_not_mix_unless_their_range_is_given(months, tmp_path):
    """Black and white of the first are 0 and 255, and of others their least and greatest, which may be 0 and 1."""
    images, names = months[0]
    rows = images[..., 0].reshape(len(images), -1)
    small(1).fit(rows, names).save(tmp_path)
    small(1).fit(rows / 255, names).save(tmp_path / "floats")
    for folder, own, others in ((tmp_path, rows, rows / 255), (tmp_path / "floats", rows / 255, rows)):
        classifier = ContinualClassifier.load(folder)
        before = classifier.predict_proba(own)
        line = f"^X: rows of {others.dtype}, but the classifier was fitted on rows of "
        for call in (lambda: classifier.predict(others), lambda: classifier.partial_fit(others, names)):
            with pytest.raises(ValueError, match=line):
                call()
        assert np.array_equal(classifier.predict_proba(own), before)
    given = small(1, value_range=(0, 255)).fit(rows, names)
    assert np.array_equal(given.predict_proba(rows), given.predict_proba(1.0 * rows))


def test_a_saved_seed_among_the_keys_can_be_learned_with_again(months, tmp_path):
    images, names = months[0]
    classifier = small(1, keys={"seed": 5}).fit(images, names)
    classifier.save(tmp_path)
    again = clone(ContinualClassifier.load(tmp_path)).fit(images, names)
    assert np.array_equal(again.predict_proba(images), classifier.predict_proba(images))


def test_a_negative_zero_is_the_label_zero(months):
    images, names = months[0]
    labels = np.where(names == "ant", 1.0, np.where(np.arange(len(names)) % 2, 0.0, -0.0))
    classifier = small(1).fit(images, labels)
    assert classifier.learner_.classes == ["0.0", "1.0"] and set(classifier.predict(images)) <= {0.0, 1.0}


def test_strings_that_look_like_known_numbers_are_refused(months):
    images, names = months[0]
    labels = (names == "ant").astype(int)
    classifier = small(1).fit(images, labels)
    with pytest.raises(ValueError, match="^y: the labels are strings, and earlier ones were whole numbers"):
        classifier.partial_fit(images, labels.astype(str))


def test_whole_numbers_of_two_types_stay_whole_numbers(months):
    images, names = months[0]
    labels = np.unique(names, return_inverse=True)[1].astype(np.int64)
    classifier = small(1).fit(images, labels)
    classifier.partial_fit(images[:4], labels[:4].astype(np.uint64) + np.uint64(7))
    assert classifier.classes_.dtype == labels.dtype and set(classifier.predict(images)) <= set(classifier.classes_)
    with pytest.raises(ValueError, match="^y: 18446744073709551615 is too large for the type of the known labels"):
        classifier.partial_fit(images[:2], np.array([1, 2**64 - 1], np.uint64))


@pytest.mark.parametrize(
    "labels",
    [
        ["a", 1, "b", "b"],
        [1, "1", 1, "1"],
        ["a\0", "a", "b", "b"],
        [True, 2, 0, 2],
        [b"a", "a", "b", "b"],
        [2**63 + 1, -1, 1, 1],
    ],
)
def test_labels_that_numpy_would_change_or_merge_are_refused(labels):
    rows = IMAGES[..., 0].reshape(len(IMAGES), -1)
    for made in (labels, np.array(labels, object)):
        for samples in (IMAGES, rows):
            with pytest.raises(ValueError, match="^y: ") as error:
                small().fit(samples, made)
            assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="^classes: .* would become "):
        small().partial_fit(IMAGES, np.array(labels).astype(str), classes=labels)


@pytest.mark.parametrize("number", [1, 2])
def test_one_row_is_learned_as_one_image_is(number):
    images = IMAGES[:number]
    rows = images[..., 0].reshape(number, -1).astype(float)
    rows[:, 0] = np.arange(number)  # not all equal
    for samples in (images, rows):
        classifier = small(1).fit(samples, ["a", "b"][:number])
        assert set(classifier.predict(samples)) <= {"a", "b"} and classifier.classes_.tolist() == ["a", "b"][:number]
    classifier.partial_fit(rows[:1], ["c"])
    assert classifier.predict_proba(rows[:1]).shape == (1, number + 1)


def test_labels_of_another_type_are_refused_and_change_nothing(fitted):
    classifier, rows = fitted
    before = classifier.predict_proba(rows)
    with pytest.raises(
        ValueError, match="^y: the labels are strings, and earlier ones were whole numbers; give labels"
    ):
        classifier.partial_fit(rows, ["a", "b"] * (len(rows) // 2))
    assert np.array_equal(classifier.predict_proba(rows), before)


def test_a_fit_that_fails_leaves_what_was_fitted_before(fitted):
    classifier, rows = fitted
    before = classifier.predict_proba(rows)
    refused = [(10 * rows, rows[:, 0]), (10 * rows[:, :4], ["a"] * len(rows)), (IMAGES.astype(np.float32), [0] * 4)]
    for images, labels in refused:
        with pytest.raises(ValueError):
            classifier.set_params(epochs=0).fit(images, labels)
        classifier.set_params(epochs=2)
        assert np.array_equal(classifier.predict_proba(rows), before)
    with pytest.raises(ValueError):
        failed = small(epochs=0)
        failed.fit(rows, [0, 1] * (len(rows) // 2))
    with pytest.raises(NotFittedError):
        failed.predict(rows)


def test_black_may_be_the_greater_value(months):
    """As of ink on paper: the images are those of rows that were inverted."""
    rows = months[0][0][..., 0].reshape(len(months[0][0]), -1)
    labels = (months[0][1] == "ant").astype(int)
    inverted = small(1, value_range=(255, 0)).fit(255.0 - rows, labels)
    plain = small(1, value_range=(0, 255)).fit(1.0 * rows, labels)
    assert np.array_equal(inverted.predict_proba(255.0 - rows), plain.predict_proba(1.0 * rows))


def test_the_classes_are_those_of_the_learner_also_if_it_goes_back_or_learns_by_itself(months, tmp_path):
    classifier = small(1)
    for images, names in months[:2]:
        classifier.partial_fit(images, names)
        classifier.save(tmp_path)
    classifier.learner_.rollback()
    loaded = ContinualClassifier.load(tmp_path)
    assert classifier.classes_.tolist() == loaded.classes_.tolist() == ["ant", "cat"]
    assert np.array_equal(classifier.predict_proba(images), loaded.predict_proba(images))
    classifier.learner_.learn(months[1])
    assert classifier.classes_.tolist() == ["ant", "bee", "cat"]
    assert classifier.predict_proba(images).shape == (len(images), 3)


def test_what_is_not_fitted_is_not_saved(tmp_path):
    with pytest.raises(NotFittedError):
        small().save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_answer_is_of_one_state_though_another_class_is_learned_meanwhile():
    """A label that sorts before the others moves all columns."""
    images = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3), dtype=np.uint8)
    classifier = small().partial_fit(images, ["c", "d"] * 4)
    expected, predict = classifier.predict(images).tolist(), Answers.predict_proba

    def learn_and_predict(answers, samples):
        with patch.object(Answers, "predict_proba", predict):
            classifier.partial_fit(images[:2], ["a", "a"])
        return predict(answers, samples)

    with patch.object(Answers, "predict_proba", learn_and_predict):
        assert classifier.predict(images).tolist() == expected
    assert classifier.classes_.tolist() == ["a", "c", "d"]


def test_an_answer_between_the_end_of_learning_and_the_return_of_partial_fit_has_the_new_labels(monkeypatch):
    images = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3), dtype=np.uint8)
    classifier = small().partial_fit(images, ["c", "d"] * 4)
    meanwhile = []

    def advice(learner):
        if learner is classifier.learner_:
            meanwhile.append(classifier.predict_proba(images))

    monkeypatch.setattr(Learner, "_advice", advice)
    classifier.partial_fit(images[:2], ["a", "a"])
    assert len(meanwhile) == 1 and np.array_equal(meanwhile[0], classifier.predict_proba(images))
