"""`Learner.export`: what predicts, as ONNX, as a program of torch.export and as a folder, for every learner."""

import importlib.util
import json
import os
import zipfile

import numpy as np
import pytest
import torch
from support.methods import one_of_each_family
from support.small_learners import QUICK, arrays, learned, months
from support.small_runs import uncounted

import pycil_wsc
from pycil_wsc import registry
from pycil_wsc.classifier.export import program as exported_program
from pycil_wsc.classifier.learner import Learner
from pycil_wsc.errors import UserError

__all__ = ["months"]
pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def replay(months):
    """A learner of three tasks, and the test images of the last one."""
    return learned(*months, name="replay", **QUICK), arrays(months[2], "test")[0]


@pytest.fixture(scope="module")
def onnxruntime():
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    return pytest.importorskip("onnxruntime")


def assert_predicts(run, learner, images):
    """``run`` gives the logits of ``predict``, for batches of any size."""
    expected = learner.answers.classifier.logits(images).numpy()
    batch = torch.stack([learner.transform(image) for image in images])
    rounding = 1e-6 * np.abs(expected).max()  # SLDA's logits are differences of large numbers
    for size in (1, 2, len(batch)):
        logits = run(batch[:size])
        assert logits.dtype == np.float32 and logits.shape == (size, len(learner.classes))
        np.testing.assert_allclose(logits, expected[:size], atol=1e-4 + rounding, rtol=0)


def by_onnxruntime(path, runtime, output="logits"):
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: session.run([output], {"images": images.numpy()})[0]


@pytest.fixture(scope="module", params=one_of_each_family(sorted(registry.learners)))
def every(request, months):
    """A learner of each method after three tasks, and the test images of the last one."""
    with uncounted():
        return learned(*months, name=request.param, held_out=2, **QUICK), arrays(months[2], "test")[0]


def test_where_there_is_bf16_a_learner_trains_in_it_and_predicts_in_fp32_as_its_exports_do(
    months, tmp_path, monkeypatch
):
    monkeypatch.setattr("pycil_wsc.training.precision.computes_bf16_natively", lambda device: True)
    keys = QUICK | {"precision": "auto", "convnet_type": "resnet8"}
    learner, images = learned(months[0], name="replay", **keys), arrays(months[0], "test")[0]
    assert learner.answers.classifier.learner.precision.name == "bf16"
    with torch.inference_mode():
        expected = learner.model(torch.stack([learner.transform(image) for image in images]))
    learner.export(tmp_path / "exported")
    learner.save(tmp_path / "shelf")
    loaded = pycil_wsc.load_exported(tmp_path / "exported"), Learner.load(tmp_path / "shelf", quiet=True)
    for model in (learner, *loaded):
        torch.testing.assert_close(model.logits(images), expected, atol=1e-5, rtol=0)
    asked = Learner.load(tmp_path / "shelf", quiet=True, precision="bf16").logits(images)
    assert (asked - expected).abs().max() > 1e-4, "bf16 where it is asked for"


def test_every_learners_model_and_transform_predict_as_it_does(every):
    """The same network in the same precision, so up to the rounding of another memory format."""
    learner, images = every
    model = learner.model
    assert_predicts(lambda batch: model(batch).detach().numpy(), learner, images)
    assert model.classes == learner.classes and not model.training


def test_every_learner_predicts_the_same_when_its_folder_is_loaded(every, tmp_path):
    """To the bit, as it is the same network."""
    learner, images = every
    learner.export(tmp_path / "exported")
    exported = pycil_wsc.load_exported(tmp_path / "exported")
    assert exported.classes == learner.classes
    assert torch.equal(exported.logits(images), learner.logits(images))
    assert np.array_equal(exported.predict_proba(images), learner.predict_proba(images))
    assert np.array_equal(exported.familiarity(images), learner.familiarity(images))


EXPORTED = set()  # networks that a process of the tests has exported


@pytest.mark.slow
def test_every_learner_predicts_the_same_in_onnxruntime(every, tmp_path, onnxruntime):
    """Methods with the same modules, of the same sizes, have the same program: it is exported once."""
    learner, images = every
    model = learner.model
    network = str(model), tuple((name, getattr(value, "shape", None)) for name, value in model.state_dict().items())
    if network in EXPORTED:
        pytest.skip("the same program as that of another method")
    learner.export(tmp_path / "model.onnx")
    assert_predicts(by_onnxruntime(tmp_path / "model.onnx", onnxruntime), learner, images)
    EXPORTED.add(network)
    familiarity = by_onnxruntime(tmp_path / "model.onnx", onnxruntime, "familiarity")
    batch = torch.stack([learner.transform(image) for image in images])
    one = 1 / (len(learner._saved.bookkeeping.held_out) + 1)
    assert np.abs(familiarity(batch) - learner.familiarity(images)).max() < 1.5 * one


