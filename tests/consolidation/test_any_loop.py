"""The consolidation in any loop: every optimiser, scaler, type and way of naming parameters,
against the slow reference and torch's implementations.
"""

import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.consolidation import ReferenceConsolidation
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pycil_wsc.consolidation import (
    Average,
    Blend,
    Revert,
    WeightSpaceConsolidation,
    drift_score,
    moment_score,
    ranking,
)
from pycil_wsc.consolidation.importance import MOMENT_SCORES
from pycil_wsc.studies.rival_resets import Random, ShrinkPerturb

# The whole, against the slow reference.

SHAPES = {"matrix": (3, 4), "kernel": (2, 1, 2, 2), "bias": (5,), "scale": (), "unused": (4,), "frozen": (3,)}
GROUPS = [["matrix", "scale", "frozen"], ["kernel", "bias", "unused"]]
BETAS = [(0.9, 0.99), (0.5, 0.7)]  # of the two groups, where the optimiser has betas


@st.composite
def loops(draw):
    """-> (function of the new initial values -> options of the consolidation, how the loop around it is made)."""
    rule = draw(st.sampled_from([Blend, Revert, Random, ShrinkPerturb, None]))
    blend = draw(st.sampled_from([0, 0.3, 0.5, 1]))
    factors = draw(st.sampled_from([0.0, 0.4])), draw(st.sampled_from([0.0, 2.0]))
    common = dict(every=draw(st.sampled_from([None, 1, 3])), buffers=draw(st.booleans()))
    count = draw(st.sampled_from(["late", "since_reset", "absolute", "swa"]))
    average = Average(
        every=draw(st.sampled_from([1, 2, 3, 4, 0.1, 0.5])),
        start=draw(st.sampled_from(["reset", "first"])) if count in ("late", "since_reset") else "reset",
        count=count,
        last=draw(st.booleans()),
        buffers=draw(st.booleans()),
        power=draw(st.sampled_from([0, 0.5, 3, 16])),
    )
    optimizer = draw(st.sampled_from(["SGD", "Adam", "AdamW"]))
    source = "own" if optimizer == "SGD" else draw(st.sampled_from(["own", "optimizer"]))
    moments = dict(source=source)
    if source == "own":
        moments |= dict(betas=draw(st.sampled_from([(0.9, 0.999), (0.5, 0.7), (0, 0)])), absolute=draw(st.booleans()))
    importance = draw(st.sampled_from([*MOMENT_SCORES, "drift"]))
    options = dict(
        warmup_steps=draw(st.integers(1 if rule else 0, 5)),
        retain=draw(st.sampled_from([0, 0.1, 0.2, 0.5, 0.77, 1])),
        importance=drift_score() if importance == "drift" else MOMENT_SCORES[importance](**moments),
        average=average if draw(st.booleans()) else None,
        rank_scope=draw(st.sampled_from(["global", "tensor"])),
    )

    def with_reset(fresh):
        arguments = {Blend: [blend], Random: [fresh], ShrinkPerturb: [fresh, *factors]}
        return options | {"reset": rule and rule(*arguments.get(rule, []), **common)}

    # Adam keeps its moments in the weights' type: in bf16 they are not those of the equations. Its first step has the
    # same length everywhere, so the order of drifts is one of rounding errors: those of float64 in both versions.
    narrow = [torch.float32, *([torch.bfloat16] if source == "own" else [])]
    narrow = [] if importance == "drift" and optimizer != "SGD" else narrow
    loop = dict(
        optimizer=optimizer,
        fused=draw(st.booleans()),
        scaler=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float64, *narrow])),
        prefix=draw(st.sampled_from(["", "_orig_mod."])),
        eligible=draw(st.booleans()),
        block=draw(st.sampled_from([3, 2**20])),
        seed=draw(st.integers(0, 10**6)),
    )
    return with_reset, loop


def make_optimizer(params, name, fused):
    own = (
        dict(momentum=0.0 if fused else 0.9) if name == "SGD" else {}
    )  # fused SGD cannot begin a momentum in a later step than others
    groups = [
        {"params": [params[n] for n in names]} | ({} if name == "SGD" else {"betas": betas})
        for names, betas in zip(GROUPS, BETAS)
    ]
    return getattr(torch.optim, name)(groups, lr=0.1, weight_decay=0.1 if name == "AdamW" else 0.0, fused=fused, **own)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(loops())
