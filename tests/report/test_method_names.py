"""How methods are named in tables and figures."""

import pytest

from pycil_wsc.registry import learners
from pycil_wsc.report.texts import METHODS, method_name


def test_each_registered_method_has_a_name_of_its_own():
    ours = [name for name, learner in learners.items() if learner.__module__.startswith("pycil_wsc.")]
    assert len({METHODS[name]["name"] for name in ours}) == len(ours) > 60


@pytest.mark.parametrize(
    ("method", "name"),
    [("dark_er", "Dark ER"), ("der", "DER"), ("er+wsc", "ER + WSC"), ("mine", "mine"), ("slca beta=2", "SLCA beta=2")],
)
def test_a_method_is_named_as_in_its_paper_and_keys_stay(method, name):
    assert method_name(method) == name
