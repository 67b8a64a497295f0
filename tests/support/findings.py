"""Regression tests: attacks that once succeeded, with the required outcome of each.

``FIXED``: what is done at a :class:`attacks.Place`, the exit code, and what is printed.
"""

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from support.attacks import Place, answer, new_place, ordinary_user
from support.small_runs import Killed, killed_at

Answer = tuple[int, str, str]
REFUSED: dict[str, tuple[Any, str]] = {  # keys, or the text of the file -> the error message
    "an integer of 5,000 digits": ('{"epochs": ' + "1" * 5000 + "}", "not valid JSON"),
    "nested too deep, and closed": ("[" * 100_000 + "]" * 100_000, "config.json: not valid JSON"),
    "a prefix with a line break": ({"prefix": "a\nb"}, r"prefix: 'a\nb'"),
    "a value with a line break": ({"model_name": "a\nb"}, r"a\nb"),
    "an output path that is too long": ({"out": "/".join(["x" * 200] * 30)}, "cannot be searched (File name too long)"),
    "an output folder that begins with a tilde": ({"out": "~/runs"}, "only a shell expands"),
    "an unknown user's file": ({"dataset": "npz:~nosuchuser/x"}, "nosuchuser"),
    "an unknown importance, of which there are six": ({"wsc.importance": "momnet"}, "did you mean 'moment'?"),
    "a number in place of a list of two types": ({"classes": 0.5}, "expected a list of whole numbers or strings"),
}
OPTIONS: dict[str, tuple[list[str], str]] = {  # options of the command line -> the error message
    "workers that are no number": (["--workers", "many"], "--workers"),
    "an unknown option": (["--nonsense"], "--nonsense"),
    "an option with a line break": (["--a\nb"], r"--a\nb"),
    "an option without its value": (["--set"], "--set"),
    "a folder that is not UTF-8, as an option": (["--out", "a\udcff"], "is not UTF-8"),
}


def refused(keys: Any, place: Place) -> Answer:
    if isinstance(keys, dict):
        return place.run(keys, "--dry-run")
    path = place.folder / "config.json"
    path.write_text(keys)
    return answer(["--config", str(path), "--dry-run"])


def with_options(options: list[str], place: Place) -> Answer:
    return place.run({}, *options)


# ---- runs that are harmed --------------------------------------------------------------------------------------------

STOPPABLE = {"checkpoint_seconds": 0}


def finished(place: Place, **keys: Any) -> Path:
    """The folder of a finished run."""
    assert place.run(keys)[0] == 0
    return next(place.out.rglob("result.json")).parent


def killed(place: Place, name: str) -> Path:
    """The file ``name`` that a run had left when it was killed in its first task or just after."""
    with contextlib.suppress(Killed), killed_at(2):
        place.run(STOPPABLE)
    return next(place.out.rglob(name))


def resumed(place: Place) -> Answer:
    killed(place, "checkpoint.pt")
    return place.run(STOPPABLE)


def unreadable(name: str, place: Place) -> Answer:
    """A run's files, or its data, without permissions."""
    folder = finished(place)  # import everything that a run imports
    path = {"data": place.data, "out": place.out}.get(name, folder / name)
    if name == "checkpoint.pt":
        (folder / "result.json").unlink()
        path.write_bytes(b"")
    with ordinary_user(place.folder):
        path.chmod(0)
        try:
            return place.run(STOPPABLE)
        finally:
            path.chmod(0o700)


def status_of_an_unreadable_folder(place: Place) -> Answer:
    finished(place)
    with ordinary_user(place.folder):
        place.out.chmod(0)
        try:
            return place.run({}, "--status")
        finally:
            place.out.chmod(0o700)


def class_folder_that_is_not_utf8(place: Place) -> Answer:
    for part in ("train", "val"):
        for number, name in enumerate([b"caf\xe9", b"tea"]):
            folder = place.folder / "images" / part / os.fsdecode(name)
            folder.mkdir(parents=True)
            for image in range(2):
                Image.new("RGB", (8, 8), (90 * number, 40 * image, 0)).save(folder / f"{image}.png")
    return place.run({"dataset": f"folder:{place.folder / 'images'}", "image_size": 8, "num_workers": 0})


Attack = Callable[[Place], Answer]
FIXED: dict[str, tuple[Attack, int, str]] = {  # finding -> (action, exit code, output)
    **{name: (functools.partial(refused, keys), 2, says) for name, (keys, says) in REFUSED.items()},
    **{name: (functools.partial(with_options, options), 2, says) for name, (options, says) in OPTIONS.items()},
    "a stopped run does not say on the console where it resumes": (resumed, 0, "resumes with train epoch"),
    "an output folder that cannot be searched": (functools.partial(unreadable, "out"), 2, "cannot be searched"),
    "the status of such a folder": (status_of_an_unreadable_folder, 2, "cannot be searched (Permission denied)"),
    "a data file that cannot be read": (functools.partial(unreadable, "data"), 2, "(Permission denied); make it read"),
    "a result that cannot be read": (functools.partial(unreadable, "result.json"), 1, "denied); make it readable"),
    "a checkpoint that cannot be read": (
        functools.partial(unreadable, "checkpoint.pt"),
        1,
        "denied); make it readable",
    ),
    "a class folder whose name is not UTF-8": (class_folder_that_is_not_utf8, 0, "Report: "),
}


def check(finding: str) -> None:
    """Repeat the attack ``finding`` of ``FIXED`` in a folder of its own; raises an AssertionError if it succeeds."""
    attack, code, says = FIXED[finding]
    with new_place() as place:
        ended, out, errors = attack(place)
    printed = out + errors
    assert ended == code and says in printed, f"exit code {ended}, not {code} with '{says}': {printed}"
    assert "traceback in log.txt" not in printed and "error:" not in printed or code == 2, printed
