"""One run of a language model: tasks -> training -> answers -> scores -> checkpoint -> result.json."""

import json
import logging
import math
import time

import torch
import transformers

from pycil_wsc.allocator import keep_freed_memory
from pycil_wsc.engine.environment import commit, device_name, peak_memory, reset_peak_memory, resolved_device
from pycil_wsc.errors import UnusableRun, UserError
from pycil_wsc.files import write_atomically, write_json
from pycil_wsc.llm.checkpoint import load_state, save_state
from pycil_wsc.llm.generation import answers
from pycil_wsc.llm.merging import models_resident
from pycil_wsc.llm.metrics import VERSIONS, score, summary
from pycil_wsc.llm.parallel import Processes
from pycil_wsc.llm.tokens import shuffled
from pycil_wsc.llm.training import Training
from pycil_wsc.runs.progress import INTERVAL, Progress, open_log, print_task
from pycil_wsc.runs.run import TrainingDiverged

START = {"task": 0, "stage": "train", "epoch": 0, "step": 0, "loss": 0.0}


class Run:
    """One point of the sweep, in its own folder: goes on where a stopped one stood, and ends with ``result.json``.

    ``corpus`` is a :class:`pycil_wsc.llm.corpus.Corpus`; ``report`` is called with each :class:`pycil_wsc.runs.progress.Progress`.
    """

    def __init__(self, config, corpus, report=print_task):
        self.config, self.corpus, self.report = config, corpus, report
        self.folder = config.run_folder
        if config.threads:
            torch.set_num_threads(config.threads)
        self.processes = Processes()
        self.device = self.processes.device(resolved_device(config.device))
        keep_freed_memory(self.device)
        reset_peak_memory(self.device)
        self.training = Training(config, corpus.tokenizer, self.processes, self.device)
        self.epochs = [corpus.epochs(config, index) for index in range(len(corpus.tasks))]
        self.history = []  # what metrics.jsonl holds: a dict per task
        self.clock = {"train_seconds": 0.0, "total_seconds": 0.0}
        self.peak_memory, self.told = 0, 0.0

    def execute(self):
        """Train and test every task; returns the contents of ``result.json``."""
        try:
            return self._execute()
        except (TrainingDiverged, UserError):
            raise
        except Exception as error:
            if self.processes.count == 1:
                raise
            self.log.exception("%s", error)
            raise SystemExit(
                f"{self.folder}: {type(error).__name__}: {error} (traceback in log.txt)"
            ) from error  # torchrun then ends the other processes

    def _execute(self):
        self.log = open_log(self.folder) if self.processes.first else logging.getLogger("pycil_wsc.following")
        position = self._restore()
        if self.processes.first:
            self.processes.tell(self.config)  # to those that follow
            self._begin()
        if not self.processes.agree(position):
            raise UnusableRun(
                f"{self.folder}: not all processes see the same checkpoint there; name a folder that all machines share with --out"
            )
        self.before = self.clock | self.training.counts  # when this command took the run up
        self.mark = self.saved = time.perf_counter()
        for index in range(position["task"], len(self.corpus.tasks)):
            if position["stage"] == "train":
                self._learn(index, position)
            self._test(index, known=position["stage"] == "test")
            position = START
        result = self._result()
        if self.processes.first:
            write_json(self.folder / "result.json", result)
            (self.folder / "checkpoint.safetensors").unlink(missing_ok=True)
        return result

    def _begin(self):
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

    # ---- training ------------------------------------------------------------------------------------------------------

    def _learn(self, index, position):
        """Train on task ``index`` from ``position`` on."""
        epochs, training = self.epochs[index], self.training
        if position["epoch"] == position["step"] == 0:
            training.begin_task(index, epochs)
        for number in range(position["epoch"], len(epochs)):
            training.begin_epoch(epochs[number])
            self._epoch(
                index, number, *((position["step"], position["loss"]) if number == position["epoch"] else (0, 0.0))
            )
        training.end_task()
        self._tick("train_seconds")
        self._checkpoint(START | {"task": index, "stage": "test"})

    def _epoch(self, index, number, first, loss):
        """The steps of an epoch from ``first`` on; ``loss`` is the sum over those before."""
        epoch = self.epochs[index][number]
        batches = shuffled(len(epoch.examples), self.config.batch_size, self.config.seed, index, number)
        losses = torch.zeros((), device=self.device)
        for step in range(first, len(batches)):
            losses += self.training.step([epoch.examples[i] for i in batches[step]])
            self._tick("train_seconds")
            self._tell(index, f"{epoch.name} {epoch.number + 1}/{epoch.total}, step {step + 1}/{len(batches)}")
            if self._due() and (number, step) != (len(self.epochs[index]) - 1, len(batches) - 1):
                loss, losses = loss + self._summed(losses), torch.zeros((), device=self.device)
                done = (
                    {"epoch": number + 1}
                    if step + 1 == len(batches)
                    else {"epoch": number, "step": step + 1, "loss": loss}
                )
                self._checkpoint(START | {"task": index} | done)
        mean = (loss + self._summed(losses)) / len(batches)
        self._tick("train_seconds")  # the device has done all by now
        self.log.info(
            "task %d %s %d/%d: loss %.4f, %s tokens/s",
            index,
            epoch.name,
            epoch.number + 1,
            epoch.total,
            mean,
            f"{self._speed():,.0f}",
        )
        if not math.isfinite(mean):
            raise TrainingDiverged(
                f"the loss became {mean} in task {index}, {epoch.name} {epoch.number + 1}; try a lower learning rate"
            )

    def _summed(self, losses):
        """The processes' losses together."""
        return self.processes.sum_(losses.clone()).item()

    # ---- testing -------------------------------------------------------------------------------------------------------

    def _test(self, index, known):
        """Test on every task so far; answers that an interrupted test left are taken where they are ``known`` to be of these weights."""
        scores = {version: [] for version in VERSIONS}
        with self.training.tested() as model:
            for number in range(index + 1):
                task, texts = self.corpus.tasks[number], self._answers(model, index, number, known)
                for version in VERSIONS:
                    scores[version].append(
                        score(
                            task.info.metric,
                            texts,
                            [item.answer for item in task.test],
                            [item.prompt for item in task.test],
                            version,
                        )
                    )
            self._keep(model, index)
        self._tick()
        self.peak_memory = max(self.peak_memory, peak_memory(self.device))
        self.history.append(
            {"task": index, "name": self.corpus.tasks[index].name, **scores, **self.training.counts, **self.clock}
        )
        if self.processes.first:
            write_atomically(self.folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in self.history))
        self._checkpoint(START | {"task": index + 1})
        line = f"{self.corpus.tasks[index].name} {100 * scores['trace'][-1]:.2f}, average of {index + 1} {100 * sum(scores['trace']) / (index + 1):.2f}"
        self.log.info("task %d: %s", index, line)
        self._tell(index, "tested", line)

    def _answers(self, model, index, number, known):
        """The answers to the test items of task ``number`` after task ``index``; they are kept in ``predictions``."""
        task, path = (
            self.corpus.tasks[number],
            self.folder / "predictions" / f"after-{index + 1}" / f"{self.corpus.tasks[number].name}.jsonl",
        )
        texts = (
            [json.loads(line)["prediction"] for line in path.read_text().splitlines()]
            if known and path.exists()
            else None
        )
        texts = self.processes.tell(texts)
        if texts is None:
            prompts, count = self.corpus.test_prompts[number], self.processes.count
            prompts = [*prompts, *prompts[:1] * (-len(prompts) % count)]  # as many for each process
            share = answers(
                model,
                self.corpus.tokenizer,
                self.processes.share(prompts),
                self.config,
                self.device,
                self.training.autocast,
                (index, number),
                lambda done: self._tell(
                    index, f"answers to {task.name}, {min(done * count, len(task.test))}/{len(task.test)}"
                ),
                self.training.sharded,
            )
            texts = self.processes.gather(share, len(prompts))[: len(task.test)]
        if self.processes.first:
            rows = ({"prediction": text, "answer": item.answer} for text, item in zip(texts, task.test, strict=True))
            write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return texts

    def _keep(self, model, index):
        """The model as a folder for transformers, where it is asked for."""
        if self.config.save_weights == "every" or self.config.save_weights and index + 1 == len(self.corpus.tasks):
            folder, state = self.folder / "models" / f"after-{index + 1}", self.training.placing.state_dict()
            if self.processes.first:
                model.save_pretrained(folder, state_dict=state)
                self.corpus.tokenizer.save_pretrained(folder)

    # ---- saving and going on -------------------------------------------------------------------------------------------

    def _checkpoint(self, position):
        self._tick()
        self.peak_memory = max(self.peak_memory, peak_memory(self.device))
        state = {
            "position": position,
            "training": self.training.state_dict(),
            "history": self.history,
            "clock": self.clock,
        }
        if self.processes.first:
            save_state(
                self.folder / "checkpoint.safetensors",
                state | {"peak_memory": self.peak_memory, "identity": self.config.identity()},
            )
        self.saved = time.perf_counter()

    def _restore(self):
        """The position to go on from."""
        path = self.folder / "checkpoint.safetensors"
        if not path.exists():
            return START
        state = load_state(path)
        if state["identity"] != self.config.identity():
            raise UnusableRun(f"{path}: was made with other settings; delete it to start this run again")
        self.history, self.clock, self.peak_memory = state["history"], state["clock"], state["peak_memory"]
        position = state["position"]
        if position["task"] < len(self.epochs):
            self.training.load_state_dict(state["training"], position["task"], self.epochs[position["task"]])
        self.log.info(
            "going on with task %d, %s, epoch %d, step %d",
            position["task"],
            position["stage"],
            position["epoch"] + 1,
            position["step"] + 1,
        )
        return position

    def _due(self):
        """Whether it is time for a checkpoint; the processes agree."""
        return self.processes.tell(time.perf_counter() - self.saved >= 60 * self.config.checkpoint_minutes)

    def _tick(self, *names):
        """Add the time since the last tick to the total, and to the named clocks."""
        now = time.perf_counter()
        for name in {"total_seconds", *names}:
            self.clock[name] += now - self.mark
        self.mark = now

    # ---- what there is to see ------------------------------------------------------------------------------------------
    def _speed(self):
        """Tokens per second of training, since this command took the run up."""
        seconds = self.clock["train_seconds"] - self.before["train_seconds"]
        return (self.training.counts["tokens"] - self.before["tokens"]) / seconds if seconds else 0.0

    def _tell(self, index, position, line=""):
        if not line and time.monotonic() - self.told < INTERVAL:
            return
        self.told, task = time.monotonic(), f"task {index + 1}/{len(self.corpus.tasks)}"
        self.report(
            Progress(
                f"{task} {self.corpus.tasks[index].name} {position}",
                self.training.counts["tokens"],
                self._speed(),
                line and f"{task}  {line}",
                unit="tokens",
            )
        )

    def _result(self):
        last, minutes = self.history[-1], self.clock["train_seconds"] / 60
        scores = {
            version: summary([row[version] for row in self.history])
            | {"matrix": [row[version] for row in self.history]}
            for version in VERSIONS
        }
        residents = models_resident(
            self.config.method,
            len(self.corpus.tasks),
            self.config.method == "slerp" and self.config.slerp_on == "task_vectors",
        )
        return {
            "kind": "llm",
            "config": {
                name: value
                for name, value in self.config.to_dict().items()
                if name not in ("out", "data_root", "save_weights")
            },
            "tasks": [task.name for task in self.corpus.tasks],
            "metrics": [task.info.metric for task in self.corpus.tasks],
            "avg_score": scores["trace"]["last_average"],
            "scores": scores,
            "trivial": self.corpus.trivial,
            "warnings": self.corpus.warnings,
            "train_seconds": self.clock["train_seconds"],
            "total_seconds": self.clock["total_seconds"],
            "train_minutes": minutes,
            "models_resident": residents.paper,
            "models_resident_streamed": residents.streamed,
            "relative_vram_minutes": minutes * residents.paper,
            "relative_vram_minutes_streamed": minutes * residents.streamed,
            "peak_memory_bytes": self.peak_memory,
            "steps": last["steps"],
            "tokens_trained": last["tokens"],
            "answer_tokens_trained": last["answers"],
            "padding": last["padding"] / (last["padding"] + last["tokens"]),
            "tokens_per_second": last["tokens"] / self.clock["train_seconds"],
            "parameters": sum(parameter.numel() for parameter in self.training.model.parameters()),
            "parameters_trained": sum(
                parameter.numel() for parameter in self.training.model.parameters() if parameter.requires_grad
            ),
            "processes": self.processes.count,
            "sharded": self.training.sharded,
            "device": device_name(self.device),
            "precision": self.training.precision,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "commit": commit(),
        }
