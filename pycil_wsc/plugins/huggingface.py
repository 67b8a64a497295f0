"""A callback of ``transformers.Trainer`` for Weight Space Consolidation. Needs requirements-hf.txt."""

import contextlib
import difflib
import inspect
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from pycil_wsc.consolidation import Average, Blend, Importance, WeightSpaceConsolidation, WSCOptions, moment_score
from pycil_wsc.consolidation.epochs import warmup_in_steps
from pycil_wsc.consolidation.sharded import gathered

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

logger = logging.getLogger(__name__)
FILE, AVERAGE = "wsc.pt", "average"  # in each checkpoint's folder
MARK = "wsc"  # the entry in trainer_state.json with the identity of the training, which FILE has too
OF_THE_MODEL = ("eligible", "named_buffers", "peers")  # options


@dataclass(frozen=True)
class Period:
    """The optimiser steps ``start`` to ``end`` of a training, counted from 0, which are consolidated as one task.

    ``before``: the weights before this step are those that a reset blends with.
    """

    before: int
    start: int
    end: int


class WSCCallback(TrainerCallback):
    """Consolidates each ``Trainer.train()`` as one task: scores weights in the warm-up, resets once, and averages.

    >>> trainer = Trainer(model, args, train_dataset=task, callbacks=[WSCCallback()])  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    >>> trainer.save_model()  # the average  # doctest: +SKIP

    Its state is saved with each checkpoint, and ``train(resume_from_checkpoint=...)`` resumes exactly. Checkpoints hold
    the current weights and, after the reset, also the average, in ``average/`` for ``from_pretrained``. The average
    becomes the weights when training ends. One callback may serve several tasks, one after another, each with a new
    ``Trainer``. Prefer a constant learning rate: if it decays to 0, the averaged weights hardly differ.

    Leave the callback out in the first task of a model that starts from random weights: there are no weights to
    preserve yet.

    With FSDP2 (``fsdp=True``, or from ``accelerate launch``) elements are ranked over all processes together. The saved
    state is not sharded: training can be resumed with any number of processes.

    Args:
        warmup: fraction of the optimiser steps before the reset.
        importance: the score to rank weights by. The default reads the moments of the Trainer's Adam, which takes no
            memory; ``moment_score()`` works with any optimiser.
        average: when the weights are averaged, in optimiser steps.
        evaluate_average: after the reset, evaluate the average during training.
        periods: the tasks, in order, if one training has several; steps outside them are not consolidated. At the end
            of each, before a checkpoint of that step, its average becomes the weights. To rank by AdamW's moments,
            which continue from task to task, use ``importance=moment_score(source="carried")``. None: the whole
            training is one task.
        save_average: save the average beside each checkpoint, in ``average/``.
        options: options of :class:`WeightSpaceConsolidation`, such as ``retain`` and ``reset``; ``named_buffers`` are
            the model's.

    Raises:
        ValueError, TypeError: an option is out of range, or the Trainer's settings do not support averaging.
        RuntimeError: the checkpoint to resume from was saved without this callback, or its state of the consolidation
            belongs to another training.
    """

    def __init__(
        self,
        warmup: float = 0.25,
        importance: Importance | Callable = moment_score(source="optimizer"),
        average: Average | None = Average(),
        evaluate_average: bool = False,
        periods: Sequence[Period] | None = None,
        save_average: bool = True,
        **options: object,
    ):
        if not 0 <= warmup < 1:
            raise ValueError(f"warmup={warmup!r} is a fraction of the steps: give a number from 0 to less than 1")
        _check_names(options)
        self.warmup = warmup
        self.options = {"importance": importance, "average": average, "reset": Blend(min_warmup=50)} | options
        self.wsc: WeightSpaceConsolidation | None = None
        self.evaluate_average, self.save_average = evaluate_average, save_average
        self.periods = None if periods is None else list(periods)
        self._check_periods()
        self._evaluation: contextlib.ExitStack | None = None  # while the average is evaluated
        self._hook: RemovableHandle | None = None  # on the model
        # Bad options raise here, not when training begins; those about the parameters of the model need it.
        general = {name: value for name, value in self.options.items() if name not in OF_THE_MODEL}
        layer = torch.nn.BatchNorm1d(1)
        self._built(10**9, layer, general | {"warmup_steps": None})  # of unknown length, so never too short

    def _check_periods(self) -> None:
        last = 0
        for period in self.periods or ():
            if not last <= period.before <= period.start < period.end:
                raise ValueError(f"{period}: give before <= start < end, in order and without overlap")
            if period.start and getattr(self.options["importance"], "source", "") == "optimizer":
                raise ValueError(
                    "periods: the moments of the Trainer's Adam go on from task to task; "
                    "use importance=moment_score(source='carried')"
                )
            last = period.end

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: PreTrainedModel,
        optimizer: Optimizer,
        **others: object,
    ) -> None:
        self._end_evaluation(loaded=model if state.global_step else None)  # of interrupted training
        _check(args, state, model)
        if self._reads_moments() and args.save_only_model and args.save_strategy != "no":
            logger.warning(
                "WSC: checkpoints of the warm-up cannot be resumed from: with save_only_model=True they lack the "
                "moments to rank weights by; leave it out, or set importance=moment_score(), which saves its own"
            )
        if self.periods and self.periods[-1].end > state.max_steps:
            raise ValueError(f"{self.periods[-1]}: the training has {state.max_steps} steps")
        if self._hook:
            self._hook.remove()
        self._hook = model.register_state_dict_pre_hook(lambda *_: self._end_evaluation())  # a checkpoint follows
        if self.wsc:
            self.wsc.detach()  # it is left from interrupted training
        self.wsc = None
        if state.global_step:
            self._resume(args, state, model, optimizer)
        _mark(state)
        if self.periods is None:
            self._follow(state, model, optimizer)

    def _resume(
        self, args: TrainingArguments, state: TrainerState, model: PreTrainedModel, optimizer: Optimizer
    ) -> None:
        """Continue the period that the step to resume from lies in, as the checkpoint has it."""
        # the Trainer takes the folder of the average for that of another adapter of a PEFT model
        if AVERAGE in getattr(model, "peft_config", {}) and model.active_adapter != AVERAGE:
            model.delete_adapter(AVERAGE)
        saved = _saved(args, state)
        for period in self._periods(state):
            last = period.end if self.periods is None else period.end - 1  # a period of several has ended by its save
            if self._first(period) < state.global_step <= last:
                wsc = self._begin(period, model)
                wsc.load_state_dict(saved)
                if period.start < state.global_step:
                    self._check_moments(wsc, optimizer, state.global_step)
                    wsc.attach(optimizer)

    def _check_moments(self, wsc: WeightSpaceConsolidation, optimizer: Optimizer, step: int) -> None:
        """Raise RuntimeError if weights are still to be ranked by moments that the checkpoint lacks."""
        if self._reads_moments() and wsc.phase == "warm-up" and not optimizer.state:
            raise RuntimeError(
                f"cannot resume at step {step}, in the warm-up: the checkpoint lacks the optimizer's state, by which "
                "WSC ranks the weights (it was saved with save_only_model=True). Resume from one that has it, or train "
                "again, without save_only_model or with importance=moment_score(), which saves its own moments"
            )

    def _reads_moments(self) -> bool:
        """Whether weights are ranked by the moments of the Trainer's optimiser."""
        source = getattr(self.options["importance"], "source", "own")
        return self.options["reset"] is not None and source != "own"

    def _periods(self, state: TrainerState) -> list[Period]:
        return [Period(0, 0, state.max_steps)] if self.periods is None else self.periods

    def _warmup(self, period: Period) -> int:
        return warmup_in_steps(self.warmup, period.end - period.start, resets=self.options["reset"] is not None)

    def _first(self, period: Period) -> int:
        """The step before which the consolidation begins; an average without a warm-up starts with its period."""
        return period.before if self._warmup(period) else period.start

    def _follow(self, state: TrainerState, model: PreTrainedModel, optimizer: Optimizer) -> None:
        """Begin or follow a period if the next step is the first to do so."""
        for period in self._periods(state):
            if state.global_step == self._first(period):
                self._begin(period, model)
            if state.global_step == period.start and self.wsc:
                self.wsc.attach(optimizer)

    def _begin(self, period: Period, model: PreTrainedModel) -> WeightSpaceConsolidation:
        self.wsc = self._built(period.end - period.start, model, self.options)
        return self.wsc

    def _built(self, steps: int, model: nn.Module, given: Mapping[str, Any]) -> WeightSpaceConsolidation:
        """The consolidation of this many ``steps``, with the current weights of ``model`` as those before the task."""
        options = WSCOptions(warmup=self.warmup)
        return options.build(model.named_parameters(), steps, named_buffers=model.named_buffers(), **given)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: PreTrainedModel,
        **others: object,
    ) -> None:
        if any(period.end == state.global_step for period in self.periods or ()):
            self._finish(model)
            self.wsc = None
        self._evaluate(control, model)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: PreTrainedModel,
        **others: object,
    ) -> None:
        self._evaluate(control, model)

    def _evaluate(self, control: TrainerControl, model: PreTrainedModel) -> None:
        """Let an evaluation that is due find the average."""
        if self.evaluate_average and control.should_evaluate and self._averaging():
            self._end_evaluation()
            self._evaluation = contextlib.ExitStack()
            self._evaluation.enter_context(self._applied(model))

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: PreTrainedModel,
        optimizer: Optimizer,
        **others: object,
    ) -> None:
        self._end_evaluation()  # not in on_evaluate, which is called after each of several eval datasets
        if self.periods is not None:
            self._follow(state, model, optimizer)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: PreTrainedModel,
        processing_class: PreTrainedTokenizerBase | None = None,
        **others: object,
    ) -> None:
        self._end_evaluation()
        first, sharded = state.is_world_process_zero, bool(self.wsc and self.wsc.peers)
        if not (first or sharded):
            return
        folder = _folder(args, state.global_step)
        saved = gathered(self.wsc.state_dict(), keep=first) if self.wsc else {}  # between two periods
        if first:
            partial = folder / f".{FILE}.partial"
            torch.save(saved | {"training": _training_of(state), "global_step": state.global_step}, partial)
            os.replace(partial, folder / FILE)
        if not self.save_average or not self._averaging() or not hasattr(model, "save_pretrained"):
            return
        with self._applied(model):
            weights: dict[str, Any] = {"state_dict": _whole_weights(model)} if sharded else {}
            if first:
                model.save_pretrained(folder / AVERAGE, **weights)
        if first and processing_class is not None:
            processing_class.save_pretrained(folder / AVERAGE)

    def _end_evaluation(self, loaded: PreTrainedModel | None = None) -> None:
        """Give the model its own weights again, but leave those of a ``loaded`` model as they are."""
        if not self._evaluation:
            return
        weights = []
        if loaded is not None:
            drop_gathered(loaded)
            weights = [(weight, weight.detach().clone()) for weight in (*loaded.parameters(), *loaded.buffers())]
        self._evaluation.close()
        self._evaluation = None
        with torch.no_grad():
            for weight, value in weights:
                weight.copy_(value)

    def _averaging(self) -> bool:
        return bool(self.wsc and self.wsc.has_average)

    @contextlib.contextmanager
    def _applied(self, model: PreTrainedModel) -> Iterator[None]:
        """A context in which the model's weights are the average."""
        assert self.wsc
        drop_gathered(model)
        with self.wsc.applied():
            yield
            drop_gathered(model)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: PreTrainedModel,
        **others: object,
    ) -> None:
        if self._hook:
            self._hook.remove()
        self._finish(model)

    def _finish(self, model: PreTrainedModel) -> None:
        """End the task: the average becomes the weights."""
        self._end_evaluation()
        if not self.wsc:
            return
        self.wsc.detach()
        if self.wsc.phase == "warm-up":
            logger.warning(
                "WSC: training ended in the warm-up, after %d of %s steps: the weights stay as they are",
                self.wsc.steps,
                self.wsc.warmup_steps,
            )
        else:
            drop_gathered(model)
            self.wsc.finish()


