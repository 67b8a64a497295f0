"""The state that a stopped run resumes from: ``checkpoint.pt`` in its folder, removed when the run has ended."""

from pathlib import Path
from typing import Any

from pycil_wsc.data.fingerprint import changed
from pycil_wsc.errors import UnusableRun
from pycil_wsc.old_formats import load_state

CHECKPOINT = "checkpoint.pt"
PARTS = {"position", "learner", "optimizer", "history", "curves", "confusion", "records", "clock", "peak_memory"}


def read_checkpoint(path: Path, config: Any, data: dict[str, Any]) -> dict[str, Any] | None:
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
    if not isinstance(state, dict) or not PARTS <= state.keys():
        raise UnusableRun(f"{path}: is not a checkpoint of this version; {again}")
    if not config.continues(state.get("identity") or {}):
        raise UnusableRun(f"{path}: was made with other settings; {again}")
    if difference := changed(state.get("data"), data):
        raise UnusableRun(f"{path}: was made with other data ({difference}); restore them, or {again}")
    return state
