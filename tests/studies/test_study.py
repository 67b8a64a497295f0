"""The paper's studies: scores that rank the weights, and rules that reset the others."""

import copy
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from support.small_runs import killed_at, run_of, without_measurements
from torch import nn
from torch.nn.functional import cross_entropy

from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.consolidation import (
    Blend,
    Reset,
    WeightSpaceConsolidation,
    drift_score,
    first_moment_score,
    moment_score,
    second_moment_score,
)
from pycil_wsc.errors import UserError
from pycil_wsc.methods.consolidation.wsc import ConsolidatedPhase
from pycil_wsc.studies.diagonals import fisher_diagonal, hessian_diagonal
from pycil_wsc.studies.rival_resets import Random, ShrinkPerturb


def tiny_network():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Softplus(), nn.Flatten(), nn.Linear(32, 3)
    ).double()
    network(torch.randn(16, 3, 4, 4).double())  # statistics of the batch norm
    return network.eval()


def tiny_batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 3, 4, 4, generator=generator).double(), torch.randint(3, (n,), generator=generator))
        for n in (5, 4)
    ]


def test_fisher_is_the_mean_of_each_samples_squared_gradient():
    network, batches = tiny_network(), tiny_batches()
    params = dict(network.named_parameters())
    expected = {name: torch.zeros_like(param) for name, param in params.items()}
    for inputs, targets in batches:
        for sample, target in zip(inputs, targets):
            network.zero_grad()
            log_likelihood = network(sample[None]).log_softmax(1)[0, target]
            log_likelihood.backward()
            for name, param in params.items():
                expected[name] += param.grad**2 / 9
    network.zero_grad()
    for chunk_size in (1, 3, 16):
        torch.testing.assert_close(
            fisher_diagonal(network, params, batches, chunk_size), expected, rtol=1e-5, atol=1e-9
        )
    assert all(param.grad is None for param in params.values())


def dense_hessian(network, batches):
    params = dict(network.named_parameters())
    inputs, targets = (torch.cat(parts) for parts in zip(*batches))
    vector = torch.cat([param.detach().flatten() for param in params.values()])

    def loss(vector):
        parts = vector.split([param.numel() for param in params.values()])
        values = {name: part.view_as(param) for (name, param), part in zip(params.items(), parts)}
        return cross_entropy(torch.func.functional_call(network, values, (inputs,)), targets)

    return torch.autograd.functional.hessian(loss, vector)


def test_hutchinsons_estimate_is_its_formula_with_the_dense_hessian_and_tends_to_the_diagonal():
    network, batches = tiny_network(), tiny_batches()
    params, hessian = dict(network.named_parameters()), dense_hessian(network, batches)
    flat = lambda values: torch.cat([value.flatten() for value in values.values()])  # noqa: E731
    estimate = flat(hessian_diagonal(network, params, batches, 3, torch.Generator().manual_seed(2)))
    generator = torch.Generator().manual_seed(2)
    vectors = [
        torch.cat(
            [(2.0 * torch.randint(2, p.shape, generator=generator) - 1).flatten() for p in params.values()]
        ).double()
        for _ in range(3)
    ]
    torch.testing.assert_close(estimate, sum(v * (hessian @ v) for v in vectors) / 3, rtol=1e-5, atol=1e-7)
    probes = 300
    many = flat(hessian_diagonal(network, params, batches, probes, torch.Generator().manual_seed(3)))
    off_diagonal = hessian - torch.diag(hessian.diag())
    assert ((many - hessian.diag()).abs() <= 5 * (off_diagonal.square().sum(1) / probes).sqrt() + 1e-9).all(), (
        "five standard errors"
    )


def consolidated(reset=Blend(), **options):
    """Two parameters after three steps of SGD:
    {name: before}, {name: just before the reset}, {name: after it}, {name: [gradients]}.
    """
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, gradients = {}, {name: [] for name in before}
    optimizer.register_step_post_hook(
        lambda *_: seen.update({name: param.detach().clone() for name, param in model.named_parameters()})
    )
    WeightSpaceConsolidation(model.named_parameters(), warmup_steps=3, reset=reset, average=None, **options).attach(
        optimizer
    )
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model(torch.randn(8, 6)), torch.randint(4, (8,))).backward()
        for name, param in model.named_parameters():
            gradients[name].append(param.grad.clone())
        optimizer.step()
    return before, seen, {name: param.detach() for name, param in model.named_parameters()}, gradients


