"""PILOT's JSON files: all 48 settings, by the code of a dry run."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.pilot_files import files

from main import main
from pycil_wsc.config.loading import load
from pycil_wsc.config.pilot_files import our_names
from pycil_wsc.errors import UserError

FILES = files()
REFUSED = {"aper_vpt_shallow_inr": "backbone_type: 'pretrained_vit_b16_224' has no prompts"}
TINY = {"convnet_options.depth": 2, "convnet_options.embed_dim": 24, "convnet_options.num_heads": 2}
STOCK = os.environ.get("PILOT_EXPS")  # the folder exps of PILOT's repository


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """CIFAR-100 and ImageNet-R with two images of each class."""
    root = tmp_path_factory.mktemp("data")
    targets = np.repeat(np.arange(100), 2)
    images = np.random.default_rng(0).integers(0, 256, (200, 32, 32, 3), np.uint8)
    np.savez(root / "cifar100.npz", train_x=images, train_y=targets, test_x=images, test_y=targets)
    image = root / "image.png"
    Image.fromarray(images[0]).save(image)
    for part in ("train", "test"):
        for number in range(200):
            folder = root / "imagenet-r" / part / f"n{number:03}"
            folder.mkdir(parents=True)
            for name in ("a.png", "b.png"):
                os.link(image, folder / name)
    return root


def write(folder, keys):
    path = folder / "file.json"
    path.write_text(json.dumps(keys))
    return path


@pytest.mark.parametrize("name", FILES)
def test_each_of_pilots_files_is_planned_or_refused_in_one_line(name, data, tmp_path, capsys):
    path = write(tmp_path, FILES[name])
    tiny = [f"--set={key}={value}" for key, value in TINY.items()]
    code = main(["--config", str(path), "--dry-run", "--data-root", str(data), "--out", str(tmp_path), *tiny])
    printed = capsys.readouterr()
    if name in REFUSED:
        assert code == 2
        assert printed.err.startswith(f"error: {path}: {REFUSED[name]}")
        assert printed.err.count("\n") == 1
        return
    assert code == 0, printed.err
    assert "has no effect" not in printed.err
    assert "1 run" in printed.out


def test_the_settings_are_those_of_pilots_repository():
    if STOCK is None:
        pytest.skip("PILOT_EXPS does not name the folder exps of PILOT's repository")
    found = {path.stem: json.loads(path.read_text()) for path in Path(STOCK).glob("*.json")}
    assert found == FILES


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("pretrained_vit_b16_224", "augreg_in21k_ft_in1k"),
        ("pretrained_vit_b16_224_adapter", "augreg_in21k_ft_in1k"),
        ("vit_base_patch16_224", "augreg_in21k_ft_in1k"),
        ("pretrained_vit_b16_224_in21k", "augreg_in21k"),
        ("pretrained_vit_b16_224_in21k_adapter", "augreg_in21k"),
        ("vit_base_patch16_224_in21k", "augreg_in21k"),
    ],
)
def test_pilots_names_of_weights_are_tags_of_timm(name, tag, tmp_path):
    path = write(tmp_path, FILES["finetune"] | {"backbone_type": name})
    (run,) = load(path)
    assert run.convnet_type == f"timm:vit_base_patch16_224.{tag}"
    assert run.pretrained is True


def test_a_method_that_tunes_once_has_pilots_schedule_in_the_first_task(tmp_path):
    (run,) = load(write(tmp_path, FILES["aper_finetune_inr"]))
    assert (run.init_epoch, run.init_lr, run.init_weight_decay, run.scheduler) == (5, 0.01, 0.005, "cosine")
    (run,) = load(write(tmp_path, FILES["aper_finetune"] | {"optimizer": "adam"}))
    assert run.optimizer == "adamw", "as in PILOT's code"


def test_one_schedule_is_that_of_all_tasks(tmp_path):
    (run,) = load(write(tmp_path, FILES["coil"] | {"milestones": [8, 120]}))
    assert (run.init_epoch, run.epochs, run.init_lr, run.lrate) == (10, 10, 0.001, 0.001)
    assert run.init_milestones == run.milestones == (8,)


def test_milestones_beyond_the_end_have_no_effect(tmp_path):
    (run,) = load(write(tmp_path, FILES["icarl"]))
    assert run.init_milestones == run.milestones == ()


def test_both_names_of_a_key_can_be_overridden(tmp_path):
    path = write(tmp_path, FILES["aper_finetune"])
    for name in ("tuned_epoch", "init_epoch"):
        (run,) = load(path, {name: 3})
        assert run.init_epoch == 3
    (run,) = load(path, {"convnet_type": "timm:vit_small_patch16_224"})
    assert run.convnet_type == "timm:vit_small_patch16_224"


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (
            "backbone_type: 'vit_huge' is not one of PILOT's transformers",
            {"backbone_type": "vit_huge"},
        ),
        (
            "tuned_epoch: is PILOT's name of init_epoch, which is given, too; leave one of the two out",
            {"init_epoch": 2},
        ),
        ("use_RP: without the projection, PILOT's code has no classifier; leave the key out", {"use_RP": False}),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(message, changes):
    with pytest.raises(UserError) as caught:
        our_names(FILES["ranpac"] | changes)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_pilots_names_are_refused_in_other_files(tmp_path):
    path = write(tmp_path, {"model_name": "ranpac", "M": 100})
    with pytest.raises(
        UserError, match="M: is accepted in PILOT's files only, which have backbone_type; use projection"
    ):
        load(path)
