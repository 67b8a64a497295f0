"""What type checkers know of the package's public names, which it imports on first use: pyright checks this file."""

from collections.abc import Iterator

import numpy as np
from typing_extensions import assert_type

import pycil_wsc
from pycil_wsc.classifier.predict.answers import Answer, Answers


def a_learner_is_no_any(learner: pycil_wsc.Learner) -> None:
    assert_type(learner.classes, list[str])
    assert_type(learner.check("folder:photos").fine, bool)
    assert_type(learner.each("photos"), Iterator[Answer])
    assert_type(learner.evaluate("folder:photos")["accuracy"], float)
    assert_type(pycil_wsc.Learner("wsc").predict(["photo.jpg"]), np.ndarray)
    assert_type(pycil_wsc.Learner.load("shelf").answers, Answers)


def neither_are_the_others() -> None:
    assert_type(pycil_wsc.Accept(max_drop=0.1).max_drop, float)
    assert_type(pycil_wsc.load_exported("exported"), Answers)
    assert_type(pycil_wsc.load("run").predict([]), np.ndarray)
    assert_type(pycil_wsc.UserError("one line").args, tuple)
    assert_type(pycil_wsc.TrainingDiverged("one line").args, tuple)
    assert_type(pycil_wsc.__version__, str)
