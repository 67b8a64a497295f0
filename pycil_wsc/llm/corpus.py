"""The tokenised tasks of a run, and the examples of each epoch."""

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pycil_wsc.data.datasets import path_of
from pycil_wsc.errors import UserError
from pycil_wsc.llm.config import LLMConfig
from pycil_wsc.llm.data import Item, TaskData, load_pool, load_task, replay_items, warnings_of
from pycil_wsc.llm.metrics import VERSIONS, score, trivial_scores
from pycil_wsc.llm.tokens import Example, encode, encode_prompts, frame, load_tokenizer


@dataclass(frozen=True)
class CorpusOptions:
    """The keys of the configuration that decide a :class:`Corpus`."""

    data_root: str
    data: str
    tasks: tuple[str, ...]
    pool: str | None
    test_on: str
    train_items: int | None
    test_items: int | None
    pool_items: int | None
    model: str
    vocab_size: int
    chat_template: bool | None
    max_prompt: int
    max_answer: int

    @classmethod
    def of(cls, config: LLMConfig) -> "CorpusOptions":
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class Epoch:
    """A pass over ``examples``, displayed as ``name``, ``number`` of ``total``. ``replay``: they are replayed items."""

    name: str
    number: int
    total: int
    replay: bool
    examples: list[Example]


class Corpus:
    """The tasks and the pool, loaded and tokenised."""

    def __init__(self, options: CorpusOptions) -> None:
        self.options = options
        root = path_of("data_root", options.data_root) / options.data
        self.tasks = [self._cut(load_task(root, name)) for name in options.tasks]
        _try_metrics(self.tasks)
        self.pool = self._pool(root)
        self.tokenizer = load_tokenizer(options, self._texts())
        self.frame = frame(self.tokenizer, options)
        self.encoded = self._encode([*self.pool, *(item for task in self.tasks for item in task.train)])
        self.test_prompts = [
            encode_prompts(self.tokenizer, [item.prompt for item in task.test], options.max_prompt, self.frame)
            for task in self.tasks
        ]
        self.warnings = warnings_of(self.tasks)

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """The number of items and a hash of them and of how each task is trained and scored, as of image data."""
        digest = hashlib.sha256(repr([(task.name, task.info, task.train, task.test) for task in self.tasks]).encode())
        digest.update(repr(self.pool).encode())
        train, test = (sum(len(getattr(task, part)) for task in self.tasks) for part in ("train", "test"))
        return {"train": train, "test": test, "sha256": digest.hexdigest()[:16]}

    @functools.cached_property
    def trivial(self) -> dict[str, dict[str, dict[str, float]]]:
        """{version: {task: {name: score}}} of trivial answers, which need no learning."""
        return {version: {task.name: trivial_scores(task, version) for task in self.tasks} for version in VERSIONS}

    def epochs(self, config: LLMConfig, index: int) -> list[Epoch]:
        """The epochs of task ``index``, in order: its own, then those of replay if there is anything to replay."""
        return [
            Epoch("replay" if replay else "epoch", number, count, replay, examples)
            for replay, count, examples in self._phases(config, index)
            for number in range(count)
        ]

    def planned_tokens(self, config: LLMConfig) -> int:
        """The number of tokens that a whole run trains on."""
        return sum(
            count * sum(map(len, examples))
            for index in range(len(self.tasks))
            for _, count, examples in self._phases(config, index)
        )

    def _phases(self, config: LLMConfig, index: int) -> Iterator[tuple[bool, int, list[Example]]]:
        """Whether it is replay, the number of epochs, and the examples of each."""
        if config.method == "zero_shot":
            return
        own = config.epochs[index] if config.epochs else self.tasks[index].info.epochs
        yield False, own, self._examples(self.tasks[index].train)
        if config.replays and (
            items := replay_items(self.tasks[:index], config.replay_ratio, config.replay_choice, config.seed, self.pool)
        ):
            yield True, config.replay_epochs, self._examples(items)

    def _cut(self, task: TaskData) -> TaskData:
        test = task.test if self.options.test_on == "test" else task.eval
        if not test:
            raise UserError(f"llm.test_on: task '{task.name}' has no eval.json; add one, or use 'test'")
        evaluation = task.eval if self.options.test_on == "test" else ()  # compared with the test items in warnings
        return replace(
            task, train=task.train[: self.options.train_items], eval=evaluation, test=test[: self.options.test_items]
        )

    def _pool(self, root: Path) -> tuple[Item, ...]:
        if self.options.pool is None:
            return ()
        try:
            return load_pool(root, self.options.pool)[: self.options.pool_items]
        except UserError as error:
            raise UserError(f"{error}; or set llm.pool to null if there are no general items") from None

    def _texts(self) -> list[str]:
        """The texts that a tokeniser is trained on."""
        return [text for task in self.tasks for item in task.train for text in (item.prompt, item.answer)]

    def _encode(self, items: Iterable[Item]) -> dict[Item, Example]:
        unique = list(dict.fromkeys(items))
        pairs = [(item.prompt, item.answer) for item in unique]
        return dict(
            zip(unique, encode(self.tokenizer, pairs, self.options.max_prompt, self.options.max_answer, self.frame))
        )

    def _examples(self, items: Iterable[Item]) -> list[Example]:
        return [self.encoded[item] for item in items]


def _try_metrics(tasks: Sequence[TaskData]) -> None:
    """Score an answer of each task, so that a missing package is noticed before hours of training."""
    for task in tasks:
        for version in VERSIONS:
            score(task.info.metric, [task.test[0].answer], [task.test[0].answer], [task.test[0].prompt], version)
