"""Classes that are renamed, merged and removed, and images that get another class, without a task."""

import copy
import itertools
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from support.months import month, photos
from support.small_learners import FILES, QUICK, arrays, assert_same, dies_at, learned
from support.small_runs import suited

from pycil_wsc import Learner, registry
from pycil_wsc.classifier.predict.rebuild import Reached, grown
from pycil_wsc.classifier.update.class_rows import Regrouping, regrouped_state
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.data.images.sources import read_source
from pycil_wsc.errors import UserError
from pycil_wsc.methods.closed_form.closed_form import ClosedForm

pytestmark = pytest.mark.usefixtures("uncounted", "undrawn")
EXACT = ["fecam", "ncm", "ranpac", "slda"]
KEYS = {"convnet_type": "tiny", "image_size": 8, "device": "cpu", "precision": "fp32", "num_workers": 0}
KEYS |= {"projection": 64, "buffer_size": 96, "adapt": False, "quiet": True}


@pytest.fixture(scope="module")
def months(tmp_path_factory):
    """Three months of arrays, of which each has new classes."""
    folder = tmp_path_factory.mktemp("months")
    classes = [["ant", "bee", "cat"], ["dog", "elk"], ["fox", "ant"]]
    return [month(folder / f"{number}.npz", names, number) for number, names in enumerate(classes)]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Image files of four digits: label -> files."""
    folder = tmp_path_factory.mktemp("digits")
    train = load_dataset("digits", ".").train
    files = {}
    for label in range(4):
        images = train.images[train.targets == label][: 6 + label]
        files[label] = [str(folder / f"{label}-{number}.png") for number in range(len(images))]
        for path, image in zip(files[label], images, strict=True):
            Image.fromarray(image).save(path)
    return files


def task(*groups):
    """(files, class names) of groups of files that have one name each."""
    return [file for group, _ in groups for file in group], [name for group, name in groups for _ in group]


def taught(name, *tasks, **keys):
    """A learner whose backbone is the same whatever it learns."""
    torch.manual_seed(0)
    learner = Learner(name, **KEYS | keys)
    for source in tasks:
        learner.learn(source)
    return learner


def assert_alike(learner, reference, digits):
    """To rounding, and both learn the same from then on."""
    files = sum(digits.values(), [])
    names = reference.classes
    assert sorted(learner.classes) == sorted(names)
    logits = learner.logits(files).double().numpy()[:, [learner.classes.index(name) for name in names]]
    expected = reference.logits(files).double().numpy()
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
    ours, theirs = (each._saved.bookkeeping for each in (learner, reference))
    assert np.array_equal(ours.learned, theirs.learned) and np.array_equal(ours.images, theirs.images)
    assert np.array_equal(ours.perceptual.digests, theirs.perceptual.digests)


# ---- methods that compute their classifier ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_a_removed_class_is_as_if_it_had_never_been_learned(name, digits):
    d = digits
    learner = taught(name, task((d[0], "zero"), (d[1], "one")), task((d[2], "two")))
    everything = task((d[1], "whatever"), (d[2], "its folder says"))
    assert learner.remove("one", None if name in ("ncm", "fecam") else everything)["did"] == "removed"
    assert_alike(learner, taught(name, task((d[0], "zero")), task((d[2], "two"))), digits)
    if name == "slda":
        again = task((d[1], "one"), (d[3], "three"))
        learner.learn(again)
        assert_alike(learner, taught(name, task((d[0], "zero")), task((d[2], "two")), again), digits)


def as_arrays(*groups):
    """The pixels of :func:`task`."""
    files, names = task(*groups)
    return np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files]), names


@pytest.mark.parametrize("name", EXACT)
def test_of_arrays_a_class_of_a_later_task_is_as_if_it_had_never_been_learned(name, digits):
    d = digits
    first, only = as_arrays((d[0], "zero"), (d[3], "three")), as_arrays((d[2], "two"))
    learner = taught(name, first, as_arrays((d[1], "one"), (d[2], "two")))
    learner.remove("one", None if name in ("ncm", "fecam") else as_arrays((d[1], "one")))
    assert_alike(learner, taught(name, first, only), digits)


def test_arrays_stay_normalised_by_the_first_task_when_a_class_of_it_is_removed(digits):
    """What then differs from a learner that never had the class, and all that differs."""
    d = digits
    both, later = as_arrays((d[0], "zero"), (d[1], "one")), as_arrays((d[2], "two"))
    learner = taught("slda", both, later)
    info = learner._held.info
    learner.remove("one", as_arrays((d[1], "one")))
    never = taught("slda", as_arrays((d[0], "zero")), later)
    assert (learner._held.info.mean, learner._held.info.std) == (info.mean, info.std)
    assert learner._held.info.mean != never._held.info.mean
    assert torch.equal(
        learner._state["learner"]["network.head.sums.counts"], never._state["learner"]["network.head.sums.counts"]
    )


def test_held_out_images_of_other_classes_stay_when_a_class_is_removed(digits):
    d = digits
    learner = taught("ncm", task((d[1], "one"), (d[2], "two"), (d[3], "three")), held_out=1)
    aside = learner._saved.bookkeeping.held_out
    images = aside.images[aside.targets != learner.classes.index("one")].tolist()
    learner.remove("one")
    assert learner._saved.bookkeeping.held_out.images.tolist() == images


@pytest.mark.parametrize("name", EXACT)
def test_merged_classes_are_as_if_they_had_been_learned_as_one(name, digits):
    d = digits
    learner = taught(name, task((d[0], "zero"), (d[1], "one")), task((d[2], "two"), (d[3], "three")))
    learner.merge(["three", "one"], into="odd")
    assert learner.classes == ["odd", "zero", "two"]
    assert_alike(learner, taught(name, task((d[0], "zero"), (d[1], "odd")), task((d[2], "two"), (d[3], "odd"))), digits)


@pytest.mark.parametrize("name", EXACT)
def test_relabelled_images_are_as_if_they_had_been_learned_so_and_no_task_is_added(name, digits):
    d = digits
    learner = taught(name, task((d[0] + d[1][:4], "zero"), (d[1][4:], "one")), task((d[2], "two")))
    learner.relabel(d[1][:6], "one")
    assert_alike(learner, taught(name, task((d[0], "zero"), (d[1], "one")), task((d[2], "two"))), digits)
    assert len(learner.history) == 2
    (change,) = learner.history[-1]["changes"]
    assert (change["did"], change["classes"], change["to"], change["images"]) == ("relabelled", ["zero"], "one", 4)


def test_acil_removes_and_relabels_each_repeat_of_an_image(digits):
    """Its backbone has learned the first task, so only the sums are as they would have been."""
    d = digits
    keys = {"inplace_repeat": 2, "init_epoch": 1, "adapt": True}
    learner = taught("acil", task((d[0], "zero"), (d[1], "one")), task((d[2], "two")), **keys)
    before = learner._state["learner"]["network.head.sums.counts"].tolist()
    assert learner.classes == ["one", "zero", "two"] and before == [2 * len(d[label]) for label in (1, 0, 2)]
    learner.relabel(d[1][:3], "zero")
    learner.remove("two", task((d[2], "two")))
    state = learner._state["learner"]
    assert state["network.head.sums.counts"].tolist() == [before[0] - 6, before[1] + 6]
    inputs = torch.from_numpy(learner.answers.classifier.features(d[0] + d[1]))
    wide = (inputs @ state["network.head.projection"]).relu().double()
    assert torch.allclose(state["network.head.sums.gram"], 2 * wide.T @ wide, rtol=1e-4, atol=1e-4)


def test_what_was_learned_under_another_name_is_known_under_the_present_one(digits):
    d = digits
    learner = taught("ranpac", task((d[0], "zero"), (d[1], "one")))
    learner.rename("one", "uno")
    learner.merge(["zero", "uno"], into="few")
    with pytest.raises(UserError, match="has all of its images already"):
        learner.learn(task((d[0], "few"), (d[1], "few")))
    learner.learn(task((d[1], "one"), (d[2], "two")))  # and not under the former one: these are corrections
    assert_alike(learner, taught("ranpac", task((d[0], "few")), task((d[1], "one"), (d[2], "two"))), digits)


# ---- methods that train ----------------------------------------------------------------------------------------------


def of_grown(name, seen):
    """A learner of ``name`` with new weights, and its configuration and classes; ``tiny`` networks."""
    keys = {"convnet_type": "tiny", "device": "cpu", "precision": "fp32", "buffer_size": 64, "projection": 64}
    source = Learner(name, **keys | suited(name))
    images = np.zeros((1, 8, 8, 3), np.uint8)
    info = read_source((images, ["any"])).info
    info = info.__class__(**{**vars(info), "classes": tuple(map(str, range(seen[-1])))})
    config = copy.copy(source.config)
    object.__setattr__(config, "tasks", ("npz:any",) * len(seen))
    return grown(config, info, Reached.of_stream(seen)), config, info


@pytest.mark.parametrize("name", sorted(set(registry.learners) - {"il2a"}))
def test_the_networks_of_every_learner_without_two_classes_are_those_of_fewer_classes(name):
    """The rows of the others are what they were."""
    seen, groups = (3, 5, 7), [[0], [2], [3], [5], [6]]
    learner, config, info = of_grown(name, seen)
    regrouping = Regrouping(groups, tuple("acdfg"), seen)
    assert regrouping.seen_afterwards == (2, 3, 5)
    mean = not isinstance(learner, ClosedForm)
    state = regrouped_state(learner.state_dict(), config, info, regrouping, mean)
    fewer, *_ = of_grown(name, (2, 3, 5))
    fewer.load_state_dict(state)
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    learner.eval()
    fewer.eval()
    with torch.no_grad():
        logits, expected = fewer.predict(images), learner.predict(images)[:, [group[0] for group in groups]]
    # a computed head has no images yet, and the scores of two methods are normalised over all classes
    if logits.isfinite().all() and name not in ("lae", "mos"):
        assert torch.allclose(logits, expected, atol=1e-5)


def test_a_network_with_parts_of_several_classes_is_refused_in_one_line():
    learner, config, info = of_grown("il2a", (3, 5))
    with pytest.raises(UserError, match="'il2a' has parts that belong to several classes at once"):
        regrouped_state(learner.state_dict(), config, info, Regrouping([[0], [1], [2]], tuple("abc"), (3, 5)), True)


@pytest.mark.parametrize("name", ["beef", "cls_er", "derpp", "ewc", "podnet", "xder"])
def test_exemplars_rows_and_what_a_method_keeps_follow_and_it_learns_on(name, months, tmp_path):
    own = {"memory_update": "task"} if name in ("cls_er", "derpp") else {}
    own |= {"memory_size": 20} if name == "xder" else {}  # which it divides: four of each class
    learner = learned(*months[:2], name=name, held_out=2, **QUICK | own)
    images, names = arrays(months[0])
    logits, former = learner.logits(images), learner.classes
    learner.remove("bee")
    learner.merge(["ant", "dog"], into="pet")
    assert learner.classes == ["pet", "cat", "elk"]
    assert [each["classes"] for each in learner.history] == [["pet", "cat"], ["elk"]]
    logits_now = learner.logits(images)[:, 1:]
    assert torch.allclose(logits_now, logits[:, [former.index("cat"), former.index("elk")]], atol=1e-5)
    held = learner._held
    assert np.bincount(held.train.targets).tolist() == [8, 4, 4] if name != "ewc" else not len(held.train)
    assert set(learner._saved.bookkeeping.held_out.targets.tolist()) == {0, 1, 2}
    learner.save(tmp_path / "shelf")
    learner = Learner.load(tmp_path / "shelf", quiet=True)
    learner.relabel(images[names == "cat"], "pet")
    assert set(learner._held.train.targets.tolist()) <= {0, 2}
    learner.learn(months[2])
    assert learner.history[-1]["num_seen"] == len(learner.classes)


def test_a_merged_class_has_the_mean_of_the_rows_and_the_exemplars_in_turn(months):
    learner = learned(months[0], name="replay", **QUICK)
    before = learner._state["learner"]
    head, kept = before["network.head.weight"], before["_extra_state"]["memory"]["classes"]
    first, second = (learner.classes.index(name) for name in ("ant", "bee"))
    turns = [index for pair in zip(kept[first], kept[second]) for index in pair]
    learner.merge(["bee", "ant"], into="bee")
    after = learner._state["learner"]
    assert torch.equal(after["network.head.weight"][0], head[[first, second]].mean(0))
    assert after["_extra_state"]["memory"]["classes"][0] == turns


def test_all_classes_of_the_first_task_can_go(months):
    learner = learned(*months[:2], name="replay", **QUICK)
    new = learner.history[1]["classes"]
    for name in learner.history[0]["classes"]:
        learner.remove(name)
    assert learner.classes == new
    learner.learn(months[2])


# ---- history, versions, kills and clients ----------------------------------------------------------------------------


def test_a_change_is_a_version_that_rollback_undoes(months, tmp_path):
    learner = learned(months[0], name="replay", **QUICK)
    learner.save(tmp_path / "shelf")
    before = Learner.load(tmp_path / "shelf", quiet=True)
    learner.remove("ant")
    assert learner.version is None
    learner.rollback()  # what was not saved
    assert_same(learner, before)
    learner.rename("ant", "formica")
    learner.save(tmp_path / "shelf")
    assert [each["classes"] for each in Learner.versions(tmp_path / "shelf")] == [before.classes, learner.classes]
    assert "formica" in learner.classes and learner.history[-1]["changes"][0]["to"] == "formica"
    learner.rollback()
    assert_same(learner, before)
    assert "changes" not in learner.history[-1]


CHANGES = {
    "rename": lambda learner, cats: learner.rename("ant", "formica"),
    "merge": lambda learner, cats: learner.merge(["ant", "bee"], into="insect"),
    "remove": lambda learner, cats: learner.remove("ant"),
    "relabel": lambda learner, cats: learner.relabel(cats, "ant"),
}


@pytest.mark.parametrize("name", ["replay", "ncm"])
@pytest.mark.parametrize("change", CHANGES)
def test_killed_at_any_moment_the_folder_has_the_learner_before_or_after_the_change(name, change, months, tmp_path):
    own = {"adapt": False} if name == "ncm" else {}
    learner = learned(months[0], name=name, **QUICK, **own)
    images, names = arrays(months[0])
    before = copy.copy(learner)
    before.save(tmp_path / "before")
    after = copy.copy(before)
    CHANGES[change](after, images[names == "cat"])
    for moment in itertools.count():
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(moment))
        saved = copy.copy(after)
        survived = dies_at(moment, lambda saved=saved, folder=folder: saved.save(folder))
        found = Learner.load(folder, quiet=True)
        assert_same(found, after if found.version == 2 else before)
        assert found.history[-1].get("changes") == (after if found.version == 2 else before).history[-1].get("changes")
        if survived:
            break
    assert moment > 3 and found.version == 2


def test_a_script_with_a_folder_finds_its_work_only_after_the_same_changes(months, tmp_path):
    def script(*names):
        learner = learned(months[0], name="replay", out=tmp_path / "out", **QUICK)
        for name in names:
            learner.remove(name)
        learner.learn(months[1])
        return learner

    first = script("ant")
    assert_same(script("ant"), first)
    with pytest.raises(UserError, match="was learned from other images"):
        script()


@pytest.mark.parametrize("number", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_clients_get_answers_of_the_version_that_they_name_during_changes_and_rollbacks(number, months, tmp_path):
    """Some ask a learner that reloads its folder, the others the one that changes."""
    images, names = arrays(months[0])
    learner = learned(months[0], name="ncm", adapt=False, held_out=2, **QUICK)
    shelf = tmp_path / "shelf"
    learner.save(shelf, versions=50)
    served = Learner.load(shelf, quiet=True)
    expected, done = {}, threading.Event()

    def noted():
        expected[learner.version] = (
            learner.classes,
            learner.predict_proba(images[:2]),
            learner.familiarity(images[:2]),
        )

    def ask(client):
        asked = []
        while not done.is_set() or not asked:
            if client % 2:
                served.reload()
            answers = (served if client % 2 else learner).answers
            if answers.version is not None:  # not yet saved
                answered = answers.predict_proba(images[:2]), answers.familiarity(images[:2])
                asked.append((answers.version, answers.classes, *answered))
            done.wait(0.01)
        return asked

    changes = [
        lambda: learner.learn(months[1]),
        lambda: learner.rename("ant", "formica"),
        lambda: learner.relabel(images[names == "cat"][:4], "formica"),
        lambda: learner.merge(["formica", "cat"], into="animal"),
        lambda: learner.remove("bee"),
    ]
    noted()
    with ThreadPoolExecutor(number) as pool:
        clients = [pool.submit(ask, client) for client in range(number)]
        try:
            for change in changes:
                change()
                learner.save(shelf, versions=50)
                noted()
            for _ in range(2):
                learner.rollback()
                noted()
        finally:
            done.set()
        answers = [answer for client in clients for answer in client.result()]
    assert len(answers) >= number and len(expected) == len(changes) + 1
    for version, classes, probabilities, familiarity in answers:
        wanted = expected[version]
        assert classes == wanted[0] and np.allclose(probabilities, wanted[1], atol=1e-9)
        assert np.array_equal(familiarity, wanted[2])


# ---- bad input -------------------------------------------------------------------------------------------------------


def bad():
    return {
        "remove: 'emu' is not a learned class; the classes are one, two, zero": lambda k, d: k.remove("emu"),
        "remove: 'slda' needs the images that it has learned as 'one'": lambda k, d: k.remove("one"),
        "remove: 3 of the images that were learned as 'one' are here, of 7; give all": (
            lambda k, d: k.remove("one", task((d[1][:3], "one")))
        ),
        "remove: no-such-folder": lambda k, d: k.remove("one", "folder:no-such-folder"),
        "rename: 'two' is a learned class, too": lambda k, d: k.rename("one", "two"),
        "rename: 7 is not a learned class": lambda k, d: k.rename(7, "seven"),
        "rename: '' is blank; give the class a name": lambda k, d: k.rename("one", ""),
        "rename: ' ' is blank": lambda k, d: k.rename("one", " "),
        "rename: 5 is not the name of a class": lambda k, d: k.rename("one", 5),
        r"rename: 'u\\nno' has a control character; leave it out": lambda k, d: k.rename("one", "u\nno"),
        "rename: 'one' is called so already": lambda k, d: k.rename("one", "one"),
        "merge: ' ' is blank": lambda k, d: k.merge(["zero", "one"], into=" "),
        r"merge: 'a\\tb' has a control character": lambda k, d: k.merge(["zero", "one"], into="a\tb"),
        "relabel: ' ' is not a learned class": lambda k, d: k.relabel(d[1], " "),
        "labels: class name ' ' is blank; give the class a name": lambda k, d: k.learn(task((d[3], " "))),
        r"labels: class name 'a\\nb' has a control character": lambda k, d: k.learn(task((d[3], "a\nb"))),
        "merge: 'one' is not a list of classes": lambda k, d: k.merge("one", into="two"),
        r"merge: \['one'\] is not a list of two classes": lambda k, d: k.merge(["one"], into="one"),
        "merge: 'two' is another learned class": lambda k, d: k.merge(["zero", "one"], into="two"),
        "relabel: 2 of 3 images were never learned, such as": lambda k, d: k.relabel(d[3][:2] + d[1][:1], "one"),
        "relabel: 1 of 4 images were never learned, such as": (
            lambda k, d: k.relabel([*[d[1][0]] * 3, d[3][0]], "one")
        ),
        "relabel: all of these images are learned as 'one' already": lambda k, d: k.relabel(d[1], "one"),
        "relabel: 'emu' is not a learned class": lambda k, d: k.relabel(d[1], "emu"),
        "relabel: .*no-such-file": lambda k, d: k.relabel(["no-such-file.png"], "one"),
    }


@pytest.fixture(scope="module")
def of_three(digits):
    return taught("slda", task((digits[0], "zero"), (digits[1], "one"), (digits[2], "two")))


@pytest.mark.parametrize("message", bad())
def test_bad_input_is_one_line_and_changes_nothing(message, of_three, digits):
    before = of_three._saved
    with pytest.raises(UserError, match=message) as error:
        bad()[message](of_three, digits)
    assert "\n" not in str(error.value) and of_three._saved is before


def test_a_name_that_differs_from_another_by_case_or_spaces_is_told(digits, capsys):
    learner = taught("ncm", task((digits[0], "zero"), (digits[1], "one")), quiet=False)
    assert "are two classes" not in capsys.readouterr().out
    learner.learn(task((digits[2], "Zero ")))
    line = "'Zero ' and 'zero' are two classes; if they are one, merge(['Zero ', 'zero'], into='zero')"
    assert line in capsys.readouterr().out
    learner.rename("one", "ZERO")
    assert "'one' is called 'ZERO' now; 'ZERO' and 'zero' are two classes; if" in capsys.readouterr().out
    learner.merge(["ZERO", "zero", "Zero "], into="zero")
    assert "are two classes" not in capsys.readouterr().out


def test_the_only_class_and_what_ds_al_has_learned_cannot_be_removed(digits):
    learner = taught("ncm", task((digits[0], "zero")))
    with pytest.raises(UserError, match="'zero' is the only class; start a new learner"):
        learner.remove("zero")
    learner = taught("ds-al", task((digits[0], "zero"), (digits[1], "one")), init_epoch=1)
    for change in (lambda: learner.remove("one"), lambda: learner.relabel(digits[1], "zero")):
        with pytest.raises(UserError, match="'ds-al' cannot take out what it has learned; start a new learner"):
            change()


def test_held_out_images_follow_their_class(tmp_path):
    source = photos(tmp_path / "photos", ["cat", "ant"], 1, count=10)
    learner = learned(source, name="ncm", adapt=False, held_out=2, **FILES)
    aside = learner._saved.bookkeeping.held_out
    wrong = str(aside.images[aside.targets == learner.classes.index("cat")][0])
    learner.relabel([wrong], "ant")
    now = learner._saved.bookkeeping.held_out
    assert now.targets[now.images == wrong].tolist() == [learner.classes.index("ant")]
    learner.remove("cat")
    assert set(learner._saved.bookkeeping.held_out.targets.tolist()) == {0}


@pytest.mark.parametrize("method", ["rename", "merge", "remove", "relabel"])
def test_nothing_is_changed_before_something_is_learned(method):
    arguments = {"rename": ("a", "b"), "merge": (["a", "b"], "a"), "remove": ("a",), "relabel": ([], "a")}[method]
    with pytest.raises(UserError, match="nothing has been learned yet; call learn first"):
        getattr(Learner("ncm"), method)(*arguments)


@pytest.mark.parametrize("change", ["rename", "remove"])
def test_a_class_is_changed_by_its_name_in_another_unicode_form_too(change, digits):
    """Its images then count as images of the new name, or of none."""
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    changed = []
    for spelling in (composed, decomposed):
        learner = taught("ncm", task((digits[0], composed), (digits[1], "tea")))
        getattr(learner, change)(spelling, *(["coffee"] if change == "rename" else []))
        bookkeeping, (noted,) = learner._saved.bookkeeping, learner.history[-1]["changes"]
        changed.append((bookkeeping.learned.tolist(), bookkeeping.images.tolist(), noted["classes"]))
    assert changed[0] == changed[1]
