"""Printing cannot fail a run, for any output and encoding."""

import io
import locale
import os
import signal
import subprocess
import sys

import pytest
from support import synthetic
from support.small_runs import ROOT, Command, results, wait_until, write

from pycil_wsc.config.kinds import run_folder
from pycil_wsc.config.loading import resolve
from pycil_wsc.launch.attempt import Datasets, Job, attempt
from pycil_wsc.output import best_effort_output
from pycil_wsc.report import __main__ as report_command

SHORT = {"model_name": "finetune", "seed": [1, 2], "init_cls": 3, "increment": 3, "epochs": 1, "init_epoch": 1}
FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


def nobody_reads():
    """As after ``| head -1``, when it has ended."""
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.close(reading)


def nothing_fits():
    """``> /dev/full 2>&1``"""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)


def no_errors():
    """``2>&-``"""
    os.close(2)
    sys.stderr = None


@FULL
def test_a_log_on_a_full_disk_costs_the_run_nothing(settings, tmp_path, capsys):
    config = resolve(settings | SHORT | {"seed": 1})
    run_folder(config).mkdir(parents=True)
    (run_folder(config) / "log.txt").symlink_to("/dev/full")
    assert attempt(Job(1, 1, config), Datasets(), lambda progress: None).result
    assert not capsys.readouterr().err, "neither does it say so at each line"


@pytest.mark.parametrize("redirect", [nobody_reads, pytest.param(nothing_fits, marks=FULL), no_errors])
def test_every_run_ends_wherever_its_output_goes(redirect, settings, tmp_path, undrawn):
    process = Command(["--config", write(tmp_path, settings | SHORT)], prepare=redirect)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert len(results(settings)) == 2 and "Traceback" not in errors and "Exception" not in errors


def as_in_the_locale_c():
    """``LC_ALL=C PYTHONUTF8=0``: output and files without an encoding of their own are ASCII."""
    locale.setlocale(locale.LC_ALL, "C")
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(descriptor, "w", 1, encoding="ascii", errors="surrogateescape", closefd=False)
        setattr(sys, name, stream)


@pytest.mark.slow
def test_what_an_encoding_lacks_is_printed_as_an_escape(settings, tmp_path, undrawn):
    process = Command(["--config", write(tmp_path, settings | SHORT)], prepare=as_in_the_locale_c)
    output, errors = process.communicate()
    assert process.returncode == 0 and len(results(settings)) == 2 and "Traceback" not in errors, errors
    assert "Report: " in output and "mean \\xb1 standard error" in output


class Broken(io.StringIO):
    """Takes ``whole`` writes and none after."""

    def __init__(self, whole):
        super().__init__()
        self.whole = whole

    def write(self, text):
        self.whole -= 1
        if self.whole < 0:
            raise BrokenPipeError
        return super().write(text)


@pytest.mark.parametrize("stream", [None, Broken(0), Broken(1), io.TextIOWrapper(io.BytesIO(), "ascii")])
def test_a_stream_that_fails_costs_nothing(stream, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream)
    with best_effort_output():
        for _ in range(3):
            print("69.22 ± 5.35", "\udcff", flush=True)
        assert not sys.stdout.isatty()
    assert sys.stdout is stream


@pytest.mark.parametrize("stream", [Broken(0), io.TextIOWrapper(io.BytesIO(), "ascii")])
def test_the_help_and_the_end_of_a_report_can_be_printed_anywhere(stream, tmp_path, monkeypatch, undrawn):
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit) as ended:
        report_command.main(["--help"])  # has a plus-minus sign
    assert ended.value.code == 0
    synthetic.write(tmp_path / "résumé", synthetic.result())
    assert report_command.main([str(next(tmp_path.iterdir()))]) == 0


def test_ctrl_c_in_a_report_is_one_line(tmp_path, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(report_command, "find_runs", stop)
    assert report_command.main([str(tmp_path)]) == 130
    assert capsys.readouterr().err == "\nstopped; run the same command to write the report\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_modules_are_imported_is_one_line(number, settings, tmp_path):
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "main.py"), "--config", write(tmp_path, settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
    )
    maps = f"/proc/{process.pid}/maps"
    if not os.path.exists(maps):
        pytest.skip("needs /proc")
    wait_until(lambda: "numpy" in open(maps).read(), process)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors.strip() == "stopped; the same command resumes from here"
