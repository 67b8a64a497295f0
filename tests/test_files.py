"""Files of tensors: damage is detected."""

import pytest
import torch
from damage import each_with_a_bit_flipped

from pycil_wsc.files import load_tensors, save_tensors

STATE = {
    "weights": torch.arange(600.0).reshape(3, 200),
    "half": torch.ones(31, dtype=torch.bfloat16),
    "names": ["a", 3, None, {"b": 2.5}],
}


def equal(state):
    tensors = all(torch.equal(state[name], STATE[name]) for name in ("weights", "half"))
    return tensors and state["names"] == STATE["names"]


def test_every_flipped_bit_is_noticed_or_does_no_harm(tmp_path):
    path, noticed = tmp_path / "state.pt", 0
    save_tensors(path, STATE)
    for position in each_with_a_bit_flipped(path, 400):
        try:
            assert equal(load_tensors(path)), position
        except ValueError as error:
            assert "\n" not in str(error)
            noticed += 1
    assert noticed > 400 / 2, "the rest is padding"


@pytest.mark.parametrize("size", [0, 1, 100, 2000, -1])
def test_a_file_cut_short_is_noticed(size, tmp_path):
    path = tmp_path / "state.pt"
    save_tensors(path, STATE)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError):
        load_tensors(path)


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path):
    for path in (tmp_path / "absent.pt", tmp_path):
        with pytest.raises(OSError):
            load_tensors(path)


class Executed:
    def __reduce__(self):
        return print, ("executed",)


def test_nothing_in_the_file_is_executed(tmp_path, capsys):
    save_tensors(tmp_path / "state.pt", Executed())
    with pytest.raises(ValueError):
        load_tensors(tmp_path / "state.pt")
    assert capsys.readouterr().out == ""
