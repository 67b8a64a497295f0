"""Backbones have the published shapes, and a growing head keeps what it knows."""

import pytest
import torch
from torch import nn
from torchvision.models import resnet18 as torchvision_resnet18

from pycil_wsc.networks.backbones.cifar_resnet import BasicBlock
from pycil_wsc.networks.heads import CosineHead, IncrementalHead
from pycil_wsc.networks.nets import IncrementalNet, make_backbone
from pycil_wsc.registry import backbones
from pycil_wsc.seeding import seeded


def parameters(module):
    return sum(p.numel() for p in module.parameters())


def test_parameter_counts_are_the_published_ones():
    assert parameters(backbones["resnet32"]()) == 463_504
    assert parameters(backbones["resnet18"]()) == 11_176_512
    assert parameters(backbones["resnet18_cifar"]()) == parameters(backbones["resnet18_small"]()) == 11_168_832
    net = IncrementalNet(make_backbone("resnet32"))
    net.grow(100)
    assert parameters(net) == 463_504 + 6_500  # PyCIL prints 650 more: a layer it never uses


def test_the_shortcut_takes_every_second_pixel_and_appends_zero_channels():
    block = BasicBlock(16, 32, 2).eval()
    nn.init.zeros_(block.bn2.weight)  # the residual branch is zero
    images = torch.rand(2, 16, 8, 8)
    out = block(images)
    assert torch.equal(out[:, :16], images[:, :, ::2, ::2]) and not out[:, 16:].any()


def test_resnet18_computes_what_torchvisions_does():
    ours, theirs = backbones["resnet18"]().eval(), torchvision_resnet18().eval()
    names = dict(zip(ours.state_dict(), theirs.state_dict()))
    ours.load_state_dict({name: theirs.state_dict()[other] for name, other in names.items()})
    theirs.fc = nn.Identity()
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(images), theirs(images))


def test_a_narrow_resnet18_is_torchvisions_with_a_share_of_the_channels():
    narrow, full = backbones["resnet18"](width=16), backbones["resnet18"]()
    for name, weights in narrow.named_parameters():
        shape = tuple(size * 4 if size > 7 else size for size in weights.shape)  # not those of colours and kernels
        assert shape == full.get_parameter(name).shape
    images = torch.randn(2, 3, 64, 64)
    assert narrow(images).shape == (2, 128) and len(narrow.stages()) == 4
    torch.manual_seed(3)
    ours = backbones["resnet18"]()
    torch.manual_seed(3)
    theirs = torchvision_resnet18()  # the stages are drawn before the stem
    for name, weights in theirs.named_parameters():
        if name.startswith("layer"):
            assert torch.equal(weights, ours.get_parameter(name.replace("layer", "stage")))


def test_the_mlp_is_mammoths_for_mnist():
    """Two layers of 100 units with ReLU over the 784 pixels of one channel; Glorot's uniform weights, no bias."""
    net = backbones["mlp"]()
    first, _, second, _ = net.layers
    assert parameters(net) == 784 * 100 + 100 + 100 * 100 + 100
    images = torch.rand(4, 1, 28, 28).expand(-1, 3, -1, -1)
    hidden = (images[:, 0].reshape(4, 784) @ first.weight.T).clamp(min=0)
    torch.testing.assert_close(net(images), (hidden @ second.weight.T).clamp(min=0))
    bound = (6 / 884) ** 0.5
    assert first.weight.abs().max() <= bound and first.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    with pytest.raises(ValueError, match="made for images of side 28, not 8; set convnet_options.side"):
        net(torch.rand(1, 3, 8, 8))


def test_features_are_vectors_of_the_stated_size_and_not_negative():
    for name, side in [
        ("resnet8", 8),
        ("resnet20", 32),
        ("resnet32", 32),
        ("resnet18_cifar", 16),
        ("resnet18_small", 32),
    ]:
        net = backbones[name]()
        features = net(torch.randn(3, 3, side, side))
        assert features.shape == (3, net.out_dim) and (features >= 0).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_new_rows_are_the_same_on_every_device():
    heads = []
    for device in ("cpu", "cuda"):
        with seeded(1, "weights"):
            head = IncrementalHead(4, 2).to(device)
            head.grow(5, 6)
        heads.append(head.weight.cpu())
    assert torch.equal(*heads)


def test_new_rows_of_a_cosine_head_are_uniform_in_every_task():
    head = CosineHead(64, 2)
    old = head.weight.detach().clone()
    head.grow(200)
    new = head.weight.detach()[2:]
    assert torch.equal(head.weight[:2], old)
    assert new.abs().max() <= 1 / 8 and new.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.05)


def test_head_growth_keeps_old_rows_to_the_bit():
    head = IncrementalHead(64)
    head.grow(10)
    nn.init.normal_(head.bias)
    weight, bias = head.weight.clone(), head.bias.clone()
    head.grow(1010)
    assert torch.equal(head.weight[:10], weight) and torch.equal(head.bias[:10], bias)
    new, bound = head.weight[10:], (3 / 64) ** 0.5
    assert new.abs().max() <= bound and abs(new.std() - bound / 3**0.5) < 0.002  # uniform in +-bound
    assert not head.bias[10:].any() and head(torch.randn(2, 64)).shape == (2, 1010)


def test_initial_weights_follow_the_seed_and_leave_the_global_generator_alone():
    def weights(seed):
        with seeded(seed, "weights"):
            return IncrementalNet(make_backbone("resnet8")).backbone.stem[0].weight

    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    first = weights(1)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, weights(1)) and not torch.equal(first, weights(2))
