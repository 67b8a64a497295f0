"""Runs of a second or two for tests: their data, command and results."""

import contextlib
import faulthandler
import hashlib
import json
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from filelock import FileLock
from torch import nn
from torch.nn.functional import avg_pool2d

from main import main
from pycil_wsc import registry
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.config.loading import resolve
from pycil_wsc.launch.attempt import Datasets, execute
from pycil_wsc.networks.backbones.cifar_resnet import stage
from pycil_wsc.networks.backbones.staged import StagedBackbone
from pycil_wsc.registry import register_backbone
from pycil_wsc.runs.run import Run
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.step.cost import StepCost

ROOT = Path(__file__).parents[2]
MEASURED = {"train_seconds", "train_seconds_spent", "total_seconds", "importance_seconds", "peak_memory_bytes"}


def batch_of(images, targets, indices=None, from_memory=None):
    """A batch as a loss gets it; without more, of the task's own images."""
    indices = torch.arange(len(targets)) if indices is None else indices
    return Batch(
        images, targets, indices, torch.zeros(len(targets), dtype=torch.bool) if from_memory is None else from_memory
    )


def assert_slopes(learner, value, names, step=1e-6):
    """The gradient of each parameter of the network is the slope of ``value()``, where it is largest; float64."""
    for name in names:
        weights = learner.network.get_parameter(name)
        place = np.unravel_index(weights.grad.abs().argmax().item(), weights.shape)
        values = []
        for move in (step, -2 * step):
            weights.data[place] += move
            values.append(value())
        weights.data[place] += step
        assert weights.grad[place].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4), name


def small_data(path, classes=6, per_class=12, size=8):
    """Noisy class templates, as an npz file."""
    rng = np.random.default_rng(0)
    templates = rng.integers(0, 200, (classes, size, size, 3))
    arrays = {}
    for split in ("train", "test"):
        targets = np.repeat(np.arange(classes), per_class)
        arrays[f"{split}_x"] = (templates[targets] + rng.integers(0, 56, (len(targets), size, size, 3))).astype(
            np.uint8
        )
        arrays[f"{split}_y"] = targets
    np.savez(path, **arrays)
    return path


