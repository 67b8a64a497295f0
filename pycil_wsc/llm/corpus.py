"""The tokenised tasks of a run, and its optimiser steps."""

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from pycil_wsc import seeding
from pycil_wsc.data.images.datasets import path_of
from pycil_wsc.errors import UserError
from pycil_wsc.llm.config import LLMConfig
from pycil_wsc.llm.data import Item, TaskData, load_pool, load_task, warnings_of
from pycil_wsc.llm.metrics import VERSIONS, trivial_scores
from pycil_wsc.llm.tokens import Example, encode, encode_prompts, frame, load_tokenizer


@dataclass(frozen=True)
class Epoch:
    """A pass over ``examples``, ``number`` of ``total``. ``replay``: they are replayed items."""

    number: int
    total: int
    replay: bool
    examples: list[Example]


@dataclass(frozen=True)
class Step:
    """An optimiser step on some items of an ``epoch`` of task ``task``: ``number`` of ``total`` in the epoch."""

    task: int
    epoch: Epoch
    number: int
    total: int
    examples: list[Example]
    ends_task: bool = False

    @property
    def ends_epoch(self) -> bool:
        return self.number == self.total


class Corpus:
    """The tasks and the pool, loaded and tokenised."""

    def __init__(self, config: LLMConfig) -> None:
        self.config = config
        root = path_of("data_root", config.data_root) / config.data
        self.tasks = [self._cut(load_task(root, name)) for name in config.tasks]
        self.pool = self._pool(root)
        items = [item for task in self.tasks for item in task.train]
        self.tokenizer = load_tokenizer(config, (text for item in items for text in (item.question, item.answer)))
        self.pad = cast(int, self.tokenizer.pad_token_id)
        self.frame = frame(self.tokenizer, config)
        self.encoded = self._encode([*self.pool, *items])
        self.test_prompts = [
            encode_prompts(self.tokenizer, [item.prompt for item in task.test], config.max_prompt, self.frame)
            for task in self.tasks
        ]
        self.warnings = [f"{task.name}: {warning}" for task in self.tasks for warning in warnings_of(task)]

    @functools.cached_property
    def fingerprint(self) -> dict[str, int | str]:
        """The number of items and a hash of them and of how each task is trained and scored, as of image data."""
        digest = hashlib.sha256(repr([(task.name, task.info, task.train, task.test) for task in self.tasks]).encode())
        digest.update(repr(self.pool).encode())
        train, test = (sum(len(getattr(task, part)) for task in self.tasks) for part in ("train", "test"))
        return {"train": train, "test": test, "sha256": digest.hexdigest()[:16]}

    @functools.cached_property
    def trivial(self) -> dict[str, dict[str, dict[str, float]]]:
        """{version: {task: {name: score}}} of trivial answers, which need no learning."""
        scores: dict[str, dict[str, dict[str, float]]] = {version: {} for version in VERSIONS}
        for task in self.tasks:
            answers = [item.answer for item in task.test]
            prompts = [item.question for item in task.test]
            for version in VERSIONS:
                scores[version][task.name] = trivial_scores(task.info.metric, answers, prompts, version)
        return scores

    def epochs(self, config: LLMConfig, index: int) -> list[Epoch]:
        """The epochs of task ``index``, in order: its own, then those of replay if there is anything to replay."""
        if config.method == "zero_shot":
            return []
        count = config.epochs[index] if config.epochs else self.tasks[index].info.epochs
        examples = [self.encoded[item] for item in self.tasks[index].train]
        epochs = [Epoch(number, count, False, examples) for number in range(count)]
        if config.method != "finetune":
            items = list(self.pool)
            for task in self.tasks[:index]:
                items += task.train[: int(len(task.train) * config.replay_ratio)]  # the first ones, as in TRACE
            replayed = [self.encoded[item] for item in items]
            count = config.replay_epochs if replayed else 0
            epochs += [Epoch(number, count, True, replayed) for number in range(count)]
        return epochs

    def steps(self, config: LLMConfig) -> list[Step]:
        """All optimiser steps of a run, over all tasks and epochs, in order."""
        steps: list[Step] = []
        for task in range(len(self.tasks)):
            epochs = self.epochs(config, task)
            for index, epoch in enumerate(epochs):
                batches = shuffled(len(epoch.examples), config.batch_size, config.seed, task, index)
                for number, chosen in enumerate(batches, 1):
                    last = index + 1 == len(epochs) and number == len(batches)
                    examples = [epoch.examples[i] for i in chosen]
                    steps.append(Step(task, epoch, number, len(batches), examples, last))
        return steps

    def _cut(self, task: TaskData) -> TaskData:
        test = task.test if self.config.test_on == "test" else task.eval
        if not test:
            raise UserError(f"llm.test_on: task '{task.name}' has no eval.json; add one, or use 'test'")
        evaluation = task.eval if self.config.test_on == "test" else ()  # compared with the test items in warnings
        return replace(
            task, train=task.train[: self.config.train_items], eval=evaluation, test=test[: self.config.test_items]
        )

    def _pool(self, root: Path) -> tuple[Item, ...]:
        if self.config.pool is None:
            return ()
        try:
            return load_pool(root, self.config.pool)[: self.config.pool_items]
        except UserError as error:
            raise UserError(f"{error}; or set llm.pool to null if there are no general items") from None

    def _encode(self, items: Iterable[Item]) -> dict[Item, Example]:
        unique = list(dict.fromkeys(items))
        config = self.config
        pairs = [(item.prompt, item.answer) for item in unique]
        examples = encode(self.tokenizer, pairs, config.max_prompt, config.max_answer, self.frame)
        return dict(zip(unique, examples, strict=True))


def shuffled(count: int, batch_size: int, seed: int, *address: str | int) -> list[list[int]]:
    """The items of each optimiser step of an epoch: lists of at most ``batch_size``, in random order.

    Together they are ``range(count)``. The order depends on ``seed`` and ``address``.
    """
    order = torch.randperm(count, generator=seeding.generator(seed, "order", *address)).tolist()
    return [order[start : start + batch_size] for start in range(0, count, batch_size)]
