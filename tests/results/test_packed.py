"""Finished runs in one file: a sweep goes on where the file ends."""

import json
import lzma
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from support import synthetic
from support.small_runs import results, undrawn, write

from main import main
from pycil_wsc.files import locked
from pycil_wsc.report.__main__ import main as reporting
from pycil_wsc.results import packed
from pycil_wsc.results.__main__ import main as packing
from pycil_wsc.results.packed import lines, pack, unpack


def learned(settings, **keys):
    """The results of a command, by folder below that of the sweep."""
    keys = settings | {"epochs": 1, "analyse": ["drift"]} | keys
    with undrawn():
        assert main(["--config", write(Path(settings["out"]).parent, keys)]) == 0
    sweep = Path(keys["out"], keys["prefix"])
    return sweep, {folder.relative_to(sweep): result for folder, result in results(keys).items()}


def sweep(folder, *seeds, prefix="sweep"):
    """The folder of a sweep with a result for each of the ``seeds``, and the results by folder below it."""
    made = [synthetic.result(seed=seed, prefix=prefix) for seed in seeds]
    places = [Path(f"cifar100-b10-inc10/replay/m20/seed{seed}") for seed in seeds]
    for place, result in zip(places, made):
        (folder / place).mkdir(parents=True)
        (folder / place / "result.json").write_text(json.dumps(result))
    return folder, dict(zip(places, made))


@pytest.mark.parametrize("name, opened", [("runs.jsonl", open), ("runs.jsonl.xz", lzma.open)])
def test_a_sweep_goes_on_where_a_file_of_packed_runs_ends(name, opened, settings, tmp_path, capsys):
    settings |= {"prefix": "sweep"}
    file = tmp_path / "kept" / name
    here, both = learned(settings, seed=[1, 2])
    assert packing(["pack", str(here), str(file)]) == 0 and len(opened(file).read().splitlines()) == 2
    elsewhere = settings | {"out": str(tmp_path / "elsewhere")}
    assert packing(["unpack", str(file), str(tmp_path / "elsewhere" / "sweep")]) == 0
    capsys.readouterr()
    there, three = learned(elsewhere, seed=[1, 2, 3])
    assert "2 of 3 runs finished before" in capsys.readouterr().out
    assert len(three) == 3 and {folder: three[folder] for folder in both} == both
    for folder in both:
        assert (there / folder / "analyses.jsonl").read_bytes() == (here / folder / "analyses.jsonl").read_bytes()
    # and the file grows by what is new, in any order
    assert packing(["pack", str(there), str(file)]) == 0
    packed = [json.loads(line) for line in opened(file).read().splitlines()]
    assert {Path(run["folder"]): run["result"] for run in packed} == three


def test_a_result_that_cannot_be_packed_is_named(tmp_path, capsys):
    here, both = sweep(tmp_path / "sweep", 1, 2)
    damaged = here / min(both) / "result.json"
    damaged.write_text("{")
    capsys.readouterr()
    assert packing(["pack", str(here), str(tmp_path / "runs.jsonl")]) == 1, "so that && does not remove the folder"
    captured = capsys.readouterr()
    assert captured.err == f"problem: {damaged}: is not a complete result; delete it to run this again\n"
    assert captured.out.endswith("1 runs\n")


def test_a_folder_keeps_its_own_result(tmp_path, capsys):
    here, first = sweep(tmp_path / "sweep", 1)
    file = tmp_path / "runs.jsonl"
    packing(["pack", str(here), str(file)])
    (folder,) = first
    changed = first[folder] | {"commit": "another"}
    (here / folder / "result.json").write_text(json.dumps(changed))
    assert packing(["unpack", str(file), str(here)]) == 0
    assert "0 runs written, 1 were there" in capsys.readouterr().out
    assert json.loads((here / folder / "result.json").read_text())["commit"] == "another"


