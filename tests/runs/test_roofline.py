"""The benchmark's floor counts what operators must compute and move."""

import pytest
import torch
from roofline import Roofline

A, B = torch.randn(4, 5), torch.randn(5, 6)
MATRICES = 4 * (4 * 5 + 5 * 6 + 4 * 6)  # bytes of both and their product
IMAGES, KERNELS = torch.randn(2, 3, 8, 8), torch.randn(7, 3, 3, 3)


@pytest.mark.parametrize(
    "function, operations, moved",
    [
        (lambda: A @ B, 2 * 4 * 5 * 6, MATRICES),
        (lambda: torch.conv2d(IMAGES, KERNELS), 2 * 2 * 6 * 6 * 7 * 3 * 9, 4 * (2 * 3 * 64 + 7 * 27 + 2 * 7 * 36)),
        (lambda: A.relu(), 0, 2 * 4 * 20),
        (lambda: A.clone().zero_(), 0, 2 * 2 * 4 * 20),
        (lambda: A.bfloat16(), 0, (4 + 2) * 20),
        (
            lambda: A.t().reshape(10, 2)[3:].unsqueeze(0),
            0,
            2 * 4 * 20,
        ),  # the transpose cannot be reshaped without a copy
        (lambda: A.view(20)[3:].view(17, 1), 0, 0),
        (lambda: torch.empty(1000), 0, 0),
    ],
)
def test_operators_are_counted_by_hand(function, operations, moved):
    with Roofline(1.0, 1.0) as roofline:
        function()
    assert (roofline.operations, roofline.bytes) == (operations, moved)


def test_each_operator_takes_the_longer_of_its_two_times():
    with Roofline(100.0, 1000.0) as roofline:
        A @ B  # 240 operations: 2.4 s; 296 bytes: 0.3 s
        A.relu()  # 160 bytes
    assert roofline.seconds == pytest.approx(2.4 + 0.16)
