"""Sweeps of many runs: no run is lost or repeated if a process dies, and the overview is correct."""

import contextlib
import gc
import io
import json
import multiprocessing
import os
import random
import select
import shutil
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from filelock import FileLock
from PIL import Image
from support.small_processes import forked_unseen
from support.small_runs import command, killed_at, results, wait_until, without_checkpoints, without_measurements, write

from main import main
from pycil_wsc import registry
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.config.loading import load, resolve
from pycil_wsc.errors import Unwritable, UserError
from pycil_wsc.launch import workers
from pycil_wsc.launch.attempt import Job, Outcome, remove_unfinished
from pycil_wsc.launch.overview import Overview
from pycil_wsc.launch.schedule import Schedule, set_aside
from pycil_wsc.launch.sweep import sweep
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.results import find_runs, set_result_aside
from pycil_wsc.runs.progress import Progress, TaskBar
from pycil_wsc.runs.run import Run

pytestmark = pytest.mark.usefixtures("unreported")
SHORT = {"init_epoch": 1, "epochs": 1, "max_tasks": 2}
TEN = {
    "model_name": ["finetune", "replay", "wsc"],
    "memory_per_class": [2, 4],
    "seed": [1, 2],
    "init_cls": 3,
    "increment": 3,
    "init_epoch": 8,  # with fewer, a fast machine ends all runs before the second kill
    "epochs": 8,
    "threads": 1,
}


def epochs_logged(settings):
    """The number of each run that has begun."""
    return [path.read_text().count(": loss") for path in Path(settings["out"]).rglob("log.txt")]


@pytest.mark.slow
def test_ten_runs_killed_twice_end_like_those_never_disturbed(settings, tmp_path, forked):
    """Parent and workers are killed together at random moments."""
    settings, chance = settings | TEN, random.Random(0)
    undisturbed = settings | {"out": str(tmp_path / "undisturbed")}
    with without_checkpoints():
        assert main(["--config", write(tmp_path, undisturbed)]) == 0
    for _ in range(2):
        process = command(tmp_path, settings, "--workers", "2")
        enough = sum(epochs_logged(settings)) + chance.randint(24, 48)  # of 160
        wait_until(lambda: sum(epochs_logged(settings)) >= enough, process)
        time.sleep(chance.random() / 10)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert 0 < len(results(settings)) < 10
    finished = {folder: (folder / "result.json").stat().st_mtime_ns for folder in results(settings)}
    assert main(["--config", write(tmp_path, settings), "--workers", "2"]) == 0
    assert finished == {folder: (folder / "result.json").stat().st_mtime_ns for folder in finished}, (
        "the finished are not done again"
    )
    ends = [
        {folder.relative_to(s["out"]): without_measurements(result) for folder, result in results(s).items()}
        for s in (settings, undisturbed)
    ]
    assert len(ends[0]) == 10 and ends[0] == ends[1]


@pytest.mark.slow
def test_workers_do_not_outlive_the_parent(settings, tmp_path):
    """Their runs, which would take hours, are free for the next command."""
    settings |= {"seed": [1, 2], "init_epoch": 100_000, "convnet_type": "resnet8"}
    process = command(tmp_path, settings, "--workers", "2")
    wait_until(lambda: len(list(Path(settings["out"]).rglob("checkpoint.pt"))) == 2, process)
    process.kill()
    locks = list(Path(settings["out"]).rglob(".lock"))
    assert len(locks) == 2
    for lock in locks:
        FileLock(lock).acquire(timeout=30).lock.release()
    assert not list(Path(settings["out"]).rglob("failed.json"))


