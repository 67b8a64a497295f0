"""Nested states as JSON values and tensors."""

import json
import math

import pytest
import torch

from pycil_wsc.nested import packed, unpacked


def test_a_state_comes_back_from_json_and_tensors():
    tensors, weight = {}, torch.arange(3.0)
    state = {
        "network": {"fc.weight": weight, "fc": {"weight": weight + 1}},  # one place, two tensors
        "optimizer": {0: {"steps": (3, [weight.to(torch.bfloat16), None])}, 1: {}},
        "loss": [0.1, math.inf, -math.inf],
        "flags": (True, "text", ()),
    }
    again = unpacked(json.loads(json.dumps(packed(state, tensors), allow_nan=False)), tensors.__getitem__)
    assert str(again) == str(state), "types, order, values"
    assert len(tensors) == 3 and all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    assert math.isnan(unpacked(packed(math.nan, {}), {}.get))


def test_anything_else_is_named():
    with pytest.raises(TypeError, match=r"network\.1: a set cannot be saved"):
        packed({"network": [0, {1}]}, {})
