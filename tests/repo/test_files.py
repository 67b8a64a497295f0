"""Files that are read: pipes, devices and links in their place, more content than the memory, no working folder."""

import ast
import os
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support import synthetic
from support.months import photos
from support.small_learners import FILES, learned

import pycil_wsc
from pycil_wsc import Learner, state
from pycil_wsc.allocator import free_host_memory
from pycil_wsc.data.images import npz
from pycil_wsc.data.images.fingerprint import hash_of_weights
from pycil_wsc.errors import UnusableRun, UserError
from pycil_wsc.files import check_file, read_file, read_json, write_atomically
from pycil_wsc.networks.timm_models import read_weights
from pycil_wsc.report import find_runs
from pycil_wsc.results.run_table import add
from pycil_wsc.runs import first_task
from pycil_wsc.runs.checkpoint import read_checkpoint
from pycil_wsc.sklearn import ContinualClassifier

pytestmark = pytest.mark.usefixtures("undrawn")
ROOT = Path(__file__).parents[2]
IMAGES = np.arange(8 * 8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 8, 3)


# ---- pipes, devices and links ----------------------------------------------------------------------------------------


def odd_files(folder):
    """A pipe and a device that never ends, by name."""
    os.mkfifo(folder / "pipe")
    (folder / "zeros").symlink_to("/dev/zero")
    return [folder / "pipe", folder / "zeros"]


def test_a_pipe_or_device_in_place_of_a_file_is_an_error_of_every_reader(tmp_path):
    for path in odd_files(tmp_path):
        for read in (check_file, read_file, state.load_state, state.peek_state):
            with pytest.raises(OSError, match="not a file but a pipe or a device"):
                read(path)
        for read in (npz.read_npz, lambda path: read_weights(str(path))):
            with pytest.raises(UserError, match="not a file but a pipe or a device") as error:
                read(path)
            assert "\n" not in str(error.value) and str(path) in str(error.value)
        assert hash_of_weights(str(path)) is None


def test_pipes_among_the_results_are_problems_of_a_report_which_goes_on(tmp_path):
    synthetic.write(tmp_path, synthetic.result("wsc", seed=1), synthetic.result("wsc", seed=2))
    first, _ = sorted(tmp_path.rglob("result.json"))
    os.mkfifo(first.with_name("analyses.jsonl"))
    for name in ("result.json", "metrics.jsonl"):
        (tmp_path / f"of a pipe {name}").mkdir()
        os.mkfifo(tmp_path / f"of a pipe {name}" / name)
    found = find_runs([tmp_path])
    assert len(found.records) == 2
    problems = {path.name: problem for path, problem in found.problems}
    assert problems.keys() == {"result.json", "metrics.jsonl", "analyses.jsonl"}
    assert all("not a file but a pipe or a device" in problem for problem in problems.values())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_pipes_in_a_received_folder_are_one_line(name, tmp_path):
    learner = learned((IMAGES, ["a", "b"] * 4), epochs=1, init_epoch=1)
    learner.export(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="cannot be read .not a file but a pipe or a device."):
        pycil_wsc.load_exported(tmp_path)


def test_a_folder_and_a_missing_file_are_called_what_they_are(tmp_path):
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "missing")


