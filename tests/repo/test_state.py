"""Files of nested states: what is saved is loaded, damage is detected, and earlier formats are read."""

import math

import pytest
import torch
from support.damage import each_with_a_bit_flipped
from support.small_runs import killed_at, results, write

from main import main
from pycil_wsc.errors import UserError
from pycil_wsc.state import load_state, save_state

STATE = {
    "weights": torch.arange(600.0).reshape(3, 200),
    "half": torch.ones(31, dtype=torch.bfloat16),
    "names": ["a", 3, None, {"b": 2.5}],
}


def equal(state):
    tensors = all(torch.equal(state[name], STATE[name]) for name in ("weights", "half"))
    return tensors and state["names"] == STATE["names"]


def torch_saved(path, state):
    """The earlier format of checkpoints, shared first tasks and weights."""
    torch.save(state, path)


WRITERS = {"present": save_state, "earlier": torch_saved}


def test_what_is_saved_is_loaded(tmp_path):
    parameter = torch.nn.Parameter(torch.randn(2, 3))
    images = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    state = {
        "numbers": [0.1, -0.0, 1e-310, 10**30, True, None, "é\n", math.inf],
        "by number": {1: {"step": torch.tensor(3)}, 2: (1, (2, []))},
        "empty": [{}, (), torch.empty(0, 4), torch.empty(0, dtype=torch.int64).expand(0)],
        "of one": {"a.b": parameter, "a": {"b": parameter}, "view": parameter[:, 1:]},
        "images": images,
        "types": [torch.ones(3, dtype=dtype) for dtype in (torch.bool, torch.uint8, torch.float64, torch.float16)],
    }
    save_state(tmp_path / "state", state)
    loaded = load_state(tmp_path / "state")
    assert loaded["numbers"] == state["numbers"] and math.copysign(1, loaded["numbers"][1]) == -1
    assert loaded["by number"] == state["by number"] and loaded["empty"][:2] == [{}, ()]
    assert loaded["empty"][2].shape == (0, 4) and loaded["empty"][3].dtype == torch.int64
    assert torch.equal(loaded["of one"]["a.b"], parameter) and torch.equal(loaded["of one"]["a"]["b"], parameter)
    assert torch.equal(loaded["of one"]["view"], parameter[:, 1:])
    assert torch.equal(loaded["images"], images) and loaded["images"].stride() == images.stride()
    assert [tensor.dtype for tensor in loaded["types"]] == [tensor.dtype for tensor in state["types"]]


def test_what_no_state_may_contain_is_refused(tmp_path):
    with pytest.raises(TypeError, match="a.0: a set cannot be saved; a state is tensors and JSON values"):
        save_state(tmp_path / "state", {"a": [{1, 2}]})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("writer", WRITERS)
def test_every_flipped_bit_is_noticed_or_does_no_harm(writer, tmp_path):
    path, noticed = tmp_path / "state", 0
    WRITERS[writer](path, STATE)
    for position in each_with_a_bit_flipped(path, 150):
        try:
            assert equal(load_state(path)), position
        except ValueError as error:
            assert "\n" not in str(error)
            noticed += 1
    assert noticed > 150 / 2, "the rest is padding"


@pytest.mark.parametrize("size", [0, 1, 100, 2000, -1])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_cut_short_is_noticed(writer, size, tmp_path):
    path = tmp_path / "state"
    WRITERS[writer](path, STATE)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError):
        load_state(path)


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path):
    for path in (tmp_path / "absent.pt", tmp_path):
        with pytest.raises(OSError):
            load_state(path)


def test_a_file_that_cannot_be_written_is_one_line_and_the_previous_one_intact(tmp_path, monkeypatch):
    save_state(tmp_path / "state", STATE)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="state: cannot be written .No space left on device"):
        save_state(tmp_path / "state", {})
    assert equal(load_state(tmp_path / "state"))


class Executed:
    def __reduce__(self):
        return print, ("executed",)


def test_nothing_in_a_file_is_executed(tmp_path, capsys):
    torch.save(Executed(), tmp_path / "state.pt")
    with pytest.raises(ValueError):
        load_state(tmp_path / "state.pt")
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_run_resumes_from_a_checkpoint_in_the_earlier_format_and_its_weights_are_loaded(
    settings, tmp_path, undisturbed, undrawn
):
    """Within a task, with the state of an optimiser."""
    with killed_at(5):
        main(["--config", write(tmp_path, settings | {"save_weights": True})])
    (checkpoint,) = (tmp_path / "runs").rglob("checkpoint.pt")
    torch_saved(checkpoint, load_state(checkpoint))
    assert main(["--config", write(tmp_path, settings | {"save_weights": True})]) == 0
    ((folder, result),) = results(settings).items()
    expected = undisturbed()[1]
    assert [result[name] for name in ("matrix", "train_loss", "confusion")] == [
        expected[name] for name in ("matrix", "train_loss", "confusion")
    ]

    import pycil_wsc

    before = pycil_wsc.load(folder).state_dict()
    torch_saved(folder / "weights.pt", load_state(folder / "weights.pt"))
    after = pycil_wsc.load(folder).state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items() if isinstance(value, torch.Tensor))
