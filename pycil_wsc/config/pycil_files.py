"""Translates PyCIL's JSON files: keys and values that have other names there are renamed to ours."""

import re
from collections.abc import Callable, Mapping

from pycil_wsc import registry
from pycil_wsc.errors import UserError
from pycil_wsc.files import Json

METHODS = {"beefiso": "beef"}  # their names there and here
OF_FOSTER = {"init_epochs": "init_epoch", "boosting_epochs": "epochs", "lr": "lrate"}
ALIASES = {  # in the file of a method
    "beef": {"init_epochs": "init_epoch", "expansion_epochs": "epochs", "lr": "lrate"},
    "foster": OF_FOSTER,
    "rmm-foster": OF_FOSTER,
    "fetril": {"init_epochs": "init_epoch", "lr": "lrate"},
    "aper_finetune": {"trained_epoch": "init_epoch", "tuned_epoch": "epochs", "finetune_lr": "lrate"},
    "acil": {"init_batch_size": "batch_size"},
    "ds-al": {"init_batch_size": "batch_size"},
}
# their files have a set of keys for each data set, `configurations`, in which `scheduler` is a set of its own
CONFIGURATIONS = "configurations."
OF_DATASET = ("acil", "ds-al")
OF_SCHEDULER = {
    "type": "scheduler",
    "init_lr": "init_lr",
    "init_epochs": "init_epoch",
    "milestones": "init_milestones",
    "decay": "init_lr_decay",
}
SCHEDULERS = {"MultiStep": "steplr", "CosineAnnealing": "cosine"}
STOCK = {"skip": False, "debug": False, "t_max": None, "aug": 1}  # not supported here, ignored at these values
OF_ALL_TASKS = {  # in the files of methods that have one schedule for all tasks
    "lr": ("init_lr", "lrate"),
    "gamma": ("init_lr_decay", "lrate_decay"),
    "epochs": ("init_epoch", "epochs"),
    "weight_decay": ("init_weight_decay", "weight_decay"),
}
# what a file of aper_finetune leaves out, which PyCIL's own does not
OF_APERS_CODE = {"init_epoch": 50, "init_lr": 0.01, "lrate": 0.001, "init_weight_decay": 5e-4, "weight_decay": 0.005}
ONE_SCHEDULE = ("pass", "il2a", "ssre")
STOCK_OF = {
    "ssre": {"mode": "parallel_adapters", "threshold": 0.8},
    "tagfex": {"aug": 2},
    "coil": {"calibration_term": 1.5},  # read there, but overwritten before its first use
    "beef": {"is_compress": False, "reduce_batch_size": False, "T": 2},
}  # the same, in the file of a method


def overridden(file: Mapping[str, Json], overrides: Mapping[str, Json]) -> tuple[dict[str, Json], dict[str, Json]]:
    """The file and the overrides, where an override of a key that only PyCIL's file has is moved into the file.

    If the file has one schedule for all tasks, an override of its keys holds for all tasks, too.
    """
    file = dict(file)
    overrides = dict(overrides)
    method = str(file.get("model_name")).lower()
    if method == "aper_finetune" and "optimizer" in overrides:
        file["optimizer"] = overrides.pop("optimizer")
    if method in ONE_SCHEDULE and "lr" in file:
        if "step_size" in overrides:
            file["step_size"] = overrides.pop("step_size")
            file |= {"epochs": overrides["epochs"]} if "epochs" in overrides else {}
        for name, both in OF_ALL_TASKS.items():
            if name in overrides:
                _refuse_list(name, overrides, method)
                value = overrides[name] if name in both else overrides.pop(name)
                overrides = dict.fromkeys(both, value) | overrides
    return file, overrides


