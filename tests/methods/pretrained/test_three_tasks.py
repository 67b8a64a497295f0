"""SLCA, DGR, DUCT and CODA-Prompt over three tasks of a transformer: slow twins, step by step as in PILOT's code."""

import math

import pytest
import torch
from reference import pilot, prompts, tuning
from reference.transport import sinkhorn
from support.recorded import images_of, part_of, recorded, trained
from torch.nn.functional import cosine_similarity, cross_entropy, normalize

pytest.importorskip("timm")
HEADS = 2
FAST = {"init_lr": 0.1, "lrate": 0.1, "init_milestones": [], "milestones": []}


def features(weights, images, **inserted):
    """(B, 3, H, W) -> (B, d), by the slow transformer."""
    return torch.stack([tuning.features(weights, HEADS, image, **inserted) for image in images])


def assert_close(state, twin, place=""):
    for name, value in twin.items():
        torch.testing.assert_close(state[place + name], value.detach(), rtol=1e-3, atol=1e-4, msg=place + name)


def descend(phase, optimizer, loss_of, factors=(1,), before_step=lambda: None):
    """Train on the phase's batches at its rates; losses are the recorded ones."""
    steps = len(phase.batches) // len(phase.rates)
    for step, (images, targets) in enumerate(phase.batches):
        for group, factor in zip(optimizer.param_groups, factors, strict=True):
            group["lr"] = factor * phase.rates[step // steps]
        optimizer.zero_grad()
        loss = loss_of(images, targets)
        loss.backward()
        before_step()
        optimizer.step()
        assert phase.losses[step] == pytest.approx(loss.item(), rel=1e-3, abs=1e-5)


def sgd(*groups):
    return torch.optim.SGD(
        [{"params": list(group.values())} for group in groups], lr=1, momentum=0.9, weight_decay=5e-4
    )


def test_slca_trains_the_backbone_slowly_and_aligns_all_heads_but_only_until_the_next_task(tmp_path):
    keys = FAST | {"lrate": 0.03, "backbone_lr_factor": 0.3, "ca_epochs": 2}
    phases = recorded("slca", tmp_path, **keys).phases
    assert [(phase.task, phase.name) for phase in phases if phase.name == "alignment"] == [
        (1, "alignment"),
        (2, "alignment"),
    ]
    weights, heads = trained(part_of(phases[0].before, "backbone.")), []
    for phase in phases:
        if phase.name == "train":
            heads.append(trained(part_of(phase.before, f"head.parts.{phase.task}.")))
            assert_close(phase.before, weights, "backbone.")
            for number, head in enumerate(heads):
                assert_close(phase.before, head, f"head.parts.{number}.")

            def loss_of(images, targets, head=heads[-1], first=2 * phase.task):
                logits = features(weights, images) @ head["weight"].T + head["bias"]
                return cross_entropy(logits, targets - first)

            descend(phase, sgd(weights, heads[-1]), loss_of, (0.3, 1))
            assert_close(phase.after, weights, "backbone.")
            continue
        aligned = [trained(head) for head in heads]

        def aligned_loss(rows, targets, aligned=aligned):
            parts = [rows @ head["weight"].T + head["bias"] for head in aligned]
            norms = torch.stack([part.norm(dim=1) + 1e-7 for part in parts], 1).mean(1, keepdim=True)
            return cross_entropy(torch.cat(parts, 1) / norms / 0.1, targets)

        assert phase.rates == pytest.approx([0.03, 0.015])
        together = {f"{number}.{name}": value for number, head in enumerate(aligned) for name, value in head.items()}
        descend(phase, sgd(together), aligned_loss)
        assert_close(phase.after, together, "head.parts.")


def move_old_rows(learner):
    """Otherwise the student is the teacher in a task's first step."""
    head, old = learner.network.head, learner.num_old
    if old:
        noise = torch.randn(old, head.in_features, generator=torch.Generator().manual_seed(old))
        head.weight.data[:old] += 0.1 * noise
        head.renew()


def test_dgr_weighs_the_gradients_of_its_head(tmp_path):
    learned = recorded("dgr", tmp_path, prepare=move_old_rows, memory_per_class=3, **FAST)
    weights, teacher = trained(part_of(learned.phases[0].before, "backbone.")), None
    for phase in learned.phases:
        old, classes = 2 * phase.task, 2 * phase.task + 2
        head = trained({name: phase.before[f"head.{name}"] for name in ("weight", "bias")})
        received = [0.0] * classes
        gradient = {}  # of the head, as it is weighed
        counts = torch.tensor([3.0] * old + [6.0] * 2)
        prior = (counts / counts.sum()).log()

        def loss_of(images, targets, head=head, old=old, prior=prior, teacher=teacher, received=received, to=gradient):
            logits = features(weights, images) @ head["weight"].T + head["bias"]
            loss = cross_entropy(logits + prior, targets)
            own = torch.autograd.grad(loss, list(head.values()), retain_graph=True)
            distilled = []
            if old:
                with torch.no_grad():
                    soft = (features(teacher, images) @ teacher["rows"].T + teacher["bias"]) / 2
                kept = -(soft.softmax(1) * (logits[:, :old] / 2).log_softmax(1)).sum(1).mean()
                parts = torch.autograd.grad(kept, list(head.values()), retain_graph=True)
                distilled = torch.cat([parts[0], parts[1][:, None]], 1)[:old].tolist()
                loss = loss + old / 2 * kept
            ours = torch.cat([own[0], own[1][:, None]], 1).tolist()
            rows, received[:] = pilot.reweighted(ours, distilled, list(received), old, 1.0)
            to["weight"], to["bias"] = torch.tensor(rows).split([12, 1], 1)
            return loss

        def before_step(head=head, gradient=gradient):
            head["weight"].grad = gradient["weight"].clone()
            head["bias"].grad = gradient["bias"].flatten()

        descend(phase, sgd(weights, head), loss_of, (1, 1), before_step)
        assert_close(phase.after, weights, "backbone.")
        assert_close(phase.after, head, "head.")
        teacher = {name: value.detach().clone() for name, value in weights.items()}
        teacher |= {"rows": head["weight"].detach().clone(), "bias": head["bias"].detach().clone()}


def test_duct_adds_the_changes_of_its_tasks_and_transports_its_old_rows(tmp_path):
    learned = recorded("duct", tmp_path, backbone_lr_factor=0.3, epc_re=2, ot_reg=0.5, **FAST)
    initial = part_of(learned.phases[0].before, "backbone.")
    means, changes, rows = [], {}, None
    for number in range(3):
        main, again = (phase for phase in learned.phases if phase.task == number)
        assert main.rates == pytest.approx([0.1 / 3] * 2) and again.rates == pytest.approx([0.1 / 3] * 2)
        images = [images_of(learned.run, "train", [label])[0] for label in (2 * number, 2 * number + 1)]
        new = [features(initial, each).mean(0) for each in images]
        weights, head = trained(initial), trained(part_of(main.before, "head."))
        if rows is not None:
            torch.testing.assert_close(main.before["head.weight"][: 2 * number], rows, rtol=1e-3, atol=1e-4)

        def loss_of(images, targets, weights=weights, head=head, first=2 * number):
            cosines = normalize(features(weights, images)) @ normalize(head["weight"]).T
            return cross_entropy(head["scale"] * cosines[:, first:], targets - first)

        descend(main, sgd(weights, head), loss_of, (0.3, 1))
        with torch.no_grad():
            tuned = [features(weights, each).mean(0) for each in images]
            factor = 0.25 * sum(cosine_similarity(*pair, dim=0) for pair in zip(new, tuned)) / 2
            for name, value in weights.items():
                changes[name] = changes.get(name, 0) + factor * (value - initial[name])
                value.copy_(initial[name] + changes[name])
        assert_close(again.before, weights, "backbone.")
        for value in weights.values():
            value.requires_grad_(False)
        descend(again, sgd(head), loss_of)
        assert_close(again.after, head, "head.")
        means += [mean.double().tolist() for mean in new]
        rows = head["weight"].detach().clone()
        for old in range(number):
            costs = [[math.dist(mean, other) for other in means[2 * old : 2 * old + 2]] for mean in means[-2:]]
            plan = sinkhorn(costs, [0.5] * 2, [0.5] * 2, 0.5)
            part = slice(2 * old, 2 * old + 2)
            rows[part] = torch.tensor(pilot.transported((rows[part].tolist(), rows[-2:].tolist()), plan, 0.25))
    torch.testing.assert_close(learned.learner.network.head.weight, rows, rtol=1e-3, atol=1e-4)


def test_coda_prompt_trains_the_components_of_a_task_beside_those_before(tmp_path):
    keys = {"init_lr": 0.01, "lrate": 0.01, "prompt_param": [6, 4, 0.5]}
    learned = recorded("coda_prompt", tmp_path, **keys)
    vit = part_of(learned.phases[0].before, "backbone.vit.")
    for phase in learned.phases:
        assert phase.rates == pytest.approx(prompts.coda_rates(0.01, 2))
        parts, head = trained(part_of(phase.before, "prompts.")), trained(part_of(phase.before, "head."))
        old = 2 * phase.task  # components, and classes

        def loss_of(images, targets, parts=parts, head=head, old=old):
            rows = {name: torch.cat([value[:old].detach(), value[old:]]) for name, value in parts.items()}
            found = []
            for image in images:
                query = tuning.features(vit, HEADS, image)
                mixed = [
                    prompts.coda_prompt(query, *(rows[f"{block}.{part}"] for part in ("prompts", "keys", "attention")))
                    for block in range(2)
                ]
                pairs = prompts.prefixes_of({block: (prompt[:2], prompt[2:]) for block, prompt in enumerate(mixed)})
                found.append(tuning.features(vit, HEADS, image, prefixes=pairs))
            logits = torch.stack(found) @ head["weight"].T + head["bias"]
            penalty = sum(
                ((flat @ flat.T - torch.eye(len(flat))) ** 2).mean()
                for flat in (value.flatten(1) for value in rows.values())
            )
            return cross_entropy(logits[:, old:], targets - old) + 0.5 * penalty

        optimizer = torch.optim.Adam([*parts.values(), *head.values()])
        descend(phase, optimizer, loss_of)
        for name, value in parts.items():
            moved = phase.after[f"prompts.{name}"] - phase.before[f"prompts.{name}"]
            assert not moved[:old].any() and moved[old:].any()
            torch.testing.assert_close(phase.after[f"prompts.{name}"], value.detach(), rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(phase.after["head.weight"], head["weight"].detach(), rtol=1e-2, atol=1e-3)
