"""EASE: adapters and prototypes are those of the slow twin, which has PILOT's arithmetic."""

import pytest
import torch
from reference import ease as twin
from support.recorded import adapters, features, images_of, part_of, recorded, trained, without_dropout
from torch.nn.functional import cross_entropy, normalize

from pycil_wsc.config.loading import resolve
from pycil_wsc.methods.pretrained.ease import EASE, SubspaceHead

pytest.importorskip("timm")
KEYS = {"ffn_num": 3, "init_lr": 0.5, "lrate": 0.3}


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    return recorded("ease", tmp_path_factory.mktemp("ease"), prepare=without_dropout, **KEYS)


def test_each_task_trains_its_own_adapters_and_classifier_as_the_twin_does(learned):
    learner = learned.learner
    for phase in learned.phases:
        own = f"backbone.sets.{phase.task}."
        new = trained(part_of(phase.before, own))
        proxies = trained(part_of(phase.before, "proxies."))
        decay = learner.config.weight_decay
        optimizer = torch.optim.SGD([*new.values(), *proxies.values()], lr=1, momentum=0.9, weight_decay=decay)
        steps = len(phase.batches) // len(phase.rates)
        for step, (images, targets) in enumerate(phase.batches):
            optimizer.param_groups[0]["lr"] = phase.rates[step // steps]
            optimizer.zero_grad()
            found = features(learner, images, adapters=adapters(new))
            logits = proxies["scale"] * normalize(found) @ normalize(proxies["weight"]).T
            loss = cross_entropy(logits[:, 2 * phase.task :], targets - 2 * phase.task)
            loss.backward()
            optimizer.step()
            assert phase.losses[step] == pytest.approx(loss.item(), rel=1e-4)
        for name, value in {**part_of(phase.after, own)}.items():
            torch.testing.assert_close(value, new[name].detach(), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(phase.after["proxies.weight"], proxies["weight"].detach(), rtol=1e-3, atol=1e-5)
        moved = [name for name, value in phase.after.items() if not torch.equal(value, phase.before[name])]
        assert moved and all(name.startswith((own, "proxies.")) for name in moved)
    assert [phase.task for phase in learned.phases] == [0, 1, 2] and learned.phases[0].rates == [0.5, 0.25]


@torch.no_grad()
def test_prototypes_are_mean_features_and_what_their_similarity_says_of_old_classes(learned):
    learner = learned.learner
    state = learner.network.state_dict()
    sets = [adapters(part_of(state, f"backbone.sets.{task}.")) for task in range(3)]
    prototypes = [[torch.zeros(12)] * 3 for _ in range(6)]
    for label in range(6):
        images, _ = images_of(learned.run, "train", [label])
        for task in range(label // 2 + 1):
            prototypes[label][task] = features(learner, images, adapters=sets[task]).mean(0)
    for tasks in (2, 3):
        twin.completed(prototypes, [2] * tasks, recalc=True)
    expected = torch.stack([torch.cat(rows) for rows in prototypes])
    torch.testing.assert_close(learner.network.head.weight, expected, rtol=1e-3, atol=1e-4)
    images, _ = images_of(learned.run, "test")
    logits = learner.predict(images[::12])
    for image, found in zip(images[::12], logits):
        own = [features(learner, image[None], adapters=each)[0] for each in sets]
        torch.testing.assert_close(found, twin.scores(own, prototypes, [2, 2, 2], alpha=0.1), rtol=1e-3, atol=1e-4)


OPTIONS = [
    {},
    {"alpha": 0.7, "recalc_sim": False},
    {"use_init_ptm": True, "beta": 0.4},
    {"use_init_ptm": True, "recalc_sim": False},
    {"use_diagonal": True, "use_init_ptm": True},
    {"use_reweight": False},
]


@pytest.mark.parametrize("given", OPTIONS, ids=str)
def test_each_option_completes_and_weighs_prototypes_as_the_twin(given):
    """Tasks of two, three and one class."""
    options = EASE.Options(**given)
    head, sizes = SubspaceHead(5, options), [2, 3, 1]
    generator = torch.Generator().manual_seed(0)
    rows = []  # of the twin
    plain = int(options.use_init_ptm)
    for task, size in enumerate(sizes):
        head.grow(sum(sizes[: task + 1]))
        new = torch.randn(size, plain + task + 1, 5, generator=generator)
        head.weight[-size:] = new.flatten(1)
        rows = [[*row, torch.zeros(5)] for row in rows]
        for row in new:
            kept = [not options.use_diagonal or place in (plain - 1, plain + task) for place in range(len(row))]
            rows.append([value if keep else torch.zeros(5) for value, keep in zip(row, kept)])
        if not options.use_diagonal:
            twin.completed(rows, sizes[: task + 1], options.recalc_sim, plain)
        head.complete()
        torch.testing.assert_close(head.weight, torch.stack([torch.cat(row) for row in rows]))
    images = torch.randn(4, plain + 3, 5, generator=generator)
    for image, logits in zip(images, head(images.flatten(1))):
        if options.use_reweight:
            expected = twin.scores(image, rows, sizes, options.alpha, options.beta if plain else None)
        else:
            expected = torch.stack([twin.cosine(image.flatten(), torch.cat(row)) for row in rows])
        torch.testing.assert_close(logits, expected)


@torch.no_grad()
def test_a_prediction_does_not_depend_on_the_other_images_of_a_batch(learned):
    images, _ = images_of(learned.run, "test")
    alone = torch.cat([learned.learner.predict(image[None]) for image in images[:6]])
    torch.testing.assert_close(learned.learner.predict(images)[:6], alone)


def test_the_defaults_are_those_of_pilots_file():
    config = resolve({"model_name": "ease"})
    found = config.init_epoch, config.epochs, config.init_lr, config.lrate, config.weight_decay, config.batch_size
    assert found == (20, 20, 0.025, 0.025, 5e-4, 48) and config.scheduler == "cosine" and config.options.ffn_num == 64
