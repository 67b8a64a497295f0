"""What tunes a timm transformer from outside does what its paper's equations say, and leaves timm's model alone."""

import copy

import pytest
import torch
from reference import tuning as twin
from torch import nn

from pycil_wsc.errors import UserError
from pycil_wsc.networks.layers import freeze, mark_frozen
from pycil_wsc.networks.nets import IncrementalNet, make_backbone
from pycil_wsc.networks.tuning.modules import Adapter, LoRA, Prefix, Prompts, Scales
from pycil_wsc.networks.tuning.transformer import TunedTransformer, attend, check_transformer

timm = pytest.importorskip("timm")
from timm.models.vision_transformer import Attention, ParallelScalingBlock, VisionTransformer  # noqa: E402

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 2, "mlp_ratio": 1, "num_classes": 0}
KINDS = {
    "plain": {},
    "registers, attention not fused": {"reg_tokens": 3, "patch_size": 4, "fused": False},
    "layer scale": {"init_values": 0.3},
}


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shaken(module, seed=1):
    """``module`` with other weights, none of which is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + parameter.data)
    return module


def tuned_of(frozen=True, fused=True, **options):
    torch.manual_seed(0)
    vit = shaken(VisionTransformer(**TINY | options))
    vit.out_dim = vit.num_features
    for block in vit.blocks:
        block.attn.fused_attn = fused
    if frozen:
        mark_frozen(vit, ["backbone"])
        freeze(vit)
    return TunedTransformer(vit).eval()


def images_of(tuned, count=3):
    return seeded(count, 3, *tuned.vit.patch_embed.img_size)


def as_twin(tuned, images, **added):
    """What the slow twin gives for these images."""
    weights = dict(tuned.vit.named_parameters())
    return torch.stack([twin.features(weights, tuned.vit.blocks[0].attn.num_heads, image, **added) for image in images])


def of_adapters(part):
    names = {"down": "down.weight", "b": "down.bias", "up": "up.weight", "c": "up.bias"}
    return {
        int(index): {short: adapter.get_parameter(name) for short, name in names.items()}
        | {"factor": adapter.scale, "mode": adapter.mode, "place": adapter.place}
        for index, adapter in part.items()
    }


def adapters(tuned, **options):
    tuned.add_blocks(Adapter, hidden=5, **options)
    return lambda part: {"adapters": of_adapters(part)}


def lora(tuned):
    tuned.add_blocks(LoRA, rank=3, blocks=[1])

    def products(module):
        return [scale * up @ down for scale, up, down in zip(module.scale, module.up, module.down)]

    return lambda part: {"lora": {int(index): products(module) for index, module in part.items()}}


def prefix(tuned):
    tuned.add_blocks(Prefix, length=4)

    def of(module):
        keys, values = module.keys * module.key_scale, module.values * module.value_scale
        return {"keys": keys, "values": values, "calibrated": True}

    return lambda part: {"prefixes": {int(index): of(module) for index, module in part.items()}}


def deep_prompts(tuned):
    tuned.sets.append(Prompts(tuned.dim, 3, tuned.depth))
    return lambda part: {"deep": list(part.tokens)}


def scales(tuned):
    tuned.sets.append(Scales(tuned.vit))
    return lambda part: {"scales": {name.replace("-", "."): (each.factor, each.shift) for name, each in part.items()}}


SETS = {
    "adapters parallel to the MLP": adapters,
    "adapters after the MLP": lambda tuned: adapters(tuned, mode="sequential"),
    "adapters parallel to the attention": lambda tuned: adapters(tuned, mode="branch", place="attn", scale=None),
    "LoRA": lora,
    "a prefix": prefix,
    "deep prompts": deep_prompts,
    "scales": scales,
}


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("name", sorted(SETS))
def test_each_set_does_what_its_equations_say_and_so_do_its_gradients(name, kind):
    tuned = tuned_of(**KINDS[kind])
    added = SETS[name](tuned)
    part = shaken(tuned.sets[0], seed=2)
    tuned.eval()
    images = images_of(tuned)
    features = tuned(images)
    expected = as_twin(tuned, images, **added(part))
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    weighted = seeded(*features.shape, seed=3)
    parameters = list(part.parameters())
    ours = torch.autograd.grad((features * weighted).sum(), parameters, allow_unused=True)
    theirs = torch.autograd.grad((expected * weighted).sum(), parameters, allow_unused=True)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(tuned(images, route=None), tuned.vit(images)), "it can be left out again"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_prompts_and_prefixes_may_differ_from_image_to_image(kind):
    tuned = tuned_of(**KINDS[kind])
    images = images_of(tuned)
    prompts, keys, values = seeded(3, 3, 4, tuned.dim)
    tokens = tuned.tokens(images, prompts=prompts, prefixes={1: (keys, values)})
    for index, image in enumerate(images):
        more = {1: {"keys": keys[index], "values": values[index], "calibrated": False}}
        expected = as_twin(tuned, image[None], prompts=prompts[index], prefixes=more)[0]
        torch.testing.assert_close(tokens[index], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(tuned.pooled(tokens, 4), tokens[:, 0])


def test_shallow_prompts_are_prompts_from_the_first_block_on():
    tuned = tuned_of()
    tuned.sets.append(shaken(Prompts(tuned.dim, 3)))
    images = images_of(tuned)
    expected = tuned.tokens(images, route=None, prompts=tuned.sets[0].tokens)[:, 0]
    torch.testing.assert_close(tuned(images), expected, rtol=1e-4, atol=1e-5)


OTHERS = {
    "another image size": {"dynamic_img_size": True},
    "mean of the patches": {"global_pool": "avg"},
    "mean of the patches beside registers": {"global_pool": "avg", "reg_tokens": 2},
    "no class token": {"class_token": False, "global_pool": "avg"},
    "attention pooling": {"class_token": False, "global_pool": "map"},
    "a norm before the blocks": {"pre_norm": True},
    "norms of queries and keys": {"qk_norm": True},
    "a norm within attention": {"scale_attn_norm": True},
    "positions without class token": {"no_embed_class": True, "reg_tokens": 1},
}


@pytest.mark.parametrize("name", sorted(OTHERS))
@torch.no_grad()
def test_a_transformer_with_new_adapters_is_timms(name):
    """They begin as nothing: any kind of transformer goes through timm's code and through ours to the same features."""
    tuned = tuned_of(**OTHERS[name])
    images = images_of(tuned) if name != "another image size" else seeded(2, 3, 24, 32)
    expected = tuned.vit(images)
    assert torch.equal(tuned(images, route=None), expected)
    tuned.add_blocks(Adapter, hidden=4)
    torch.testing.assert_close(tuned(images), expected, rtol=1e-4, atol=1e-5)
    tuned.add_blocks(LoRA)
    torch.testing.assert_close(tuned(images), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gated, fused", [(False, True), (False, False), (True, True)])
@torch.no_grad()
def test_attention_without_anything_further_is_timms(gated, fused):
    try:
        attn = Attention(12, num_heads=3, qkv_bias=True, **({"gated": True} if gated else {}))
    except TypeError:
        pytest.skip("this version of timm has no gates")
    attn.fused_attn = fused
    tokens = seeded(2, 5, 12)
    torch.testing.assert_close(attend(attn, tokens), attn(tokens))


def kept_bytes(tuned, images):
    """What autograd keeps of a forward pass, apart from weights."""
    weights = {parameter.data_ptr() for parameter in tuned.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr(), tensor.shape] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tuned(images)
    return sum(tensor.nbytes for tensor in kept.values())


def test_frozen_blocks_keep_no_activations_where_nothing_is_trained_below_them():
    found = {}
    for depth in (1, 4):
        tuned = tuned_of(depth=depth)
        images = images_of(tuned)
        assert kept_bytes(tuned, images) == 0, "nothing is trained"
        tuned.add_blocks(Adapter, blocks=[depth - 1], hidden=4)
        tuned.train()
        found[depth] = kept_bytes(tuned, images)
    assert found[1] == found[4] > 0, "three frozen blocks below it cost nothing"
    trained = tuned_of(depth=4, frozen=False)
    trained.add_blocks(Adapter, blocks=[3], hidden=4)
    assert kept_bytes(trained, images) > 3 * found[4]


def test_recomputed_activations_give_the_same_gradients():
    gradients = []
    for recomputed in (False, True):
        tuned = tuned_of()
        tuned.vit.set_grad_checkpointing(recomputed)
        tuned.sets.append(shaken(Scales(tuned.vit)))
        images = images_of(tuned)
        tuned.untuned(images)
        keys, values = seeded(2, 3, 2, tuned.dim).requires_grad_()
        tuned(images, prefixes={0: (keys, values)}).square().sum().backward()
        gradients.append([parameter.grad for parameter in tuned.sets.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_the_pre_trained_features_stay_although_the_transformer_is_trained():
    for frozen in (True, False):
        tuned = tuned_of(frozen)
        images = images_of(tuned)
        before = tuned.untuned(images)
        freeze(tuned)
        assert (tuned.original is None) == frozen
        trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
        assert len(trained) == (0 if frozen else len(list(tuned.vit.parameters())))
        shaken(tuned.vit, seed=5)
        assert torch.equal(tuned.untuned(images), before) != frozen


def test_each_layer_with_weights_has_a_scale():
    vit = tuned_of().vit
    layers = {name for name, layer in vit.named_modules() if isinstance(layer, (nn.Linear, nn.LayerNorm, nn.Conv2d))}
    assert {name.replace("-", ".") for name in Scales(vit)} == layers


@torch.no_grad()
def test_a_copy_has_scales_of_its_own():
    tuned = tuned_of()
    tuned.sets.append(Scales(tuned.vit))
    images = images_of(tuned)
    before = tuned(images)
    other = copy.deepcopy(tuned)
    shaken(other.sets)
    assert torch.equal(tuned(images), before) and not torch.allclose(other(images), before, atol=1e-2)
    other(images, route=None)
    assert torch.equal(tuned(images), before), "nor does switching those of the copy matter"


def test_what_is_added_has_the_learning_rate_of_its_block():
    tuned = tuned_of(frozen=False)
    tuned.add_blocks(Adapter, hidden=4)
    tuned.sets.append(Scales(tuned.vit))
    depths = IncrementalNet(tuned).depths()
    for index in range(2):
        expected = depths[tuned.vit.blocks[index].norm1.weight]
        assert depths[tuned.sets[0][str(index)].down.weight] == expected
        assert depths[tuned.sets[1][f"blocks-{index}-attn-qkv"].factor] == expected
    assert depths[tuned.sets[1]["norm"].shift] == depths[tuned.vit.norm.weight]
    assert depths[tuned.sets[1]["patch_embed-proj"].shift] == depths[tuned.vit.patch_embed.proj.weight]


def test_another_architecture_is_refused_in_one_line():
    refused = r"^convnet_type: 'resnet8' is not a plain vision transformer; .*set convnet_type to one"
    with pytest.raises(UserError, match=refused):
        check_transformer(make_backbone("resnet8"), "resnet8")
    with pytest.raises(UserError, match="timm:swin.*not a plain vision transformer"):
        check_transformer(timm.create_model("test_efficientnet", num_classes=0), "timm:swin")
    other = VisionTransformer(**TINY, block_fn=ParallelScalingBlock)
    with pytest.raises(UserError, match="block 0 of 'VisionTransformer' is of another kind"):
        check_transformer(other)