@register_backbone("tiny")
class Tiny(StagedBackbone):
    """(B, 3, 4 k, 4 k) -> (B, 8 width): a ResNet of one block, for runs in which the backbone does not matter."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.stage1 = stage(width, 2 * width, 1, 2)
        self.pool, self.out_dim = Quadrants(), 8 * width


@register_backbone("wider")
class Wider(Tiny):
    """With twice the channels, for comparisons whose seeds were chosen so that rounding stays rounding."""

    def __init__(self, width: int = 16):
        super().__init__(width)


class Quadrants(nn.Module):
    """(B, d, 2 k, 2 k) -> (B, 4 d): the mean of each quarter of the image."""

    def forward(self, x):
        return avg_pool2d(x, x.shape[-1] // 2).flatten(1)


SETTINGS = {  # three tasks of two classes, a schedule that takes seconds
    "memory_per_class": 4,
    "init_cls": 2,
    "increment": 2,
    "model_name": "wsc",
    "convnet_type": "tiny",
    "device": "cpu",
    "init_epoch": 3,
    "epochs": 4,
    "batch_size": 8,
    "wsc.average_every": 1,
    "checkpoint_seconds": 0,
    "buffer_size": 64,  # random features, of methods that have them
    "projection": 64,
    "proj_hidden_dim": 32,  # of TagFex, whose own are as large as the rest of the network
    "proj_output_dim": 16,
    "anchor_steps": 2,
}


# the keys of the runs that are stopped; a warm-up has two epochs
STOPPED = {"exemplars": "random", "wsc.warmup": 0.5, "wsc.average_every": 2}
PROTOTYPES = ("il2a", "pass", "ssre")  # their constants are for a hundred epochs
FASTER = {"init_lr": 0.01, "lrate": 0.01, "lambda_fkd": 0.1, "lambda_proto": 0.1, "precision": "fp32"}
LARGER = {  # with "tiny" as it is they learn little in so few epochs
    "beef": {"convnet_options.width": 32},
    "foster": {"convnet_options.width": 32},
    "pass": {"convnet_type": "resnet8"},
    "dgr": {"init_lr": 0.1, "lrate": 0.1},
    "lucir": {"convnet_options.width": 16},
    "slca_cofima": {"convnet_options.width": 16, "init_lr": 0.1, "lrate": 0.1, "backbone_lr_factor": 1.0},
    "slca": {"convnet_options.width": 16, "init_lr": 0.1, "lrate": 0.1, "backbone_lr_factor": 1.0},
    "duct": {"convnet_options.width": 16, "init_lr": 0.3, "lrate": 0.3, "epc_re": 20, "lr_re": 1.0}
    | {"merge_scalar": 1.0, "head_merge_ratio": 0.0},
}


TRANSFORMER = {  # for images of 8 pixels
    "convnet_type": "timm:test_vit",
    "image_size": 8,
    "convnet_options.patch_size": 4,
    "convnet_options.embed_dim": 16,
    "convnet_options.depth": 2,
    "convnet_options.num_heads": 2,
    "convnet_options.mlp_ratio": 1,
    "pretrained": False,
    "init_lr": 0.01,
    "lrate": 0.01,
}
OF_TWO_BLOCKS = {
    "aper_adapter": {"ffn_num": 4},
    "coda_prompt": {"prompt_param": [12, 4, 0.1]},
    "l2p": {"size": 4, "top_k": 2, "head_type": "token"},
    "dualprompt": {"g_prompt_layer_idx": [0], "e_prompt_layer_idx": [1]},
    "ease": {"ffn_num": 4},
    "lae": {"num_freeze_epochs": 2, "pet_length": 3},
    "mos": {"ffn_num": 4, "crct_epochs": 2, "ca_batches": 2},
}


def suited(name):
    """The backbone of a method that needs a vision transformer, and keys that suit it; others have none."""
    return TRANSFORMER | OF_TWO_BLOCKS.get(name, {}) if registry.learners[name].Plan.tunes else {}


def stopped(name):
    """Keys of the runs of a learner that tests stop, load and compare with."""
    return STOPPED | (FASTER if name in PROTOTYPES else {}) | LARGER.get(name, {}) | suited(name)


def once(path: Path, make):
    """What ``make()`` returns, called by the first of all processes that ask for this path; the others read it there.

    A worker may get some of a file's tests, or some of them twice, and would make what they share again.
    """
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.write_bytes(pickle.dumps(make()))
    return pickle.loads(path.read_bytes())


class Undisturbed:
    """Finished, undisturbed runs to compare others with.
    Each is made once for all processes that test, saves the weights after each task, and writes no checkpoint.

    Args:
        folder: where the runs and their data go; the same in all these processes.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        with FileLock(folder / "lock"):
            if not (folder / "data.npz").exists():
                small_data(folder / "data.npz")

    def __call__(self, **keys) -> tuple[Path, dict]:
        """The folder and the result of the run with these keys, which override ``SETTINGS``."""
        name = hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:16]
        given = {"dataset": f"npz:{self.folder / 'data.npz'}", "out": str(self.folder / name), "save_weights": "every"}
        settings = SETTINGS | given | keys
        with FileLock(self.folder / f"{name}.lock"):
            if not results(settings):
                with without_checkpoints():
                    executed(settings)
            ((folder, result),) = results(settings).items()
        return folder, result


def run_of(settings, **keys):
    """The run with these settings, which has not begun."""
    config = resolve(settings | keys)
    return Run(config, Datasets().of(config))


def executed(settings):
    """The folder and the result of the run with these settings, without the command line and its report."""
    config = resolve(settings)
    result = execute(config, Datasets(), lambda progress: None)
    return run_folder(config), result


@contextlib.contextmanager
def undrawn():
    """Within, reports have no figures, which take most of their time."""
    with patch("pycil_wsc.report.page.figures", lambda group: ()):
        yield


