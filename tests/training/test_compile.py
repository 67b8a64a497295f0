"""Runs whose losses torch compiles: the plain runs up to rounding, compiled once per phase, and as resumable.

Torch compiles in two halves: the loss becomes a graph of operators, and this graph, with that of its gradient, becomes
kernels. Only the first half depends on how a loss is written. It is tested for every loss, once where learners share
it, and the second half for a few. With ``pytest tests/training/test_compile.py --inductor``, which takes several
minutes, both are tested for every learner.
"""

import json
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from support.small_runs import ROOT, Quadrants, killed_at, suited, without_checkpoints, without_measurements
from torch import nn

from pycil_wsc import registry
from pycil_wsc.config.loading import resolve, resolve_recorded
from pycil_wsc.errors import UnusableRun, UserError
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.networks.backbones.staged import StagedBackbone
from pycil_wsc.registry import register_backbone
from pycil_wsc.runs.run import Run
from pycil_wsc.training import loop

SHORT = {"init_epoch": 2, "epochs": 2, "batch_size": 6, "precision": "fp32", "wsc.warmup": 0.5, "max_tasks": 2}
SHORT |= {"cache_first_task": False, "convnet_type": "smallest", "langevin_steps": 1, "checkpoint_seconds": 3600}


@register_backbone("smallest")
class Smallest(StagedBackbone):
    """(B, 3, 4 k, 4 k) -> (B, 4 width): one convolution, since each is compiled for every learner, and what is between
    two of them is a kernel of its own.
    """

    def __init__(self, width: int = 8):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.stage1 = Scale(width)
        self.pool, self.out_dim = Quadrants(), 4 * width


class Scale(nn.Module):
    """(B, d, H, W) -> the same: each channel is multiplied by a number that is learned."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x):
        return x * self.weight


TO_KERNELS = ("icarl",)  # learners whose graphs become kernels
compiler = pytest.mark.skipif(not shutil.which("c++"), reason="torch's compiler for the CPU needs a C++ compiler")


def run(settings, **keys):
    config = resolve(settings | SHORT | suited(keys.get("model_name", "wsc")) | keys)
    return Run(config, Datasets().of(config), lambda progress: None)


@pytest.fixture(autouse=True)
def scalar_kernels():
    """Kernels are compiled without vector instructions: faster, and without asking the compiler for what it knows."""
    with torch._inductor.config.patch({"cpp.simdlen": 1, "cpp.vec_isa_ok": False}):
        yield


@pytest.fixture
def backend(request):
    """What graphs become: kernels for some learners, and otherwise they stay what they are, calls of operators."""
    keys = request.node.callspec.params["keys"]
    to_kernels = request.config.getoption("--inductor") or keys in [{"model_name": name} for name in TO_KERNELS]
    return torch._dynamo.lookup_backend("inductor" if to_kernels else "eager")


@pytest.fixture
def graphs(monkeypatch, backend):
    """For each graph that is compiled, the number of the phase, from 0, and that of the loss.

    Most phases have one loss; GEM has another for the memory, and EWC one for its Fisher information. The graphs of a
    first task go on to ``backend`` only for learners that train no other: a later task's loss has the same parts and
    more. They are counted, unless the loss is the plain cross-entropy of many learners.
    """
    phases, losses, found = [], [], []
    first = [False]  # whether the phase is of a first task, and later ones are trained
    plain = [False]  # whether its loss is the plain cross-entropy, too

    class Backward(loop.Backward):
        def __init__(self, *arguments):
            phases.append(len(phases))
            super().__init__(*arguments)

    def fit(learner, task, *others, fit=loop.fit):
        later = learner.manager.tasks[1]
        first[0] = not task.index and bool(learner.plan.planned_epochs(later))
        plain[0] = first[0] and learner.plan.plain_first_task
        fit(learner, task, *others)

    monkeypatch.setattr(loop, "Backward", Backward)
    monkeypatch.setattr(loop, "fit", fit)
    compile = torch.compile

    def counted(loss, dynamic, mode):
        if plain[0]:
            return loss
        number = len(losses)
        losses.append(loss)

        def counting(graph, inputs, **options):
            found.append((phases[-1], number))
            return graph if first[0] else backend(graph, inputs, **options)

        return compile(loss, dynamic=dynamic, backend=counting)

    monkeypatch.setattr(torch, "compile", counted)
    return found


IN_PARTS = {"beef": 3}  # graphs of one loss at most: torch cannot trace the gradient within it


def assert_compiled_is_plain(settings, graphs, **keys):
    plain = run(settings, out=settings["out"] + "-plain", **keys).execute()
    assert not graphs
    compiled = run(settings, compile=True, **keys).execute()
    assert graphs
    assert graphs == sorted(graphs), "the loss of an earlier phase is not compiled again"
    most = max(Counter(graphs).values())
    assert most <= IN_PARTS.get(keys["model_name"], 1), "batches and epochs share the graph of a phase and loss"
    for mine, theirs in zip(compiled["train_loss"], plain["train_loss"], strict=True):
        assert np.allclose(mine, theirs, rtol=1e-3)
    assert compiled["train_flops"] == plain["train_flops"]


OTHERS = [
    {"model_name": "der", "consolidate": True},
    {"model_name": "wsc", "wsc.reset": "continual_backprop", "wsc.maturity": 2, "convnet_type": "tiny"},
    {"model_name": "replay", "optimizer": "adamw", "clip_norm": 0.5},
    {"model_name": "replay", "batch_norm_parts": 2},
    {"model_name": "beef", "batch_norm_parts": 3},  # its loss is more than one graph
    {"model_name": "replay", "max_tasks": 3},
]


def compiled_code(name):
    """What a learner's graphs depend on. Learners that share it differ in what they do before and after training."""
    kind = registry.learners[name]
    return kind.loss, kind.phases, kind.build, kind.after_backward


