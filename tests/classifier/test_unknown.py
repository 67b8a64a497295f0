"""Images of classes that were never learned: how familiar an image is, and what is refused."""

import copy
import dataclasses
import importlib.util
import io
import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from support.months import NAMES, TEMPLATES, month
from support.small_learners import QUICK, arrays, learned

import pycil_wsc
from pycil_wsc.classifier.learner import Learner
from pycil_wsc.classifier.predict.classifier import Classifier
from pycil_wsc.classifier.predict.expected import expected_accuracy
from pycil_wsc.classifier.predict.familiarity import SHRINKAGE, Familiarity, auroc
from pycil_wsc.classifier.predict.features import Features, joined
from pycil_wsc.classifier.store.hashes import digests_of
from pycil_wsc.classifier.update.kept_features import PER_CLASS, chosen, features_after, smallest_of_classes
from pycil_wsc.data.types import Split
from pycil_wsc.errors import UserError

pytestmark = pytest.mark.usefixtures("uncounted", "undrawn")
SERVE = Path(__file__).parents[2] / "examples/serve.py"
NCM = {"name": "ncm", "held_out": 10, "adapt": False}


@pytest.fixture(scope="module")
def two_months(tmp_path_factory):
    """Two months of fifty images of each class, of which ten are held out; cat recurs."""
    folder = tmp_path_factory.mktemp("two")
    return [
        month(folder / f"{number}.npz", names, number, 50)
        for number, names in enumerate((["cat", "ant"], ["bee", "cat"]))
    ]


@pytest.fixture(scope="module")
def ncm(two_months):
    return learned(*two_months, **QUICK, **NCM)


@pytest.fixture(scope="module")
def replay(two_months):
    return learned(*two_months, **QUICK, name="replay", held_out=10)


@pytest.fixture(scope="module")
def images(two_months):
    """Images of three known classes, and of three others."""
    rng = np.random.default_rng(9)
    others = np.array([TEMPLATES[NAMES.index(name)] for name in ("dog", "elk", "fox")]).repeat(20, 0)
    others = (others + rng.integers(0, 56, others.shape)).astype(np.uint8)
    return np.concatenate([arrays(source, "test")[0] for source in two_months]), others


def by_definition(learner, images):
    """Familiarity, step by step in float64, from the features that the learner keeps."""
    kept = learner._saved.bookkeeping.features
    values, labels = kept.values.double().numpy(), kept.labels
    train = ~kept.held_out
    means = {label: values[train & (labels == label)].mean(0) for label in set(labels.tolist())}
    centre = np.mean(list(means.values()), 0)
    deviations = np.array([values[row] - means[labels[row]] for row in np.flatnonzero(train)])
    covariance = deviations.T @ deviations / (len(deviations) - len(means))
    variance = np.trace(covariance) / len(covariance)
    shrunk = (1 - SHRINKAGE) * covariance + SHRINKAGE * variance * np.eye(len(covariance))
    inverse = np.linalg.inv(shrunk)

    def cosine(one, other):  # in the metric of the covariance
        return one @ inverse @ other / np.sqrt((one @ inverse @ one) * (other @ inverse @ other))

    def score(value):
        return max(cosine(value - centre, mean - centre) for mean in means.values())

    held_out = [score(value) for value in values[kept.held_out]]
    shares = []
    for value in learner.answers.classifier.features(images).astype(np.float64):
        not_larger = sum(held_out_score <= score(value) for held_out_score in held_out)
        shares.append((not_larger + 1) / (len(held_out) + 1))
    return np.array(shares)


def test_familiarity_is_the_share_of_held_out_images_that_are_no_nearer_to_a_class_mean(ncm, images):
    both = np.concatenate(images)[::5]
    familiarity = ncm.familiarity(both)
    one = 1 / (ncm._saved.bookkeeping.features.held_out.sum() + 1)
    assert np.abs(familiarity - by_definition(ncm, both)).max() < 1.5 * one, "but for rounding, which may move one"
    assert familiarity.min() > 0 and familiarity.max() <= 1


