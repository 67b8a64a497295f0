"""ReDo: dormant units, and when they get new weights."""

import copy

import pytest
import torch
from support.at_task_end import after
from support.methods import BATCH, SILENT, TARGETS
from support.small_runs import batch_of

from pycil_wsc import registry
from pycil_wsc.errors import UserError
from pycil_wsc.training.learner import grow_for


def weights(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def test_redo_gives_dormant_units_new_weights_and_leaves_the_others(digits, tmp_path):
    """Against each unit's mean activation, computed layer by layer; the batch is not what the weights depend on."""
    learner, tasks = after("redo", 1, digits, tmp_path, recycle_every=1000, **{"convnet_options.width": 4})
    grow_for(learner, tasks[1])
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
