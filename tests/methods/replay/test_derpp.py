"""DER++ whose memory is filled at the end of a task: loss, stored logits, too small a memory."""

import pytest
import torch
from support.at_task_end import INDICES, OLD, after, second_task
from support.methods import BATCH, SILENT, TARGETS, negative_log_likelihood
from support.small_runs import batch_of

from pycil_wsc.errors import UserError


def test_derpps_loss_is_that_of_its_paper(digits, tmp_path):
    learner, _ = second_task("derpp", digits, tmp_path, alpha=0.3, beta=0.7)
    stored = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    learner.memory.stored.put("logits", INDICES[OLD].numpy(), stored)
    loss, logits = learner.loss(batch_of(BATCH, TARGETS, INDICES, OLD))
    labels = negative_log_likelihood(logits[~OLD], TARGETS[~OLD]) + 0.7 * negative_log_likelihood(
        logits[OLD], TARGETS[OLD]
    )
    torch.testing.assert_close(loss, labels + 0.3 * ((logits[OLD, :4] - stored) ** 2).mean())


def test_derpp_stores_the_logits_of_each_exemplar_once(digits, tmp_path):
    """Those of the network at the end of the task that brought it: old ones are not replaced."""
    learner, tasks = after("derpp", 1, digits, tmp_path)
    kept = torch.from_numpy(learner.memory.indices)
    (batch,) = learner.batches.source.batches(kept.numpy(), learner.manager.train_targets, 1000)
    with torch.no_grad():
        expected = learner.eval().network(batch[0])
    torch.testing.assert_close(learner.memory.stored.of("logits", kept), expected)
    learner.learn(tasks[1], SILENT)
    again = learner.memory.stored.of("logits", kept)
    torch.testing.assert_close(again[:, :4], expected)
    assert again.shape[1] == 7 and again[:, 4:].isnan().all()
    new = torch.from_numpy(learner.memory.classes[5])
    assert learner.memory.stored.of("logits", new).isfinite().all()


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