def test_at_most_the_share_that_was_asked_for_is_refused_of_images_like_those_held_out():
    """With 39 held-out images exactly 2 in 40, on average over their draws."""
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(100):
        values = torch.from_numpy(rng.normal(size=(40 + 39 + 200, 4)).astype(np.float32))
        labels = rng.integers(0, 2, len(values))
        values[:, 0] += torch.from_numpy(3.0 * labels)
        train, held_out = slice(0, 40), slice(40, 79)
        digests = np.arange(len(values))
        kept = joined(
            [
                Features.of(values[part].numpy(), labels[part], digests[part], is_held_out)
                for part, is_held_out in ((train, False), (held_out, True))
            ]
        )
        shares.append((Familiarity.of(kept).shares(values[79:]) <= 0.05).mean())
    assert np.mean(shares) == pytest.approx(0.05, abs=0.012)


@pytest.mark.parametrize("name", ["ncm", "replay"])
def test_what_is_less_familiar_is_refused_by_every_way_to_predict(name, images, request):
    learner, known = request.getfixturevalue(name), images[0]
    both = np.concatenate(images)
    familiarity, names = learner.familiarity(both), learner.predict(both)
    wanted = np.where(familiarity <= 0.1, "none of these", names)
    assert learner.predict(both, unknown=0.1, otherwise="none of these").tolist() == wanted.tolist()
    answers = list(learner.each(both, unknown=0.1, otherwise="none of these", k=2))
    assert [answer.name for answer in answers] == wanted.tolist()
    assert [answer.familiarity for answer in answers] == familiarity.tolist()
    assert [tuple(answer.top) for answer in answers] == list(map(tuple, learner.top(both, 2)[0].tolist()))
    assert learner.predict(both, unknown=0).tolist() == names.tolist()
    assert next(learner.each(both)).familiarity is None
    assert (familiarity[: len(known)] <= 0.1).mean() < 0.3 < (familiarity[len(known) :] <= 0.1).mean()


def test_both_conditions_refuse(ncm, images):
    both = np.concatenate(images)
    either = (ncm.familiarity(both) <= 0.1) | (ncm.predict_proba(both).max(1) < 0.9)
    assert ((ncm.predict(both, unknown=0.1, threshold=0.9) == "unknown") == either).all()


def test_evaluate_counts_what_is_refused(ncm, images):
    known, others = images
    labels = np.array([*ncm.predict(known), *["new"] * len(others)])
    labels[:10] = "ant"
    both = np.concatenate(images)
    familiarity = ncm.familiarity(both)
    measures = ncm.evaluate((both, labels), unknown=0.1)
    refused = familiarity <= 0.1
    is_known = labels != "new"
    right = ncm.predict(both) == labels
    assert measures["refused"] == pytest.approx(
        {
            "known": 100 * refused[is_known].mean(),
            "unknown": 100 * refused[~is_known].mean(),
            "accuracy": 100 * right[is_known & ~refused].mean(),
            "auroc": np.mean([[(a > b) + (a == b) / 2 for a in familiarity[is_known]] for b in familiarity[~is_known]]),
        }
    )
    plain = ncm.evaluate((both, labels))
    assert plain == {name: value for name, value in measures.items() if name != "refused"} and plain["unknown"] == 60


def test_the_auroc_of_a_worked_example():
    assert auroc(np.array([0.5, 0.9]), np.array([0.1, 0.5])) == pytest.approx(3.5 / 4)


@pytest.mark.parametrize(
    "share, line",
    [
        (0.01, "unknown: 0.01 takes 99 held-out images, and the learner has 30; ask for 0.033 or more"),
        (1.5, "unknown: 1.5 is not a probability"),
        ("x", "unknown: 'x' is not a probability"),
    ],
)
def test_a_share_that_cannot_be_is_one_line(share, line, ncm, images):
    for call in (ncm.predict, ncm.each, lambda some, unknown: ncm.evaluate((some, ["cat"] * len(some)), unknown)):
        with pytest.raises(UserError) as caught:
            call(images[0][:2], unknown=share)
        assert line in str(caught.value) and "\n" not in str(caught.value)


def test_the_share_that_the_line_names_is_enough(ncm, images):
    assert ncm.predict(images[0][:1], unknown=0.033).shape == (1,)


def test_without_held_out_images_one_line_says_how_to_get_them(two_months, images):
    learner = learned(two_months[0], **QUICK, name="ncm", adapt=False)
    assert not len(learner._saved.bookkeeping.features), "nothing is kept that cannot be used"
    with pytest.raises(UserError, match="unknown: .*held_out=20"):
        learner.predict(images[0], unknown=0.05)


