"""Methods for plentiful memory, each against its formula."""

import copy
import math

import pytest
import torch
from small_runs import batch_of
from test_methods import BATCH, SILENT, TARGETS, after, digits, grown, negative_log_likelihood, perturb  # noqa: F401
from torch.nn.functional import cross_entropy

from pycil_wsc.errors import UserError

OLD = torch.tensor([True, False, True, True, False, True])  # BATCH's exemplars: classes 0, 2, 3, 4
INDICES = torch.tensor([5, 60, 7, 30, 80, 12])


def second_task(name, digits, tmp_path, **keys):  # noqa: F811
    """A learner in its second task, in evaluation mode, with other weights than after the first."""
    learner, tasks = after(name, 1, digits, tmp_path, **keys)
    learner.grow_for(tasks[1])
    learner.begin_task(tasks[1])
    perturb(learner.network)
    return learner.eval(), tasks[1]


def test_er_ace_lets_new_images_compete_among_the_classes_of_the_batchs_new_images(digits, tmp_path):  # noqa: F811
    learner, _ = second_task("er_ace", digits, tmp_path)
    loss, logits = learner.loss(batch_of(BATCH, TARGETS, INDICES, OLD))
    present = [5, 6]  # of the two new images
    own = sum(-logits[row, label] + logits[row, present].logsumexp(0) for row, label in ((1, 6), (4, 5)))
    torch.testing.assert_close(loss, own / 2 + negative_log_likelihood(logits[OLD], TARGETS[OLD]))
    loss.backward()
    first, _ = grown("er_ace", 1, digits, tmp_path)
    first.eval()
    loss, logits = first.loss(batch_of(BATCH, TARGETS % 4))
    torch.testing.assert_close(loss, negative_log_likelihood(logits, TARGETS % 4))


def test_er_aces_new_images_do_not_push_old_classes_away(digits, tmp_path):  # noqa: F811
    learner, _ = second_task("er_ace", digits, tmp_path)
    none = torch.zeros(6, dtype=torch.bool)
    learner.loss(batch_of(BATCH, torch.tensor([4, 5, 4, 5, 4, 5]), INDICES, none))[0].backward()
    moved = learner.network.head.weight.grad.abs().sum(1)
    assert moved[4:6].all() and not moved[:4].any() and not moved[6]


def test_derpps_loss_is_that_of_its_paper(digits, tmp_path):  # noqa: F811
    learner, _ = second_task("derpp", digits, tmp_path, alpha=0.3, beta=0.7)
    stored = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    learner.stored.put("logits", INDICES[OLD].numpy(), stored)
    loss, logits = learner.loss(batch_of(BATCH, TARGETS, INDICES, OLD))
    labels = negative_log_likelihood(logits[~OLD], TARGETS[~OLD]) + 0.7 * negative_log_likelihood(
        logits[OLD], TARGETS[OLD]
    )
    torch.testing.assert_close(loss, labels + 0.3 * ((logits[OLD, :4] - stored) ** 2).mean())


def test_derpp_stores_the_logits_of_each_exemplar_once(digits, tmp_path):  # noqa: F811
    """Those of the network at the end of the task that brought it: old ones are not replaced."""
    learner, tasks = after("derpp", 1, digits, tmp_path)
    kept = torch.from_numpy(learner.memory.indices)
    (batch,) = learner.train_source.batches(kept.numpy(), learner.manager.train_targets, 1000)
    with torch.no_grad():
        expected = learner.eval().network(batch[0])
    torch.testing.assert_close(learner.stored.of("logits", kept), expected)
    learner.learn(tasks[1], SILENT)
    again = learner.stored.of("logits", kept)
    torch.testing.assert_close(again[:, :4], expected) and again[:, 4:].isnan().all()
    new = torch.from_numpy(learner.memory.classes[5])
    assert learner.stored.of("logits", new).isfinite().all()


def test_l2_init_draws_every_weight_to_its_first_value(digits, tmp_path):  # noqa: F811
    learner, tasks = after("l2_init", 0, digits, tmp_path, l2_init=0.2)
    learner.grow_for(tasks[0])
    first = {name: value.clone() for name, value in learner.network.named_parameters()}
    perturb(learner.network)
    learner.grow_for(tasks[1])
    second = {name: value.clone() for name, value in learner.network.named_parameters()}
    perturb(learner.network)
    learner.eval()
    loss, logits = learner.loss(batch_of(BATCH, TARGETS))
    distance = 0.0
    for name, value in learner.network.named_parameters():
        start = first[name] if name.startswith("backbone") else torch.cat([first[name], second[name][4:]])
        distance += ((value - start) ** 2).sum()
    torch.testing.assert_close(loss, negative_log_likelihood(logits, TARGETS) + 0.2 * distance)
    assert learner.config.weight_decay == learner.config.init_weight_decay == 0


