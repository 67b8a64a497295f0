"""Methods for plentiful memory, each against its formula."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from support import methods
from support.methods import BATCH, SILENT, TARGETS, negative_log_likelihood, perturb
from support.small_runs import batch_of
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.errors import UserError
from pycil_wsc.training.batches import Batches
from pycil_wsc.training.schedules import task_schedule
from pycil_wsc.training.step.cost import Operations

OLD = torch.tensor([True, False, True, True, False, True])  # BATCH's exemplars: classes 0, 2, 3, 4
INDICES = torch.tensor([5, 60, 7, 30, 80, 12])


def after(name, tasks, data, tmp_path, **keys):
    """With exemplars that are chosen at a task's end: ``test_streams.py`` has those of each step."""
    return methods.after(name, tasks, data, tmp_path, memory_update="task", **keys)


def grown(name, tasks, data, tmp_path, **keys):
    return methods.grown(name, tasks, data, tmp_path, memory_update="task", **keys)


def second_task(name, digits, tmp_path, **keys):
    """A learner in its second task, in evaluation mode, with other weights than after the first."""
    learner, tasks = after(name, 1, digits, tmp_path, **keys)
    learner.grow_for(tasks[1])
    learner.begin_task(tasks[1])
    perturb(learner.network)
    return learner.eval(), tasks[1]


def test_er_ace_lets_new_images_compete_among_the_classes_of_the_batchs_new_images(digits, tmp_path):
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


def test_er_aces_new_images_do_not_push_old_classes_away(digits, tmp_path):
    learner, _ = second_task("er_ace", digits, tmp_path)
    none = torch.zeros(6, dtype=torch.bool)
    learner.loss(batch_of(BATCH, torch.tensor([4, 5, 4, 5, 4, 5]), INDICES, none))[0].backward()
    moved = learner.network.head.weight.grad.abs().sum(1)
    assert moved[4:6].all() and not moved[:4].any() and not moved[6]


def test_derpps_loss_is_that_of_its_paper(digits, tmp_path):
    learner, _ = second_task("derpp", digits, tmp_path, alpha=0.3, beta=0.7)
    stored = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    learner.stored.put("logits", INDICES[OLD].numpy(), stored)
    loss, logits = learner.loss(batch_of(BATCH, TARGETS, INDICES, OLD))
    labels = negative_log_likelihood(logits[~OLD], TARGETS[~OLD]) + 0.7 * negative_log_likelihood(
        logits[OLD], TARGETS[OLD]
    )
    torch.testing.assert_close(loss, labels + 0.3 * ((logits[OLD, :4] - stored) ** 2).mean())


def test_derpp_stores_the_logits_of_each_exemplar_once(digits, tmp_path):
    """Those of the network at the end of the task that brought it: old ones are not replaced."""
    learner, tasks = after("derpp", 1, digits, tmp_path)
    kept = torch.from_numpy(learner.memory.indices)
    (batch,) = learner.train_source.batches(kept.numpy(), learner.manager.train_targets, 1000)
    with torch.no_grad():
        expected = learner.eval().network(batch[0])
    torch.testing.assert_close(learner.stored.of("logits", kept), expected)
    learner.learn(tasks[1], SILENT)
    again = learner.stored.of("logits", kept)
    torch.testing.assert_close(again[:, :4], expected)
    assert again.shape[1] == 7 and again[:, 4:].isnan().all()
    new = torch.from_numpy(learner.memory.classes[5])
    assert learner.stored.of("logits", new).isfinite().all()


def test_l2_init_draws_every_weight_to_its_first_value(digits, tmp_path):
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


def test_sam_steps_along_the_gradient_at_the_steepest_point(digits, tmp_path):
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


@pytest.mark.parametrize("decay", [0.0, 0.6, 0.999])
def test_the_moving_average_keeps_its_decay_from_the_first_step_on(decay, digits, tmp_path):
    """Shares fall by ``decay`` with each step back, and add up to 1; statistics of batch norm included."""
    learner, tasks = after("ema", 0, digits, tmp_path, decay=decay)
    step, seen = learner.after_step, []

    def watched():
        step()
        seen.append({name: value.double().clone() for name, value in learner.network.state_dict().items()})

    learner.after_step = watched
    learner.learn(tasks[0], SILENT)
    powers = [decay**age for age in reversed(range(len(seen)))]
    assert len(seen) > 8
    shares = [power / math.fsum(powers) for power in powers]
    for name, value in learner.network.state_dict().items():
        if value.is_floating_point():
            expected = sum(share * weights[name] for share, weights in zip(shares, seen))
            torch.testing.assert_close(value.double(), expected, rtol=1e-3, atol=1e-4)


