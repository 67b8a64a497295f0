"""Many runs: skip the finished, go on with the stopped, keep going when one fails."""

import dataclasses
import sys

from filelock import FileLock, Timeout

from pycil_wsc import report
from pycil_wsc.config import resolve
from pycil_wsc.trainer import Run, TrainingDiverged, open_log, planned_images
from utils.data import load_dataset
from utils.data_manager import DataManager
from utils.errors import UnusableRun, UserError


def sweep(configs):
    """Bring every run to its end and print the table; returns the exit code: 0, or 1 if a run failed."""
    data, results, failures = Datasets(), {}, {}
    for config in configs:
        data.of(config)  # a wrong path shows before hours of training
    for wait in (False, True):  # what another process is busy with comes last
        for number, config in enumerate(configs, 1):
            folder = config.run_folder
            if folder in results or folder in failures:
                continue
            title = f"[{number}/{len(configs)}] {config.model_name} {folder.parent.name} seed {config.seed}"
            try:
                results[folder] = run_once(config, data, title, wait)
            except Timeout:
                print(f"{title}  another process is at work on it", flush=True)
            except (TrainingDiverged, UnusableRun) as error:
                failures[folder] = str(error)
            except UserError:
                raise  # it would meet every run
            except Exception as error:
                failures[folder] = f"{type(error).__name__}: {error} (traceback in {folder / 'log.txt'})"
                open_log(folder).exception("failed")
            if folder in failures:
                print(f"{title}  FAILED: {failures[folder]}", flush=True)
    print("\n" + report.accuracy_table(results.values()))
    print(f"\nResults: {configs[0].out}/{configs[0].prefix}")
    for folder, reason in failures.items():
        print(f"failed: {folder}: {reason}", file=sys.stderr)
    return 1 if failures else 0


def run_once(config, data, title, wait):
    """The result of one run, trained now or found finished. One process at a time works in a run's folder."""
    with locked(config.run_folder, wait):
        if (config.run_folder / "result.json").exists():
            print(f"{title}  finished before", flush=True)
            return finished(config)
        return Run(config, data.of(config), title).execute()


def locked(folder, wait):
    """A context in which the folder is this process's own; raises ``Timeout`` if it is another's and we do not ``wait``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / ".lock").acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another folder with --out") from None


def finished(config):
    """The ``result.json`` of a finished run, if it is whole and of this configuration."""
    path = config.run_folder / "result.json"
    result = report.read_result(path)
    if resolve(result["config"]).identity() != config.identity():
        raise UnusableRun(f"{path}: was made with other settings; move it away to run this again")
    return result


def dry_run(configs):
    """Print the runs and what each costs in training images."""
    data, total = Datasets(), 0
    for config in configs:
        manager = DataManager(data.of(config), config.shuffle, config.seed, config.init_cls, config.increment)
        images = planned_images(config, manager)
        done = (config.run_folder / "result.json").exists()
        total += 0 if done else images
        print(f"{config.run_folder}  {images:,} images{'  (finished)' if done else ''}")
    print(f"{len(configs)} runs, {total:,} training images to go")
    return 0


class Datasets:
    """Each data set is read once, however many runs use it."""

    def __init__(self):
        self.loaded = {}

    def of(self, config):
        """The data set of ``config``, with the augmentation that it asks for."""
        name = (config.dataset, config.data_root, config.image_size)
        if name not in self.loaded:
            self.loaded[name] = load_dataset(*name)
        dataset = self.loaded[name]
        asked = {field: getattr(config, field) for field in ("padding", "flip", "brightness") if getattr(config, field) is not None}
        return dataclasses.replace(dataset, info=dataclasses.replace(dataset.info, **asked))