def test_sam_steps_along_the_gradient_at_the_steepest_point(digits, tmp_path):  # noqa: F811
    """Against the two gradients written out, without momentum; batch norm's statistics move once a step."""
    learner, tasks = after("sam", 1, digits, tmp_path, rho=0.5, momentum=0.0, weight_decay=0.0, batch_size=1000)
    network, seen = copy.deepcopy(learner.network), []
    grow, loss = learner.grow, learner.loss

    def grown_too(task):
        grow(task)
        network.__dict__.update(copy.deepcopy(learner.network).__dict__)

    def remembered(batch):
        seen.append(batch)
        return loss(batch)

    learner.grow, learner.loss = grown_too, remembered
    learner.learn(tasks[1], SILENT)
    assert len(seen) == 2 and seen[0] is seen[1], "one step of two passes"
    images, targets = seen[0].images, seen[0].targets
    network.train()
    parameters = list(network.parameters())
    gradients = torch.autograd.grad(cross_entropy(network(images), targets), parameters)
    statistics = [buffer.clone() for buffer in network.buffers()]
    norm = sum(float((gradient**2).sum()) for gradient in gradients) ** 0.5
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients):
            parameter += 0.5 * gradient / norm
    steepest = torch.autograd.grad(cross_entropy(network(images), targets), parameters)
    for parameter, gradient, second, ours in zip(parameters, gradients, steepest, learner.network.parameters()):
        start = parameter.detach() - 0.5 * gradient / norm
        torch.testing.assert_close(ours.detach(), start - 0.1 * second, rtol=1e-4, atol=1e-5)
    for expected, ours in zip(statistics, learner.network.buffers()):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_the_moving_average_is_the_weighted_sum_of_the_weights_after_each_step(digits, tmp_path):  # noqa: F811
    """Each weight's share is the product of what the later steps keep; statistics of batch norm included."""
    learner, tasks = after("ema", 0, digits, tmp_path, decay=0.6)
    step, seen = learner.after_step, []

    def watched():
        step()
        seen.append({name: value.double().clone() for name, value in learner.network.state_dict().items()})

    learner.after_step = watched
    learner.learn(tasks[0], SILENT)
    kept = [min(0.6, n / (n + 9)) for n in range(1, len(seen) + 1)]
    assert len(seen) > 8 and kept[0] < 0.6
    shares = [(1 - d) * math.prod(kept[n + 1 :]) for n, d in enumerate(kept)]
    for name, value in learner.network.state_dict().items():
        if value.is_floating_point():
            expected = sum(share * weights[name] for share, weights in zip(shares, seen))
            torch.testing.assert_close(value.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["er_ace", "derpp"])
def test_a_method_that_is_nothing_without_exemplars_says_so_before_it_trains(name, digits, tmp_path):  # noqa: F811
    with pytest.raises(UserError, match=f"^memory_per_class: '{name}' needs exemplars; give a number above 0"):
        after(name, 0, digits, tmp_path, memory_per_class=0)
    with pytest.raises(UserError, match="^memory_size: "):
        after(name, 0, digits, tmp_path, memory_size=0, fixed_memory=False)
    after(name, 0, digits, tmp_path, memory_size=7, fixed_memory=False)
    with pytest.raises(UserError, match=f"'{name}' .* cannot hold one of each of the 7 classes before task 3"):
        after(name, 0, digits, tmp_path, memory_size=6, fixed_memory=False)


@pytest.mark.parametrize("name", ["er_ace", "derpp", "l2_init", "sam"])
def test_they_can_be_consolidated(name, digits, tmp_path):  # noqa: F811
    keys = {"consolidate": True, "epochs": 2, "wsc.average_every": 1}
    learner, _ = after(name, 2, digits, tmp_path, **keys)
    plain, _ = after(name, 2, digits, tmp_path, epochs=2)
    assert not torch.equal(learner.network.head.weight, plain.network.head.weight)