@pytest.mark.slow
def test_a_worker_that_dies_costs_its_run_one_attempt_and_a_diverged_run_only_itself(
    settings, tmp_path, capsys, monkeypatch, forked
):
    settings |= {"runs": [{"init_lr": 1e30}, {"seed": [1, 2]}], "model_name": "replay"}
    checkpoint, killed = Run._checkpoint, tmp_path / "killed"

    def checkpoint_and_die(run, position, optimizer):
        """The first process that gets there dies within the second task, after the checkpoint of an epoch."""
        checkpoint(run, position, optimizer)
        if position == {"task": 1, "phase": 0, "epoch": 2}:
            with contextlib.suppress(FileExistsError), open(killed, "x") as file:
                file.write(str(run.folder))
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Run, "_checkpoint", checkpoint_and_die)
    assert main(["--config", write(tmp_path, settings), "--workers", "2"]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("FAILED: its process died (SIGKILL); will be tried once more") == 1
    assert captured.err.count("failed: ") == captured.err.count("the loss became nan") == 1
    assert "done 2/3, running 0, waiting 0, failed 1" in captured.out and len(results(settings)) == 2
    assert [json.loads(path.read_text())["attempt"] for path in Path(settings["out"]).rglob("failed.json")] == [1]
    assert "task 2/3 resumes with train epoch 3" in Path(killed.read_text(), "log.txt").read_text()


@pytest.mark.slow
def test_after_a_failure_on_a_gpu_another_process_does_the_rest(settings, tmp_path, capsys, monkeypatch, forked):
    """In this one a CUDA error would return at each later call."""
    tried = []

    def attempt_here(job, data, on_progress):
        tried.append(job.number)
        failure = "AcceleratorError: CUDA error: an illegal memory access was encountered"
        return Outcome(failure=failure, again=True)

    monkeypatch.setattr("pycil_wsc.launch.sweep.attempt", attempt_here)
    monkeypatch.setattr("pycil_wsc.launch.sweep.devices.used", lambda: True)
    assert main(["--config", write(tmp_path, settings | SHORT | {"seed": [1, 2, 3], "threads": 1})]) == 0
    assert tried == [1] and len(results(settings)) == 3
    assert capsys.readouterr().out.count("illegal memory access was encountered; will be tried once more") == 1


def image_folder(root):
    """Two classes of images, as files."""
    for name in ("train/a", "train/b", "val/a", "val/b"):
        (root / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), "white" if name.endswith("a") else "black").save(root / name / f"{number}.png")
    return {"dataset": f"folder:{root}", "image_size": 8, "init_cls": 1, "increment": 1, "num_workers": 1}


@pytest.mark.slow
@pytest.mark.parametrize("number, workers, files", [(signal.SIGINT, "2", True), (signal.SIGTERM, "1", False)])
def test_ctrl_c_and_sigterm_say_how_to_go_on(number, workers, files, settings, tmp_path):
    """The signal goes to all processes, as a terminal and a cluster send it; those that decode images end too."""
    settings |= {"seed": [1, 2, 3], "epochs": 100_000, "convnet_type": "resnet8"}
    settings |= image_folder(tmp_path / "images") if files else {}
    process = command(tmp_path, settings, "--workers", workers)
    wait_until(lambda: len([epochs for epochs in epochs_logged(settings) if epochs >= 2]) == int(workers), process)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == "stopped with 0 of 3 runs done; the same command resumes from here"
    locks = list(Path(settings["out"]).rglob(".lock"))
    assert len(locks) == int(workers)
    for lock in locks:
        FileLock(lock).acquire(timeout=30).lock.release()
    assert not list(Path(settings["out"]).rglob("failed.json"))


@pytest.mark.slow
def test_a_data_loader_that_is_just_being_forked_ends_with_its_run():
    """Until its start has returned, the run does not find it among its child processes."""
    context = multiprocessing.get_context("forkserver")
    (told, sender), (ending, life) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    run = context.Process(target=forked_unseen, args=(sender, ending), daemon=True)
    run.start()
    for pipe in (sender, ending):
        pipe.close()
    assert told.poll(60)
    forked = os.pidfd_open(told.recv())
    life.close()
    run.join(30)
    assert run.exitcode == 1 and select.select([forked], [], [], 30)[0]
    os.close(forked)


