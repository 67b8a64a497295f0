"""One run of a language model: tasks -> training -> answers -> scores -> checkpoint -> result.json."""

import contextlib
import json
import logging
import math
import shutil
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pycil_wsc.allocator import keep_freed_memory
from pycil_wsc.consolidation import NonFiniteGradients
from pycil_wsc.data.fingerprint import changed
from pycil_wsc.devices import device_name, peak_memory, reset_peak_memory, resolved_device
from pycil_wsc.engine.processes import Processes, rank_and_count
from pycil_wsc.errors import TrainingDiverged, UnusableRun
from pycil_wsc.files import write_atomically, write_json
from pycil_wsc.llm.checkpoint import open_state, save_state, verify_state
from pycil_wsc.llm.config import CHECKPOINT, LLMConfig
from pycil_wsc.llm.corpus import Corpus
from pycil_wsc.llm.export import save_model
from pycil_wsc.llm.generation import answers
from pycil_wsc.llm.metrics import VERSIONS, score, summary
from pycil_wsc.llm.model import positions
from pycil_wsc.llm.result import result_of
from pycil_wsc.llm.tokens import shuffled
from pycil_wsc.llm.training import Training
from pycil_wsc.results import write_result
from pycil_wsc.runs.progress import INTERVAL, Progress, open_log, print_task

Position = dict[str, Any]
PARTS = {"position", "training", "history", "clock", "peak_memory", "identity"}  # of a checkpoint
START: Position = {"task": 0, "stage": "train", "epoch": 0, "step": 0, "loss": 0.0}


