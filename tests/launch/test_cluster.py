"""Sweeps on a Ray cluster of two nodes on this machine: nothing is lost when one is killed."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
from support.small_runs import results, without_measurements, write

from main import main
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.config.loading import resolve
from pycil_wsc.errors import UserError
from pycil_wsc.launch import ray_cluster
from pycil_wsc.launch.attempt import Job
from pycil_wsc.launch.workers import attempt_in_processes
from pycil_wsc.methods.replay.replay import Replay

pytestmark = pytest.mark.usefixtures("unreported")
SWEEP = {"model_name": ["replay", "wsc"], "memory_per_class": [2, 4], "seed": [1, 2], "threads": 1}
SWEEP |= {"convnet_type": "resnet8"}  # one that processes elsewhere know


def in_all(settings):
    return {
        folder.relative_to(settings["out"]): without_measurements(result)
        for folder, result in results(settings).items()
    }


@pytest.fixture
def two_nodes(request):
    """A cluster of two nodes with a core each, or as many as the parameter says; the second is the one to kill."""
    pytest.importorskip("ray", reason="needs Ray: pip install -r requirements-cluster.txt")
    from ray.cluster_utils import Cluster

    cores = getattr(request, "param", 1)
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": cores})
    second = nodes.add_node(
        num_cpus=cores, node_ip_address="127.0.0.2"
    )  # the driver joins the node with its own address, the first
    yield nodes, second
    nodes.shutdown()


def in_the_middle(settings):
    """Runs that have begun and are far from done, as far as the output folder shows."""
    logs = [
        path.read_text()
        for path in Path(settings["out"]).rglob("log.txt")
        if not (path.parent / "result.json").exists()
    ]
    return sum(2 <= log.count(": loss") < 60 for log in logs)


def kill_when(finished, running, settings, nodes, second):
    while len(results(settings)) < finished or in_the_middle(settings) < running:
        time.sleep(0.02)
    nodes.remove_node(second, allow_graceful=False)


@pytest.mark.slow
def test_a_node_killed_in_the_middle_loses_nothing(two_nodes, settings, tmp_path, capsys):
    nodes, second = two_nodes
    settings |= SWEEP | {"epochs": 60}  # long enough to be met in the middle
    undisturbed = settings | {"out": str(tmp_path / "undisturbed")}
    assert main(["--config", write(tmp_path, undisturbed)]) == 0
    killer = threading.Thread(target=kill_when, args=(2, 2, settings, nodes, second), daemon=True)
    killer.start()
    assert main(["--config", write(tmp_path, settings), "--ray", nodes.address]) == 0
    killer.join(timeout=60)
    assert not killer.is_alive() and len(nodes.list_all_nodes()) == 1
    assert in_all(settings) == in_all(undisturbed) and len(in_all(settings)) == 8
    output = capsys.readouterr().out
    assert "done 8/8, running 0, waiting 0, failed 0" in output and output.count("task 3/3") >= 8
    for folder in results(settings):
        assert json.loads((folder / "config.json").read_text())["out"] == settings["out"]
        assert not {"checkpoint.pt", "failed.json"} & {path.name for path in folder.iterdir()}
        assert (folder / "metrics.jsonl").exists() and (folder / "log.txt").exists()
    logs = "".join((folder / "log.txt").read_text() for folder in results(settings))
    assert "resumes " in logs, "the dead node's run went on elsewhere"
    assert main(["--config", write(tmp_path, settings)]) == 0
    assert "8 of 8 runs finished before" in capsys.readouterr().out


def test_the_result_from_a_node_with_a_disk_of_its_own_is_written_by_the_driver(settings, tmp_path, monkeypatch):
    config = resolve(settings | {"model_name": "finetune"})
    elsewhere = replace(config, out=str(tmp_path / "on the node"))
    monkeypatch.chdir(tmp_path)
    progress = Queue()
    outcome = ray_cluster.work_on_node(Job(1, 1, elsewhere), str(tmp_path), 1, progress)
    told = [progress.get_nowait() for _ in range(progress.qsize())]
    assert [line.line[:8] for number, line in told if line.line] == ["task 1/3", "task 2/3", "task 3/3"]
    run_folder(config).mkdir(parents=True)
    (run_folder(config) / "failed.json").touch()  # of an earlier attempt
    ray_cluster.keep_result(Job(1, 1, config), outcome.result)
    assert {path.name for path in run_folder(config).iterdir()} == {"config.json", "result.json"}
    assert json.loads((run_folder(config) / "result.json").read_text())["curve"] == outcome.result["curve"]
    assert json.loads((run_folder(config) / "config.json").read_text())["out"] == settings["out"]


def test_a_result_that_another_process_finished_is_kept(settings):
    config = resolve(settings)
    run_folder(config).mkdir(parents=True)
    (run_folder(config) / "result.json").write_text("{}")
    ray_cluster.keep_result(Job(1, 1, config), {"curve": [1.0]})
    assert (run_folder(config) / "result.json").read_text() == "{}"


@pytest.mark.parametrize("share", [1, 1 / 3, 1 / 6, 2 / 7])
def test_fractions_of_a_gpu_fit_on_it(share):
    assert ray_cluster.fraction(share) * round(2 / share) <= 2 and share - ray_cluster.fraction(share) < 1e-4


def test_without_ray_the_option_says_how_to_get_it(settings, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["--config", write(tmp_path, settings), "--ray"]) == 2
    assert (
        capsys.readouterr().err
        == "error: --ray needs Ray, which is not installed: pip install -r requirements-cluster.txt\n"
    )


def test_an_address_without_a_cluster_is_one_line(settings, tmp_path, capsys):
    pytest.importorskip("ray", reason="needs Ray: pip install -r requirements-cluster.txt")
    assert main(["--config", write(tmp_path, settings), "--ray", "127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith("error: --ray 127.0.0.1:1: no cluster there")


# ---- several processes for each run ----------------------------------------------------------------------------------

CALM = {  # a schedule and a seed with which the rounding of two processes stays rounding
    "model_name": "replay",
    "convnet_type": "resnet8",
    "precision": "fp32",
    "init_epoch": 2,
    "epochs": 3,
    "init_lr": 0.005,
    "lrate": 0.005,
    "init_milestones": [],
    "milestones": [],
    "threads": 1,
    "seed": 1994,
}


def test_this_machine_gives_each_run_two_processes(settings, tmp_path, undisturbed, forked):
    others = {process.pid for process in multiprocessing.active_children()}  # of tests before
    assert main(["--config", write(tmp_path, settings | CALM), "--gpus-per-run", "2"]) == 0
    ((folder, result),) = results(settings).items()
    assert agrees_with_one_process(result, undisturbed) and "2 processes" in (folder / "log.txt").read_text()
    assert {process.pid for process in multiprocessing.active_children()} <= others


def agrees_with_one_process(result, undisturbed):
    """Whether ``result``, of two processes, is that of one up to rounding."""
    _, one = undisturbed(**CALM)
    for losses, wanted in zip(result["train_loss"], one["train_loss"], strict=True):
        np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    equal = ("curve", "nme_curve", "train_accuracy", "images_trained", "confusion", "data")
    return [result[key] for key in equal] == [one[key] for key in equal] and result["processes"] == 2


def test_ray_gives_each_run_two_processes(settings, tmp_path, undisturbed, capsys):
    pytest.importorskip("ray", reason="needs Ray: pip install -r requirements-cluster.txt")
    from ray.cluster_utils import Cluster

    nodes, path = Cluster(initialize_head=True, head_node_args={"num_cpus": 2}), write(tmp_path, settings | CALM)
    try:
        assert main(["--config", path, "--ray", nodes.address, "--gpus-per-run", "3"]) == 2
        reason = "no node of the cluster has 3 GPUs or CPU cores (the largest has 2)"
        assert capsys.readouterr().err.splitlines()[-1] == f"error: --gpus-per-run 3: {reason}"
        assert not results(settings)
        assert main(["--config", path, "--ray", nodes.address, "--gpus-per-run", "2"]) == 0
    finally:
        nodes.shutdown()
    assert capsys.readouterr().out.count("task 3/3") == 1
    ((folder, result),) = results(settings).items()
    assert agrees_with_one_process(result, undisturbed) and "2 processes" in (folder / "log.txt").read_text()
    assert not {"checkpoint.pt", "failed.json"} & {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("two_nodes", [2], indirect=True)
@pytest.mark.slow
def test_the_processes_of_a_killed_node_go_on_elsewhere(two_nodes, settings, tmp_path, capsys):
    nodes, second = two_nodes
    settings |= CALM | {"seed": [1, 2], "init_epoch": 100}
    killer = threading.Thread(target=kill_when, args=(0, 2, settings, nodes, second), daemon=True)
    killer.start()
    assert main(["--config", write(tmp_path, settings), "--ray", nodes.address, "--gpus-per-run", "2"]) == 0
    killer.join(timeout=60)
    assert not killer.is_alive() and len(results(settings)) == 2
    output = capsys.readouterr().out
    assert output.count("resumes with train epoch") == 1 and "FAILED" not in output
    assert not {path.name for path in Path(settings["out"]).rglob("*")} & {"checkpoint.pt", "failed.json"}


@pytest.mark.slow
def test_a_run_whose_second_process_dies_resumes_at_the_next_attempt(settings, tmp_path, undisturbed, forked):
    job = Job(1, 1, resolve(settings | CALM))
    others = {process.pid for process in multiprocessing.active_children()}  # of tests before

    def children():
        started = [process for process in multiprocessing.active_children() if process.pid not in others]
        return sorted(started, key=lambda process: process.pid or 0)

    def kill(progress):
        if progress.position.startswith("task 2/3"):
            for second in children()[1:]:
                second.kill()

    outcome = attempt_in_processes(job, 2, 1, kill)
    folder = run_folder(job.config)
    assert outcome.failure.startswith("process 2 of 2 died (SIGKILL)") and outcome.again
    assert not children() and not (folder / "result.json").exists()
    outcome = attempt_in_processes(replace(job, attempt=2), 2, 1, lambda progress: None)
    assert agrees_with_one_process(outcome.result, undisturbed)
    assert "resumes with train epoch" in (folder / "log.txt").read_text()
    assert not children()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's list of what a process has open")
def test_a_process_whose_connections_close_before_it_has_died_is_the_one_that_died(settings, monkeypatch, forked):
    """As when the machine is busy: the first process fails at once, the exit code of the killed one comes later."""

    def die_slowly_in_the_second(learner):
        if os.environ["RANK"] == "1":
            for number in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/self/fd/{number}").startswith(("socket:", "pipe:")) and int(number) > 2:
                        os.close(int(number))
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Replay, "after_step", die_slowly_in_the_second)
    outcome = attempt_in_processes(Job(1, 1, resolve(settings | CALM)), 2, 1, lambda progress: None)
    assert outcome.failure.startswith("process 2 of 2 died (SIGKILL)") and outcome.again


@pytest.mark.slow
@pytest.mark.parametrize("error, line", [(RuntimeError, "RuntimeError: "), (UserError, "process 2 failed: ")])
def test_what_failed_in_another_process_is_in_the_log(error, line, settings, monkeypatch, forked):
    """Such as an image file of its share that cannot be read."""

    def fail_in_the_second(learner):
        if os.environ["RANK"] == "1":
            raise error("of this process alone")

    monkeypatch.setattr(Replay, "after_step", fail_in_the_second)
    job = Job(1, 1, resolve(settings | CALM))
    outcome = attempt_in_processes(job, 2, 1, lambda progress: None)
    assert outcome.failure and outcome.again
    log = (run_folder(job.config) / "log.txt").read_text()
    assert "process 2 failed" in log and f"{line}of this process alone" in log


@pytest.mark.parametrize(
    "changes, reason",
    [({"dataset": "npz:lost.npz"}, "lost.npz"), ({"init_lr": 1e30}, "the loss became nan in task 1/3")],
)
def test_what_the_first_process_says_of_a_failure_is_the_outcome(changes, reason, settings, forked):
    config = resolve(settings | CALM | changes)
    outcome = attempt_in_processes(Job(1, 1, config), 2, 1, lambda progress: None)
    assert reason in outcome.error + outcome.failure and not outcome.again and not outcome.result


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--ray", "--gpus-per-run", "0"], "--gpus-per-run 0: must be at least 1"),
        (["--gpus-per-run", "2", "--workers", "2"], "--workers 2: runs cannot share GPUs with --gpus-per-run 2"),
        (["--gpus-per-run", "2", "--device", "cuda"], "device: 'cuda' is not available"),
        (["--ray", "--gpus-per-run", "2", "--workers", "3"], "--workers 3: runs cannot share GPUs with"),
        (["--ray", "--gpus-per-run", "9"], "batch_size: 8 images are too few for the 9 processes that share them"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_wrong_use_of_several_gpus_is_one_line_before_anything_starts(options, reason, dry, settings, tmp_path, capsys):
    assert main(["--config", write(tmp_path, settings), *options, *dry]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {reason}") and error.count("\n") == 1 and not Path(settings["out"]).exists()


def test_a_run_has_the_cores_of_its_gpus():
    """Nodes that have too few GPUs do not count."""
    nodes = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 64.0, "GPU": 8.0}, {"CPU": 32.0, "GPU": 8.0}, {"CPU": 128.0}]
    assert ray_cluster.shares(nodes, 1, 4) == (4.0, 4.0, 64)  # of the third: 32 cores for 8 GPUs
    assert ray_cluster.shares(nodes, 2, 1) == (2.0, 0.5, 64)
    assert ray_cluster.shares(nodes[3:], 1, 4) == (1.0, 0, 128) and ray_cluster.shares(nodes[3:], 2, 1) == (
        64.0,
        0,
        128,
    )
    with pytest.raises(UserError, match="no node of the cluster has 9 GPUs .the largest has 8."):
        ray_cluster.shares(nodes, 1, 9)
