"""`Learner.export` of a folder: safetensors and a model card, which the Hugging Face Hub and MLflow take.

That every learner predicts the same from its folder is tested in ``test_export.py``, where each is trained once.
"""

import dataclasses
import hashlib
import json
import shutil
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save
from support.months import MONTHS, month, photos
from support.small_learners import FILES, QUICK, arrays, learned, months

import pycil_wsc
from pycil_wsc import registry
from pycil_wsc.classifier.bundle import _load_pyfunc
from pycil_wsc.classifier.export import folder as exported_folder
from pycil_wsc.errors import UserError

__all__ = ["months"]
pytestmark = pytest.mark.usefixtures("uncounted", "undrawn")


@pytest.fixture(scope="module")
def exported(months, tmp_path_factory):
    """(a learner of three tasks, what evaluate returned after each, its exported folder, the last test images)."""
    folder = tmp_path_factory.mktemp("months") / "exported"
    learner, evaluations = learned(name="replay", **QUICK), []
    for source in months:
        learner.learn(source)
        evaluations.append(learner.evaluate(arrays(source, "test")))
    learner.export(folder, evaluations=evaluations)
    return learner, evaluations, folder, arrays(months[-1], "test")[0]


@pytest.fixture
def folder(exported, tmp_path):
    """The test's own copy of the exported folder."""
    return shutil.copytree(exported[2], tmp_path / "exported")


def test_a_method_that_keeps_what_it_predicts_with_beside_its_network_is_exported_with_it(tmp_path, monkeypatch):
    class Shifted(registry.learners["replay"]):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.register_buffer("shift", torch.zeros(2))

        def end_task(self, task):
            self.shift += torch.tensor([1.0, -1.0])

        def classify(self, features):
            return super().classify(features) + self.shift

    monkeypatch.setitem(registry.learners, "replay", Shifted)
    source = month(tmp_path / "0.npz", MONTHS[0], 0)
    learner = learned(source, name="replay", **QUICK)
    learner.export(tmp_path / "exported")
    images = arrays(source, "test")[0]
    assert torch.equal(pycil_wsc.load_exported(tmp_path / "exported").logits(images), learner.logits(images))


def test_a_method_that_keeps_it_where_its_state_does_not_have_it_is_refused(tmp_path, monkeypatch):
    class Hidden(registry.learners["replay"]):
        shift = 0

        def end_task(self, task):
            self.network.shift = 1.0

        def classify(self, features):
            return super().classify(features) + getattr(self.network, "shift", 0)

    monkeypatch.setitem(registry.learners, "replay", Hidden)
    learner = learned(month(tmp_path / "0.npz", MONTHS[0], 0), name="replay", **QUICK)
    learner.answers.classifier.learner.network.shift = 1.0
    with pytest.raises(UserError, match="^export: the logits of the folder exported differ by 1 from those of the"):
        learner.export(tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_the_weights_are_those_of_the_model_by_name_and_no_exemplar_is_with_them(exported):
    learner, _, folder, _ = exported
    weights, expected = load_file(folder / "model.safetensors"), learner.model.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert sorted(path.name for path in folder.iterdir()) == [
        "MLmodel",
        "README.md",
        "config.json",
        "model.safetensors",
    ]


def test_no_name_of_a_file_or_folder_is_in_it(tmp_path):
    learner = learned(photos(tmp_path / "secret", ["cat", "ant"], 1), **FILES, data_root=str(tmp_path / "hidden"))
    learner.export(tmp_path / "exported")
    for path in (tmp_path / "exported").iterdir():
        content = path.read_bytes()
        assert not [word for word in (b"secret", b"hidden", bytes(tmp_path)) if word in content], path.name
    found = pycil_wsc.load_exported(tmp_path / "exported")
    files = sorted(map(str, (tmp_path / "secret").rglob("*.png")))
    assert found.predict(files).tolist() == learner.predict(files).tolist()


# ---- the model card --------------------------------------------------------------------------------------------------


def rows(card, heading):
    """The rows of the table below a heading, as lists of cells."""
    lines = card.split(f"## {heading}\n")[1].split("\n## ")[0].splitlines()
    table = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in table[2:]]


