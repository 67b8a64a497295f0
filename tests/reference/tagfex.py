"""Slow twins of TagFex's losses, pair by pair and head by head, written from PyCIL's arithmetic."""

import torch
from torch.nn.functional import cross_entropy, layer_norm


def info_nce(rows, columns, temperature):
    """Of 2 B rows, the first B of which are one view of B images, and the others the other view."""
    number = len(rows)
    total = 0.0
    for i in range(number):
        exponents, positive = [], None
        for j in range(number):
            if i == j:
                continue
            cosine = (rows[i] @ columns[j]) / (rows[i].norm() * columns[j].norm())
            exponents.append(cosine / temperature)
            if abs(i - j) == number // 2:
                positive = cosine / temperature
        total = total - positive + torch.stack(exponents).logsumexp(0)
    return total / number


def attention(parts, agnostic, own):
    """Head by head and place by place: (B, places, C) twice -> (B, places, C)."""
    channels, heads = own.shape[2], parts.heads
    width = channels // heads
    agnostic = layer_norm(agnostic, (channels,), parts.agnostic_norm.weight, parts.agnostic_norm.bias)
    own = layer_norm(own, (channels,), parts.own_norm.weight, parts.own_norm.bias)
    images = []
    for a, o in zip(agnostic, own):
        query = o @ parts.weights["query"]
        keys = torch.cat([a @ parts.weights["agnostic_key"], o @ parts.weights["own_key"]])
        values = torch.cat([a @ parts.weights["agnostic_value"], o @ parts.weights["own_value"]])
        columns = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            weights = (query[:, part] @ keys[:, part].T / width**0.5).softmax(1)
            columns.append(weights @ values[:, part])
        images.append(torch.cat(columns, 1))
    return torch.stack(images)


def places(backbone, images):
    """The last map of a built-in ResNet-8, as a list of places: (B, places, C)."""
    map_ = backbone.stage3(backbone.stage2(backbone.stage1(backbone.stem(images))))
    return map_.flatten(2).transpose(1, 2)


def loss(learner, images, targets, num_old, num_seen, options):
    """The whole loss of a later task, of both views of B images: (2 B, 3, H, W), (2 B,)."""
    network, teacher = learner.network, learner.teacher
    features = torch.cat([block(images) for block in network.blocks], 1)
    logits = features @ network.head.weight.T + network.head.bias
    newest = features[:, -network.out_dim :] @ network.aux_head.weight.T + network.aux_head.bias
    agnostic = places(network.agnostic, images)
    pooled = agnostic.mean(1)
    embedding = network.projector(pooled)
    classification = cross_entropy(logits, targets)
    auxiliary = cross_entropy(newest, torch.tensor([max(0, int(target) - num_old + 1) for target in targets]))
    contrast = info_nce(embedding, embedding, options.infonce_temp)
    with torch.no_grad():
        before = teacher["projector"](places(teacher["backbone"], images).mean(1))
    predicted = teacher["projector"](network.predictor(pooled))
    kept = info_nce(predicted, before, options.infonce_kd_temp)
    new = [row for row, target in enumerate(targets) if target >= num_old]
    merged = attention(network.attention, agnostic.detach(), places(network.blocks[-1], images)).mean(1)
    guide = merged @ network.merged_head.weight.T + network.merged_head.bias
    guided = cross_entropy(guide[new], targets[new] - num_old)
    total = classification + options.aux_factor * auxiliary + options.trans_cls_factor * guided
    known = num_old / num_seen
    total = total + options.contrast_factor * (contrast * (1 - known) + options.contrast_kd_factor * kept * known)
    if guided < classification:
        divergence = 0.0
        for row in new:
            teacher_row = (guide[row].detach() / options.kd_temp).log_softmax(0)
            student_row = (logits[row, num_old:] / options.kd_temp).log_softmax(0)
            divergence = divergence + (teacher_row.exp() * (teacher_row - student_row)).sum()
        total = total + options.transfer_factor * divergence / len(new)
    return total
