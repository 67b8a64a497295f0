"""timm's models as backbones: every learner trains them, weights are read from files, and errors are one line."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.methods import one_of_each_family
from support.small_processes import commanded, in_two_processes
from support.small_runs import killed_at, suited, without_measurements, write

import pycil_wsc
from main import main
from pycil_wsc import registry
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.config.loading import resolve
from pycil_wsc.errors import UserError
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.networks import layers, timm_models
from pycil_wsc.networks.nets import check_features, make_backbone
from pycil_wsc.runs.planning import check_backbone
from pycil_wsc.runs.run import Run
from pycil_wsc.state import load_state
from pycil_wsc.training import budget
from pycil_wsc.training.learner import grow_for
from utils.factory import get_model

timm = pytest.importorskip("timm")
SMALL = {  # families at sizes for tests
    "resnet18": {"channels": (8, 8, 8, 8), "stem_width": 8, "layers": (1, 1, 1, 1)},
    "vit_tiny_patch16_224": {"patch_size": 8, "depth": 2, "embed_dim": 16, "num_heads": 2},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
    "test_efficientnet": {},
    "efficientnet_lite0": {},
}

TRANSFORMER = "vit_tiny_patch16_224"


def keys(model, **more):
    options = {f"convnet_options.{name}": value for name, value in SMALL[model].items()}
    short = {"init_epoch": 1, "epochs": 2, "milestones": [], "init_milestones": [], "image_size": 32, "batch_size": 12}
    short |= {"pretrained": False}
    return {"convnet_type": f"timm:{model}", "precision": "fp32", "wsc.warmup": 0.5} | short | options | more


def run(settings, model, **more):
    config = resolve(settings | keys(model, **more))
    return Run(config, Datasets().of(config), lambda progress: None)


@pytest.fixture
def weights(tmp_path):
    """model -> a file of its weights with timm's names, from another seed than any run's, with a classifier of 7."""

    def save(model, suffix=".pth", wrapped=False):
        torch.manual_seed(5)
        state = timm.create_model(model, num_classes=7, **SMALL[model]).state_dict()
        path = tmp_path / f"{model}{suffix}"
        if suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file(state, path)
        else:
            torch.save({"state_dict": state, "epoch": 3} if wrapped else state, path)
        return str(path), state

    return save


def learners_on_models():
    """Every learner on a transformer, which is the fastest; on the other families one of each kind, the others slow."""
    without = {"memo", "redo", "hal"}  # an anchor of HAL is alone in its batch
    names = [name for name in sorted(set(registry.learners) - without) if not suited(name)]
    pairs = [pytest.param(TRANSFORMER, name, id=f"{TRANSFORMER}-{name}") for name in names]
    for model in sorted(set(SMALL) - {TRANSFORMER, "efficientnet_lite0"}):
        for learner in one_of_each_family(names):
            pairs.append(pytest.param(model, *learner.values, marks=learner.marks, id=f"{model}-{learner.id}"))
    return pairs


@pytest.mark.parametrize("model, learner", learners_on_models())
def test_every_learner_trains_every_family(model, learner, settings):
    result = run(settings, model, model_name=learner, max_tasks=2, optimizer="adamw", layer_decay=0.8).execute()
    assert len(result["curve"]) == 2 and np.isfinite(result["train_loss"][-1]).all()


@pytest.mark.slow
def test_redo_recycles_units_of_basic_blocks(settings):
    keys = {"model_name": "redo", "max_tasks": 2, "dormant_threshold": 0.9}
    result, without = (
        run(settings, "resnet18", out=f"{settings['out']}-{every}", recycle_every=every, **keys).execute()
        for every in (2, 1000)
    )
    assert len(result["curve"]) == 2 and result["train_loss"] != without["train_loss"]


def refusal(learner, model):
    """What a method that cannot use a model says, if it cannot."""
    if learner == "memo" and model != "vit_tiny_patch16_224":
        return f"model_name: 'memo' splits the backbone, which 'timm:{model}' does not support"
    if suited(learner) and model != "vit_tiny_patch16_224":
        return f"convnet_type: 'timm:{model}' is not a plain vision transformer"
    if learner == "redo" and model != "resnet18":
        return f"model_name: 'redo' finds no units in 'timm:{model}'"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--dry-run"], []], ids=["dry", "run"])
@pytest.mark.parametrize("model", SMALL)
def test_what_cannot_be_used_is_refused_in_one_line(model, how, settings, tmp_path, capsys):
    """Of all learners those are MEMO, ReDo and those that tune a transformer, whose runs are only planned here."""
    refused = ["memo"] if refusal("memo", model) else []
    for learner in sorted(registry.learners) if how else refused:
        # a list in a file is one run per item, so a value that is a list is in a list
        one = {name: [value] if isinstance(value, (tuple, list)) else value for name, value in keys(model).items()}
        code = main(["--config", write(tmp_path, settings | one | {"model_name": learner}), *how])
        error = capsys.readouterr().err
        said = refusal(learner, model)
        assert code == (2 if said else 0), error
        if said:
            assert error.count("\n") == 1 and said in error, error
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_efficientnet_lite0_trains_and_its_weights_classify_as_the_run_did(settings):
    finished = run(settings, "efficientnet_lite0", max_tasks=1, save_weights=True)
    result = finished.execute()
    images, labels = finished.dataset.test.images, finished.dataset.test.targets
    first = np.isin(labels, result["class_order"])
    predicted = pycil_wsc.load(finished.folder).predict(images[first])
    assert 100 * np.mean(predicted == labels[first]) == pytest.approx(result["last_acc"])


@pytest.mark.parametrize(
    "suffix, wrapped, model",
    [
        (".pth", False, "resnet18"),
        (".pth", True, "convnext_atto"),
        (".safetensors", False, "resnet18"),
    ],
)
def test_a_backbone_starts_from_the_files_weights(suffix, wrapped, model, settings, weights):
    path, state = weights(model, suffix, wrapped)
    made = run(settings, model, model_name="der", pretrained=path)
    for block in made.learner.network.blocks:
        for name, tensor in block.state_dict().items():
            assert torch.equal(tensor, state[name]), name


def test_position_embeddings_are_resampled_for_other_sizes_of_images(settings, tmp_path):
    options = SMALL["vit_tiny_patch16_224"]
    state = timm.create_model("vit_tiny_patch16_224", img_size=64, **options).state_dict()
    torch.save(state, tmp_path / "vit.pth")
    backbone = run(settings, "vit_tiny_patch16_224", pretrained=str(tmp_path / "vit.pth")).learner.network.backbone
    assert state["pos_embed"].shape == (1, 65, 16) and backbone.pos_embed.shape == (1, 17, 16)
    assert torch.equal(backbone.blocks[1].mlp.fc1.weight, state["blocks.1.mlp.fc1.weight"])


def test_joint_starts_each_task_from_the_pretrained_weights_and_a_random_reset_does_not(settings, weights):
    path, state = weights("resnet18")
    joint = run(settings, "resnet18", model_name="joint", pretrained=path).learner
    for task in joint.manager.tasks[:2]:
        grow_for(joint, task)
        assert torch.equal(joint.network.backbone.conv1.weight, state["conv1.weight"])
    wsc = run(settings, "resnet18", pretrained=path, **{"wsc.reset": "random"}).learner
    first, second = wsc.manager.tasks[:2]
    grow_for(wsc, first), grow_for(wsc, second)
    (phase,) = wsc.phases(second)
    wsc.begin_phase(second, budget.planned(wsc, second, 0, phase))
    assert not torch.equal(wsc.consolidation._fresh()["backbone.conv1.weight"], state["conv1.weight"])


def test_size_normalisation_and_interpolation_are_the_models(settings):
    info = run(settings, "vit_tiny_patch16_224", image_size=None).dataset.info
    assert (info.image_size, info.stored_size, info.mean, info.interpolation) == (224, 8, (0.5, 0.5, 0.5), "bicubic")
    shown = run(settings, "resnet18").dataset.info
    assert (shown.image_size, shown.mean, shown.std) == (32, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_a_model_of_random_weights_follows_the_seed(settings):
    first, again, other = (
        run(settings, "resnet18", seed=seed).learner.network.backbone.conv1.weight for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_checkpointed_gradients_are_the_gradients(settings):
    images = torch.randn(4, 3, 32, 32)
    grads = []
    for checkpointing in (False, True):
        backbone = run(settings, "vit_tiny_patch16_224", grad_checkpointing=checkpointing).learner.network.backbone
        assert bool(backbone.grad_checkpointing) is checkpointing
        backbone.train()(images).square().sum().backward()
        grads.append([p.grad for p in backbone.parameters()])
    for plain, checkpointed in zip(*grads):
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_end(settings, tmp_path):
    more = {"optimizer": "adamw", "max_tasks": 2}
    whole = run(settings | {"out": str(tmp_path / "whole")}, "resnet18", **more).execute()
    with killed_at(lambda calls: calls[-1][0] == {"task": 1, "phase": 0, "epoch": 1}):
        run(settings, "resnet18", **more).execute()
    assert without_measurements(run(settings, "resnet18", **more).execute()) == without_measurements(whole)


def test_layers_are_timms_own():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, **SMALL["vit_tiny_patch16_224"])
    depths = layers.depths([model])
    assert depths[model.patch_embed.proj.weight] > depths[model.blocks[0].mlp.fc1.weight]
    assert depths[model.blocks[0].mlp.fc1.weight] == depths[model.blocks[1].mlp.fc1.weight] + 1
    assert depths.keys() == set(model.parameters()) and min(depths.values()) == 1


def test_stages_are_frozen_by_timms_names(settings):
    learner = run(settings, "resnet18", model_name="replay", freeze=["conv1", "layer1.0"]).learner
    grow_for(learner, learner.manager.tasks[0])
    learns = {name for name, p in learner.network.backbone.named_parameters() if p.requires_grad}
    assert "bn1.weight" in learns and "layer2.0.conv1.weight" in learns
    assert not [name for name in learns if name.startswith(("conv1", "layer1.0"))]


@pytest.mark.parametrize(
    "more, line",
    [
        ({"convnet_type": "timm:resnet81"}, r"convnet_type: timm .* has no model 'resnet81'; did you mean 'resnet"),
        ({"convnet_type": "timm:resnet18.foo"}, "convnet_type: timm .*: Invalid pretrained tag"),
        ({"model_name": "memo"}, "model_name: 'memo' splits the backbone, which 'timm:resnet18' does not support"),
        ({"convnet_type": "resnet8", "pretrained": True}, "pretrained: applies to timm models only"),
        ({"convnet_type": "resnet8", "pretrained": ""}, "pretrained: applies to timm models only"),
        ({"convnet_type": "resnet8", "grad_checkpointing": True}, "grad_checkpointing: applies to timm models only"),
        (
            {"batch_norm_parts": 2, "grad_checkpointing": True},
            "batch_norm_parts: does not work with grad_checkpointing",
        ),
        (
            {"model_name": "ewc", "fisher": "samples", "grad_checkpointing": True},
            "fisher: 'samples' does not work with grad_checkpointing",
        ),
    ],
)
def test_what_does_not_fit_is_one_line_before_anything_is_trained(more, line, settings):
    with pytest.raises(UserError, match=line):
        resolve(settings | {"convnet_type": "timm:resnet18"} | more)


@pytest.mark.slow
def test_several_processes_recompute_activations_of_networks_without_batch_norm_only(settings, tmp_path, capfd):
    def results(model, out, command):
        path = write(tmp_path, settings | keys(model, grad_checkpointing=True, out=str(tmp_path / out), max_tasks=1))
        return command(path), [json.loads(file.read_text()) for file in (tmp_path / out).rglob("result.json")]

    def in_two(path):
        return in_two_processes(commanded, "--config", path)

    _, [alone] = results("vit_tiny_patch16_224", "one", lambda path: commanded("--config", path))
    codes, [shared] = results("vit_tiny_patch16_224", "two", in_two)
    assert codes == [0, 0] and shared["processes"] == 2
    assert shared["train_loss"][0] == pytest.approx(alone["train_loss"][0], rel=1e-3)
    capfd.readouterr()
    codes, found = results("test_efficientnet", "norm", in_two)
    assert codes[0] == 1 and not found
    errors = capfd.readouterr().err
    assert "grad_checkpointing: several processes cannot train a network with batch norm" in errors
    assert "Traceback" not in errors


def test_a_download_of_weights_is_announced_in_one_line(monkeypatch, caplog):
    def create(name, pretrained, **arguments):
        assert (name in caplog.text) is pretrained
        return made(name, **arguments)

    made = timm.create_model
    monkeypatch.setattr(timm, "create_model", create)
    make_backbone("timm:resnet18", SMALL["resnet18"])
    assert not caplog.records
    make_backbone("timm:resnet18", SMALL["resnet18"], pretrained=True)
    assert caplog.messages == ["pretrained: timm downloads the weights of 'resnet18' if it has none yet"]


def test_wrong_files_are_one_line(settings, weights, tmp_path, caplog):
    from safetensors.torch import save_file

    def complaint(path, model="resnet18", **more):
        with pytest.raises(UserError) as caught:
            run(settings, model, pretrained=str(path), **more)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
        return str(caught.value)

    assert "cannot be read (No such file" in complaint(tmp_path / "none.pth")
    assert "cannot be read" in complaint(tmp_path / "none.safetensors")
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "text.safetensors").write_text("hello")
    assert "is not a file of weights" in complaint(tmp_path / "text.pth")
    assert "is not a file of weights" in complaint(tmp_path / "text.safetensors")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "whole.pth")
    assert "save its tensors: torch.save(model.state_dict(), path)" in complaint(tmp_path / "whole.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    assert "holds no tensors by name" in complaint(tmp_path / "list.pth")
    torch.save({"state_dict": {}}, tmp_path / "empty.pth")
    save_file({}, tmp_path / "empty.safetensors")
    assert "holds no tensors by name" in complaint(tmp_path / "empty.pth")
    assert "holds no tensors by name" in complaint(tmp_path / "empty.safetensors")
    torch.save({"bn1.weight": torch.zeros(64)}, tmp_path / "part.pth")
    assert "has no 'conv1.weight'" in complaint(tmp_path / "part.pth")
    path, _ = weights("resnet18")
    wide = {"convnet_options.channels": (16, 16, 16, 16)}
    assert "is of another model than timm's 'resnet18' (size mismatch" in complaint(path, **wide)
    assert "which timm's 'vit_tiny_patch16_224' needs" in complaint(path, "vit_tiny_patch16_224")
    assert not [record for record in caplog.records if record.name.startswith("timm")]  # no list of all names


def test_a_file_of_weights_runs_no_code(settings, tmp_path):
    class Sabotage:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"conv1.weight": Sabotage()}, tmp_path / "evil.pth")
    with pytest.raises(UserError, match="holds Python objects, which are not loaded; save its tensors"):
        run(settings, "resnet18", pretrained=str(tmp_path / "evil.pth"))
    assert not (tmp_path / "ran").exists()


def test_wrong_options_and_missing_weights_are_one_line(settings):
    with pytest.raises(UserError, match="timm cannot create 'resnet18' .*widht"):
        run(settings, "resnet18", **{"convnet_options.widht": 3})
    with pytest.raises(UserError, match="pretrained: no weights for timm's 'resnet18' .*give a file"):
        run(settings, "resnet18", pretrained=True)  # tests do not reach the hub


def test_recomputed_activations_are_not_collected_in_batch_norm_twice():
    """The same statistics, gradients and number of batches as without."""
    images, found = torch.randn(4, 3, 64, 64), []
    for recomputed in (False, True):
        torch.manual_seed(0)
        network = make_backbone("timm:test_efficientnet", grad_checkpointing=recomputed).train()
        for _ in range(2):
            network(images).square().sum().backward()
        found.append({name: value.clone() for name, value in network.state_dict().items()})
        found[-1] |= {f"{name}.grad": parameter.grad for name, parameter in network.named_parameters()}
        network.eval()(images)
    plain, other = found
    assert plain.keys() == other.keys() and any("running_mean" in name for name in plain)
    for name, value in plain.items():
        torch.testing.assert_close(other[name], value, msg=name)


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_classes", 10),
        ("pretrained", True),
        ("features_only", True),
        ("in_chans", 1),
        ("checkpoint_path", "a.pth"),
        ("pretrained_cfg", {}),
        ("cache_dir", "a"),
    ],
)
def test_an_argument_of_timm_that_is_not_an_option_is_refused_by_name(name, value, settings):
    with pytest.raises(UserError, match=rf"^convnet_options\.{name}: cannot be set"):
        resolve(settings | keys("resnet18", **{f"convnet_options.{name}": value}))
    with pytest.raises(UserError, match=rf"^convnet_options\.{name}: cannot be set"):
        make_backbone("timm:resnet18", {name: value})


@pytest.mark.parametrize(
    "model, more, line",
    [
        (
            "resnet18",
            {"convnet_options.global_pool": ""},
            "convnet_type: 'timm:resnet18' gives features of shape (1, 8, 1, 1) for one image, not features of ",
        ),
        ("convnext_atto", {"image_size": 8}, "convnet_type: 'timm:convnext_atto' cannot process an image of side 8 ("),
    ],
)
def test_a_backbone_without_a_vector_of_features_for_an_image_is_refused_before_anything_is_trained(
    model, more, line, settings
):
    config = resolve(settings | keys(model, **more))
    with pytest.raises(UserError) as caught:
        check_backbone(config, config.image_size)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_memo_refuses_a_transformer_of_another_kind_before_anything_is_trained(settings):
    model = "vit_relpos_small_patch16_224"
    options = SMALL[TRANSFORMER] | {"depth": 1}
    more = {f"convnet_options.{name}": value for name, value in options.items()}
    config = resolve(settings | keys(TRANSFORMER) | more | {"convnet_type": f"timm:{model}", "model_name": "memo"})
    with pytest.raises(UserError, match=rf"^convnet_type: 'timm:{model}' has no split\(\) into a shared trunk"):
        check_backbone(config, config.image_size)


def test_the_check_of_the_features_changes_no_statistics_and_draws_nothing():
    backbone = make_backbone("timm:resnet18", SMALL["resnet18"] | {"drop_path_rate": 0.5, "drop_rate": 0.5})
    before, drawn = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}, torch.get_rng_state()
    check_features(backbone, 32, "timm:resnet18")
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_scripts_written_for_pycil_refuse_its_models(settings):
    """Their DataManager would give the images another size and normalisation than a run does."""
    with pytest.raises(UserError, match="timm's models are not available in scripts written for PyCIL"):
        get_model("replay", {"convnet_type": "timm:resnet18", "device": "cpu"})


def test_without_timm_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    timm_models.data_config.cache_clear()
    with pytest.raises(UserError, match=r"timm is not installed; pip install timm safetensors"):
        resolve({"convnet_type": "timm:resnet18"})


def test_other_weights_in_the_same_file_are_another_first_task(settings, weights):
    path, state = weights("resnet18")
    before = run(settings, "resnet18", pretrained=path)
    keys_of_first = [before.first_task_file()]
    torch.save(state | {"conv1.weight": 2 * state["conv1.weight"]}, path)
    after = run(settings, "resnet18", pretrained=path)
    assert after.first_task_file() not in keys_of_first


@pytest.mark.slow
def test_runs_of_other_weights_in_the_same_file_are_not_mixed(settings, weights, tmp_path, capsys):
    path, state = weights("resnet18")
    model = keys("resnet18", pretrained=path, model_name="ncm", max_tasks=1)
    lists = {name: [list(value)] for name, value in model.items() if isinstance(value, tuple)}  # not several values
    sweep = settings | model | lists | {"seed": [1]}
    assert main(["--config", write(tmp_path, sweep)]) == 0
    capsys.readouterr()
    torch.save(state, path)
    more = write(tmp_path, sweep | {"seed": [1, 2]})
    assert main(["--config", more, "--dry-run"]) == 0, "the same weights in a file written anew"
    torch.save(state | {"conv1.weight": 2 * state["conv1.weight"]}, path)
    assert main(["--config", more]) == 1
    errors = capsys.readouterr().err
    assert "result.json: was made with other data (then pre-trained weights of sha256" in errors
    assert errors.count("\n") == 1


def test_new_keys_leave_old_folders_alone_and_are_part_of_new_ones(tmp_path):
    plain = resolve({"model_name": "icarl", "lrate": 0.05})
    assert run_folder(plain).name == "seed1993-269b71df"
    ours = resolve({"convnet_type": "timm:resnet18", "pretrained": True})
    assert json.loads(json.dumps(ours.to_dict()))["pretrained"] is True and resolve(ours.to_dict()) == ours
    assert run_folder(ours) != run_folder(resolve({"convnet_type": "timm:resnet18"}))


FROZEN_PARTS = {  # (copies of the backbone, those that are as they were)
    "aper_adapter": ({"ffn_num": 4}, 1, 1),  # tunes a frozen transformer
    "slda": ({}, 1, 1),  # trains nothing
    "der": ({"freeze": ["backbone"]}, 2, 2),
    "duct": ({}, 2, 1),  # trains the transformer, and keeps it as it was
    "replay": ({}, 1, 0),
}


@pytest.mark.parametrize("learner", FROZEN_PARTS)
def test_files_of_a_run_hold_what_was_trained_and_name_the_backbone_without_which_they_are_refused(
    learner, settings, weights, tmp_path
):
    more, copies, unchanged = FROZEN_PARTS[learner]
    path, state = weights("vit_tiny_patch16_224")
    given = {"model_name": learner, "max_tasks": 2, "pretrained": path, "save_weights": "every"} | more
    finished = run(settings, "vit_tiny_patch16_224", **given)
    result = finished.execute()
    images, labels = finished.dataset.test.images, finished.dataset.test.targets
    seen = np.isin(labels, result["class_order"][:4])
    said = load_state(finished.folder / "weights-task1.pt")
    places = list(said["backbone"]["unchanged"].values())
    assert sorted(places) == sorted(unchanged * list(made_by(given).state_dict()))
    assert not set(said["backbone"]["unchanged"]) & set(said["learner"])
    assert sum("attn.qkv.weight" in name for name in said["learner"]) == 2 * (copies - unchanged)
    assert said["backbone"]["name"] == "timm:vit_tiny_patch16_224"

    moved = Path(path).rename(tmp_path / "moved.pth")
    if unchanged:
        with pytest.raises(UserError, match=r"weights-task1.pt: pretrained: .* cannot be read \(No such file"):
            pycil_wsc.load(finished.folder)
    loaded = pycil_wsc.load(finished.folder, pretrained=str(moved))
    assert 100 * np.mean(loaded.predict(images[seen]) == labels[seen]) == pytest.approx(result["last_acc"])
    state["blocks.0.mlp.fc1.bias"][0] += 1
    torch.save(state, moved)
    if unchanged:
        with pytest.raises(UserError, match="pretrained: these are other weights of 'timm:vit_tiny_patch16_224' than "):
            pycil_wsc.load(finished.folder, pretrained=str(moved))
    else:
        pycil_wsc.load(finished.folder)  # the weights are all there


def made_by(given):
    return make_backbone("timm:vit_tiny_patch16_224", SMALL["vit_tiny_patch16_224"], given["pretrained"], 32)


def test_a_run_on_a_frozen_backbone_resumes_from_what_was_trained(settings, weights):
    path, _ = weights("vit_tiny_patch16_224")
    given = {"model_name": "aper_adapter", "ffn_num": 4, "max_tasks": 2, "pretrained": path, "init_epoch": 2}
    whole = run(settings, "vit_tiny_patch16_224", out=f"{settings['out']}-whole", **given).execute()
    given |= {"checkpoint_seconds": 0}
    with killed_at(lambda calls: len(calls) == 1):
        run(settings, "vit_tiny_patch16_224", **given).execute()
    again = run(settings, "vit_tiny_patch16_224", **given)
    kept = load_state(again.folder / "checkpoint.pt")["learner"]
    assert kept and not any("attn.qkv" in name for name in kept)
    assert without_measurements(again.execute()) == without_measurements(whole)
