"""What a learner is asked: names, probabilities, logits, the network itself, and how accurate it is."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import torch

from pycil_wsc.classifier.answers import UNKNOWN, Answer, Answers, Tested, numbers_of
from pycil_wsc.classifier.model import Model, Transform
from pycil_wsc.classifier.streams import Images
from pycil_wsc.config.options import Config
from pycil_wsc.data.images.files import line_of
from pycil_wsc.data.images.sources import Source, read_source
from pycil_wsc.errors import UserError


class Evaluation(Tested):
    """What :meth:`Answering.evaluate` returns."""

    unknown: int


class Answering:
    """Predicts with a snapshot, :attr:`answers`, which the subclass replaces as a whole when it learns or loads.

    Each method reads the snapshot once, so its result belongs to a single state. Any number of threads may call these
    methods, also during an update.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._answers: Answers | None = None  # None before the first task

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

    def predict(self, images: Images, threshold: float | None = None, otherwise: str = UNKNOWN) -> np.ndarray:
        """The most likely class of each image: names, numpy (B,).

        Args:
            images: a list or generator of file names, PIL images or uint8 arrays (H, W, 3) of any size; a folder; or
                uint8 (B, side, side, 3), or (B, side, side) if greyscale, of the training images' side. They are read
                batch by batch.
            threshold: predict ``otherwise`` if the probability of the most likely class, 0 to 1, is lower; None: never.
            otherwise: the name to predict then; must not be the name of a class.

        Raises:
            UserError: if nothing has been learned yet, an argument is invalid, or an image cannot be read; names the
                image. :meth:`each` goes on with the next one.
        """
        return self.answers.predict(images, threshold, otherwise)

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

    def each(self, images: Images, threshold: float | None = None, otherwise: str = UNKNOWN) -> Iterator[Answer]:
        """The answers one by one, in constant memory; a file that cannot be read has a ``problem`` and no name.

        The arguments are those of :meth:`predict`.

        Raises:
            UserError: if nothing has been learned yet, or an argument is invalid; if that is ``images``, when the first
                answer is asked for.
        """
        return self.answers.each(images, threshold, otherwise)

    def evaluate(self, source: Source) -> Evaluation:
        """Test on ``source``, in any form that :meth:`learn` accepts; if it has a test part, only that is used.

        Returns:
            ``accuracy``: top-1 accuracy in percent over the ``images`` whose class is known; ``classes``: the accuracy
            on each class by name; ``unknown``: the number of images left out because their class was never learned;
            ``ece``: the expected calibration error in percent, ``before`` and ``after`` the logits are divided by the
            ``temperature``.

        Raises:
            UserError: if nothing has been learned yet, the images are invalid, one of them cannot be read, or none is
                of a learned class.
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
        return {**answers.tested(split.images[known], labels[known]), "unknown": int((~known).sum())}
