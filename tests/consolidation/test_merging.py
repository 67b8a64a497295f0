"""Merging of models against its definitions, written here for all models at once, and against torch's own averages."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import merging as twins
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pycil_wsc.consolidation.model_merging import (
    MagMaxMerge,
    ModelSoup,
    OnlineAverage,
    Slerp,
    TaskArithmetic,
    TiesMerge,
    fisher_mean,
    slerp,
)

MERGES = {
    "avg_offline": ModelSoup,
    "avg_online": OnlineAverage,
    "slerp": Slerp,
    "task_arithmetic": TaskArithmetic,
    "magmax": MagMaxMerge,
}

OPTIONS = {
    "avg_offline": [{}],
    "avg_online": [{"decay": None}, {"decay": 0.7}],
    "slerp": [{"weight": 0.5, "space": "weights"}, {"weight": 0.3, "space": "task_vectors"}],
    "task_arithmetic": [{"scale": 0.4}],
    "magmax": [{"scale": 0.5}],
}
BY_TENSOR = [(name, options) for name, choices in OPTIONS.items() for options in choices]  # each tensor for itself
METHODS = MERGES | {"ties": TiesMerge}
EVERY = [*BY_TENSOR, ("ties", {"scale": 0.6, "keep": 0.3})]


def state(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(6, 4, generator=generator).to(dtype)
    return {
        "embed": embedding,
        "norm": torch.randn(4, generator=generator).to(dtype),
        "head": embedding,
        "steps": torch.tensor(seed),
    }


def merged(name, start, states, **options):
    merge = METHODS[name](start, **options)
    for state_of_task in states:
        merge.update(state_of_task)
    return merge.result()


def batch(name, start, states, options):
    """The method's definition, of one tensor of each model, all at once."""
    vectors = torch.stack([state_of_task - start for state_of_task in states])
    if name == "avg_offline" or options.get("decay", 0) is None:
        return torch.stack(states).mean(0)
    if name == "avg_online":
        decay, count = options["decay"], len(states)
        shares = [decay ** (count - 1 - t) * (1 - decay if t else 1) for t in range(count)]
        return sum(share * state_of_task for share, state_of_task in zip(shares, states))
    if name == "task_arithmetic":
        return start + options["scale"] * vectors.sum(0)
    if name == "magmax":
        latest = len(states) - 1 - vectors.abs().flip(0).argmax(0)
        return start + options["scale"] * vectors.gather(0, latest[None])[0]
    origin = start if options["space"] == "task_vectors" else torch.zeros_like(start)
    running = states[0] - origin
    for state_of_task in states[1:]:
        running = slow_slerp(running, state_of_task - origin, options["weight"])
    return origin + running


def slow_slerp(first, second, weight):
    angle = math.acos(float(torch.dot((first / first.norm()).flatten(), (second / second.norm()).flatten())))
    return (math.sin((1 - weight) * angle) * first + math.sin(weight * angle) * second) / math.sin(angle)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("name, options", BY_TENSOR)
