"""Two processes on one class-incremental run give the same result as one: gloo on the CPU."""

import contextlib
import copy
import io
import json
import multiprocessing
import os
import signal
import time
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.processes import nearly
from support.small_processes import commanded, in_two_processes
from support.small_runs import (
    SETTINGS,
    batch_of,
    once,
    results,
    small_data,
    suited,
    without_checkpoints,
    without_measurements,
    write,
)
from torch import nn
from torch.nn.functional import cross_entropy

from pycil_wsc.config.loading import resolve
from pycil_wsc.data.batches.loader import Source
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.data.memory.exemplar_selection import herding
from pycil_wsc.errors import UnusableRun
from pycil_wsc.launch.torchrun import together
from pycil_wsc.methods.consolidation.scores import _score_by_data
from pycil_wsc.runs.run import Run
from pycil_wsc.state import load_state
from pycil_wsc.training.learner import grow_for
from pycil_wsc.training.processes import Processes
from pycil_wsc.training.step.backward import SharedPasses

pytestmark = pytest.mark.usefixtures("undrawn")  # imports the report before the processes, which need it, fork
SMALL = SETTINGS | {
    "convnet_type": "wider",
    "precision": "fp32",
    "init_epoch": 2,
    "epochs": 2,
    "lrate": 0.005,
    "init_lr": 0.005,
    "milestones": [],
}
SMALL |= {"init_milestones": [], "cache_first_task": False, "max_tasks": 2}
THREE_TASKS = {"max_tasks": 3}  # for what grows, shrinks or is corrected again in each
BY_STEP = {"memory_size": 10, "batch_size": 7, "replay_batch_size": 5, "steps_per_batch": 2}
XDER = {"simclr_batch_size": 3, "simclr_num_aug": 2, "dp_weight": 1.0, "past_constraint": True}
TUNED = ("l2p", "dualprompt", "coda_prompt", "ease", "aper_adapter", "aper_ssf", "aper_vpt")
CASES = {
    **{name: THREE_TASKS | {"model_name": name} for name in ("bic", "der", "foster", "memo")},
    # with seed 1993 rounding grows to 2e-4 in a weight, else to 1e-9
    "icarl": THREE_TASKS | {"model_name": "icarl", "seed": 1994},
    **{name: {"model_name": name} for name in ("replay", "ewc", "mas", "gem")},
    **{name: {"model_name": name} for name in ("ds-al", "ranpac", "fecam", "simplecil")},
    "aper_finetune": {"model_name": "aper_finetune"},
    **{name: {"model_name": name, "c_rate_list": [0.3]} for name in ("rmm-icarl", "rmm-foster")},
    # with 1993 one element's rank hangs on rounding: kept, or reset
    "wsc": THREE_TASKS | {"model_name": "wsc", "seed": 1994},
    # means over a part of a batch, stored values, a second backward pass, averages and merges of weights
    **{name: {"model_name": name, "memory_update": "task"} for name in ("er_ace", "derpp", "cls_er")},
    # a memory that each step fills, in batches of which a process has more
    **{f"{name}-step": {"model_name": name} | BY_STEP for name in ("er", "er_ace", "derpp", "cls_er", "dark_er")},
    # projections, second steps, further passes; logits that are stored after a task, or renewed in a step
    **{name: {"model_name": name} | BY_STEP for name in ("agem", "agem_r", "fdr", "hal")},
    "gss": {"model_name": "gss"} | BY_STEP | {"steps_per_batch": 1},
    "mer": {"model_name": "mer"} | BY_STEP | {"batch_size": 3},
    "xder": THREE_TASKS | {"model_name": "xder"} | BY_STEP | XDER,
    "redo": {"model_name": "redo", "convnet_type": "resnet8", "recycle_every": 2, "dormant_threshold": 0.5},
    "sam-flops": {"model_name": "sam", "budget": {"flops_like": "replay"}},
    "foster-oofc": {"model_name": "foster", "oofc": "az", "is_teacher_wa": True, "is_student_wa": True},
    "bic-per-class": {"model_name": "bic", "validation": "per_class", "split_ratio": 0.5},
    "beef": {"model_name": "beef", "fusion_epochs": 2, "energy_weight": 0.1, "lrate": 0.002, "batch_size": 7},
    "tagfex": {"model_name": "tagfex", "proj_hidden_dim": 32, "proj_output_dim": 16, "lrate": 0.002, "batch_size": 7},
    # prototypes, rotations, mixtures, adapters, stored features
    "il2a": {"model_name": "il2a", "temp": 1.0, "init_epoch": 2},
    # with 1993 Adam divides by a tiny gradient
    **{name: {"model_name": name, "temp": 1.0, "seed": 1994, "init_epoch": 2} for name in ("pass", "ssre")},
    "podnet": {"model_name": "podnet", "nb_proxy": 3, "ft_epochs": 2},
    "coil": {"model_name": "coil", "transport_steps": 2},
    "cofima": {"model_name": "cofima"},
    **{name: THREE_TASKS | suited(name) | {"model_name": name, "batch_size": 7} for name in ("mos", "lae")},
    **{name: suited(name) | {"model_name": name, "batch_size": 7} for name in TUNED},
    # features of drawn Gaussians, aligned scores, merged and trained heads
    **{name: THREE_TASKS | {"model_name": name} for name in ("slca", "slca_cofima", "dgr", "duct")},
    "lucir": THREE_TASKS | {"model_name": "lucir", "ft_epochs": 2},
    "gdumb": {"model_name": "gdumb", "cutmix": 0.0},  # CutMix pastes images of the same process
    "held-out": {"wsc.trigger": "held_out", "wsc.patience": 1, "wsc.held_out": 0.5},
    "continual-backprop": {  # on a network with several layers of units
        "convnet_type": "resnet8",
        "wsc.reset": "continual_backprop",
        "wsc.replacement_rate": 0.02,
        "wsc.maturity": 2,
    },
    "icarl+wsc": {"model_name": "icarl", "consolidate": True, "wsc.reset": "shrink_perturb"},
    "mixed": {"model_name": "replay", "replay_ratio": 0.5, "exemplars": "reservoir"},
    "analyses": {"model_name": "replay", "analyse": ["gradients", "drift", "flatness", "dormant"]},
}
# each process computes the loss of all prototypes of a batch, anchors or prompts; the first one may have an exemplar
# more of GEM's, or of a batch that CLS-ER's network sees twice
MORE = {"pass": 0.03, "il2a": 0.03, "ssre": 0.03, "gem": 0.01, "cls_er-step": 0.01, "mos": 0.01}
MORE |= {"hal": 0.12, "coda_prompt": 0.1}
LESS = {"xder": 0.01}  # or has a smaller share of the images that are seen twice