@pytest.mark.parametrize(
    "text, line",
    [
        ("{", "line 1 is not a finished run"),
        ('{"folder": "replay/m1/seed1", "result": {"curve": [1.0]}}', "line 1 is not a finished run"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
@pytest.mark.parametrize("name", ["runs.jsonl", "runs.jsonl.xz"])
def test_a_file_that_is_not_of_packed_runs_is_one_line(name, text, line, tmp_path, capsys):
    file = tmp_path / name
    line = "is damaged or incomplete; restore it" if text and name.endswith(".xz") else line
    if text is not None:
        file.write_text(text + "\n")
    assert packing(["unpack", str(file), str(tmp_path / "runs")]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert line in error and str(file) in error and not (tmp_path / "runs").exists()


def test_names_that_are_not_utf8_come_back(tmp_path):
    here, (folder, *_) = sweep(tmp_path / "sweep", 1)
    result = json.loads((here / folder / "result.json").read_text()) | {"class_names": ["caf\udce9"]}
    (here / folder / "result.json").write_text(json.dumps(result))
    assert packing(["pack", str(here), str(tmp_path / "runs.jsonl")]) == 0
    assert packing(["unpack", str(tmp_path / "runs.jsonl"), str(tmp_path / "there")]) == 0
    assert json.loads((tmp_path / "there" / folder / "result.json").read_text()) == result


@pytest.mark.parametrize("runs", ["mistyped", "empty", "file"])
def test_nothing_to_pack_is_one_line_and_leaves_the_file(runs, tmp_path, capsys):
    here, _ = sweep(tmp_path / "sweep", 1)
    file = tmp_path / "runs.jsonl"
    packing(["pack", str(here), str(file)])
    before = file.read_bytes()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    assert packing(["pack", str(tmp_path / runs), str(file)]) == 2 and file.read_bytes() == before
    (error,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / runs) in error


def test_runs_are_not_unpacked_into_a_file(tmp_path, capsys):
    here, _ = sweep(tmp_path / "sweep", 1)
    packing(["pack", str(here), str(tmp_path / "runs.jsonl")])
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    assert packing(["unpack", str(tmp_path / "runs.jsonl"), str(tmp_path / "file")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_folders_outside_the_sweep_are_refused(tmp_path, capsys):
    here, _ = sweep(tmp_path / "sweep", 1)
    file = tmp_path / "runs.jsonl"
    packing(["pack", str(here), str(file)])
    run = json.loads(file.read_text())
    for folder in ("../other", "/tmp/other"):
        file.write_text(json.dumps(run | {"folder": folder}) + "\n")
        assert packing(["unpack", str(file), str(tmp_path / "runs" / "sweep")]) == 2
        assert "names a folder outside the sweep's" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "other").exists()
    for folder in ("a\0b", "x" * 300, "caf\ud800"):
        file.write_text(json.dumps(run) + "\n" + json.dumps(run | {"folder": folder}) + "\n")
        assert packing(["unpack", str(file), str(tmp_path / "runs" / "sweep")]) == 2
        assert "line 2 names a folder that cannot exist" in capsys.readouterr().err


def test_runs_of_another_sweep_are_not_replaced(tmp_path, capsys):
    here, _ = sweep(tmp_path / "sweep", 1)
    there, _ = sweep(tmp_path / "elsewhere", 1, prefix="other")
    file = tmp_path / "runs.jsonl"
    packing(["pack", str(here), str(file)])
    before = file.read_bytes()
    capsys.readouterr()
    assert packing(["pack", str(there), str(file)]) == 2 and file.read_bytes() == before
    assert f"{file}: has runs of the sweep 'sweep'" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [lambda content: content[: len(content) // 2], lambda content: content[:-20] + b"x"])
def test_a_damaged_file_says_so(damage, tmp_path, capsys):
    here, _ = sweep(tmp_path / "sweep", 1)
    file = tmp_path / "runs.jsonl.xz"
    packing(["pack", str(here), str(file)])
    file.write_bytes(damage(file.read_bytes()))
    capsys.readouterr()
    assert packing(["unpack", str(file), str(tmp_path / "there")]) == 2
    assert capsys.readouterr().err == f"error: {file}: is damaged or incomplete; restore it\n"


def test_a_result_that_is_not_whole_is_restored(tmp_path, capsys):
    here, both = sweep(tmp_path / "sweep", 1, 2)
    file = tmp_path / "runs.jsonl"
    packing(["pack", str(here), str(file)])
    damaged = here / min(both) / "result.json"
    damaged.write_text("")
    assert packing(["unpack", str(file), str(here)]) == 0
    assert json.loads(damaged.read_text()) == both[min(both)]
    assert "1 runs written, 1 were there" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["bogus"], ["pack"]])
def test_a_wrong_command_line_is_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        packing(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("error: ")


def test_the_folder_of_all_sweeps_is_refused(tmp_path, capsys):
    """The runs would be in the file twice, below the folder of the sweep and beside it."""
    here, _ = sweep(tmp_path / "runs" / "sweep", 1)
    file = tmp_path / "runs.jsonl"
    assert packing(["pack", str(here), str(file)]) == 0
    before = file.read_bytes()
    assert packing(["pack", str(tmp_path / "runs"), str(file)]) == 2 and file.read_bytes() == before
    assert f"{tmp_path}/runs: is the folder of all sweeps; give that of one, {here}" in capsys.readouterr().err


def test_a_file_that_is_a_link_stays_one(tmp_path):
    here, _ = sweep(tmp_path / "sweep", 1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs.jsonl").symlink_to(tmp_path / "elsewhere" / "runs.jsonl")
    assert packing(["pack", str(here), str(tmp_path / "runs.jsonl")]) == 0
    assert (tmp_path / "runs.jsonl").is_symlink()
    assert len(list(lines(tmp_path / "elsewhere" / "runs.jsonl"))) == 1


def test_two_that_pack_into_one_file_lose_no_run(tmp_path):
    """The second finds the file locked, and adds to what the first has written."""
    here, _ = sweep(tmp_path / "sweep", 1)
    there, _ = sweep(tmp_path / "elsewhere", 2)
    first, file = tmp_path / "first" / "runs.jsonl", tmp_path / "runs.jsonl"
    pack(here, first)
    with ThreadPoolExecutor() as pool:
        with locked(tmp_path):
            second = pool.submit(pack, there, file)
            wait([second], timeout=0.5)
            assert not second.done()
            file.write_bytes(first.read_bytes())
        assert second.result()[0] == 2
    assert {run.result["config"]["seed"] for run in lines(file)} == {1, 2}


def test_runs_are_unpacked_by_one_process_at_a_time(tmp_path):
    here, _ = sweep(tmp_path / "sweep", 1)
    file, there = tmp_path / "runs.jsonl", tmp_path / "there"
    pack(here, file)
    with ThreadPoolExecutor() as pool:
        with locked(there):
            second = pool.submit(unpack, file, there)
            wait([second], timeout=0.5)
            assert not second.done()
        assert second.result() == (1, 0)


@pytest.mark.parametrize("arguments", [["pack", "{long}", "{file}"], ["unpack", "{long}", "{file}"]])
def test_a_path_that_is_too_long_is_one_line(arguments, tmp_path, capsys):
    long = tmp_path / ("x" * 300)
    assert packing([each.format(long=long, file=tmp_path / "runs") for each in arguments]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {long}: ") and "File name too long" in line and line.count("\n") == 1


def test_ctrl_c_while_runs_are_unpacked(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("pycil_wsc.results.__main__.unpack", interrupt)
    assert packing(["unpack", "file", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "\nstopped; the same command goes on from here\n"


def interrupt(*_):
    raise KeyboardInterrupt


def test_results_under_other_names_are_nothing_to_pack(tmp_path, capsys):
    here, (folder, *_) = sweep(tmp_path / "sweep", 1)
    os.rename(here / folder / "result.json", here / folder / "run.json")
    assert packing(["pack", str(here), str(tmp_path / "runs.jsonl")]) == 2
    assert "no finished run found" in capsys.readouterr().err and not (tmp_path / "runs.jsonl").exists()


# ---- files that hold more than they look -----------------------------------------------------------------------------


def test_a_small_file_that_holds_gigabytes_is_one_line_and_takes_no_memory(monkeypatch, tmp_path, capsys):
    """10 MB of zeros stand for gigabytes: a line is cut where it becomes too long."""
    monkeypatch.setattr(packed, "LONGEST", 1 << 16)
    file = tmp_path / "runs.jsonl.xz"
    file.write_bytes(lzma.compress(bytes(10**7), preset=0))
    assert file.stat().st_size < 30_000
    tracemalloc.start()
    assert packing(["unpack", str(file), str(tmp_path / "runs")]) == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert capsys.readouterr().err == f"error: {file}: line 1 is not a finished run; restore the file\n"
    assert peak < 3 * 10**6 and not (tmp_path / "runs").exists()


def test_whole_runs_that_are_too_many_are_refused_before_any_is_written(monkeypatch, tmp_path, capsys):
    here, _ = sweep(tmp_path / "sweep", 1)
    file = tmp_path / "runs.jsonl.xz"
    pack(here, file)
    run = next(lines(file))
    copies = [json.dumps(run.model_copy(update={"folder": f"seed{n}"}).model_dump()) + "\n" for n in range(9)]
    file.write_bytes(lzma.compress("".join(copies).encode()))
    monkeypatch.setattr(packed, "LARGEST", sum(map(len, copies)) - 1)
    assert packing(["unpack", str(file), str(tmp_path / "runs")]) == 2
    assert "has more than" in capsys.readouterr().err and not (tmp_path / "runs").exists()
    monkeypatch.setattr(packed, "LARGEST", sum(map(len, copies)))
    assert unpack(file, tmp_path / "runs") == (9, 0)


def test_what_could_not_be_read_again_is_not_packed(monkeypatch, tmp_path, capsys):
    here, _ = sweep(tmp_path / "sweep", 1)
    monkeypatch.setattr(packed, "LARGEST", 100)
    assert packing(["pack", str(here), str(tmp_path / "runs.jsonl")]) == 2
    assert "pack into several files" in capsys.readouterr().err and not (tmp_path / "runs.jsonl").exists()


@pytest.mark.parametrize("name", ["runs.jsonl", "runs.jsonl.xz"])
def test_a_pipe_in_place_of_a_file_of_packed_runs_is_one_line(name, tmp_path, capsys):
    os.mkfifo(tmp_path / name)
    assert packing(["unpack", str(tmp_path / name), str(tmp_path / "runs")]) == 2
    assert "cannot be read (not a file but a pipe or a device)" in capsys.readouterr().err


def test_too_little_memory_is_one_line_of_every_command(monkeypatch, tmp_path, capsys):
    def full(*_):
        raise MemoryError

    here, _ = sweep(tmp_path / "sweep", 1)
    config = write(tmp_path, {"model_name": "replay"})
    commands = {
        "pycil_wsc.results.__main__._carry_out": lambda: packing(["pack", str(here), "runs.jsonl"]),
        "pycil_wsc.report.__main__.find_runs": lambda: reporting([str(here)]),
        "pycil_wsc.launch.command._run": lambda: main(["--config", config]),
    }
    for place, command in commands.items():
        with monkeypatch.context() as patched:
            patched.setattr(place, lambda *_, **__: full())
            assert command() == 2
        assert capsys.readouterr().err == (
            "error: there is not enough memory (MemoryError); free some, or give the command less at once\n"
        )
