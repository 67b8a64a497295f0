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
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pycil_wsc.allocator import keep_freed_memory
from pycil_wsc.consolidation import NonFiniteGradients
from pycil_wsc.data.fingerprint import changed
from pycil_wsc.devices import device_name, peak_memory, reset_peak_memory, resolved_device, synchronize
from pycil_wsc.engine.processes import Processes, rank_and_count
from pycil_wsc.errors import TrainingDiverged, UnusableRun
from pycil_wsc.files import write_atomically, write_json
from pycil_wsc.llm import checkpoint
from pycil_wsc.llm.config import CHECKPOINTS, LLMConfig
from pycil_wsc.llm.corpus import Corpus
from pycil_wsc.llm.export import save_model, whole_state
from pycil_wsc.llm.generation import answers
from pycil_wsc.llm.metrics import VERSIONS, score, summary
from pycil_wsc.llm.model import load_model, positions
from pycil_wsc.llm.result import result_of
from pycil_wsc.llm.schedule import steps_of
from pycil_wsc.llm.training import TaskTrainer, consolidation, precision_of, training_arguments
from pycil_wsc.plugins.huggingface import drop_gathered
from pycil_wsc.results import write_result
from pycil_wsc.runs.progress import INTERVAL, Progress, open_log, print_task

MERGE = "merge.safetensors"  # in the Trainer's checkpoint


