"""GDumb: new weights on the memory alone, mixed images, and its rate."""

import pytest
import torch
from support.at_task_end import after, grown
from support.methods import SILENT, TARGETS
from support.small_runs import batch_of
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from pycil_wsc.config.loading import resolve
from pycil_wsc.training.batches import Batches
from pycil_wsc.training.optimizers.schedules import task_schedule


def weights(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()])


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


@pytest.mark.slow
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
