"""What several tests share: see ``test_torchrun.py``."""

import pytest


def nearly(value, wanted):
    """Whether two JSON values are equal up to rounding."""
    if isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(nearly(value[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(nearly, value, wanted))
    return value == (pytest.approx(wanted, rel=1e-2, abs=1e-3) if isinstance(wanted, float) else wanted)
