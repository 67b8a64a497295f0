"""WiSE-FT, against its formula."""

import torch
from support.merging import assert_equal, merged_after, values


def test_wise_fts_weights_are_the_mean_of_those_before_and_after_the_task(digits, tmp_path):
    _, networks, merged = merged_after("wise_ft", digits, tmp_path, new_share=0.3)
    assert_equal(merged[0], values(networks[0]))
    for before, now, mean in zip(merged, networks[1:], merged[1:]):
        rows = len(before.head.weight)
        for name, value in mean.named_parameters():
            old, new = before.get_parameter(name), now.get_parameter(name)
            torch.testing.assert_close(value[: len(old)], 0.7 * old + 0.3 * new[: len(old)])
        assert torch.equal(mean.head.weight[rows:], now.head.weight[rows:]), "new rows stay as they were trained"
