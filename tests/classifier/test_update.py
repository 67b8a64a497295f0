"""The five steps of an update, called one by one, and the snapshot that predicts meanwhile."""

import dataclasses
import hashlib
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.small_learners import QUICK, arrays, assert_same, learned, months

from pycil_wsc import Accept
from pycil_wsc.classifier.store.hashes import Hashes, as_digests, sha256_of
from pycil_wsc.classifier.update.judge import judge
from pycil_wsc.classifier.update.prepare import Before, prepare
from pycil_wsc.classifier.update.progress_bar import ProgressBar
from pycil_wsc.classifier.update.publish import folders_of, publish
from pycil_wsc.classifier.update.record import record
from pycil_wsc.classifier.update.train import train
from pycil_wsc.data.images.paths import compact
from pycil_wsc.data.types import Split
from pycil_wsc.errors import UserError
from pycil_wsc.state import peek_state
from pycil_wsc.training.learner import BaseLearner, grow_for

__all__ = ["months"]
pytestmark = pytest.mark.usefixtures("uncounted", "undrawn")


@pytest.fixture(scope="module")
def january(months):
    return learned(months[0], name="replay", held_out=1, **QUICK)


def before(learner, accept=None, out=None):
    bar = ProgressBar(quiet=True)
    return Before(learner.config, learner._saved, learner._answers, learner.held_out, out, bar, accept)


def test_the_five_steps_one_after_the_other_are_what_learn_does(months, tmp_path):
    learner = learned(months[0], name="replay", held_out=1, **QUICK)
    stepwise = learned(months[0], name="replay", held_out=1, **QUICK)
    prepared = prepare(before(stepwise), months[1])
    trained = train(prepared, tmp_path / ".task2")
    judged = judge(trained)
    recorded = record(judged, started=0.0)
    outcome = publish(recorded, folders_of(tmp_path, 2, "any"))
    assert outcome.state is recorded.learner and outcome.answers is recorded.answers and outcome.decision is None

    learner.learn(months[1])
    stepwise._set_state(outcome.state, outcome.answers)
    assert_same(stepwise, learner)
    images = arrays(months[1], "test")[0]
    assert np.array_equal(stepwise.predict_proba(images), learner.predict_proba(images))
    for ours, expected in zip(stepwise.history, learner.history, strict=True):
        assert ours.keys() == expected.keys() and ours["accuracies"] == expected["accuracies"]
        assert ours["data"] == expected["data"] and ours["classes"] == expected["classes"]


def test_no_step_changes_what_it_was_given(january, months, tmp_path):
    state = {name: value.clone() for name, value in january._state["learner"].items() if name != "_extra_state"}
    history, proba = january.history, january.predict_proba(arrays(months[0])[0])
    given = before(january)
    prepared = prepare(given, months[1])
    trained = train(prepared, tmp_path / ".task2")
    judged = judge(trained)
    record(judged, started=0.0)
    assert prepared.learner is given.learner and len(given.config.tasks) == 1 and len(prepared.config.tasks) == 2
    assert not trained.learner.bookkeeping.entries and len(given.learner.bookkeeping.entries) == 1
    assert len(prepared.bookkeeping.held_out) > len(given.learner.bookkeeping.held_out)
    again = judge(trained)
    assert again.answers.temperature == judged.answers.temperature and np.array_equal(again.correct, judged.correct)
    assert all(torch.equal(january._state["learner"][name], value) for name, value in state.items())
    assert january.history == history and np.array_equal(january.predict_proba(arrays(months[0])[0]), proba)


def test_a_rejected_update_is_published_as_its_rejection_alone(january, months, tmp_path):
    images, names = arrays(months[1], "test")
    swapped = np.where(names == "bee", "cat", "bee")  # so that what is learned well is judged to be wrong
    given = before(january, Accept(on=(images, swapped), min_new=0.99), out=tmp_path)
    folders = folders_of(tmp_path, 2, "identity")
    judged = judge(train(prepare(given, months[1]), folders.work))
    outcome = publish(record(judged, started=0.0), folders)
    assert outcome.state is None and outcome.decision == judged.decision and not judged.decision["accepted"]
    assert folders.rejection.is_file() and not folders.work.exists() and not folders.saved.exists()


def test_what_cannot_be_prepared_is_refused_before_a_folder_is_made(january, months, tmp_path):
    again = dataclasses.replace(before(january), out=tmp_path / "out", per_class=0)
    wide = np.zeros((2, 9, 9, 3), np.uint8), np.array(["cat", "dog"])
    with pytest.raises(UserError, match="images of side 9, earlier tasks had 8"):
        prepare(again, wide)
    assert not (tmp_path / "out").exists()


def test_the_hashes_of_very_many_files_are_those_of_each(tmp_path):
    names = [str(tmp_path / f"{number}.bin") for number in range(20)]
    for number, name in enumerate(names):
        Path(name).write_bytes(bytes([number]))
    known = {names[3]: "ab" * 32, "/gone": "cd" * 32}
    hashes = Hashes(Split(compact(names), np.zeros(20, np.int64)), known)
    expected = {name: hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in names} | known
    assert all(hashes[name] == sha256 for name, sha256 in expected.items())
    assert hashes.get("/unknown") is None and "/unknown" not in hashes and names[0] in hashes
    assert hashes.digests.tolist() == as_digests([expected[name] for name in names]).tolist()
    none = Hashes(Split(np.zeros((3, 1, 1, 3), np.uint8), np.zeros(3, np.int64)), known)
    assert none["/gone"] == "cd" * 32 and none.get(names[0]) is None