def test_a_file_is_not_written_through_a_link_that_somebody_has_put_in_its_way(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("keep me")
    (tmp_path / ".note.partial").symlink_to(victim)
    write_atomically(tmp_path / "note", "new")
    assert victim.read_text() == "keep me" and (tmp_path / "note").read_text() == "new"
    os.mkfifo(tmp_path / ".note.partial")
    write_atomically(tmp_path / "note", "newer")
    assert (tmp_path / "note").read_text() == "newer" and not (tmp_path / "note").is_symlink()


def test_a_configuration_may_still_come_from_a_pipe_but_not_without_end(monkeypatch, tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b'{"seed": 1}')
    os.close(writing)
    assert read_json(f"/dev/fd/{reading}") == {"seed": 1}
    os.close(reading)
    monkeypatch.setattr("pycil_wsc.files.LARGEST_JSON", 1 << 20)
    with pytest.raises(UserError, match="/dev/zero: more than"):
        read_json("/dev/zero")


OTHERS = {  # files of the package itself or of the system, and what a person names on a command line
    "allocator.py",  # /proc and /sys
    "devices.py",  # /proc
    "files.py",
    "plugins/pycil.py",  # --config
    "report/texts.py",  # the package's texts
    "reproducibility.py",  # the package's source
}


@pytest.mark.slow
def test_all_files_are_read_through_the_one_check():
    """``opened`` and ``read_file`` of ``pycil_wsc.files``; what is opened to be written has a mode."""
    found = set()
    for path in sorted((ROOT / "pycil_wsc").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and reads(node):
                found.add(path.relative_to(ROOT / "pycil_wsc").as_posix())
    assert found == OTHERS


def reads(call):
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in ("read_bytes", "read_text")
    if not isinstance(call.func, ast.Name) or call.func.id != "open":
        return False
    return len(call.args) < 2 or ast.literal_eval(call.args[1]) in ("r", "rb")


# ---- more content than the memory ------------------------------------------------------------------------------------


def test_arrays_that_do_not_fit_in_memory_are_refused_before_they_are_read(monkeypatch, tmp_path):
    """A small file may hold any number of zeros."""
    images, labels = np.zeros((2000, 32, 32, 3), np.uint8), np.zeros(2000, int)
    path = tmp_path / "zeros.npz"
    np.savez_compressed(path, train_x=images, train_y=labels, test_x=images[:1], test_y=labels[:1])
    assert path.stat().st_size < images.nbytes / 100
    assert npz.read_npz(path)[0]["train_x"].shape == images.shape
    monkeypatch.setattr(npz, "free_host_memory", lambda: images.nbytes / 2)
    monkeypatch.setattr(npz, "_array", None)
    with pytest.raises(UserError, match=r"zeros.npz: does not fit in memory \(0.0 GB of arrays, .* use image files"):
        npz.read_npz(path)


def test_compressed_weights_are_refused_before_they_are_read(tmp_path):
    """torch would decompress them, though it compresses nothing."""
    torch.save({"weight": torch.zeros(100_000)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain:
        parts = {name: plain.read(name) for name in plain.namelist()}
    with zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as small:
        for name, content in parts.items():
            small.writestr(name, content)
    assert torch.load(tmp_path / "small.pt", weights_only=True)["weight"].shape == (100_000,), "it can be read"
    assert read_weights(str(tmp_path / "plain.pt"))["weight"].shape == (100_000,)
    with pytest.raises(UserError, match=r"small.pt is not a file of weights \(it is compressed"):
        read_weights(str(tmp_path / "small.pt"))
    with pytest.raises(ValueError, match="it is compressed"):
        state.load_state(tmp_path / "small.pt")


def test_a_saved_state_that_does_not_fit_in_memory_is_one_line(monkeypatch, tmp_path, caplog):
    def full(path):
        raise MemoryError

    for name in ("weights.pt", "checkpoint.pt", "first.pt"):
        state.save_state(tmp_path / name, {})
    learned((IMAGES, ["a", "b"] * 4), epochs=1, init_epoch=1).save(tmp_path)
    monkeypatch.setattr(state, "read_file", full)
    asks = {
        UserError: lambda: pycil_wsc.load(tmp_path),
        UnusableRun: lambda: read_checkpoint(tmp_path / "checkpoint.pt", None, {}),
    }
    for kind, ask in asks.items():
        with pytest.raises(kind, match="there is not enough memory to load it"):
            ask()
    with pytest.raises(UserError, match="there is not enough memory to load it"):
        Learner.load(tmp_path)
    assert first_task.load(tmp_path / "first.pt") is None
    assert "first.pt: MemoryError; the first task is trained again" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_the_free_memory_is_less_than_there_is_and_more_than_nothing():
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").open()}
    assert 0 < free_host_memory() < 1024 * (kilobytes["MemTotal"] + kilobytes["SwapTotal"])


# ---- no working folder -----------------------------------------------------------------------------------------------


@pytest.fixture
def removed(tmp_path, monkeypatch):
    """The working folder is removed, as by a job's end, while the process goes on."""
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    shutil.rmtree(tmp_path / "removed")


def test_without_a_working_folder_relative_names_are_one_line_and_absolute_ones_work(tmp_path, request):
    source = photos(tmp_path / "january", ["cat", "ant"], 1)
    learner = learned(source, **FILES)
    more = photos(tmp_path / "february", ["bee"], 2)
    request.getfixturevalue("removed")
    for ask in (
        lambda: learner.save("shelf"),
        lambda: learner.export("exported"),
        lambda: learner.export("exported.pt2"),
        lambda: Learner.load("shelf"),
        lambda: Learner.versions("shelf"),
        lambda: Learner("wsc", out="out"),
        lambda: pycil_wsc.load("run"),
        lambda: pycil_wsc.load_exported("exported"),
        lambda: ContinualClassifier.load("shelf"),
        lambda: add([], Path("table.csv")),
    ):
        with pytest.raises(UserError, match="the working folder, in which this path begins, is gone .*; give") as error:
            ask()
        assert "\n" not in str(error.value)
    for ask in (lambda: learner.learn("npz:own.npz"), lambda: learner.learn((["a.png"], ["a"]))):
        with pytest.raises(UserError, match="[Nn]o such file"):
            ask()
    learner.learn(more)
    learner.save(tmp_path / "shelf", copy_images=True)
    learner.export(tmp_path / "exported")
    assert Learner.load(tmp_path / "shelf").classes == learner.classes
