"""Saved weights: a loaded model classifies as in the run, and loading errors are one clear line."""

import functools
import json
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from support import fresh
from support.damage import each_part_forged
from support.small_runs import killed_at, stopped

import pycil_wsc
from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.errors import UserError
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.networks.nets import IncrementalNet
from pycil_wsc.runs.class_incremental import as_configured
from pycil_wsc.runs.run import Run
from pycil_wsc.state import load_state, save_state

ROOT = Path(__file__).parents[2]
NAMES = ["rose", "oak", "fern", "moss", "kelp", "yew"]


@pytest.fixture(scope="module")
def arrays():
    """Noisy class templates, hard enough for errors: six classes of 12 training and 9 test images with a side of 8."""
    rng = np.random.default_rng(0)
    templates, values = rng.integers(40, 160, (6, 8, 8, 3)), {"classes": np.array(NAMES)}
    for part, count in (("train", 12), ("test", 9)):
        targets = np.repeat(np.arange(6), count)
        values[f"{part}_x"] = (templates[targets] + rng.integers(0, 96, (len(targets), 8, 8, 3))).astype(np.uint8)
        values[f"{part}_y"] = targets
    return values


SETTINGS = {
    "memory_per_class": 4,
    "init_cls": 2,
    "increment": 2,
    "model_name": "replay",
    "convnet_type": "tiny",
    "device": "cpu",
    "init_epoch": 2,
    "epochs": 2,
    "batch_size": 8,
    "buffer_size": 64,
    "projection": 64,
}


def made(folder, **keys):
    """A run over three tasks of two classes; ``folder`` has its data."""
    config = resolve(SETTINGS | {"dataset": f"npz:{folder / 'data.npz'}", "out": str(folder / "runs")} | keys)
    return Run(config, as_configured(load_dataset(config.dataset, "."), config))


@pytest.fixture
def run(arrays, tmp_path):
    """keys -> a run over three tasks of two classes."""
    np.savez(tmp_path / "data.npz", **arrays)
    return functools.partial(made, tmp_path)


@pytest.fixture(scope="module")
def finished(arrays, tmp_path_factory):
    """save_weights -> the folder of a finished run; for reading."""
    folder, folders = tmp_path_factory.mktemp("finished"), {}
    np.savez(folder / "data.npz", **arrays)
    for save_weights in (True, False):
        ended = made(folder, save_weights=save_weights, prefix=str(save_weights))
        ended.execute()
        folders[save_weights] = ended.folder
    return folders


@pytest.fixture
def kept(finished, tmp_path):
    """The test's own copy of the folder of a finished run that saved its last weights."""
    return shutil.copytree(finished[True], tmp_path / "kept")


@pytest.fixture
def bare(finished, tmp_path):
    """The test's own copy of the folder of a finished run that saved no weights."""
    return shutil.copytree(finished[False], tmp_path / "bare")