def flat(values):
    return torch.cat([value.flatten() for value in values.values()])


def moments(gradients):
    m = v = 0
    for g in gradients:
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    return m / (1 - 0.9**3), v / (1 - 0.999**3)


@pytest.mark.parametrize(
    "importance, score",
    [
        (moment_score(), lambda before, now, m, v: m.abs() * v),
        (first_moment_score(), lambda before, now, m, v: m.abs()),
        (second_moment_score(), lambda before, now, m, v: v),
        (drift_score(), lambda before, now, m, v: (now - before).abs()),
        (lambda params, previous: {name: -param for name, param in params.items()}, lambda before, now, m, v: -now),
    ],
    ids=["moment", "first_moment", "second_moment", "drift", "own"],
)
def test_the_elements_with_the_highest_importance_are_kept(importance, score):
    before, now, after, gradients = consolidated(importance=importance, retain=0.25)
    m, v = (torch.cat([moments(gradients[name])[i].flatten() for name in before]) for i in (0, 1))
    kept = set(score(flat(before), flat(now), m, v).topk(7).indices.tolist())  # of 28
    expected = [now if e in kept else (now + old) / 2 for e, (now, old) in enumerate(zip(flat(now), flat(before)))]
    torch.testing.assert_close(flat(after), torch.stack(expected))


def test_random_replaces_what_is_not_kept_by_fresh_values():
    fresh = {"weight": torch.full((4, 6), 7.0), "bias": torch.full((4,), -7.0)}
    _, now, after, _ = consolidated(reset=Random(lambda: fresh), retain=0.25)
    kept = flat(after) == flat(now)
    assert kept.sum() == 7 and torch.equal(flat(after)[~kept], flat(fresh)[~kept])


def test_shrink_and_perturb_changes_all_elements():
    fresh = {"weight": torch.randn(4, 6), "bias": torch.randn(4)}
    _, now, after, _ = consolidated(reset=ShrinkPerturb(lambda: fresh, shrink=0.4, perturb=0.1), retain=0.9)
    torch.testing.assert_close(flat(after), 0.4 * flat(now) + 0.1 * flat(fresh))


def test_a_reset_of_the_users_own_is_a_class_with_one_method():
    class FlipSign(Reset):
        def __call__(self, params, others, keep):
            for param, kept in zip(params, keep):
                param.copy_(torch.where(kept, param, -param))

    _, now, after, _ = consolidated(reset=FlipSign(), retain=0.25)
    kept = flat(after) == flat(now)
    assert kept.sum() == 7 and torch.equal(flat(after)[~kept], -flat(now)[~kept])


def test_a_function_that_leaves_a_parameter_out_is_named():
    with pytest.raises(ValueError, match="no scores of shape .* for 'bias'"):
        consolidated(importance=lambda params, previous: {"weight": params["weight"]})


# ---- in a run --------------------------------------------------------------------------------------------------------


VARIANTS = [
    {"wsc.importance": "first_moment"},
    {"wsc.importance": "second_moment"},
    {"wsc.importance": "drift"},
    {"wsc.importance": "fisher"},
    {"wsc.importance": "hessian", "wsc.probes": 2, "wsc.importance_samples": 10},
    {"wsc.reset": "random"},
    {"wsc.reset": "shrink_perturb"},
    {"wsc.reset_every": 1},
    {  # on a network with several layers of units
        "wsc.reset": "continual_backprop",
        "wsc.maturity": 1,
        "wsc.replacement_rate": 0.05,
        "convnet_type": "resnet8",
    },
]


