"""One run of a language model: tasks -> training -> answers -> scores -> checkpoint -> result.json."""

import contextlib
import json
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pycil_wsc.allocator import keep_freed_memory
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.consolidation import NonFiniteGradients
from pycil_wsc.consolidation.sharded import local
from pycil_wsc.devices import device_name, reset_peak_memory, resolved_device, synchronize
from pycil_wsc.errors import TrainingDiverged, UnusableRun
from pycil_wsc.files import write_atomically, write_json
from pycil_wsc.llm import trainer_checkpoint
from pycil_wsc.llm.config import CHECKPOINT, CHECKPOINTS, LLMConfig
from pycil_wsc.llm.corpus import Corpus, Step
from pycil_wsc.llm.generation import answers, stops_alone
from pycil_wsc.llm.language_result import result_of
from pycil_wsc.llm.metrics import VERSIONS, score
from pycil_wsc.llm.model import load_model, positions, save_model
from pycil_wsc.llm.training import TaskTrainer, consolidation, training_arguments
from pycil_wsc.plugins.huggingface import drop_gathered
from pycil_wsc.reproducibility import threads
from pycil_wsc.results import write_result
from pycil_wsc.runs.journal import Journal, check_loss
from pycil_wsc.runs.progress import Progress, print_task
from pycil_wsc.training.precision import resolved_precision
from pycil_wsc.training.processes import Processes, rank_and_count

MERGE = "merge.safetensors"  # in the Trainer's checkpoint