def test_streamed_is_batch(name, options, count):
    start, states = state(0), [state(t) for t in range(1, count + 1)]
    result = merged(name, start, states, **options)
    assert list(result) == list(start)
    for key in ("embed", "norm", "head"):
        expected = batch(name, start[key].double(), [state_of_task[key].double() for state_of_task in states], options)
        torch.testing.assert_close(result[key], expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name, options", EVERY)
def test_integers_come_from_the_last_and_ties_stay_ties(name, options):
    start = state(0)
    merge = METHODS[name](start, **options)
    start["norm"].zero_()  # tasks train in place: what was taken in must not follow
    for t in (1, 2):
        merged_state = state(t)
        merge.update(merged_state)
        for tensor in merged_state.values():
            tensor.zero_()
    result = merge.result()
    assert result["steps"] == 2 and result["steps"].dtype == torch.int64
    assert result["embed"] is result["head"]
    torch.testing.assert_close(result["norm"], merged(name, state(0), [state(1), state(2)], **options)["norm"])
    before = merge.result()["norm"].clone()
    result["norm"].zero_()  # nor may the merge follow the model that was loaded from it
    assert torch.equal(merge.result()["norm"], before)


@pytest.mark.parametrize("name, options", EVERY)
def test_bf16_is_merged_in_fp32_and_rounded_once(name, options):
    start, states = state(0, torch.bfloat16), [state(t, torch.bfloat16) for t in range(1, 9)]
    result = merged(name, start, states, **options)
    wide = merged(name, widened(start), [widened(state_of_task) for state_of_task in states], **options)
    for key in ("embed", "norm"):
        assert result[key].dtype == torch.bfloat16 and torch.equal(result[key], wide[key].bfloat16())


def widened(state):
    """The same numbers in fp32; the embedding and the head stay one tensor."""
    embedding = state["embed"].float()
    return state | {"embed": embedding, "norm": state["norm"].float(), "head": embedding}


def test_a_sum_that_bf16_would_lose_is_kept():
    start = {"w": torch.ones(1, dtype=torch.bfloat16)}
    steps = [
        {"w": torch.tensor([1 + 2**-7], dtype=torch.bfloat16)}
    ] * 16  # 2**-7 is bf16's step at 1: half of it is lost
    assert float(merged("task_arithmetic", start, steps, scale=0.5)["w"]) == 1 + 16 * 2**-8


@pytest.mark.parametrize("name, options", EVERY)
def test_saved_and_loaded_goes_on_as_if_it_had_not_stopped(name, options, tmp_path):
    start, states = state(0), [state(t) for t in range(1, 5)]
    merge = METHODS[name](start, **options)
    for state_of_task in states[:2]:
        merge.update(state_of_task)
    torch.save(merge.state_dict(), tmp_path / "merge.pt")
    again = METHODS[name](start, **options)
    again.load_state_dict(torch.load(tmp_path / "merge.pt", weights_only=True))
    for state_of_task in states[2:]:
        merge.update(state_of_task)
        again.update(state_of_task)
    assert again.count == 4
    for key, tensor in merge.result().items():
        assert torch.equal(again.result()[key], tensor)


def test_the_state_fits_safetensors():
    save = pytest.importorskip("safetensors.torch").save
    merge = MERGES["magmax"](state(0), scale=1.0)
    save(merge.state_dict())
    merge.update(state(1))
    save(merge.state_dict())


def test_a_merge_saved_before_its_first_model_loads_as_empty():
    merge = MERGES["avg_offline"](state(0))
    merge.load_state_dict(MERGES["avg_offline"](state(0)).state_dict())
    with pytest.raises(RuntimeError, match="nothing to merge"):
        merge.result()


def test_magmax_takes_the_largest_change_and_of_equals_the_later():
    start = {"w": torch.tensor([1.0, 1.0, 1.0, 1.0])}
    states = [
        {"w": start["w"] + torch.tensor(change)}
        for change in ([2.0, -3.0, 1.0, 0.0], [-2.0, 1.0, 1.0, 0.0], [1.0, 3.0, -0.5, 0.0])
    ]
    assert merged("magmax", start, states, scale=1.0)["w"].tolist() == [-1.0, 4.0, 2.0, 1.0]
    assert merged("magmax", start, states, scale=0.5)["w"].tolist() == [0.0, 2.5, 1.5, 1.0]


@pytest.mark.parametrize("keep, scale", [(0.2, 1.0), (0.5, 0.7), (1.0, 1.0)])
def test_ties_is_the_papers_trimmed_elected_and_disjoint_mean(keep, scale):
    """The whole model is trimmed at once, so a tensor may keep all of its changes or none."""
    start, states = state(0), [state(t) for t in range(1, 6)]
    result = merged("ties", start, states, scale=scale, keep=keep)
    expected = twins.ties(flat(start), [flat(state_of_task) for state_of_task in states], keep, scale)
    torch.testing.assert_close(torch.tensor(flat(result)), torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The density")
def test_ties_elects_no_sign_where_changes_cancel_exactly():
    """PEFT elects +1 there, and takes the mean of the positive changes."""
    start, changes = torch.tensor([5.0, 5.0]), torch.tensor([[2.0, 2.0], [-3.0, 1.0], [1.0, -1.0]])
    states = [{"w": start + change} for change in changes]
    assert merged("ties", {"w": start}, states, scale=1.0, keep=1.0)["w"].tolist() == [5.0, 6.5]
    theirs = pytest.importorskip("peft.utils.merge_utils").ties(list(changes), torch.ones(3), density=1.0)
    assert theirs.tolist() == [1.5, 1.5]


def flat(state):
    return [value for name in ("embed", "norm") for value in state[name].flatten().tolist()]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_fisher_mean_is_that_of_its_paper_and_plain_where_nothing_is_known(share):
    generator = torch.Generator().manual_seed(3)
    first, second, one, two = (torch.rand(20, generator=generator) for _ in range(4))
    one[:5] = two[3:8] = 0  # both are 0 at places 3 and 4
    expected = twins.weighted_by_fisher(first.tolist(), second.tolist(), share, one.tolist(), two.tolist())
    torch.testing.assert_close(fisher_mean(first, second, share, one, two), torch.tensor(expected))


@pytest.mark.parametrize("decay", [None, 0.9])
def test_the_online_average_is_torchs_averaged_model(decay):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    torchs = AveragedModel(model, multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay))
    merge = MERGES["avg_online"](model.state_dict(), decay=decay)
    for _ in range(4):
        torch.nn.init.normal_(model[0].weight)
        torchs.update_parameters(model)
        merge.update(model.state_dict())
    for name, tensor in torchs.module.state_dict().items():
        torch.testing.assert_close(merge.result()[name], tensor)


vectors = st.lists(st.floats(-4, 4, width=32), min_size=6, max_size=6).map(torch.tensor)


@settings(deadline=None)
@given(vectors, vectors, st.floats(0, 1))
def test_slerp_meets_its_ends_and_is_symmetric(first, second, weight):
    torch.testing.assert_close(slerp(first, second, 0.0), first)
    torch.testing.assert_close(slerp(first, second, 1.0), second)
    torch.testing.assert_close(slerp(first, second, weight), slerp(second, first, 1 - weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight", [0.25, 0.5, 0.9])
def test_slerp_of_unit_vectors_turns_at_constant_speed_and_keeps_the_norm(weight):
    first, second = (torch.nn.functional.normalize(state(seed)["embed"].flatten(), dim=0) for seed in (1, 2))
    between, whole = slerp(first, second, weight), torch.acos(first @ second)
    assert between.norm() == pytest.approx(1, abs=1e-5)
    assert torch.acos(first @ between) == pytest.approx(float(weight * whole), abs=1e-4)
    assert slerp(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0]), 0.5).tolist() == pytest.approx([3 / 2**0.5] * 2)


@pytest.mark.parametrize(
    "first, second",
    [
        ([1.0, 2.0], [3.0, 6.0]),
        ([1.0, 2.0], [-2.0, -4.0]),
        ([1.0, 0.0], [1.0, 0.03]),
        ([0.0, 0.0], [2.0, 1.0]),
        ([2.0, 1.0], [0.0, 0.0]),
    ],
)
def test_slerp_is_linear_for_parallel_and_zero_tensors(first, second):
    first, second = torch.tensor(first), torch.tensor(second)
    torch.testing.assert_close(slerp(first, second, 0.25), 0.75 * first + 0.25 * second)


def test_slerp_is_not_linear_just_beyond_the_limit():
    first, second = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.04])  # cos = .9992
    assert slerp(first, second, 0.5)[0] > 1.0001 * torch.lerp(first, second, 0.5)[0]