def accuracies(model, classes, arrays):
    """On each two of ``classes`` (in learning order), from the raw arrays; batches as in the run,
    so equality can be exact.
    """
    labels = arrays["test_y"]
    indices = np.concatenate([np.flatnonzero(labels == c) for c in classes])
    right = model.predict(arrays["test_x"][indices]) == labels[indices]
    return [float(100 * np.mean(part)) for part in np.split(right, len(classes) // 2)]


@pytest.mark.parametrize("name", sorted(registry.learners))
def test_every_learners_weights_classify_as_the_run_did_after_each_task(name, undisturbed):
    folder, result = undisturbed(model_name=name, **stopped(name))
    arrays = dict(np.load(undisturbed.folder / "data.npz"))
    with patch("numpy.load", side_effect=AssertionError("the data is not needed")):
        models = [pycil_wsc.load(folder, task) for task in (0, 1, 2)]
    for task, model in enumerate(models):
        classes = result["class_order"][: 2 * task + 2]
        assert accuracies(model, classes, arrays) == result["matrix"][task]
        assert model.labels == sorted(classes)
    indices = np.concatenate([np.flatnonzero(arrays["test_y"] == c) for c in result["class_order"]])
    predicted = model.predict(arrays["test_x"][indices])
    assert 100 * np.mean(predicted == arrays["test_y"][indices]) == pytest.approx(result["last_acc"])
    counts = np.zeros((6, 6), int)
    for true, guess in zip(arrays["test_y"][indices], predicted):
        counts[result["class_order"].index(true), result["class_order"].index(guess)] += 1
    assert result["confusion"] == counts.tolist()


def test_equal_logits_are_told_apart_in_one_way(run, arrays, monkeypatch, tmp_path):
    """Logits so coarse that most images have ties, as can happen in bf16."""
    classify = IncrementalNet.classify
    monkeypatch.setattr(IncrementalNet, "classify", lambda net, features: (classify(net, features).float() / 2).round())
    monkeypatch.setattr(Replay, "also_tested", lambda learner: {"twin": learner.network})
    finished = run(save_weights="every")
    result = finished.execute()
    (tmp_path / "data.npz").unlink()
    tied = []
    for task in (0, 1, 2):
        model, classes = pycil_wsc.load(finished.folder, task), result["class_order"][: 2 * task + 2]
        logits = model(arrays["test_x"])
        tied += ((logits == logits.max(1, keepdim=True).values).sum(1) > 1).tolist()
        assert accuracies(model, classes, arrays) == result["matrix"][task]
        names = [model.class_names[label] for label in classes]
        assert names == result["class_names"][: len(names)] == [NAMES[label] for label in classes]
    assert result["twin_curve"] == result["curve"], "as of networks that are tested beside the learner's"
    assert sum(tied) > len(tied) / 2


def test_true_keeps_the_last_weights_alone_and_they_are_those_of_a_stopped_run(run, tmp_path):
    undisturbed = run(save_weights=True, out=str(tmp_path / "undisturbed"))
    expected = undisturbed.execute()
    with killed_at(lambda calls: calls[-1][0]["task"] == 3):  # after the last task, before the result
        run(save_weights=False).execute()
    again = run(save_weights=True)
    assert again.execute()["confusion"] == expected["confusion"]
    for ended in (undisturbed, again):
        assert [path.name for path in ended.folder.glob("weights*")] == ["weights.pt"]
    weights, others = (pycil_wsc.load(ended.folder).learner.network.state_dict() for ended in (undisturbed, again))
    assert weights.keys() == others.keys() and all(torch.equal(weights[key], others[key]) for key in weights)


def test_nothing_is_kept_unasked(finished):
    assert not list(finished[False].glob("*.pt")) and not (finished[False] / "tensorboard").exists()


def test_a_column_for_each_label_and_tensors_like_arrays(run, arrays):
    finished = run(save_weights="every")
    finished.execute()
    model = pycil_wsc.load(finished.folder, 1).train()
    images = arrays["test_x"][::5]
    logits = model(torch.from_numpy(images))
    assert logits.shape == (len(images), 4) and logits.dtype == torch.float32 and not logits.requires_grad
    assert torch.equal(logits, model.logits(images)), "in evaluation mode, whatever the mode was"
    chosen = [model.labels.index(label) for label in model.predict(images)]
    assert torch.equal(logits[range(len(images)), chosen], logits.max(1).values)
    assert model.predict(images[:0]).shape == (0,)


def test_the_logits_are_the_trained_learners_in_its_precision_by_the_data_sets_labels(run, arrays):
    finished = run(save_weights=True, precision="bf16")
    order, images = finished.execute()["class_order"], arrays["test_x"][::7]  # one batch
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = (
            finished.learner.eval().predict(finished.evaluator.source.normalise(torch.from_numpy(images))).float()
        )
    assert torch.equal(
        pycil_wsc.load(finished.folder)(images), torch.stack([expected[:, order.index(label)] for label in range(6)], 1)
    )


@pytest.mark.slow
def test_the_test_transform_of_image_files_is_the_runs(run, arrays, tmp_path):
    for part, folder in (("train", "train"), ("test", "val")):
        for number, (image, label) in enumerate(zip(arrays[f"{part}_x"], arrays[f"{part}_y"])):
            path = tmp_path / "images" / folder / NAMES[label] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).resize((15, 11)).save(path)
    finished = run(dataset=f"folder:{tmp_path / 'images'}", image_size=8, save_weights=True, num_workers=0)
    result = finished.execute()
    model = pycil_wsc.load(finished.folder)
    files = [
        path
        for name in result["class_names"]
        for path in sorted((tmp_path / "images" / "val" / name).iterdir(), key=str)
    ]
    assert (
        100
        * np.mean([model.class_names[label] == path.parent.name for path, label in zip(files, model.predict(files))])
        == result["last_acc"]
    )
    assert model(arrays["test_x"]).shape == (54, 6)
    wide = np.stack([np.asarray(Image.open(file)) for file in files])
    assert torch.equal(model(wide), model(files))


BAD_IMAGES = {
    "float32 of shape (2, 8, 8, 3); this model takes uint8 (B, 8, 8, 3)": np.zeros((2, 8, 8, 3), np.float32),
    "uint8 of shape (2, 9, 9, 3); this model takes uint8 (B, 8, 8, 3)": torch.zeros(2, 9, 9, 3, dtype=torch.uint8),
    "uint8 of shape (8, 8, 3)": np.zeros((8, 8, 3), np.uint8),
    "uint8 of shape (2, 3, 8, 8)": np.zeros((2, 3, 8, 8), np.uint8),
    "a.png: No such file or directory": ["a.png"],
    "images: 'a.png' is not a folder; give uint8 (B, 8, 8, 3), a folder, or": "a.png",
}


def test_images_of_another_kind_are_refused(finished):
    model = pycil_wsc.load(finished[True])
    for message, images in BAD_IMAGES.items():
        assert message in one_line(model.predict, images)


def one_line(function, *arguments):
    with pytest.raises(UserError) as error:
        function(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_weights_that_cannot_be_loaded_are_one_line(kept, bare, tmp_path):
    assert "nowhere: cannot be read (No such file or directory)" in one_line(pycil_wsc.load, tmp_path / "nowhere")
    assert "this finished run did not save its weights; " in one_line(pycil_wsc.load, bare)
    (bare / "result.json").unlink()
    assert "no weights there (yet)" in one_line(pycil_wsc.load, bare)
    assert "no weights of task 1, only of the last" in one_line(pycil_wsc.load, kept, 1)
    assert "'cuda:99' is not available" in one_line(pycil_wsc.load, kept, None, "cuda:99")
    assert "device: 'tpu' is not available" in one_line(pycil_wsc.load, kept, None, "tpu")
    path = kept / "weights.pt"
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:size])
        assert "weights.pt: is not a complete file of weights" in one_line(pycil_wsc.load, kept)
    path.write_bytes(whole)
    state = load_state(path)
    save_state(path, state | {"config": state["config"] | {"convnet_type": "resnet20"}})
    assert "do not match the learner 'replay'" in one_line(pycil_wsc.load, kept)
    save_state(path, state | {"config": state["config"] | {"model_name": "repaly"}})
    assert "unknown model_name 'repaly'" in one_line(pycil_wsc.load, kept)


