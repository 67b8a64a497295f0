"""The images of one task, as :meth:`pycil_wsc.Learner.learn` is given them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pycil_wsc.config.image_config import Config
from pycil_wsc.data.images.image_files import line_of
from pycil_wsc.data.images.paths import renamed
from pycil_wsc.data.images.sources import Source, read_source
from pycil_wsc.data.types import Dataset, Split
from pycil_wsc.files import absolute
from pycil_wsc.runs.class_incremental import as_configured

CLASSES_NAMED = 10  # at most, in a line


def part_of(source: Source, config: Config, say: Callable[[str], None]) -> Dataset:
    """The training images of ``source``; ``say`` gets a line about what is not learned."""
    part = as_configured(read_source(source, config.data_root), config)
    line = line_of(part.left_out)
    if line:
        say(line)
    empty = np.setdiff1d(np.arange(len(part.info.classes)), part.train.targets)
    if len(empty):
        names = ", ".join(f"'{part.info.classes[label]}'" for label in empty[:CLASSES_NAMED])
        more = f" and {len(empty) - CLASSES_NAMED} others" if len(empty) > CLASSES_NAMED else ""
        say(f"not learned, as there is no image: {names}{more}")
    no_test = Split(part.test.images[:0], part.test.targets[:0])
    return replace(part, train=_absolute(part.train), test=no_test, left_out={})  # the last has been said


def _absolute(split: Split) -> Split:
    """Image files by their absolute paths, which hold in whichever folder the process will be."""
    if split.in_memory:
        return split
    return Split(renamed(split.images, lambda path: os.path.normpath(absolute(path))), split.targets)