def test_slerp_of_weights_and_of_task_vectors_differ_near_the_start():
    start = state(0)["norm"]
    states = [{"w": start + 1e-3 * state(t)["norm"]} for t in (1, 2)]
    weights, tasks = (
        merged("slerp", {"w": start}, states, weight=0.5, space=space)["w"] for space in ("weights", "task_vectors")
    )
    mean = torch.lerp(states[0]["w"], states[1]["w"], 0.5)
    assert (weights - mean).norm() < 1e-6 < (tasks - mean).norm()


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda s: s.pop("norm"), "'norm'"),
        (lambda s: s.update(bias=torch.zeros(1)), "'bias'"),
        (lambda s: s.update(norm=torch.zeros(5)), r"'norm' has shape \(4,\)"),
        (lambda s: s.update(norm=s["norm"].double()), "'norm' is torch.float64"),
        (lambda s: s.update(head=s["head"] + 1), "'head' and 'embed' were one tensor"),
    ],
)
@pytest.mark.parametrize("name, options", [("magmax", {"scale": 1.0}), ("ties", {"scale": 1.0, "keep": 0.2})])
def test_a_model_that_does_not_match_is_refused_and_changes_nothing(name, options, change, says):
    merge = METHODS[name](state(0), **options)
    merge.update(state(1))
    before, other = merge.result(), state(2)
    change(other)
    with pytest.raises(ValueError, match=says):
        merge.update(other)
    assert merge.count == 1 and all(torch.equal(merge.result()[key], tensor) for key, tensor in before.items())