# ---- folders of version 0.1.0 ----------------------------------------------------------------------------------------


def as_of_0_1_0(state):
    """A checkpoint, or the learner's state in it, without what version 0.1.0 did not write."""
    learner = state["learner"]
    noted = {name: learner["_extra_state"][name] for name in ("images_trained", "train_flops")}
    memory = {"classes": learner["_extra_state"]["memory"]["classes"]}
    own = {**learner, "_extra_state": {"memory": memory, **noted}}
    since = {"precision", "source", "first_task", "anytime", "backbone"}
    return {name: value for name, value in state.items() if name not in since} | {"learner": own}


def test_weights_of_0_1_0_are_loaded(kept, arrays):
    expected = pycil_wsc.load(kept).predict(arrays["test_x"])
    state = as_of_0_1_0(load_state(kept / "weights.pt"))
    state["config"] = {name: value for name, value in state["config"].items() if name != "pretrained"}
    torch.save(state, kept / "weights.pt")
    assert np.array_equal(pycil_wsc.load(kept).predict(arrays["test_x"]), expected)


@pytest.mark.parametrize("position", [{"task": 1, "phase": 0, "epoch": 1}, {"task": 2, "phase": 0, "epoch": 0}])
def test_a_stopped_run_of_0_1_0_goes_on(position, run):
    whole = run(prefix="whole").execute()
    stopped_run = run(checkpoint_seconds=0)
    with killed_at(lambda calls: calls[-1][0] == position):
        stopped_run.execute()
    path = stopped_run.folder / "checkpoint.pt"
    torch.save(as_of_0_1_0(load_state(path)), path)
    result = run(checkpoint_seconds=0).execute()
    assert result["curve"] == whole["curve"] and result["train_loss"] == whole["train_loss"]


@pytest.mark.slow
def test_the_pages_lines_run_in_a_fresh_interpreter(run, arrays, tmp_path):
    (source,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/outputs.md").read_text(), re.DOTALL)
        if "pycil_wsc.load" in block
    )
    finished = run(save_weights=True, convnet_type="resnet8")  # which needs no other import
    finished.execute()
    folder = finished.folder
    source = re.sub(r'load\("[^"]+"\)', f"load({str(folder)!r})", source)
    np.save(tmp_path / "images.npy", arrays["test_x"])
    script = (
        f"import json, numpy\nimages = numpy.load({str(tmp_path / 'images.npy')!r})\n{source}\n"
        "print(json.dumps([labels.tolist(), list(logits.shape)]))"
    )
    output = fresh.printed(script, tmp_path / "page.py")
    assert json.loads(output) == [pycil_wsc.load(folder).predict(arrays["test_x"]).tolist(), [54, 6]]


WRONG = [None, -1, 10**9, 0.5, "x", [None] * 3, float("nan")]
INNER = [["info"], ["config"], ["learner"], ["learner", "_extra_state"], ["learner", "_extra_state", "memory"]]


@pytest.mark.slow
def test_mangled_weights_are_one_line_or_do_no_harm(kept, arrays):
    """Each part of the file in turn is left out or replaced, with correct checksums."""
    path, images, refused = kept / "weights.pt", arrays["test_x"][:9], 0
    whole, expected = load_state(path), pycil_wsc.load(kept).predict(images).tolist()

    for place, value, state in each_part_forged(whole, ([], *INNER), WRONG):
        save_state(path, state)
        try:
            predicted = pycil_wsc.load(kept).predict(images).tolist()
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
        else:
            assert predicted == expected or place[-1] in ("mean", "std"), (place, value)
    assert refused > 50
    for value in WRONG:
        save_state(path, value)
        assert "weights.pt: is not" in one_line(pycil_wsc.load, kept)