def outcomes(cases, data, out):
    """The results of the runs of all ``cases``."""
    ended, dataset = {}, load_dataset(f"npz:{data}", ".")
    for name, keys in cases.items():
        config = resolve(SMALL | {"dataset": f"npz:{data}", "out": f"{out}/{name}", "init_epoch": 1} | keys)
        run = Run(config, dataset, lambda progress: None)
        herded = patch("pycil_wsc.data.memory.exemplar_selection.herding", side_effect=herding)
        with without_checkpoints(), counted_images() as images, herded as calls:
            result = run.execute()
        weights = {key: value for key, value in run.learner.state_dict().items() if isinstance(value, torch.Tensor)}
        ended[name] = {
            "losses": np.concatenate(result["train_loss"]),
            "curves": [result[key] for key in ("curve", "nme_curve", "train_accuracy", "images_trained", "confusion")],
            "flops": result["train_flops"],
            "exemplars": {label: kept.tolist() for label, kept in run.learner.memory.classes.items()},
            "weights": {key: value.numpy() for key, value in weights.items()},
            "records": run.records.lines,
            "units": result.get("units_replaced", []),
            "images": sum(images),
            "herded classes": calls.call_count,
        }
    return ended


@contextlib.contextmanager
def counted_images():
    """The sizes of all batches that this process loads, for any purpose."""
    sizes, batches = [], Source.batches

    def counting(source, *arguments, **keys):
        for images, targets in batches(source, *arguments, **keys):
            sizes.append(len(images))
            yield images, targets

    with patch.object(Source, "batches", counting):
        yield sizes


OWN = {"own batch norm": THREE_TASKS | {"model_name": "wsc", "seed": 1994, "batch_norm_parts": 2}}


@pytest.fixture(scope="module")
def both(common, tmp_path_factory):
    """The outcomes of one process, and of each of two, by case."""

    def make():
        folder = tmp_path_factory.mktemp("torchrun")
        data = small_data(folder / "data.npz", per_class=7)
        cases = {name: keys for name, keys in CASES.items() if name != "wsc"}
        two = in_two_processes(outcomes, cases, data, folder / "two", seconds=900)
        return outcomes(cases, data, folder / "one"), *two

    return once(common / "torchrun.pickle", make)