def uncounted():
    """Within, the operations of a step are not counted, which takes longer than the step."""
    return patch.object(StepCost, "unknown", False)


def without_checkpoints():
    """Within, runs write no checkpoints, which small runs write at the end of each task whatever their settings."""
    return patch.object(Run, "_checkpoint", lambda *arguments: None)


def write(tmp_path, settings):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings))
    return str(path)


def results(settings):
    return {path.parent: json.loads(path.read_text()) for path in Path(settings["out"]).rglob("result.json")}


def without_measurements(result):
    return {key: value for key, value in result.items() if key not in MEASURED}


class Command(multiprocessing.get_context("fork").Process):
    """A fork of this process, which need not import torch again, runs a Python script with these arguments: by default
    main.py. Like ``subprocess.Popen``. ``prepare`` is called first, in the fork.
    """

    def __init__(self, arguments, script=None, prepare=lambda: None):
        super().__init__()
        self.arguments, self.script, self.prepare = [str(argument) for argument in arguments], script, prepare
        self.streams = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        self.start()

    def run(self):
        os.setsid()
        forkserver._forkserver._forkserver_pid = None  # the parent's server is no child of this process
        for descriptor, stream in enumerate(self.streams, 1):
            os.dup2(stream.fileno(), descriptor)
        sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", 1, closefd=False) for descriptor in (1, 2))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
        faulthandler.register(signal.SIGUSR1, self.streams[1])
        sys.argv = [str(self.script or "main.py"), *self.arguments]
        self.prepare()
        if self.script is None:
            sys.exit(main())
        runpy.run_path(str(self.script), run_name="__main__")

    @property
    def returncode(self):
        return self.exitcode

    def poll(self):
        return self.exitcode

    def wait(self, timeout=None):
        self.join(timeout)
        return self.exitcode

    def communicate(self, timeout=None):
        """What it has written to standard output and standard error, when it has ended. After ``timeout`` it is killed,
        and where it stood is part of the error."""
        self.join(timeout)
        if stuck := self.exitcode is None:
            os.kill(self.pid, signal.SIGUSR1)
            self.join(2)
            os.killpg(self.pid, signal.SIGKILL)
            self.join()
        for stream in self.streams:
            stream.seek(0)
        output, errors = (stream.read() for stream in self.streams)
        assert not stuck, f"still running after {timeout} s:\n{errors}"
        return output, errors

    def printed(self):
        """What it has written to standard output, when it has ended without an error."""
        output, errors = self.communicate()
        assert self.returncode == 0, errors
        return output


def command(tmp_path, settings, *options):
    return Command(["--config", write(tmp_path, settings), *options])


def wait_until(reached, process):
    """Wait until ``reached()`` is true; fails if ``process`` ends before that."""
    while not reached():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@contextlib.contextmanager
def waiting_at(last):
    """A process that is started within waits after its checkpoint number ``last``, however late it is killed."""
    checkpoint, calls = Run._checkpoint, []

    def checkpoint_and_wait(run, *arguments):
        checkpoint(run, *arguments)
        calls.append(arguments)
        while len(calls) >= last:
            time.sleep(1)

    with patch.object(Run, "_checkpoint", checkpoint_and_wait):
        yield


class Killed(BaseException):
    """Stands for SIGKILL where the test process must survive."""


@contextlib.contextmanager
def killed_at(last, of=Run, saved=True, earlier=True):
    """Within, a run dies at a checkpoint, ``saved`` just before or not at all.

    ``last``: the checkpoint's number, from 1, or a function of the list of what ``_checkpoint`` was called with so far.
    ``earlier``: whether earlier checkpoints are saved, which takes time.
    """
    checkpoint, calls = of._checkpoint, []

    def checkpoint_and_die(run, *arguments):
        calls.append(arguments)
        dies = last(calls) if callable(last) else len(calls) == last
        if saved if dies else earlier:
            checkpoint(run, *arguments)
        if dies:
            raise Killed

    with patch.object(of, "_checkpoint", checkpoint_and_die), pytest.raises(Killed):
        yield
