"""The state that a stopped run resumes from: ``checkpoint.pt`` in its folder, removed when the run has ended."""

from collections.abc import Collection
from pathlib import Path

from pycil_wsc.config.run_config import RunConfig
from pycil_wsc.data.fingerprint import changed
from pycil_wsc.errors import UnusableRun
from pycil_wsc.files import Json
from pycil_wsc.old_formats import load_state
from pycil_wsc.state import State

CHECKPOINT = "checkpoint.pt"
PARTS = {"position", "learner", "optimizer", "history", "curves", "confusion", "records", "clock", "peak_memory"}


def read_checkpoint(path: Path, config: RunConfig, data: dict[str, Json]) -> State | None:
    """Read the checkpoint ``path``; returns None if there is no such file.

    Raises :class:`UnusableRun` if it is damaged, or was made with another configuration or other data.
    """
    again = "delete it to start this run again"
    try:
        state = load_state(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnusableRun(f"{path}: cannot be read ({error.strerror}); make it readable to resume this run") from None
    except ValueError as error:
        raise UnusableRun(f"{path}: is damaged or not a checkpoint of this version ({error}); {again}") from None
    return checked(state, path, PARTS, config, data)


def checked(state: Json, path: Path, parts: Collection[str], config: RunConfig, data: dict[str, Json]) -> State:
    """Return the ``state`` that was read from ``path``.

    Raises :class:`UnusableRun` if it lacks any of its ``parts``, or is of another configuration or other data.
    """
    again = "delete it to start this run again"
    if not isinstance(state, dict) or not state.keys() >= set(parts):
        raise UnusableRun(f"{path}: is not a checkpoint of this version; {again}")
    if not config.continues(state.get("identity") or {}):
        raise UnusableRun(f"{path}: was made with other settings; {again}")
    if difference := changed(state.get("data"), data):
        raise UnusableRun(f"{path}: was made with other data ({difference}); restore them, or {again}")
    return state