class LanguageRun(TrainerCallback):
    """One run of a sweep, in its own folder: resumes if it was stopped, and ends with ``result.json``.

    It follows the Trainer as a callback: logs, saves when it is time to, and tests after each task. ``on_progress`` is
    called with every :class:`pycil_wsc.runs.progress.Progress`.
    """

    def __init__(self, config: LLMConfig, corpus: Corpus, on_progress: Callable[[Progress], None] = print_task) -> None:
        self.config = config
        self.corpus = corpus
        self.folder = run_folder(config)
        self.steps = corpus.steps(config)
        first = rank_and_count()[0] == 0
        self.journal = Journal(self.folder, on_progress, len(corpus.tasks), first, ["train_loss"])
        self.answers: dict[int, list[str]] = {}  # index of a task -> its answers in the last test

    def execute(self) -> dict[str, object]:
        """Train and test every task; returns the contents of ``result.json``."""
        with contextlib.ExitStack() as files, threads(self.config.threads):
            self.journal.open_log(files)
            return self._execute()

    def _execute(self) -> dict[str, object]:
        self._set_up()
        folder = self._restore()
        self.saved = time.perf_counter()
        self.journal.mark = self.saved
        try:
            if self.steps:
                self.trainer.train(resume_from_checkpoint=folder)
        except NonFiniteGradients as error:
            raise TrainingDiverged(f"{self.journal.bar.task}: {error}") from None
        for index in range(len(self.journal.history), len(self.corpus.tasks)):  # zero_shot trains nothing
            self._test(index)
        result = result_of(self.config, self.corpus, self.trainer, self.journal, self.device)
        if self.processes.first:
            write_result(self.folder, result)
            trainer_checkpoint.remove(self.folder)
        return result.contents()

    def _set_up(self) -> None:
        """Processes, device, model and Trainer."""
        config = self.config
        self.processes = Processes(config.timeout_minutes)
        self.device = self.processes.device(resolved_device(config.device))
        if not self.processes.agree(self.corpus.fingerprint):
            raise UnusableRun(f"{self.folder}: not all processes have the same data; give all machines the same files")
        keep_freed_memory(self.device)
        reset_peak_memory(self.device)
        # reading the weights may take longer than the timeout
        model = self.processes.in_all(lambda: load_model(config, self.corpus.tokenizer))
        self.model = trainer_checkpoint.digest(model) if self.processes.first else ""
        stops_alone(model, self.corpus.tokenizer, self.corpus.frame.end)
        layers = sorted(getattr(model, "_no_split_modules", None) or ())
        arguments = training_arguments(config, len(self.steps), self.device, self.processes, layers)
        callbacks = [*consolidation(config, self.steps), self]
        self.trainer = TaskTrainer(config, model, self.corpus.pad, self.steps, arguments, self.processes, callbacks)
        self._check_lengths()
        if not self.processes.first:
            return
        write_json(self.folder / "config.json", config.to_dict())
        for line in self.corpus.warnings:
            self.journal.log.warning("%s", line)
        where = device_name(self.device), resolved_precision(config.precision, self.device), self.processes.count
        self.journal.log.info("%s on %s, %s, %d process(es)", self.folder, *where)

    def _check_lengths(self) -> None:
        """Raise :class:`UnusableRun` if the model has too few positions for a training item or an answer."""
        limit = positions(self.trainer.model)
        trained = max((len(example) for step in self.steps for example in step.examples), default=0)
        prompt = max(map(len, chain(*self.corpus.test_prompts)))
        tested = prompt + self.config.max_new_tokens - 1  # the last token is not read
        if limit and max(trained, tested) > limit:
            raise UnusableRun(
                f"llm.model: has {limit} positions, but a training item has {trained} tokens, and a test prompt with "
                f"its answer {tested}; reduce llm.max_prompt, llm.max_answer or llm.max_new_tokens"
            )

    def _restore(self) -> str | None:
        """Restore the state of the last checkpoint, if any; returns the folder in which the Trainer saved its part."""
        state = self.processes.from_first(
            lambda: trainer_checkpoint.recorded(self.config, self.corpus.fingerprint, self.model)
        )
        path = self.folder / CHECKPOINT
        if not self.processes.agree(path.exists()):
            raise UnusableRun(
                f"{self.folder}: not all processes see the same checkpoint there; "
                "give a folder that all machines share with --out"
            )
        if not state:
            return None
        if state["sharded"] != self.trainer.sharded:
            was = "a sharded" if state["sharded"] else "a whole"
            raise UnusableRun(
                f"{path}: is of {was} model; resume as the run began (llm.shard, and several processes or one), "
                "or delete it to start again"
            )
        self.journal.load_state_dict(state)
        self.trainer.counts = state["counts"]
        self.trainer.epoch_loss.fill_(state["epoch_loss"])
        self.journal.log.info("resuming at step %d", state["counts"]["steps"] + 1)
        return str(self.folder / CHECKPOINTS / state["checkpoint"])

    # ---- training: called by the Trainer ----------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: object
    ) -> None:
        done = state.global_step
        merging = self.trainer.merging
        last = self.steps[done - 1] if done else None
        merge = self._saved(done) / MERGE
        if last and merge.exists():
            merging.load_state_dict(load_file(merge))
        if last and last.ends_task and len(self.journal.history) == last.task:
            self._test(last.task)  # it was interrupted
        if done < len(self.steps):
            self._show(self.steps[done])
        self.saved = time.perf_counter()
        self.journal.mark = self.saved

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        step = self.steps[state.global_step]
        if step.number == 1:
            self._show(step)

    def _show(self, step: Step) -> None:
        """An epoch begins or resumes with ``step``."""
        phase = self.corpus.tasks[step.task].name
        if step.epoch.replay:
            phase += " replay"
        self.journal.bar.begin(step.task)
        self.journal.bar.start(phase, step.epoch.number, step.epoch.total, self.trainer.counts["tokens"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        step = self.steps[state.global_step - 1]
        self.journal.tick("train_seconds")
        self.journal.bar.step(sum(map(len, step.examples)))
        if step.ends_epoch:
            self._epoch_ended(step.total)
        if step.ends_task:
            self._check_weights()
            self.journal.tick()  # the check does not count as training
            self.trainer.merging.end_task()
        due = time.perf_counter() - self.saved >= 60 * self.config.checkpoint_minutes
        control.should_save = step.ends_task or self.processes.broadcast(due)
        if control.should_save:
            synchronize(self.device)
            self.journal.tick("train_seconds")

    def _epoch_ended(self, steps: int) -> None:
        loss = self.trainer.loss() / steps
        bar = self.journal.bar
        self.trainer.epoch_loss.zero_()
        self.journal.tick("train_seconds")
        self.journal.log.info("%s: loss %.4f, %s tokens/s", bar.position, loss, f"{bar.speed:,.0f}")
        check_loss(loss, bar.position)
        self.journal.curves["train_loss"].append(loss)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: object) -> None:
        """The Trainer and the consolidation have saved their files."""
        step = self.steps[state.global_step - 1]
        self.journal.tick()  # the Trainer's saving does not count as training
        self._checkpoint(self._saved(state.global_step))
        self.journal.tick()
        if step.ends_task:
            self._test(step.task)
        self.saved = time.perf_counter()

    def _saved(self, step: int) -> Path:
        """The Trainer's checkpoint of a step."""
        return self.folder / CHECKPOINTS / f"checkpoint-{step}"

    def _checkpoint(self, folder: Path) -> None:
        """Complete the Trainer's checkpoint in ``folder``, and make it the one to resume from."""
        merge = self.trainer.merging.state_dict(keep=self.processes.first)
        self.journal.note_memory(self.device)
        state = {
            **self.journal.state_dict(),
            "counts": self.trainer.counts,
            "epoch_loss": self.trainer.loss(),
            "sharded": self.trainer.sharded,
            "identity": self.config.identity(),
            "data": self.corpus.fingerprint,
            "model": self.model,
        }
        if self.processes.first:
            if merge:
                save_file({name: tensor.contiguous() for name, tensor in merge.items()}, folder / MERGE)
            trainer_checkpoint.record(self.folder, folder, state)

    def _check_weights(self) -> None:
        """Raise :class:`TrainingDiverged` unless all weights are finite: the last loss is that before its update."""
        parameters = self.trainer.model.parameters()
        trained = [local(parameter.detach()) for parameter in parameters if parameter.requires_grad]
        finite = torch.stack([tensor.isfinite().all() for tensor in trained]).all()
        self.journal.check(self.processes.all(finite), "the weights")

    # ---- testing ----------------------------------------------------------------------------------------------------

    def _test(self, index: int) -> None:
        """Test on every task so far."""
        self.journal.bar.begin(index)
        scores: dict[str, list[float]] = {version: [] for version in VERSIONS}
        with self.trainer.merging.tested():
            for number in range(index + 1):
                task = self.corpus.tasks[number]
                texts = self._answers(index, number)
                wanted = [item.answer for item in task.test]
                prompts = [item.question for item in task.test]
                for version in VERSIONS:
                    scores[version].append(score(task.info.metric, texts, wanted, prompts, version))
            self._save_weights(index)
        drop_gathered(self.trainer.model)  # what is read next are the parts
        self.journal.note_memory(self.device)
        name = self.corpus.tasks[index].name
        self.journal.task_ended({"task": index, "name": name, **scores, **self.trainer.counts})
        average = sum(scores["trace"]) / (index + 1)
        self.journal.say(f"{name} {100 * scores['trace'][-1]:.2f}, average of {index + 1} {100 * average:.2f}")

    def _answers(self, index: int, number: int) -> list[str]:
        """The answers to the test items of task ``number`` after task ``index``; also written to ``predictions``."""
        task = self.corpus.tasks[number]
        if self.steps or number == index:  # a model that is not trained has answered already
            self.answers[number] = self._generate(index, number)
        texts = self.answers[number]
        if self.processes.first:
            rows = ({"prediction": text, "answer": item.answer} for text, item in zip(texts, task.test, strict=True))
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            write_atomically(self.folder / "predictions" / f"after-{index + 1}" / f"{task.name}.jsonl", lines)
        return texts

    def _generate(self, index: int, number: int) -> list[str]:
        task = self.corpus.tasks[number]
        prompts = self.corpus.test_prompts[number]
        count = self.processes.count
        prompts = [*prompts, *prompts[:1] * (-len(prompts) % count)]  # the same number for each process
        share = self.processes.share(prompts)
        total = len(task.test)
        sharded = self.trainer.sharded

        def answered(done: int) -> None:
            self.journal.bar.at(f"answers to {task.name}, {min(done * count, total)}/{total}")

        model = self.trainer.model
        tokenizer = self.corpus.tokenizer
        address = (index, number)
        with contextlib.nullcontext() if sharded else self.trainer.accelerator.autocast():
            texts = answers(model, tokenizer, share, self.config, self.device, address, answered, sharded)
        return self.processes.gather(texts, len(prompts))[:total]

    def _save_weights(self, index: int) -> None:
        """Save the model as a folder for transformers if ``save_weights`` asks for it."""
        if self.config.save_weights == "every" or self.config.save_weights and index + 1 == len(self.corpus.tasks):
            # that of the whole model, in the first process
            state = self.trainer.accelerator.get_state_dict(self.trainer.model)
            if self.processes.first:
                folder = self.folder / "models" / f"after-{index + 1}"
                save_model(folder, self.corpus.tokenizer, cast(dict[str, Tensor], state), self.config)
