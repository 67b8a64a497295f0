"""Runs of methods that tune a transformer, whose steps are recorded for a slow twin to repeat."""

import copy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
from reference import tuning as twin
from support.methods import SILENT
from support.small_runs import run_of, small_data

SMALL = {
    "init_cls": 2,
    "increment": 2,
    "memory_per_class": 0,
    "device": "cpu",
    "precision": "fp32",
    "image_size": 8,
    "batch_size": 6,
    "init_epoch": 2,
    "epochs": 2,
    "convnet_type": "timm:test_vit",
    "pretrained": False,
    **{f"convnet_options.{name}": 4 for name in ("patch_size", "mlp_ratio")},
    **{f"convnet_options.{name}": 2 for name in ("depth", "num_heads")},
    "convnet_options.embed_dim": 12,
}


@dataclass
class Recorded:
    """What a phase trained: its batches (images, targets), losses, and the learner's tensors before and after."""

    task: int
    name: str
    rates: list[float]
    before: dict
    batches: list = field(default_factory=list)
    losses: list = field(default_factory=list)
    after: dict = field(default_factory=dict)


def recorded(name, tmp_path, tasks=3, prepare=lambda learner: None, **keys):
    """A learner after so many tasks of two classes, and its phases. ``prepare`` is called before each task."""
    data = small_data(tmp_path / "data.npz", per_class=6)
    run = run_of(SMALL | {"dataset": f"npz:{data}", "out": str(tmp_path), "model_name": name} | keys)
    learner = run.learner
    phases, end_phase, found = learner.phases, learner.end_phase, []

    def watched(task):
        prepare(learner)
        for phase in phases(task):
            rates = [phase.lr(epoch) for epoch in range(phase.epochs)]
            record = Recorded(task.index, phase.name, rates, copy.deepcopy(learner.network.state_dict()))
            found.append(record)

            def loss(batch, record=record, plain=phase.loss):
                value, logits = plain(batch)
                record.batches.append((batch.images.clone(), batch.targets.clone()))
                record.losses.append(value.item())
                return value, logits

            yield replace(phase, loss=loss)

    def phase_ended(task, run):
        found[-1].after = copy.deepcopy(learner.network.state_dict())
        end_phase(task, run)

    learner.phases, learner.end_phase = watched, phase_ended
    for task in run.manager.tasks[:tasks]:
        learner.learn(task, SILENT)
    return SimpleNamespace(learner=learner.eval(), run=run, phases=found)


def without_dropout(learner):
    """Set that of all adapters to 0."""
    for module in learner.network.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.0


def trained(values):
    """Copies of tensors by name, which a twin trains."""
    return {name: value.detach().clone().requires_grad_() for name, value in values.items()}


def part_of(state, prefix):
    """The tensors of a state below ``prefix``, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def features(learner, images, **inserted):
    """The twin's features, image by image: (B, d)."""
    vit = learner.network.backbone.vit
    weights = dict(vit.named_parameters())
    return torch.stack([twin.features(weights, vit.blocks[0].attn.num_heads, image, **inserted) for image in images])


def adapters(values, mode="parallel", place="mlp", **more):
    """What :func:`reference.tuning.features` needs of a set of adapters, from their tensors by name."""
    blocks = sorted({name.partition(".")[0] for name in values})
    names = {"down": "down.weight", "b": "down.bias", "up": "up.weight", "c": "up.bias"}
    return {
        int(block): {short: values[f"{block}.{name}"] for short, name in names.items()}
        | {"factor": values.get(f"{block}.scale", 0.1), "mode": mode, "place": place, **more}
        for block in blocks
    }


def images_of(run, split, labels=None):
    """Images of a split as tests see them, in their order, and their classes; of ``labels`` alone."""
    source, targets = {
        "train": (run.train_source, run.manager.train_targets),
        "test": (run.evaluator.source, run.manager.test_targets),
    }[split]
    chosen = [number for number, target in enumerate(targets) if labels is None or target in labels]
    ((images, found),) = source.batches(torch.tensor(chosen).numpy(), targets, len(chosen))
    return images, found