def test_cls_ers_loss_draws_replayed_logits_to_those_of_the_surer_average(digits, tmp_path):
    learner, _ = second_task("cls_er", digits, tmp_path, consistency=0.3)
    perturb(learner.stable)
    loss, logits = learner.loss(learner.before_step(batch_of(BATCH, TARGETS, INDICES, OLD)))
    plastic, stable = learner.plastic(BATCH), learner.stable(BATCH)
    total, surer = 0.0, set()
    for row in OLD.nonzero()[:, 0].tolist():
        label = TARGETS[row]
        averages = {"plastic": plastic[row], "stable": stable[row]}
        best = max(averages, key=lambda name: averages[name].log_softmax(0)[label])
        total += ((logits[row] - averages[best]) ** 2).mean()
        surer.add(best)
    assert surer == {"plastic", "stable"}
    torch.testing.assert_close(loss, negative_log_likelihood(logits, TARGETS) + 0.3 * total / 4)


@pytest.mark.parametrize("ratio", [None, 0.5])
def test_cls_er_pays_for_its_averages_on_exemplars_alone(ratio, digits, tmp_path):
    """Replay's step for every image, and a forward pass of each average for every exemplar of every batch."""
    learner, tasks = after("cls_er", 1, digits, tmp_path, replay_ratio=ratio, plastic_rate=0.0, stable_rate=0.0)
    learner.grow_for(tasks[1])
    prepare, images, replayed, seen = learner.before_step, [], [], []

    def watched(batch):
        images.append(len(batch))
        replayed.append(int(batch.from_memory.sum()))
        return prepare(batch)

    learner.before_step, learner.grow_for, before = watched, lambda task: None, learner.spent.operations
    for average in (learner.plastic, learner.stable):
        average.register_forward_hook(lambda average, inputs, output: seen.append(len(inputs[0])))
    learner.learn(tasks[1], SILENT)
    assert sum(seen) == 2 * sum(replayed) > 50
    with Operations() as step:
        cross_entropy(learner.network(BATCH), TARGETS).backward()
    with Operations() as forward, torch.no_grad():
        learner.stable(BATCH)
    expected = step.total * sum(images) + 2 * forward.total * sum(replayed)
    assert learner.spent.operations - before == expected / len(BATCH)


def test_the_rows_of_exemplars_are_those_of_the_mask():
    batch = batch_of(BATCH, TARGETS, INDICES, OLD)
    assert batch.exemplar_rows.tolist() == replace(batch, replayed=4).exemplar_rows.tolist() == [0, 2, 3, 5]
    assert not len(batch_of(BATCH, TARGETS).exemplar_rows)


def test_cls_ers_averages_move_in_their_share_of_the_steps_and_the_stable_one_is_tested(digits, tmp_path):
    keys = {"plastic_rate": 1.0, "stable_rate": 0.5, "plastic_decay": 0.6, "stable_decay": 0.9, "epochs": 2}
    learner, tasks = after("cls_er", 1, digits, tmp_path, **keys)
    learner.grow_for(tasks[1])
    for average in (learner.plastic, learner.stable):
        assert torch.equal(average.head.weight[4:], learner.network.head.weight[4:]), "new rows start as the network's"
    learner.grow_for = lambda task: None
    step, trained = learner.after_step, {}
    moved, decays = {"plastic": 0, "stable": 0}, {"plastic": 0.6, "stable": 0.9}

    def watched():
        before = {name: weights(getattr(learner, name)) for name in moved}
        step()
        for name, old in before.items():
            new = weights(getattr(learner, name))
            if not torch.equal(old, new):
                moved[name] += 1
                decay = min(1 - 1 / (learner.steps + 1), decays[name])
                torch.testing.assert_close(new, decay * old + (1 - decay) * weights(learner.network))
        trained.update(weights=weights(learner.network))

    start, learner.after_step = learner.steps, watched
    learner.learn(tasks[1], SILENT)
    steps = learner.steps - start
    assert moved["plastic"] == steps > 10 and 0.2 * steps < moved["stable"] < 0.8 * steps
    learner.eval()
    assert torch.equal(learner.predict(BATCH), learner.stable(BATCH))
    learner.begin_task(tasks[1])
    assert torch.equal(weights(learner.network), trained["weights"]), "the next task goes on from them"


