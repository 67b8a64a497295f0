"""A vision transformer, image by image and head by head, from the equations of its papers and those that tune it.

``weights``: timm's ``state_dict``. Everything else is what a method adds: see :func:`features`.
"""

import math

import torch


def features(weights, heads, image, *, prompts=None, deep=None, prefixes=None, adapters=None, lora=None, scales=None):
    """The class token's features of one image: (3, H, W) -> (d,).

    prompts: tokens (p, d) after the class token and the registers. deep: for each block, tokens that it alone sees.
    prefixes: block -> keys and values (p, d), of which ``calibrated`` ones have a softmax of their own.
    adapters: block -> (down, bias, up, bias, factor, mode, place, and act if it is not ReLU). lora: block -> (B A of
    keys, B A of values), each (d, d). scales: layer -> (factor, shift).
    """
    scales = scales or {}
    tokens = embedded(weights, image, scales)
    first = len(tokens) - patches(weights, image)
    if prompts is not None:
        tokens = torch.cat([tokens[:first], prompts, tokens[first:]])
    for index in range(1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))):
        place = f"blocks.{index}."
        block = {name.removeprefix(place): value for name, value in weights.items() if name.startswith(place)}
        own = {name.removeprefix(place): value for name, value in scales.items()}
        count = len(tokens)
        if deep is not None:
            tokens = torch.cat([tokens, deep[index]])
        tokens = through(
            block, heads, tokens, own, (prefixes or {}).get(index), (adapters or {}).get(index), (lora or {}).get(index)
        )
        tokens = tokens[:count]
    out = scaled(norm(tokens, weights["norm.weight"], weights["norm.bias"]), scales, "norm")
    return out[0] if prompts is None else out


def patches(weights, image):
    side = weights["patch_embed.proj.weight"].shape[-1]
    return (image.shape[1] // side) * (image.shape[2] // side)


def embedded(weights, image, scales):
    kernel, bias = weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"]
    side = kernel.shape[-1]
    rows = []
    for top in range(0, image.shape[1], side):
        for left in range(0, image.shape[2], side):
            patch = image[:, top : top + side, left : left + side]
            rows.append((kernel * patch).sum((1, 2, 3)) + bias)
    tokens = scaled(torch.stack(rows), scales, "patch_embed.proj")
    before = [weights[name][0] for name in ("cls_token", "reg_token") if name in weights]
    return torch.cat([*before, tokens]) + weights["pos_embed"][0]


def through(block, heads, tokens, scales, prefix, adapter, lora):
    normed = scaled(norm(tokens, block["norm1.weight"], block["norm1.bias"]), scales, "norm1")
    branch = attention(block, heads, normed, scales, prefix, lora)
    tokens = joined(tokens, normed, branch, block.get("ls1.gamma", 1), adapter, "attn")
    normed = scaled(norm(tokens, block["norm2.weight"], block["norm2.bias"]), scales, "norm2")
    hidden = scaled(normed @ block["mlp.fc1.weight"].T + block["mlp.fc1.bias"], scales, "mlp.fc1")
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    branch = scaled(hidden @ block["mlp.fc2.weight"].T + block["mlp.fc2.bias"], scales, "mlp.fc2")
    return joined(tokens, normed, branch, block.get("ls2.gamma", 1), adapter, "mlp")


def joined(stream, normed, branch, gamma, adapter, place):
    if adapter is None or adapter["place"] != place:
        return stream + gamma * branch
    if adapter["mode"] == "parallel":
        return stream + gamma * branch + adapted(adapter, stream)
    if adapter["mode"] == "branch":
        return stream + gamma * (branch + adapted(adapter, normed))
    return stream + gamma * branch + adapted(adapter, gamma * branch)


def adapted(adapter, tokens):
    hidden = adapter.get("act", torch.relu)(tokens @ adapter["down"].T + adapter["b"])
    return adapter["factor"] * (hidden @ adapter["up"].T + adapter["c"])


def attention(block, heads, tokens, scales, prefix, lora):
    weight = block["attn.qkv.weight"]
    dim = tokens.shape[1]
    if lora is not None:
        weight = weight + torch.cat([torch.zeros(dim, dim), *lora])
    projected = scaled(tokens @ weight.T + block["attn.qkv.bias"], scales, "attn.qkv")
    queries, keys, values = projected.split(dim, 1)
    before = 0
    if prefix is not None:
        before = len(prefix["keys"])
        keys = torch.cat([prefix["keys"], keys])
        values = torch.cat([prefix["values"], values])
    width = dim // heads
    outputs = []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        shares = torch.exp(queries[:, part] @ keys[:, part].T / math.sqrt(width))
        shares = shares / shares.sum(1, keepdim=True)
        if before and prefix["calibrated"]:
            own = shares[:, :before] / shares[:, :before].sum(1, keepdim=True)
            shares = torch.cat([own, shares[:, before:]], 1)
        outputs.append(shares @ values[:, part])
    mixed = torch.cat(outputs, 1)
    return scaled(mixed @ block["attn.proj.weight"].T + block["attn.proj.bias"], scales, "attn.proj")


def norm(tokens, weight, bias):
    centred = tokens - tokens.mean(1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(1, keepdim=True) + 1e-6) * weight + bias


def scaled(tokens, scales, name):
    return tokens * scales[name][0] + scales[name][1] if name in scales else tokens