def test_the_card_tells_the_tasks_their_data_the_memory_and_the_accuracies(exported):
    learner, evaluations, folder, _ = exported
    card = (folder / "README.md").read_text()
    data = learner._held.fingerprint["tasks"]
    assert rows(card, "What it learned") == [
        ["1", "cat, ant", "20", data[0]["sha256"]],
        ["2", "bee", "20", data[1]["sha256"]],  # and cat again
        ["3", "dog", "20", data[2]["sha256"]],
    ]
    assert "The learner keeps 16 exemplars, 4 of each class, as pixels." in card
    first, second, third = (found["classes"] for found in evaluations)
    expected = [
        [(first["cat"] + first["ant"]) / 2, None, None],
        [second["cat"], second["bee"], None],
        [third["ant"], None, third["dog"]],
    ]
    cells = [["" if value is None else f"{value:.1f}" for value in row] for row in expected]
    assert rows(card, "Accuracy") == [[str(number), *row] for number, row in enumerate(cells, 1)]


def test_the_hubs_own_reader_takes_the_card_and_its_loader_the_weights(exported):
    """Offline."""
    hub = pytest.importorskip("huggingface_hub")
    learner, _, folder, _ = exported
    data = hub.ModelCard.load(folder / "README.md").data.to_dict()
    assert data["library_name"] == "pycil_wsc" and data["pipeline_tag"] == "image-classification"
    assert "replay" in data["tags"] and data.get("license") is None
    other = learned(name="replay", **QUICK)
    other.learn((np.zeros((4, 8, 8, 3), np.uint8), ["cat", "ant", "bee", "dog"]))
    model = other.model
    hub.load_torch_model(model, folder)
    images = torch.randn(3, 3, 8, 8)
    assert torch.equal(model(images), learner.model(images))


def test_the_licence_is_left_to_the_owner_and_stays(exported, folder):
    learner = exported[0]
    card = folder / "README.md"
    text = card.read_text()
    assert "\n# license: for the owner to choose" in text and "\nlicense:" not in text
    card.write_text(text.replace("# license: for the owner to choose; the next export keeps it", "license: mit"))
    (folder / "notes.txt").write_text("the owner's")
    learner.export(folder)
    assert "\nlicense: mit\n---\n" in card.read_text() and "# license" not in card.read_text()
    assert (folder / "notes.txt").read_text() == "the owner's"


OF_OTHERS = {
    "README.md": "# Years of work\n",
    "config.json": '{"mine": 1}',
    "MLmodel": "flavors: {sklearn: {}}\n",
    "model.safetensors": save({"weight": torch.zeros(3)}).decode("latin-1"),
}


@pytest.mark.parametrize("name, text", OF_OTHERS.items())
def test_files_that_are_not_of_an_export_are_not_replaced(name, text, exported, tmp_path):
    (tmp_path / name).write_text(text, "latin-1")
    with pytest.raises(UserError, match=f"{name}: was not written by an export; move it, or choose"):
        exported[0].export(tmp_path)
    assert [path.read_text("latin-1") for path in tmp_path.iterdir()] == [text]


def test_an_export_that_was_killed_after_the_first_file_is_repeated(exported, tmp_path):
    exported[0].export(tmp_path)
    for name in ("model.safetensors", "README.md", "MLmodel"):
        (tmp_path / name).unlink()
    exported[0].export(tmp_path)
    assert pycil_wsc.load_exported(tmp_path).classes == exported[0].classes


def test_a_folder_that_an_earlier_version_exported_with_the_sums_is_loaded(months, tmp_path):
    learner, folder = learned(*months, name="slda", **QUICK), tmp_path / "exported"
    learner.export(folder)
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    (head,) = [name.removesuffix("weight") for name in weights if name.endswith("head.weight")]
    width = weights[head + "weight"].shape[1]
    weights |= {head + "sums.gram": torch.zeros(width, width), head + "sums.products": torch.zeros(width, 4)}
    content = save(weights)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text(json.dumps(config | {"sha256": hashlib.sha256(content).hexdigest()}))
    images = arrays(months[-1], "test")[0]
    assert torch.equal(pycil_wsc.load_exported(folder).logits(images), learner.logits(images))


