"""``"consolidate": true``: Weight Space Consolidation on top of the other learners."""

import contextlib
import re
from types import SimpleNamespace

import pytest
import torch
from support.methods import SILENT, one_of_each_family
from support.small_runs import ROOT, killed_at, run_of, suited, without_measurements
from torch.nn.functional import cross_entropy

from pycil_wsc import registry
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.config.loading import resolve
from pycil_wsc.consolidation import Average, Blend, WeightSpaceConsolidation, moment_score, recompute_batch_norm
from pycil_wsc.errors import UserError
from pycil_wsc.training.batches import Batches, Sampling
from pycil_wsc.training.learner import grow_for

PAGE = ROOT / "docs/methods.md"
ALL_STEPS = {
    "wsc.warmup": 0.0,
    "wsc.reset": "none",
    "wsc.average_every": 0.01,  # of no warm-up: each step
    "wsc.average_count": "since_reset",
}
ONE_PHASE = sorted(
    name
    for name, learner in registry.learners.items()
    if learner.Plan.one_phase
    and not (learner.Plan.consolidates or learner.Plan.averages)
    # these two take further steps, of other losses, within a step
    and name not in ("fdr", "hal")
)


@pytest.mark.slow
def test_replay_with_it_is_wsc_to_the_bit(settings):
    ours, theirs = (
        run_of(settings, model_name="replay", consolidate=True).execute(),
        run_of(settings, model_name="wsc").execute(),
    )
    own = {"config": None, "identity": None}
    assert without_measurements(ours) | own == without_measurements(theirs) | own


