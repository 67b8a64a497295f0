"""Where an error was raised, in words for whoever wrote the code there."""

import numpy as np
import pytest

from pycil_wsc.errors import UserError, did_you_mean, raised_at
from pycil_wsc.keys import Key


def hook(item):
    return np.concatenate([np.zeros((2, 2)), item])  # numpy raises it, for what is done here


class Choices(tuple):
    """The choices of a key, which the package asks as a training loop calls a hook."""

    def __contains__(self, item):
        return hook(np.zeros(3))


@pytest.mark.parametrize(
    "call", [lambda: hook(np.zeros(3)), lambda: Key("k", int, 0, "", choices=Choices("1")).check(1)]
)
def test_an_error_is_placed_in_the_code_that_is_plugged_in_and_not_in_a_library(call):
    with pytest.raises(ValueError) as caught:
        call()
    assert raised_at(caught.value).endswith(f"test_errors.py:{hook.__code__.co_firstlineno + 1}")


def test_an_error_in_the_package_is_placed_there():
    with pytest.raises(UserError) as caught:
        Key("k", int, 0, "").check("text")
    assert raised_at(caught.value).startswith("pycil_wsc/keys.py:")


def test_an_error_that_was_not_raised_has_no_place():
    assert raised_at(ValueError("text")) == ""


def test_a_message_is_never_longer_than_a_screen_and_keeps_its_end():
    text = str(UserError(f"{'k' * 1_000_000}; give a shorter name"))
    assert len(text) < 10_000 and text.endswith("k; give a shorter name")


@pytest.mark.parametrize(
    "name, meant",
    [
        ("der++", "derpp"),
        ("ER-ACE", "er_ace"),
        ("er ace", "er_ace"),
        ("repaly", "replay"),
        ("WSC", "wsc"),
        ("lwg", "lwf"),
    ],
)
def test_names_are_compared_as_they_are_pronounced(name, meant):
    known = ["der", "derpp", "er_ace", "il2a", "lwf", "replay", "wsc"]
    assert did_you_mean(name, known) == f"; did you mean '{meant}'?"


def test_what_is_not_alike_is_not_suggested():
    assert did_you_mean("l2p", ["il2a", "lwf"]) == "; known: il2a, lwf"