def pytest_generate_tests(metafunc):
    if metafunc.function is test_every_learner_compiles_in_one_graph_per_phase:
        names = sorted(registry.learners)
        if not metafunc.config.getoption("--inductor"):
            first = {compiled_code(name): name for name in reversed(names)}
            names = sorted({*first.values(), *TO_KERNELS})
        cases = [*({"model_name": name} for name in names), *OTHERS]
        metafunc.parametrize("keys", cases, ids=lambda keys: " ".join(map(str, keys.values())))


@compiler
@pytest.mark.slow
def test_every_learner_compiles_in_one_graph_per_phase(keys, settings, graphs):
    tasks = (SHORT | keys)["max_tasks"]
    with without_checkpoints():
        assert_compiled_is_plain(settings, graphs, **keys)
    if keys["model_name"] in ("replay", "wsc"):  # after the phases of the plain run and of the first task
        assert [phase for phase, _ in graphs] == list(range(tasks + 1, 2 * tasks))


@pytest.mark.slow
@compiler
def test_a_compiled_run_that_was_killed_ends_like_one_that_was_not(settings):
    """To the bit, as the first step of each epoch is computed operator by operator: the step to resume with.

    The CPU has no graphs to launch, so that ``reduce-overhead`` computes what ``true`` does.
    """
    keys = {"model_name": "finetune", "checkpoint_seconds": 0, "max_tasks": 1, "init_epoch": 3}
    plain = run(settings, prefix="plain", **keys).execute()
    keys["compile"] = "reduce-overhead"
    expected = run(settings, prefix="whole", **keys).execute()
    assert np.allclose(expected["train_loss"], plain["train_loss"], rtol=1e-3)
    with killed_at(2):
        run(settings, **keys).execute()
    resumed = without_measurements(run(settings, **keys).execute())
    different = {name for name, value in resumed.items() if value != without_measurements(expected)[name]}
    assert different <= {"config"}


def test_a_loss_that_cannot_be_compiled_stops_its_run_in_one_line(settings, monkeypatch):
    def refuse(graph, inputs):
        raise RuntimeError("no compiler for this device\nand more")

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda loss, dynamic, mode: compile(loss, dynamic=dynamic, backend=refuse))
    with pytest.raises(UnusableRun) as error:
        run(settings, model_name="replay", compile=True).execute()
    assert str(error.value).startswith("compile: torch cannot compile the loss (") and "\n" not in str(error.value)
    assert "no compiler for this device" in str(error.value)


def test_the_mode_is_the_one_asked_for_and_none_is_asked_for_by_default(settings, monkeypatch):
    asked = []

    def compile(loss, dynamic, mode):
        asked.append(mode)
        return loss

    monkeypatch.setattr(torch, "compile", compile)
    for keys in ({}, {"compile": True}, {"compile": "reduce-overhead"}):
        run(settings, model_name="finetune", max_tasks=1, prefix=f"x{len(asked)}", **keys).execute()
    assert asked == [None, "reduce-overhead"]


def test_the_key_before_is_refused_in_configurations_and_read_in_records(settings):
    with pytest.raises(UserError, match="^cuda_graph: is replaced by 'compile'; set that instead$"):
        resolve(settings | {"cuda_graph": False})
    record = ROOT / "results/studies/cifar100_paper_schedule/wsc-m20.json"
    values = json.loads(record.read_text())["config"]
    assert "cuda_graph" in values and resolve_recorded(values, record).compile is False
