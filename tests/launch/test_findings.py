"""Attacks that once succeeded. The fuzzer itself, ``tests/fuzz.py``, is no part of ``pytest``."""

import random

import pytest
from support import findings
from support.attacks import new_place
from support.damage import damaged, outcome


@pytest.mark.parametrize("finding", findings.FIXED)
def test_what_once_failed_is_answered(finding):
    findings.check(finding)


def damages(path, rng, number):
    """Damage the file ``number`` times, each time another copy of the whole one, which is there again at the end."""
    whole = path.read_bytes()
    for _ in range(number):
        while (content := damaged(whole, rng)) == whole:
            pass
        path.write_bytes(content)
        yield content
    path.write_bytes(whole)


@pytest.mark.slow
def test_damaged_checkpoints_and_results_are_lines():
    """A checkpoint is refused, or the run ends as it would have; a result, which has no checksum, may be taken."""
    rng = random.Random(0)
    with new_place() as place:
        undisturbed = outcome(findings.finished(place, prefix="undisturbed") / "result.json")
        checkpoint = findings.killed(place, "checkpoint.pt")
        result = checkpoint.with_name("result.json")
        accepted, refused = [], []
        for content in damages(checkpoint, rng, 12):
            code, _, errors = place.run(findings.STOPPABLE)
            if code:
                assert code == 1 and f"{checkpoint}: is damaged" in errors and checkpoint.read_bytes() == content
            else:
                assert outcome(result) == undisturbed
                accepted.append(result.unlink())
        assert len(accepted) <= 1, "only what is between the parts of the archive has no checksum"
        assert place.run(findings.STOPPABLE)[0] == 0 and outcome(result) == undisturbed
        for content in damages(result, rng, 10):
            code, _, errors = place.run({})
            assert (code, f"failed: {result.parent}: {result}: " in errors) in ((0, False), (1, True)), errors
            assert result.read_bytes() == content, "it is neither mended nor written anew"
            refused.append(code)
        assert sum(refused) > 5 and place.run({})[0] == 0
