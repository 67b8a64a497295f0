"""Slow twin of LAE, written from PILOT's arithmetic. A module: its parameters by name."""

from torch.nn.functional import gelu, linear


def inserted(kind, values):
    """What a module puts into its block, for :func:`reference.transformer.block`."""
    if kind == "Prefix":
        scaled = values["key.scale"] * values["key.tokens"], values["value.scale"] * values["value.tokens"]
        return {"prefix": scaled}
    if kind == "LoRA":
        return {"lora": [values[f"{name}.scale"] * values[f"{name}.up"] @ values[f"{name}.down"] for name in "kv"]}

    def adapter(tokens):
        hidden = gelu(linear(tokens, values["down.weight"], values["down.bias"]))
        return values["scale"] * linear(hidden, values["up.weight"], values["up.bias"])

    return {"beside_attention": adapter}


def averaged(average, values, decay):
    """The moving average after one more step."""
    return {name: decay * average[name] + (1 - decay) * values[name].detach() for name in average}


def scores(online, offline):
    """The larger probability of each class: (B, classes) logits of both models."""
    return online.softmax(1).maximum(offline.softmax(1))