def test_a_saved_learner_its_versions_and_its_answers_refuse_the_same(two_months, images, tmp_path):
    learner = learned(two_months[0], **QUICK, **NCM)
    both = np.concatenate(images)
    first = learner.familiarity(both)
    learner.save(tmp_path / "shelf")
    learner.learn(two_months[1])
    second = learner.familiarity(both)
    assert (first != second).any()
    learner.save(tmp_path / "shelf")
    for version, wanted in ((1, first), (2, second)):
        assert np.array_equal(Learner.load(tmp_path / "shelf", version=version).familiarity(both), wanted)
    assert np.array_equal(copy.deepcopy(learner).familiarity(both), second)
    learner.rollback()
    assert np.array_equal(learner.familiarity(both), first)


def test_the_same_script_started_again_refuses_the_same(two_months, images, tmp_path):
    one = learned(*two_months, **QUICK, **NCM, out=tmp_path / "work")
    again = learned(*two_months, **QUICK, **NCM, out=tmp_path / "work")
    assert np.array_equal(one.familiarity(images[1]), again.familiarity(images[1]))
    without = learned(*two_months, **QUICK, **NCM)
    assert np.array_equal(one.familiarity(images[1]), without.familiarity(images[1]))


class Flat:
    """A frozen backbone, whose features are the pixels."""

    def features(self, images):
        return images.reshape(len(images), -1).astype(np.float32)


def test_what_is_kept_of_a_class_depends_neither_on_the_order_of_its_images_nor_on_other_classes():
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (240, 2)), np.arange(240) % 3
    digests = rng.permutation(10**6)[:240]
    held_out = Features.of(np.ones((3, 2), np.float32), np.arange(3), np.arange(3) - 9, True)
    kept = []
    orders = np.arange(240), rng.permutation(240), np.flatnonzero(labels == 1)
    for order in orders:
        features = Features()
        for rows in np.array_split(order, 4):
            split = Split(images[rows], labels[rows])
            choice = chosen(features, split, digests[rows], stays=True)
            noted = dict(enumerate(Flat().features(images[rows])[:7]))  # the others are computed
            features = features_after(choice, held_out, split, digests[rows], Flat(), noted)
        trained = features.rows(~features.held_out & (features.labels == 1))
        kept.append(dict(zip(trained.digests.tolist(), trained.values.tolist())))
        assert len(features) <= 3 * PER_CLASS + 3, "bounded"
        assert features.held_out.sum() == len(np.unique(labels[order])), "those of the last task"
    smallest = sorted(digests[labels == 1])[:PER_CLASS]
    assert kept[0] == kept[1] == kept[2] == {d: images[digests == d][0].tolist() for d in smallest}


@pytest.mark.parametrize("name", ["ease", "mos"])
def test_where_features_grow_and_no_exemplar_is_kept_half_of_the_held_out_images_stand_for_the_learned(
    name, two_months
):
    pytest.importorskip("timm")
    source = two_months[1]
    images, names = arrays(source)
    learner = learned(two_months[0], ([*images[names == "bee"]], ["bee"] * 50), **QUICK, name=name, held_out=10)
    features = learner._saved.bookkeeping.features
    old = features.rows(features.labels < 2)
    assert old.held_out.sum() == len(old) // 2 == 10, "ten of each class were held out"
    known = arrays(two_months[0], "test")[0]
    assert 0 < learner.familiarity(known).min() and len(learner.predict(known, unknown=0.1)) == len(known)


def test_a_class_without_learned_images_has_half_of_those_held_out():
    labels = np.array([0, 0, 0, 1, 1, 2])
    held_out = Features.of(np.ones((6, 2), np.float32), labels, np.array([3, -1, 2, 5, 6, 7]), True)
    learned_now = Split(np.ones((1, 2), np.uint8), np.array([1]))
    choice = chosen(Features(), learned_now, np.array([9]), stays=False)
    found = features_after(choice, held_out, learned_now, np.array([9]), Flat(), {})
    assert dict(zip(found.digests.tolist(), found.held_out.tolist())) == {
        9: False,
        3: True,
        -1: False,
        2: False,
        5: True,
        6: True,
        7: False,
    }


def test_the_smallest_digests_of_each_class_once_each():
    labels, digests = np.array([1, 0, 1, 1, 0, 1]), np.array([5, 9, -3, 5, 2, 8])
    assert smallest_of_classes(labels, digests, 2).tolist() == [0, 1, 2, 4]