def our_names(file: Mapping[str, Json], dataset: Json = None) -> dict[str, Json]:
    """Rename the keys of a method's file. A key without a counterpart is dropped if it has its stock value.

    ``dataset``: the one on the command line, which replaces the file's. Raises a :class:`UserError` for a key that is
    given under both names.
    """
    method = str(file.get("model_name")).lower()
    if method in METHODS:
        method = METHODS[method]
        file = {**file, "model_name": method}
    if method.startswith("rmm-"):
        _refuse_pretraining(file)
    if method in OF_DATASET:
        file = _for_dataset(file, dataset or file.get("dataset"))
    if method in ONE_SCHEDULE and "lr" in file:
        file = _of_each_task(file, method)
    aliases = ALIASES.get(method, {})
    stock = STOCK | STOCK_OF.get(method, {})
    if method == "tagfex":  # both of its networks are of one kind, whatever the file says
        stock = stock | {"ta_convnet_type": file.get("convnet_type")}
    for name, our_name in aliases.items():
        if name in file and our_name in file:
            raise UserError(f"{name}: is PyCIL's name of {our_name}, which is given, too; leave one of the two out")
    kept = {name: value for name, value in file.items() if name not in stock or value != stock[name]}
    translated = {aliases.get(name, name): value for name, value in kept.items()}
    if method == "aper_finetune" and not aliases.keys().isdisjoint(file):
        return _as_apers_code_has_it(translated)
    return translated


def _as_apers_code_has_it(translated: dict[str, Json]) -> dict[str, Json]:
    """With the constants of PyCIL's code where its file has none. Its "adam" is AdamW, with those of SGD."""
    optimizer = translated.get("optimizer")
    if isinstance(optimizer, list) and "adam" in optimizer:
        raise UserError("optimizer: 'adam' has its own rates in PyCIL's aper_finetune.json; give it in 'runs'")
    translated = OF_APERS_CODE | translated
    return translated | {"optimizer": "adamw"} if optimizer == "adam" else translated


def _for_dataset(file: Mapping[str, Json], dataset: Json) -> dict[str, Json]:
    """The keys of the file, over which those of ``configurations`` for ``dataset`` take precedence."""
    sets = {name.removeprefix(CONFIGURATIONS): keys for name, keys in file.items() if name.startswith(CONFIGURATIONS)}
    flat = {name: value for name, value in file.items() if not name.startswith(CONFIGURATIONS)}
    if not sets:
        return flat
    if not isinstance(dataset, str) or not isinstance(sets.get(dataset), Mapping):
        raise UserError(f"configurations: has no keys for dataset {dataset!r}, only for {', '.join(sets)}; add them")
    flat |= sets[dataset]
    if isinstance(flat.get("scheduler"), Mapping):
        flat |= _schedule(flat.pop("scheduler"))
    return flat


def _schedule(scheduler: Mapping[str, Json]) -> dict[str, Json]:
    """The keys of a nested ``scheduler``. Those without a counterpart stay, and are refused as unknown."""
    if scheduler.get("warmup"):
        raise UserError(
            "scheduler.warmup: PyCIL's warm-up, after which milestones are counted, is not built in; set it to 0, and "
            "for a warm-up give warmup_epochs"
        )
    scheduler = {name: value for name, value in scheduler.items() if name != "warmup"}
    translated = {OF_SCHEDULER.get(name, f"scheduler.{name}"): value for name, value in scheduler.items()}
    if "scheduler" in translated:
        translated["scheduler"] = SCHEDULERS.get(str(translated["scheduler"]), translated["scheduler"])
        if translated["scheduler"] == "cosine":
            translated["min_lr"] = 1e-6  # a constant there
    return translated


def _refuse_pretraining(file: Mapping[str, Json]) -> None:
    """Refuse ``rmm-pretrain.json``, whose learner is RMM's too, but which leaves tasks and rates to a policy."""
    if not {"init_cls", "increments", "domains", "tasks", "m_rate_list", "c_rate_list"} & file.keys():
        raise UserError(
            "init_cls: is missing, as in PyCIL's rmm-pretrain.json, which trains a policy in 200 whole runs and does "
            "not save it; that is not built in: give init_cls, increment and the rates that a policy has chosen "
            "(m_rate_list, c_rate_list), or start PyCIL's rmm_train.py"
        )


