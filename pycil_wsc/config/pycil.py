"""Translates PyCIL's JSON files: keys and values that have other names there are renamed to ours."""

import re
from collections.abc import Mapping
from typing import Any

from pycil_wsc import registry
from pycil_wsc.errors import UserError

# methods that are not built in
OTHERS = ("acil", "beefiso", "coil", "ds-al", "fetril", "il2a", "pass", "podnet", "rmm-foster")
OTHERS += ("rmm-icarl", "ssre", "tagfex")
ALIASES = {  # in the file of a method
    "foster": {"init_epochs": "init_epoch", "boosting_epochs": "epochs", "lr": "lrate"},
    "aper_finetune": {"trained_epoch": "init_epoch", "tuned_epoch": "epochs", "finetune_lr": "lrate"},
}
STOCK = {"skip": False, "debug": False, "t_max": None}  # in memo.json: not supported here, ignored at these values


def alias_names() -> set[str]:
    """The names that only PyCIL's files of some methods have."""
    return set().union(*ALIASES.values())


def our_names(file: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the keys of a method's file. A key without a counterpart is dropped if it has its stock value.

    Raises a :class:`UserError` for a key that is given under both names.
    """
    aliases = ALIASES.get(str(file.get("model_name")).lower(), {})
    for name, ours in aliases.items():
        if name in file and ours in file:
            raise UserError(f"{name}: is PyCIL's name of {ours}, which is given, too; leave one of the two out")
    return {aliases.get(name, name): value for name, value in file.items() if name not in STOCK or value != STOCK[name]}


def our_values(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the values of ``convnet_type`` and ``device``."""
    flat = dict(flat)
    if str(flat.get("convnet_type")).startswith("memo_"):
        flat["convnet_type"] = flat["convnet_type"].removeprefix("memo_")
    return flat | {"device": _first_device(flat["device"])} if "device" in flat else flat


def _first_device(device: Any) -> Any:
    """Convert PyCIL's ``["0", "1"]``, ``[0]`` or ``[-1]`` to one device name; anything else is returned unchanged."""
    first: Any = device[0] if isinstance(device, list) and device else device
    if re.fullmatch(r"-?[0-9]{1,4}", str(first)):
        return "cpu" if int(first) < 0 else f"gpu:{int(first)}"
    return first


def refuse_other_method(model_name: str) -> None:
    """Raise a :class:`UserError` for a PyCIL method that is not built in."""
    if model_name.lower() in OTHERS:
        built_in = ", ".join(sorted(registry.learners))
        raise UserError(
            f"model_name: '{model_name}' is a PyCIL method that is not built in (built in: {built_in}); "
            "run it in a checkout of PyCIL: python -m pycil_wsc.plugins.pycil --pycil PyCIL --config FILE "
            "(docs/pycil.md)"
        )


def refuse_alias(name: str) -> None:
    """Raise a :class:`UserError` for a name that is accepted in the PyCIL files of some methods only."""
    files = [f"{method}.json" for method, aliases in ALIASES.items() if name in aliases]
    if files:
        ours = {aliases[name] for aliases in ALIASES.values() if name in aliases}
        instead = "init_lr (first task) or lrate (later tasks)" if name == "lr" else " or ".join(sorted(ours))
        raise UserError(f"{name}: is accepted in PyCIL's {' and '.join(files)} only; use {instead}")
