"""docs/slurm.md: the same command, started as the tasks of an array job start it, does each run once."""

import multiprocessing
import os
import re
from pathlib import Path

import pytest
from support.pages import numbers_beside
from support.small_runs import Command, results, uncounted, write

import pycil_wsc.report  # noqa: F401  once, before the forks
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.launch import attempt

PAGE = Path(__file__).parents[2] / "docs" / "slurm.md"
RUNS = 3


class ArrayTask:
    """Makes a fork the task ``number`` of an array job, which notes what it executes in the file ``notes``.

    Its first run begins when another task has begun one, too.
    """

    def __init__(self, number, notes, together):
        self.number, self.notes, self.together = number, notes, together

    def __call__(self):
        os.environ |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(self.number)}
        self.execute, attempt.execute = attempt.execute, self.noted

    def noted(self, config, data, on_progress):
        with open(self.notes, "a") as notes:
            notes.write(f"{self.number} {run_folder(config)}\n")
        if self.together:
            self.together, together = None, self.together
            together.wait(60)
        return self.execute(config, data, on_progress)


@pytest.fixture
def sweep(settings, tmp_path):
    """Runs of a second without a report, which takes longer."""
    settings |= {"model_name": "replay", "max_tasks": 1, "init_epoch": 1, "epochs": 1, "prefix": "array"}
    folder = Path(settings["out"]) / "array"
    folder.mkdir(parents=True)
    (folder / "report").touch()
    with uncounted():
        yield settings | {"seed": list(range(RUNS))}


@pytest.mark.slow
def test_two_tasks_of_an_array_job_share_the_runs_and_do_each_once(sweep, tmp_path):
    notes = tmp_path / "notes"
    together = multiprocessing.get_context("fork").Barrier(2)
    arguments = ["--config", write(tmp_path, sweep)]
    tasks = [Command(arguments, prepare=ArrayTask(number, notes, together)) for number in range(2)]
    errors = [task.communicate(timeout=120)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], errors
    executed = [line.split(" ", 1) for line in notes.read_text().splitlines()]
    assert {task for task, _ in executed} == {"0", "1"}
    assert sorted(Path(folder) for _, folder in executed) == sorted(results(sweep))
    assert len(executed) == RUNS


def test_the_page_says_what_a_task_does_at_its_time_limit():
    """``test_ctrl_c_and_sigterm_say_how_to_go_on`` checks it."""
    (item,) = re.findall(r"^- \*\*Time limits\.\*\*.*", PAGE.read_text(), re.MULTILINE)
    assert "SIGTERM" in item and "130" in numbers_beside(item, "exit code")
