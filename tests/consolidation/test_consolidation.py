"""Weight Space Consolidation: its effect on weights, compared with independent references."""

import copy
import doctest
import io
import math
import warnings
from collections import UserDict
from pathlib import Path

import pytest
import torch
from support.plain_loop import consolidated, small_net, snapshot, start, train, train_step
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_swa_multi_avg_fn, update_bn
from torch.utils._python_dispatch import TorchDispatchMode

from pycil_wsc.config.loading import load
from pycil_wsc.consolidation import (
    Average,
    Blend,
    Revert,
    WeightSpaceConsolidation,
    blend_,
    drift_score,
    moment_product,
    moment_score,
    rank_reset_,
    recompute_batch_norm,
    revert_,
    top_mask,
    update_moments_,
)
from pycil_wsc.studies.rival_resets import ShrinkPerturb

EXPS = Path(__file__).parents[2] / "exps"


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(left.view(torch.int32), right.view(torch.int32))


# The reset.


def reset_once(**options):
    """-> weights before the task, weights trained alike without a consolidation, weights right after the reset."""
    results = []
    for with_reset in False, True:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        before = snapshot(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        if with_reset:
            consolidated(net, optimizer, warmup_steps=4, **options)
        train(net, optimizer, range(4))
        results.append({name: p.detach().clone() for name, p in net.named_parameters()})
    return before, *results


def test_retain_1_changes_no_bit():
    before, trained, reset = reset_once(retain=1)
    assert all(same_bits(trained[name], reset[name]) for name in trained)
    assert not any(torch.equal(trained[name], before[name]) for name in trained)


@pytest.mark.parametrize("rule", [Blend(0), Revert()])
def test_retain_0_with_blend_0_gives_the_previous_weights_to_the_bit(rule):
    before, _, reset = reset_once(retain=0, reset=rule)
    assert all(same_bits(before[name], reset[name]) for name in reset)


def test_revert_keeps_the_sign_of_zero_and_drops_infinities():
    previous = torch.tensor([-0.0, 1.0, -2.0])
    param = torch.tensor([3.0, float("inf"), float("nan")])
    revert_([param], [previous], [torch.zeros(3, dtype=torch.bool)])
    assert same_bits(param, previous)


def test_reset_none_leaves_the_weights_alone():
    _, trained, reset = reset_once(reset=None, retain=0)
    assert all(same_bits(trained[name], reset[name]) for name in trained)


def test_reset_moves_all_but_exactly_the_retained_share():
    before, trained, reset = reset_once(retain=0.2, reset=Blend(0.5))
    moved = {name: trained[name] != reset[name] for name in trained}
    total = sum(mask.numel() for mask in moved.values())
    assert sum(int(mask.sum()) for mask in moved.values()) == total - round(0.2 * total)
    for name, mask in moved.items():
        torch.testing.assert_close(reset[name][mask], (0.5 * trained[name] + 0.5 * before[name])[mask])


@pytest.mark.parametrize("kind", ["foreach", "fused", "for-loop"])
def test_ranking_uses_the_raw_gradient_under_weight_decay(kind):
    net = small_net()
    switches = dict(foreach=kind == "foreach", fused=kind == "fused")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=10.0, **switches)
    wsc = consolidated(net, optimizer, warmup_steps=2)
    weights = snapshot(net)
    train_step(net, optimizer, 0)
    twin = small_net()
    twin.load_state_dict(weights)
    train_step(twin, torch.optim.SGD(twin.parameters(), lr=0.0), 0)
    for name, p in twin.named_parameters():
        torch.testing.assert_close(wsc.state_dict()["tracker"]["first"][name], 0.1 * p.grad)
        torch.testing.assert_close(wsc.state_dict()["tracker"]["second"][name], 0.001 * p.grad**2)


def test_moments_and_score_are_adams():
    param = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    adam = torch.optim.Adam([param], betas=(0.8, 0.95))
    first, second = [torch.zeros_like(param)], [torch.zeros_like(param)]
    with torch.no_grad():
        for step in range(1, 6):
            param.grad = torch.randn(5, dtype=torch.float64)
            adam.step()
            update_moments_(first, second, [param.grad], (0.8, 0.95))
            m_hat = adam.state[param]["exp_avg"] / (1 - 0.8**step)
            v_hat = adam.state[param]["exp_avg_sq"] / (1 - 0.95**step)
            torch.testing.assert_close(moment_product(first, second, step, (0.8, 0.95)), [m_hat.abs() * v_hat])


def test_moments_of_bf16_gradients_are_computed_in_fp32():
    gradient = torch.randn(50).bfloat16()
    first, second = [torch.zeros(50)], [torch.zeros(50)]
    update_moments_(first, second, [gradient], (0.9, 0.999))
    torch.testing.assert_close(first[0], 0.1 * gradient.float())
    torch.testing.assert_close(second[0], 0.001 * gradient.float() ** 2)


