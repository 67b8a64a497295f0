"""Checks that involve several keys, and checks that names are registered."""

import re
from typing import TYPE_CHECKING

from pycil_wsc import registry
from pycil_wsc.config.image_config import KEYS, Config
from pycil_wsc.config.run_config import RunConfig
from pycil_wsc.consolidation.options import EpochOptions
from pycil_wsc.data.data_options import ALL, check_domains
from pycil_wsc.errors import UserError, did_you_mean, plural, shown
from pycil_wsc.keys import declared, having
from pycil_wsc.methods.consolidation.wsc_keys import WSCKeys

if TYPE_CHECKING:
    from pycil_wsc.data.tasks.tasks import TaskSequence
    from pycil_wsc.training.plan import Plan

LONGEST_NAME = 255  # bytes in a file name
FIRST_TASKS = "first_tasks"  # in ``out``: the first tasks that runs share


def check(config: Config) -> None:
    """Raise a :class:`UserError` if the keys of a class-incremental run do not fit together."""
    for milestones, epochs in ((name, key.within) for name, key in KEYS.items() if key.within):
        values = getattr(config, milestones)
        end = getattr(config, epochs)
        if list(values) != sorted(values) or any(not 0 < value < end for value in values):
            raise UserError(
                f"{milestones}: {list(values)} must be increasing and within the {end} epochs of '{epochs}'"
            )
    _check_rates(config)
    _check_augmentation(config)
    method = registry.learners[config.model_name].Plan(config)
    consolidates = config.consolidate or method.consolidates
    if consolidates and config.wsc.trigger == "held_out" and config.fixed_memory and config.memory_per_class < 2:
        raise UserError(
            "wsc.trigger: 'held_out' needs at least two exemplars per class, but memory_per_class is "
            f"{config.memory_per_class}; raise it, or use 'training_loss'"
        )
    if consolidates and config.wsc.importance == "fisher" and config.grad_checkpointing:
        raise UserError("wsc.importance: 'fisher' does not work with grad_checkpointing; leave one of the two out")
    if config.batch_norm_parts > 1 and config.grad_checkpointing:
        raise UserError("batch_norm_parts: does not work with grad_checkpointing; leave one of the two out")
    _check_wsc(config.wsc)
    _check_backbone(config, method)
    _check_memory(config, method)
    _check_stream(config, method)
    for name in config.analyse:
        registry.analyses[name]
    reason = _why_not_consolidated(method) if config.consolidate else None
    if reason:
        raise UserError(f"consolidate: '{config.model_name}' {reason}; leave the key out")
    size = config.memory_keys[1]
    if method.needs_exemplars and not getattr(config, size):
        raise UserError(f"{size}: '{config.model_name}' needs exemplars; give a number above 0, or use 'finetune'")
    problem = method.check()
    if problem:
        raise UserError(problem)
    for name in config.tasks or [config.dataset]:
        if not name.startswith(("npz:", "folder:")):
            registry.check_dataset(name)
    for name in having(KEYS, instead="tasks") if config.tasks else ():
        if getattr(config, name) != KEYS[name].default:
            raise UserError(
                f"{name}: cannot be combined with 'tasks', which define their own classes and order; leave it out"
            )
    _check_sizes(config)
    check_device_and_paths(config, ", or a list of GPU numbers")


def remarks(config: Config, manager: "TaskSequence") -> list[str]:
    """Settings without effect, or with one that may surprise, a line each. ``manager``: the tasks of the run."""
    lines = _remarks_on_tasks(config, manager)
    method = registry.learners[config.model_name].Plan(config)
    held = config.wsc.average_lr if config.wsc.holds_rate else None
    if (config.consolidate or method.consolidates) and held is not None and held > config.lrate:
        lines.append(
            f"wsc.average_lr: after the warm-up the learning rate rises from lrate {config.lrate:g} to {held:g}; "
            "set it to lrate, or to null to keep the schedule"
        )
    if not method.uses_memory or config.memory_bytes is not None:
        return lines
    unused, used = config.memory_keys
    usual = registry.learner_defaults[config.model_name].get(unused, KEYS[unused].default)
    if getattr(config, unused) != usual and unused not in method.also_reads():
        because = shown(config.fixed_memory)
        if config.by_step and not config.fixed_memory:
            because += ", the default with memory_update 'step'"
        value = getattr(config, used)
        lines.append(f"{unused}: has no effect with fixed_memory {because}; {used} ({value}) is used instead")
    images = len(manager.train_targets)
    largest = manager.largest_class()
    if config.fixed_memory and largest < config.memory_per_class < ALL:
        lines.append(
            f"memory_per_class: {config.memory_per_class} is more than any class has images (at most {largest}); "
            "all images are kept"
        )
    given = config.memory_size != KEYS["memory_size"].default
    if given and not config.fixed_memory and images < config.memory_size < ALL:
        lines.append(f"memory_size: {config.memory_size} is more than the {images} training images; all are kept")
    return lines


