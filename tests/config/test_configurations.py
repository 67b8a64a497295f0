"""Files of PyCIL with keys for several data sets."""

import json

import pytest

from pycil_wsc.config.loading import load
from pycil_wsc.errors import UserError


def pycils(path, **keys):
    """A file with a set of keys for each of two data sets."""
    content = {"model_name": "ds-al", "dataset": "cifar100", "init_batch_size": 64, "memory_size": 0, "seed": [1993]}
    schedule = {"type": "MultiStep", "init_lr": 0.2, "init_epochs": 90, "warmup": 0, "milestones": [30], "decay": 0.3}
    small = {"buffer_size": 99, "gamma_comp": 0.5, "init_weight_decay": 1e-3, "scheduler": schedule}
    other = {"buffer_size": 7, "scheduler": {"type": "CosineAnnealing", "init_epochs": 3}}
    content["configurations"] = {"cifar100": small, "digits": other}
    path.write_text(json.dumps(content | keys))
    return path


def test_the_keys_of_the_data_set_are_those_of_the_file(tmp_path):
    (run,) = load(pycils(tmp_path / "ds-al.json"))
    assert (run.options.buffer_size, run.options.gamma_comp) == (99, 0.5)
    assert (run.init_weight_decay, run.batch_size) == (1e-3, 64)
    assert (run.scheduler, run.init_lr, run.init_epoch) == ("steplr", 0.2, 90)
    assert (run.init_milestones, run.init_lr_decay, run.warmup_epochs) == ((30,), 0.3, 0)
    (other,) = load(pycils(tmp_path / "ds-al.json"), {"dataset": "digits"})
    assert (other.options.buffer_size, other.scheduler, other.init_epoch, other.min_lr) == (7, "cosine", 3, 1e-6)
    with pytest.raises(
        UserError, match="configurations: has no keys for dataset 'imagenet100', only for cifar100, dig"
    ):
        load(pycils(tmp_path / "ds-al.json", dataset="imagenet100"))
    with pytest.raises(UserError, match="unknown key 'configurations.cifar100'"):
        load(pycils(tmp_path / "replay.json", model_name="replay"))
    wrong = {"digits": {"scheduler": {"gamma": 3}}}
    with pytest.raises(UserError, match="unknown key 'scheduler.gamma'"):
        load(pycils(tmp_path / "ds-al.json", dataset="digits", configurations=wrong))
    warm = {"digits": {"scheduler": {"type": "MultiStep", "warmup": 5}}}
    with pytest.raises(UserError, match="scheduler.warmup: .* is not built in; .* give warmup_epochs"):
        load(pycils(tmp_path / "acil.json", model_name="acil", dataset="digits", configurations=warm))