def test_cls_ers_averages_follow_the_first_steps_closely(digits, tmp_path):
    """In step n they keep n / (n + 1) of themselves, as long as that is less than their decay."""
    keys = {"plastic_rate": 1.0, "stable_rate": 1.0, "plastic_decay": 0.6, "stable_decay": 0.9}
    learner, tasks = after("cls_er", 0, digits, tmp_path, **keys)
    learner.grow_for(tasks[0])
    learner.grow_for = lambda task: None
    step, numbers = learner.after_step, []

    def watched():
        before = {name: weights(getattr(learner, name)) for name in ("plastic", "stable")}
        step()
        numbers.append(len(numbers) + 1)
        for name, most in (("plastic", 0.6), ("stable", 0.9)):
            decay = min(numbers[-1] / (numbers[-1] + 1), most)
            expected = decay * before[name] + (1 - decay) * weights(learner.network)
            torch.testing.assert_close(weights(getattr(learner, name)), expected)

    learner.after_step = watched
    learner.learn(tasks[0], SILENT)
    assert len(numbers) > 8


def weights(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def test_redo_gives_dormant_units_new_weights_and_leaves_the_others(digits, tmp_path):
    """Against each unit's mean activation, computed layer by layer; the batch is not what the weights depend on."""
    learner, tasks = after("redo", 1, digits, tmp_path, recycle_every=1000, **{"convnet_options.width": 4})
    learner.grow_for(tasks[1])
    (phase,) = learner.phases(tasks[1])
    backbone, optimizer = learner.network.backbone, phase.optimizer
    blocks = {name: block for name, block in backbone.named_modules() if hasattr(block, "conv2")}
    with torch.no_grad():
        for block in blocks.values():
            block.bn1.bias[1] = -100.0
    learner.eval()
    learner.network.train()
    batch = batch_of(BATCH, TARGETS)
    learner.loss(batch)[0].backward()
    optimizer.step()
    before, dormant = copy.deepcopy(backbone).eval(), {}
    for name in blocks:
        found = []
        block = before.get_submodule(name)
        hook = block.register_forward_hook(lambda block, inputs, output: found.append(inputs[0]))
        before(BATCH)
        hook.remove()
        means = block.bn1(block.conv1(found[0])).relu().mean((0, 2, 3))
        dormant[name] = [unit for unit, mean in enumerate(means) if mean <= 0.025 * means.mean()]
    learner.steps = 999
    learner.after_backward(batch, None)
    learner.after_step()
    assert learner.steps == 1000 and len(dormant) == 3
    for name, block in blocks.items():
        old, units = before.get_submodule(name), dormant[name]
        others = [unit for unit in range(len(block.conv1.weight)) if unit not in units]
        assert 1 in units and len(others) > len(units)
        assert torch.equal(block.conv1.weight[others], old.conv1.weight[others])
        assert (block.conv1.weight[units] != old.conv1.weight[units]).flatten(1).any(1).all()
        assert (block.bn1.weight[units] == 1).all() and not block.bn1.bias[units].any()
        assert not block.bn1.running_mean[units].any() and (block.bn1.running_var[units] == 1).all()
        assert not block.conv2.weight[:, units].any()
        assert torch.equal(block.conv2.weight[:, others], old.conv2.weight[:, others])
        momentum = [optimizer.state[part.weight]["momentum_buffer"] for part in (block.conv1, block.conv2)]
        assert not momentum[0][units].any() and not momentum[1][:, units].any() and momentum[0][others].any()
    assert learner.network.training, "modes are as they were"


def test_redo_recycles_every_so_many_steps(digits, tmp_path):
    learner, tasks = after("redo", 0, digits, tmp_path, recycle_every=4, dormant_threshold=0.5, epochs=2)
    other, _ = after("redo", 1, digits, tmp_path, recycle_every=10_000)
    step, changed = learner.after_step, []

    def watched():
        before = weights(learner.network)
        step()
        if not torch.equal(before, weights(learner.network)):
            changed.append(learner.steps)

    learner.after_step = watched
    learner.learn(tasks[0], SILENT)
    assert changed and changed == list(range(4, learner.steps + 1, 4)) and learner.steps == other.steps


def test_a_backbone_without_units_to_recycle_is_refused_in_one_line(digits, tmp_path):
    learner = registry.learners["redo"]
    with pytest.raises(UserError, match="^model_name: 'redo' finds no units in 'resnet8', whose blocks need conv1"):
        learner.Plan(after("redo", 0, digits, tmp_path)[0].config).check_backbone(torch.nn.Linear(3, 2))


def test_gdumb_trains_new_weights_on_the_memory_alone(digits, tmp_path):
    learner, tasks = after("gdumb", 0, digits, tmp_path, epochs=2, cutmix=0.5)
    seen, starts = [], []
    prepare, begin = learner.before_step, learner.begin_task

    def watched(batch):
        seen.append(batch)
        return prepare(batch)

    def begun(task):
        begin(task)
        starts.append(weights(learner.network.backbone))

    learner.before_step, learner.begin_task = watched, begun
    for task in tasks[:2]:
        seen.clear()
        learner.learn(task, SILENT)
        epochs = 2 if task.index else 1
        indices = torch.cat([batch.indices for batch in seen])
        assert indices.sort().values.tolist() == sorted(epochs * learner.memory.indices.tolist())
        assert {c: len(kept) for c, kept in learner.memory.classes.items()} == dict.fromkeys(range(task.num_seen), 10)
    assert not torch.equal(*starts) and learner.config.batch_size == 64


def test_gdumb_with_consolidation_has_the_statistics_of_its_memory(digits, tmp_path, monkeypatch):
    used = []
    batches = Batches.of

    def of(self, samples, *address):
        if address[-1] == "batch norm":
            used.append((sorted(samples.indices), sorted(self.learner.memory.indices)))
        return batches(self, samples, *address)

    monkeypatch.setattr(Batches, "of", of)
    learner, tasks = after("gdumb", 0, digits, tmp_path, epochs=4, consolidate=True)
    for task in tasks[:2]:
        learner.learn(task, SILENT)
    assert used and all(indices == memory for indices, memory in used)


def test_gdumbs_labels_are_mixed_as_its_images_are(digits, tmp_path):
    """Images of one colour each: their pixels tell what was pasted."""
    learner, _ = grown("gdumb", 2, digits, tmp_path)
    learner.eval()
    images = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 3, 8, 8)
    shares = []
    for trial in range(200):
        torch.manual_seed(trial)
        batch = learner.before_step(batch_of(images, TARGETS))
        pasted = batch.images != images
        rows, columns = (pasted[:, 0].any(dim).any(0) for dim in (2, 1))
        share = 1 - rows.float().mean() * columns.float().mean()  # the hull of the box is the box
        loss, logits = learner.loss(batch)
        expected = 0.0
        for row, image in enumerate(batch.images):
            values, counts = image[0].flatten().long().unique(return_counts=True)
            kept = share if len(values) > 1 else 1.0
            others = {value for value in values.tolist() if value != row} or {row}
            assert len(others) == 1 and (len(values) == 1 or counts[values == row].item() == round(64 * share.item()))
            own, other = (-logits[row].log_softmax(0)[TARGETS[label]] for label in (row, *others))
            expected += kept * own + (1 - kept) * other
        torch.testing.assert_close(loss, expected / 6)
        shares.append(share.item())
    mixed = [share for share in shares if share < 1]
    assert 0.3 < len(mixed) / 200 < 0.55, "half of the batches, some of them by an empty box"
    assert min(mixed) < 0.5 and max(mixed) > 0.9


