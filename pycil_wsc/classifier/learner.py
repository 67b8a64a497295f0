"""The Python interface ``pycil_wsc.Learner``: a classifier that is updated task by task."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pycil_wsc import devices
from pycil_wsc.allocator import free_memory
from pycil_wsc.classifier.check.findings import Findings, findings_in
from pycil_wsc.classifier.export.folder import write_folder
from pycil_wsc.classifier.export.program import export_program, is_folder
from pycil_wsc.classifier.predict.answers import UNKNOWN, Answer, Answers, Tested, numbers_of
from pycil_wsc.classifier.predict.arguments import folder_of, probability, refusing, whole_number
from pycil_wsc.classifier.predict.expected import Expected
from pycil_wsc.classifier.predict.images import Images, Transform
from pycil_wsc.classifier.predict.predictor import Model
from pycil_wsc.classifier.store import learner_file
from pycil_wsc.classifier.store.bookkeeping import ClassChange
from pycil_wsc.classifier.store.place import Place
from pycil_wsc.classifier.store.saved_learner import SavedLearner, answers_of
from pycil_wsc.classifier.store.settings import (
    FIRST,
    configured,
    of_learner,
    refuse_changes,
    saved_values,
    values_of,
)
from pycil_wsc.classifier.store.versions import (
    FILE,
    Version,
    is_damaged,
    listed,
    make_present,
    number_of,
    one_before,
    signature,
)
from pycil_wsc.classifier.update import classes
from pycil_wsc.classifier.update.gate import Accept
from pycil_wsc.classifier.update.held_out import ONE_OF
from pycil_wsc.classifier.update.prepare import Before
from pycil_wsc.classifier.update.progress_bar import ProgressBar
from pycil_wsc.classifier.update.update import ONE_AT_A_TIME, updated
from pycil_wsc.config.completion import complete
from pycil_wsc.config.image_config import KEYS
from pycil_wsc.data.images.image_files import line_of
from pycil_wsc.data.images.sources import ImageSource, read_listed, read_source
from pycil_wsc.data.types import Dataset
from pycil_wsc.errors import UserError
from pycil_wsc.files import locked
from pycil_wsc.runs.class_incremental import as_configured
from pycil_wsc.runs.progress import Progress
from pycil_wsc.state import State


class Evaluation(Tested):
    """What :meth:`Learner.evaluate` returns."""

    unknown: int


class Learner:
    """A classifier that learns one task after another. Future tasks need not be known in advance.

    Classes are identified by name. The head grows for new classes. New images may also belong to known classes, whose
    exemplars are then chosen again. Between two tasks the learner keeps the exemplars and the held-out images (as names
    of image files, or as pixels), and two hashes of each learned image: of its content, and of what it shows.

    Args:
        name: the method, as ``model_name`` in JSON: ``"wsc"``, ``"replay"``, ...
        out: folder for learned tasks (``task1``, ``task2``, ...) and checkpoints of the current one. If the same script
            is started again, it loads the finished tasks from there and resumes the stopped one.
        quiet: print no progress bar and no lines. The logger ``pycil_wsc.learner`` still gets the lines.
        held_out: the number of images of each class to hold out from training, at most a fifth of the class. They are
            used to calibrate the probabilities and to judge updates (``accept``). 0: all images are trained on,
            probabilities are not calibrated, and updates are judged on the exemplars.
        on_progress: called several times a second while the learner learns, with a
            :class:`~pycil_wsc.runs.progress.Progress`, such as ``position="task 2/2, epoch 3/70"`` and ``images=1280``.
        keys: configuration keys (docs/configuration.md), such as ``memory_per_class=200``, ``epochs=5``,
            ``wsc={"retain": 0.5}``. Keys of later tasks, such as ``epochs``, also set the first task, unless you pass
            its own key, such as ``init_epoch``.

    Attributes:
        notes: a dictionary of your own with JSON values, such as where the images came from. :meth:`save` saves it.

    Raises:
        UserError: if a key is invalid.
    """

    def __init__(
        self,
        name: str = "wsc",
        *,
        out: str | Path | None = None,
        quiet: bool = False,
        held_out: int = 0,
        on_progress: Callable[[Progress], None] | None = None,
        **keys: object,
    ) -> None:
        if on_progress is not None and not callable(on_progress):
            raise UserError(f"on_progress: {on_progress!r} cannot be called; give a function, or None")
        given = of_learner(keys)
        given |= {first: given[later] for later, first in FIRST.items() if later in given and first not in given}
        try:
            self.config = complete(given | {"model_name": name})
        except UserError:
            _refuse_misspelt(keys)
            raise
        self.out = None if out is None else folder_of("out", out)
        self.quiet = quiet
        self.on_progress = on_progress
        self.held_out = whole_number("held_out", held_out)
        self.notes: dict[str, Any] = {}
        self._saved: SavedLearner | None = None  # the state after the last task, to which the answers belong
        self._answers: Answers | None = None  # replaced as a whole by whatever learns or loads
        self._place = Place()
        self._changing = threading.RLock()  # held by whatever reads the state and then replaces it
        self._learning = False

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_changing"}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        vars(self).update(state)
        self._changing = threading.RLock()
        self._learning = False  # the copy of a learner that was learning is not

    @property
    def classes(self) -> list[str]:
        """The names of the learned classes, in learning order."""
        return list(self._saved.held.info.classes) if self._saved else []

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry per task, counted from 1.

        ``when`` it was learned, ``data`` (name, number of images and their fingerprint, those held out included), the
        new ``classes``, the images that were ``relabelled``, if any (from which class to which, and how many), the
        ``accuracies`` on the held-out images in percent, ``seconds``, the gate's decision if there was one, and the
        ``changes`` of classes after the task (:meth:`rename`, :meth:`merge`, :meth:`remove`, :meth:`relabel`). Further
        entries are those of a line of ``metrics.jsonl`` (docs/outputs.md).
        """
        return self._history(slice(None))

    def _history(self, tasks: slice) -> list[dict[str, Any]]:
        if self._saved is None:
            return []
        lines = self._saved.state["history"]
        entries = []
        for line, entry in list(zip(lines, self._saved.bookkeeping.entries, strict=True))[tasks]:
            entries.append(copy.deepcopy({**line, "task": line["task"] + 1, **entry}))
        return entries

    def __repr__(self) -> str:
        if self._saved is None:
            return f"<Learner {self.config.method!r}: nothing learned yet>"
        (last,) = self._history(slice(-1, None))
        learned = f"{last['num_seen']} classes after task {last['task']}, {last['exemplars']} exemplars"
        return f"<Learner {self.config.method!r}: {learned}>"

    # ---- predicting --------------------------------------------------------------------------------------------------
    #
    # Each of these reads the snapshot ``answers`` once, so its result belongs to a single state. Any number of threads
    # may call them, also during an update.

    @property
    def answers(self) -> Answers:
        """The current predictor. Later tasks do not change it: use it for several predictions with the same state.

        Raises:
            UserError: if nothing has been learned yet.
        """
        if self._answers is None:
            raise UserError("nothing has been learned yet; call learn first")
        return self._answers

    @property
    def version(self) -> int | None:
        """The number of the version that it was loaded from or saved as; None if it has changed since."""
        answers = self._answers
        return answers.version if answers else None

    @property
    def model(self) -> Model:
        """The network by itself: (B, 3, side, side) normalised images -> (B, classes) float32 logits.

        It has the weights that :meth:`predict` uses, and the next task leaves it as it is. Copy it before you change
        it. :attr:`transform` makes its images.

        Raises:
            UserError: if nothing has been learned yet.
        """
        return self.answers.model

    @property
    def transform(self) -> Transform:
        """What is done to an image before :attr:`model` sees it, as ``transform`` of a torchvision data set.

        Raises:
            UserError: if nothing has been learned yet.
        """
        return self.answers.transform

    def predict(
        self,
        images: Images,
        threshold: float | None = None,
        otherwise: str = UNKNOWN,
        unknown: float | None = None,
    ) -> np.ndarray:
        """The most likely class of each image: names, numpy (B,).

        Args:
            images: a list or generator of file names, PIL images or uint8 arrays (H, W, 3) of any size; a folder; or
                uint8 (B, side, side, 3), or (B, side, side) if greyscale, of the training images' side. They are read
                batch by batch.
            threshold: predict ``otherwise`` if the probability of the most likely class, 0 to 1, is lower; None: never.
            otherwise: the name to predict then; must not be the name of a class.
            unknown: predict ``otherwise`` for what may be of an unknown class. The number is the share of images of
                known classes that may be refused by mistake: 0.05 is one in twenty. An image is refused if its
                :meth:`familiarity` is at most this. Needs held-out images, at least 19 for 0.05. None: never.

        Raises:
            UserError: if nothing has been learned yet, an argument is invalid, ``unknown`` needs more held-out images,
                or an image cannot be read; names the image. :meth:`each` goes on with the next one.
        """
        return self.answers.predict(images, threshold, otherwise, unknown)

    def familiarity(self, images: Images) -> np.ndarray:
        """How familiar each image is: the share of held-out images that are no more familiar, float64 (B,), above 0.

        A small value suggests a class that was never learned. :meth:`predict` compares it with ``unknown``. It measures
        how near the image is to a class mean in the features of the network
        (:class:`~pycil_wsc.classifier.predict.familiarity.Familiarity`).

        ``images``: as for :meth:`predict`.

        Raises:
            UserError: if nothing has been learned yet, no image is held out, or an image cannot be read; names it.
        """
        return self.answers.familiarity(images)

    def expected_accuracy(self, images: Images) -> Expected:
        """The accuracy to expect on images without labels: ``accuracy`` in percent, ``images``, and ``held_out``.

        It is the mean of their calibrated probabilities, beside the accuracy on the ``held_out`` images
        (:mod:`pycil_wsc.classifier.predict.expected`). All images must be of known classes.

        ``images``: as for :meth:`predict`.

        Raises:
            UserError: if nothing has been learned yet, no image is held out, or an image cannot be read; names it.
        """
        return self.answers.expected_accuracy(images)

    def predict_proba(self, images: Images) -> np.ndarray:
        """The probability of each class, float64 (B, classes), a column for each of :attr:`classes`.

        ``images``: as for :meth:`predict`.

        Raises:
            UserError: if nothing has been learned yet, or an image cannot be read; names it.
        """
        return self.answers.predict_proba(images)

    def logits(self, images: Images) -> torch.Tensor:
        """The logits before they are calibrated, float32 (B, classes), on the device.

        ``images``: as for :meth:`predict`.

        Raises:
            UserError: if nothing has been learned yet, or an image cannot be read; names it.
        """
        return self.answers.logits(images)

    def top(self, images: Images, k: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The ``k`` most likely classes (None: up to five), best first: names (B, k) and probabilities (B, k).

        ``images``: as for :meth:`predict`.

        Raises:
            UserError: if nothing has been learned yet, ``k`` is not a whole number from 1 to the number of classes, or
                an image cannot be read; names it.
        """
        return self.answers.top(images, k)

    def each(
        self,
        images: Images,
        threshold: float | None = None,
        otherwise: str = UNKNOWN,
        unknown: float | None = None,
        k: int = 0,
    ) -> Iterator[Answer]:
        """The answers one by one, in constant memory; a file that cannot be read has a ``problem`` and no name.

        The arguments are those of :meth:`predict`. With ``unknown``, each answer has its ``familiarity``, and with
        ``k`` the ``top`` so many classes.

        Raises:
            UserError: if nothing has been learned yet, or an argument is invalid; if that is ``images``, when the first
                answer is asked for.
        """
        return self.answers.each(images, threshold, otherwise, unknown, k)

    def evaluate(self, source: ImageSource, unknown: float | None = None) -> Evaluation:
        """Test on ``source``, in any form that :meth:`learn` accepts; if it has a test part, only that is used.

        Args:
            source: the images. Those of classes that were never learned count for ``unknown`` and ``refused`` only.
            unknown: as for :meth:`predict`.

        Returns:
            ``accuracy``: top-1 accuracy in percent over the ``images`` whose class is known; ``classes``: the accuracy
            on each class by name; ``balanced_accuracy``: their mean, in which each class counts alike; ``unknown``: the
            number of images whose class was never learned; ``ece``: the expected calibration error in percent,
            ``before`` and ``after`` the logits are divided by the ``temperature``. If the argument ``unknown`` is
            given, also ``refused``: the percentages of images of ``known`` and of ``unknown`` classes that are refused,
            the ``accuracy`` on the known images that are not, and the ``auroc``.

        Raises:
            UserError: if nothing has been learned yet, the images are invalid, one of them cannot be read, none is of a
                learned class, or ``unknown`` is invalid.
        """
        answers = self.answers
        data = read_source(source, self.config.data_root)
        if line := line_of(data.left_out):
            logging.getLogger("pycil_wsc.learner").warning("%s: %s", data.info.name, line)
        split = data.test if len(data.test) else data.train
        labels = numbers_of(split.targets, data.info.classes, answers.classes)
        known = labels >= 0
        if not known.any():
            raise UserError(f"{data.info.name}: has no image of a learned class")
        tested = known if unknown is None else np.ones_like(known)
        return {**answers.tested(split.images[tested], labels[tested], unknown), "unknown": int((~known).sum())}

    # ---- learning ----------------------------------------------------------------------------------------------------

    def learn(self, source: ImageSource, accept: Accept | None = None) -> dict[str, Any]:
        """Learn one more task. Until it has been learned, the learner predicts as before.

        An image that was learned with another class before has only the new class afterwards. Methods that compute the
        classifier take it out of their sums (except DS-AL), and exemplars change their class.

        Args:
            source: ``"folder:PATH"`` with ``PATH/<class>/*.jpg`` (or ``PATH/train/<class>/*.jpg``), ``"npz:PATH"``,
                ``(images, labels)`` with uint8 images (N, side, side, 3), as a tensor also (N, 3, side, side), or
                file names, a map-style torch ``Dataset`` of (PIL image or uint8 tensor, label), or a data set of
                Hugging Face's ``datasets`` with a column of images and one of classes. All tasks must have the same
                kind of images.
            accept: the condition on which the update is kept (:class:`pycil_wsc.Accept`); None: always keep it.

        Returns:
            The task's entry in :attr:`history`. With ``accept``, it also has ``accepted``, the ``reason``, and the
            comparison, ``gate``. For a rejected update, which leaves the learner unchanged, it has only these three.

        Raises:
            UserError: if the images are invalid, or the method cannot learn them.
            TrainingDiverged: if the loss, the weights or the test logits are no longer finite; the task is not learned.
        """
        if accept is not None and not isinstance(accept, Accept):
            raise UserError(f"accept: is a {type(accept).__name__}; give pycil_wsc.Accept(max_drop=0.02)")
        # the last two: a caller may have switched gradients off
        with self._alone(), ONE_AT_A_TIME, self._learns(), torch.inference_mode(False), torch.enable_grad():
            bar = ProgressBar(self.quiet, self.on_progress)
            before = Before(self.config, self._saved, self._answers, self.held_out, self.out, bar, accept)
            outcome = updated(before, source)
            decision = outcome.decision
            if outcome.state is None:
                assert decision
                bar.say(f"task {len(self.config.tasks) + 1} rejected: {decision['reason']}")
                return {**decision}
            self._set_state(outcome.state, outcome.answers)  # last, so that a retry after an error learns it again
            if advice := self._advice():
                bar.say(advice)
            (entry,) = self._history(slice(-1, None))
            return entry | {**(decision or {})}

    def check(self, source: ImageSource, fewest: int = 5, level: float = 0.01) -> Findings:
        """Look at images before they are learned.

        The findings are files that cannot be read or are left out, near-empty classes, and:

        - duplicates: images with the same content as another one of the source, as one that the learner keeps, or as
          one that it has learned, if its method learns each image once, as RanPAC does;
        - images that were learned or are held out with another class, which :meth:`learn` would replace;
        - near-duplicates by a perceptual hash, such as images that were saved again, of the source, of what the learner
          has learned, and of the test images;
        - classes whose names differ only by case or spaces, and images that may be mislabelled, as they look like
          another class of the source, or a known one if images are held out;
        - shift: a two-sample test in feature space compares the images of known classes with held-out images
          (``held_out=20``) of the same classes (:mod:`pycil_wsc.classifier.check.shift`).

        Args:
            source: as for :meth:`learn`. Its test part, if any, is compared with its training images.
            fewest: a class with fewer readable images than this is near-empty.
            level: the significance level of the test for shift: its rate of false alarms, 0 to 1.

        Raises:
            UserError: if there are no images, or they have another form or size than those of earlier tasks.
        """
        fewest, level = whole_number("fewest", fewest), probability("level", level)
        present, answers, config = self._saved, self._answers, self.config
        part = as_configured(read_listed(source, config.data_root), config)
        return findings_in(part, present, answers, config, fewest, level)

    # ---- classes without learning ------------------------------------------------------------------------------------

    def rename(self, name: str, to: str) -> ClassChange:
        """Rename a class. From now on, its images come under the new name.

        This method, :meth:`merge`, :meth:`remove` and :meth:`relabel` do not train. The :attr:`history` has them as
        ``changes`` of the last task; :meth:`save` saves them as a version, and :meth:`rollback` undoes them.

        Raises:
            UserError: if there is no such class, or another class is called ``to``; nothing has changed then.
        """
        return self._change(classes.renamed, name, to)

    def merge(self, names: Sequence[str], into: str) -> ClassChange:
        """Make one class of several.

        A method that computes its classifier is then as if it had learned them as one class (DS-AL only nearly).
        Other methods give the class the mean of their rows of the head, and their exemplars, until the next task.

        Args:
            names: the classes.
            into: the name of the class that they become; may be one of theirs.

        Raises:
            UserError: if one of them is unknown, or ``into`` is another class; nothing has changed then.
        """
        return self._change(classes.merged, names, into)

    def remove(self, name: str, images: ImageSource | None = None) -> ClassChange:
        """Remove a class.

        A method that computes its classifier is then as if it had never learned the class. ``ncm`` and ``fecam`` have
        sums for each class. ``slda``, ``ranpac`` and ``acil`` have sums over all images, and need all learned
        ``images`` of the class to take them out. Three things stay as they were: the first task's mean and deviation,
        by which arrays are normalised (files are by ImageNet's); which images of other classes are held out; and a
        backbone, or modules in it, that the first task trained (``adapt``, ``tuning``).

        Other methods lose the exemplars, the held-out images and the rows of the head. The other weights stay as they
        were trained: what the network has learned from the images stays until it is trained again.

        Args:
            name: the class.
            images: in any form that ``learn`` accepts; images of other classes are ignored.

        Raises:
            UserError: if there is no such class, it is the only one, or images are missing; nothing has changed then.
        """
        return self._change(classes.removed, name, images, self._say)

    def relabel(self, images: ImageSource | Sequence[str] | np.ndarray, to: str) -> ClassChange:
        """Correct the class of images that were learned or are held out.

        A method that computes its classifier is then as if it had learned them with the new class. A network is not
        trained: exemplars and held-out images change their class, and the next task trains on them. :meth:`learn` also
        corrects labels, and trains at once.

        Args:
            images: names of files, an array of images, or a source as for ``learn``, whose labels do not matter.
            to: the class, which must be known.

        Raises:
            UserError: if an image was never learned, or ``to`` is not a class; nothing has changed then.
        """
        return self._change(classes.relabelled, images, to, self._say)

    def _change(self, change: Callable[..., classes.Changed], *arguments: object) -> ClassChange:
        with self._alone(), ONE_AT_A_TIME, torch.inference_mode(False):
            changed = change(self.config, self._present(), *arguments)
            self._set_state(changed.learner)
            self._say(changed.line)
        return copy.deepcopy(changed.change)

    def _say(self, line: str) -> None:
        ProgressBar(self.quiet).say(line)

    def _advice(self) -> str:
        """After the first task, what is missing if no image is held out; "" otherwise."""
        present = self._present()
        if len(self.config.tasks) > 1 or len(present.bookkeeping.held_out):
            return ""
        why = f"held_out={self.held_out}: no class has {ONE_OF} images, of which one" if self.held_out else "no image"
        remedy = "more images are needed" if self.held_out else "held_out=20 holds out up to 20 images of each class"
        return f"{why} is held out, so probabilities are not calibrated and shift is not tested; {remedy}"

    def _set_state(self, learned: SavedLearner, answers: Answers | None = None) -> None:
        answers = answers or answers_of(self.config, learned)
        self.config = dataclasses.replace(self.config, tasks=tuple(learned.config["tasks"]))
        self._saved, self._answers = learned, answers

    @property
    def _held(self) -> Dataset:
        """The exemplars."""
        return self._present().held

    @property
    def _state(self) -> State:
        """The state of the run after its last task."""
        return self._present().state

    def _present(self) -> SavedLearner:
        if self._saved is None:
            raise UserError("nothing has been learned yet; call learn first")
        return self._saved

    # ---- saving ------------------------------------------------------------------------------------------------------

    def export(
        self, path: str | Path, *, opset: int | None = None, evaluations: Sequence[Tested | None] | None = None
    ) -> None:
        """Write the classifier for other programs; the name of ``path`` decides the form.

        ``NAME.onnx``: ONNX; ``NAME.pt2``: a program of ``torch.export``. Both take batches of any size of images from
        :attr:`transform`, and return logits, which have been compared with those of :attr:`model`. For calibrated
        probabilities, divide them by the ``temperature`` in the file's metadata before the softmax. If images are held
        out, the second output is the :meth:`familiarity`.

        Any other name is a folder with the weights as safetensors and a model card, which the Hugging Face Hub and
        MLflow accept, and :func:`pycil_wsc.load_exported` loads. It has no image and no path.

        Args:
            path: the file or folder; an earlier export is replaced, except for the licence in the card.
            opset: the version of ONNX's operators; None: the one that torch chooses.
            evaluations: for the accuracies in the model card: what :meth:`evaluate` returned after each task, None for
                a task that was not tested.

        Raises:
            UserError: if a package is missing, the network cannot be converted, or the file cannot be written.
        """
        path = folder_of("path", path)
        if is_folder(path):
            if opset is not None:
                raise UserError(f"opset: applies to ONNX files only, and {path.name} is a folder; leave it out")
            with self._changing:  # all of one state
                answers, present, config = self.answers, self._present(), self.config
            seconds = present.state["history"][-1]["total_seconds"]  # of all tasks
            write_folder(path, answers, present.held, config, seconds, evaluations)
        elif evaluations is not None:
            raise UserError(f"evaluations: apply to folders only, and {path.name} is a file; leave them out")
        else:
            answers = self.answers  # all of one state
            known = answers.known_if_any
            export_program(path, answers.model, answers.transform, answers.temperature, opset, known)

    def save(self, folder: str | Path, copy_images: bool = False, versions: int = 5) -> None:
        """Save the learner in ``folder`` (``learner.safetensors``), as its newest version.

        Other files in the folder stay as they are. A process that loads it in the meantime gets either the old or the
        new version. If several processes save at once, the last one wins.

        Args:
            folder: the folder; created if it does not exist.
            copy_images: also copy the exemplars' image files, so that the learner that :meth:`load` returns can be
                trained further without the originals. This one goes on reading the originals.
            versions: keep this many versions, this one included, for :meth:`rollback` and ``load(version=)``.

        Raises:
            UserError: if nothing has been learned yet, ``versions`` is not a whole number above 0, :attr:`notes` are
                not JSON, an exemplar's file cannot be copied, or the folder cannot be written; or in a callback of
                :meth:`learn`.
        """
        folder = folder_of("folder", folder)
        limit = whole_number("versions", versions)
        if not limit:
            raise UserError("versions: 0 keeps nothing; give 1 to keep this version alone")
        with self._alone():
            learned = self._present()
            notes = _in_json(self.notes)
            bookkeeping = dataclasses.replace(learned.bookkeeping, per_class=self.held_out, notes=notes)
            learned = learned._replace(config=values_of(self.config, self.config.tasks), bookkeeping=bookkeeping)
            try:
                with locked(folder):
                    known = self._place.number_in(folder)
                    parent = self._place.parent_in(folder, has_learned_since=self.version is None)
                    number = learner_file.write(folder, learned, copy_images, limit, parent, known)
                    self._place = self._place._replace(folder=folder, signature=signature(folder), number=number)
            except OSError as error:
                raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from None
            self._answers = self.answers.with_version(number)

    @staticmethod
    def versions(folder: str | Path) -> list[Version]:
        """The versions of a learner that are kept in ``folder``, oldest first; empty if no learner is saved there.

        Raises:
            UserError: if ``folder`` cannot be the path of a folder.
        """
        return listed(folder_of("folder", folder))

    def rollback(self) -> None:
        """Go back to the version that this one was learned from, in memory and in the folder that it was saved in.

        If the learner has learned since it was saved or loaded, only that is undone. The abandoned version stays in the
        folder. If another thread is training the learner, this method waits for it.

        Raises:
            UserError: if there is no folder, or no earlier version in it, or if its present version is not this
                learner; nothing has changed then.
        """
        with self._alone():
            folder, version = self._place.folder, self._place.number
            if folder is None:
                raise UserError("rollback: the learner was not saved, so there is nothing to go back to; save it")
            if self.version is None:
                self._become(folder, None if self._place.is_current() else version)
                return
            with locked(folder):
                present = number_of(folder / FILE)
                if version is not None and present != version and not is_damaged(folder):
                    raise UserError(
                        f"{folder}: its present version is {present}, but this learner is version {version}; reload "
                        "it, or load the version that you want"
                    )
                number = one_before(folder)
                try:
                    other = self._other(folder, number)
                except UserError as error:
                    raise UserError(f"rollback: version {number} cannot be loaded: {error}") from None
                make_present(folder, number)
                self._take(other, signature(folder))

    def reload(self) -> bool:
        """Load the present version of the folder that the learner was saved in or loaded from, if it is another one.

        It is quick if there is no other version. Meanwhile, other threads get predictions of the old or of the new one.
        Tasks that were learned but not saved are lost. If another thread is training the learner, loading waits for it.

        Returns:
            Whether there was another version.

        Raises:
            UserError: if the learner was neither saved nor loaded, or the other version cannot be loaded; or in a
                callback of :meth:`learn`.
        """
        if self._place.is_current():
            return False
        with self._alone():
            if self._place.is_current():  # after what it waited for
                return False
            assert self._place.folder is not None
            self._become(self._place.folder)
            return True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A context in which no other thread changes the learner; :class:`UserError` in a callback of :meth:`learn`."""
        with self._changing:
            if self._learning:
                raise UserError("the learner is learning; call this when learn has returned, not in on_progress")
            yield

    @contextlib.contextmanager
    def _learns(self) -> Iterator[None]:
        self._learning = True
        devices.release_memory()  # what a failed attempt has left
        try:
            yield
        finally:
            self._learning = False
            devices.release_memory()
            free_memory()

    def _become(self, folder: Path, version: int | None = None) -> None:
        """Become the learner saved in ``folder``; ``version`` as for :meth:`load`."""
        other = self._other(folder, version)
        self._take(other, other._place.signature)

    def _other(self, folder: Path, version: int | None) -> Learner:
        """The learner saved in ``folder``, with what was given for this one."""
        place = self._place
        return Learner.load(
            folder,
            out=self.out,
            quiet=self.quiet,
            version=version,
            held_out=place.held_out,
            on_progress=self.on_progress,
            **place.keys,
        )

    def _take(self, other: Learner, at: tuple[int, int, int] | None) -> None:
        """Become ``other``, whose file has the signature ``at``."""
        self.held_out = other.held_out
        self.notes = other.notes
        self.config = other.config
        self._saved = other._saved
        self._place = other._place._replace(signature=at)
        self._answers = other._answers  # last, at once

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        out: str | Path | None = None,
        quiet: bool = False,
        version: int | None = None,
        held_out: int | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        **keys: object,
    ) -> Learner:
        """Load a learner that :meth:`save` wrote to ``folder``, or :meth:`learn` to a folder in ``out``.

        Nothing in the folder is executed.

        Args:
            folder: the folder.
            out: folder for learned tasks and checkpoints, as for the constructor; it is not saved.
            quiet: print no progress bar and no lines.
            version: the number of an earlier version; None: the present one.
            held_out: the number of images of each class to hold out from further tasks; None: as saved.
            on_progress: called several times a second while the learner learns.
            keys: override the saved ones: ``device="cuda"``, ``epochs=2``. The first task fixes some for good: the
                backbone (``convnet_type``, ``convnet_options``), ``consolidate``, the images' size and augmentation
                (``image_size``, ``padding``, ...) and ``init_epoch``, ``init_lr``, ....

        Raises:
            UserError: if there is no complete learner, or not this version of it, or a key is invalid or other than
                what the first task has fixed.
        """
        folder = folder_of("folder", folder)
        given = of_learner(keys)
        at = signature(folder)  # before the file is read
        loaded, number = learner_file.read(folder, None if version is None else whole_number("version", version))
        if version is not None and number != number_of(folder / FILE):
            at = None
        try:
            saved = configured(loaded.config, tasks=())
        except UserError as error:
            raise UserError(f"{folder}: was saved by another version of pycil_wsc ({error}); use that one") from None
        refuse_changes(saved, given)
        place = Place(folder, at, keys, held_out, number)
        held_out = loaded.bookkeeping.per_class if held_out is None else held_out
        learner = cls(saved.model_name, out=out, quiet=quiet, held_out=held_out, on_progress=on_progress)
        learner.config = configured(saved_values(saved, given) | given, tasks=())
        with refusing(folder, *learner_file.COMPLETE):  # its checksums match, but another version may have written it
            learner._set_state(loaded)
        learner.notes = json.loads(loaded.bookkeeping.notes)
        learner._place = place
        learner._answers = learner.answers.with_version(number)
        return learner


def _refuse_misspelt(keys: Mapping[str, object]) -> None:
    """Raise a :class:`UserError` for a key that is nearly one of the learner's own arguments."""
    for name in keys:
        near = difflib.get_close_matches(name, ("out", "quiet", "held_out", "on_progress"), n=1, cutoff=0.85)
        if near and name not in KEYS:
            raise UserError(f"unknown key '{name}'; did you mean '{near[0]}'?")


def _in_json(notes: object) -> str:
    """The notes of a learner as text."""
    try:
        if isinstance(notes, dict):
            return json.dumps(notes)
        problem = f"is a {type(notes).__name__}"
    except (TypeError, ValueError, RecursionError) as error:
        problem = str(error)
    raise UserError(f"notes: not a dictionary of JSON values ({problem}); give lists, numbers and strings")