class InterruptedAtItsEnd:
    """Its finaliser meets a SIGTERM; Python drops what is raised there."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)


def test_an_interrupt_that_python_drops_still_stops_the_sweep(settings, tmp_path, monkeypatch):
    loss, calls = Replay.loss, []

    def interrupted_once(self, batch):
        calls.append(batch)
        if len(calls) == 3:
            InterruptedAtItsEnd()
        return loss(self, batch)

    monkeypatch.setattr(Replay, "loss", interrupted_once)
    process = command(tmp_path, settings | {"model_name": "replay", "epochs": 100_000})
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == "stopped with 0 of 1 runs done; the same command resumes from here"


@pytest.mark.slow
def test_a_failed_run_is_recorded_and_tried_once_more_after_the_others(settings, tmp_path, capsys, monkeypatch):
    tried = []

    def broken(self, batch):
        tried.append(self.config.seed)
        raise RuntimeError("shapes do not fit")

    line = broken.__code__.co_firstlineno + 2
    monkeypatch.setattr(Replay, "loss", broken)
    path = write(tmp_path, settings | SHORT | {"model_name": ["replay", "finetune"], "seed": [1, 2]})
    assert main(["--config", path]) == 1
    assert tried == [1, 2, 1, 2]
    captured = capsys.readouterr()
    assert captured.err.count("failed: ") == 2 and captured.err.count("RuntimeError: shapes do not fit") == 2
    assert captured.out.rindex("finetune m0 seed 2 ") < captured.out.index(
        f"FAILED: RuntimeError: shapes do not fit, raised at {Path(__file__).relative_to(Path.cwd())}:{line} "
        "(traceback in log.txt); done"
    )
    for record in map(json.loads, (file.read_text() for file in Path(settings["out"]).rglob("failed.json"))):
        assert (
            record["attempt"] == 2
            and record["reason"].startswith("RuntimeError: shapes do not fit")
            and "in broken" in "".join(record["traceback"])
        )
    assert any("Traceback" in path.read_text() for path in Path(settings["out"]).rglob("log.txt"))
    monkeypatch.undo()
    assert len(list(Path(settings["out"]).rglob("failed.json"))) == 2
    assert main(["--config", path]) == 0, "the same command does what is missing"
    assert len(results(settings)) == 4 and not list(Path(settings["out"]).rglob("failed.json"))


def test_a_learner_that_trains_on_other_images_than_planned_is_told_and_not_tried_again(
    settings, tmp_path, capsys, monkeypatch
):
    """Its class forgets a second phase in ``epoch_keys``."""

    class TwoPhases(Replay):
        class Plan(Replay.Plan):
            one_phase = False

        def phases(self, task):
            yield self.main_phase(task)
            if task.index:
                yield self.main_phase(task)

    monkeypatch.setitem(registry.learners, "two_phases", TwoPhases)
    monkeypatch.setitem(registry.learner_defaults, "two_phases", {})
    settings |= SHORT | {"model_name": ["two_phases", "replay"]}
    assert main(["--config", write(tmp_path, settings)]) == 1
    captured = capsys.readouterr()
    planned = 24 + 2 * 4  # the task's 24 samples and 4 exemplars of each of two classes, in one epoch
    assert (
        f"'two_phases' trained on {2 * planned} images in task 2, but {planned} were planned" in captured.err
        and "epoch_keys (epochs)" in captured.err
    )
    assert captured.out.count("FAILED") == 1 and len(results(settings)) == 1

    monkeypatch.setattr(TwoPhases.Plan, "epoch_keys", ("epochs", "epochs"))
    assert main(["--config", write(tmp_path, settings | {"prefix": "right"})]) == 0


def test_a_report_that_cannot_be_written_costs_no_result(settings, tmp_path, capsys, undrawn):
    Path(settings["out"], "run").mkdir(parents=True)
    Path(settings["out"], "run", "report").write_text("mine")
    assert main(["--config", write(tmp_path, settings | {"model_name": "replay", "epochs": 1, "init_epoch": 1})]) == 0
    captured = capsys.readouterr()
    assert len(results(settings)) == 1 and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert Path(settings["out"], "run", "report").read_text() == "mine"


def test_a_diverged_run_is_not_tried_again_and_stops_no_other(settings, tmp_path, capsys):
    settings |= {"init_lr": [0.1, 1e30], "model_name": "replay"}
    assert main(["--config", write(tmp_path, settings)]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("FAILED: the loss became nan in task 1/3") == 1 and "failed: " in captured.err
    assert len(results(settings)) == 1
    (record,) = (json.loads(path.read_text()) for path in Path(settings["out"]).rglob("failed.json"))
    assert (
        record["attempt"] == 1
        and record["reason"].startswith("the loss became nan in task 1/3")
        and record["traceback"] == []
    )


@pytest.mark.parametrize("workers", [[], ["--workers", "2"]])
def test_a_value_that_only_training_can_refuse_costs_its_run_alone(workers, settings, tmp_path, capsys, forked):
    """The optimal transport of COIL's second task moves nothing at this value."""
    useless = {"model_name": "coil", "sinkhorn": 1e-30, "memory_per_class": 2}
    settings |= {"max_tasks": 2, "epochs": 1, "runs": [useless, {"model_name": "replay"}]}
    assert main(["--config", write(tmp_path, settings), *workers]) == 1
    captured = capsys.readouterr()
    (failed,) = Path(settings["out"]).rglob("failed.json")
    reason = "sinkhorn: the transport plan underflows to 0 at this value; use a larger one"
    assert captured.err == f"failed: {failed.parent}: {reason}\n"
    assert "done 1/2, running 0, waiting 0, failed 1" in captured.out and len(results(settings)) == 1
    assert json.loads(failed.read_text())["reason"] == reason
    assert reason in (failed.parent / "log.txt").read_text()