@pytest.fixture(scope="module")
def one_method(tmp_path_factory):
    """The outcomes of WSC alone, in one process, and in each of two: also in two parts, in two."""
    folder, plain = tmp_path_factory.mktemp("one method"), {"wsc": CASES["wsc"]}
    data = small_data(folder / "data.npz", per_class=7)
    first, second = in_two_processes(outcomes, plain | OWN, data, folder / "two")
    return outcomes(plain, data, folder / "one"), first, second


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"wsc"}))
def test_two_processes_give_what_one_gives(name, both):
    assert_alike(name, *(outcome[name] for outcome in both))


def test_two_processes_give_what_one_gives_with_wsc(one_method):
    """The others are slow."""
    assert_alike("wsc", *(outcome["wsc"] for outcome in one_method))


def assert_alike(name, one, first, second):
    """The outcome of one process is that of each of two."""
    np.testing.assert_allclose(first["losses"], one["losses"], rtol=1e-4)
    assert first["curves"] == one["curves"] and first["exemplars"] == one["exemplars"]
    assert 1 - LESS.get(name, 0) <= first["flops"] / one["flops"] <= 1 + MORE.get(name, 0)
    assert nearly(first["records"], one["records"])
    assert first["units"] == one["units"] and all(one["units"])
    assert bool(one["units"]) == (name == "continual-backprop") and bool(one["records"]) == (name == "analyses")
    # each process loads all images that are mixed, those of two tasks by whose losses RMM divides the memory, those
    # whose gradients GSS compares, and those on which HAL trains before it seeks anchors
    twice = {"il2a": one["curves"][3], "rmm-icarl": 28, "rmm-foster": 28, "gss": 60, "hal": 12}.get(name, 0)
    assert first["images"] + second["images"] == one["images"] + twice, "no process loads what another does too"
    assert first["herded classes"] + second["herded classes"] == one["herded classes"]
    assert first["weights"].keys() == one["weights"].keys()
    for key, value in one["weights"].items():
        np.testing.assert_allclose(first["weights"][key], value, rtol=1e-3, atol=1e-4, err_msg=key)
        np.testing.assert_array_equal(first["weights"][key], second["weights"][key], err_msg=key)


def batches_and_losses(balance, data, out):
    """The samples of each step that this process has, and the losses of the epochs, of classes of unequal size."""
    keys = {"dataset": f"npz:{data}", "out": str(out), "model_name": "replay", "imbalance": 4, "class_balance": balance}
    run = Run(resolve(SMALL | keys), load_dataset(f"npz:{data}", "."))
    steps, plain = [], run.learner.before_step

    def noted(batch):
        steps.append(batch.indices.tolist())
        return plain(batch)

    with without_checkpoints(), patch.object(run.learner, "before_step", noted):
        return steps, np.concatenate(run.execute()["train_loss"])


@pytest.mark.parametrize("balance", ["sampler", "weights"])
def test_balanced_batches_and_their_loss_are_those_of_one_process(balance, tmp_path):
    data = small_data(tmp_path / "data.npz", per_class=9)
    batches, losses = batches_and_losses(balance, data, tmp_path / "one")
    first, second = in_two_processes(batches_and_losses, balance, data, tmp_path / "two")
    for whole, *shares in zip(batches, first[0], second[0], strict=True):
        assert [whole[0::2], whole[1::2]] == shares
    np.testing.assert_allclose(first[1], losses, rtol=1e-5)
    others, unbalanced = batches_and_losses("none", data, tmp_path / "none")
    assert (others == batches) == (balance == "weights") and np.abs(losses / unbalanced - 1).max() > 1e-2


def small_network(kernel=3):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, kernel), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * (7 - kernel) ** 2, 3)
    return nn.Sequential(*layers), torch.randn(5, 3, 6, 6), torch.tensor([0, 1, 2, 0, 1])


def trained_on_own_parts(kernel, sizes):
    """Gradients and buffers after steps of so many images."""
    network, images, targets = small_network(kernel)
    processes, steps = Processes(), []

    def loss(batch):
        logits = network(batch.images)
        return cross_entropy(logits, batch.targets), logits

    optimizer = torch.optim.SGD(network.parameters())
    passes = SharedPasses(loss, optimizer, processes, own_batch_norm=True)
    for size in sizes:
        rows = slice(processes.rank, size, processes.count)
        passes(batch_of(images[rows], targets[rows]))
        gradients = [parameter.grad.numpy().copy() for parameter in network.parameters()]
        steps.append((gradients, [buffer.numpy().copy() for buffer in network.buffers()]))
        optimizer.zero_grad()
    return steps