def test_fast_version_follows_the_slow_one_in_every_loop(case):
    with_reset, loop = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "BLOCK", loop["block"])
        compare_with_reference(with_reset, loop)


def compare_with_reference(with_reset, loop):
    """One task: the fast version attached to an optimiser, and beside it the same optimiser's twin,
    whose weights the slow version changes.
    """
    rng = random.Random(loop["seed"])
    dtype, tolerance = loop["dtype"], {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2**-5}[loop["dtype"]]
    params = {
        name: nn.Parameter(gaussian(rng, shape, dtype), requires_grad=name != "frozen")
        for name, shape in SHAPES.items()
    }
    buffers = {"mean": torch.ones(3, dtype=dtype), "count": torch.tensor(0)}
    twins, twin_buffers = copy.deepcopy(params), {"mean": copy.deepcopy(buffers["mean"])}
    optimizer, twin_optimizer = (make_optimizer(each, loop["optimizer"], loop["fused"]) for each in (params, twins))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, enabled=loop["scaler"])
    scaler.scale(torch.ones(()))  # makes the scale
    mask = [rng.random() < 0.6 for _ in range(12)]

    named = [(loop["prefix"] + name, p) for name, p in [*params.items(), ("shared", params["matrix"])]]
    eligible = {loop["prefix"] + "matrix": torch.tensor(mask).view(3, 4)} if loop["eligible"] else {}
    initial = {name: gaussian(rng, shape, dtype) for name, shape in SHAPES.items()}
    options = with_reset(lambda: initial)
    average = options["average"]
    fast = WeightSpaceConsolidation(named, named_buffers=buffers.items(), eligible=eligible, **options)
    fast.attach(optimizer)
    trained = [name for name in SHAPES if name != "frozen"]
    adams = {name: b for names, b in zip(GROUPS, BETAS) for name in names}
    slow = ReferenceConsolidation(
        lists(twins, trained),
        **options,
        betas=adams if getattr(options["importance"], "source", "own") == "optimizer" else None,
        buffers=lists(twin_buffers),
        eligible={"matrix": mask} if loop["eligible"] else {},
    )

    def assert_same():
        for name in SHAPES:
            torch.testing.assert_close(params[name], twins[name], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(buffers["mean"], twin_buffers["mean"], rtol=tolerance, atol=tolerance)

    real = 0
    while real < options["warmup_steps"] + 3 * (average.interval(options["warmup_steps"]) if average else 1) + 1:
        gradients = {
            name: None if name in ("unused", "frozen") else random_gradient(rng, shape, dtype)
            for name, shape in SHAPES.items()
        }
        skipped = loop["scaler"] and rng.random() < 0.3
        bias = [float("inf") if skipped else rng.random() for _ in range(5)]
        gradients["bias"] = torch.tensor(bias, dtype=dtype)  # at least one has a gradient
        for each in params, twins:
            for name, gradient in gradients.items():
                each[name].grad = None if gradient is None else gradient * scaler.get_scale()
        for buffer in buffers["mean"], twin_buffers["mean"]:
            buffer += 1.0
        scaler.step(optimizer)
        scaler.step(twin_optimizer)
        scaler.update()
        weights, means = lists(twins, trained), lists(twin_buffers)
        slow.step(
            weights,
            {n: None if g is None else g.double().flatten().tolist() for n, g in gradients.items()},
            means,
            skipped,
        )
        write(twins, weights)
        write(twin_buffers, means)
        assert_same()
        real += not skipped
        if rng.random() < 0.3:  # reading the value updates the count; the result must not depend on this
            assert fast.steps == slow.i
    if average and average.start == "first" and not average.last and not slow.mean:
        return  # nothing to average
    fast.finish()
    weights, means = lists(twins, trained), lists(twin_buffers)
    slow.finish(weights, means)
    write(twins, weights)
    write(twin_buffers, means)
    assert_same()
    assert (fast.steps, fast.averaged) == (slow.i, slow.samples)
    assert buffers["count"] == 0


def gaussian(rng, shape, dtype):
    return torch.tensor([rng.gauss(0, 1) for _ in range(torch.Size(shape).numel())], dtype=dtype).view(shape)


def random_gradient(rng, shape, dtype):
    """Half zeros, as for dead units; None now and then."""
    if rng.random() < 0.2:
        return None
    alive = [rng.random() < 0.5 for _ in range(torch.Size(shape).numel())]
    return gaussian(rng, shape, dtype) * torch.tensor(alive).view(shape)


def lists(tensors, names=None):
    return {name: tensors[name].detach().double().flatten().tolist() for name in names or tensors}


@torch.no_grad()
def write(tensors, values):
    for name, each in values.items():
        tensors[name].copy_(torch.tensor(each, dtype=torch.float64).view(tensors[name].shape))


# One by one.

FROM_ADAM = moment_score(source="optimizer")


def small_net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def batch(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=generator).to(dtype), torch.randint(3, (8,), generator=generator)


def train(net, optimizer, steps):
    for step in steps:
        inputs, targets = batch(step, next(net.parameters()).dtype)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()


def start(optimizer=torch.optim.AdamW, net=None, lr=0.05, **options):
    """-> a small network, its optimiser, and a consolidation that follows it."""
    net = net or small_net()
    optimizer = optimizer(net.parameters(), lr=lr)
    wsc = WeightSpaceConsolidation(net.named_parameters(), **{"reset": Blend(), **options})
    return net, optimizer, wsc.attach(optimizer)


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_gradients_accumulated_over_batches_are_one_step():
    ends = []
    for parts in 1, 4:
        net, optimizer, wsc = start(torch.optim.SGD, small_net(torch.float64), warmup_steps=3, average=Average(2))
        for step in range(8):
            inputs, targets = batch(step, torch.float64)
            for x, y in zip(inputs.chunk(parts), targets.chunk(parts)):
                (nn.functional.cross_entropy(net(x), y) / parts).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (wsc.steps, wsc.resets, wsc.averaged) == (8, 1, 3)
        wsc.finish()
        ends.append(weights(net))
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_the_optimisers_moments_rank_like_own_ones_of_the_same_decay(optimizer):
    ends = []
    for importance in FROM_ADAM, moment_score(betas=(0.9, 0.999)):
        net, opt, wsc = start(optimizer, warmup_steps=3, average=Average(2), importance=importance)
        train(net, opt, range(8))
        wsc.finish()
        ends.append(weights(net))
    assert torch.equal(*ends)


def test_narrow_moments_of_the_optimiser_are_widened_before_they_are_multiplied():
    weight = nn.Parameter(torch.zeros(20_000, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    options = dict(retain=0.5, importance=FROM_ADAM, reset=Revert(), average=None)
    wsc = WeightSpaceConsolidation([("w", weight)], warmup_steps=2, **{"reset": Blend()} | options).attach(optimizer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        weight.grad = torch.randn(20_000, generator=generator).bfloat16()
        optimizer.step()
    state = optimizer.state[weight]

    def best(score):
        return set(score.argsort(descending=True, stable=True)[:10_000].tolist())

    wide = best(state["exp_avg"].double().abs() * state["exp_avg_sq"].double())
    assert wide != best(state["exp_avg"].abs() * state["exp_avg_sq"])
    assert set(weight.nonzero().flatten().tolist()) == wide
    assert wsc.resets == 1


def test_a_compiled_model_is_followed_like_the_plain_one_and_has_its_state():
    ends = []
    for compiled in False, True:
        net = small_net()
        model = torch.compile(net, backend="eager") if compiled else net
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wsc = WeightSpaceConsolidation(model.named_parameters(), warmup_steps=3, reset=Blend()).attach(optimizer)
        train(model, optimizer, range(2))
        other = WeightSpaceConsolidation(
            (net if compiled else torch.compile(net, backend="eager")).named_parameters(), warmup_steps=3, reset=Blend()
        )
        other.load_state_dict(wsc.state_dict())
        wsc.detach()
        other.attach(optimizer)
        train(model, optimizer, range(2, 5))
        other.finish()
        ends.append(weights(net))
    assert torch.equal(*ends)


# Steps that a GradScaler skips.


def scaled_step(optimizer, scaler, weight, gradient):
    weight.grad = scaler.scale(torch.tensor(gradient))
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("source", ["own", "optimizer"])
@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_do_not_count(fused, source):
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight], lr=1.0, weight_decay=0.0, fused=fused)
    options = dict(retain=0.5, importance=moment_score(source=source), reset=Revert())
    wsc = WeightSpaceConsolidation([("w", weight)], warmup_steps=2, **{"reset": Blend()} | options).attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    resets = []
    for gradient in (
        [9.0, float("inf")],
        [float("nan"), 0.0],
        [1.0, 2.0],
        [float("inf"), 0.0],
        [1.0, 2.0],
        [float("inf"), 0.0],
    ):
        scaled_step(optimizer, scaler, weight, gradient)
        resets.append(wsc.resets)
    assert resets == [0, 0, 0, 0, 1, 1]
    assert (wsc.steps, wsc.averaged) == (2, 1)
    torch.testing.assert_close(weight.detach(), torch.tensor([0.0, -2.0]))  # the nine was not averaged
    wsc.finish()
    torch.testing.assert_close(
        weight.detach(), torch.tensor([0.0, -2.0])
    )  # one sample, the last step being a skipped one


class HostReads(TorchDispatchMode):
    """Counts the operations that synchronise the host with the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("source", ["own", "optimizer"])
def test_under_a_scaler_that_skips_on_the_device_only_steps_with_something_due_wait(source):
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight], lr=1.0, fused=True)
    options = dict(importance=moment_score(source=source), average=Average(every=3))
    WeightSpaceConsolidation([("w", weight)], warmup_steps=4, **{"reset": Blend()} | options).attach(optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())  # as a GradScaler sets them
    waits = []
    for _ in range(10):
        weight.grad = torch.ones(2)
        with HostReads() as reads:
            optimizer.step()
        waits.append(reads.count > 0)
    assert waits == [source == "own", False, False, True, False, False, True, False, False, True]


# Memory.


class Live(TorchDispatchMode):
    """Peak memory of tensors in bytes, in addition to those that exist already."""

    def __init__(self, existing):
        super().__init__()
        self.existing = {tensor.untyped_storage()._cdata for tensor in existing}
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.existing:
                self.storages[storage._cdata] = (
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                    storage.nbytes(),
                )
        self.storages = {key: (ref, size) for key, (ref, size) in self.storages.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, source, copies",
    [
        (torch.float32, "optimizer", 1),
        (torch.bfloat16, "optimizer", 2),
        (torch.float32, "own", 3),
        (torch.bfloat16, "own", 5),
    ],
)
def test_at_most_one_copy_is_held_beside_the_optimisers_state_when_its_moments_are_read(
    monkeypatch, dtype, source, copies
):
    """Copies in bytes of the weights: the average of bf16 is in fp32, own moments too."""
    monkeypatch.setattr(ranking, "BLOCK", 500)
    monkeypatch.setattr(ranking, "DIGIT", 8)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in [(200, 100), (30_000,), (7,), (2, 2, 5000)]]
    size = sum(p.nbytes for p in params)
    optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
    for p in params:
        p.grad = torch.randn(p.shape).to(dtype)
    with Live([*params, *(p.grad for p in params)]) as live:
        options = dict(importance=moment_score(source=source), average=Average(every=2))
        named = [(str(i), p) for i, p in enumerate(params)]
        wsc = WeightSpaceConsolidation(named, warmup_steps=2, **{"reset": Blend()} | options).attach(optimizer)
        for _ in range(6):
            optimizer.step()
        wsc.finish()
    assert (wsc.resets, wsc.averaged) == (1, 3)
    extra = live.peak - sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
    assert copies * size <= extra < (copies + 0.15) * size


# Saving.


@pytest.mark.parametrize("reset_every", [None, 2])
def test_with_the_optimisers_moments_save_load_and_go_on_equals_going_on(reset_every):
    options = dict(warmup_steps=3, average=Average(2), importance=FROM_ADAM, reset=Blend(every=reset_every))
    net, optimizer, wsc = start(**options)
    train(net, optimizer, range(8))
    wsc.finish()
    for moment in range(9):
        stopped = start(**options)
        train(*stopped[:2], range(moment))
        saved = copy.deepcopy([part.state_dict() for part in stopped])
        resumed = start(**options)
        for part, state in zip(resumed, saved):
            part.load_state_dict(state)
        train(*resumed[:2], range(moment, 8))
        resumed[2].finish()
        assert torch.equal(weights(net), weights(resumed[0])), moment


# Misuse.


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_an_optimiser_without_moments_is_refused_when_attached(optimizer):
    with pytest.raises(
        ValueError,
        match=rf"reads Adam's moments, but torch.optim.{optimizer.__name__} has none: use torch.optim.Adam or AdamW, "
        r"or importance=moment_score\(\)",
    ):
        start(optimizer, warmup_steps=3, importance=FROM_ADAM)


def test_an_optimiser_with_other_moments_is_refused_at_its_first_step():
    net, optimizer, _ = start(torch.optim.Adamax, warmup_steps=3, importance=FROM_ADAM)
    with pytest.raises(
        RuntimeError, match="the state of torch.optim.Adamax has no 'exp_avg_sq': use torch.optim.Adam or AdamW, or imp"
    ):
        train(net, optimizer, [0])


def test_an_optimiser_whose_moments_have_other_names_is_refused_when_attached():
    """bitsandbytes' AdamW has torch's name, and ``state1`` and ``state2``, which in 32 bits are not quantised."""
    kind = type("AdamW", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    said = r"the state of bitsandbytes.AdamW has no 'exp_avg': use torch.optim.Adam or AdamW, or importance=moment"
    with pytest.raises(ValueError, match=said):
        start(kind, warmup_steps=3, importance=FROM_ADAM)
    start(kind, warmup_steps=3, importance=moment_score())


class Projected(torch.optim.Optimizer):
    """Has moments of another shape than the weights, as GaLore: of gradients in a subspace."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999)})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"step": 1, "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}


def test_an_optimiser_whose_moments_have_another_shape_is_refused_at_its_first_step():
    net, optimizer, _ = start(Projected, warmup_steps=3, importance=FROM_ADAM)
    with pytest.raises(RuntimeError, match="those of .*Projected do not have the shape of .*: use torch.optim"):
        train(net, optimizer, [0])


def test_weights_of_a_second_optimiser_are_not_silently_left_out():
    body, head = nn.Linear(4, 4), nn.Linear(4, 2)
    both = nn.Sequential(body, head)
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in both]
    wsc = WeightSpaceConsolidation(
        both.named_parameters(), warmup_steps=2, importance=FROM_ADAM, reset=Blend(min_warmup=0)
    )
    wsc.attach(optimizers[1])
    with pytest.raises(RuntimeError, match="has no moments of '0.weight', which another optimizer trains: use import"):
        for _ in range(2):
            both(torch.ones(3, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert not wsc.resets


def test_a_prepared_optimiser_is_followed_as_its_own():
    """Accelerate wraps optimisers in one that is an ``Optimizer`` by class alone, and steps the one within."""

    class Prepared(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)

        def step(self, closure=None):
            self.optimizer.step(closure)

    net = nn.Linear(4, 2)
    prepared = Prepared(torch.optim.SGD(net.parameters(), lr=0.1))
    wsc = WeightSpaceConsolidation(net.named_parameters(), warmup_steps=2, reset=Blend(min_warmup=0)).attach(prepared)
    for _ in range(3):
        net(torch.ones(3, 4)).sum().backward()
        prepared.step()
    assert wsc.steps == 3 and wsc.resets == 1


def test_moments_from_before_the_task_are_refused_when_attached_and_at_the_reset():
    net = small_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, range(5))
    wsc = WeightSpaceConsolidation(net.named_parameters(), warmup_steps=3, importance=FROM_ADAM, reset=Blend())
    with pytest.raises(
        ValueError,
        match="moments of 5 steps, this task has had 0: make a new optimizer for each task, or use source='carried'",
    ):
        wsc.attach(optimizer)
    other = torch.optim.AdamW(net.parameters())
    wsc.attach(other)
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="moments of 8 steps, this task has had 3"):
        train(net, other, range(3))


