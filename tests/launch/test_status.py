"""--status: the states of a sweep's runs, read from their folders, during and after the sweep."""

import json
import time

import pytest
from filelock import FileLock
from support.small_runs import killed_at, results, write

from main import main
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.config.loading import load
from pycil_wsc.files import locked
from pycil_wsc.launch import status
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.runs.progress import Progress

pytestmark = pytest.mark.usefixtures("unreported")


def test_each_run_is_done_running_waiting_or_failed(settings, tmp_path, capsys, monkeypatch, undisturbed):
    _, result = undisturbed(model_name="replay")
    capsys.readouterr()
    now = round(time.time())
    monkeypatch.setattr(status.time, "time", lambda: now)
    seeds = [result["config"]["seed"], 2, 3, 4, 5]
    path = write(tmp_path, settings | {"model_name": "replay", "seed": seeds, "dataset": result["config"]["dataset"]})
    folders = [run_folder(config) for config in load(path)]
    for folder in folders:
        folder.mkdir(parents=True)
    (folders[0] / "result.json").write_text(json.dumps(result))
    record = {"position": "task 3/10 main epoch 12/70", "seconds_left": 3600, "time": now - 60}
    for folder in folders[1:3]:
        (folder / "progress.json").write_text(json.dumps(record))
    (folders[3] / "failed.json").write_text(json.dumps({"reason": "the loss became nan"}))
    with FileLock(folders[1] / ".lock"):
        assert main(["--config", path, "--status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"running  {folders[1]}  task 3/10 main epoch 12/70, 0:59:00 left",
        f"waiting  {folders[2]}  stopped in task 3/10 main epoch 12/70",
        f"failed   {folders[3]}  the loss became nan",
        "done 1/5, running 1, waiting 2, failed 1",
    ]


@pytest.mark.parametrize("left", [None, "soon", float("inf"), float("nan")])
def test_a_damaged_record_of_the_time_left_is_a_question_mark(left, settings, tmp_path, capsys):
    path = write(tmp_path, settings | {"model_name": "replay"})
    (config,) = load(path)
    with locked(run_folder(config)):
        record = {"position": "task 1/3", "seconds_left": left, "time": 0}
        (run_folder(config) / "progress.json").write_text(json.dumps(record))
        assert main(["--config", path, "--status"]) == 0
    assert "task 1/3, ? left" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, b"", b'{"schema": 1, "config": {'])
def test_a_result_that_is_none_is_said_to_be(content, settings, tmp_path, capsys):
    """A folder in its place, an empty file, a truncated one."""
    path = write(tmp_path, settings | {"model_name": "replay"})
    (config,) = load(path)
    file = run_folder(config) / "result.json"
    file.mkdir(parents=True)
    if content is not None:
        file.rmdir()
        file.write_bytes(content)
    assert main(["--config", path, "--status"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"failed   {run_folder(config)}  {file}: ")
    assert last == "done 0/1, running 0, waiting 0, failed 1"
    assert main(["--config", path]) == 1, "the run says so too"


def test_a_run_records_where_it_stands_and_a_finished_one_leaves_no_record(settings, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(status, "INTERVAL", 0.0)
    path = write(tmp_path, settings | {"model_name": "replay"})
    (config,) = load(path)
    seen = []
    write_record = status.write_atomically

    def watch(path, *arguments, **keys):
        write_record(path, *arguments, **keys)
        seen.append((status.state_of(config), json.loads(path.read_text())))

    monkeypatch.setattr(status, "write_atomically", watch)
    assert main(["--config", path]) == 0
    states = {state.name for state, _ in seen}
    assert states == {"running"} and "task 3/3" in seen[-1][0].line
    assert seen[0][1]["seconds_left"] is None and seen[-1][1]["seconds_left"] == 0.0, "as many images as planned"
    (folder,) = results(settings)
    assert not list(folder.glob("*progress.json*")) and status.state_of(config).name == "done"
    capsys.readouterr()
    assert (
        main(["--config", path, "--status"]) == 0
        and capsys.readouterr().out == "done 1/1, running 0, waiting 0, failed 0\n"
    )


def test_a_run_that_is_started_again_after_a_failure_and_stopped_is_waiting(settings, tmp_path, capsys, monkeypatch):
    def fail(self, batch):
        raise RuntimeError("shapes do not fit")

    path = write(tmp_path, settings | {"model_name": "replay"})
    with monkeypatch.context() as broken:
        broken.setattr(Replay, "loss", fail)
        assert main(["--config", path]) == 1
    assert main(["--config", path, "--status"]) == 0 and "failed 1" in capsys.readouterr().out
    with killed_at(3):
        main(["--config", path])
    assert main(["--config", path, "--status"]) == 0
    assert "stopped in" in (told := capsys.readouterr().out) and told.endswith("waiting 1, failed 0\n")


def test_a_record_that_cannot_be_written_costs_nothing(tmp_path):
    told = []
    (tmp_path / "file").touch()
    status.recorded(told.append, tmp_path / "file", 10)(Progress("task 1/2", 5, 1.0))
    assert len(told) == 1


@pytest.mark.parametrize("name", ["failed.json", "progress.json"])
def test_a_record_that_is_nested_too_deeply_is_a_damaged_one(name, settings, tmp_path, capsys):
    arguments = ["--config", write(tmp_path, settings | {"model_name": "ncm"}), "--status"]
    (folder,) = (run_folder(config) for config in load(arguments[1]))
    folder.mkdir(parents=True)
    (folder / name).write_text("[" * 100_000)
    assert main(arguments) == 0 and "done 0/1" in capsys.readouterr().out


def test_the_status_reads_no_data(settings, tmp_path, capsys):
    path = write(tmp_path, settings | {"dataset": "npz:/nowhere/at/all.npz"})
    assert main(["--config", path, "--status"]) == 0
    assert capsys.readouterr().out == "done 0/1, running 0, waiting 1, failed 0\n"


def test_where_we_may_not_lock_a_run_that_recorded_its_progress_lately_runs(settings, tmp_path, monkeypatch):
    def refused(self, timeout):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(status.FileLock, "acquire", refused)
    (config,) = load(write(tmp_path, settings))
    run_folder(config).mkdir(parents=True)
    now = time.time()
    for age, name in ((10, "running"), (600, "waiting")):
        record = {"position": "task 1/2", "seconds_left": 60, "time": now - age}
        (run_folder(config) / "progress.json").write_text(json.dumps(record))
        assert status.state_of(config).name == name


def test_status_is_not_combined_with_a_dry_run(settings, tmp_path, capsys):
    for other in ("--dry-run", "--redo"):
        with pytest.raises(SystemExit, match="2"):
            main(["--config", write(tmp_path, settings), "--status", other])
        assert capsys.readouterr().err.count("\n") == 1
