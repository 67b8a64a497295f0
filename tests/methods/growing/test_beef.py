"""BEEF: its losses and their gradients against a slow twin, the fused classifier, and what fusion trains on."""

import copy
from types import SimpleNamespace

import pytest
import torch
from reference import beef as twin
from support.methods import SILENT, SMALL, grown, images, moved, snapshot
from support.small_runs import batch_of

from pycil_wsc.config.loading import resolve
from pycil_wsc.config.pycil_files import our_names, our_values
from pycil_wsc.errors import UserError
from pycil_wsc.runs.run import Run

TARGETS = torch.tensor([0, 6, 2, 8, 9, 4, 7, 8])  # of the ten classes of three tasks: 4, 3 and 3


def gradients(learner, loss):
    learner.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in learner.network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tasks", [1, 2, 3])
def test_loss_and_gradients_are_the_twins(tasks, digits, tmp_path):
    learner, _ = grown("beef", tasks, digits, tmp_path, energy_weight=0.7, logits_alignment=1.3)
    network, sizes = learner.network.train(), [4, 3, 3][:tasks]
    targets, start = TARGETS % sum(sizes), copy.deepcopy(learner.network.state_dict())
    noise = 100 * torch.randn(3, 8, 3, 8, 8, generator=torch.Generator().manual_seed(1))  # so that it is seen
    learner.noise = lambda whole, like: noise
    loss, logits = learner.loss(batch_of(images(), targets))
    found, after = gradients(learner, loss), snapshot(network)
    network.load_state_dict(start)
    parts = network.blocks[-1], network.head if tasks == 1 else network.own_head, network.energy_head
    expected = twin.loss(*parts, images(), targets, sizes, noise, 1.3, 0.7)
    wanted = gradients(learner, expected)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5) and logits.shape == (8, sum(sizes))
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max()), name
    for name, buffer in network.blocks[-1].named_buffers():
        assert torch.allclose(after[f"blocks.{tasks - 1}.{name}"].float(), buffer.float(), atol=1e-5), name


def test_the_classifier_fuses_blocks_by_a_scale_and_a_shift_for_each_earlier_task(digits, tmp_path):
    learner, _ = grown("beef", 3, digits, tmp_path)
    network = learner.network.eval()
    features = network.extract(images())
    rows = twin.fused(network.head.weight, network.own_head, *network.fusion, [4, 3, 3])
    expected = torch.stack([features @ weight + bias for weight, bias in rows], 1)
    assert torch.allclose(learner.predict(images()), expected, atol=1e-5)
    before, shared = network.merged()[0].clone(), features.shape[1]
    network.grow(12)  # now the weights are those of the older blocks, and the biases are gone
    assert torch.equal(network.merged()[0][:10, :shared], before)
    assert torch.equal(network.merged()[1][10:], network.own_head.bias[3:])


def test_a_new_block_starts_as_the_first_one_and_batch_norm_of_all_others_goes_on(digits, tmp_path):
    learner, _ = grown("beef", 2, digits, tmp_path)
    network = learner.network
    network.grow(10)
    for name, tensor in network.blocks[2].state_dict().items():
        assert torch.equal(tensor, network.blocks[0].state_dict()[name]), name
    before = snapshot(network.train())
    learner.loss(batch_of(images(), TARGETS))
    changed = {name.split(".")[1] for name in moved(network, before)}
    assert changed == {"1", "2"}


def phases_of(learner, task):
    """The phases, and the batches of the first epoch of each."""
    found = []
    monitor = SimpleNamespace(**vars(SILENT) | {"phase_started": lambda task, run: found.append(run.phase)})
    learner.learn(task, monitor)
    return found


@pytest.mark.slow
def test_fusion_trains_two_numbers_for_each_earlier_task_on_a_balanced_set(digits, tmp_path):
    keys = {"model_name": "beef", "out": str(tmp_path), "fusion_epochs": 3, "fusion_lr": 0.04}
    run = Run(resolve(SMALL | keys), digits)
    learner = run.learner
    learner.learn(run.manager.tasks[0], SILENT)
    states = []
    learner.after_epoch = lambda task, run, epoch, loss: states.append(
        (run.phase.name, snapshot(learner.network), run.lr(epoch))
    )
    expansion, fusion = phases_of(learner, run.manager.tasks[1])
    counts = torch.bincount(torch.from_numpy(run.manager.train_targets[fusion.indices]))
    assert (expansion.name, fusion.name) == ("expansion", "fusion") and counts.tolist() == [10] * 7
    assert len(set(fusion.indices.tolist())) == 70
    trained = [state for name, state, _ in states if name == "fusion"]
    changed = {name for name in trained[0] if not torch.equal(trained[0][name], trained[-1][name])}
    assert "fusion" in changed and trained[-1]["fusion"].shape == (2, 1)
    assert all("running" in name or "num_batches" in name for name in changed - {"fusion"})
    assert [rate for name, _, rate in states if name == "fusion"] == pytest.approx(twin.cosine(0.04, 3))


@pytest.mark.slow
def test_without_exemplars_there_is_no_fusion(digits, tmp_path):
    run = Run(resolve(SMALL | {"model_name": "beef", "out": str(tmp_path), "memory_per_class": 0}), digits)
    run.learner.learn(run.manager.tasks[0], SILENT)
    assert [phase.name for phase in phases_of(run.learner, run.manager.tasks[1])] == ["expansion"]


def test_noise_is_that_of_the_address_and_another_in_each_step(digits, tmp_path):
    learner, again = (grown("beef", 1, digits, tmp_path)[0] for _ in range(2))
    first, second = learner.noise(8, images()), learner.noise(8, images())
    assert first.shape == (3, 8, 3, 8, 8) and not torch.equal(first, second)
    assert torch.equal(again.noise(8, images()), first)
    again.load_state_dict(learner.state_dict())
    assert torch.equal(again.noise(8, images()), learner.noise(8, images())), "a run that resumes draws what is next"


def test_pycils_name_and_keys_are_ours():
    file = {"model_name": "beefiso", "init_epochs": 3, "expansion_epochs": 4, "lr": 0.2, "T": 2}
    file |= {"is_compress": False, "reduce_batch_size": False}
    config = resolve(our_values(our_names(file)))
    assert (config.model_name, config.init_epoch, config.epochs, config.lrate) == ("beef", 3, 4, 0.2)
    for wrong in {"is_compress": True}, {"reduce_batch_size": True}:
        with pytest.raises(UserError, match=f"unknown key '{next(iter(wrong))}'"):
            resolve(our_values(our_names(file | wrong)))
