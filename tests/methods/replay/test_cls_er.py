"""CLS-ER whose memory is filled at a task's end: its loss, its averages and what they cost."""

from dataclasses import replace

import pytest
import torch
from support.at_task_end import INDICES, OLD, after, second_task
from support.methods import BATCH, SILENT, TARGETS, negative_log_likelihood, perturb
from support.small_runs import batch_of
from torch.nn.functional import cross_entropy

from pycil_wsc.training.learner import grow_for
from pycil_wsc.training.step.cost import Operations


def weights(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()])


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
    grow_for(learner, tasks[1])
    prepare, images, replayed, seen = learner.before_step, [], [], []

    def watched(batch):
        images.append(len(batch))
        replayed.append(int(batch.from_memory.sum()))
        return prepare(batch)

    learner.before_step, learner.grow, before = watched, lambda task: None, learner.spent.operations
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
    grow_for(learner, tasks[1])
    for average in (learner.plastic, learner.stable):
        assert torch.equal(average.head.weight[4:], learner.network.head.weight[4:]), "new rows start as the network's"
    learner.grow = lambda task: None
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
    grow_for(learner, tasks[0])
    learner.grow = lambda task: None
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