def _remarks_on_tasks(config: Config, manager: "TaskSequence") -> list[str]:
    *others, last = [task.num_new for task in manager.tasks]
    if config.is_stream or config.increments or not others or last == config.increment:
        return []
    return [f"increment: the last task has {plural(last, 'class')}, not {config.increment} ({manager.in_words()})"]


def _check_sizes(config: Config) -> None:
    """Of the keys that split a data set into tasks, one decides."""
    for name in ("init_cls", "increment") if config.increments else ():
        if getattr(config, name) != KEYS[name].default:
            raise UserError(f"{name}: cannot be combined with 'increments', which has every task; leave it out")
    for name in ("init_cls", "increment", "increments", "shuffle") if config.domains else ():
        if getattr(config, name) != KEYS[name].default:
            raise UserError(f"{name}: cannot be combined with 'domains', each of which has all classes; leave it out")
    check_domains(config.domains)


def _check_memory(config: Config, method: "Plan") -> None:
    if config.memory_update not in method.memory_updates:
        other = method.memory_updates[0]
        able = sorted(name for name, learner in registry.learners.items() if "step" in learner.Plan.memory_updates)
        others = f", or use another method ({', '.join(able)})" if config.memory_update == "step" else ""
        raise UserError(
            f"memory_update: '{config.model_name}' chooses its exemplars by {other}, not by {config.memory_update}; "
            f"leave the key out{others}"
        )
    if config.head == "all" and "step" not in method.memory_updates and not method.any_head:
        raise UserError(f"head: '{config.model_name}' needs a head that grows; leave the key out")
    if config.exemplars == "balanced" and config.fixed_memory:
        raise UserError("exemplars: 'balanced' divides memory_size among the classes; set fixed_memory to false")
    if not config.by_step:
        registry.exemplars[config.exemplars]
        return
    if config.class_balance != "none":
        raise UserError(
            "class_balance: has no effect with memory_update 'step', whose batches are those of the stream; leave it "
            "out, or use exemplars 'balanced'"
        )
    if (config.consolidate or method.consolidates) and config.wsc.trigger == "held_out":
        raise UserError("wsc.trigger: 'held_out' does not work with memory_update 'step'; use another trigger")


def _check_stream(config: Config, method: "Plan") -> None:
    """Of one pass, and of tasks that share classes."""
    if config.online:
        lengths = vars(config) | vars(config.options)
        several = [name for name in ("init_epoch", *method.epoch_keys) if lengths[name] != 1]
        if several and set(several) <= {"init_epoch", "epochs"}:
            raise UserError(f"online: each image is seen once, but '{several[0]}' is not 1; leave it out")
        if several or not method.one_phase or method.starts_anew:
            raise UserError(f"online: '{config.model_name}' needs several passes over its images; use another method")
    if config.blurry and not (config.by_step and method.task_free):
        able = sorted(name for name, learner in registry.learners.items() if learner.Plan.task_free is True)
        option = "set task_free, or " if hasattr(config.options, "task_free") else ""
        raise UserError(
            f"blurry: '{config.model_name}' needs to know the tasks; {option}use another method with memory_update "
            f"'step' ({', '.join(able)})"
        )
    if config.blurry and (not config.whole_head or config.max_tasks is not None):
        name = "head" if not config.whole_head else "max_tasks"
        raise UserError(f"blurry: a task has images of all classes of the run; leave '{name}' out")