def test_tied_tensors_may_come_apart_as_copies():
    apart = state(1) | {"head": state(1)["head"].clone()}
    assert torch.equal(merged("avg_offline", state(0), [apart])["head"], state(1)["head"])


def test_the_state_of_another_model_is_refused():
    merge, other = MERGES["avg_offline"](state(0)), MERGES["avg_offline"]({"w": torch.zeros(2)})
    other.update({"w": torch.ones(2)})
    with pytest.raises(ValueError, match="in this object but not in the state|in the state but not in this object"):
        merge.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    "name, options, says",
    [
        ("avg_online", {"decay": 1.0}, "decay=1.0"),
        ("slerp", {"weight": 1.5, "space": "weights"}, "weight=1.5"),
        ("slerp", {"weight": 0.5, "space": "logits"}, "space='logits'"),
        ("ties", {"scale": 1.0, "keep": 0}, "keep=0: the fraction"),
    ],
)
def test_options_out_of_range_are_refused(name, options, says):
    with pytest.raises(ValueError, match=says):
        METHODS[name](state(0), **options)


@pytest.fixture
def models_resident():
    pytest.importorskip("transformers")
    from pycil_wsc.llm.language_result import models_resident

    return models_resident


@pytest.mark.parametrize("name, options", BY_TENSOR)
def test_the_streamed_count_is_what_a_merge_holds_and_the_model_in_training(name, options, models_resident):
    weight = torch.zeros(50)
    merge = MERGES[name]({"w": weight}, **options)
    for t in range(1, 5):
        merge.update({"w": weight + t})
    held = {
        tensor.data_ptr()
        for part in vars(merge).values()
        if isinstance(part, dict)
        for tensor in part.values()
        if torch.is_tensor(tensor)
    }
    assert 1 + len(held) == models_resident(merge, 8)[1]


def test_the_papers_count_is_t_for_offline_methods_and_two_for_online_ones(models_resident):
    assert models_resident(None, 8) == (1, 1) and models_resident(None, 8, copied=0.2) == (1.2, 1.2)
    counts = {name: models_resident(MERGES[name]({}, **OPTIONS[name][0]), 8)[0] for name in MERGES}
    assert counts == {"avg_offline": 8, "avg_online": 2, "slerp": 2, "task_arithmetic": 8, "magmax": 8}
