"""Images learned under a wrong class and again under the right one: as if the wrong one had never been learned."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from support.small_learners import FILES, learned

from pycil_wsc import Accept, Learner
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.errors import UserError
from pycil_wsc.methods.closed_form.fecam import FeCAM, Mahalanobis
from pycil_wsc.methods.closed_form.ranpac import HELD_OUT, is_held_out

EXACT = ["acil", "fecam", "ncm", "ranpac", "slda"]
KEYS = {"convnet_type": "resnet8", "image_size": 8, "device": "cpu", "precision": "fp32", "num_workers": 0}
KEYS |= {"projection": 64, "buffer_size": 96, "init_epoch": 1, "inplace_repeat": 2}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Image files of four digits: label -> files."""
    folder = tmp_path_factory.mktemp("photographs")
    train = load_dataset("digits", ".").train
    files = {}
    for label in range(4):
        images = train.images[train.targets == label][: 16 + label]
        files[label] = [str(folder / f"{label}-{number}.png") for number in range(len(images))]
        for path, image in zip(files[label], images, strict=True):
            Image.fromarray(image).save(path)
    return files


def task(*groups):
    """(files, class names) of groups of files that have one name each."""
    files = [file for group, _ in groups for file in group]
    return files, [name for group, name in groups for _ in group]


def taught(name, *tasks):
    """A learner whose backbone is the same whatever it learns."""
    keys = KEYS | ({} if name == "acil" else {"adapt": False})
    torch.manual_seed(0)
    learner = Learner(name, quiet=True, **keys)
    learner.learn(tasks[0])
    for source in tasks[1:]:
        learner.learn(source)
    return learner


def by_name(learner, files, names):
    logits = learner.logits(files).double().numpy()
    return logits[:, [learner.classes.index(name) for name in names]]


def assert_equal(learner, reference, files):
    names = reference.classes
    logits, expected = by_name(learner, files, names), by_name(reference, files, names)
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def counts_of(learner, name="counts"):
    counts = learner._state["learner"][f"network.head.{name}"].tolist()
    return dict(zip(learner.classes, counts, strict=True))


def everything(photographs):
    return [file for files in photographs.values() for file in files]


@pytest.mark.parametrize("name", [name for name in EXACT if name != "acil"])
def test_a_corrected_label_replaces_the_old_one_as_if_that_had_never_been_learned(name, photographs):
    p = photographs
    wrong = task((p[0], "zero"), (p[1][:12], "one"), (p[1][12:], "zero"), (p[2], "two"))
    right = task((p[1][12:], "one"), (p[3], "three"))
    learner = taught(name, wrong, right)
    assert_equal(learner, taught(name, task((p[0], "zero"), (p[1][:12], "one"), (p[2], "two")), right), everything(p))
    assert learner.history[-1]["relabelled"] == [{"was": "zero", "now": "one", "images": len(p[1][12:])}]


@pytest.mark.parametrize("name", [name for name in EXACT if name != "acil"])
def test_a_class_whose_images_all_have_another_name_now_is_never_answered(name, photographs, tmp_path):
    p = photographs
    learner = taught(name, task((p[0], "zero"), (p[1], "uno")))
    learner.save(tmp_path / "shelf")
    learner = Learner.load(tmp_path / "shelf", quiet=True)
    learner.learn(task((p[1], "one"), (p[2], "two")))
    reference = taught(name, task((p[0], "zero"), (p[1], "one")), task((p[2], "two")))
    assert_equal(learner, reference, everything(p))
    gone = learner.classes.index("uno")
    assert "uno" not in learner.predict(everything(p)) and not learner.predict_proba(everything(p))[:, gone].any()
    learner.learn(task((p[1][:5], "uno")))  # and back again
    assert_equal(
        learner, taught(name, task((p[0], "zero"), (p[1][5:], "one"), (p[1][:5], "uno"), (p[2], "two"))), everything(p)
    )