def _check_names(options: Mapping[str, object]) -> None:
    """Raise TypeError if an option of the callback is none of :class:`WeightSpaceConsolidation`."""
    known = inspect.signature(WeightSpaceConsolidation).parameters.keys() - {"named_parameters"}
    arguments = inspect.signature(WSCCallback).parameters.keys() - {"options"}
    for name, value in options.items():
        if name in known:
            continue
        places = [
            f"{argument}={rule.__name__}({name}={value!r})"
            for argument, rule in (("reset", Blend), ("average", Average))
            if name in rule.__dataclass_fields__
        ]
        near = [f"did you mean '{alike}'?" for alike in difflib.get_close_matches(name, known | arguments, n=1)]
        all_known = f"known: {', '.join(sorted(known | arguments))}"
        hint = f"give {' or '.join(places)}" if places else next(iter(near), all_known)
        raise TypeError(f"WSCCallback has no option '{name}'; {hint}")


def _check(args, state, model):
    if state.is_hyper_param_search and args.save_strategy != "no":
        raise ValueError("WSCCallback saves no state in a hyper-parameter search: set save_strategy='no'")
    if args.load_best_model_at_end:
        raise ValueError("load_best_model_at_end=True would replace the average by a checkpoint: leave it out")
    if args.deepspeed or getattr(args, "deepspeed_plugin", None):
        raise ValueError(
            "WSCCallback does not support DeepSpeed: leave deepspeed out and shard by FSDP2, with fsdp=True and "
            "fsdp_config={'transformer_layer_cls_to_wrap': [the class of the model's layers]}; docs/huggingface.md has "
            "what takes the place of each ZeRO stage"
        )
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError("WSCCallback needs FSDP2, not FSDP1: set fsdp_config={'version': 2}")