def test_a_network_that_is_trained_keeps_features_of_its_present_self(replay, two_months):
    """Of exemplars and the last task's images, none of an earlier network."""
    features = replay._saved.bookkeeping.features
    images = np.concatenate([arrays(source)[0] for source in two_months])
    digests = digests_of(Split(images, np.zeros(len(images), np.int64)), {})
    trained = features.rows(~features.held_out)
    places = [digests.tolist().index(digest) for digest in trained.digests.tolist()]
    now = replay.answers.classifier.features(images[places])
    np.testing.assert_allclose(trained.values.float().numpy(), now, rtol=1e-2, atol=1e-2)
    assert set(trained.labels.tolist()) == {0, 1, 2}


def test_a_server_answers_with_what_is_unknown(ncm, images, tmp_path, monkeypatch):
    testclient = pytest.importorskip("fastapi.testclient", reason="fastapi and httpx are not installed")
    ncm.save(tmp_path / "shelf")
    for name, value in {"SHELF": str(tmp_path / "shelf"), "UNKNOWN": "0.1", "RELOAD_SECONDS": "9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)  # which the server sets
    spec = importlib.util.spec_from_file_location("serve", SERVE)
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    content = io.BytesIO()
    Image.fromarray(images[1][0]).save(content, "png")
    with testclient.TestClient(serve.app) as client:
        answer = client.post("/predict", content=content.getvalue()).json()
    (wanted,) = ncm.each(images[1][:1], unknown=0.1)
    assert (answer["name"], answer["familiarity"]) == (wanted.name, wanted.familiarity)
    assert wanted.name == "unknown" and list(answer["answers"])[0] in ncm.classes


def test_an_image_passes_once_through_a_backbone_that_stays(two_months):
    """The features that the sums are made of are those that are kept; only held-out images are classified again."""
    learner = learned(two_months[0], **QUICK, **NCM)
    passed = []
    features = Classifier.features

    def watched(self, images):
        passed.append(len(images))
        return features(self, images)

    with patch.object(Classifier, "features", watched):
        learner.learn(two_months[1])
    assert sum(passed) == 0
    kept = learner._saved.bookkeeping.features
    images = np.concatenate([arrays(source)[0] for source in two_months])
    digests = digests_of(Split(images, np.zeros(len(images), np.int64)), {}).tolist()
    now = learner.answers.classifier.features(images[[digests.index(digest) for digest in kept.digests.tolist()]])
    np.testing.assert_allclose(kept.values.float().numpy(), now, rtol=1e-2, atol=1e-2)


def test_an_image_with_a_corrected_label_counts_for_its_new_class(two_months):
    images, names = arrays(two_months[0])
    learner = learned((images, names), **QUICK, **NCM)
    features = learner._saved.bookkeeping.features
    cat = learner.classes.index("cat")
    was = features.digests[~features.held_out & (features.labels == cat)][:1]
    digests = digests_of(Split(images, np.zeros(len(images), np.int64)), {})
    learner.learn((images[np.isin(digests, was)], np.array(["ant"])))
    features = learner._saved.bookkeeping.features
    assert cat not in features.labels[np.isin(features.digests, was)]


def test_features_of_classes_that_are_merged_left_out_or_relabelled():
    features = Features.of(np.eye(4, dtype=np.float32), np.array([0, 1, 2, 1]), np.arange(4) + 10, False)
    merged = features.regrouped(np.array([0, -1, 0]))
    assert merged.labels.tolist() == [0, 0] and merged.digests.tolist() == [10, 12]
    assert features.relabelled(np.array([11]), 2).labels.tolist() == [0, 2, 2, 1]


def test_features_follow_classes_that_are_removed_merged_and_relabelled(two_months, images):
    """Of a class that was never learned, of one that is another one now, and of a single image."""
    learner = learned(*two_months, **QUICK, **NCM)
    held = learner._saved.bookkeeping.held_out
    learner.relabel(held.images[held.targets == 0][:3], "bee")
    learner.remove("ant")
    features = learner._saved.bookkeeping.features
    never = learned((two_months[1]), **QUICK, **NCM)
    assert features.labels.max() == 1 and len(features) < len(never._saved.bookkeeping.features) + 3 * PER_CLASS
    held = learner._saved.bookkeeping.held_out
    order = digests_of(held, {}).tolist()
    aside = features.rows(features.held_out)
    assert dict(zip(order, held.targets.tolist())) == dict(zip(aside.digests.tolist(), aside.labels.tolist()))
    assert len(learner.predict(images[0], unknown=0.1)) == len(images[0])
    learner.merge(["bee", "cat"], into="animal")
    assert set(learner._saved.bookkeeping.features.labels.tolist()) == {0}
    assert set(learner.predict(images[0], unknown=0.1)) <= {"animal", "unknown"}


def test_a_damaged_file_of_features_is_refused(ncm, tmp_path):
    wrong = dataclasses.replace(ncm._saved.bookkeeping.features, labels=np.full(3, 99))
    noted = dataclasses.replace(ncm._saved.bookkeeping, features=wrong)
    learner = copy.deepcopy(ncm)
    learner._saved = learner._saved._replace(bookkeeping=noted)
    learner.save(tmp_path / "shelf")
    with pytest.raises(UserError, match="features: not what the rest needs"):
        Learner.load(tmp_path / "shelf")


def test_an_exported_folder_refuses_the_same_and_has_no_features_of_single_images(ncm, images, tmp_path):
    ncm.export(tmp_path / "exported")
    model, both = pycil_wsc.load_exported(tmp_path / "exported"), np.concatenate(images)
    assert np.array_equal(model.familiarity(both), ncm.familiarity(both))
    assert model.predict(both, unknown=0.05).tolist() == ncm.predict(both, unknown=0.05).tolist()
    assert not len(model.features)
    mlflow = pycil_wsc.classifier.export.folder._load_pyfunc(str(tmp_path / "exported"))
    assert mlflow.predict(both, {"unknown": 0.05}).tolist() == ncm.predict(both, unknown=0.05).tolist()


@pytest.mark.slow
def test_a_program_of_torch_has_the_familiarity_as_its_second_output(ncm, images, tmp_path):
    ncm.export(tmp_path / "model.pt2")
    batch = torch.stack([ncm.transform(image) for image in images[1][:5]])
    extra = {"held_out": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra).module()
    logits, familiarity = program(batch)
    assert logits.shape == (5, 3) and json.loads(extra["held_out"]) == 30
    np.testing.assert_allclose(familiarity.numpy(), ncm.familiarity(images[1][:5]), atol=1.5 / 31)


# ---- accuracy without labels -----------------------------------------------------------------------------------------


def test_the_expected_accuracy_of_a_worked_example():
    expected = expected_accuracy(np.array([0.9, 0.5, 0.4]), np.array([True, True, False, True]))
    assert expected == (pytest.approx(60.0), 3, 75.0)


def test_the_accuracy_to_expect_on_the_held_out_images_is_theirs(ncm, images):
    held_out = ncm._saved.bookkeeping.held_out
    expected = ncm.expected_accuracy(held_out.images)
    actual = 100 * (ncm.predict(held_out.images) == np.array(ncm.classes)[held_out.targets]).mean()
    assert expected.held_out == pytest.approx(actual)
    assert expected.accuracy == pytest.approx(100 * ncm.predict_proba(held_out.images).max(1).mean())
    noise = np.random.default_rng(0).integers(0, 256, images[0].shape).astype(np.uint8)
    assert ncm.expected_accuracy(noise).accuracy <= expected.accuracy
    without = learned((images[0], ["ant"] * len(images[0])), **QUICK, name="ncm", adapt=False)
    with pytest.raises(UserError, match="held_out=20"):
        without.expected_accuracy(images[0])


def test_check_tells_the_accuracy_to_expect(ncm, two_months, tmp_path):
    """On the images of known classes."""
    images, names = arrays(two_months[0], "test")
    new = np.concatenate([names[:-5], ["new"] * 5])
    report = ncm.check((images, new))
    wanted = ncm.expected_accuracy(images[:-5])
    assert report.expected == pytest.approx(wanted)
    assert f"accuracy: {wanted.accuracy:.0f} % by how confident the answers are, {wanted.held_out:.0f} %" in str(report)
    learner = learned((images, names), **QUICK, name="ncm", adapt=False)
    assert learner.check((images, new)).expected is None


def test_the_gate_tells_how_many_images_of_new_classes_were_refused_before(ncm, two_months, tmp_path):
    learner, before = copy.deepcopy(ncm), ncm.answers
    entry = learner.learn(month(tmp_path / "march.npz", ["elk"], 3, 50), accept=pycil_wsc.Accept(max_drop=0.9))
    held_out = learner._saved.bookkeeping.held_out
    images = held_out.images[held_out.targets == 3]
    assert entry["gate"]["refused"] == 100 * (before.familiarity(images) <= 0.05).mean()
