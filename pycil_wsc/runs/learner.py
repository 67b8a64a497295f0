"""A classifier that is kept up to date, task by task, from Python: ``pycil_wsc.Learner``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from filelock import Timeout
from tqdm import tqdm

from pycil_wsc import registry
from pycil_wsc.config.loading import flatten
from pycil_wsc.config.options import Config
from pycil_wsc.data.fingerprint import changed
from pycil_wsc.data.sources import Source, read_source
from pycil_wsc.data.stream import extended, kept
from pycil_wsc.data.types import Dataset, Split
from pycil_wsc.errors import UserError
from pycil_wsc.files import locked
from pycil_wsc.keys import LARGEST_NUMBER
from pycil_wsc.runs import shelf
from pycil_wsc.runs.kind import as_asked, counted, for_training
from pycil_wsc.runs.progress import Progress
from pycil_wsc.runs.run import Run, end_of
from pycil_wsc.runs.weights import Classifier, Images, rebuilt

FIRST = {  # keys of the first task that follow those of later tasks where they are not given
    "epochs": "init_epoch",
    "lrate": "init_lr",
    "lrate_decay": "init_lr_decay",
    "milestones": "init_milestones",
    "weight_decay": "init_weight_decay",
}
OF_RUNS = frozenset(  # keys that decide how an experiment is split, named and kept
    ("dataset", "tasks", "init_cls", "increment", "shuffle", "validation_split", "model_name", "prefix", "label", "out")
    + ("classes", "max_tasks", "cache_first_task", "save_weights", "tensorboard", "wandb")
)


class Learner:
    """A classifier that learns one task after another, each from images that need not be known before.

    Classes are label names. New ones make the head grow; new images of a known class join it, and its exemplars are
    chosen again. Between two tasks the learner holds the exemplars alone: the names of image files, or pixels.

    Args:
        name: the method, as ``model_name`` in JSON: ``"wsc"``, ``"replay"``, ...
        out: folder of the work. Each learned task is kept there (``task1``, ``task2``, ...), and the one under way from
            time to time: the same script, started again, takes the finished tasks from there and resumes where it was
            stopped.
        quiet: no progress bar and no lines.
        keys: the configuration's keys (docs/configuration.md), such as ``memory_per_class=200``, ``epochs=5``,
            ``wsc={"retain": 0.5}``. The first task has the schedule of the later ones unless ``init_epoch``,
            ``init_lr``, ... are given.

    Raises:
        UserError: says what is wrong with a key, in a line.
    """

    def __init__(
        self,
        name: str = "wsc",
        *,
        out: str | Path | None = None,
        quiet: bool = False,
        **keys: Any,
    ) -> None:
        given = flatten(keys)
        if wrong := sorted(OF_RUNS & given.keys()):
            raise UserError(f"{wrong[0]}: is a key of experiments from JSON; leave it out")
        given |= {first: given[later] for later, first in FIRST.items() if later in given and first not in given}
        self.config: Config = registry.kinds[registry.DEFAULT_KIND].resolve(given | {"model_name": name})
        self.out, self.quiet = Path(out) if out is not None else None, quiet
        self._held: Dataset | None = None  # the exemplars
        self._state: dict[str, Any] | None = None  # of a run after its last task
        self._model: Classifier | None = None

    @property
    def classes(self) -> list[str]:
        """The names of the classes learned, in that order."""
        return list(self._held.info.classes) if self._held else []

    @property
    def history(self) -> list[dict[str, Any]]:
        """What is known of each task: a line of ``metrics.jsonl`` without accuracies."""
        return list(self._state["history"]) if self._state else []

    # ---- learning ----------------------------------------------------------------------------------------------------

    def learn(self, source: Source) -> dict[str, Any]:
        """Learn one more task.

        Args:
            source: ``"folder:PATH"`` with ``PATH/<class>/*.jpg`` (or ``PATH/train/<class>/*.jpg``), ``"npz:PATH"``,
                ``(images, labels)`` with uint8 images (N, side, side, 3) or file names, or a map-style torch
                ``Dataset`` of (PIL image or uint8 tensor, label). The images of all tasks are of one kind.

        Returns:
            The task's entry in :attr:`history`.

        Raises:
            UserError: says in a line what is wrong with the images, or why the method cannot learn them.
        """
        if self._held and (lost := shelf.missing(self._held)):
            raise UserError(
                f"{lost[0]}: is not there any more, one of {len(lost)} such files of exemplars; bring them back, or "
                "save the learner with copy_images=True before the images go"
            )
        part = as_asked(read_source(source, self.config.data_root), self.config)
        part = dataclasses.replace(part, test=Split(part.test.images[:0], part.test.targets[:0]))
        stream = extended(self._held, part)
        config = counted(dataclasses.replace(self.config, tasks=(*self.config.tasks, part.info.name)), stream)
        with self._folder() as folder:
            place = folder / f"task{len(config.tasks)}"
            if (place / "learner.json").exists():
                self._take(place, config, stream)
            else:
                self._train(folder / f".{place.name}", config, stream)
                os.rename(folder / f".{place.name}", place)
        return self.history[-1]

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        """``out``, in which no other process is at work, or a folder for the time being."""
        if self.out is None:
            with tempfile.TemporaryDirectory(prefix="pycil_wsc-") as folder:
                yield Path(folder)
            return
        try:
            lock = locked(self.out, wait=False)
        except Timeout:
            raise UserError(f"{self.out}: another process is at work in it; wait, or choose another folder") from None
        with lock:
            yield self.out

    def _train(self, folder, config, stream):
        """Train on ``stream``'s last task, with checkpoints in ``folder``, and write the learner there."""
        if self.out is None:
            config = dataclasses.replace(config, checkpoint_seconds=LARGEST_NUMBER)
        config = dataclasses.replace(config, cache_first_task=False)
        if self._state and not config.learner.starts_anew:
            config = dataclasses.replace(config, pretrained=False)  # those weights are long in the state
        bar = Bar(self.quiet)
        run = Run(config, for_training(stream, config), bar, folder, self._state)
        bar.begin(run.plan)
        with bar:
            run.learn()
        held, numbers = kept(stream, run.learner.memory.indices)
        state = run.state(end_of(run.manager.tasks[-1]))
        memory = state["learner"]["_extra_state"]["memory"]
        memory["classes"] = {c: numbers[indices].tolist() for c, indices in run.learner.memory.classes.items()}
        self._become(config, held, state)
        for handler in list(run.log.handlers):
            handler.close()
        (folder / "checkpoint.pt").unlink(missing_ok=True)
        if self.out is not None:
            shelf.write(folder, self._shelved())

    def _take(self, place, config, stream):
        """Become the learner that an earlier process left in ``place``, if it learned ``stream``."""
        found = shelf.read(place)
        theirs = configured(found.config, tasks=config.tasks)
        if theirs.identity() != config.identity():
            raise UserError(f"{place}: was learned with other settings; choose another folder 'out'")
        if difference := changed(found.held.fingerprint, stream.fingerprint):
            raise UserError(f"{place}: was learned from other images ({difference}); choose another folder 'out'")
        self._become(config, found.held, found.state)
        if not self.quiet:
            print(f"task {len(config.tasks)} was learned before: taken from {place}", flush=True)

    def _become(self, config, held, state):
        self.config = dataclasses.replace(self.config, tasks=config.tasks)
        self._held, self._state, self._model = held, state, None

    # ---- using -------------------------------------------------------------------------------------------------------

    def predict(self, images: Images) -> np.ndarray:
        """The likeliest class of each image: names, numpy (B,).

        ``images``: uint8 (B, side, side, 3) of the side learned from; after learning from files, file names as well.
        """
        return np.array(self.classes)[self._classifier().predict(images)]

    def evaluate(self, source: Source) -> dict[str, Any]:
        """Test on ``source``, which has the forms that :meth:`learn` takes; of one with a test part that part counts.

        Returns:
            ``accuracy``: top-1 over the ``images`` whose class is known, in percent; ``classes``: that of each class
            by name; ``unknown``: how many images were left out because their class was never learned.
        """
        data = read_source(source, self.config.data_root)
        split = data.test if len(data.test) else data.train
        names = np.array(data.info.classes)[split.targets]
        known = np.isin(names, self.classes)
        if not known.any():
            raise UserError(f"{data.info.name}: has no image of a class that was learned")
        names, right = names[known], self.predict(split.images[known]) == names[known]
        by_class = {name: float(100 * right[names == name].mean()) for name in self.classes if name in names}
        counts = {"images": int(known.sum()), "unknown": int((~known).sum())}
        return {"accuracy": float(100 * right.mean()), **counts, "classes": by_class}

    def _classifier(self) -> Classifier:
        if self._state is None or self._held is None or self._held.arrivals is None:
            raise UserError("nothing was learned yet; call learn first")
        if self._model is None:
            info, seen = self._held.info, self._held.arrivals.seen
            order = list(range(seen[-1]))
            last = {"class_order": order, "boundaries": [0, *seen], "task": len(seen) - 1}
            config = dataclasses.replace(self.config, pretrained=False)
            learner = rebuilt(config, info, last | {"learner": self._state["learner"]})
            self._model = Classifier(learner, info, order, self.config.num_workers)
        return self._model

    # ---- keeping -----------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, copy_images: bool = False) -> None:
        """Write the learner into ``folder``: safetensors, JSON and exemplars; a learner saved there before goes.

        ``copy_images``: copy the exemplars' image files too, so that the learner goes on learning where they are not.
        """
        folder = Path(folder)
        if folder.exists() and not (folder / "learner.json").exists() and (folder.is_file() or any(folder.iterdir())):
            raise UserError(f"{folder}: holds other things than a learner; choose another folder")
        if self._state is None:
            raise UserError("nothing was learned yet; call learn first")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as near:
                new = Path(near, "new")
                shelf.write(new, self._shelved(), copy_images)
                shelf.replace_folder(new, folder)
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from None

    @classmethod
    def load(cls, folder: str | Path, *, out: str | Path | None = None, quiet: bool = False, **keys: Any) -> Learner:
        """The learner that :meth:`save` wrote into ``folder``, or :meth:`learn` into a folder of ``out``.

        Nothing in the folder is executed. ``keys`` are laid over the saved ones: ``device="cuda"``, ``epochs=2``.
        """
        found = shelf.read(Path(folder))
        learner = cls.__new__(cls)
        learner.config = configured(found.config | flatten(keys), tasks=tuple(found.config["tasks"]))
        learner.out, learner.quiet = Path(out) if out is not None else None, quiet
        learner._held, learner._state, learner._model = found.held, found.state, None
        return learner

    def _shelved(self) -> shelf.Shelved:
        assert self._held and self._state
        config = {name: value for name, value in self.config.to_dict().items() if name not in OF_RUNS - {"model_name"}}
        config["tasks"] = list(self.config.tasks)
        return shelf.Shelved(config, self._held, self._state)


def configured(values: Mapping[str, Any], tasks: tuple[str, ...]) -> Config:
    """The configuration with these values, after ``tasks``, which may be names of arrays."""
    config = registry.kinds[registry.DEFAULT_KIND].resolve({k: v for k, v in values.items() if k != "tasks"})
    return dataclasses.replace(config, tasks=tasks)


class Bar:
    """Shows the progress of one task: a bar on a terminal, and lines."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.before = quiet, 0
        self.bar: tqdm | None = None

    def begin(self, plan: list[int]) -> None:
        """``plan``: training images of each task; the last is shown."""
        self.before = sum(plan[:-1])
        self.bar = tqdm(total=plan[-1], unit=" images", leave=False, disable=True if self.quiet else None)

    def __call__(self, progress: Progress) -> None:
        if self.bar is not None and not self.bar.disable:
            self.bar.set_description_str(progress.position, refresh=False)
            self.bar.update(progress.images - self.before - self.bar.n)
        if progress.line and not self.quiet:
            tqdm.write(progress.line)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()
