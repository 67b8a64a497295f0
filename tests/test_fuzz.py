"""Attacks that once succeeded, and a fixed number of the fuzzer's own: see ``tests/fuzz.py``."""

import random
import re

import findings
import fuzz
import pytest
from attacks import ROOT, new_place


@pytest.mark.parametrize("finding", findings.FIXED)
def test_what_once_failed_is_answered(finding):
    findings.check(finding)


@pytest.mark.parametrize("file", findings.HELD)
def test_a_finding_that_is_no_fixed_case_has_its_test(file):
    there = re.findall(r"^def (test_\w+)\(", (ROOT / "tests" / file).read_text(), re.MULTILINE)
    assert set(findings.HELD[file].values()) <= set(there)


def test_damaged_checkpoints_and_results_are_lines():
    for number in range(3):
        with new_place() as place:
            fuzz.hostile_folder(place, random.Random(number))


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_attacks_at_random(first):
    for number in range(first, first + 50):
        fuzz.attack(number)
