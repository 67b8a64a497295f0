"""Fixtures of all tests, and what holds in each process that runs some."""

import gc
import os
import sys
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's, which reads it now
import pytest
import simulated_device
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs a model hub, or waits for one
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no further processes, which would import torch again
os.environ.setdefault("PYCIL_WSC_COMMIT", "tests")  # else each result starts git
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from support import small_runs, synthetic  # noqa: E402
from support.methods import digits as digits  # noqa: E402
from support.months import months as months  # noqa: E402
from support.small_learners import january as january  # noqa: E402
from support.small_learners import shelf as shelf  # noqa: E402
from support.small_llm import small_settings  # noqa: E402
from support.small_runs import SETTINGS, Undisturbed, small_data  # noqa: E402

torch.set_num_threads(1)  # the networks are tiny, and pytest runs a process on each core
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same for the processes that tests start
gc.set_threshold(20_000, 10, 10)  # garbage is looked for less often: a tenth of what torch's compiler takes
os.fsync = lambda descriptor: None  # what tests write need not outlast a loss of power: no test waits for the disk

FILES = {"svg": b'<svg width="1pt" viewBox="0 0 1 1"></svg>', "png": b"", "pdf": b""}


def unrendered_files(figure):
    """The files of a figure that is not rendered."""
    return FILES


def pytest_collection_modifyitems(config, items):
    """Leave the tests on the simulated accelerator to a process of their own, if there are others.

    Torch counts the devices at its first backward pass, and starts a thread for each. These threads do not survive a
    fork, which other tests make. ``test_devices.py`` starts the process.
    """
    on_accelerator = [item for item in items if "accelerator" in getattr(item, "fixturenames", ())]
    if on_accelerator and len(on_accelerator) < len(items):
        config.hook.pytest_deselected(items=on_accelerator)
        items[:] = [item for item in items if item not in on_accelerator]
    elif on_accelerator and not simulated_device.reason_to_skip():
        simulated_device.register()


def pytest_collection_finish(session):
    """What is loaded by now stays, so that collections of garbage leave it out."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def settings(tmp_path):
    """Three tasks of two classes, a schedule that takes seconds; data and results are in the test's own folder."""
    return SETTINGS | {"dataset": f"npz:{small_data(tmp_path / 'data.npz')}", "out": str(tmp_path / "runs")}


@pytest.fixture(scope="session")
def common(tmp_path_factory):
    """A folder that all processes of this session share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def undisturbed(common):
    """keys -> (folder, result) of a finished run with ``settings`` and these keys; each is run once for all tests."""
    return Undisturbed(common / "undisturbed")


@pytest.fixture(scope="session")
def collected():
    """Garbage collections leave out what is loaded: each Trainer begins with one, a fifth of a small run's time."""
    pytest.importorskip("transformers")
    import pycil_wsc.llm.trainer  # noqa: F401

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def llm_settings(tmp_path, collected):
    """Two tasks for a language model, and a schedule that takes a second."""
    return small_settings(tmp_path)


@pytest.fixture(scope="session")
def made(common):
    """A report of synthetic runs of all the paper's studies: (its folder, the contents of every result, the labels of
    the axes by figure). The figures of the main setting are drawn, but not written in their formats.
    """
    return small_runs.once(common / "report.pickle", lambda: report_of_all_studies(common / "report"))


def report_of_all_studies(folder):
    """The fixture ``made`` of runs in ``folder``."""
    from pycil_wsc import report
    from pycil_wsc.report import page

    results = synthetic.main_table(memories=(20, 200), methods=("der", "replay", "bic", "wsc"))
    results += [
        *synthetic.studies(memories=(20, 200), methods=("der", "replay", "wsc")),
        synthetic.result("icarl+wsc", 20, confusion=True),
    ]
    synthetic.write(folder, *results)
    labels = {}

    def drawn(group):
        if group.slug != synthetic.HERE:
            return
        for plot in figures(group):
            texts = [text for axes in plot.figure.axes for text in (axes.get_xlabel(), axes.get_ylabel())]
            labels[plot.slug] = set(texts) - {""}
            yield plot

    figures = page.figures
    with patch.object(page, "figures", drawn), patch.object(page, "to_files", unrendered_files):
        path = report.write_report(folder)
    return path.parent, results, labels


@pytest.fixture
def forked(monkeypatch):
    """Worker processes are forks of the test's, which need not import torch again. They have one thread, as those of
    OpenMP do not survive a fork.
    """
    monkeypatch.setattr("pycil_wsc.launch.workers.cores", lambda: 1)
    for module in ("pycil_wsc.launch.workers", "pycil_wsc.data.images.parallel"):
        monkeypatch.setattr(f"{module}.START_METHOD", "fork")


@pytest.fixture
def unrendered(monkeypatch):
    """Reports whose figures are drawn but not written in their formats, for tests of captions and of files' names."""
    monkeypatch.setattr("pycil_wsc.report.page.to_files", unrendered_files)


@pytest.fixture
def uncounted():
    """Steps whose operations are not counted, for tests of everything else."""
    with small_runs.uncounted():
        yield


@pytest.fixture
def undrawn():
    """Reports without figures, for tests of everything else."""
    with small_runs.undrawn():
        yield


@pytest.fixture
def unreported(request):
    """Sweeps without the report at their end, which takes more time than a small run.
    A test that asks for ``undrawn`` itself has its reports, without figures.
    """
    if "undrawn" in request.fixturenames:
        yield
        return
    with patch("pycil_wsc.launch.sweep.write_report", lambda folder: None):
        yield
