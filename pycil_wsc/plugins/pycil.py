"""Weight Space Consolidation in an unmodified PyCIL checkout.

    python -m pycil_wsc.plugins.pycil --pycil ~/PyCIL --config wsc.json

The JSON file is one of PyCIL's. Its ``model_name`` may also be ``wsc`` (PyCIL's Replay, consolidated) or
``wsc_<learner>`` for any of PyCIL's learners that trains one network per task: ``wsc_icarl``, ``wsc_wa``, ``wsc_bic``,
... Options are written ``"wsc.retain": 0.2`` or ``"wsc": {"retain": 0.2}``; they have the names and meanings of the
keys ``wsc.*`` in docs/configuration.md. As in PyCIL, data and logs are in ``data`` and ``logs`` of the current folder.

PyCIL's checkout comes first on ``sys.path``, so its ``utils`` and ``convs`` are imported whatever the current folder
contains.
"""

import argparse
import difflib
import functools
import importlib
import inspect
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pycil_wsc.consolidation import EpochOptions, recompute_batch_norm
from pycil_wsc.consolidation.options import option

MODULES = ("convs", "models", "trainer", "utils")  # PyCIL's top-level modules
PHASES = ("_update_representation", "_train_function", "_run")  # PyCIL's methods that train a later task


class BadInput(Exception):
    """An error that the user can fix, described in one line."""


class Arguments(dict):
    """PyCIL's arguments. Reading one that the JSON file lacks is a :class:`BadInput`."""

    def __missing__(self, name: str) -> NoReturn:
        raise BadInput(f'--config: the file has no "{name}", which PyCIL needs; add it, as in PyCIL\'s exps/*.json')


class Factory(Protocol):
    """PyCIL's ``utils.factory``."""

    get_model: Callable[[str, dict[str, Any]], object]


class Scheduler(Protocol):
    """What PyCIL does with a learning-rate scheduler."""

    def step(self) -> object: ...


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pycil", required=True, type=Path, metavar="FOLDER", help="a checkout of PyCIL")
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="a JSON file in PyCIL's format")
    args = parser.parse_args(argv)
    try:
        run(args.pycil, args.config)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(checkout: Path, config: Path) -> None:
    """Run PyCIL's ``trainer.train`` on the JSON file ``config``, with the consolidated learners in its factory."""
    args, settings = load(config)
    enter(checkout)
    factory = cast(Factory, importlib.import_module("utils.factory"))
    trainer = importlib.import_module("trainer")
    factory.get_model = with_consolidation(factory.get_model, settings)
    # fail early, before any data is loaded
    factory.get_model(args["model_name"], args | {"device": [torch.device("cpu")]})
    trainer.train(Arguments({"config": str(config)} | args))


@dataclass(frozen=True)
class PyCILOptions(EpochOptions):
    """The keys ``wsc.*`` that are available in PyCIL, with the meanings of docs/configuration.md."""

    average_lr: float | str | None = option(
        "initial",
        "constant learning rate after the reset; `initial`: that of the start of the task, PyCIL's `lrate`",
        low=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.average_lr, str) and self.average_lr != "initial":
            raise ValueError(f"average_lr: '{self.average_lr}' is neither a number, null nor 'initial'")


def with_consolidation(
    get_model: Callable[[str, dict[str, Any]], object], settings: PyCILOptions
) -> Callable[[str, dict[str, Any]], object]:
    """PyCIL's ``get_model``, which also accepts ``wsc`` and ``wsc_<learner>``."""

    def get(name: str, args: dict[str, Any]) -> object:
        base = "replay" if name.lower() == "wsc" else name.lower().removeprefix("wsc_")
        if base == name.lower():
            return _make(get_model, name, base, args)
        _refuse(name, base, UNSEEN.get(base))
        learner = _make(get_model, name, base, args)
        _refuse(name, base, _unfit(learner))
        learner.__class__ = consolidated(type(learner), settings)
        return learner

    return get


