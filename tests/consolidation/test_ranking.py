"""The ranking of elements: exact counts, ties broken by position, and memory that does not grow with the model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pycil_wsc.consolidation import (
    Blend,
    NonFiniteGradients,
    WeightSpaceConsolidation,
    drift_score,
    rank_reset_,
    ranking,
    top_mask,
)
from pycil_wsc.studies.diagonals import fisher_diagonal, hessian_diagonal

VALUES = [0.0, -0.0, 1.0, 1.0 + 2**-7, -1.0, -2.5, 3e-39, 1e30, float("inf"), float("-inf")]


def stable_top(scores, eligible, retain):
    """Positions of the highest by a stable sort of Python floats, best first: an independent statement of the rule."""
    flat = [float(value) for score in scores for value in score.flatten()]
    allowed = [
        True if mask is None else bool(mask.flatten()[e])
        for score, mask in zip(scores, eligible)
        for e in range(score.numel())
    ]
    ranked = sorted((p for p, ok in enumerate(allowed) if ok), key=lambda position: -flat[position])
    return set(ranked[: round(retain * len(ranked))])


def marked(masks):
    return set(torch.cat([mask.flatten() for mask in masks]).nonzero().flatten().tolist())


@st.composite
def rankings(draw):
    """Scores of several shapes and types, most of them equal to others; and which elements take part."""
    scores, eligible = [], []
    for shape in draw(
        st.lists(st.sampled_from([(), (0,), (1,), (9,), (3, 5), (2, 3, 4), (1, 17)]), min_size=1, max_size=4)
    ):
        size = torch.Size(shape).numel()
        values = draw(st.lists(st.sampled_from(VALUES), min_size=size, max_size=size))
        dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]))
        scores.append(torch.tensor(values, dtype=dtype).view(shape))
        mask = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=torch.bool).view(shape)
        eligible.append(draw(st.sampled_from([None, mask])))
    return scores, eligible, draw(st.sampled_from([0, 0.1, 0.2, 0.5, 0.8, 1]))


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 4, 2**20])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(rankings())
def test_mask_is_that_of_a_stable_sort_however_small_the_blocks(block, case):
    scores, eligible, retain = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "BLOCK", block)
        assert marked(top_mask(scores, retain, "global", eligible)) == stable_top(scores, eligible, retain)
        for score, mask, kept in zip(scores, eligible, top_mask(scores, retain, "tensor", eligible)):
            assert kept.shape == score.shape
            assert marked([kept]) == stable_top([score], [mask], retain)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (2, 0, 3), (1, 1, 30)])
@pytest.mark.parametrize("block", [1, 5, 100])
def test_blocks_cover_a_tensor_once_in_order(monkeypatch, shape, block):
    monkeypatch.setattr(ranking, "BLOCK", block)
    numbered = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = [numbered[index] for index in ranking.blocks(shape)]
    assert all(part.numel() <= block for part in parts)
    assert {part.untyped_storage().data_ptr() for part in parts} <= {numbered.untyped_storage().data_ptr()}, "views"
    assert [n for part in parts for n in part.flatten().tolist()] == list(range(numbered.numel()))


BIG = """
import resource, sys, torch
from pycil_wsc.consolidation import ranking, top_mask
torch.set_num_threads(1)
ranking.BLOCK = 2**18
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
size = 2**23
# Every whole number below 2^21 four times, in a scattered order: ties everywhere, and the answer is known.
scores = torch.arange(size, dtype=torch.int32).mul_(40503).bitwise_and_(size - 1)
scores = scores.div_(4, rounding_mode="floor").to(torch.float32)
parts = scores[: size // 2].view(2**12, -1), scores[size // 2 : -6], scores[-6:]
top_mask([torch.rand(2**20)], 0.2)  # what is allocated once
before = peak()
masks = top_mask(parts, 0.3)
extra = peak() - before - size  # less the masks, a byte per element
count = round(0.3 * size)
mask, threshold = torch.cat([m.flatten() for m in masks]), 2**21 - 1 - count // 4
assert mask.sum() == count
assert mask[scores > threshold].all() and not mask[scores < threshold].any()
assert mask[scores == threshold].tolist() == [i < count % 4 for i in range(4)]
masks = top_mask(parts, 0.3, "tensor")
assert [int(m.sum()) for m in masks] == [round(0.3 * p.numel()) for p in parts]
assert all(p[m].min() >= p[~m].max() for m, p in zip(masks, parts))
print(extra)
"""


@pytest.mark.slow
def test_eight_million_elements_are_ranked_within_a_few_blocks_of_memory():
    run = subprocess.run(
        [sys.executable, "-c", BIG], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 2**23  # a quarter of what the scores take


@pytest.mark.parametrize("retain", [1.5, -0.1, float("nan")])
def test_a_share_outside_0_to_1_is_refused_and_changes_nothing(retain):
    with pytest.raises(ValueError, match="retain=.* is a fraction: give a number from 0 to 1"):
        top_mask([torch.rand(3)], retain)
    weights = torch.zeros(3)
    with pytest.raises(ValueError, match="retain=.* is a fraction: give a number from 0 to 1"):
        rank_reset_([weights], [torch.ones(3)], [torch.rand(3)], retain, 0.5)
    assert not weights.any()


def test_scores_may_be_made_block_by_block():
    class Squares:
        shape, dtype, device = (10,), torch.float32, torch.device("cpu")

        def __getitem__(self, index):
            return torch.arange(10.0)[index] ** 2

    assert marked(top_mask([Squares(), torch.full((10,), 30.0)], 0.25)) == {6, 7, 8, 9, 10}


# ---- scores ----------------------------------------------------------------------------------------------------------


def linear(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(4, 3).to(dtype)


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        torch.manual_seed(0)
        self.fused, self.qkv, self.head = fused, nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, tokens):
        q, k, v = self.qkv(tokens).chunk(3, -1)
        if self.fused:
            return self.head(nn.functional.scaled_dot_product_attention(q, k, v).mean(1))
        return self.head(((q @ k.transpose(1, 2) / 8**0.5).softmax(2) @ v).mean(1))


def test_the_hessian_of_fused_attention_is_that_of_its_formula():
    batch, found = (torch.randn(4, 5, 8), torch.tensor([0, 1, 2, 0])), []
    for model in Attention(fused=True), Attention(fused=False):
        params, generator = dict(model.named_parameters()), torch.Generator().manual_seed(0)
        found.append(hessian_diagonal(model, params, [batch], 2, generator))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("score", [fisher_diagonal, lambda *arguments: hessian_diagonal(*arguments, probes=1)])
def test_scores_of_half_precision_are_summed_up_in_fp32(score):
    """A sum in bf16 stops growing at about 256 times its terms."""
    model = linear(torch.bfloat16)
    batch = torch.ones(1, 4, dtype=torch.bfloat16), torch.tensor([1])
    params = dict(model.named_parameters())
    torch.manual_seed(1)
    once = score(model, params, [batch])
    torch.manual_seed(1)
    often = score(model, params, [batch] * 400)
    for name, values in often.items():
        assert values.dtype == torch.float32
        torch.testing.assert_close(values, once[name], rtol=1e-4, atol=0)


@pytest.mark.parametrize("score", [fisher_diagonal, lambda *arguments: hessian_diagonal(*arguments, probes=1)])
def test_scores_of_no_sample_are_refused(score):
    model = linear()
    batches = iter([(torch.ones(2, 4), torch.tensor([0, 1]))])
    score(model, dict(model.named_parameters()), batches)
    for used_up in (batches, []):
        with pytest.raises(ValueError, match="no sample to score parameters by: `batches` is empty"):
            score(model, dict(model.named_parameters()), used_up)


@pytest.mark.parametrize("score", [fisher_diagonal, lambda *arguments: hessian_diagonal(*arguments, probes=1)])
def test_a_compiled_model_has_the_scores_of_the_plain_one_and_keeps_its_parameters(score):
    """The names of ``params`` may be those of either."""
    model, batch = linear(), (torch.randn(2, 4), torch.tensor([0, 1]))
    compiled, own = torch.compile(model, backend="eager"), list(model.parameters())
    found = []
    for scored, named in ((model, model), (compiled, model), (compiled, compiled)):
        torch.manual_seed(1)
        found.append(list(score(scored, dict(named.named_parameters()), [batch]).values()))
    assert found[0][0].any()
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])
    assert all(ours is theirs for ours, theirs in zip(own, model.parameters(), strict=True))


def test_a_name_that_the_model_does_not_have_is_refused():
    with pytest.raises(ValueError, match="params: 'wieght' is not the name of a parameter of the model"):
        fisher_diagonal(linear(), {"wieght": torch.ones(2, 4)}, [(torch.ones(2, 4), torch.tensor([0, 1]))])


def test_an_estimate_needs_a_probe():
    model = linear()
    with pytest.raises(ValueError, match="probes=0: give at least 1 random vector"):
        hessian_diagonal(model, dict(model.named_parameters()), [(torch.ones(2, 4), torch.tensor([0, 1]))], 0)


def not_a_number(params, previous):
    return {name: torch.full_like(param, torch.nan) for name, param in params.items()}


@pytest.mark.parametrize("importance, weights", [(not_a_number, 1.0), (drift_score(), torch.nan)])
def test_scores_that_are_not_finite_are_blamed_on_the_importance(importance, weights):
    """Not on gradients, which other scores than those of moments do not use."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"importance": importance, "warmup_steps": 1, "reset": Blend()}
    WeightSpaceConsolidation(model.named_parameters(), **options).attach(optimizer)
    with torch.no_grad():
        model.weight.mul_(weights)
    model.weight.grad, model.bias.grad = torch.ones(3, 4), torch.ones(3)
    with pytest.raises(NonFiniteGradients, match="the importance of 'weight' is not finite, so it cannot be ranked"):
        optimizer.step()


@pytest.mark.parametrize(
    "average, what", [({}, "WSC averages but does not reset: "), ({"average": None}, "WSC does not reset: ")]
)
def test_a_warm_up_that_is_too_short_is_said_with_what_is_left_of_the_method(average, what):
    with pytest.warns(UserWarning, match=f"^{what}after a warm-up of 3 steps"):
        WeightSpaceConsolidation(linear().named_parameters(), warmup_steps=3, **average)