@pytest.mark.parametrize("kernel, sizes", [(3, (5, 1)), (6, (5, 3))])
def test_in_parts_each_process_normalises_its_own(kernel, sizes):
    """Against torch's batch norm on each part: gradients and running statistics weigh it by its images. Of one image,
    the second process has none; of three, it has one, which has no variance where kernel 6 makes maps of 1x1.
    """
    first, second = in_two_processes(trained_on_own_parts, kernel, sizes)
    network, images, targets = small_network(kernel)
    for size, (gradients, buffers), others in zip(sizes, first, second, strict=True):
        parts, before = [slice(rank, size, 2) for rank in range(2)], copy.deepcopy(network)
        wanted_gradients, statistics = 0, 0
        for rows in parts[:size]:
            network, share = copy.deepcopy(before), len(images[rows]) / size
            network.train(kernel == 3 or len(images[rows]) > 1)  # else the running statistics normalise
            loss = cross_entropy(network(images[rows]), targets[rows])
            wanted_gradients = wanted_gradients + share * flat(torch.autograd.grad(loss, list(network.parameters())))
            statistics = statistics + share * flat([network[1].running_mean, network[1].running_var])
        np.testing.assert_allclose(flat(map(torch.from_numpy, gradients)), wanted_gradients, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(flat(map(torch.from_numpy, buffers[:2])), statistics, rtol=1e-5, atol=1e-6)
        assert all(map(np.array_equal, buffers, others[1])), "all processes hold the same"
        network[1].running_mean[:], network[1].running_var[:] = statistics.chunk(2)


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def test_a_run_in_two_parts_is_another_in_two_processes_but_one_network(one_method):
    one, (first, second) = one_method[0]["wsc"], [outcome["own batch norm"] for outcome in one_method[1:]]
    assert np.abs(first["losses"] / one["losses"] - 1).max() > 1e-2
    for key, value in first["weights"].items():
        np.testing.assert_array_equal(value, second["weights"][key], err_msg=key)


def scores_of_data(data, out):
    """By importance and number of samples: scores of the untrained network's elements, and the passes that they took.

    Three samples are a batch of the first process's, and none of the second's.
    """
    found, dataset = {}, load_dataset(f"npz:{data}", ".")
    for name, samples in (("fisher", None), ("hessian", None), ("hessian", 3)):
        keys = {"dataset": f"npz:{data}", "out": str(out), "wsc.importance": name, "wsc.importance_samples": samples}
        learner = Run(resolve(SMALL | keys), dataset).learner
        grow_for(learner, task := learner.manager.tasks[0])
        parameters = dict(learner.network.named_parameters())
        scores = _score_by_data(learner, task, parameters, {})
        found[name, samples] = flat(scores.values()).numpy(), learner.scoring["importance_passes"]
    return found


@pytest.mark.slow
def test_scores_that_pass_over_the_data_are_those_of_one_process(tmp_path):
    data = small_data(tmp_path / "data.npz", per_class=11)
    one = scores_of_data(data, tmp_path)
    for others in in_two_processes(scores_of_data, data, tmp_path):
        for case, (scores, passes) in one.items():
            np.testing.assert_allclose(others[case][0], scores, rtol=1e-3, atol=1e-5 * scores.max(), err_msg=str(case))
            assert others[case][1] == passes


# ---- the command -----------------------------------------------------------------------------------------------------


def asked(out, data, **keys):
    settings = SMALL | {"dataset": f"npz:{data}", "out": str(out), "cache_first_task": True, "threads": 1}
    return settings | {"model_name": "replay", "save_weights": True} | keys


def killed(settings_file):
    """The second process is killed in the middle of the second task; the first is told so."""
    checkpoint, calls = Run._checkpoint, []

    def checkpoint_and_die(run, *arguments):
        checkpoint(run, *arguments)
        calls.append(arguments)
        if len(calls) == 4 and not run.processes.first:
            while load_state(run.folder / "checkpoint.pt")["position"] != arguments[0]:
                time.sleep(0.01)  # the first process is still writing
            os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(Run, "_checkpoint", checkpoint_and_die):
        return commanded("--config", settings_file)


@pytest.mark.slow
def test_a_run_whose_process_was_killed_resumes_with_equal_numbers(tmp_path):
    data = small_data(tmp_path / "data.npz")
    undisturbed, stopped = (asked(tmp_path / name, data) for name in ("undisturbed", "stopped"))
    assert in_two_processes(commanded, "--config", write(tmp_path, undisturbed)) == [0, 0]
    (first,) = in_two_processes(killed, path := write(tmp_path, stopped), check=False)
    assert "SystemExit" in first and not results(stopped)
    assert in_two_processes(commanded, "--config", path) == [0, 0]
    ((folder, result),) = results(stopped).items()
    ((other, wanted),) = results(undisturbed).items()
    assert lasting(result) == lasting(wanted) and result["processes"] == 2
    weights, others = (load_state(place / "weights.pt")["learner"] for place in (folder, other))
    assert all(torch.equal(weights[key], others[key]) for key in weights if key != "_extra_state")
    assert not (folder / "checkpoint.pt").exists() and not (folder / "failed.json").exists()
    assert "resumes with train epoch 2/2" in (folder / "log.txt").read_text()
    wsc = asked(tmp_path / "stopped", data, model_name="wsc", max_tasks=1)
    assert in_two_processes(commanded, "--config", write(tmp_path, wsc | {"max_tasks": 1})) == [0, 0]
    logs = [path.read_text() for path in (tmp_path / "stopped").rglob("wsc/**/log.txt")]
    assert len(logs) == 1 and "taken from a run that shares it" in logs[0]


def failing_in_one(rank, settings_file):
    """The command where one process cannot prepare the run, as where its download fails."""

    class Failing(Run):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            if self.processes.rank == rank:
                raise UnusableRun("no download")

    with patch("pycil_wsc.runs.class_incremental.Run", Failing):
        return commanded("--config", settings_file)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_one_process_cannot_prepare_fails_in_all(rank, tmp_path):
    path = write(tmp_path, asked(tmp_path / "failing", small_data(tmp_path / "data.npz"), max_tasks=1))
    assert in_two_processes(failing_in_one, rank, path) == [1, 0]
    (failed,) = (json.loads(path.read_text()) for path in (tmp_path / "failing").rglob("failed.json"))
    assert failed["reason"] == "no download"


def lasting(result):
    """The values that a repetition must reproduce."""
    return {key: value for key, value in without_measurements(result).items() if key != "config"}


def complaint(*settings_files):
    """The exit code of this process's command, and its output."""
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        code = commanded("--config", settings_files[int(os.environ["RANK"])])
    return code, stream.getvalue()


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"device": "cuda"}, "torchrun: process 1 of 2: device: 'cuda' is not"),
        ({"batch_size": 1}, "batch_size: 1 images are too few for the 2 processes"),
        ({"batch_norm_parts": 4}, "batch_norm_parts: 2 processes have 2 parts of a batch, not 4; give 2 or 1"),
        ({"seed": [1, 2]}, "torchrun: its processes train one run, but there are 2; choose one with --set"),
    ],
)
def test_wrong_use_is_one_line_before_anything_starts(changes, reason, tmp_path):
    path = write(tmp_path, asked(tmp_path / "runs", small_data(tmp_path / "data.npz"), **changes))
    first, second = in_two_processes(complaint, path, path)
    assert first[0] == second[0] == 2 and not (tmp_path / "runs").exists()
    assert first[1].startswith(f"error: {reason}") and first[1].count("\n") == 1 and not second[1]