def test_an_image_that_two_tasks_have_learned_with_two_classes_counts_once_when_it_comes_again(photographs):
    """It is in the sums of both."""
    p = photographs
    learner = taught("slda", task((p[0], "zero"), (p[1], "one")))
    saved = learner._saved
    none = np.empty(0, np.int64)
    learner._set_state(saved._replace(bookkeeping=dataclasses.replace(saved.bookkeeping, learned=none, images=none)))
    learner.learn(task((p[1][:4], "zero")))  # known by no record: it is in both now
    both = np.union1d(saved.bookkeeping.learned, learner._saved.bookkeeping.learned)
    noted = learner._saved.bookkeeping
    learner._set_state(learner._saved._replace(bookkeeping=dataclasses.replace(noted, learned=both)))
    learner.learn(task((p[1][:4], "one"), (p[2], "two")))
    assert_equal(learner, taught("slda", task((p[0], "zero"), (p[1], "one")), task((p[2], "two"))), everything(p))


def test_copies_of_an_image_in_one_class_are_learned_once(photographs, tmp_path):
    p = photographs
    copy = tmp_path / "copy.png"
    copy.write_bytes(open(p[0][0], "rb").read())
    learner = taught("ncm", task(([*p[0], str(copy)], "zero"), (p[1], "one")))
    assert counts_of(learner) == {"zero": len(p[0]), "one": len(p[1])}


def test_a_file_that_is_in_two_classes_of_one_task_has_both(photographs):
    p = photographs
    learner = taught("ncm", task((p[0], "zero"), (p[1], "one")), task((p[0][:1], "both"), (p[0][:1], "zero")))
    assert counts_of(learner) == {"zero": len(p[0]), "one": len(p[1]), "both": 1}


def test_acil_moves_each_repeat_of_an_image_and_its_gram_matrix_stays(photographs):
    """Its backbone has learned the first task, wrong labels included: the sums alone are corrected."""
    p = photographs
    learner = taught("acil", task((p[0], "zero"), (p[1], "one")))
    before = learner._state["learner"]
    learner.learn(task((p[1][:4], "zero")))
    after = learner._state["learner"]
    assert torch.equal(before["network.head.sums.gram"], after["network.head.sums.gram"])
    assert counts_of(learner, "sums.counts") == {"zero": 2 * (len(p[0]) + 4), "one": 2 * (len(p[1]) - 4)}
    features = learner.answers.classifier.features(p[1][:4])
    inputs = (torch.from_numpy(features) @ after["network.head.projection"]).relu().double()
    zero = learner.classes.index("zero")
    moved = after["network.head.sums.products"][:, zero] - before["network.head.sums.products"][:, zero]
    assert torch.allclose(moved, 2 * inputs.sum(0), rtol=1e-4, atol=1e-4)


def test_what_ds_al_cannot_take_out_is_said(photographs, capsys):
    p = photographs
    learner = learned(task((p[0], "zero"), (p[1], "one")), name="ds-al", **FILES | {"quiet": False})
    learner.learn(task((p[1][:1], "zero")))
    assert "'ds-al' cannot take that out again" in capsys.readouterr().out
    with pytest.raises(UserError, match="the learner has all of its images already"):
        learner.learn(task((p[1][:1], "zero")))


# ---- methods that train ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["derpp", "replay", "wsc"])
def test_an_exemplar_gets_the_class_with_which_it_comes_again(name, photographs, capsys):
    p = photographs
    source = task((p[0], "zero"), (p[1], "one"))
    keys = {"memory_update": "task"} if name == "derpp" else {}
    learner = learned(source, name=name, **FILES | keys | {"memory_per_class": "all", "quiet": False})
    images = learner._held.train.images
    moved = [file for file in p[1][:4] if file in images]
    learner.learn(task((moved, "zero")))
    held = dict(zip(learner._held.train.images.tolist(), learner._held.train.targets.tolist(), strict=True))
    assert len(held) == len(learner._held.train) == len(p[0]) + len(p[1]), "each once"
    assert all(held[file] == learner.classes.index("zero") for file in moved)
    line = capsys.readouterr().out
    assert f"4 images were learned as another class before: {moved[0]} (was 'one', now 'zero')" in line