def _check_backbone(config: Config, method: "Plan") -> None:
    if config.convnet_type.startswith("timm:"):
        from pycil_wsc.networks.timm_models import check_name, check_options

        check_name(config.convnet_type)
        check_options(config.convnet_options)
        return
    registry.check_backbone_options(config.convnet_type, config.convnet_options)
    for name in ("pretrained", "grad_checkpointing"):
        if getattr(config, name) is False:
            continue
        if method.tunes:
            raise UserError(
                f"convnet_type: '{config.model_name}' tunes a vision transformer of timm; set it to one, such as "
                f"timm:vit_base_patch16_224, not to '{config.convnet_type}'"
            )
        raise UserError(f"{name}: applies to timm models only (timm:NAME), not to '{config.convnet_type}'")


def _check_augmentation(config: Config) -> None:
    given = [name for name in ("padding", "brightness") if getattr(config, name) is not None]
    if config.augmentation == "timm" and given:
        raise UserError(f"{given[0]}: has no effect with 'augmentation' \"timm\"; leave the key out")
    for name in ("mean", "std"):
        values = getattr(config, name)
        if values is not None and len(values) != 3:
            raise UserError(f"{name}: expected three numbers, one of each channel, got {list(values)}")


def _check_rates(config: Config) -> None:
    registry.optimizers[config.optimizer]
    if len(config.betas) != 2:
        raise UserError(f"betas: expected two numbers, got {list(config.betas)}")
    lengths = vars(config) | vars(config.options)
    method = registry.learners[config.model_name].Plan(config)
    for name in ("init_epoch", *method.epoch_keys):
        if name in method.own_schedules:
            continue  # they have no warm-up
        end = lengths[name]
        if config.warmup_epochs >= end:
            raise UserError(f"warmup_epochs: {config.warmup_epochs} must be less than the {end} epochs of '{name}'")
    for name in ("init_lr", "lrate"):
        base = getattr(config, name)
        if config.scheduler != "steplr" and config.min_lr > base:
            raise UserError(f"min_lr: {config.min_lr} is above '{name}', which is {base}; make it smaller")


def _why_not_consolidated(method: "Plan") -> str | None:
    if method.consolidates:
        return "already consolidates"
    if method.averages:
        return "averages the weights itself"
    return None if method.one_phase else "does not train each task in one phase"


def _check_wsc(options: WSCKeys) -> None:
    known = declared(EpochOptions)
    for name, registered in (("importance", registry.importances), ("reset", registry.resets)):
        value = getattr(options, name)
        names = {*known[name].choices, *registered}
        if value not in names:
            raise UserError(f"unknown wsc.{name} '{value}'{did_you_mean(value, names)}")


def check_device_and_paths(config: RunConfig, described: str = "") -> None:
    """Raise a :class:`UserError` if ``device``, ``prefix``, ``out`` or ``data_root`` is malformed.

    All kinds of runs have these keys. Whether this machine has the device is asked of torch, before the first run.
    ``described``: further forms of ``device``, in words.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*(:[0-9]{1,4})?", config.device):
        names = "auto, cpu, cuda, mps or xpu, or one of these with a number"
        raise UserError(f"device: '{shown(config.device)}' is not {names}{described}")
    if config.prefix == FIRST_TASKS:
        raise UserError(f"prefix: '{FIRST_TASKS}' is the folder of shared first tasks; choose another name")
    if not config.out:
        raise UserError("out: is empty; give the folder of the results, such as runs")
    if not re.fullmatch(r"[\w.-]+", config.prefix) or config.prefix in (".", ".."):
        raise UserError(
            f"prefix: '{shown(config.prefix)}' must be a folder name of letters, digits, dots, dashes and underscores"
        )
    for name in ("prefix", "out", "data_root"):
        _check_path(name, getattr(config, name))
    if config.out.startswith("~"):
        raise UserError(f"out: '{shown(config.out)}' begins with ~, which only a shell expands; give the full path")


def _check_path(name: str, path: str) -> None:
    """Raise a :class:`UserError` for a path that no file system accepts or that logs and reports cannot print."""
    try:
        longest = max(len(part.encode()) for part in path.split("/"))
    except UnicodeEncodeError:
        raise UserError(f"{name}: '{shown(path)}' is not UTF-8; choose or rename the folder") from None
    if longest > LONGEST_NAME:
        raise UserError(f"{name}: '{shown(path)}' has a name of {longest} bytes; the limit is {LONGEST_NAME}")
    if "\0" in path:
        raise UserError(f"{name}: '{shown(path)}' has a zero byte; choose another folder")