@pytest.mark.slow
@pytest.mark.parametrize("keys", VARIANTS, ids=lambda keys: " ".join(map(str, keys.values())))
def test_every_variant_changes_the_result_and_survives_kills(keys, settings, tmp_path, undisturbed):
    """Stopped in the second task, whose warm-up has two epochs, after one and after two: before the reset and after it.

    The first task has three epochs and an end.
    """
    same = {"wsc.warmup": 0.5, "max_tasks": 2, "convnet_type": keys.get("convnet_type", "tiny")}
    keys = keys | same
    whole = run_of(settings | {"out": str(tmp_path / "whole")}, **keys).execute()
    assert whole["train_loss"] != undisturbed(**same)[1]["train_loss"]
    for stop in (5, 1):
        with killed_at(stop):
            run_of(settings, **keys).execute()
    assert without_measurements(run_of(settings, **keys).execute()) == without_measurements(whole)


@pytest.mark.slow
def test_passes_over_the_data_are_counted(undisturbed):
    fisher, hessian = (undisturbed(**{"wsc.importance": name})[1] for name in ("fisher", "hessian"))
    assert fisher["importance_passes"] == hessian["importance_passes"] == 2, "one in each task but the first"
    assert fisher["importance_seconds"] > 0 and undisturbed()[1]["importance_passes"] == 0
    _, unranked = undisturbed(**{"wsc.reset": "shrink_perturb"})
    scored = {name: value for name, value in unranked.items() if name.startswith("importance")}
    assert not any(value is not None for value in scored.values()), "nothing is ranked there"


def test_seconds_of_scores_are_those_of_their_computation_alone(settings, monkeypatch):
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr("pycil_wsc.methods.consolidation.scores.time", clock)

    def slow(network, parameters, previous, batches, options):
        clock.now += 7
        return {name: parameter.abs() for name, parameter in parameters.items()}

    monkeypatch.setitem(registry.importances, "slow", slow)
    assert run_of(settings, **{"wsc.importance": "slow"}).execute()["importance_seconds"] == 2 * 7, "in two tasks"


def test_memory_of_scores_is_that_of_the_tensors_they_are_made_of(undisturbed):
    results = {name: undisturbed(**{"wsc.importance": name})[1] for name in ("drift", "fisher")}
    results["moment"] = undisturbed()[1]
    weights = results["moment"]["parameters"] * 4
    assert results["moment"]["importance_bytes"] == 2 * weights and results["drift"]["importance_bytes"] == 0
    assert results["fisher"]["importance_bytes"] == weights, "the scores themselves"


@pytest.mark.slow
def test_an_importance_of_the_users_own_is_one_function(settings, undisturbed, monkeypatch):
    monkeypatch.setattr(registry, "importances", copy.copy(registry.importances))
    seen = []

    @registry.register_importance("mine")
    def mine(network, params, previous, batches, options):
        seen.append((network.training, sum(len(images) for images, _ in batches), options.retain))
        return {name: (param - previous[name]).abs() for name, param in params.items()}

    ours = run_of(settings, **{"wsc.importance": "mine"}).execute()
    _, drift = undisturbed(**{"wsc.importance": "drift"})
    assert ours["train_loss"] == drift["train_loss"] and ours["matrix"] == drift["matrix"]
    assert seen == [(False, 24 + 8, 0.2), (False, 24 + 16, 0.2)]


def test_an_unknown_importance_names_the_nearest():
    with pytest.raises(UserError, match="unknown wsc.importance 'fischer'; did you mean 'fisher'"):
        resolve({"wsc.importance": "fischer"})
    with pytest.raises(UserError, match="wsc.reset_every: 'often'"):
        resolve({"wsc.reset_every": "often"})


def test_a_unit_that_is_replaced_again_has_other_initial_values(settings, monkeypatch):
    keys = {"wsc.reset": "continual_backprop", "wsc.maturity": 1, "wsc.replacement_rate": 0.05}
    learner, drawn = run_of(settings, **keys).learner, []
    for task in learner.manager.tasks[:2]:
        learner.learn(task, Mock())
    fresh = ConsolidatedPhase._fresh

    def recorded(phase):
        drawn.append(fresh(phase)["backbone.stage1.0.conv1.weight"])
        return dict(learner.network.named_parameters()) | {"backbone.stage1.0.conv1.weight": drawn[-1]}

    monkeypatch.setattr(ConsolidatedPhase, "_fresh", recorded)
    learner.learn(learner.manager.tasks[2], Mock())
    assert len(drawn) > 1 and not any(map(torch.equal, drawn, drawn[1:]))