class Run:
    """One run of a sweep, in its own folder: resumes if it was stopped, and ends with ``result.json``.

    ``on_progress`` is called with every :class:`pycil_wsc.runs.progress.Progress`.
    """

    def __init__(self, config: LLMConfig, corpus: Corpus, on_progress: Callable[[Progress], None] = print_task) -> None:
        self.config, self.corpus, self.on_progress, self.folder = config, corpus, on_progress, config.run_folder
        self.epochs = [corpus.epochs(config, index) for index in range(len(corpus.tasks))]
        self.history: list[dict[str, Any]] = []  # the rows of metrics.jsonl, one per task
        self.clock = {"train_seconds": 0.0, "total_seconds": 0.0}
        self.peak_memory, self.shown = 0, 0.0

    def execute(self) -> dict[str, Any]:
        """Train and test every task; returns the contents of ``result.json``."""
        rank, _ = rank_and_count()
        self.log = logging.getLogger("pycil_wsc.following") if rank else open_log(self.folder)
        self._set_up()
        position = self._resume()
        self.before = self.clock | self.training.counts  # at the start of this command
        self.mark = self.saved = time.perf_counter()
        for index in range(position["task"], len(self.corpus.tasks)):
            if position["stage"] == "train":
                try:
                    self._learn(index, position)
                except NonFiniteGradients as error:
                    raise TrainingDiverged(f"task {index + 1}: {error}") from None
            self._test(index, known=position["stage"] == "test")
            position = START
        result = result_of(self.config, self.corpus, self.training, self.history, self.clock, self.peak_memory)
        if self.processes.first:
            write_result(self.folder, result)
            (self.folder / CHECKPOINT).unlink(missing_ok=True)
        return result.contents()

    def _set_up(self) -> None:
        """Processes, device and model."""
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        self.processes = Processes(self.config.timeout_minutes)
        self.device = self.processes.device(resolved_device(self.config.device))
        if not self.processes.agree(self.corpus.fingerprint):
            raise UnusableRun(f"{self.folder}: not all processes have the same data; give all machines the same files")
        keep_freed_memory(self.device)
        reset_peak_memory(self.device)
        self.training = Training(self.config, self.corpus.tokenizer, self.processes, self.device)
        self._check_lengths()
        if self.processes.first:
            self._begin()

    def _check_lengths(self) -> None:
        """Raise :class:`UnusableRun` if the model has too few positions for a training item or an answer."""
        if not (limit := positions(self.training.model)):
            return
        items = (len(example) for epochs in self.epochs for epoch in epochs for example in epoch.examples)
        if (longest := max(items, default=0)) > limit:
            raise UnusableRun(
                f"llm.max_prompt: a training item has {longest} tokens, the model {limit} positions; "
                "reduce llm.max_prompt and llm.max_answer"
            )
        prompt, more = max(map(len, chain(*self.corpus.test_prompts))), self.config.max_new_tokens
        if prompt + more - 1 > limit:  # the last token is not read
            raise UnusableRun(
                f"llm.max_new_tokens: a test prompt of {prompt} tokens and {more} new ones do not fit into the model's "
                f"{limit} positions; reduce llm.max_prompt or llm.max_new_tokens"
            )

    def _begin(self) -> None:
        write_json(self.folder / "config.json", self.config.to_dict())
        for line in self.corpus.warnings:
            self.log.warning("%s", line)
        self.log.info(
            "%s on %s, %s, %d process(es)",
            self.folder,
            device_name(self.device),
            self.training.precision,
            self.processes.count,
        )

    # ---- training ---------------------------------------------------------------------------------------------------

    def _learn(self, index: int, position: Position) -> None:
        """Train on task ``index`` from ``position`` on."""
        epochs, training = self.epochs[index], self.training
        if position["epoch"] == position["step"] == 0:
            training.begin_task(index, epochs)
        for number in range(position["epoch"], len(epochs)):
            training.begin_epoch(epochs[number])
            reached = (position["step"], position["loss"]) if number == position["epoch"] else (0, 0.0)
            self._epoch(index, number, *reached)
        self._check_weights(index)
        if epochs:
            self._tick()  # the check does not count as training
            training.end_task()
            self._tick("train_seconds")
        if self.processes.first:  # answers of an earlier run in this folder
            shutil.rmtree(self._after(index), ignore_errors=True)
        self._checkpoint(START | {"task": index, "stage": "test"})

    def _check_weights(self, index: int) -> None:
        """Raise :class:`TrainingDiverged` unless all weights are finite.

        The losses do not tell: that of the last step is computed before its update.
        """
        finite = torch.stack([p.isfinite().all() for p in self.training.parameters.values()]).all()
        if not self.processes.all(finite):
            raise TrainingDiverged(
                f"the weights are no longer finite numbers after task {index + 1}; try a lower learning rate"
            )

    def _epoch(self, index: int, number: int, first: int, loss: float) -> None:
        """The steps of an epoch from ``first`` on; ``loss`` is the sum over the steps before."""
        epoch = self.epochs[index][number]
        batches = shuffled(len(epoch.examples), self.config.batch_size, self.config.seed, index, number)
        losses = torch.zeros((), device=self.device)
        for step in range(first, len(batches)):
            losses += self.training.step([epoch.examples[i] for i in batches[step]])
            self._tick("train_seconds")
            self._show(index, f"{epoch.name} {epoch.number + 1}/{epoch.total}, step {step + 1}/{len(batches)}")
            if self._due() and (number, step) != (len(self.epochs[index]) - 1, len(batches) - 1):
                loss, losses = loss + self._summed(losses), torch.zeros((), device=self.device)
                self._tick("train_seconds")  # the device has finished these steps
                ended = step + 1 == len(batches)
                done = {"epoch": number + 1} if ended else {"epoch": number, "step": step + 1, "loss": loss}
                self._checkpoint(START | {"task": index} | done)
        mean = (loss + self._summed(losses)) / len(batches)
        self._tick("train_seconds")  # the device has finished all steps by now
        place, speed = f"task {index + 1}, {epoch.name} {epoch.number + 1}/{epoch.total}", self._speed()
        self.log.info("%s: loss %.4f, %s tokens/s", place, mean, f"{speed:,.0f}")
        if not math.isfinite(mean):
            raise TrainingDiverged(f"the loss became {mean} in {place}; try a lower learning rate")

    def _summed(self, losses: Tensor) -> float:
        """The sum of the losses over all processes."""
        return self.processes.sum_(losses.clone()).item()

    # ---- testing ----------------------------------------------------------------------------------------------------

    def _test(self, index: int, known: bool) -> None:
        """Test on every task so far.

        ``known``: answers that an interrupted test has written are of these weights, and are used again.
        """
        scores: dict[str, list[float]] = {version: [] for version in VERSIONS}
        with self.training.tested():
            for number in range(index + 1):
                task, texts = self.corpus.tasks[number], self._answers(index, number, known)
                wanted, prompts = [item.answer for item in task.test], [item.prompt for item in task.test]
                for version in VERSIONS:
                    scores[version].append(score(task.info.metric, texts, wanted, prompts, version))
            self._save_weights(index)
        self._tick()
        self.peak_memory = max(self.peak_memory, peak_memory(self.device))
        name = self.corpus.tasks[index].name
        self.history.append({"task": index, "name": name, **scores, **self.training.counts, **self.clock})
        if self.processes.first:
            write_atomically(self.folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in self.history))
        self._checkpoint(START | {"task": index + 1})
        now = summary([row["trace"] for row in self.history])
        line = f"{name} {100 * scores['trace'][-1]:.2f}, average of {index + 1} {100 * now['last_average']:.2f}"
        if index:
            line += f", backward transfer {100 * now['bwt'][-1]:+.2f}"
        self.log.info("task %d: %s", index + 1, line)
        self._show(index, "tested", line)

    def _answers(self, index: int, number: int, known: bool) -> list[str]:
        """The answers to the test items of task ``number`` after task ``index``; also written to ``predictions``."""
        task, path = self.corpus.tasks[number], self._predictions(index, number)
        if self.config.method == "zero_shot" and number < index:  # the same model
            known, path = True, self._predictions(index - 1, number)
        texts: Any = None
        if self.processes.first and known and path.exists():
            texts = [json.loads(line)["prediction"] for line in path.read_text("utf-8").split("\n")[:-1]]
        texts = self.processes.broadcast(texts)
        if texts is None:
            texts = self._generate(index, number)
        if self.processes.first:
            rows = ({"prediction": text, "answer": item.answer} for text, item in zip(texts, task.test, strict=True))
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            write_atomically(self._predictions(index, number), lines)
        return texts

    def _after(self, index: int) -> Path:
        return self.folder / "predictions" / f"after-{index + 1}"

    def _predictions(self, index: int, number: int) -> Path:
        return self._after(index) / f"{self.corpus.tasks[number].name}.jsonl"

    def _generate(self, index: int, number: int) -> list[str]:
        task, prompts, count = self.corpus.tasks[number], self.corpus.test_prompts[number], self.processes.count
        prompts = [*prompts, *prompts[:1] * (-len(prompts) % count)]  # the same number for each process

        def answered(done: int) -> None:
            total = len(task.test)
            self._show(index, f"answers to {task.name}, {min(done * count, total)}/{total}")

        share = answers(
            self.training.model,
            self.corpus.tokenizer,
            self.processes.share(prompts),
            self.config,
            self.device,
            self.training.placing.autocast,
            (index, number),
            self.corpus.frame.end,
            answered,
            self.training.sharded,
        )
        return self.processes.gather(share, len(prompts))[: len(task.test)]

    def _save_weights(self, index: int) -> None:
        """Save the model as a folder for transformers if ``save_weights`` asks for it."""
        if self.config.save_weights == "every" or self.config.save_weights and index + 1 == len(self.corpus.tasks):
            state, training = self.training.placing.state_dict(), self.training
            if self.processes.first:
                folder = self.folder / "models" / f"after-{index + 1}"
                # a merge changes the layers below the adapters
                save_model(folder, training.model, self.corpus.tokenizer, state, self.config, not training.merge)

    # ---- saving and resuming ----------------------------------------------------------------------------------------

    def _checkpoint(self, position: Position) -> None:
        self._tick()
        self.peak_memory = max(self.peak_memory, peak_memory(self.device))
        state = {
            "position": position,
            "training": self.training.state_dict(),
            "history": self.history,
            "clock": self.clock,
        }
        if self.processes.first:
            state |= {"peak_memory": self.peak_memory, "identity": self.config.identity()}
            state["data"] = self.corpus.fingerprint
            save_state(self.folder / CHECKPOINT, state)
        self._tick()  # saving does not count as training
        self.saved = time.perf_counter()

    def _resume(self) -> Position:
        """The position to resume from."""
        path = self.folder / CHECKPOINT
        self.processes.from_first(lambda: verify_state(path) if path.exists() else None)
        with contextlib.ExitStack() as opened:  # each process reads its part
            try:
                state = opened.enter_context(open_state(path)) if path.exists() else None
                if state and not PARTS <= state.keys():
                    raise UnusableRun(f"{path}: is not a checkpoint of this version; delete it to start this run again")
                found: Any = state["position"] if state else START
            except UnusableRun as error:
                state, found = None, str(error)
            if not self.processes.agree(found):  # before one of them raises, and the others wait for it
                raise UnusableRun(
                    f"{self.folder}: not all processes see the same checkpoint there; "
                    "give a folder that all machines share with --out"
                )
            if isinstance(found, str):
                raise UnusableRun(found)
            position: Position = found
            if not state:
                return position
            if not self.config.continues(state["identity"]):
                raise UnusableRun(f"{path}: was made with other settings; delete it to start this run again")
            if difference := changed(state.get("data"), self.corpus.fingerprint):
                raise UnusableRun(
                    f"{path}: was made with other data ({difference}); "
                    "restore them, or delete it to start this run again"
                )
            self.history, self.clock, self.peak_memory = state["history"], state["clock"], state["peak_memory"]
            if position["task"] < len(self.epochs):
                self.training.load_state_dict(state["training"], position["task"], self.epochs[position["task"]])
        self.log.info(
            "resuming at task %d, %s, epoch %d, step %d",
            position["task"] + 1,
            position["stage"],
            position["epoch"] + 1,
            position["step"] + 1,
        )
        return position

    def _due(self) -> bool:
        """Whether it is time for a checkpoint, in all processes."""
        return self.processes.broadcast(time.perf_counter() - self.saved >= 60 * self.config.checkpoint_minutes)

    def _tick(self, *names: str) -> None:
        """Add the time since the last tick to the total, and to the named clocks."""
        now = time.perf_counter()
        for name in {"total_seconds", *names}:
            self.clock[name] += now - self.mark
        self.mark = now

    # ---- progress ---------------------------------------------------------------------------------------------------

    def _speed(self) -> float:
        """Tokens per second of training, since this command started."""
        seconds = self.clock["train_seconds"] - self.before["train_seconds"]
        return (self.training.counts["tokens"] - self.before["tokens"]) / seconds if seconds else 0.0

    def _show(self, index: int, position: str, line: str = "") -> None:
        """Report the progress of task ``index``, at most once per ``INTERVAL``; a ``line`` is always reported."""
        if not line and time.monotonic() - self.shown < INTERVAL:
            return
        self.shown, task = time.monotonic(), f"task {index + 1}/{len(self.corpus.tasks)}"
        where, tokens = f"{task} {self.corpus.tasks[index].name} {position}", self.training.counts["tokens"]
        self.on_progress(Progress(where, tokens, self._speed(), line and f"{task}  {line}", unit="tokens"))