def drop_gathered(model: nn.Module) -> None:
    """Free the layers that FSDP2 keeps gathered after a forward pass, to gather them again from the current weights."""
    for module in model.modules():
        if hasattr(module, "reshard") and hasattr(module, "unshard"):
            cast("FSDPModule", module).reshard()


def _whole_weights(model):
    """The state dict of a sharded model, on the CPU of the first process; {} elsewhere."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _mark(state: TrainerState) -> None:
    """Give a new training an identity, which each ``trainer_state.json`` repeats."""
    _callbacks(state).setdefault(MARK, {"args": {}, "attributes": {"training": uuid.uuid4().hex}})


def _training_of(state: TrainerState) -> str | None:
    """The identity of the training; None in checkpoints without this callback."""
    return _callbacks(state).get(MARK, {}).get("attributes", {}).get("training")


def _callbacks(state: TrainerState) -> dict[str, dict[str, dict[str, str]]]:
    """The states of callbacks by name. The annotation in transformers has what they are made of, too."""
    return cast(dict[str, dict[str, dict[str, str]]], state.stateful_callbacks)


def _folder(args, step):
    return Path(args.output_dir) / f"checkpoint-{step}"


def _saved(args, state):
    """What was saved at this step of this training."""
    step = state.global_step
    paths = [_folder(args, step) / FILE]
    if isinstance(args.resume_from_checkpoint, str):
        paths.insert(0, Path(args.resume_from_checkpoint) / FILE)
    states = [torch.load(path, map_location="cpu", weights_only=True) for path in paths if path.is_file()]
    if not states:
        raise RuntimeError(
            f"cannot resume at step {step}: {paths[-1]} does not exist. The checkpoint was saved without WSCCallback, "
            "or is elsewhere (then also set TrainingArguments(resume_from_checkpoint=...) to its folder)"
        )
    for saved in states:
        if (saved.get("training"), saved.get("global_step")) == (_training_of(state), step):
            return saved
    raise RuntimeError(
        f"cannot resume at step {step}: the {FILE} that was found is of another training, or of another step; set "
        "TrainingArguments(resume_from_checkpoint=...) to the folder of the checkpoint"
    )
