"""LAE: the online model, its moving average and the head are those of the slow twin, which has PILOT's arithmetic."""

import pytest
import torch
from reference import lae as twin
from support.recorded import features, images_of, part_of, recorded, trained
from torch.nn.functional import cross_entropy

from pycil_wsc.config.loading import resolve

pytest.importorskip("timm")
KEYS = {"epochs": 3, "init_epoch": 3, "num_freeze_epochs": 1, "ema_decay": 0.7, "pet_length": 3, "down_sample_dim": 2}
RATES = {"optimizer": "sgd", "init_lr": 0.5, "lrate": 0.5, "init_weight_decay": 0.01, "weight_decay": 0.01}
ONLINE, OFFLINE = (f"backbone.sets.{number}." for number in range(2))


@pytest.fixture(scope="module", params=["Prefix", "Adapter", "LoRA"])
def learned(request, tmp_path_factory):
    return recorded("lae", tmp_path_factory.mktemp("lae"), tasks=2, pet_cls=request.param, **KEYS, **RATES)


def online_features(learner, images, values):
    kind = learner.config.options.pet_cls
    return features(learner, images, **twin.inserted(kind, values))


def test_the_head_learns_first_and_then_the_modules_too_whose_average_is_the_offline_model(learned):
    learner = learned.learner
    assert [(phase.task, phase.name) for phase in learned.phases] == [(0, "head"), (0, "train")] + [
        (1, "head"),
        (1, "train"),
    ]
    for first, second in zip(learned.phases[::2], learned.phases[1::2], strict=True):
        start = 2 * first.task
        online = trained(part_of(first.before, ONLINE))
        head = trained(part_of(first.before, "head."))
        average = part_of(first.before, OFFLINE)
        groups = [{"params": list(part.values())} for part in (online, head)]
        optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.9, weight_decay=0.01)
        for phase in (first, second):
            for number, (images, targets) in enumerate(phase.batches):
                optimizer.zero_grad()
                logits = online_features(learner, images, online) @ head["weight"].T + head["bias"]
                loss = cross_entropy(logits[:, start:], targets - start)
                loss.backward()
                if phase is first:
                    for value in online.values():
                        value.grad = None
                optimizer.step()
                average = twin.averaged(average, online, 0.7)
                assert phase.losses[number] == pytest.approx(loss.item(), rel=1e-3)
        expected = {ONLINE: online, OFFLINE: average, "head.": head}
        for prefix, values in expected.items():
            for name, value in part_of(second.after, prefix).items():
                torch.testing.assert_close(value, values[name].detach(), rtol=1e-3, atol=1e-5)
        others = [name for name in second.after if not name.startswith(tuple(expected))]
        assert others and all(torch.equal(second.after[name], first.before[name]) for name in others)


@torch.no_grad()
def test_a_score_is_the_larger_probability_of_both_models_for_each_image_alone(learned):
    learner = learned.learner
    state = learner.network.state_dict()
    images, _ = images_of(learned.run, "test", [0, 3])
    both = [
        online_features(learner, images[::4], part_of(state, prefix)) @ state["head.weight"].T + state["head.bias"]
        for prefix in (ONLINE, OFFLINE)
    ]
    expected = twin.scores(*both)
    torch.testing.assert_close(learner.predict(images[::4]).exp(), expected, rtol=1e-3, atol=1e-5)
    alone = torch.cat([learner.predict(image[None]) for image in images[::4]])
    torch.testing.assert_close(alone.exp(), expected, rtol=1e-3, atol=1e-5)


def test_in_the_paper_the_first_task_has_no_epochs_of_the_head_alone(tmp_path):
    keys = KEYS | {"freeze_first_task": False, "epochs": 2, "init_epoch": 2, "num_freeze_epochs": 2}
    found = recorded("lae", tmp_path, tasks=2, **keys)
    assert [(phase.task, phase.name, len(phase.rates)) for phase in found.phases] == [(0, "train", 2), (1, "head", 2)]


def test_a_schedule_goes_on_when_the_modules_join(tmp_path):
    found = recorded("lae", tmp_path, tasks=1, **KEYS | {"init_milestones": [2], "init_lr": 0.1})
    assert [phase.rates for phase in found.phases] == [[0.1], [0.1, pytest.approx(0.01)]]


def test_exemplars_are_learned_with_the_classes_of_all_tasks(tmp_path):
    found = recorded("lae", tmp_path, tasks=2, **KEYS, memory_per_class=2, fixed_memory=True)
    assert {int(target) for _, targets in found.phases[-1].batches for target in targets} == {0, 1, 2, 3}
    moved = found.phases[-1].after["head.weight"] - found.phases[-1].before["head.weight"]
    assert moved.abs().amax(1).min() > 0, "rows of old classes, too"


@pytest.mark.parametrize("kind, wanted", [("Prefix", 2 * 10 * 12 + 2), ("Adapter", 5 * 12 + 5 + 5 * 12 + 12 + 1)])
def test_only_the_first_blocks_have_modules(kind, wanted, tmp_path):
    found = recorded("lae", tmp_path, tasks=1, pet_cls=kind, pet_blocks=1, init_epoch=1)
    assert sum(p.numel() for p in found.learner.network.online.parameters()) == wanted


def test_the_defaults_are_those_of_pilots_file():
    config = resolve({"model_name": "lae"})
    found = config.optimizer, config.epochs, config.init_lr, config.lrate, config.weight_decay, config.batch_size
    assert found == ("adam", 5, 0.0028125, 0.0028125, 0, 128)
    assert (config.scheduler, config.milestones, config.options.ema_decay) == ("steplr", (), 0.9999)
