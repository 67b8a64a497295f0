"""PyCIL's ``get_model``: the package's learners with PyCIL's interface."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from convs.resnet import stem
from pycil_wsc.config.image_config import KEYS
from pycil_wsc.config.loading import flatten, resolve
from pycil_wsc.config.pycil_files import our_names, our_values
from pycil_wsc.data.batches.loader import open_source
from pycil_wsc.devices import numbered, resolved_device
from pycil_wsc.errors import UserError
from pycil_wsc.methods.configured import configured_learner
from pycil_wsc.networks.timm_models import is_timm
from pycil_wsc.results import metrics
from pycil_wsc.runs.predictions import predictions
from utils.data_manager import DataManager
from utils.toolkit import accuracy

# what a run does around the learner: with its data before, with the processor, with files
OF_WHOLE_RUNS = {name for name, key in KEYS.items() if key.decides in ("data", "files")}
OF_WHOLE_RUNS -= {"dataset", "shuffle", "init_cls", "increment", "data_root"}  # the DataManager's
OF_WHOLE_RUNS |= {"max_tasks", "validation_split", "memory_bytes", "cache_images", "deterministic", "threads"}
IGNORED = ("aug", "config", "csv_name", "logfilename", "time_str")  # keys of PyCIL's trainer without effect here
RESNET18 = {"imagenet": "resnet18", "cifar": "resnet18_cifar", "small": "resnet18_small"}  # by the stem
NO_MONITOR = dict.fromkeys(("task_started", "phase_started", "step", "epoch_ended", "task_trained"), lambda *_: None)


def get_model(model_name: str, args: Mapping[str, Any]) -> "Model":
    """The learner ``model_name`` with the keys ``args``, as in a JSON file of PyCIL.

    Raises :class:`pycil_wsc.errors.UserError` for an unknown learner or key, or one that only whole runs have.
    """
    keys = {name: value for name, value in args.items() if name not in IGNORED} | {"model_name": model_name.lower()}
    device = keys.get("device")
    if isinstance(device, list) and device and isinstance(device[0], torch.device):  # from PyCIL's trainer
        keys["device"] = str(device[0])
    if isinstance(keys.get("seed"), list):
        keys["seed"] = keys["seed"][0]
    if keys.get("convnet_type") == "resnet18":
        keys["convnet_type"] = RESNET18[stem(keys)]
    config = resolve(our_values(our_names(flatten(keys))))
    if is_timm(config.convnet_type):
        raise UserError("convnet_type: timm's models are not available in scripts written for PyCIL; use main.py")
    for name in sorted(OF_WHOLE_RUNS):
        value = getattr(config, name)
        if value != KEYS[name].default and name in keys:
            raise UserError(f"{name}: is not available in scripts written for PyCIL; leave it out, or use main.py")
        if value != KEYS[name].default:
            raise UserError(f"model_name: '{config.method}' needs {name} {value!r}, as main.py sets it; use main.py")
    return Model(args, config)


class Model:
    """A learner with the methods that PyCIL's trainer calls: ``incremental_train``, ``eval_task``, ``after_task``."""

    def __init__(self, args: Mapping[str, Any], config: Any):
        self.args, self.device = args, numbered(resolved_device(config.device))
        learner: Any = configured_learner(config)  # its data come with the first task
        self.learner = learner(config, None, None, self.device)
        self._cur_task, self._known_classes, self._total_classes = -1, 0, 0

    @property
    def _network(self) -> nn.Module:
        return self.learner.network

    @property
    def exemplar_size(self) -> int:
        return len(self.learner.memory)

    def incremental_train(self, data_manager: DataManager) -> None:
        """Learn the next task."""
        data, learner = data_manager.dataset, self.learner
        if learner.manager is None:
            learner.manager = data_manager.manager
            learner.batches.source, self.test_source = (
                open_source(data.info, split, self.device, learner.config.num_workers)
                for split in (data.train, data.test)
            )
        self._cur_task += 1
        self.task = learner.manager.tasks[self._cur_task]
        self._total_classes = self.task.num_seen
        learner.learn(self.task, SimpleNamespace(**NO_MONITOR))

    def eval_task(self, save_conf: bool = False) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Accuracies on all classes seen, in percent, by logits and by nearest mean of exemplars (or None).

        Each is {"grouped": see :func:`utils.toolkit.accuracy`, "top1", "top5"}. ``save_conf`` must be false.
        """
        if save_conf:
            raise UserError(
                "eval_task: save_conf=True is not available here; leave it out, or use main.py, whose result.json has "
                "the confusion matrix as 'confusion'"
            )
        found = predictions(self.learner, self.test_source, self.task)
        return self._accuracies(found.cnn), None if found.nme is None else self._accuracies(found.nme)

    def after_task(self) -> None:
        self._known_classes = self._total_classes

    def _accuracies(self, best):
        targets: np.ndarray = self.learner.manager.test_targets[self.task.test_indices]
        grouped = accuracy(best[:, 0], targets, self._known_classes)
        return {"grouped": grouped, "top1": grouped["total"], "top5": round(metrics.top_k_accuracy(best, targets), 2)}