@pytest.mark.parametrize("source", ["optimizer", "carried"])
def test_moments_of_too_few_steps_are_refused_when_attached_and_at_the_reset(source):
    """As of a checkpoint without the optimiser's state, which begins anew."""
    options = dict(warmup_steps=6, importance=moment_score(source=source))
    net, optimizer, wsc = start(**options)
    train(net, optimizer, range(4))
    saved = copy.deepcopy([part.state_dict() for part in (net, optimizer, wsc)])

    late, _, _ = start(**options)
    late.load_state_dict(saved[0])
    resumed = WeightSpaceConsolidation(late.named_parameters(), reset=Blend(), **options)
    resumed.load_state_dict(saved[2])
    fresh = torch.optim.AdamW(late.parameters(), lr=0.05)
    with pytest.raises(ValueError, match="moments of 0 steps, this task has had 4: to resume, first load"):
        resumed.attach(fresh)
    fresh.load_state_dict(saved[1])
    resumed.attach(fresh)
    train(late, fresh, range(4, 8))
    train(net, optimizer, range(4, 8))
    assert resumed.resets == 1 and torch.equal(weights(late), weights(net))

    early, fresh, resumed = start(**options)
    early.load_state_dict(saved[0])
    resumed.load_state_dict(saved[2])
    with pytest.raises(ValueError, match="moments of 2 steps, this task has had 6"):
        train(early, fresh, range(4, 6))
    assert not resumed.resets


