"""The Python interface ``pycil_wsc.Learner``: a classifier that is updated task by task."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from filelock import Timeout

from pycil_wsc import registry
from pycil_wsc.classifier import shelf
from pycil_wsc.classifier.bar import Bar
from pycil_wsc.classifier.inference import Classifier, Images, rebuilt
from pycil_wsc.classifier.settings import (
    FIRST,
    OF_EXPERIMENTS,
    configured,
    folder_of,
    of_learner,
    refuse_changes,
    saved_values,
)
from pycil_wsc.classifier.shelf import SavedLearner
from pycil_wsc.config.options import Config
from pycil_wsc.data.fingerprint import changed
from pycil_wsc.data.sources import Source, read_source
from pycil_wsc.data.stored import renumbered
from pycil_wsc.data.stream import extended, kept
from pycil_wsc.data.types import Dataset, Split
from pycil_wsc.errors import UserError
from pycil_wsc.files import locked
from pycil_wsc.keys import LARGEST_NUMBER
from pycil_wsc.runs.checkpoint import CHECKPOINT
from pycil_wsc.runs.kind import as_configured, for_training, with_memory_size
from pycil_wsc.runs.planning import check_backbone
from pycil_wsc.runs.progress import log_closed_after
from pycil_wsc.runs.run import Run, end_of, losses


class Learner:
    """A classifier that learns one task after another. Future tasks need not be known in advance.

    Classes are identified by name. The head grows for new classes; new images may also belong to known classes, whose
    exemplars are then chosen again. Between two tasks the learner keeps only the exemplars: the names of image files,
    or pixels.

    Args:
        name: the method, as ``model_name`` in JSON: ``"wsc"``, ``"replay"``, ...
        out: folder for learned tasks (``task1``, ``task2``, ...) and checkpoints of the current one. If the same script
            is started again, it loads the finished tasks from there and resumes the stopped one.
        quiet: print no progress bar and no lines.
        keys: configuration keys (docs/configuration.md), such as ``memory_per_class=200``, ``epochs=5``,
            ``wsc={"retain": 0.5}``. The first task uses the schedule of later tasks unless ``init_epoch``, ``init_lr``,
            ... are given.

    Raises:
        UserError: if a key is invalid.
    """

    def __init__(
        self,
        name: str = "wsc",
        *,
        out: str | Path | None = None,
        quiet: bool = False,
        **keys: Any,
    ) -> None:
        given = of_learner(keys)
        given |= {first: given[later] for later, first in FIRST.items() if later in given and first not in given}
        self.config: Config = registry.kinds[registry.DEFAULT_KIND].resolve(given | {"model_name": name})
        self.out = None if out is None else folder_of("out", out)
        self.quiet = quiet
        self._held: Dataset | None = None  # the exemplars
        self._state: dict[str, Any] | None = None  # state of the run after its last task
        self._hashes: dict[str, str] = {}  # the SHA-256 of the exemplars' files
        self._model: Classifier | None = None

    @property
    def classes(self) -> list[str]:
        """The names of the learned classes, in learning order."""
        return list(self._held.info.classes) if self._held else []

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry per task: a line of ``metrics.jsonl``, without accuracies, and with ``task`` counted from 1."""
        lines = self._state["history"] if self._state else []
        return [line | {"task": line["task"] + 1} for line in lines]

    def __repr__(self) -> str:
        if not self.history:
            return f"<Learner {self.config.method!r}: nothing learned yet>"
        last = self.history[-1]
        learned = f"{last['num_seen']} classes after task {last['task']}, {last['exemplars']} exemplars"
        return f"<Learner {self.config.method!r}: {learned}>"

    # ---- learning ----------------------------------------------------------------------------------------------------

    def learn(self, source: Source) -> dict[str, Any]:
        """Learn one more task.

        Args:
            source: ``"folder:PATH"`` with ``PATH/<class>/*.jpg`` (or ``PATH/train/<class>/*.jpg``), ``"npz:PATH"``,
                ``(images, labels)`` with uint8 images (N, side, side, 3) or file names, or a map-style torch
                ``Dataset`` of (PIL image or uint8 tensor, label). All tasks must have the same kind of images.

        Returns:
            The task's entry in :attr:`history`.

        Raises:
            UserError: if the images are invalid, or the method cannot learn them.
            TrainingDiverged: if the loss, the weights or the test logits are no longer finite; the task is not learned.
        """
        if self._held:
            shelf.check_exemplars(self._held, self._hashes)
        part = as_configured(read_source(source, self.config.data_root), self.config)
        part = dataclasses.replace(part, test=Split(part.test.images[:0], part.test.targets[:0]))
        stream = extended(self._held, part)
        config = dataclasses.replace(self.config, tasks=(*self.config.tasks, part.info.name))
        config = with_memory_size(config, stream.train.images)
        with self._folder() as folder:
            saved = folder / f"task{len(config.tasks)}"
            if shelf.exists(saved):
                self._restore(saved, config, stream)
            else:
                work = folder / f".{saved.name}"
                learned = self._train(work, config, stream)
                if self.out is not None:
                    shelf.write(work, learned)
                    (work / CHECKPOINT).unlink(missing_ok=True)
                os.rename(work, saved)
                self._set_state(learned)  # last, so that a retry after an error learns this task again
        return self.history[-1]

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        """``out``, locked for other processes, or a temporary folder if ``out`` is None."""
        if self.out is None:
            with tempfile.TemporaryDirectory(prefix="pycil_wsc-") as folder:
                yield Path(folder)
            return
        try:
            lock = locked(self.out, wait=False)
        except Timeout:
            raise UserError(f"{self.out}: is in use by another process; wait, or choose another folder") from None
        with lock:
            yield self.out

    def _train(self, folder: Path, config: Config, stream: Dataset) -> SavedLearner:
        """Train on the last task of ``stream``, with checkpoints in ``folder``."""
        if self.out is None:
            config = dataclasses.replace(config, checkpoint_seconds=LARGEST_NUMBER)
        config = dataclasses.replace(config, cache_first_task=False)
        if self._state and not config.learner.starts_anew:
            config = dataclasses.replace(config, pretrained=False)  # the state already has the weights
        check_backbone(config, stream.info.image_size)
        bar = Bar(self.quiet)
        run = Run(config, for_training(stream, config), bar, folder, self._state)
        bar.begin(run.plan)
        with bar, log_closed_after(folder):
            run.learn()
        held, numbers = kept(stream, run.learner.memory.indices)
        state = run.state(end_of(run.manager.tasks[-1]))
        extra = state["learner"]["_extra_state"]
        classes = run.learner.memory.classes
        extra["memory"]["classes"] = {c: numbers[indices].tolist() for c, indices in classes.items()}
        extra["stored"] = renumbered(extra["stored"], numbers)
        return SavedLearner(self._values(config.tasks), held, state, shelf.hashes_of(held, self._hashes))

    def _restore(self, saved, config, stream):
        """Load the learner that an earlier process saved in ``saved``, if it was trained on ``stream``."""
        found = shelf.read(saved)
        if configured(found.config, tasks=config.tasks).identity() != config.identity():
            raise UserError(f"{saved}: was learned with other settings; choose another folder 'out'")
        if losses(found.state["history"][:-1]) != losses(self.history):
            raise UserError(f"{saved}: was learned from another learner; choose another folder 'out'")
        if difference := changed(found.held.fingerprint, stream.fingerprint):
            raise UserError(f"{saved}: was learned from other images ({difference}); choose another folder 'out'")
        self._set_state(found._replace(config={"tasks": config.tasks}))
        if not self.quiet:
            print(f"task {len(config.tasks)} was learned before: loaded from {saved}", flush=True)

    def _set_state(self, learned: SavedLearner) -> None:
        self.config = dataclasses.replace(self.config, tasks=tuple(learned.config["tasks"]))
        self._held, self._state, self._hashes = learned.held, learned.state, learned.hashes
        self._model = None

    # ---- prediction --------------------------------------------------------------------------------------------------

    def predict(self, images: Images) -> np.ndarray:
        """The most likely class of each image: names, numpy (B,).

        ``images``: uint8 (B, side, side, 3), or (B, side, side) if greyscale, of the training images' side.
        A learner trained on image files also accepts file names.
        """
        return np.array(self.classes)[self._classifier().predict(images)]

    def evaluate(self, source: Source) -> dict[str, Any]:
        """Test on ``source``, in any form that :meth:`learn` accepts; if it has a test part, only that is used.

        Returns:
            ``accuracy``: top-1 accuracy in percent over the ``images`` whose class is known; ``classes``: the accuracy
            on each class by name; ``unknown``: the number of images left out because their class was never learned.
        """
        data = read_source(source, self.config.data_root)
        split = data.test if len(data.test) else data.train
        names = np.array(data.info.classes)[split.targets]
        known = np.isin(names, self.classes)
        if not known.any():
            raise UserError(f"{data.info.name}: has no image of a learned class")
        names, correct = names[known], self.predict(split.images[known]) == names[known]
        by_class = {name: float(100 * correct[names == name].mean()) for name in self.classes if name in names}
        counts = {"images": int(known.sum()), "unknown": int((~known).sum())}
        return {"accuracy": float(100 * correct.mean()), **counts, "classes": by_class}

    def _classifier(self) -> Classifier:
        if self._state is None or self._held is None or self._held.arrivals is None:
            raise UserError("nothing has been learned yet; call learn first")
        if self._model is None:
            info, seen = self._held.info, self._held.arrivals.seen
            order = list(range(seen[-1]))
            last = {"class_order": order, "boundaries": [0, *seen], "task": len(seen) - 1}
            config = dataclasses.replace(self.config, pretrained=False)
            learner = rebuilt(config, info, last | {"learner": self._state["learner"]})
            self._model = Classifier(learner, info, order, self.config.num_workers)
        return self._model

    # ---- saving ------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, copy_images: bool = False) -> None:
        """Save the learner in ``folder`` (``learner.safetensors``), replacing a learner saved there before.

        Other files in the folder stay as they are. Who loads it meanwhile gets the old learner or the new one, and of
        several processes that save at once the last one prevails.

        ``copy_images``: also copy the exemplars' image files, so that the learner can be trained further without the
        originals.
        """
        folder = folder_of("folder", folder)
        if self._held is None or self._state is None:
            raise UserError("nothing has been learned yet; call learn first")
        learned = SavedLearner(self._values(self.config.tasks), self._held, self._state, self._hashes)
        try:
            with locked(folder):
                shelf.write(folder, learned, copy_images)
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from None

    @classmethod
    def load(cls, folder: str | Path, *, out: str | Path | None = None, quiet: bool = False, **keys: Any) -> Learner:
        """Load a learner that :meth:`save` wrote to ``folder``, or :meth:`learn` to a folder in ``out``.

        Nothing in the folder is executed. ``keys`` override the saved ones: ``device="cuda"``, ``epochs=2``. What the
        first task has fixed cannot change: the backbone (``convnet_type``, ``convnet_options``), ``consolidate``, the
        images' size and augmentation (``image_size``, ``padding``, ...) and ``init_epoch``, ``init_lr``, ....

        Raises:
            UserError: if there is no complete learner, or a key is invalid or other than what the first task has fixed.
        """
        folder, given = folder_of("folder", folder), of_learner(keys)
        found = shelf.read(folder)
        try:
            saved = configured(found.config, tasks=())
        except UserError as error:
            raise UserError(f"{folder}: was saved by another version of pycil_wsc ({error}); use that one") from None
        refuse_changes(saved, given)
        learner = cls(saved.model_name, out=out, quiet=quiet)
        learner.config = configured(saved_values(saved, given) | given, tasks=())
        learner._set_state(found)
        try:
            learner._classifier()
        except UserError:
            raise
        except Exception as error:  # the checksums match, but another version or program wrote the file
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{folder}: is not a complete saved learner ({reason}); save or copy it again") from None
        return learner

    def _values(self, tasks: tuple[str, ...]) -> dict[str, Any]:
        """The configuration's values to save, of a learner of ``tasks``."""
        omitted = OF_EXPERIMENTS - {"model_name"}
        values = {name: value for name, value in self.config.to_dict().items() if name not in omitted}
        return values | {"tasks": list(tasks)}
