"""Unknown keys. A mistyped one is told before torch is imported, which takes seconds."""

import ast
import functools
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path

from pycil_wsc.config import pilot_files, pycil_files
from pycil_wsc.config.dropped import refuse_dropped
from pycil_wsc.config.image_config import BACKBONE_OPTION, KEYS
from pycil_wsc.errors import UserError, did_you_mean, shown
from pycil_wsc.files import Json

DIRECTIVES = {"budget"}  # keys whose value is an object, not a group of keys


def refuse_mistyped(flat: Mapping[str, Json]) -> None:
    """Raise a :class:`UserError` for a key that no class-incremental run can have.

    What only an import can tell is left to :func:`refuse_unknown`: the keys of language models and of other packages'
    learners.
    """
    language_model = any(name.partition(".")[0] == "llm" for name in flat)
    if language_model or _extended() or flat.keys() <= {*KEYS, *DIRECTIVES} or own_names() is None:
        return
    elsewhere = {*pycil_files.alias_names(), *pycil_files.STOCK, *pilot_files.names_in(flat)}
    elsewhere |= {name for name, value in flat.items() if value == {}}
    elsewhere |= {name for name in flat if pycil_files.is_configuration(name, flat.get("model_name"))}
    ours = [name for name in refuse_dropped(flat) if name not in elsewhere and not name.startswith(BACKBONE_OPTION)]
    refuse_unknown(ours, {*KEYS, *(own_names() or ()), *DIRECTIVES})


@functools.cache
def _extended() -> bool:
    """Whether other packages may have learners of their own; the registry, too, asks once in each process."""
    try:
        return bool(entry_points(group="pycil_wsc"))
    except Exception:  # the registry says what is wrong
        return True


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


@functools.cache
def own_names() -> frozenset[str] | None:
    """The keys that the package's learners declare as their own, read from their files without importing these.

    None if a file cannot be read: the registry says what is wrong with it.
    """
    names = set()
    for path in Path(__file__).parents[1].glob("methods/**/*.py"):
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Options"):
                names |= {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}  # type: ignore
    return frozenset(names)