def _make(get_model, name, base, args):
    try:
        return get_model(base, args)
    except AssertionError:
        raise BadInput(
            f"model_name: '{name}' is not a learner of this checkout; "
            "give one of PyCIL's names, wsc, or wsc_<PyCIL's name>"
        ) from None
    except KeyError as error:
        raise BadInput(f"model_name: '{name}' needs the key {error} in the JSON file; add it") from None
    except ImportError as error:
        raise BadInput(f"model_name: '{name}' cannot be loaded ({error}); install what it needs") from None


def _refuse(name, base, reason):
    if reason:
        raise BadInput(
            f"model_name: '{name}': PyCIL's {base} {reason}; use WSC with learners such as replay, icarl, wa, bic, lwf"
        )


UNSEEN = {  # reasons that :func:`_unfit` cannot see: these learners have one network, and train it
    "fetril": "trains only its head after the first task",
    "ssre": "expands and compresses its network in each task",
}


def _unfit(learner):
    """Why the learner does not train one network in each task, or None."""
    if not isinstance(getattr(learner._network, "convnet", None), torch.nn.Module):
        return "has no single network"
    return None if any(hasattr(learner, phase) for phase in PHASES) else "does not train its network in each task"


def consolidated(learner_class: type, settings: PyCILOptions) -> type:
    """A subclass that trains each task with a consolidation, finished before exemplars, alignment and test."""
    phases = {
        phase: _with_consolidation(getattr(learner_class, phase), settings)
        for phase in ("_init_train", *PHASES)
        if hasattr(learner_class, phase)
    }
    return type(f"WSC{learner_class.__name__}", (learner_class,), phases)


def _with_consolidation(train, settings):
    @functools.wraps(train)
    def phase(
        self: Any,  # a learner of PyCIL
        train_loader: DataLoader[tuple[Tensor, Tensor, Tensor]],
        test_loader: object,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler,
        *rest: object,
        **named: object,
    ) -> object:
        first = self._cur_task == 0 and not settings.first_task
        later = getattr(self, "_wsc_task", None) == self._cur_task  # bias correction, balanced fine-tuning: unchanged
        if first or later:
            return train(self, train_loader, test_loader, optimizer, scheduler, *rest, **named)
        self._wsc_task = self._cur_task
        epochs = _epochs(train, self, (train_loader, test_loader, optimizer, scheduler, *rest), named)
        parameters = self._network.named_parameters()
        try:
            wsc = settings.build(parameters, epochs, len(train_loader)).attach(optimizer)
        except ValueError as error:
            raise BadInput(f"wsc: {error}") from None
        if settings.holds_rate:
            start = settings.held_from(epochs, wsc.warmup_steps or 0)
            scheduler = HeldRate(scheduler, optimizer, start, settings.average_lr, settings.average_anneal)
        result = train(self, train_loader, test_loader, optimizer, scheduler, *rest, **named)
        wsc.finish()
        wsc.detach()
        if settings.average:
            recompute_batch_norm(self._network, (inputs.to(self._device) for _, inputs, _ in train_loader))
        logging.info(
            "WSC: %d steps, %d of them warm-up; resets: %d; weights averaged: %d",
            wsc.steps,
            wsc.warmup_steps,
            wsc.resets,
            wsc.averaged,
        )
        return result

    return phase


def _epochs(train, learner, args, named):
    """PyCIL keeps a phase's number of epochs in an argument, an attribute or a global of the learner's module."""
    bound = inspect.signature(train).bind(learner, *args, **named).arguments
    if "epk" in bound:
        return bound["epk"]
    if train.__name__ == "_train_function":
        return learner._epoch_num
    return train.__globals__["init_epoch" if train.__name__ == "_init_train" else "epochs"]


