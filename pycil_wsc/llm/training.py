"""Trains the model by ``transformers.Trainer``: its arguments, its optimiser steps, and the consolidation."""

import contextlib
import functools
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from pycil_wsc import seeding
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.consolidation import moment_score
from pycil_wsc.devices import make_current
from pycil_wsc.llm.config import CHECKPOINTS, LLMConfig
from pycil_wsc.llm.corpus import Step
from pycil_wsc.llm.model import Model
from pycil_wsc.llm.running_merge import RunningMerge
from pycil_wsc.llm.token_batches import collate, micro_batches, summed_losses
from pycil_wsc.llm.tokens import Example
from pycil_wsc.plugins.huggingface import Period, WSCCallback
from pycil_wsc.training.precision import resolved_precision
from pycil_wsc.training.processes import Processes


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
        self.config = config
        self.pad = pad
        self.processes = processes
        self.counts = {"steps": 0, "tokens": 0, "padding": 0, "answers": 0}
        self.epoch_loss = torch.zeros((), device=arguments.device)  # this process's sum over the steps of the epoch
        super().__init__(model, arguments, train_dataset=steps, callbacks=list(callbacks))  # pyright: ignore[reportArgumentType]
        self.remove_callback(PrinterCallback)
        self.model.tie_weights()  # on devices that register themselves with torch, `to` makes shared weights two

    @functools.cached_property
    def merging(self) -> RunningMerge:
        """The running merge, which begins with the weights before the first task."""
        return RunningMerge(self.config, self.model)

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
        """The gradients of the mean over items of each item's mean loss over its tokens.

        Returns this process's part of it, times the number of processes, over which gradients are averaged.
        """
        model.train()
        config = self.config
        examples = inputs["step"].examples
        processes = self.processes
        groups = micro_batches(examples, config.micro_tokens, config.padding)
        # all processes gather sharded layers together, so each has equally many groups: those added have a factor of 0
        weighted = [(group, processes.count / len(examples)) for group in groups]
        shares = processes.share(weighted + [(groups[-1], 0.0)] * (-len(groups) % processes.count))
        loss = torch.zeros((), device=self.args.device)
        with seeding.seeded(config.seed, "dropout", self.counts["steps"], processes.rank, device=self.args.device):
            for number, (group, factor) in enumerate(shares, 1):
                batch = collate(group, self.pad, self.args.device)
                # sharded gradients are reduced at once: whole ones would not fit beside the model
                reduced = self.sharded or number == len(shares)
                with contextlib.nullcontext() if reduced else self.accelerator.no_sync(model):
                    part = factor * (summed_losses(model, batch) / batch.counts).sum()
                    self.accelerator.backward(part)
                loss += part.detach()
        self._count(groups)
        self.epoch_loss += loss
        return loss

    def _count(self, groups: Sequence[Sequence[Example]]) -> None:
        examples = [example for group in groups for example in group]
        tokens = sum(map(len, examples))
        area = sum(len(group) * len(group[0]) for group in groups)
        answers = tokens - sum(example.prompt for example in examples)
        for name, more in {"steps": 1, "tokens": tokens, "padding": area - tokens, "answers": answers}.items():
            self.counts[name] += more

    def loss(self) -> float:
        """``epoch_loss`` of all processes, which call this together. Synchronises with the device."""
        return self.processes.sum(self.epoch_loss).item() / self.processes.count

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        assert self.merging  # from the weights before the first task, which the checkpoint's will replace
        super()._load_from_checkpoint(resume_from_checkpoint, model)


def _only(steps: Sequence[Step]) -> dict[str, Step]:
    (step,) = steps
    return {"step": step}


def training_arguments(
    config: LLMConfig, steps: int, device: torch.device, processes: Processes, layers: Sequence[str] = ()
) -> TrainingArguments:
    """The Trainer's arguments for a run of that many ``steps``; ``layers``: the classes to shard, if it is sharded."""
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
        bf16=resolved_precision(config.precision, device) == "bf16",
        use_cpu=device.type == "cpu",
        seed=config.seed,
        save_strategy="no",  # the run decides when
        logging_strategy="no",
        logging_nan_inf_filter=False,  # it would hide divergence, and synchronise with the device in every step
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


def consolidation(config: LLMConfig, steps: Sequence[Step]) -> list[WSCCallback]:
    """The consolidation of the run's tasks; [] if there is none."""
    periods = _periods(config, steps) if config.method == "wsc" else []
    if not periods:
        return []
    chosen = config.wsc.arguments(per_epoch=1)  # all is counted in steps
    importance = moment_score(source="carried")
    return [WSCCallback(config.wsc.warmup, importance, periods=periods, save_average=False, **chosen)]


def _periods(config: LLMConfig, steps: Sequence[Step]) -> list[Period]:
    """The steps that WSC consolidates in each task: those of its replay epochs, which are its last ones, or all."""
    periods = []
    for task, numbers in groupby(range(len(steps)), lambda number: steps[number].task):
        of_task = list(numbers)
        covered = [number for number in of_task if steps[number].epoch.replay or config.wsc.covers == "all"]
        if covered and (task or config.wsc.first_task):
            periods.append(Period(of_task[0], covered[0], covered[-1] + 1))
    return periods