def test_a_class_all_of_whose_exemplars_have_another_name_now_is_one_without_exemplars(photographs):
    p = photographs
    learner = learned(task((p[0], "zero"), (p[1], "uno")), name="replay", **FILES | {"memory_per_class": "all"})
    learner.learn(task((p[1], "one")))
    learner.learn(task((p[2], "two")))
    counts = dict(zip(learner.classes, np.bincount(learner._held.train.targets, minlength=4).tolist(), strict=True))
    assert counts == {"zero": len(p[0]), "uno": 0, "one": len(p[1]), "two": len(p[2])}


def test_a_rejected_correction_changes_nothing(photographs):
    p = photographs
    learner = taught("ncm", task((p[0], "zero"), (p[1], "one")))
    before, logits = learner._saved, learner.logits(everything(p))
    tests = task((p[0], "zero"), (p[1], "one"))
    line = learner.learn(task((p[1], "zero"), (p[2], "two")), Accept(on=tests))
    assert not line["accepted"] and learner._saved is before and torch.equal(learner.logits(everything(p)), logits)


# ---- check -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ncm", "replay"])
def test_check_names_the_images_that_were_learned_with_another_class(name, photographs):
    p = photographs
    keys = {"adapt": False} if name == "ncm" else {"memory_per_class": 2}
    learner = learned(task((p[0], "zero"), (p[1], "one")), name=name, **FILES | keys)
    report = learner.check(task((p[1][:4], "zero"), (p[2], "two")))
    assert report.relabelled == [(file, "one") for file in p[1][:4]] and not report.fine
    assert f"another class: {p[1][0]} was 'one' before" in str(report)
    assert not report.duplicates and not learner.check(task((p[2], "two"))).relabelled


# ---- the heads -------------------------------------------------------------------------------------------------------


def relu_features(count, width, seed):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).relu()


def test_what_ranpac_holds_out_depends_on_the_image_alone_and_is_a_fifth():
    features, direction = relu_features(5000, 64, 0).double(), relu_features(1, 64, 1)[0].double() - 0.4
    held_out = is_held_out(features, direction)
    assert abs(held_out.float().mean() - 1 / HELD_OUT) < 0.02
    assert torch.equal(is_held_out(features[7:99], direction), held_out[7:99])
    assert not is_held_out(torch.zeros(3, 64).double(), direction).any()
    rounded = features.float().double() * (1 + 1e-7)
    assert (is_held_out(rounded, direction) != held_out).float().mean() < 1e-3


@pytest.mark.parametrize("left", [1, 2, 7])
def test_fecam_forgets_a_feature_that_only_images_taken_out_had(left):
    """The mean covariance counts the pairs of features that vary, so a rounding instead of 0 would change it."""
    options = FeCAM.Options()
    wrong, right = relu_features(40, 24, 0), relu_features(left, 24, 1)
    right[:, :9] = 0
    corrected, expected = (Mahalanobis(24, options, torch.float64) for _ in range(2))
    for head in (corrected, expected):
        head.grow(2)
        head.add(relu_features(9, 24, 2), torch.zeros(9, dtype=torch.int64))
    ones = torch.ones(40 + left, dtype=torch.int64)
    corrected.add(torch.cat([wrong, right]), ones)
    corrected.remove(wrong, ones[:40])
    expected.add(right, ones[:left])
    for head in (corrected, expected):
        head.solve()
    some = relu_features(20, 24, 3)
    difference = (corrected(some) - expected(some)).abs().max()
    assert difference < 1e-4 * expected(some).abs().max()