def test_gdumbs_rate_is_that_of_torchs_warm_restarts_after_an_epoch_of_warm_up():
    config = resolve({"model_name": "gdumb", "epochs": 40})
    rate = task_schedule(config, False, 40, 1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.05)
    restarts = CosineAnnealingWarmRestarts(optimizer, T_0=1, T_mult=2, eta_min=5e-4)
    assert rate(0) == pytest.approx(0.005) and config.clip_norm == 10 and config.batch_size == 16
    for epoch in range(1, 40):
        assert rate(epoch) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        restarts.step()


@pytest.mark.parametrize("name", ["er_ace", "derpp", "cls_er"])
def test_a_method_that_is_nothing_without_exemplars_says_so_before_it_trains(name, digits, tmp_path):
    with pytest.raises(UserError, match=f"^memory_per_class: '{name}' needs exemplars; give a number above 0"):
        after(name, 0, digits, tmp_path, memory_per_class=0)
    with pytest.raises(UserError, match="^memory_size: "):
        after(name, 0, digits, tmp_path, memory_size=0, fixed_memory=False)
    after(name, 0, digits, tmp_path, memory_size=7, fixed_memory=False)
    for choice in ("herding", "reservoir"):
        with pytest.raises(UserError, match=f"'{name}' .* cannot hold one of each of the 7 classes before task 3"):
            after(name, 0, digits, tmp_path, memory_size=6, fixed_memory=False, exemplars=choice)
