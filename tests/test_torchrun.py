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
from small_processes import commanded, in_two_processes
from small_runs import SETTINGS, batch_of, results, small_data, without_measurements, write
from torch import nn
from torch.nn.functional import cross_entropy

from pycil_wsc.config.loading import resolve
from pycil_wsc.data.datasets import load_dataset
from pycil_wsc.data.exemplars import herding
from pycil_wsc.data.loader import Source
from pycil_wsc.engine.processes import Processes
from pycil_wsc.engine.shared_passes import SharedPasses
from pycil_wsc.errors import UnusableRun
from pycil_wsc.launch.torchrun import together
from pycil_wsc.learners.scoring import _score_by_data
from pycil_wsc.runs.run import Run
from pycil_wsc.state import load_state

SMALL = SETTINGS | {
    "precision": "fp32",
    "init_epoch": 2,
    "epochs": 2,
    "lrate": 0.005,
    "init_lr": 0.005,
    "milestones": [],
}
SMALL |= {"init_milestones": [], "cache_first_task": False}
CASES = {
    **{name: {"model_name": name} for name in ("finetune", "replay", "icarl", "bic", "wa", "der", "foster", "memo")},
    "joint": {"model_name": "joint", "init_epoch": 2},
    "wsc": {"model_name": "wsc", "seed": 1994},  # with 1993 one element's rank hangs on rounding: kept, or reset
    "foster-oofc": {"model_name": "foster", "oofc": "az", "is_teacher_wa": True, "is_student_wa": True},
    "bic-per-class": {"model_name": "bic", "validation": "per_class", "split_ratio": 0.5},
    "held-out": {"wsc.trigger": "held_out", "wsc.patience": 1, "wsc.held_out": 0.5},
    "fisher": {"wsc.importance": "fisher"},
    "hessian": {"wsc.importance": "hessian"},
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


def outcomes(cases, data, out):
    """The results of the runs of all ``cases``."""
    ended, dataset = {}, load_dataset(f"npz:{data}", ".")
    for name, keys in cases.items():
        config = resolve(SMALL | {"dataset": f"npz:{data}", "out": f"{out}/{name}"} | keys)
        run = Run(config, dataset, lambda progress: None)
        with counted_images() as images, patch("pycil_wsc.data.exemplars.herding", side_effect=herding) as herded:
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
            "herded classes": herded.call_count,
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


def nearly(value, wanted):
    """Whether two JSON values are equal up to rounding."""
    if isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(nearly(value[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(nearly, value, wanted))
    return value == (pytest.approx(wanted, rel=1e-2, abs=1e-3) if isinstance(wanted, float) else wanted)


OWN = {"own batch norm": {"model_name": "wsc", "seed": 1994, "sync_batch_norm": False}}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The outcomes of one process, and of each of two."""
    folder = tmp_path_factory.mktemp("torchrun")
    data = small_data(folder / "data.npz", per_class=11)
    two = in_two_processes(outcomes, CASES | OWN, data, folder / "two", seconds=900)
    return outcomes(CASES, data, folder / "one"), *two


@pytest.mark.parametrize("name", CASES)
def test_two_processes_give_what_one_gives(name, both):
    one, first, second = (outcome[name] for outcome in both)
    np.testing.assert_allclose(first["losses"], one["losses"], rtol=1e-4)
    assert first["curves"] == one["curves"] and first["exemplars"] == one["exemplars"]
    assert first["flops"] == one["flops"] and nearly(first["records"], one["records"])
    assert first["units"] == one["units"] and all(one["units"])
    assert bool(one["units"]) == (name == "continual-backprop") and bool(one["records"]) == (name == "analyses")
    for shared in "images", "herded classes":
        assert first[shared] + second[shared] == one[shared], "no process does what another does too"
    assert first["weights"].keys() == one["weights"].keys()
    for key, value in one["weights"].items():
        np.testing.assert_allclose(first["weights"][key], value, rtol=1e-3, atol=1e-4, err_msg=key)
        np.testing.assert_array_equal(first["weights"][key], second["weights"][key], err_msg=key)


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
    passes = SharedPasses(loss, optimizer, processes, sync_batch_norm=False)
    for size in sizes:
        rows = slice(processes.rank, size, processes.count)
        passes(batch_of(images[rows], targets[rows]))
        gradients = [parameter.grad.numpy().copy() for parameter in network.parameters()]
        steps.append((gradients, [buffer.numpy().copy() for buffer in network.buffers()]))
        optimizer.zero_grad()
    return steps


@pytest.mark.parametrize("kernel, sizes", [(3, (5, 1)), (6, (5, 3))])
def test_without_synced_batch_norm_each_process_normalises_its_own_part(kernel, sizes):
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


def test_a_run_without_synced_batch_norm_is_another_in_two_processes_but_one_network(both):
    one, (first, second) = both[0]["wsc"], [outcome["own batch norm"] for outcome in both[1:]]
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
        learner.grow_for(task := learner.manager.tasks[0])
        parameters = dict(learner.network.named_parameters())
        scores = _score_by_data(learner, task, parameters, {})
        found[name, samples] = flat(scores.values()).numpy(), learner.scoring["importance_passes"]
    return found


def test_scores_that_pass_over_the_data_are_those_of_one_process(tmp_path):
    data = small_data(tmp_path / "data.npz", per_class=11)
    one = scores_of_data(data, tmp_path)
    for others in in_two_processes(scores_of_data, data, tmp_path):
        for case, (scores, passes) in one.items():
            np.testing.assert_allclose(others[case][0], scores, rtol=1e-3, atol=1e-5 * scores.max(), err_msg=str(case))
            assert others[case][1] == passes


# ---- the command -----------------------------------------------------------------------------------------------------


def swept(out, data, **keys):
    """Replay and WSC, which share their first task."""
    settings = SMALL | {"dataset": f"npz:{data}", "out": str(out), "cache_first_task": True, "threads": 1}
    return settings | {"model_name": ["replay", "wsc"], "save_weights": True, "tensorboard": False} | keys


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


def test_a_run_whose_process_was_killed_resumes_with_equal_numbers(tmp_path):
    data = small_data(tmp_path / "data.npz")
    undisturbed, stopped = (swept(tmp_path / name, data) for name in ("undisturbed", "stopped"))
    assert in_two_processes(commanded, "--config", write(tmp_path, undisturbed)) == [0, 0]
    (first,) = in_two_processes(killed, path := write(tmp_path, stopped), check=False)
    assert "SystemExit" in first and not results(stopped)
    assert in_two_processes(commanded, "--config", path) == [0, 0]
    ended, wanted = (
        {folder.parent.parent.name: (folder, result) for folder, result in results(settings).items()}
        for settings in (stopped, undisturbed)
    )
    assert ended.keys() == wanted.keys() == {"replay", "wsc"}
    for name, (folder, result) in ended.items():
        assert lasting(result) == lasting(wanted[name][1]) and result["processes"] == 2
        weights, others = (load_state(place / "weights.pt")["learner"] for place in (folder, wanted[name][0]))
        assert all(torch.equal(weights[key], others[key]) for key in weights if key != "_extra_state")
        assert not (folder / "checkpoint.pt").exists() and not (folder / "failed.json").exists()
    logs = {name: (folder / "log.txt").read_text() for name, (folder, _) in ended.items()}
    assert "resumes with train epoch 2/2" in logs["replay"] and "taken from a run that shares it" in logs["wsc"]


def failing_in_one(rank, settings_file):
    """The command where one process cannot prepare the run of the second seed, as where its download fails."""

    class Failing(Run):
        def __init__(self, config, *arguments):
            if config.seed == 2 and int(os.environ["RANK"]) == rank:
                raise UnusableRun("no download")
            super().__init__(config, *arguments)

    with patch("pycil_wsc.runs.kind.Run", Failing):
        return commanded("--config", settings_file)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_one_process_cannot_prepare_fails_in_all(rank, tmp_path):
    data = small_data(tmp_path / "data.npz")
    keys = SMALL | {"dataset": f"npz:{data}", "model_name": "replay", "convnet_type": "resnet8"}
    whole, failing = (keys | {"out": str(tmp_path / name)} for name in ("whole", "failing"))
    assert in_two_processes(commanded, "--config", write(tmp_path, whole | {"seed": [1, 3]})) == [0, 0]
    path = write(tmp_path, failing | {"seed": [1, 2, 3]})
    assert in_two_processes(failing_in_one, rank, path) == [1, 0]
    (failed,) = (json.loads(path.read_text()) for path in (tmp_path / "failing").rglob("failed.json"))
    assert failed["reason"] == "no download"
    ends = [{result["config"]["seed"]: lasting(result) for result in results(s).values()} for s in (whole, failing)]
    assert ends[0].keys() == {1, 3} and ends[0] == ends[1]


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
        ({"seed": 7}, "torchrun: process 2 of 2 has another configuration than the first"),
        ({"device": "cuda"}, "torchrun: process 2 of 2: device: 'cuda' is not"),
        ({"batch_size": 1}, "batch_size: 1 images are too few for the 2 processes"),
    ],
)
def test_wrong_use_is_one_line_before_anything_starts(changes, reason, tmp_path):
    data = small_data(tmp_path / "data.npz")
    paths = []
    for name, keys in (("one", {}), ("two", changes)):
        (folder := tmp_path / name).mkdir()
        paths.append(write(folder, swept(tmp_path / "runs", data, **keys)))
    if "batch_size" in changes:
        paths[0] = paths[1]
    first, second = in_two_processes(complaint, *paths)
    assert first[0] == second[0] == 2 and not (tmp_path / "runs").exists()
    assert first[1].startswith(f"error: {reason}") and first[1].count("\n") == 1 and not second[1]


def told_to(*commands):
    """As :func:`complaint`, where each process has options of its own."""
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        code = commanded(*commands[int(os.environ["RANK"])])
    return code, stream.getvalue()


def test_processes_that_are_asked_for_different_things_do_not_wait_for_each_other(tmp_path):
    run = ["--config", write(tmp_path, swept(tmp_path / "runs", small_data(tmp_path / "data.npz")))]
    first, second = in_two_processes(told_to, run, [*run, "--status"])
    assert first[0] == second[0] == 2 and not (tmp_path / "runs").exists()
    assert first[1].startswith("error: torchrun: process 2 of 2 has another command than the first")
    (code, _), _ = in_two_processes(told_to, *2 * [[*run, "--status"]])
    assert code == 0


def test_processes_do_not_outlive_torchrun(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "test", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    fork = multiprocessing.get_context("fork")
    alive, held = fork.Pipe(duplex=False)

    def agent():
        process = fork.Process(target=together, args=("run", [], work))
        process.start()
        process.join()

    def work():
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
