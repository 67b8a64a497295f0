"""PyCIL's JSON files as they are: its other names for keys and values become ours."""

import re
from collections.abc import Mapping
from typing import Any

ALIASES = {"init_epochs": "init_epoch", "boosting_epochs": "epochs", "lr": "lrate"}  # in foster.json
STOCK = {"skip": False, "debug": False, "t_max": None}  # in memo.json: nothing here to turn on


def our_names(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The keys under our names. One that has no counterpart may stand at its stock value, and is left out."""
    flat = {ALIASES.get(name, name): value for name, value in flat.items() if name not in STOCK or value != STOCK[name]}
    if str(flat.get("convnet_type")).startswith("memo_"):
        flat["convnet_type"] = flat["convnet_type"].removeprefix("memo_")
    return flat | {"device": _first_device(flat["device"])} if "device" in flat else flat


def _first_device(device: Any) -> Any:
    """PyCIL's ``["0", "1"]``, ``[0]`` or ``[-1]`` as one of our names; anything else as it is."""
    if isinstance(device, list) and device:
        device = device[0]
    if isinstance(device, int) or (isinstance(device, str) and re.fullmatch(r"-?\d+", device)):
        return "cpu" if int(device) < 0 else f"gpu:{int(device)}"
    return device
