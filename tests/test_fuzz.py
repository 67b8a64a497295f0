"""Attacks that once succeeded, and a fixed number of the fuzzer's own: see ``tests/fuzz.py``."""

import random

import fuzz
import pytest

LINE_OF_DEPTH = "[" * 100_000
REFUSED = {  # keys -> what the one line says
    "a seed beyond numpy's": ({"seed": 4294967296}, "seed"),
    "an integer of 400 digits": ({"epochs": 10**400}, "epochs"),
    "a device of 5,000 digits": ({"device": "cuda:" + "1" * 5000}, "device"),
    "a prefix of 300 letters": ({"prefix": "x" * 300}, "prefix"),
    "a prefix with a line break": ({"prefix": "a\nb"}, "prefix"),
    "an unknown key with a line break": ({"a\nb": 1}, r"a\nb"),
    "an output folder that is too long": ({"out": "x" * 300}, "out"),
    "an unknown user's file": ({"dataset": "npz:~nosuchuser/x"}, "nosuchuser"),
    "an unknown user's folder": ({"dataset": "folder:~nosuchuser/x"}, "nosuchuser"),
    "a path with a zero byte": ({"dataset": "folder:a\0b"}, "zero byte"),
    "a path with a surrogate": ({"dataset": "npz:a\ud800"}, "dataset"),
    "a path of 300 letters": ({"dataset": f"folder:{'x' * 300}"}, "too long"),
    "a million threads": ({"threads": 1_000_000}, "threads"),
    "padding of a million": ({"padding": 1_000_000}, "padding"),
    "a negative temperature": ({"model_name": "icarl", "T": -2}, "T"),
    "a temperature of zero": ({"model_name": "wa", "T": 0}, "T"),
    "a negative weight of a loss": ({"model_name": "icarl", "distill": -1}, "distill"),
    "a share above one": ({"model_name": "bic", "split_ratio": 2}, "split_ratio"),
    "epochs below one": ({"model_name": "foster", "compression_epochs": -3}, "compression_epochs"),
    "a beta of two": ({"model_name": "foster", "beta1": 2}, "beta1"),
    "nested too deep": (LINE_OF_DEPTH, "config.json"),
}


@pytest.fixture
def place(tmp_path):
    return fuzz.Place(tmp_path)


@pytest.mark.parametrize("finding", REFUSED)
def test_what_once_was_a_traceback_or_was_accepted_is_one_line(finding, place, tmp_path):
    keys, says = REFUSED[finding]
    if isinstance(keys, dict):
        code, _, error = place.run(keys, "--dry-run")
    else:
        (tmp_path / "config.json").write_text(keys)
        code, _, error = fuzz.answer(["--config", str(tmp_path / "config.json"), "--dry-run"])
    assert code == 2 and says in error


def test_options_of_the_command_line_are_one_line_too(place):
    for arguments in (["--workers", "many"], ["--nonsense"], ["--set"]):
        assert fuzz.answer(["--config", place.config({}), *arguments])[0] == 2


def test_damaged_checkpoints_and_results_are_lines(place):
    for number in range(3):
        fuzz.hostile_folder(place, random.Random(number))


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_attacks_at_random(first):
    for number in range(first, first + 50):
        fuzz.attack(number)
