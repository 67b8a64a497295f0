"""Unknown keys."""

from collections.abc import Collection, Iterable

from pycil_wsc.config import pilot_files, pycil_files
from pycil_wsc.config.image_config import BACKBONE_OPTION
from pycil_wsc.errors import UserError, did_you_mean, shown

DIRECTIVES = {"budget"}  # keys whose value is an object, not a group of keys


def refuse_unknown(names: Iterable[str], known: Collection[str], hint: str = "") -> None:
    """Raise a :class:`UserError`, which ends with ``hint``, for a name that is not a ``known`` key."""
    groups = {name.partition(".")[0] for name in (*known, BACKBONE_OPTION) if "." in name}
    for name in names:
        if name in groups:
            raise UserError(f"{name}: is a group of keys; set one of them ({name}.KEY), or give an object")
        if name not in known:
            pycil_files.refuse_alias(name)
            pilot_files.refuse_alias(name)
            near = did_you_mean(name, known) if name else ""
            raise UserError(f"unknown key '{shown(name)}'{near}{hint}")
