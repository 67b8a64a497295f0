"""MEMO: blocks of their own for each task, on a trunk that all share."""

import pytest
import torch
from reference import tuning
from support.methods import SILENT, after, grown, images, moved, snapshot
from support.recorded import images_of, part_of, recorded

from pycil_wsc.config.loading import resolve
from pycil_wsc.errors import UserError
from pycil_wsc.networks.nets import ExpandingNet, make_backbone

HEADS = 2  # of the transformer


def test_memos_trunk_is_shared_runs_once_and_goes_on_learning(digits, tmp_path):
    learner, tasks = after("memo", 1, digits, tmp_path)
    trunk, block, calls = snapshot(learner.network.trunk), snapshot(learner.network.blocks[0]), []
    learner.learn(tasks[1], SILENT)
    assert moved(learner.network.blocks[0], block) == [] and "0.0.weight" in moved(learner.network.trunk, trunk)
    learner.network.trunk.register_forward_hook(lambda *_: calls.append(1))
    learner.network(images())
    assert len(calls) == 1


def test_memos_trunk_learns_through_the_old_blocks_too(digits, tmp_path):
    """As in PyCIL: an old block's weights are frozen, not the way through it."""
    learner, _ = grown("memo", 2, digits, tmp_path)
    with torch.no_grad():
        learner.network.head.weight[:, 64:] = 0  # the newest block has no effect
    learner.network.classify(learner.network.extract(images())).sum().backward()
    assert learner.network.trunk[0][0].weight.grad.abs().sum() > 0


def test_memo_can_keep_its_trunk_or_train_its_old_blocks(digits, tmp_path):
    learner, tasks = after("memo", 1, digits, tmp_path, train_base=False, train_adaptive=True)
    trunk, block = snapshot(learner.network.trunk), snapshot(learner.network.blocks[0])
    learner.learn(tasks[1], SILENT)
    assert moved(learner.network.trunk, trunk) == [] and moved(learner.network.blocks[0], block)


def test_memos_parts_have_the_published_sizes():
    sizes = {}
    for name in ("resnet32", "resnet18"):
        network = ExpandingNet(make_backbone(name), share_trunk=True)
        sizes[name] = [sum(p.numel() for p in part.parameters()) for part in (network.trunk, network.blocks[0])]
    assert sizes == {"resnet32": [112_016, 351_488], "resnet18": [11_176_512 - 8_393_728, 8_393_728]}


@pytest.mark.parametrize("trained", [False, True])
def test_memo_shares_all_blocks_but_the_last_of_which_each_task_has_its_own(trained, tmp_path):
    keys = {"convnet_type": "timm:vit_tiny_patch16_224", "memory_per_class": 2, "train_base": trained}
    made = recorded("memo", tmp_path, tasks=1, **keys)
    learner = made.learner
    first = {name: value.clone() for name, value in learner.network.state_dict().items()}
    learner.learn(learner.manager.tasks[1], SILENT)
    state = learner.eval().network.state_dict()
    trunk = part_of(state, "trunk.vit.")
    last = 1 + max(int(name.split(".")[1]) for name in trunk if name.startswith("blocks."))
    shown, _ = images_of(made.run, "test", [0, 3])
    features = learner.extract(shown)
    for number in range(2):
        block = part_of(state, f"blocks.{number}.")
        weights = trunk | {
            name.replace("block.", f"blocks.{last}.") if name.startswith("block.") else name: value
            for name, value in block.items()
        }
        expected = torch.stack([tuning.features(weights, HEADS, image) for image in shown])
        torch.testing.assert_close(features[:, number * 12 : number * 12 + 12], expected, rtol=1e-4, atol=1e-5)
    changed = {name for name, value in first.items() if name in state and not torch.equal(state[name], value)}
    assert any(name.startswith("trunk.") for name in changed) is trained
    assert not any(name.startswith("blocks.0.") for name in changed)


def test_memos_last_block_begins_pre_trained_or_as_in_pilot_at_random(tmp_path):
    keys = {"convnet_type": "timm:vit_tiny_patch16_224", "memory_per_class": 2}
    states = [
        recorded("memo", tmp_path, tasks=1, pretrained_block=kept, **keys).phases[0].before for kept in (True, False)
    ]
    other = {name for name, value in states[0].items() if not torch.equal(value, states[1][name])}
    last = {name for name in states[0] if name.startswith("blocks.0.block.") and "norm" not in name}
    assert other - {"head.weight", "aux_head.weight"} == last
    bound = 12**-0.5
    random = states[1]["blocks.0.block.attn.qkv.weight"]
    assert 0.9 * bound < random.abs().max() <= bound, "as torch's linear layers begin"
    with pytest.raises(UserError, match="^pretrained_block: is of a transformer"):
        resolve({"model_name": "memo", "pretrained_block": False})
