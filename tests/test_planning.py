"""What could not be trained is refused before anything is trained."""

from pathlib import Path

import pytest
import torch
from small_runs import results, write
from torch import nn

from main import main
from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.runs.planning import check_backbone

pytestmark = pytest.mark.usefixtures("unreported")


class Whole(nn.Module):
    """A backbone without a split."""

    def __init__(self):
        super().__init__()
        self.out_dim, self.layers = 3, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, images):
        return self.layers(images)


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--workers", "2"]])
@pytest.mark.parametrize(
    "keys, line",
    [
        ({"freeze": [["stem"], ["stage4"]]}, "freeze: the backbone has no part 'stage4'"),
        (
            {"convnet_type": "resnet18", "runs": [{}, {"convnet_options.stem": "foo"}]},
            "convnet_options of 'resnet18': ",
        ),
        (
            {"runs": [{}, {"fixed_memory": False, "memory_size": 3}]},
            "memory_size: the memory holds 3 exemplars, fewer than one for each of the 4 classes before task 3; ",
        ),
    ],
)
def test_a_wrong_run_at_the_end_of_a_sweep_stops_it_at_the_start(keys, line, options, settings, tmp_path, capsys):
    assert main(["--config", write(tmp_path, settings | keys), *options]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {line}") and errors.count("\n") == 1
    assert not results(settings) and not list(Path(settings["out"]).rglob("metrics.jsonl"))


def test_a_backbone_that_memo_cannot_split_stops_a_sweep_at_the_start(settings, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(registry.backbones, "whole", Whole)
    keys = {"convnet_type": "whole", "model_name": ["replay", "memo"]}
    assert main(["--config", write(tmp_path, settings | keys)]) == 2
    assert "which MEMO needs" in capsys.readouterr().err and not results(settings)


def test_a_finished_run_is_skipped_even_where_its_backbone_can_no_longer_be_built(settings, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.backbones, "whole", Whole)
    keys = {"convnet_type": "whole", "model_name": "finetune", "init_epoch": 1, "epochs": 1}
    path = write(tmp_path, settings | keys)
    assert main(["--config", path]) == 0

    def broken():
        raise ValueError("no longer")

    monkeypatch.setitem(registry.backbones, "whole", broken)
    monkeypatch.setattr("pycil_wsc.runs.planning._buildable", set())
    assert main(["--config", path]) == 0 and main(["--config", path, "--dry-run"]) == 0


def test_planning_changes_nothing_of_what_is_random(settings):
    config = resolve(settings | {"convnet_options.width": 5})
    before = torch.get_rng_state()
    check_backbone(config, load_dataset(config.dataset, ".").info.image_size)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_file_of_weights_that_is_not_there_is_named_before_another_run_trains(settings, tmp_path, capsys):
    pytest.importorskip("timm")
    keys = {"convnet_type": "timm:resnet18", "pretrained": [False, str(tmp_path / "no.pth")], "image_size": 32}
    assert main(["--config", write(tmp_path, settings | keys)]) == 2
    assert "pretrained: " in capsys.readouterr().err
    assert not results(settings) and not list(Path(settings["out"]).rglob("metrics.jsonl"))
