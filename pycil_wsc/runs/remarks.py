"""What a run says of its settings before it begins."""

import json

import numpy as np

from pycil_wsc.config.options import KEYS, Config
from pycil_wsc.data.options import ALL
from pycil_wsc.learners.consolidating import configured_learner


def remarks(config: Config, targets: np.ndarray) -> list[str]:
    """Settings of the memory without effect, a line each. ``targets``: the classes of the training images."""
    lines = []
    learner = configured_learner(config)
    if not learner.uses_memory or config.memory_bytes is not None:
        return lines
    unused, used = config.memory_keys
    default = KEYS[unused].default
    if getattr(config, unused) != default and unused not in learner.also_reads(config):
        because, value = json.dumps(config.fixed_memory), getattr(config, used)
        lines.append(f"{unused}: has no effect with fixed_memory {because}; {used} counts, which is {value}")
    largest = int(np.bincount(targets, minlength=1).max())
    if config.fixed_memory and largest < config.memory_per_class < ALL:
        lines.append(
            f"memory_per_class: {config.memory_per_class} is more than any class has images (at most {largest}); "
            "all images are kept"
        )
    return lines