def test_names_of_classes_are_text_in_the_card(tmp_path):
    """Neither columns, markup nor lines, which a learner of an earlier version may have in a name."""
    names = ["a|b", "<script>", "new line", "[x](y)", "---"]
    images = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 3), np.uint8)
    learner = learned((images, names * 2), name="replay", **QUICK)
    held = learner._held
    classes = tuple(name.replace(" ", "\n") for name in held.info.classes)
    info = dataclasses.replace(held.info, classes=classes)
    learner._set_state(learner._saved._replace(held=dataclasses.replace(held, info=info)))
    learner.export(tmp_path / "exported")
    (line,) = [line for line in (tmp_path / "exported/README.md").read_text().splitlines() if "script" in line]
    assert r"a\|b" in line and "&lt;script&gt;" in line and r"\[x\](y)" in line and r"new\\nline" in line
    assert pycil_wsc.load_exported(tmp_path / "exported").classes == learner.classes


def test_keys_of_a_machine_in_a_strangers_file_have_no_effect(folder, exported):
    """``pretrained`` would download weights, or read any file."""
    described = json.loads((folder / "config.json").read_text())
    described["config"] |= {"pretrained": "/etc/passwd", "compile": True, "cache_images": True, "num_workers": 9}
    (folder / "config.json").write_text(json.dumps(described))
    learner, _, _, images = exported
    found = pycil_wsc.load_exported(folder)
    assert found.predict(images).tolist() == learner.predict(images).tolist()
    config = found.classifier.learner.config
    assert (config.pretrained, config.compile, config.cache_images) == (False, False, False)
    assert config.num_workers != 9


# ---- MLflow ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mlflow_loads_the_folder_and_predicts(exported, tmp_path):
    mlflow = pytest.importorskip("mlflow.pyfunc")
    learner, _, folder, images = exported
    model = mlflow.load_model(str(folder))
    assert model.predict(images).tolist() == learner.predict(images).tolist()
    assert set(model.predict(images, params={"threshold": 1.0})) == {"unknown"}
    for names in (["a.png"], "a.png", np.array(["a.png"])):
        with pytest.raises(UserError, match="^images: names of files, which a server does not read"):
            model.predict(names)
    reading = mlflow.load_model(str(folder), model_config={"file_names": True})
    with pytest.raises(UserError, match="^a.png: No such file"):
        reading.predict(["a.png"])


def test_its_model_takes_what_mlflow_hands_it(exported, tmp_path):
    """Arrays of whole numbers, as JSON gives them; data frames of names and of the bytes of files; lists."""
    pandas = pytest.importorskip("pandas")
    learner, _, folder, images = exported
    model = _load_pyfunc(str(folder), {"file_names": True})
    expected = learner.predict(images).tolist()
    files = [tmp_path / f"{number}.png" for number in range(len(images))]
    for file, image in zip(files, images):
        Image.fromarray(image).save(file)
    names, contents = list(map(str, files)), [file.read_bytes() for file in files]
    forms = [images, images.astype(np.int64), names, contents]
    forms += [pandas.DataFrame({"image": names}), pandas.DataFrame({"image": contents})]
    for form in forms:
        assert model.predict(form).tolist() == expected
    assert model.predict(iter(contents)).tolist() == expected
    assert set(model.predict(images, {"threshold": 1.0, "otherwise": "none"})) == {"none"}
    with pytest.raises(UserError, match="^image: 4 bytes that are not an image file's; replace them"):
        model.predict(pandas.DataFrame({"image": [contents[0], b"html"]}))
    with pytest.raises(UserError, match="^images: a ndarray; give uint8"):
        model.predict(np.array("a.png"))
    with pytest.raises(UserError, match="^images: values from -1 to 7; give pixels from 0 to 255"):
        model.predict(np.array([-1, 7]))


# ---- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "evaluations, line",
    [
        ({}, "evaluations: a dict; give a list with one for each of the 3 tasks"),
        ([None], "evaluations: 1; give a list with one for each of the 3 tasks"),
        ([None, 3, None], "evaluations: item 2 is not what evaluate returns; give that, or None"),
        ([None, None, {"classes": {"cat": None}}], "evaluations: item 3 has no accuracy of 'cat' in percent, but None"),
        ([{"classes": {1: 2.0, "dog": 1.0}}, None, None], "evaluations: item 1 has '1', which was not learned by then"),
        ([{"classes": {"dog": 1.0}}, None, None], "evaluations: item 1 has 'dog', which was not learned by then"),
    ],
)
def test_evaluations_that_do_not_fit_are_one_line(evaluations, line, exported, tmp_path):
    with pytest.raises(UserError, match=f"^{line}$"):
        exported[0].export(tmp_path / "exported", evaluations=evaluations)
    assert not list(tmp_path.iterdir())


