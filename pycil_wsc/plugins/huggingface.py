"""Weight Space Consolidation for ``transformers.Trainer``: a callback. Needs requirements-hf.txt."""

import logging
from pathlib import Path

import torch
from transformers import TrainerCallback

from pycil_wsc.consolidation import WeightSpaceConsolidation

logger = logging.getLogger(__name__)
FILE = "wsc.pt"  # in each checkpoint's folder


class WSCCallback(TrainerCallback):
    """Consolidates each ``Trainer.train()`` as one task: scores weights while it warms up, resets the dormant ones once, and averages.

    >>> trainer = Trainer(model, args, train_dataset=task, callbacks=[WSCCallback()])  # doctest: +SKIP
    >>> trainer.train()       # doctest: +SKIP
    >>> trainer.save_model()  # the average  # doctest: +SKIP

    Its state is saved with each checkpoint, and ``train(resume_from_checkpoint=...)`` goes on exactly. The checkpoints themselves hold the
    weights as they were; the average becomes the weights when training ends. One callback may serve several tasks in turn, each with
    a new ``Trainer``. Under a learning rate that falls to 0 the average is of weights that no longer move: prefer a constant one.

    Args:
        warmup: share of the optimiser steps before the reset.
        average_every: optimiser steps between samples of the average.
        moments: ``"optimizer"`` reads those of the Trainer's Adam, which costs no memory; ``"own"`` goes with any optimiser.
        options: of :class:`WeightSpaceConsolidation`, such as ``retain`` and ``blend``.

    Raises:
        ValueError: an option is out of range, or the Trainer is set up for what cannot be averaged.
        RuntimeError: the checkpoint to go on from was saved without this callback.
    """

    def __init__(self, warmup=0.25, average_every=20, moments="optimizer", **options):
        if not 0 <= warmup < 1:
            raise ValueError(f"warmup={warmup!r} is a share of the steps: give a number from 0 to less than 1")
        self.warmup, self.options, self.wsc = (
            warmup,
            {"average_every": average_every, "moments": moments} | options,
            None,
        )
        WeightSpaceConsolidation(
            torch.nn.Linear(1, 1).named_parameters(), warmup_steps=1, **self.options
        )  # bad options: now

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **others):
        _check(args)
        if self.wsc:
            self.wsc.detach()  # of a training that was broken off
        steps = int(self.warmup * state.max_steps)
        if self.options.get("reset") != "none":
            steps = max(1, steps)
        self.wsc = WeightSpaceConsolidation(model.named_parameters(), warmup_steps=steps, **self.options)
        self.wsc.options.check_fits(state.max_steps)
        if state.global_step:
            self.wsc.load_state_dict(_saved(args, state.global_step))
        self.wsc.attach(getattr(optimizer, "optimizer", optimizer))  # accelerate wraps it, and steps the one within

    def on_save(self, args, state, control, **others):
        if state.is_world_process_zero:
            torch.save(self.wsc.state_dict(), _folder(args, state.global_step) / FILE)

    def on_train_end(self, args, state, control, **others):
        self.wsc.detach()
        if self.wsc.phase == "warm-up":
            logger.warning(
                "WSC: training ended in the warm-up, after %d of %d steps: the weights stay as they are",
                self.wsc.steps,
                self.wsc.options.warmup_steps,
            )
        else:
            self.wsc.finish()


def _check(args):
    if args.load_best_model_at_end:
        raise ValueError("load_best_model_at_end=True would put a checkpoint in the place of the average: leave it out")
    if args.deepspeed or args.fsdp:
        raise ValueError("WSCCallback needs whole parameters on each device: leave deepspeed and fsdp out")


def _folder(args, step):
    return Path(args.output_dir) / f"checkpoint-{step}"


def _saved(args, step):
    places = [_folder(args, step) / FILE]
    if isinstance(args.resume_from_checkpoint, str):
        places.insert(0, Path(args.resume_from_checkpoint) / FILE)
    for place in places:
        if place.is_file():
            return torch.load(place, map_location="cpu", weights_only=True)
    raise RuntimeError(
        f"training is to go on at step {step}, but {places[-1]} does not exist: that checkpoint was saved without WSCCallback, "
        "or lies elsewhere (then name it as TrainingArguments(resume_from_checkpoint=...) too)"
    )