class HeldRate:
    """Replaces a scheduler that is stepped after each epoch: from epoch ``start`` on, the learning rate follows half a
    cosine to ``value`` in ``anneal`` epochs and then stays constant. ``value="initial"``: the initial rate. A rate of 0
    stays 0.
    """

    def __init__(
        self, scheduler: Scheduler, optimizer: torch.optim.Optimizer, start: int, value: float | str, anneal: int
    ):
        self.scheduler, self.groups, self.start, self.anneal, self.epoch = (
            scheduler,
            optimizer.param_groups,
            start,
            anneal,
            0,
        )
        self.targets = [group["lr"] if value == "initial" else value for group in self.groups]
        self.rates = [group["lr"] for group in self.groups]  # of the last epoch before `start`
        if not start:
            self._hold()

    def step(self) -> None:
        self.epoch += 1
        if self.epoch < self.start:
            self.scheduler.step()
            self.rates = [group["lr"] for group in self.groups]
        else:
            self._hold()

    def _hold(self) -> None:
        done = min(1, (self.epoch - self.start + 1) / self.anneal) if self.anneal else 1
        for group, rate, target in zip(self.groups, self.rates, self.targets, strict=True):
            group["lr"] = rate and target + (rate - target) * (1 + math.cos(math.pi * done)) / 2


def enter(checkout: Path) -> None:
    """Make ``utils``, ``convs``, ``models`` and ``trainer`` import as PyCIL's. Writes nothing into the checkout.

    Puts the checkout first on ``sys.path``, before the current folder, which may have modules of these names, and
    unloads such modules if they are imported already.
    """
    for needed in "trainer.py", "utils/factory.py", "models/base.py":
        if not (checkout / needed).is_file():
            raise BadInput(
                f"--pycil {checkout}: not a checkout of PyCIL, as it has no {needed}; "
                "git clone https://github.com/LAMDA-CL/PyCIL"
            )
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.partition(".")[0] in MODULES]:
        del sys.modules[name]
    sys.path.insert(0, str(checkout.resolve()))


def load(path: Path) -> tuple[dict[str, Any], PyCILOptions]:
    """Read a JSON file: PyCIL's arguments, and the :class:`PyCILOptions` of the consolidation."""
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise BadInput(f"--config {path}: cannot be read ({error.strerror}); give an existing JSON file") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"--config {path}: not valid JSON ({error}); correct the file") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("model_name"), str):
        raise BadInput(f'--config {path}: expected a JSON object with a "model_name"; use one of PyCIL\'s exps/*.json')
    _refuse_scalars(path, raw)
    inner = raw.pop("wsc", {})
    if not isinstance(inner, dict):
        raise BadInput(f'--config {path}: "wsc" must be an object of options, such as {{"retain": 0.2}}')
    dotted = {name.removeprefix("wsc."): raw.pop(name) for name in list(raw) if name.startswith("wsc.")}
    if twice := dotted.keys() & inner.keys():
        raise BadInput(f"--config {path}: wsc.{min(twice)}: is given twice, in a group and with a dot; keep one")
    given = dotted | inner
    if given and not re.match("wsc(_|$)", raw["model_name"].lower()):
        raise BadInput(
            f"--config {path}: wsc: has no effect on '{raw['model_name']}'; use wsc or wsc_{raw['model_name']}, or "
            "leave it out"
        )
    known = [option.name for option in fields(PyCILOptions)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
            raise BadInput(f"--config {path}: wsc: unknown option '{name}'; {hint}")
    try:
        settings = PyCILOptions(**given)
        settings.build(torch.nn.Linear(1, 1).named_parameters(), 100, 100)
    except (ValueError, OverflowError) as error:
        raise BadInput(f"--config {path}: wsc: {error}") from None
    return raw, settings


def _refuse_scalars(path: Path, raw: Mapping[str, Any]) -> None:
    for name, form in (("seed", "[1993]"), ("device", '["0"]')):
        if name in raw and not isinstance(raw[name], list):
            raise BadInput(f"--config {path}: {name}: is {raw[name]!r}; PyCIL takes a list, such as {form}")


if __name__ == "__main__":
    sys.exit(main())