@pytest.mark.parametrize("workers", [[], ["--workers", "2"]])
def test_code_that_ends_the_program_fails_its_run(workers, settings, tmp_path, capsys, monkeypatch, forked):
    """With code 0, too, as a library may."""
    learn = Run._learn

    def learn_or_leave(run, task, resume):
        if run.config.seed == 1:
            sys.exit(0)
        learn(run, task, resume)

    monkeypatch.setattr(Run, "_learn", learn_or_leave)
    settings |= {"max_tasks": 1, "seed": [1, 2], "model_name": "replay"}
    assert main(["--config", write(tmp_path, settings), *workers]) == 1
    assert "done 1/2, running 0, waiting 0, failed 1" in capsys.readouterr().out


def test_a_process_that_ends_without_a_word_fails_its_run(settings, tmp_path, capsys, monkeypatch, forked):
    monkeypatch.setattr(Run, "_learn", lambda run, task, resume: os._exit(0))
    settings |= {"max_tasks": 1, "seed": 1, "model_name": "replay"}
    assert main(["--config", write(tmp_path, settings), "--workers", "2"]) == 1
    assert "FAILED: its process died (exit code 0; see log.txt)" in capsys.readouterr().out


@pytest.mark.slow
def test_an_error_that_would_meet_every_run_stops_the_workers(settings, tmp_path, capsys, monkeypatch, forked):
    """It appears after planning: a file takes the place of the second run's folder. The first would run for long."""
    settings |= {"model_name": "replay", "seed": [1, 2], "init_epoch": 3000}
    start, started, replaced = workers.RunInProcesses.__init__, [], []

    def replace_folder_and_start(run, job, *arguments, **keys):
        if job.config.seed == 2:
            replaced.append(run_folder(job.config))
            replaced[0].parent.mkdir(parents=True, exist_ok=True)
            replaced[0].write_text("")
        start(run, job, *arguments, **keys)
        started.extend(run.processes)

    monkeypatch.setattr(workers.RunInProcesses, "__init__", replace_folder_and_start)
    assert main(["--config", write(tmp_path, settings), "--workers", "2"]) == 2
    captured = capsys.readouterr()
    (folder,) = replaced
    assert captured.err.startswith(f"error: {folder}: cannot be written (") and captured.err.count("\n") == 1
    assert "FAILED" not in captured.out
    assert len(started) == 2 and not any(process.is_alive() for process in started)
    assert not results(settings)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_a_sweep_leaves_no_file_open(settings, tmp_path):
    """Neither runs that finish nor those that fail."""
    settings |= SHORT | {"model_name": "finetune"}
    assert main(["--config", write(tmp_path, settings)]) == 0  # what is opened once for all runs
    gc.collect()  # what an earlier test has left
    before = len(os.listdir("/proc/self/fd"))
    assert main(["--config", write(tmp_path, settings | {"seed": [1, 2, 3], "threads": 1})]) == 0
    assert main(["--config", write(tmp_path, settings | {"seed": [4, 5], "init_lr": 1e30})]) == 1
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def threads_used(monkeypatch):
    """The threads that each run trained with, where this process has two."""
    used, learn, before = [], Run.learn, torch.get_num_threads()

    def learn_and_look(run):
        learn(run)
        used.append(torch.get_num_threads())

    monkeypatch.setattr(Run, "learn", learn_and_look)
    torch.set_num_threads(2)
    yield used
    torch.set_num_threads(before)


