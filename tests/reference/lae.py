"""Slow twin of LAE, written from PILOT's arithmetic. ``values``: the parameters of a set of modules by name."""

import torch
from torch.nn.functional import gelu


def inserted(kind, values):
    """What the modules put into their blocks, for :func:`reference.tuning.features`."""
    blocks = sorted({name.partition(".")[0] for name in values})
    of = {block: {n.partition(".")[2]: v for n, v in values.items() if n.startswith(f"{block}.")} for block in blocks}
    if kind == "Prefix":
        return {"prefixes": {int(block): prefix(module) for block, module in of.items()}}
    if kind == "LoRA":
        return {"lora": {int(block): products(module) for block, module in of.items()}}
    return {"adapters": {int(block): adapter(module) for block, module in of.items()}}


def prefix(module):
    keys, values = module["keys"] * module["key_scale"], module["values"] * module["value_scale"]
    return {"keys": keys, "values": values, "calibrated": True}


def products(module):
    return [module[f"scale.{part}"] * (module[f"up.{part}"] @ module[f"down.{part}"]) for part in range(2)]


def adapter(module):
    names = {"down": "down.weight", "b": "down.bias", "up": "up.weight", "c": "up.bias", "factor": "scale"}
    return {short: module[name] for short, name in names.items()} | {"mode": "branch", "place": "attn", "act": gelu}


def averaged(average, values, decay):
    """The moving average after one more step."""
    return {name: decay * average[name] + (1 - decay) * values[name].detach() for name in average}


def scores(online, offline):
    """The larger probability of each class: (B, classes) logits of both models."""
    return torch.maximum(online.softmax(1), offline.softmax(1))