def test_absolute_score_does_not_let_opposite_gradients_cancel():
    kept = {}
    for absolute in False, True:
        weights = nn.Parameter(torch.zeros(2))  # element 0: strong, changing sign; element 1: weaker, steady
        optimizer = torch.optim.SGD([weights], lr=1.0)
        importance = moment_score(betas=(0.5, 0.5), absolute=absolute)
        WeightSpaceConsolidation(
            [("w", weights)], warmup_steps=2, retain=0.5, importance=importance, reset=Revert()
        ).attach(optimizer)
        for gradient in [2.0, 0.5], [-1.0, 0.5]:
            weights.grad = torch.tensor(gradient)
            optimizer.step()
        kept[absolute] = weights.nonzero().flatten().tolist()
    assert kept == {False: [1], True: [0]}


def test_parameters_never_given_a_gradient_are_neither_ranked_nor_reset():
    used, unused = nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([used, unused], lr=0.1)
    WeightSpaceConsolidation([("used", used), ("unused", unused)], warmup_steps=1, retain=0.5, reset=Revert()).attach(
        optimizer
    )
    with torch.no_grad():
        unused += 1.0  # changed from outside
    used.grad = torch.arange(1.0, 11.0)
    optimizer.step()
    assert (used == 1).tolist() == [True] * 5 + [False] * 5
    assert (unused == 2).all()


def test_only_eligible_elements_are_ranked_and_reset():
    weights = nn.Parameter(torch.zeros(4, 2))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    old_rows = torch.tensor([True, True, True, False])[:, None].expand(4, 2)
    WeightSpaceConsolidation(
        [("w", weights)], warmup_steps=1, retain=0.5, reset=Revert(), eligible={"w": old_rows}
    ).attach(optimizer)
    weights.grad = torch.arange(1.0, 9.0).view(4, 2)
    optimizer.step()
    assert (-weights).flatten().tolist() == [0, 0, 0, 4, 5, 6, 7, 8]  # half of six, and the new row untouched


def test_reset_momentum_lets_the_optimiser_start_afresh():
    momenta = {}
    for momentum in False, True:
        net, optimizer, _ = start(warmup_steps=3, reset=Blend(momentum=momentum))
        train(net, optimizer, range(4))
        momenta[momentum] = [(optimizer.state[p]["momentum_buffer"], p.grad) for p in net.parameters()]
    assert all(torch.equal(buffer, grad) for buffer, grad in momenta[True])
    assert not any(torch.equal(buffer, grad) for buffer, grad in momenta[False])


def test_reset_every_resets_again():
    net, optimizer, wsc = start(warmup_steps=2, reset=Blend(every=3))
    resets = []
    for step in range(9):
        train_step(net, optimizer, step)
        resets.append(wsc.resets)
    assert resets == [0, 1, 1, 1, 2, 2, 2, 3, 3]


# The ranking.


def marked(masks):
    return set(torch.cat([mask.flatten() for mask in masks]).nonzero().flatten().tolist())


def test_mask_follows_logical_position_whatever_the_memory_layout():
    score = torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)
    assert marked(top_mask([score], 0.5)) == set(range(12))


def test_rank_reset_leaves_ineligible_elements_alone():
    param, scores = torch.full((4,), 2.0), torch.tensor([1.0, 2.0, 3.0, 0.0])
    rank_reset_([param], [torch.zeros(4)], [scores], 1 / 3, 0.25, eligible=[torch.tensor([True, True, True, False])])
    assert param.tolist() == [0.5, 0.5, 2.0, 2.0]


def test_blend_is_the_equation_where_not_kept():
    theta, previous, keep = torch.randn(100), torch.randn(100), torch.rand(100) < 0.5
    result = theta.clone()
    blend_([result], [previous], [keep], 0.3)
    torch.testing.assert_close(result[~keep], (0.3 * theta + 0.7 * previous)[~keep])
    assert torch.equal(result[keep], theta[keep])


# The average.