def one_thread_then_any(settings):
    settings = settings | {"model_name": "finetune", "init_cls": 6, "init_epoch": 1, "batch_size": 72}
    return [resolve(settings | keys) for keys in ({"seed": 1, "threads": 1}, {"seed": 2})]


def test_a_run_does_not_inherit_the_threads_of_the_one_before(settings, threads_used):
    assert sweep(one_thread_then_any(settings)) == 0
    assert threads_used == [1, 2] and torch.get_num_threads() == 2


def test_other_places_do_not_make_other_runs(settings, tmp_path, capsys):
    settings |= SHORT | {"model_name": "finetune", "seed": [1, 2]}
    assert main(["--config", write(tmp_path, settings)]) == 0
    elsewhere = [
        "--device",
        "auto",
        "--data-root",
        str(tmp_path),
        "--set",
        "threads=2",
        "--set",
        "num_workers=1",
        "--workers",
        "2",
    ]
    assert main(["--config", write(tmp_path, settings), *elsewhere]) == 0
    assert "2 of 2 runs finished before" in capsys.readouterr().out and len(results(settings)) == 2
    assert main(["--config", write(tmp_path, settings), "--set", "epochs=2"]) == 0
    assert len(results(settings)) == 4


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--dry-run", "--measure"]])
def test_a_device_that_is_not_there_is_one_line(more, settings, tmp_path, capsys):
    assert main(["--config", write(tmp_path, settings), "--device", "cuda:99", *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: device: 'cuda:99' is not available") and error.count("\n") == 1
    assert not results(settings)


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--dry-run", "--measure"]])
def test_workers_below_one_is_one_line(more, settings, tmp_path, capsys):
    assert main(["--config", write(tmp_path, settings), "--workers", "0", *more]) == 2
    assert capsys.readouterr().err == "error: --workers 0: must be at least 1\n"


def test_all_methods_come_at_one_seed_before_the_second(settings, tmp_path):
    configs = load(
        write(tmp_path, settings | {"model_name": ["finetune", "replay"], "memory_per_class": [2, 4], "seed": [7, 3]})
    )
    schedule, order = Schedule(configs), []
    schedule.start()
    while job := schedule.next():
        order.append((job.config.seed, job.config.model_name, job.config.memory_per_class))
    assert order == [(seed, *rest) for seed in (7, 3) for rest in (("finetune", 0), ("replay", 2), ("replay", 4))]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_time_left_is_the_images_to_go_at_the_speed_measured(settings, monkeypatch, capsys):
    """Three runs of 1000 images. One resumes from image 400: 100 more in 10 s, and the other trains 300,
    so 40 images/s.
    """
    clock = [0.0]
    monkeypatch.setattr("pycil_wsc.launch.overview.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(sys, "stderr", Terminal())
    (config,) = load_settings(settings)
    first, second, third = jobs = [Job(number, 3, replace(config, seed=number), 1000) for number in (1, 2, 3)]
    overview = Overview(jobs)
    overview.progress(first, Progress("task 2/3", 400, 0.0))
    overview.progress(second, Progress("task 1/3", 0, 0.0))
    assert overview.left() == "?"
    overview.progress(second, Progress("task 1/3", 0, 0.0, line="waiting for the first task"))
    assert capsys.readouterr().out == "[2/3] wsc m4 seed 2 waiting for the first task\n"
    assert overview.status() == "done 0/3, running 2, waiting 1, failed 0"
    clock[0] = 9.0
    overview.progress(second, Progress("task 1/3", 2, 1.0))
    assert overview.left() == "?"  # 2 of 2600 images show the start-up rather than the speed
    clock[0] = 10.0
    overview.progress(first, Progress("task 2/3", 500, 10.0))
    overview.progress(second, Progress("task 1/3", 300, 30.0))
    # left: 500 + 700 + 1000 images
    assert overview.status() == "done 0/3, running 2, waiting 1, failed 0, 0:00:55 left"
    assert f"{overview.status()}; [2/3] wsc m4 seed 2 task 1/3, 30 images/s" in sys.stderr.getvalue()
    overview.ended(first, "retry", "FAILED")
    assert overview.status() == "done 0/3, running 1, waiting 1, failed 1, 0:00:55 left"
    overview.ended(second, "done", "")
    assert overview.status() == "done 1/3, running 0, waiting 1, failed 1, 0:00:38 left"  # 1500 at 40 images/s
    overview.close()


def test_images_that_a_run_resumes_from_do_not_count_as_trained_now_when_it_has_a_remark(settings, monkeypatch):
    """It resumes from image 400 of 1000, and trains 100 in 10 s: 500 to go at 10 images/s."""
    clock = [0.0]
    monkeypatch.setattr("pycil_wsc.launch.overview.time.monotonic", lambda: clock[0])
    (job,) = jobs = [Job(1, 1, *load_settings(settings), 1000)]
    overview = Overview(jobs)
    bar = TaskBar(partial(overview.progress, job), 3)
    bar.begin(1)
    bar.say("a remark")
    bar.start("main", 0, 10, 400)
    clock[0] = 10.0
    bar.at("", 100)
    assert overview.left() == "0:00:50"


def test_the_commit_of_a_run_is_the_one_that_was_checked_out_when_the_command_began(settings, tmp_path, monkeypatch):
    monkeypatch.delenv("PYCIL_WSC_COMMIT")
    monkeypatch.setattr("pycil_wsc.reproducibility.commit", lambda: "at the start")
    settings |= {"model_name": "finetune", "init_epoch": 1, "epochs": 1, "seed": [1, 2]}
    assert main(["--config", write(tmp_path, settings)]) == 0
    assert [result["commit"] for result in results(settings).values()] == ["at the start", "at the start"]
    assert "PYCIL_WSC_COMMIT" not in os.environ, "what this process starts later may be of another commit"


def load_settings(settings):
    path = Path(settings["out"]).parent
    return load(write(path, settings))


def nothing(self, batch):
    """A loss with zero gradients."""
    logits = self.network(batch.images)
    return 0 * logits.sum(), logits


def test_redo_does_finished_runs_again_and_keeps_what_there_was(settings, tmp_path):
    settings |= {"model_name": "replay", "init_epoch": 1, "epochs": 1, "cache_first_task": False}
    arguments = ["--config", write(tmp_path, settings)]
    assert main(arguments) == 0
    (folder,) = results(settings)
    first = (folder / "result.json").read_text()
    with patch.object(Replay, "loss", nothing):
        assert main(arguments) == 0 and (folder / "result.json").read_text() == first
        assert main([*arguments, "--redo"]) == 0
    assert (folder / "result.old.json").read_text() == first
    assert results(settings)[folder]["train_loss"] == [[0.0]] * 3 != json.loads(first)["train_loss"]


def test_more_workers_than_runs_are_as_many_as_runs(settings, tmp_path):
    settings |= {"model_name": "ncm", "max_tasks": 1}
    with patch("pycil_wsc.launch.sweep.Workers", side_effect=KeyboardInterrupt) as made:
        assert main(["--config", write(tmp_path, settings), "--workers", str(10**20)]) == 130
    made.assert_called_once_with(1, 1)


def test_a_report_that_cannot_be_written_says_how_to_write_it_elsewhere(settings, tmp_path, capsys, undrawn):
    path = write(tmp_path, settings | {"model_name": "ncm", "max_tasks": 1})
    place = run_folder(load(path)[0]).parents[3]
    place.mkdir(parents=True)
    (place / "report").touch()
    assert main(["--config", path]) == 0 and len(results(settings)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {place}/report: cannot be written (File exists); python -m pycil_wsc.report ")


@pytest.mark.slow
def test_a_second_redo_keeps_the_results_of_both(settings, tmp_path):
    settings |= {"model_name": "replay", "init_epoch": 1, "epochs": 1}
    arguments = ["--config", write(tmp_path, settings)]
    assert main(arguments) == 0
    (folder,) = results(settings)
    found = []
    for _ in range(2):
        found.append((folder / "result.json").read_text())
        assert main([*arguments, "--redo"]) == 0
    assert [(folder / f"result.old{number}.json").read_text() for number in ("", ".2")] == found
    assert [record.path for record in find_runs([settings["out"]]).records] == [folder / "result.json"]


@pytest.mark.slow
def test_a_redo_that_is_stopped_before_all_results_are_set_aside_is_to_be_given_again(settings, tmp_path, capsys):
    settings |= {"model_name": "replay", "init_epoch": 1, "epochs": 1, "seed": [1, 2]}
    arguments = ["--config", write(tmp_path, settings)]
    assert main(arguments) == 0
    second = sorted(results(settings))[1]

    def stopped(folder, records):
        if folder == second:
            raise KeyboardInterrupt
        set_result_aside(folder, records)

    with patch("pycil_wsc.launch.schedule.set_result_aside", stopped):
        assert main([*arguments, "--redo"]) == 130
    assert "the same command resumes from here" in capsys.readouterr().err
    assert list(results(settings)) == [second]
    assert main([*arguments, "--redo"]) == 0
    assert all((folder / "result.old.json").exists() for folder in results(settings)) and len(results(settings)) == 2


def test_finished_runs_in_folders_that_cannot_be_written_are_taken(settings, tmp_path, capsys):
    settings |= {"model_name": "replay", "init_epoch": 1, "epochs": 1}
    arguments = ["--config", write(tmp_path, settings)]
    assert main(arguments) == 0
    refused = Unwritable("cannot be written (Permission denied)")
    with patch("pycil_wsc.launch.schedule.locked", side_effect=refused) as lock:
        assert main(arguments) == 0
    assert lock.called and "1 of 1 runs finished before" in capsys.readouterr().out


def test_a_finished_language_model_keeps_no_checkpoint_of_a_run_that_was_killed_at_its_end(llm_settings):
    config = resolve(llm_settings)
    folder = run_folder(config)
    (folder / "checkpoints" / "checkpoint-7").mkdir(parents=True)
    (folder / "checkpoints" / "checkpoint-7" / "model.safetensors").touch()
    (folder / "checkpoint.json").touch()
    (folder / "result.json").touch()
    remove_unfinished(config)
    assert {path.name for path in folder.iterdir()} == {"result.json"}


def test_a_language_models_checkpoint_is_on_the_disk_before_it_is_named(tmp_path):
    """As far as the order of the calls shows; the checkpoints before it are removed afterwards."""
    from pycil_wsc.llm import trainer_checkpoint

    for name in ("checkpoint-1", "checkpoint-2"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    weights = tmp_path / "checkpoints" / "checkpoint-2" / "model.safetensors"
    weights.write_bytes(b"weights")
    flushed = []

    def fsync(descriptor):
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        assert len(list((tmp_path / "checkpoints").iterdir())) == 2

    with patch("os.fsync", fsync):
        trainer_checkpoint.record(tmp_path, weights.parent, {})
    assert flushed[:2] == [str(weights), str(weights.parent)] and "checkpoint.json" in flushed[2]
    assert not (tmp_path / "checkpoints" / "checkpoint-1").exists()


@pytest.mark.parametrize("obstacle", ["data", "backbone", "folder"])
def test_a_redo_that_cannot_begin_changes_nothing(obstacle, settings, tmp_path, capsys, monkeypatch):
    settings |= {"model_name": "replay", "init_epoch": 1, "epochs": 1, "save_weights": True, "seed": [1, 2]}
    arguments = ["--config", write(tmp_path, settings)]
    assert main(arguments) == 0
    before = {path: path.read_bytes() for path in files_of(settings)}
    assert len([path for path in before if path.name == "weights.pt"]) == 2
    capsys.readouterr()
    if obstacle == "data":
        (tmp_path / "data.npz").unlink()
    elif obstacle == "backbone":
        monkeypatch.setattr("pycil_wsc.runs.class_incremental.check_backbone", unbuildable)
    else:
        second = sorted(results(settings))[1]
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != second)
    assert main([*arguments, "--redo"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert {path: path.read_bytes() for path in files_of(settings)} == before


def test_a_redo_leaves_another_runs_folder_as_it_is(settings, tmp_path, capsys):
    """Two data sets whose paths end alike have one folder."""
    settings |= {"model_name": "replay", "init_epoch": 1, "epochs": 1, "save_weights": True}
    paths = [tmp_path / name / ("flowers" * 9) / "data.npz" for name in ("one", "two")]
    for path in paths:
        path.parent.mkdir(parents=True)
        shutil.copy(tmp_path / "data.npz", path)
    common = ["--config", write(tmp_path, settings), "--set"]
    first, second = ([*common, f"dataset=npz:{path}"] for path in paths)
    assert main(first) == 0
    before = {path: path.read_bytes() for path in files_of(settings)}
    capsys.readouterr()
    for _ in range(2):
        assert main([*second, "--redo"]) == 2
        assert "result.json: was made with other settings; move it away" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in files_of(settings)} == before
    assert main([*first, "--redo"]) == 0


def unbuildable(config, image_size):
    raise UserError("convnet_type: cannot be built")


def files_of(settings):
    return [path for path in Path(settings["out"]).rglob("*") if path.is_file() and "report" not in path.parts]


@pytest.mark.slow
def test_a_stopped_redo_resumes_without_it(settings, tmp_path):
    settings |= {"model_name": "replay", "init_epoch": 1, "epochs": 2, "seed": [1, 2]}
    arguments = ["--config", write(tmp_path, settings)]
    assert main(arguments) == 0
    before = {folder: without_measurements(result) for folder, result in results(settings).items()}
    with killed_at(4):
        main([*arguments, "--redo"])
    assert len(results(settings)) == 0
    assert main(arguments) == 0
    assert {folder: without_measurements(result) for folder, result in results(settings).items()} == before


def test_a_redo_begins_without_the_files_of_the_run_that_it_repeats(settings, tmp_path):
    """The user's own files stay."""
    settings |= {"model_name": "replay", "init_epoch": 1, "epochs": 1, "cache_first_task": False}
    old = settings | {"save_weights": "every", "analyse": ["drift"]}
    assert main(["--config", write(tmp_path, old)]) == 0
    ((folder, _),) = results(settings).items()
    (folder / "notes.txt").touch()
    (folder / "weights.pt").touch()
    (folder / "tensorboard" / "tasks").mkdir(parents=True)
    assert {"metrics.jsonl", "analyses.jsonl", "weights-task0.pt"} < set(os.listdir(folder))
    arguments = ["--config", write(tmp_path, settings)]
    with killed_at(1, saved=False):
        main([*arguments, "--redo"])
    begun = {"config.json", "log.txt", "progress.json", "result.old.json", "notes.txt"}
    assert {name for name in os.listdir(folder) if not name.startswith(".")} == begun
    assert main(arguments) == 0
    done = begun - {"progress.json"} | {"metrics.jsonl", "result.json"}
    assert {name for name in os.listdir(folder) if not name.startswith(".")} == done


def test_a_redo_of_a_language_model_begins_without_its_answers_and_models(llm_settings):
    config = resolve(llm_settings)
    folder = run_folder(config)
    for name in ("predictions/after-1", "models/after-2"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").touch()
    for name in ("result.json", "metrics.jsonl", "log.txt"):
        (folder / name).touch()
    set_aside([config])
    assert {name for name in os.listdir(folder) if not name.startswith(".")} == {"result.old.json", "log.txt"}