def _of_each_task(file: Mapping[str, Json], method: str) -> dict[str, Json]:
    """The keys of PyCIL's one schedule as those of the first task and of later ones."""
    usual = registry.learner_defaults[method]
    changed = {name: value for name, value in file.items() if name not in (*OF_ALL_TASKS, "step_size")}
    for name, both in OF_ALL_TASKS.items():
        _refuse_list(name, file, method)
        if name in file:
            changed |= dict.fromkeys((our_name for our_name in both if our_name not in changed), file[name])
    step = file.get("step_size")
    epochs = file.get("epochs", usual["epochs"])
    if step is not None:
        if type(step) is not int or type(epochs) is not int or step < 1 or epochs > 10_000 * step:
            raise UserError(
                "step_size: needs one whole number above 0, and one number of epochs, at most 10,000 times as large; "
                "or give milestones"
            )
        milestones = list(range(step, epochs, step))
        if milestones != usual["milestones"]:
            changed |= {"init_milestones": milestones, "milestones": milestones}
    return changed


def _refuse_list(name: str, keys: Mapping[str, Json], method: str) -> None:
    if isinstance(keys.get(name), list):
        both = " and ".join(OF_ALL_TASKS[name])
        raise UserError(f"{name}: is one value in PyCIL's file of {method}; give {both} in 'runs'")


def our_values(flat: Mapping[str, Json]) -> dict[str, Json]:
    """Rename the values of ``convnet_type``, ``dataset`` and ``device``."""
    flat = dict(flat)
    if flat.get("dataset") in ("cifar10_aa", "cifar100_aa"):  # with AutoAugment; its ResNet-18 has the stem for CIFAR
        flat = {"augmentation": "autoaugment"} | flat | {"dataset": flat["dataset"].removesuffix("_aa")}
        flat |= _renamed(flat, "convnet_type", lambda name: "resnet18_cifar" if name == "resnet18" else name)
    flat |= _renamed(flat, "convnet_type", lambda name: name.removeprefix("memo_"))
    return flat | {"device": _first_device(flat["device"])} if "device" in flat else flat


def _renamed(flat: Mapping[str, Json], key: str, rename: Callable[[str], str]) -> dict[str, Json]:
    """The ``key`` with its value renamed, or each value of its axis; nothing if it is not given."""
    if key not in flat:
        return {}
    values = flat[key] if isinstance(flat[key], list) else [flat[key]]
    renamed = [rename(value) if isinstance(value, str) else value for value in values]
    return {key: renamed if isinstance(flat[key], list) else renamed[0]}


def _first_device(device: Json) -> Json:
    """Convert PyCIL's ``["0", "1"]``, ``[0]`` or ``[-1]`` to one device name; anything else is returned unchanged."""
    first: Json = device[0] if isinstance(device, list) and device else device
    if re.fullmatch(r"-?[0-9]{1,4}", str(first)):
        return "cpu" if int(first) < 0 else f"gpu:{int(first)}"
    return device


def refuse_alias(name: str) -> None:
    """Raise a :class:`UserError` for a name that is accepted in the PyCIL files of some methods only."""
    files = [f"{method}.json" for method, aliases in ALIASES.items() if name in aliases]
    if files and name in OF_ALL_TASKS:
        files += [f"{method}.json" for method in ONE_SCHEDULE]
    if files:
        replacements = {aliases[name] for aliases in ALIASES.values() if name in aliases}
        instead = "init_lr (first task) or lrate (later tasks)" if name == "lr" else " or ".join(sorted(replacements))
        raise UserError(f"{name}: is accepted in PyCIL's {', '.join(files)} only; use {instead}")
