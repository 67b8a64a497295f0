"""One attempt at one run: the same alone, in a worker process and on a node of a cluster."""

import dataclasses
import functools
import time
import traceback
from dataclasses import dataclass

from filelock import Timeout

from pycil_wsc.config.loading import Config, resolve
from pycil_wsc.data.datasets import load_dataset
from pycil_wsc.data.resized import resized
from pycil_wsc.data.validation import hold_out
from pycil_wsc.engine.environment import commit
from pycil_wsc.errors import UnusableRun, UserError
from pycil_wsc.files import locked, write_json
from pycil_wsc.report import read_result
from pycil_wsc.runs.progress import open_log
from pycil_wsc.runs.run import Run, TrainingDiverged

TRACEBACK_LINES = 20


@dataclass(frozen=True)
class Job:
    """A run of the sweep: the ``number``-th of ``total``. ``wait`` for another process that is at work on it."""

    number: int
    total: int
    config: Config
    attempt: int = 1
    wait: bool = False

    @property
    def title(self):
        folder = self.config.run_folder
        return f"[{self.number}/{self.total}] {self.config.method} {folder.parent.name} seed {self.config.seed}"


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: with a ``result``, with the reason of its ``failure``, with an ``error`` that would meet every run,
    or with none of them because another process is at work on the run."""

    result: dict | None = None
    failure: str = ""
    again: bool = False  # another attempt may end better
    error: str = ""


def attempt(job, data, report):
    """Work on a run until it ends. One process at a time works in a run's folder; a finished run is not trained again.

    ``data`` is a :class:`Datasets`; ``report`` is called with each :class:`pycil_wsc.runs.progress.Progress`.
    """
    folder = job.config.run_folder
    try:
        with locked(folder, wait=job.wait):
            result = finished(job.config) or new_run(job.config, data, report).execute()
            (folder / "failed.json").unlink(missing_ok=True)
        return Outcome(result=result)
    except Timeout:
        return Outcome()
    except (TrainingDiverged, UnusableRun) as error:
        return failed(job, str(error), again=False)
    except UserError as error:
        return Outcome(error=str(error))
    except Exception as error:
        return failed(job, f"{type(error).__name__}: {error} (traceback in log.txt)", error=error)


def new_run(config, data, report):
    """The run of ``config``, with ``execute``."""
    if config.language_model:
        from pycil_wsc.llm.trainer import Run as LanguageModelRun  # an extra

        return LanguageModelRun(config, data.of(config), report)
    return Run(config, data.for_training(config), report)


def failed(job, reason, again=True, error=None):
    """The outcome of a failed attempt, which is left on record in the run's folder: in ``failed.json``, and a defect in the log."""
    folder, trace = job.config.run_folder, "".join(traceback.format_exception(error)) if error else ""
    record = {"reason": reason, "traceback": trace.splitlines()[-TRACEBACK_LINES:], "attempt": job.attempt}
    record |= {"time": time.strftime("%Y-%m-%d %H:%M:%S %z"), "commit": commit()}
    try:
        open_log(folder).error("attempt %d failed: %s\n%s", job.attempt, reason, trace)
        write_json(folder / "failed.json", record)
    except UserError as unwritable:
        return Outcome(error=str(unwritable))
    return Outcome(failure=reason, again=again)


def finished(config):
    """The ``result.json`` of a finished run, if it is whole and of this configuration; None if there is none."""
    path = config.run_folder / "result.json"
    if not path.exists():
        return None
    result = read_result(path)
    if resolve(result["config"]).identity() != config.identity():
        raise UnusableRun(f"{path}: was made with other settings; move it away to run this again")
    return result


class Datasets:
    """Each data set is read once, however many runs use it."""

    def __init__(self):
        self.load = functools.cache(load_dataset)

    def of(self, config):
        """The data set of ``config``, with the augmentation and the held-out part that it asks for; of a language model the texts, as tokens."""
        if config.language_model:
            return _corpus(config)
        dataset = self.load(config.dataset, config.data_root, config.image_size)
        asked = {
            field: getattr(config, field)
            for field in ("padding", "flip", "brightness")
            if getattr(config, field) is not None
        }
        dataset = dataclasses.replace(dataset, info=dataclasses.replace(dataset.info, **asked))
        return hold_out(dataset, config.validation_split, config.seed) if config.validation_split else dataset

    def for_training(self, config):
        """The same, with small copies of image files if the configuration asks for them."""
        dataset = self.of(config)
        return resized(dataset, config.data_root, config.num_workers) if config.cache_images else dataset


def _corpus(config):
    try:
        from pycil_wsc.llm.corpus import load_corpus  # an extra

        return load_corpus(config)
    except ModuleNotFoundError as error:
        raise UserError(f"language models need {error.name}: pip install -r requirements-llm.txt") from None