@pytest.mark.parametrize(
    "begin, every, last", [("reset", 1, True), ("reset", 3, False), ("first", 2, False), ("first", 4, True)]
)
def test_average_equals_torchs_averaged_model(begin, every, last):
    net, optimizer, wsc = start(lr=0.3, warmup_steps=3, average=Average(every, begin, "since_reset", last))
    averaged = AveragedModel(net, multi_avg_fn=get_swa_multi_avg_fn())
    for step in range(1, 15):
        train_step(net, optimizer, step)
        since = step - 3
        at_start, at_end = since == 0 and begin == "reset", last and step == 14
        if at_start or (since > 0 and since % every == 0) or at_end:
            averaged.update_parameters(net)
    wsc.finish()
    assert wsc.averaged == int(averaged.n_averaged)
    for ours, theirs in zip(net.parameters(), averaged.module.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def averaged_ramp(average, warmup_steps, steps):
    """The average of a weight that is the number of the step."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    wsc = WeightSpaceConsolidation([("w", weight)], warmup_steps=warmup_steps, retain=1, average=average, reset=Blend())
    wsc.attach(optimizer)
    for _ in range(steps):
        weight.grad = -torch.ones_like(weight)
        optimizer.step()
    wsc.finish()
    return weight.item()


@pytest.mark.parametrize("power", [0, 1, 3, 16])
def test_late_samples_weigh_as_their_rising_factorial(power):
    """The k-th of K samples weighs k (k + 1) ... (k + power - 1), over the sum of all: about k ** power."""
    weights = [math.prod(range(k, k + power)) for k in range(1, 13)]
    expected = sum(w * step for w, step in zip(weights, range(8, 42, 3), strict=True)) / sum(weights)
    average = Average(every=3, count="late", power=power)
    assert averaged_ramp(average, 8, 41) == pytest.approx(expected)


@pytest.mark.parametrize("warmup_steps, resets", [(49, 0), (50, 1)])
def test_by_default_a_short_warm_up_ends_without_a_reset(warmup_steps, resets):
    """and with a warning in one line; the weights are averaged all the same."""
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        wsc = WeightSpaceConsolidation(net.named_parameters(), warmup_steps=warmup_steps).attach(optimizer)
    assert [str(one.message).count("\n") for one in said] == [0] * (1 - resets)
    train(net, optimizer, range(60))
    assert (wsc.resets, wsc.averaged) == (resets, 61 - warmup_steps)
    wsc.finish()


@pytest.mark.parametrize("steps", [40, 400])
def test_the_late_average_lags_by_the_same_share_of_any_task(steps):
    """Of weights that move along a line, by 1 / (power + 2) of the steps since the reset, whatever their number."""
    warmup = steps // 4
    lag = steps - averaged_ramp(Average(every=1, count="late", power=8), warmup, steps)
    assert lag == pytest.approx((steps - warmup) / 10, abs=0.5)


@pytest.mark.parametrize(
    "warmup, every, interval",
    [(10, 0.25, 2), (3, 0.25, 1), (1000, 0.01, 10), (100, 0.29, 29), (170, 0.7, 119), (1000, 7, 7)],
)
def test_an_interval_below_one_is_a_share_of_the_warm_up(warmup, every, interval):
    average = Average(every=every)
    due = [step for step in range(warmup, warmup + 3 * interval + 1) if average.due(step, warmup)]
    assert due == [warmup + k * interval for k in range(4)]


@pytest.mark.parametrize(
    "file, count, every, share",
    [
        ("wsc", "late", 0.01, 24 / (160 * 161 * 162 * 163)),
        ("paper/paper_text", "since_reset", 5, 1 / 12),
        ("paper/wsc_literal", "absolute", 5, 22 / 72),
        ("paper/paper_text", "swa", 5, 20 / 75),
    ],
)
def test_share_of_the_reset_weights_at_the_papers_schedule(file, count, every, share):
    """70 epochs, the reset after 17: weights that are 1 at the reset and 0 from then on have their share as average.

    late: 159 samples after the first one, and the product of n / (n + 1) = m / (m + 4) over them. The others have
    j = 5. since_reset: samples at 17, 22, ..., 67 and 70, all alike. absolute: n = i/5 at 22, 27, ..., 67, and the
    product of n / (n + 1) = i / (i + 5) telescopes to 22/72. swa: at 20, 25, ..., 70, so 20/75.
    """
    runs = (run for run in load(EXPS / f"{file}.json") if run.model_name == "wsc")
    config = next(run for run in runs if run.wsc.average_count == count)
    warmup, epochs = int(config.wsc.warmup * config.epochs), config.epochs
    assert (warmup, epochs, config.wsc.average_every) == (17, 70, every)
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    average = config.wsc.average_rule(per_epoch=3)
    wsc = WeightSpaceConsolidation([("w", weight)], warmup_steps=3 * warmup, retain=1, average=average, reset=Blend())
    wsc.attach(optimizer)
    for step in range(1, 3 * epochs + 1):
        weight.grad = torch.full_like(weight, float(step == 3 * warmup + 1))
        optimizer.step()
    wsc.finish()
    assert weight.item() == pytest.approx(share)


def test_bf16_network_gets_the_rounded_fp32_average():
    net, optimizer, wsc = start(dtype=torch.bfloat16, warmup_steps=2, average=Average(1, count="since_reset"))
    samples = []
    for step in range(8):
        train_step(net, optimizer, step)
        samples += [[p.detach().double() for p in net.parameters()]] if step >= 1 else []
    assert all(mean.dtype == torch.float32 for mean in wsc.state_dict()["average"].values())
    wsc.finish()
    for index, param in enumerate(net.parameters()):
        exact = torch.stack([sample[index] for sample in samples]).mean(0)
        assert param.dtype == torch.bfloat16
        torch.testing.assert_close(
            param.detach().double(), exact, rtol=2**-8, atol=1e-6
        )  # half a unit in the last place


def test_finish_without_average_leaves_the_last_weights():
    net, optimizer, wsc = start(warmup_steps=2, average=None)
    train(net, optimizer, range(5))
    last = snapshot(net)
    wsc.finish()
    assert all(torch.equal(last[name], tensor) for name, tensor in net.state_dict().items())
    assert wsc.averaged == 0


@pytest.mark.parametrize("every, weighting", [(1, lambda step, samples, interval: 2.0 * samples), (3, lambda *_: 9.0)])
def test_the_weighting_of_the_average_may_be_a_function(every, weighting):
    """Each sample theta gives (n Theta + theta) / (n + 1), here in Python floats."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    average = Average(every, weighting=weighting)
    wsc = WeightSpaceConsolidation([("w", weight)], warmup_steps=2, retain=1, average=average, reset=Blend())
    wsc.attach(optimizer)
    samples, mean = 0, 0.0
    for step in range(1, 12):
        weight.grad = torch.full_like(weight, float(step))
        optimizer.step()
        if step >= 2 and (step - 2) % every == 0:
            n = weighting(step, samples, every) if samples else 0.0
            mean = (n * mean + weight.item()) / (n + 1)
            samples += 1
    wsc.finish()
    assert weight.item() == pytest.approx(mean, rel=1e-12)


# Parameters and buffers.


def test_shared_parameters_count_once_and_frozen_ones_not_at_all():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    net[2].requires_grad_(False)
    wsc = WeightSpaceConsolidation(net.named_parameters(remove_duplicate=False), warmup_steps=1, reset=Blend())
    assert list(wsc.state_dict()["previous"]) == ["0.weight", "0.bias", "1.bias"]


@pytest.mark.parametrize("reset_buffers, average_buffers", [(False, False), (False, True), (True, False), (True, True)])
def test_buffers_are_reset_and_averaged_only_on_request(reset_buffers, average_buffers):
    weight, buffer, count = nn.Parameter(torch.zeros(1)), torch.zeros(1), torch.tensor(0)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    named_buffers = [("mean", buffer), ("count", count)]
    wsc = WeightSpaceConsolidation(
        [("w", weight)],
        warmup_steps=1,
        named_buffers=named_buffers,
        reset=Blend(buffers=reset_buffers),
        average=Average(count="since_reset", buffers=average_buffers),
    ).attach(optimizer)
    for _ in range(2):
        buffer += 8.0
        weight.grad = torch.ones(1)
        optimizer.step()
    wsc.finish()
    after_reset = 4.0 if reset_buffers else 8.0
    last = after_reset + 8.0
    assert buffer.item() == ((after_reset + last) / 2 if average_buffers else last)
    assert count.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reset_every", [None, 3])
def test_memory_is_what_the_docstring_says(dtype, reset_every):
    net, optimizer, wsc = start(dtype=dtype, warmup_steps=2, reset=Blend(every=reset_every))
    elements, size = sum(p.numel() for p in net.parameters()), dtype.itemsize

    def held():
        state = wsc.state_dict()
        parts = [state["previous"], state["average"]]
        if tracker := state["tracker"]:
            parts += [tracker["first"], tracker["second"]]
        return sum(tensor.nbytes for part in parts for tensor in part.values())

    assert held() == elements * (size + 2 * 4)
    train(net, optimizer, range(2))
    assert held() == elements * (size + 3 * 4 if reset_every else 4)
    wsc.finish()
    assert held() == 0


class HostReads(TorchDispatchMode):
    """Counts the operations whose result the host must wait for."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal")
        return func(*args, **(kwargs or {}))


def test_no_step_but_the_reset_waits_for_the_device():
    net, optimizer, _ = start(warmup_steps=3, average=Average(every=2))
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    waits = []
    for _ in range(8):
        with HostReads() as reads:
            optimizer.step()
        waits.append(reads.count > 0)
    assert waits == [False, False, True] + 5 * [False]


# The average in between.


@pytest.mark.parametrize(
    "options",
    [
        dict(average=Average(every=2)),
        dict(average=Average(every=3, last=False)),
        dict(average=Average(every=2, start="first")),
        dict(average=Average(every=2, count="swa")),
        dict(average=Average(every=3, buffers=True), reset=Blend(every=2, buffers=True)),
        dict(average=Average(every=2), reset=None, warmup_steps=0),
    ],
    ids=["default", "not the last", "first", "swa", "buffers", "average only"],
)
def test_applied_weights_are_those_that_finish_would_give_and_are_gone_afterwards(options):
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    wsc = consolidated(net, optimizer, named_buffers=net.named_buffers(), **{"warmup_steps": 3} | options)
    differed = []
    for step in range(9):
        train_step(net, optimizer, step)
        before = in_bytes(net)
        if wsc.phase == "warm-up":
            with pytest.raises(RuntimeError, match="in phase 'warm-up': there is no average"), wsc.applied():
                pass
            continue
        twin, twin_wsc = copy.deepcopy((net, wsc))
        twin_wsc.finish()
        with wsc.applied():
            assert in_bytes(net) == in_bytes(twin)
        assert in_bytes(net) == before
        with pytest.raises(ZeroDivisionError), wsc.applied():
            raise ZeroDivisionError
        assert in_bytes(net) == before
        differed.append(in_bytes(twin) != before)
    assert sum(differed) > 3
    undisturbed = small_net()
    other = torch.optim.SGD(undisturbed.parameters(), lr=0.1, momentum=0.9)
    plain = consolidated(undisturbed, other, named_buffers=undisturbed.named_buffers(), **{"warmup_steps": 3} | options)
    train(undisturbed, other, range(9))
    for each in (wsc, plain):
        each.finish()
    assert in_bytes(net) == in_bytes(undisturbed)
    with pytest.raises(RuntimeError, match=r"applied\(\) in phase 'finished'"), wsc.applied():
        pass


def in_bytes(net):
    return {name: tensor.numpy().tobytes() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("average", [None, Average(every=2, start="first", last=False)])
def test_without_an_average_none_can_be_applied(average):
    net, optimizer, wsc = start(warmup_steps=1, average=average)
    train(net, optimizer, range(2))
    with pytest.raises(RuntimeError, match=r"applied\(\) in phase 'averaging': there is no average"), wsc.applied():
        pass
    assert not wsc.has_average
    train(net, optimizer, range(2, 3))
    assert wsc.has_average == bool(average)


# Saving.


@pytest.mark.parametrize(
    "options",
    [
        dict(warmup_steps=3, average=Average(every=2)),
        dict(warmup_steps=2, average=Average(every=3, start="first", last=False)),
        dict(warmup_steps=2, average=Average(every=2, count="absolute"), reset=Blend(every=2, momentum=True)),
        dict(warmup_steps=3, reset=None),
        dict(warmup_steps=3, average=Average(every=2, buffers=True), reset=Blend(buffers=True)),
    ],
    ids=["default", "first", "absolute, repeated", "average only", "buffers"],
)
def test_save_load_and_go_on_equals_going_on(options):
    def make():
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        wsc = WeightSpaceConsolidation(
            net.named_parameters(), named_buffers=net.named_buffers(), **{"reset": Blend()} | options
        )
        return net, optimizer, wsc.attach(optimizer)

    def save(parts):
        file = io.BytesIO()
        torch.save([part.state_dict() for part in parts], file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    steps = 9
    through = make()
    train(*through[:2], range(steps))
    through[2].finish()
    for moment in range(steps + 1):
        stopped = make()
        train(*stopped[:2], range(moment))
        saved = save(stopped)
        resumed = make()
        train(*resumed[:2], range(50, 52))  # its previous state is replaced
        for part, state in zip(resumed, saved):
            part.load_state_dict(state)
        train(*resumed[:2], range(moment, steps))
        resumed[2].finish()
        for name, tensor in through[0].state_dict().items():
            assert torch.equal(tensor, resumed[0].state_dict()[name]), (moment, name)
        assert (through[2].steps, through[2].averaged, through[2].resets) == (
            resumed[2].steps,
            resumed[2].averaged,
            resumed[2].resets,
        )


def test_loaded_state_is_a_copy():
    state = start(warmup_steps=3)[2].state_dict()
    net, optimizer, wsc = start(warmup_steps=3)
    wsc.load_state_dict(state)
    train_step(net, optimizer, 0)
    assert not any(tensor.any() for tensor in state["tracker"]["first"].values())


def test_a_gradient_from_before_saving_counts_after_loading():
    params = {"always": nn.Parameter(torch.zeros(2)), "early": nn.Parameter(torch.zeros(2))}
    optimizer = torch.optim.SGD(params.values(), lr=1.0)
    stopped = WeightSpaceConsolidation(params.items(), warmup_steps=2, retain=0, reset=Revert()).attach(optimizer)
    resumed = WeightSpaceConsolidation(params.items(), warmup_steps=2, retain=0, reset=Revert())
    for param in params.values():
        param.grad = torch.ones(2)
    optimizer.step()
    stopped.detach()
    resumed.load_state_dict(stopped.state_dict())
    resumed.attach(optimizer)
    params["early"].grad = None
    optimizer.step()
    assert {name: param.tolist() for name, param in params.items()} == {"always": [0, 0], "early": [0, 0]}


def test_finished_state_stays_finished():
    net, optimizer, wsc = finished()
    other = WeightSpaceConsolidation(net.named_parameters(), warmup_steps=1, reset=Blend())
    other.load_state_dict(wsc.state_dict())
    assert other.phase == "finished"
    with pytest.raises(RuntimeError, match="was called already"):
        other.finish()


@pytest.mark.parametrize(
    "other, options, message",
    [
        (lambda: nn.Sequential(nn.Linear(4, 6)), {}, "'1.bias' is in the state but not in this object"),
        (lambda: nn.Sequential(*small_net(), nn.Linear(3, 1)), {}, "'4.bias' is in this object but not in the state"),
        (
            lambda: nn.Sequential(*small_net()[:3], nn.Linear(6, 5)),
            {},
            r"'3.bias' has shape \(5,\), but \(3,\) in the state",
        ),
        (small_net, {"retain": 0.3}, "saved with retain=0.2, this object has retain=0.3"),
        (small_net, {"warmup_steps": 4}, "saved with warmup_steps=3, this object has warmup_steps=4"),
        (small_net, {"reset": Revert()}, r"saved with reset=Blend\(.*blend=0.5\), this object has reset=Revert\("),
        (small_net, {"average": Average(every=2)}, r"saved with average=Average\(every=0.01, .*\), this object"),
        (small_net, {"importance": drift_score()}, r"this object has importance=DriftScore\(\)"),
    ],
)
def test_state_of_something_else_is_refused_by_name(other, options, message):
    state = WeightSpaceConsolidation(small_net().named_parameters(), warmup_steps=3, reset=Blend()).state_dict()
    wsc = WeightSpaceConsolidation(other().named_parameters(), **{"warmup_steps": 3, "reset": Blend()} | options)
    with pytest.raises(ValueError, match=message):
        wsc.load_state_dict(state)


@pytest.mark.parametrize("saved", [1, 99, None])
def test_a_state_of_another_version_is_refused_in_one_line(saved):
    _, _, wsc = start(warmup_steps=3)
    state = wsc.state_dict() | {"format": saved}
    if saved is None:  # the first version had no number
        del state["format"]
    with pytest.raises(ValueError, match=f"the state has format {saved or 1}, this version reads format 2: [^\n]*$"):
        wsc.load_state_dict(state)


# Misuse.


@pytest.mark.parametrize(
    "options, message",
    [
        (lambda: dict(retain=1.5), "retain=1.5 is a fraction"),
        (lambda: dict(retain=float("nan")), "retain=nan is a fraction"),
        (lambda: dict(reset=Blend(-0.1)), "blend=-0.1 is a fraction"),
        (lambda: dict(reset=ShrinkPerturb(dict, shrink=2.0)), "shrink=2.0 is a fraction"),
        (lambda: dict(reset=ShrinkPerturb(dict, perturb=-1.0)), "perturb=-1.0 is a factor"),
        (lambda: dict(average=Average(every=0)), "every=0: give a whole number of optimiser steps, at least 1"),
        (lambda: dict(average=Average(every=1.5)), "every=1.5: give a whole number of optimiser steps"),
        (lambda: dict(average=Average(power=-1)), "power=-1: give a number of at least 0"),
        (lambda: dict(warmup_steps=17.5), "warmup_steps=17.5: give a whole number"),
        (lambda: dict(warmup_steps=-1), "warmup_steps=-1"),
        (lambda: dict(reset=Blend(every=0)), "every=0"),
        (lambda: dict(reset=Blend(min_warmup=-1)), "min_warmup=-1: give a whole number of optimiser steps"),
        (lambda: dict(importance=moment_score(betas=(0.9, 1.0))), "betas="),
        (lambda: dict(importance=moment_score(source="mine")), "source='mine' is unknown; known: own, optimizer, carr"),
        (lambda: dict(warmup_steps=0), "leaves no gradient to rank by"),
        (lambda: dict(reset="blend"), r"reset='blend': give Blend\(\), Revert\(\), .* or None"),
        (
            lambda: dict(importance="moment"),
            r"importance='moment': give moment_score\(\), drift_score\(\), .* a function",
        ),
        (lambda: dict(average=True), r"average=True: give an Average\(\) or None"),
        (lambda: dict(rank_scope="layer"), "known: global, tensor"),
        (lambda: dict(average=Average(start="now")), "known: reset, first"),
        (lambda: dict(average=Average(count="total")), "known: late, since_reset, absolute, swa"),
        (lambda: dict(average=Average(count="absolute", start="first")), "it needs start='reset'"),
        (lambda: dict(average=Average(buffers=True)), r"needs named_buffers=model.named_buffers\(\)"),
        (lambda: dict(reset=Blend(buffers=True)), r"needs named_buffers=model.named_buffers\(\)"),
        (lambda: dict(eligible={"9.weight": torch.ones(1)}), "'9.weight' is not the name of a trainable parameter"),
        (
            lambda: dict(eligible={"3.bias": torch.ones(2, dtype=torch.bool)}),
            r"'3.bias' needs torch.bool of shape \(3,\)",
        ),
        (lambda: dict(eligible={"3.bias": torch.ones(3)}), "not torch.float32"),
        (
            lambda: dict(average=Average(buffers=True), named_buffers=[("3.bias", torch.ones(3))]),
            "two tensors are named '3.bias'",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_bad_options_are_refused_at_once(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        WeightSpaceConsolidation(small_net().named_parameters(), **{"warmup_steps": 3, "reset": Blend()} | options())


def test_unknown_scope_of_the_mask_is_refused():
    with pytest.raises(ValueError, match="known: 'global', 'tensor'"):
        top_mask([torch.ones(2)], 0.5, "layer")


@pytest.mark.parametrize(
    "named_parameters, error, message",
    [
        (lambda net: net.parameters(), TypeError, r"pass model.named_parameters\(\)"),
        (lambda net: dict(net.named_parameters()), TypeError, "pairs"),
        (
            lambda net: [*net.named_parameters(), *net.named_parameters()],
            ValueError,
            "two tensors are named '0.weight'",
        ),
        (lambda net: net.requires_grad_(False).named_parameters(), ValueError, "no parameter that requires a gradient"),
        (lambda net: (), ValueError, "no parameter that requires a gradient"),
    ],
)
def test_bad_parameters_are_refused_at_once(named_parameters, error, message):
    with pytest.raises(error, match=message):
        WeightSpaceConsolidation(named_parameters(small_net()), warmup_steps=3, reset=Blend())


def finished():
    net, optimizer, wsc = start(warmup_steps=1)
    train_step(net, optimizer, 0)
    wsc.finish()
    return net, optimizer, wsc


def test_a_step_after_finish_raises_until_detached():
    net, optimizer, wsc = finished()
    with pytest.raises(RuntimeError, match=r"make a new WeightSpaceConsolidation for the next task .*, or detach\(\)"):
        train_step(net, optimizer, 1)
    wsc.detach()
    train_step(net, optimizer, 1)
    assert wsc.steps == 1


def test_finishing_twice_raises():
    with pytest.raises(RuntimeError, match="was called already"):
        finished()[2].finish()


def test_finishing_in_the_warm_up_raises_and_changes_nothing():
    net, optimizer, wsc = start(warmup_steps=5)
    train_step(net, optimizer, 0)
    weights = snapshot(net)
    with pytest.raises(RuntimeError, match="after 1 of 5 warm-up steps: train longer or shorten warmup_steps"):
        wsc.finish()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in net.state_dict().items())
    assert wsc.phase == "warm-up"


def test_finishing_without_a_sample_raises():
    net, optimizer, wsc = start(warmup_steps=1, average=Average(every=10, start="first", last=False))
    train_step(net, optimizer, 0)
    with pytest.raises(RuntimeError, match="give a smaller `every`, or last=True"):
        wsc.finish()


def test_missing_gradients_raise():
    net, optimizer, _ = start(warmup_steps=2)
    with pytest.raises(RuntimeError, match="missing gradients"):
        optimizer.step()


def test_gradients_that_are_not_finite_raise_at_the_reset_and_name_the_parameter():
    net, optimizer, _ = start(lr=0.0, warmup_steps=1)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    net[3].weight.grad[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match="'3.weight' were not finite"):
        optimizer.step()


@pytest.mark.parametrize("change", [lambda w: torch.zeros(5, 6), lambda w: w.double()], ids=["grown", "converted"])
def test_a_parameter_that_changed_raises(change):
    net, optimizer, _ = start(warmup_steps=2)
    net[3].weight.data = change(net[3].weight.data)
    net[0].weight.grad = torch.ones(6, 4)
    with pytest.raises(RuntimeError, match=r"'3.weight' was \(3, 6\) torch.float32 cpu and is now .* make a new"):
        optimizer.step()


def test_attaching_twice_raises_and_attaching_again_after_detach_goes_on():
    net, optimizer, wsc = start(warmup_steps=2)
    with pytest.raises(RuntimeError, match=r"detach\(\) first"):
        wsc.attach(optimizer)
    train_step(net, optimizer, 0)
    wsc.detach()
    other = torch.optim.Adam(net.parameters())
    wsc.attach(other)
    train_step(net, other, 1)
    assert (wsc.steps, wsc.phase) == (2, "averaging")


def test_attaching_to_a_foreign_optimizer_raises():
    wsc = WeightSpaceConsolidation(small_net().named_parameters(), warmup_steps=2, reset=Blend())
    with pytest.raises(ValueError, match="holds none of the parameters"):
        wsc.attach(torch.optim.SGD(small_net().parameters(), lr=0.1))


def test_one_optimizer_may_train_several_tasks():
    """The finished object of a task before no longer follows it, whatever else does."""
    net, optimizer, wsc = start(warmup_steps=1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for step in range(2):
        train_step(net, optimizer, step)
    wsc.finish()
    with pytest.raises(RuntimeError, match=r"a step after finish\(\): make a new .* and attach\(\) it"):
        train_step(net, optimizer, 2)
    following = WeightSpaceConsolidation(net.named_parameters(), warmup_steps=1, reset=Blend()).attach(optimizer)
    for step in range(2):
        train_step(net, optimizer, step)
    assert (wsc.steps, following.steps, following.phase, len(calls)) == (2, 2, "averaging", 4)
    following.finish()


def test_a_last_layer_that_was_replaced_after_the_object_was_made_is_a_warning():
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    wsc = WeightSpaceConsolidation(net.named_parameters(), warmup_steps=1, reset=Blend())
    net[1] = nn.Linear(3, 4)
    with pytest.warns(UserWarning, match=r"follows 1.weight, which the .* not hold, and leaves out 2 parameters"):
        wsc.attach(torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize("followed, trained", [(slice(0, 1), slice(0, 2)), (slice(0, 2), slice(0, 1))])
def test_following_a_part_or_training_a_part_is_no_warning(followed, trained):
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    wsc = WeightSpaceConsolidation(net[followed].named_parameters(), warmup_steps=1, reset=Blend())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wsc.attach(torch.optim.SGD(net[trained].parameters(), lr=0.1))


# Batch norm.


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=0.3)), [torch.randn(size, 4) for size in (8, 8, 5)]


def test_recomputed_statistics_are_the_mean_over_the_batches():
    net, batches = normed()
    net.train()
    net(batches[0] + 100)  # stale statistics
    recompute_batch_norm(net, [(batch, None) for batch in batches])
    outputs = [net[0](batch).detach() for batch in batches]
    torch.testing.assert_close(net[1].running_mean, torch.stack([x.mean(0) for x in outputs]).mean(0))
    torch.testing.assert_close(net[1].running_var, torch.stack([x.var(0) for x in outputs]).mean(0))
    assert net[1].momentum == 0.3
    other, _ = normed()
    update_bn(batches, other)
    torch.testing.assert_close(net.state_dict(), other.state_dict())


class TwoInputs(nn.Module):
    """One encoder for two inputs, and a batch norm that only some batches reach."""

    def __init__(self):
        super().__init__()
        self.encoder, self.sometimes = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), nn.BatchNorm1d(3)

    def forward(self, images):
        features = self.encoder(images) - self.encoder(-5 * images)
        return features if len(images) == 5 else self.sometimes(features)


def test_a_norm_that_runs_twice_or_not_at_all_in_a_batch_has_the_mean_of_what_it_saw():
    torch.manual_seed(0)
    net, other = TwoInputs(), TwoInputs()
    other.load_state_dict(net.state_dict())
    batches = [1 + torch.randn(size, 4) for size in (8, 5, 8)]
    recompute_batch_norm(net, batches)
    update_bn(batches, other)
    torch.testing.assert_close(net.state_dict(), other.state_dict())
    seen = [net.encoder[0](sign * batch) for batch in batches for sign in (1, -5)]
    expected = torch.stack([each.mean(0) for each in seen]).mean(0)
    torch.testing.assert_close(net.encoder[1].running_mean, expected.detach())


def test_recomputing_gives_each_module_its_mode_back():
    net, batches = normed()
    net.eval()
    net[0].train()
    recompute_batch_norm(net, batches)
    assert [module.training for module in net.modules()] == [False, True, False]


class PartlyFrozen(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)
        self[0].eval()
        return self


def test_recomputing_leaves_frozen_batch_norms_alone():
    net = PartlyFrozen(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    net[0].running_mean.fill_(7.0)
    recompute_batch_norm(net, [torch.randn(8, 4)])
    assert (net[0].running_mean == 7).all()
    torch.testing.assert_close(net[1].running_mean.mean().item(), -7.0, atol=1.0, rtol=0)


def test_without_batch_norm_no_batch_is_drawn():
    batches = iter([torch.randn(2, 4)])
    recompute_batch_norm(nn.Linear(4, 2), batches)
    assert len(list(batches)) == 1


class Keyworded(nn.Module):
    """As a model of transformers: ``forward`` has keyword arguments, with labels or without."""

    def __init__(self, labels):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.labels, self.seen = normed()[0], labels, []
        if labels:
            self.forward = self.with_labels

    def forward(self, pixel_values):
        return self.layers(pixel_values)

    def with_labels(self, pixel_values, labels):
        self.seen.append(labels)
        return self.layers(pixel_values)


@pytest.mark.parametrize("labels", [True, False])
def test_mappings_are_keyword_arguments_with_labels_only_for_a_model_that_takes_them(labels):
    net, (plain, batches) = Keyworded(labels), normed()
    targets = [torch.arange(len(batch)) for batch in batches]
    rows = [UserDict(pixel_values=batch, labels=target) for batch, target in zip(batches, targets)]
    recompute_batch_norm(net, rows)
    recompute_batch_norm(plain, batches)
    torch.testing.assert_close(net.layers.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert len(net.seen) == (len(batches) if labels else 0)
    assert all(map(torch.equal, net.seen, targets))


def test_a_key_that_the_model_does_not_know_is_named():
    with pytest.raises(TypeError, match="pixels"):
        recompute_batch_norm(Keyworded(False), [{"pixels": torch.randn(8, 4)}])


def test_recomputing_from_nothing_raises_and_keeps_the_statistics():
    net, _ = normed()
    net[1].running_mean.fill_(7.0)
    with pytest.raises(ValueError, match="no batch to recompute"):
        recompute_batch_norm(net, [])
    assert (net[1].running_mean == 7).all()


# The documentation.


def test_example_in_the_docstring_runs():
    (example,) = doctest.DocTestFinder(recurse=False).find(WeightSpaceConsolidation)
    assert doctest.DocTestRunner().run(example, clear_globs=False).failed == 0
    wsc = example.globs["wsc"]
    assert (wsc.phase, wsc.resets, wsc.averaged) == ("finished", 1, 151)  # the reset weights and 150 steps


def test_a_state_is_refused_where_other_elements_are_eligible():
    def made(mask):
        weights = nn.Parameter(torch.ones(4))
        return WeightSpaceConsolidation([("w", weights)], warmup_steps=2, reset=Revert(), eligible=mask)

    mask = torch.tensor([True, True, False, False])
    state = made({"w": mask}).state_dict()
    made({"w": mask}).load_state_dict(state)
    for other in (None, {"w": torch.ones(4, dtype=torch.bool)}):
        with pytest.raises(ValueError, match="saved with eligible={'w': 2}, this object has eligible="):
            made(other).load_state_dict(state)
    made(None).load_state_dict({name: value for name, value in state.items() if name != "eligible"})  # of before


def test_a_recomputation_that_fails_keeps_the_statistics():
    net = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    net(torch.randn(8, 4))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(RuntimeError):
        recompute_batch_norm(net, [torch.randn(8, 4), torch.randn(8, 3)])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net[1].momentum == 0.1