def test_steps_without_a_gradient_for_any_one_parameter_and_dropped_moments_are_not_too_few():
    """Two halves that are trained in turn have moments of half the steps each."""
    halves = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
    optimizer = torch.optim.AdamW(halves.parameters())
    options = dict(warmup_steps=4, importance=FROM_ADAM, reset=Blend(every=4, momentum=True))
    wsc = WeightSpaceConsolidation(halves.named_parameters(), **options).attach(optimizer)
    for step in range(14):
        optimizer.zero_grad()
        halves[step % 2](torch.ones(3, 4)).sum().backward()
        optimizer.step()
    again = WeightSpaceConsolidation(halves.named_parameters(), **options)
    again.load_state_dict(wsc.state_dict())
    wsc.detach()
    again.attach(optimizer)
    for step in range(14, 18):
        optimizer.zero_grad()
        halves[step % 2](torch.ones(3, 4)).sum().backward()
        optimizer.step()
    assert again.resets == 4  # after steps 4, 8, 12, 16


def test_missing_gradients_raise_at_the_first_step():
    _, optimizer, _ = start(warmup_steps=3, importance=FROM_ADAM)
    with pytest.raises(RuntimeError, match="missing gradients"):
        optimizer.step()


@pytest.mark.parametrize("options", [dict(betas=(0.9, 0.999)), dict(absolute=True)])
def test_what_only_own_moments_have_is_refused_with_the_optimisers(options):
    with pytest.raises(ValueError, match="leave them out, or use source='own'"):
        moment_score(source="optimizer", **options)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from(["reset", "first"]), st.booleans(), st.integers(1, 9))
def test_whether_a_task_can_be_finished_is_known_before_it_begins(warmup, every, begin, last, steps):
    net, optimizer, wsc = start(torch.optim.SGD, warmup_steps=warmup, average=Average(every, begin, last=last))
    refused = False
    try:
        wsc.check_fits(steps)
    except ValueError:
        refused = True
    train(net, optimizer, range(steps))
    if refused:
        with pytest.raises(RuntimeError):
            wsc.finish()
    else:
        wsc.finish()


def test_a_sparse_gradient_is_refused_by_name():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    WeightSpaceConsolidation(table.named_parameters(), warmup_steps=2, reset=Blend()).attach(optimizer)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="gradient of 'weight' is sparse: make it dense"):
        optimizer.step()