class Run(TrainerCallback):
    """One run of a sweep, in its own folder: resumes if it was stopped, and ends with ``result.json``.

    It follows the Trainer as a callback: logs, saves when it is time to, and tests after each task. ``on_progress`` is
    called with every :class:`pycil_wsc.runs.progress.Progress`.
    """

    def __init__(self, config: LLMConfig, corpus: Corpus, on_progress: Callable[[Progress], None] = print_task) -> None:
        self.config, self.corpus, self.on_progress, self.folder = config, corpus, on_progress, config.run_folder
        self.steps = steps_of(config, corpus)
        self.history: list[dict[str, Any]] = []  # the rows of metrics.jsonl, one per task
        self.clock = {"train_seconds": 0.0, "total_seconds": 0.0}
        self.peak_memory, self.shown = 0, 0.0

    def execute(self) -> dict[str, Any]:
        """Train and test every task; returns the contents of ``result.json``."""
        rank, _ = rank_and_count()
        self.log = logging.getLogger("pycil_wsc.following") if rank else open_log(self.folder)
        self._set_up()
        found = self._resume()
        self.before = self.clock | self.trainer.counts  # at the start of this command
        self.mark = self.saved = time.perf_counter()
        if self.steps:
            try:
                self.trainer.train(resume_from_checkpoint=found and str(self.folder / CHECKPOINTS / found))
            except NonFiniteGradients as error:
                raise TrainingDiverged(f"task {self._task + 1}: {error}") from None
        else:  # zero_shot
            for index in range(len(self.corpus.tasks)):
                self._test(index, known=False)
        result = result_of(self.config, self.corpus, self.trainer, self.history, self.clock, self.peak_memory)
        if self.processes.first:
            write_result(self.folder, result)
            checkpoint.remove(self.folder)
        return result.contents()

    def _set_up(self) -> None:
        """Processes, device, model and Trainer."""
        config = self.config
        if config.threads:
            torch.set_num_threads(config.threads)
        self.processes = Processes(config.timeout_minutes)
        self.device = self.processes.device(resolved_device(config.device))
        if not self.processes.agree(self.corpus.fingerprint):
            raise UnusableRun(f"{self.folder}: not all processes have the same data; give all machines the same files")
        keep_freed_memory(self.device)
        reset_peak_memory(self.device)
        callbacks = consolidation(config, self.steps)
        # reading the weights may take longer than the timeout
        model = self.processes.in_all(lambda: load_model(config, self.corpus.tokenizer))
        layers = sorted(getattr(model, "_no_split_modules", None) or ())
        arguments = training_arguments(config, len(self.steps), self.device, self.processes, layers)
        pad = self.corpus.tokenizer.pad_token_id
        self.trainer = TaskTrainer(config, model, pad, self.steps, arguments, self.processes, [*callbacks, self])
        self._check_lengths()
        if self.processes.first:
            self._begin()

    def _check_lengths(self) -> None:
        """Raise :class:`UnusableRun` if the model has too few positions for a training item or an answer."""
        if not (limit := positions(self.trainer.model)):
            return
        items = (len(example) for step in self.steps for example in step.examples)
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
            precision_of(self.config, self.device),
            self.processes.count,
        )

    # ---- training: called by the Trainer ----------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        step, merging = state.global_step, self.trainer.merging  # it begins with the weights before the first task
        merge = self._saved(step) / MERGE
        if step and merge.exists():
            merging.load_state_dict(load_file(merge))
        if step and self.steps[step - 1].ends_task and len(self.history) == self.steps[step - 1].task:
            self._test(self.steps[step - 1].task, known=True)  # it was interrupted
        self.mark = self.saved = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        step = self.steps[state.global_step - 1]
        self._tick("train_seconds")
        self._show(step.task, f"{step.place}, step {step.number}/{step.total}")
        if step.ends_task:
            self._check_weights(step.task)
            self._tick()  # the check does not count as training
            self.trainer.merging.end_task()
        control.should_log = step.ends_epoch
        control.should_save = step.ends_task or self._due()
        if control.should_log or control.should_save:
            synchronize(self.device)
            self._tick("train_seconds")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **others: Any,
    ) -> None:
        if not logs or "loss" not in logs:  # the summary of the training
            return
        step = self.steps[state.global_step - 1]
        place, speed = f"task {step.task + 1}, {step.place}", self._speed()
        self.log.info("%s: loss %.4f, %s tokens/s", place, logs["loss"], f"{speed:,.0f}")
        if not math.isfinite(logs["loss"]):
            raise TrainingDiverged(f"the loss became {logs['loss']} in {place}; try a lower learning rate")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """The Trainer and the consolidation have saved their files."""
        folder = self._saved(state.global_step)
        self.peak_memory = max(self.peak_memory, peak_memory(self.device))
        merge = self.trainer.merging.state_dict(keep=self.processes.first)
        self._tick()  # the Trainer's saving is no training
        if self.processes.first:
            if merge:
                save_file({name: tensor.contiguous() for name, tensor in merge.items()}, folder / MERGE)
            self._checkpoint(folder)
        self._tick()
        step = self.steps[state.global_step - 1]
        if step.ends_task:
            if self.processes.first:  # answers of an earlier run in this folder
                shutil.rmtree(self._after(step.task), ignore_errors=True)
            self._test(step.task, known=False)
        self.saved = time.perf_counter()

    def _saved(self, step: int) -> Path:
        """The Trainer's checkpoint of a step."""
        return self.folder / CHECKPOINTS / f"checkpoint-{step}"

    def _checkpoint(self, folder: Path) -> None:
        state = {
            "counts": self.trainer.counts,
            "history": self.history,
            "clock": self.clock,
            "peak_memory": self.peak_memory,
            "sharded": self.trainer.sharded,
        }
        whole = {"state": state, "identity": self.config.identity(), "data": self.corpus.fingerprint}
        checkpoint.record(self.folder, folder, whole)

    def _check_weights(self, index: int) -> None:
        """Raise :class:`TrainingDiverged` unless all weights are finite.

        The losses do not tell: that of the last step is computed before its update.
        """
        weights = self.trainer.merging.weights.trained()
        finite = torch.stack([tensor.isfinite().all() for tensor in weights]).all()
        if not self.processes.all(finite):
            raise TrainingDiverged(
                f"the weights are no longer finite numbers after task {index + 1}; try a lower learning rate"
            )

    @property
    def _task(self) -> int:
        """The task in training."""
        return self.steps[min(self.trainer.state.global_step, len(self.steps) - 1)].task

    # ---- testing ----------------------------------------------------------------------------------------------------

    def _test(self, index: int, known: bool) -> None:
        """Test on every task so far.

        ``known``: answers that an interrupted test has written are of these weights, and are used again.
        """
        scores: dict[str, list[float]] = {version: [] for version in VERSIONS}
        with self.trainer.merging.tested():
            for number in range(index + 1):
                task, texts = self.corpus.tasks[number], self._answers(index, number, known)
                wanted, prompts = [item.answer for item in task.test], [item.prompt for item in task.test]
                for version in VERSIONS:
                    scores[version].append(score(task.info.metric, texts, wanted, prompts, version))
            self._save_weights(index)
        drop_gathered(self.trainer.model)  # what is read next are the parts
        self._tick()
        self.peak_memory = max(self.peak_memory, peak_memory(self.device))
        name = self.corpus.tasks[index].name
        self.history.append({"task": index, "name": name, **scores, **self.trainer.counts, **self.clock})
        if self.processes.first:
            write_atomically(self.folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in self.history))
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

        with contextlib.nullcontext() if self.trainer.sharded else self.trainer.accelerator.autocast():
            share = answers(
                self.trainer.model,
                self.corpus.tokenizer,
                self.processes.share(prompts),
                self.config,
                self.device,
                (index, number),
                self.corpus.frame.end,
                answered,
                self.trainer.sharded,
            )
        return self.processes.gather(share, len(prompts))[: len(task.test)]

    def _save_weights(self, index: int) -> None:
        """Save the model as a folder for transformers if ``save_weights`` asks for it."""
        if self.config.save_weights == "every" or self.config.save_weights and index + 1 == len(self.corpus.tasks):
            model = self.trainer.model
            state = whole_state(self.trainer)
            if self.processes.first:
                folder = self.folder / "models" / f"after-{index + 1}"
                # a merge changes the layers below the adapters
                save_model(folder, model, self.corpus.tokenizer, state, self.config, not self.trainer.merging.merge)

    # ---- resuming, time and progress --------------------------------------------------------------------------------

    def _resume(self) -> str | None:
        """The name of the checkpoint to resume from, whose state becomes the run's."""
        found: Any = self.processes.from_first(lambda: checkpoint.recorded(self.folder))
        path = self.folder / checkpoint.CHECKPOINT
        if not self.processes.agree(path.exists()):
            raise UnusableRun(
                f"{self.folder}: not all processes see the same checkpoint there; "
                "give a folder that all machines share with --out"
            )
        if not found:
            return None
        if not self.config.continues(found["identity"]):
            raise UnusableRun(f"{path}: was made with other settings; delete it to start this run again")
        if difference := changed(found["data"], self.corpus.fingerprint):
            raise UnusableRun(
                f"{path}: was made with other data ({difference}); restore them, or delete it to start this run again"
            )
        state = found["state"]
        if state["sharded"] != self.trainer.sharded:
            was = "a sharded" if state["sharded"] else "a whole"
            raise UnusableRun(
                f"{path}: is of {was} model; resume as the run began (llm.shard, and several processes or one), "
                "or delete it to start again"
            )
        self.history, self.clock, self.peak_memory = state["history"], state["clock"], state["peak_memory"]
        self.trainer.counts = state["counts"]
        self.log.info("resuming at step %d", state["counts"]["steps"] + 1)
        return found["checkpoint"]

    def _due(self) -> bool:
        """Whether it is time for a checkpoint, in all processes."""
        return self.processes.broadcast(time.perf_counter() - self.saved >= 60 * self.config.checkpoint_minutes)

    def _tick(self, *names: str) -> None:
        """Add the time since the last tick to the total, and to the named clocks."""
        now = time.perf_counter()
        for name in {"total_seconds", *names}:
            self.clock[name] += now - self.mark
        self.mark = now

    def _speed(self) -> float:
        """Tokens per second of training, since this command started."""
        seconds = self.clock["train_seconds"] - self.before["train_seconds"]
        return (self.trainer.counts["tokens"] - self.before["tokens"]) / seconds if seconds else 0.0

    def _show(self, index: int, position: str, line: str = "") -> None:
        """Report the progress of task ``index``, at most once per ``INTERVAL``; a ``line`` is always reported."""
        if not line and time.monotonic() - self.shown < INTERVAL:
            return
        self.shown, task = time.monotonic(), f"task {index + 1}/{len(self.corpus.tasks)}"
        where, tokens = f"{task} {self.corpus.tasks[index].name} {position}", self.trainer.counts["tokens"]
        self.on_progress(Progress(where, tokens, self._speed(), line and f"{task}  {line}", unit="tokens"))