def test_the_page_lists_the_methods_that_do_not_compose_with_it():
    pytest.importorskip("timm")  # of the backbones of some
    (rows,) = re.findall(r"^\| not for \| because \|\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    accepted = {"wsc"}  # consolidates already
    for name in registry.learners:
        with contextlib.suppress(UserError):
            resolve({"model_name": name, "consolidate": True})
            accepted.add(name)
    assert set(re.findall(r"`([\w-]+)`", rows)) == set(registry.learners) - accepted


@pytest.mark.parametrize("average", [True, False])
def test_statistics_are_collected_for_an_average_alone_and_mixed_as_its_batches(average, settings, monkeypatch):
    used, batches = [], Batches.of

    def of(self, samples, *address):
        for batch in batches(self, samples, *address):
            if address[-1] == "batch norm":
                used.append((int(batch.from_memory.sum()), len(batch)))
            yield batch

    monkeypatch.setattr(Batches, "of", of)
    learner = run_of(settings, replay_ratio=0.75, max_tasks=2, **{"wsc.average": average}).learner
    for task in learner.manager.tasks:
        learner.learn(task, SILENT)
    assert set(used) == ({(2, 8)} if average else set())


@pytest.mark.parametrize("name", one_of_each_family(ONE_PHASE))
def test_what_a_task_ends_with_is_the_mean_over_its_steps_of_what_it_trained(name, settings, monkeypatch):
    """Summed up here in float64. What the method itself does at the end, such as aligning or merging, comes later."""
    learner = run_of(settings, model_name=name, consolidate=True, **ALL_STEPS | suited(name)).learner
    first, second, _ = learner.manager.tasks
    learner.learn(first, SILENT)
    grow_for(learner, second)
    trained = {n: p for n, p in learner.network.named_parameters() if p.requires_grad}
    learner.grow = lambda task: None
    total, samples = {}, 1

    def started(task):  # the weights before the first step are a sample
        total.update((n, p.detach().double().clone()) for n, p in trained.items())

    def add():
        nonlocal samples
        samples += 1
        for n, p in trained.items():
            total[n] += p.detach().double()

    learner.after_step = add
    frozen = {n: p.detach().clone() for n, p in learner.network.named_parameters() if not p.requires_grad}
    end, now = registry.learners[name].end_task, {}

    def watched(learner, task):
        now.update((n, p.detach().clone()) for n, p in learner.network.named_parameters())
        end(learner, task)

    monkeypatch.setattr(registry.learners[name], "end_task", watched)
    learner.learn(second, SimpleNamespace(**vars(SILENT) | {"task_started": started}))
    assert samples > 8
    for n in trained:
        torch.testing.assert_close(now[n], (total[n] / samples).float(), rtol=1e-4, atol=1e-6)
    assert all(torch.equal(now[n], before) for n, before in frozen.items())


OPTIONS = {  # none is the default
    "wsc.warmup": 0.5,
    "wsc.retain": 0.3,
    "wsc.blend": 0.25,
    "wsc.betas": [0.8, 0.9],
    "wsc.rank_scope": "tensor",
    "wsc.average_every": 0.42,  # of 12 steps: 5
    "wsc.average_count": "since_reset",
    "wsc.average_lr": 0.03,
    "wsc.average_anneal": 2,
}
RATES = [0.1, 0.01, 0.01, 0.02, 0.03, 0.03]  # a milestone, and after three epochs half a cosine to 0.03 in two


def test_a_task_is_the_plain_loop_with_torchs_sgd_and_the_object_that_the_options_describe(settings):
    schedule = {"epochs": 6, "milestones": [1], "lrate": 0.1, "lrate_decay": 0.1, "momentum": 0.8, "weight_decay": 0.01}
    ours, plain = (run_of(settings, precision="fp32", **schedule, **OPTIONS).learner for _ in range(2))
    first, second, _ = ours.manager.tasks
    for learner in (ours, plain):
        learner.learn(first, SILENT)
    ours.learn(second, SILENT)

    grow_for(plain, second)
    network, indices = plain.network, plain.batches.indices(second)
    assert len(indices) == 24 + 2 * 4  # four batches of eight
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.8, weight_decay=0.01, fused=True)
    wsc = WeightSpaceConsolidation(
        network.named_parameters(),
        warmup_steps=3 * 4,
        retain=0.3,
        importance=moment_score(betas=(0.8, 0.9)),
        reset=Blend(0.25),
        average=Average(every=5, count="since_reset"),
        rank_scope="tensor",
    ).attach(optimizer)
    network.train()
    for epoch, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        for batch in plain.batches.of(Sampling(indices=indices), 1, 0, epoch):
            images, targets = batch.images, batch.targets
            optimizer.zero_grad()
            cross_entropy(network(images), targets).backward()
            optimizer.step()
    wsc.finish()
    assert (wsc.steps, wsc.resets, wsc.averaged) == (24, 1, 4)  # after steps 12, 17, 22 and 24
    recompute_batch_norm(
        network, [batch.images for batch in plain.batches.of(Sampling(indices=indices), 1, "batch norm")]
    )
    theirs = network.state_dict()
    for name, mine in ours.network.state_dict().items():
        assert torch.equal(mine, theirs[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["der", "icarl", "wa"])
def test_a_killed_run_goes_on_to_the_same_end(name, settings, tmp_path):
    keys = {"model_name": name, "consolidate": True, "init_epoch": 1}
    whole = run_of(settings | {"out": str(tmp_path / "whole")}, **keys).execute()
    with killed_at(5):  # in the second task, after the reset
        run_of(settings, **keys).execute()
    assert without_measurements(run_of(settings, **keys).execute()) == without_measurements(whole)


@pytest.mark.parametrize("name, reason", [("bic", "one phase"), ("foster", "one phase"), ("wsc", "already")])
def test_where_it_makes_no_sense_one_line_says_so(name, reason):
    with pytest.raises(UserError, match=f"consolidate: '{name}' .*{reason}"):
        resolve({"model_name": name, "consolidate": True})


def test_it_has_a_folder_of_its_own_and_its_options_count():
    plain, ours, other = (
        resolve({"model_name": "icarl"} | keys)
        for keys in ({}, {"consolidate": True}, {"consolidate": True, "wsc.retain": 0.5})
    )
    assert run_folder(plain).parent.parent.name == "icarl" and run_folder(ours).parent.parent.name == "icarl+wsc"
    assert len({run_folder(config) for config in (plain, ours, other)}) == 3
    assert resolve(other.to_dict()) == other


@pytest.mark.parametrize("name", ["gdumb", "gem"])
def test_a_key_that_has_no_effect_on_the_batches_has_none_on_the_statistics(name, settings):
    keys = {"model_name": name, "consolidate": True, "max_tasks": 2, "epochs": 2, "memory_per_class": 8}
    usual, mixed = (run_of(settings, **keys, replay_ratio=ratio) for ratio in (None, 0.9))
    assert usual.execute()["curve"] == mixed.execute()["curve"]
    for one, other in zip(usual.learner.buffers(), mixed.learner.buffers(), strict=True):
        assert torch.equal(one, other)


def test_units_of_layers_that_cannot_be_replaced_are_one_line(settings):
    keys = {"model_name": "ssre", "consolidate": True, "wsc.reset": "continual_backprop"}
    with pytest.raises(UserError, match="wsc.reset: 'continual_backprop' finds no units in this backbone"):
        run_of(settings, **keys).execute()