# ---- the snapshot ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["predict", "predict_proba", "logits", "top"])
def test_a_snapshot_that_predicts_assigns_nothing(january, months, ask):
    """Any number of threads may use it at the same time."""
    images = arrays(months[0], "test")[0]
    expected = getattr(january.answers, ask)(images)
    modules, set_attribute = set(january.answers.classifier.modules()), torch.nn.Module.__setattr__
    assigned = []

    def noted(module, name, value):
        if module in modules:
            assigned.append(name)
        set_attribute(module, name, value)

    with patch.object(torch.nn.Module, "__setattr__", noted):
        given = getattr(january.answers, ask)(images)
    assert not assigned
    assert all(map(np.array_equal, given, expected))


def test_a_snapshot_predicts_in_evaluation_mode_whatever_was_done_to_its_model(january, months):
    learner = learned(months[0], name="replay", **QUICK)
    images = arrays(months[0], "test")[0]
    expected = learner.logits(images)
    learner.model.train()
    assert torch.equal(learner.logits(images), expected)


def test_a_classifier_that_is_moved_is_where_its_tensors_are(months):
    """Nothing else of the learner within changes: the device it was trained on stays noted."""
    classifier = learned(months[0], name="replay", **QUICK).answers.classifier.to("meta")
    learner = classifier.learner
    assert classifier.device == torch.device("meta")
    assert learner.device == learner.precision.device == torch.device("cpu")


@pytest.mark.parametrize("lowered", [True, False])
def test_what_needs_full_precision_asks_for_it_where_the_features_are(lowered):
    """Wherever the learner was trained: ``classify`` of a computed classifier is in fp32 within autocast, too."""
    learner = learned(two_parts()[0], name="ncm").answers.classifier.learner
    learner.precision.device = torch.device("meta")
    features = torch.rand(2, learner.network.backbone.out_dim)
    expected = learner.classify(features)
    with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
        assert torch.equal(learner.classify(features), expected)


@pytest.mark.parametrize("name", ["ncm", "slda", "ranpac", "fecam"])
def test_updates_share_one_backbone_and_learn_as_if_each_made_its_own(name):
    first, second = two_parts()
    learner, other = (learned(first, name=name, held_out=1) for _ in range(2))
    backbone, snapshot = learner.answers.backbone, learner.answers
    expected = snapshot.logits(first[0])
    with patch.object(BaseLearner, "new_backbone") as made:
        learner.learn(second)
    assert not made.called and learner.answers.backbone is backbone
    with patch("pycil_wsc.classifier.update.train._backbone_to_lend", return_value=None):
        other.learn(second)
    assert other.answers.backbone is not backbone
    assert_same(learner, other)
    assert [line["parameters"] for line in learner.history] == [line["parameters"] for line in other.history]
    assert torch.equal(learner.logits(first[0]), other.logits(first[0]))
    assert torch.equal(snapshot.logits(first[0]), expected)


def test_whatever_is_done_to_a_model_before_or_after_an_update_the_next_one_predicts_as_if_it_had_not():
    first, second = two_parts()
    learner, other = (learned(first, second, name="ncm", held_out=1) for _ in range(2))
    third = first[0][::-1].copy(), first[1] + 1
    other.learn(third)
    model = learner.model
    with torch.no_grad():
        next(model.parameters()).add_(1)
        for name, buffer in model.named_buffers():
            if "head." in name:
                buffer.add_(1)
    learner.learn(third)
    model.half()
    assert_same(learner, other)
    assert torch.equal(learner.logits(first[0]), other.logits(first[0]))


@pytest.mark.parametrize("name", ["ncm", "slda", "ranpac", "fecam", "acil", "ds-al"])
def test_an_update_changes_nothing_of_the_state_before(name):
    first, second = two_parts()
    learner = learned(first, name=name, held_out=1)
    before = learner._state["learner"]
    copies = {place: tensor.clone() for place, tensor in before.items() if torch.is_tensor(tensor)}
    learner.learn(second)
    after = learner._state["learner"]
    assert all(torch.equal(before[place], copy) for place, copy in copies.items())
    heads = {place: copy for place, copy in copies.items() if place.startswith("network.head.")}
    assert not all(torch.equal(after[place], copy) for place, copy in heads.items())


def two_parts():
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (24, 8, 8, 3), np.uint8), np.arange(24) % 3
    return (images[:20], labels[:20]), (images[20:], labels[20:])


def test_the_work_of_an_update_of_one_image_does_not_grow_with_updates_or_classes(tmp_path):
    """Names that are hashed, growths of the network, and saved files that are opened."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (45, 8, 8, 3), np.uint8)
    learner = learned((images[:40], np.arange(40)), name="ncm")
    learner.save(tmp_path)
    work = []
    for image in range(40, 45):
        with (
            patch("pycil_wsc.training.learner.grow_for", side_effect=grow_for) as grown,
            patch("pycil_wsc.classifier.store.hashes.sha256_of", side_effect=sha256_of) as hashed,
            patch("pycil_wsc.classifier.store.versions.peek_state", side_effect=peek_state) as opened,
        ):
            learner.learn((images[image : image + 1], np.array([7])))
            learner.save(tmp_path, versions=3)
        work.append((grown.call_count, hashed.call_count, opened.call_count))
    assert len(set(work[2:])) == 1 and work[-1][-1] == 1, work  # the version's file has two names
    assert max(work[-1]) < 10, work