@pytest.mark.slow
@pytest.mark.parametrize("every", ["replay", "bic", "foster", "memo", "aper_finetune"], indirect=True)
def test_a_program_of_torch_predicts_the_same(every, tmp_path):
    """Of each kind of network."""
    learner, images = every
    learner.export(tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    assert_predicts(lambda images: program(images)[0].detach().numpy(), learner, images)


@pytest.mark.slow
def test_the_files_say_what_their_columns_are_and_what_is_done_to_an_image(replay, tmp_path, onnxruntime):
    learner, _ = replay
    for name in ("model.onnx", "model.pt2"):
        learner.export(tmp_path / name)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    extra_files = {"classes": "", "transform": "", "temperature": ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=extra_files)
    for description in (session.get_modelmeta().custom_metadata_map, extra_files):
        assert json.loads(description["classes"]) == learner.classes
        assert json.loads(description["transform"]) == learner.transform.settings()
        assert json.loads(description["temperature"]) == 1


@pytest.mark.slow
def test_a_program_and_its_temperature_give_the_probabilities(months, tmp_path):
    """Of a learner that is calibrated."""
    learner = learned(months[0], **QUICK, held_out=2)
    images = arrays(months[0], "test")[0]
    learner.export(tmp_path / "model.pt2")
    extra_files = {"temperature": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra_files).module()
    temperature = json.loads(extra_files["temperature"])
    logits, _ = program(torch.stack([learner.transform(image) for image in images]))
    assert temperature != 1
    expected = learner.predict_proba(images)
    np.testing.assert_allclose((logits / temperature).softmax(1).detach().numpy(), expected, atol=1e-5)


@pytest.mark.slow
def test_the_files_name_no_file_of_this_machine(replay, tmp_path):
    for name in ["model.pt2"] + ["model.onnx"] * bool(importlib.util.find_spec("onnxscript")):
        replay[0].export(tmp_path / name)
        content = (tmp_path / name).read_bytes()
        if name.endswith("pt2"):
            with zipfile.ZipFile(tmp_path / name) as parts:
                content = b"".join(map(parts.read, parts.namelist()))
        for place in (os.path.dirname(os.path.dirname(pycil_wsc.__file__)), os.path.dirname(torch.__file__)):
            assert place.encode() not in content


@pytest.mark.slow
def test_the_version_of_the_operators_may_be_chosen(replay, tmp_path, onnxruntime):
    import onnx

    learner, images = replay
    learner.export(tmp_path / "model.onnx", opset=20)
    opsets = {opset.domain: opset.version for opset in onnx.load(tmp_path / "model.onnx").opset_import}
    assert opsets[""] == 20
    assert_predicts(by_onnxruntime(tmp_path / "model.onnx", onnxruntime), learner, images)


@pytest.mark.parametrize("opset", [11, 99, "18"])
def test_a_version_that_torch_does_not_write_is_one_line(opset, replay, tmp_path, onnxruntime):
    with pytest.raises(UserError, match=f"^opset: {opset!r} is not a whole number from 18 to "):
        replay[0].export(tmp_path / "model.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_pre_trained_backbone_is_exported(months, tmp_path, onnxruntime):
    """One of timm's that recomputes activations in training."""
    timm = pytest.importorskip("timm")
    narrow = {"channels": [8, 8, 8, 8], "stem_width": 8, "layers": [1, 1, 1, 1]}
    assert timm.is_model("resnet18")
    keys = {"convnet_type": "timm:resnet18", "convnet_options": narrow, "image_size": 32, "grad_checkpointing": True}
    learner = learned(months[0], name="replay", **QUICK | keys)
    images = arrays(months[0], "test")[0]
    for name in ("model.onnx", "model.pt2"):
        learner.export(tmp_path / name)
    assert_predicts(by_onnxruntime(tmp_path / "model.onnx", onnxruntime), learner, images)


# ---- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, keys, line",
    [
        ("model.h5", {}, "model.h5: the name decides the form; give NAME.onnx, NAME.pt2 or the name of a folder"),
        ("model.pt2", {"opset": 18}, "^opset: applies to ONNX files only, and model.pt2 is not one; leave it out"),
        ("file/model.pt2", {}, r"file/model.pt2: cannot be written \((File exists|Not a directory)\); free space"),
        ("a\0b.pt2", {}, r"has a zero byte"),
        (3, {}, "^path: 3 is not the name of a folder"),
    ],
)
def test_what_cannot_be_written_is_one_line(name, keys, line, replay, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=line) as error:
        replay[0].export(tmp_path / name if isinstance(name, str) else name, **keys)
    assert "\n" not in str(error.value) and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_learner_that_has_learned_nothing_exports_nothing(tmp_path):
    with pytest.raises(UserError, match="nothing has been learned yet; call learn first"):
        Learner("replay").export(tmp_path / "model.pt2")


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_package_is_one_line(package, replay, tmp_path, monkeypatch):
    monkeypatch.setattr(exported_program, "imported", lambda name: None if name == package else object())
    with pytest.raises(UserError, match=f"^export: {package} is not installed; pip install -r requirements-export"):
        replay[0].export(tmp_path / "model.onnx")


def test_a_program_that_differs_from_the_learner_does_not_replace_the_one_before(replay, tmp_path, monkeypatch):
    (tmp_path / "model.pt2").write_text("before")
    monkeypatch.setattr(exported_program, "run_pt2", lambda path, images: torch.full((3, 4), 7.0))
    with pytest.raises(UserError, match="^export: the logits of model.pt2 differ by .* from those of the learner"):
        replay[0].export(tmp_path / "model.pt2")
    assert (tmp_path / "model.pt2").read_text() == "before" and len(list(tmp_path.iterdir())) == 1


def test_a_network_that_torch_cannot_convert_is_one_line(months, tmp_path, monkeypatch):
    class Chosen(registry.learners["replay"]):
        def classify(self, features):
            logits = super().classify(features)
            return logits if float(features.sum()) > 0 else logits + 1  # a choice that depends on the images

    monkeypatch.setitem(registry.learners, "replay", Chosen)
    learner = learned(months[0], name="replay", **QUICK)
    with pytest.raises(UserError, match="^export: torch cannot convert this network .*; export it as a") as error:
        learner.export(tmp_path / "model.pt2")
    assert "\n" not in str(error.value)