def test_evaluations_are_of_folders_and_versions_of_operators_of_onnx(exported, tmp_path):
    with pytest.raises(UserError, match=r"^evaluations: apply to folders only, and model.onnx is a file; leave"):
        exported[0].export(tmp_path / "model.onnx", evaluations=[None] * 3)
    with pytest.raises(UserError, match=r"^opset: applies to ONNX files only, and exported is a folder; leave it out"):
        exported[0].export(tmp_path / "exported", opset=18)


def without_weights(folder):
    (folder / "model.safetensors").unlink()


def other_weights(folder):
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def broken_json(folder):
    (folder / "config.json").write_text("{")


def other_json(folder):
    (folder / "config.json").write_text("[]")


def changed(**values):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


@pytest.mark.parametrize(
    "damage, line",
    [
        (without_weights, "cannot be read .No such file or directory.; name a folder that Learner.export wrote"),
        (other_weights, "model.safetensors is not the file that config.json describes; export the learner again"),
        (broken_json, "is not a complete export .JSONDecodeError: .*; name a folder .* or export the learner again"),
        (other_json, "is not a complete export .*; name a folder .* or export the learner again"),
        (changed(format=9), "was exported by another version .format 9.; use that one"),
        (changed(classes=["a"]), "is not a complete export .ValueError: its parts do not fit together"),
        (changed(classes_after_task=[]), "is not a complete export .ValueError: its parts do not fit together"),
        (changed(classes=["a", "b"], classes_after_task=[1, 2]), "is not a complete export .RuntimeError: Error.s. in"),
        (changed(classes_after_task=[5, 4]), "is not a complete export"),
        (changed(images={}), "is not a complete export .KeyError"),
        (changed(temperature="hot"), "is not a complete export .ValueError"),
    ],
)
def test_a_folder_that_is_not_whole_is_one_line(damage, line, folder):
    damage(folder)
    with pytest.raises(UserError, match=f"exported: {line}") as error:
        pycil_wsc.load_exported(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("unwritable", ["config.json", "README.md"])
def test_an_export_that_cannot_be_written_leaves_the_earlier_one(unwritable, folder, months):
    """As when the disk is full: here a folder is where the file's new content would go."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / f".{unwritable}.partial").mkdir()
    other = learned(months[0], name="replay", **QUICK)
    with pytest.raises(UserError, match=f"{unwritable}: cannot be written"):
        other.export(folder)
    (folder / f".{unwritable}.partial").rmdir()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    pycil_wsc.load_exported(folder)


def test_an_export_replaces_no_file_if_a_folder_has_the_name_of_one(folder, months):
    (folder / "MLmodel").unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "MLmodel").mkdir()
    with pytest.raises(UserError, match="MLmodel: cannot be written .Is a directory."):
        learned(months[0], name="replay", **QUICK).export(folder)
    (folder / "MLmodel").rmdir()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_export_that_is_replaced_while_it_is_read_is_read_again(exported, folder, months, monkeypatch):
    described = (folder / "config.json").read_bytes()
    learner = learned(months[0], name="replay", **QUICK)
    learner.export(folder)
    read, answers = exported_folder.read_file, [described]
    monkeypatch.setattr(
        exported_folder,
        "read_file",
        lambda path: answers.pop() if path.name == "config.json" and answers else read(path),
    )
    assert pycil_wsc.load_exported(folder).classes == learner.classes and not answers


def test_the_card_has_the_time_of_all_tasks_once(exported, tmp_path):
    learner = exported[0]
    with patch("pycil_wsc.classifier.learner.write_folder") as written:
        learner.export(tmp_path / "exported")
    seconds = written.call_args.args[4]
    times = [line["total_seconds"] for line in learner.history]  # each with those before
    assert seconds == times[-1] and 0 < times[0] < times[1] < times[2]
