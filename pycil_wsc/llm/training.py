"""Trains the model by ``transformers.Trainer``: its arguments, its optimiser steps, and the consolidation."""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from pycil_wsc import seeding
from pycil_wsc.config.forms import run_folder
from pycil_wsc.consolidation import moment_score
from pycil_wsc.devices import make_current
from pycil_wsc.engine.precision import resolved_precision
from pycil_wsc.engine.processes import Processes
from pycil_wsc.llm.batches import collate, micro_batches, summed_losses
from pycil_wsc.llm.config import CHECKPOINTS, LLMConfig
from pycil_wsc.llm.corpus import Step
from pycil_wsc.llm.merging import Merging
from pycil_wsc.llm.model import Model
from pycil_wsc.llm.tokens import Example
from pycil_wsc.plugins.huggingface import Period, WSCCallback


class TaskTrainer(Trainer):
    """A ``Trainer`` of the ``steps`` of a whole run.

    Each process gets the items of every step and computes its share of them, in groups of similar length. ``counts``
    grow with the steps: their number, tokens without padding, padding, and tokens with a label.
    """

    model: Model

    def __init__(
        self,
        config: LLMConfig,
        model: Model,
        pad: int,
        steps: Sequence[Step],
        arguments: TrainingArguments,
        processes: Processes,
        callbacks: Sequence[TrainerCallback],
    ) -> None:
        self.config, self.pad, self.processes = config, pad, processes
        self.counts = {"steps": 0, "tokens": 0, "padding": 0, "answers": 0}
        self.epoch_loss = torch.zeros((), device=arguments.device)  # this process's sum over the steps of the epoch
        super().__init__(model, arguments, train_dataset=steps, callbacks=list(callbacks))  # pyright: ignore[reportArgumentType]
        self.remove_callback(PrinterCallback)
        self.model.tie_weights()  # on devices that register themselves with torch, `to` makes shared weights two

    @functools.cached_property
    def merging(self) -> Merging:
        """The running merge, which begins with the weights before the first task."""
        return Merging(self.config, self.model)

    @property
    def sharded(self) -> bool:
        return self.is_fsdp_enabled

    def get_train_dataloader(self) -> DataLoader:
        """The steps in order, the same in each process: the Trainer's own would give each process other steps."""
        return DataLoader(self.train_dataset, batch_size=1, collate_fn=_only)  # pyright: ignore[reportArgumentType]

    def floating_point_ops(self, inputs: object) -> int:
        return 0  # the Trainer's estimate takes one batch of tensors

    def training_step(
        self, model: nn.Module, inputs: dict[str, Step], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """The gradients of a step; returns this process's part of its mean loss, times the number of processes."""
        model.train()
        config, examples = self.config, inputs["step"].examples
        groups = micro_batches(examples, config.micro_tokens, config.padding)
        labels = sum(len(example) - example.prompt for example in examples)
        *others, last = self._share(groups)
        loss = torch.zeros((), device=self.args.device)
        with seeding.seeded(config.seed, "dropout", self.counts["steps"], self.processes.rank, device=self.args.device):
            # sharded gradients are reduced at once: whole ones would not fit beside the model
            with contextlib.nullcontext() if self.sharded else self.accelerator.no_sync(model):
                for group, factor in others:
                    loss += self._backward(model, group, factor, len(examples), labels)
            loss += self._backward(model, *last, len(examples), labels)
        self._count(groups, labels)
        self.epoch_loss += loss
        return loss

    def _share(self, groups: Sequence[Sequence[Example]]) -> Sequence[tuple[Sequence[Example], float]]:
        """This process's groups, as many as the others', each with the factor of its loss.

        Gradients are averaged over processes, so the factor is their number. The last group is repeated with a factor
        of 0 where there are too few: sharded layers are gathered together.
        """
        count = self.processes.count
        weighted = [(group, float(count)) for group in groups] + [(groups[-1], 0.0)] * (-len(groups) % count)
        return self.processes.share(weighted)

    def _backward(
        self, model: nn.Module, group: Sequence[Example], factor: float, examples: int, labels: int
    ) -> Tensor:
        """Add ``factor`` times the gradients of a group's share in the mean of ``examples`` items or ``labels`` tokens.

        Returns the share, times ``factor``.
        """
        batch = collate(group, self.pad).to(self.args.device)
        losses = summed_losses(model, batch)
        loss = (losses / batch.counts).sum() / examples if self.config.loss == "item" else losses.sum() / labels
        self.accelerator.backward(factor * loss)
        return factor * loss.detach()

    def _count(self, groups: Sequence[Sequence[Example]], labels: int) -> None:
        tokens = sum(len(example) for group in groups for example in group)
        area = sum(len(group) * len(group[0]) for group in groups)
        for name, more in {"steps": 1, "tokens": tokens, "padding": area - tokens, "answers": labels}.items():
            self.counts[name] += more

    def end_epoch(self, steps: int) -> float:
        """The mean loss of an epoch of so many ``steps``, which has ended. Waits for the device and other processes."""
        loss = self._loss() / steps
        self.epoch_loss.zero_()
        return loss

    def _loss(self) -> float:
        """``epoch_loss`` over all processes."""
        return self.processes.sum(self.epoch_loss).item() / self.processes.count

    def state_dict(self) -> dict[str, object]:
        """What the Trainer itself does not save. All processes call this together."""
        return {"counts": self.counts, "epoch_loss": self._loss()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = state["counts"]
        self.epoch_loss.fill_(state["epoch_loss"])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        assert self.merging  # from the weights before the first task, which the checkpoint's will replace
        super()._load_from_checkpoint(resume_from_checkpoint, model)


def _only(steps: Sequence[Step]) -> dict[str, Step]:
    (step,) = steps
    return {"step": step}


def training_arguments(
    config: LLMConfig, steps: int, device: torch.device, processes: Processes, layers: Sequence[str] = ()
) -> TrainingArguments:
    """The Trainer's arguments for a run of so many ``steps``; ``layers``: the classes to shard, if it is sharded."""
    sharded = {}
    if config.shard and processes.count > 1 and steps:
        sharded = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": list(layers)}}
    first, second = config.betas
    arguments = TrainingArguments(
        str(run_folder(config) / CHECKPOINTS),
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=config.lr,
        lr_scheduler_type="constant",
        adam_beta1=first,
        adam_beta2=second,
        adam_epsilon=config.eps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.clip or 0.0,
        bf16=precision_of(config, device) == "bf16",
        use_cpu=device.type == "cpu",
        seed=config.seed,
        save_strategy="no",  # the run decides when
        logging_strategy="no",
        logging_nan_inf_filter=False,  # it would hide divergence, and wait for the device in every step
        log_level="error",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        ddp_timeout=int(60 * config.timeout_minutes) or 1,
        **sharded,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one process uses one GPU, not all by DataParallel
    if device.type != "cpu":  # not the first GPU, but the run's
        make_current(device)
        vars(arguments)["_setup_devices"] = device
        assert arguments.distributed_state
        arguments.distributed_state.device = device  # accelerate itself finds the kinds of devices that it knows
    return arguments


def precision_of(config: LLMConfig, device: torch.device) -> str:
    """``"fp32"`` or ``"bf16"``. On a CPU, ``auto`` is fp32, which is faster for models of a feasible size."""
    if config.precision == "auto" and device.type == "cpu":
        return "fp32"
    return resolved_precision(config.precision, device)


def consolidation(config: LLMConfig, steps: Sequence[Step]) -> list[WSCCallback]:
    """The consolidation of the run's tasks; [] if there is none."""
    periods = _periods(config, steps) if config.method == "wsc" else []
    if not periods:
        return []
    first, second = config.betas
    betas = (first, second) if config.wsc.moments == "own" else None
    importance = moment_score(betas, source=config.wsc.moments)
    chosen = config.wsc.arguments(per_epoch=1)  # all is counted in steps
    return [WSCCallback(config.wsc.warmup, importance, periods=periods, save_average=False, **chosen)]


def _periods(config: LLMConfig, steps: Sequence[Step]) -> list[Period]:
    """The steps that WSC consolidates in each task: those of its replay epochs, which are its last ones, or all."""
    own: dict[int, list[int]] = {}
    covered: dict[int, list[int]] = {}
    for number, step in enumerate(steps):
        own.setdefault(step.task, []).append(number)
        if step.epoch.replay or config.wsc.covers == "all":
            covered.setdefault(step.task, []).append(number)
    covered = {task: numbers for task, numbers in covered.items() if task or config.wsc.first_task}
    return [Period(own[task][0], numbers[0], numbers[-1] + 1) for task, numbers in covered.items()]
