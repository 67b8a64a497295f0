"""The optimiser steps of a run, over all tasks and epochs, in order."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pycil_wsc import seeding
from pycil_wsc.llm.config import LLMConfig
from pycil_wsc.llm.corpus import Corpus, Epoch
from pycil_wsc.llm.tokens import Example


@dataclass(frozen=True)
class Step:
    """An optimiser step on the items ``chosen`` of an epoch of task ``task``: ``number`` of ``total`` in the epoch."""

    task: int
    epoch: Epoch
    number: int
    total: int
    chosen: Sequence[int]
    ends_task: bool = False

    @property
    def examples(self) -> list[Example]:
        return [self.epoch.examples[i] for i in self.chosen]

    @property
    def ends_epoch(self) -> bool:
        return self.number == self.total


def steps_of(config: LLMConfig, corpus: Corpus) -> list[Step]:
    """All optimiser steps of a run."""
    steps: list[Step] = []
    for task in range(len(corpus.tasks)):
        epochs = corpus.epochs(config, task)
        for index, epoch in enumerate(epochs):
            batches = shuffled(len(epoch.examples), config.batch_size, config.seed, task, index)
            for number, chosen in enumerate(batches, 1):
                last = index + 1 == len(epochs) and number == len(batches)
                steps.append(Step(task, epoch, number, len(batches), chosen, ends_task=last))
    return steps


def shuffled(count: int, batch_size: int, seed: int, *address: str | int) -> list[list[int]]:
    """The items of each optimiser step of an epoch: lists of at most ``batch_size``, in random order.

    Together they are ``range(count)``. The order depends on ``seed`` and ``address``.
    """
    order = torch.randperm(count, generator=seeding.generator(seed, "order", *address)).tolist()
    return [order[start : start + batch_size] for start in range(0, count, batch_size)]
