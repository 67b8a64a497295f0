"""How methods are named in tables and figures."""

import pytest

from pycil_wsc.registry import learners
from pycil_wsc.report.texts import METHODS, method_name


def test_each_registered_method_has_a_name_of_its_own():
    names = [METHODS[name]["name"] for name in learners if name in METHODS]
    assert set(learners) <= METHODS.keys()
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("method", "name"),
    [("dark_er", "Dark ER"), ("der", "DER"), ("er+wsc", "ER + WSC"), ("mine", "mine"), ("slca beta=2", "SLCA beta=2")],
)
def test_a_method_is_named_as_in_its_paper_and_keys_stay(method, name):
    assert method_name(method) == name