def told_to(*commands):
    """As :func:`complaint`, where each process has options of its own."""
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        code = commanded(*commands[int(os.environ["RANK"])])
    return code, stream.getvalue()


def test_the_first_process_decides_what_all_do(tmp_path):
    """The others need no file of their own, and do not wait if they were asked for something else."""
    settings = asked(tmp_path / "runs", small_data(tmp_path / "data.npz"), seed=[1, 2])
    status = ["--config", write(tmp_path, settings), "--status"]
    other = ["--config", str(tmp_path / "nothing.json")]
    assert in_two_processes(told_to, status, other) == [(0, ""), (0, "")]
    missing, follower = in_two_processes(told_to, other, status)
    assert missing[0] == follower[0] == 2 and missing[1].count("\n") == 1 and not follower[1]
    assert not (tmp_path / "runs").exists()


def test_processes_do_not_outlive_torchrun(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "test", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    fork = multiprocessing.get_context("fork")
    alive, held = fork.Pipe(duplex=False)

    def agent():
        process = fork.Process(target=together, args=(list, work, True))
        process.start()
        process.join()

    def work(configs):
        held.send("at work")
        time.sleep(1000)

    torchrun = fork.Process(target=agent)
    torchrun.start()
    held.close()
    assert alive.recv() == "at work"
    torchrun.kill()
    torchrun.join()
    assert alive.poll(60), "the process lives on"
    with pytest.raises(EOFError):
        alive.recv()
