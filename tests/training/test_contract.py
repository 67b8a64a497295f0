"""What a learner of one's own may be: the hooks in their order, and methods that need more than a loss."""

from dataclasses import make_dataclass, replace

import numpy as np
import pytest
import torch
from support.methods import SILENT
from support.small_runs import Tiny, killed_at, without_measurements
from torch import nn
from torch.nn.functional import cross_entropy

import pycil_wsc
from pycil_wsc import registry
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.batches.feature_source import FeatureSource
from pycil_wsc.data.configured import for_training
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.data.memory.values import ExemplarValues
from pycil_wsc.errors import UnusableRun, UserError
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.networks.nets import make_backbone
from pycil_wsc.networks.stages import with_stages
from pycil_wsc.registry import register_learner
from pycil_wsc.runs.run import Run
from pycil_wsc.training.batches import Batch, Sampling, rotated
from pycil_wsc.training.learner import BaseLearner
from pycil_wsc.training.phase import Phase


@pytest.fixture
def registered():
    """A function that registers a learner for this test: (class, defaults) -> its name."""
    names = []

    def register(cls, **defaults):
        name = cls.__name__.lower()
        register_learner(name, **defaults)(cls)
        names.append(name)
        return name

    yield register
    for name in dict.fromkeys(names):
        del registry.learners.data[name], registry.learner_defaults.data[name]


def run_of(settings, **keys):
    config = resolve(settings | {"precision": "fp32"} | keys)
    return Run(config, for_training(load_dataset(config.dataset, "."), config))


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_loss_of_images_and_targets_is_told_what_to_change():
    with pytest.raises(UserError, match=r"Old\.loss\(self, images, targets\): .* use batch\.images and batch\.targets"):

        class Old(BaseLearner):
            def loss(self, images, targets): ...


def test_so_is_the_loss_of_a_phase(settings, registered):
    class OldPhase(Replay):
        def phases(self, task):
            yield replace(self.main_phase(task), loss=lambda images, targets: None)

    with pytest.raises(UserError, match=r"train: loss\(images, targets\): .*batch\.images"):
        run_of(settings, model_name=registered(OldPhase)).learner.learn(
            run_of(settings, model_name="oldphase").manager.tasks[0], SILENT
        )


@pytest.mark.parametrize(
    "name, says",
    [
        ("after_bakward", "there is no such hook; did you mean 'after_backward'"),
        ("endtask", "there is no such hook; did you mean 'end_task'"),
        ("phase", "there is no such hook; did you mean 'phases'"),
        ("before_epoch", "there is no such hook"),
        ("on_batch_end", "there is no such hook"),
        ("learn", "the loop is never overridden; use a hook"),
        ("predict", r"is classify\(extract\(images\)\); override these two"),
        ("incremental_train", "is PyCIL's, and never called here; use the hook loss"),
        ("after_task", "is PyCIL's, and never called here; use the hook after_memory"),
    ],
)
def test_a_hook_that_there_is_not_is_named(name, says):
    with pytest.raises(UserError, match=rf"Mine\.{name}: {says}"):
        type("Mine", (BaseLearner,), {name: lambda self: None, "__qualname__": "Mine"})


@pytest.mark.parametrize(
    "name, says",
    [
        ("uses_memory", r"belongs in the class Mine\.Plan, as uses_memory = \.\.\."),
        ("epoch_keys", r"belongs in the class Mine\.Plan, as epoch_keys = \.\.\."),
        (
            "planned_images",
            r"belongs in the class Mine\.Plan, as def planned_images\(self, \.\.\.\), with self\.config",
        ),
        ("new_samples", r"belongs in the class Mine\.Plan, as def new_samples"),
    ],
)
def test_what_belongs_in_a_plan_is_sent_there(name, says):
    with pytest.raises(UserError, match=rf"Mine\.{name}: {says}"):
        type("Mine", (BaseLearner,), {name: None, "__qualname__": "Mine"})


def test_a_plan_is_derived_from_that_of_the_base_and_its_names_are_known():
    with pytest.raises(UserError, match=r"Mine\.Plan: is not derived .* write class Plan\(Replay\.Plan\)"):
        type("Mine", (Replay,), {"Plan": BaseLearner.Plan, "__qualname__": "Mine"})
    misspelt = type("Plan", (Replay.Plan,), {"needs_exemplar": True})
    with pytest.raises(UserError, match=r"needs_exemplar: there is no such name; did you mean 'needs_exemplars'"):
        type("Mine", (Replay,), {"Plan": misspelt, "__qualname__": "Mine"})


def test_a_learner_with_two_bases_has_the_facts_of_both():
    class Growing(BaseLearner):
        class Plan(BaseLearner.Plan):
            expands = True

    class Mixed(Growing, Replay): ...

    assert Mixed.Plan.expands and Mixed.Plan.plain_first_task
    assert not Growing.Plan.plain_first_task and not Replay.Plan.expands


@pytest.mark.parametrize(
    "loss, found",
    [
        (lambda batch: batch.images.sum(), r"\[\(\)\]"),
        (lambda batch: (batch.images.flatten(1), batch.images.sum()), r"\[\(16, 192\), \(\)\]"),
        (lambda batch: None, r"\['NoneType'\]"),
    ],
)
def test_a_loss_that_returns_something_else_is_told_what_to_return(loss, found, settings, registered):
    class Wrong(Replay):
        def loss(self, batch):
            return loss(batch)

    run = run_of(settings, model_name=registered(Wrong), batch_size=16)
    with pytest.raises(UnusableRun, match=rf"'train': a loss returns \(scalar loss, logits .*, not {found}"):
        run.learner.learn(run.manager.tasks[0], SILENT)


def declared_as(fields):
    return type("Mine", (BaseLearner,), {"Options": fields, "__qualname__": "Mine"})


@pytest.mark.parametrize(
    "cls, says",
    [
        (object, "a learner is derived from pycil_wsc.training.learner.BaseLearner"),
        (lambda: declared_as(type("Options", (), {"alpha": 1.0})), "is not a dataclass"),
        (
            lambda: declared_as(make_dataclass("Options", [("alpha", float, 1.0)])),
            "alpha: is not a key; declare it with key",
        ),
    ],
)
def test_a_class_that_is_no_learner_is_refused_when_it_is_registered(cls, says):
    with pytest.raises(UserError, match=says):
        register_learner("mine")(cls())
    assert "mine" not in registry.learners


def test_a_name_that_another_method_has_is_refused_and_names_both():
    with pytest.raises(UserError, match=r"'icarl' is registered by .*icarl\.ICaRL and by .*Mine; rename one"):
        register_learner("icarl")(type("Mine", (BaseLearner,), {}))
    assert registry.learners["icarl"].__name__ == "ICaRL"


def test_a_definition_may_be_executed_again_as_in_a_notebook(registered):
    def define(default):
        class Mine(Replay):
            pass

        return registered(Mine, epochs=default), Mine

    define(1)
    name, again = define(2)
    assert registry.learners[name] is again and registry.learner_defaults[name] == {"epochs": 2}


# ---- the hooks -------------------------------------------------------------------------------------------------------

HOOKS = (
    "begin_task",
    "begin_phase",
    "after_backward",
    "after_step",
    "after_epoch",
    "end_phase",
    "end_task",
    "after_memory",
)


def test_the_hooks_are_called_in_the_order_of_the_page(settings, registered):
    calls = []

    class Told(Replay):
        def loss(self, batch):
            calls.append("loss")
            return super().loss(batch)

    for hook in HOOKS:
        setattr(Told, hook, lambda self, *_, hook=hook: calls.append(hook))
    name = registered(Told)
    run = run_of(settings, model_name=name, init_epoch=2, batch_size=12, max_tasks=1)
    run.learner.learn(run.manager.tasks[0], SILENT)
    step = ["loss", "after_backward", "after_step"]
    epochs = 2 * [*2 * step, "after_epoch"]
    assert calls == ["begin_task", "begin_phase", *epochs, "end_phase", "end_task", "after_memory"]


def test_begin_phase_sees_the_restored_state_when_a_run_resumes(settings, registered):
    seen = []

    class Remembers(Replay):
        def begin_phase(self, task, run):
            seen.append((task.index, len(self.memory), self.memory.stored.rows.keys() == {"index"}))

        def after_memory(self, task):
            indices = self.memory.indices
            self.memory.stored.put("index", indices, torch.from_numpy(indices)[:, None].float())

    keys = {"model_name": registered(Remembers), "max_tasks": 2}
    with killed_at(lambda calls: calls[-1][0] == {"task": 1, "phase": 0, "epoch": 2}):
        run_of(settings, **keys).execute()
    run_of(settings, **keys).execute()
    assert seen == [(0, 0, False), (1, 8, True), (1, 8, True)]


def test_batches_say_which_samples_they_hold_and_which_are_exemplars(settings, registered):
    seen = []

    class Watches(Replay):
        def loss(self, batch):
            seen.append((batch.indices.tolist(), batch.targets.tolist(), batch.from_memory.tolist()))
            return super().loss(batch)

    run = run_of(settings, model_name=registered(Watches), max_tasks=2)
    for task in run.manager.tasks:
        seen.clear()
        run.learner.learn(task, SILENT)
        for indices, targets, from_memory in seen:
            assert targets == run.manager.train_targets[indices].tolist()
            assert from_memory == [index not in task.train_indices for index in indices]
    assert any(True in from_memory for *_, from_memory in seen)


# ---- methods that need more than a loss ------------------------------------------------------------------------------


class NearestMean(BaseLearner):
    """Without training: the features of a random backbone, and the mean of each class as its weights."""

    class Plan(BaseLearner.Plan):
        uses_memory = False
        epoch_keys = ()

        def planned_epochs(self, task):
            return 0

    def phases(self, task):
        return iter(())

    def end_task(self, task):
        features = torch.from_numpy(self.outputs.features(task.train_indices))
        targets = torch.from_numpy(self.manager.train_targets[task.train_indices])
        with torch.no_grad():
            for label in targets.unique().tolist():
                mean = features[targets == label].mean(0)
                self.network.head.weight[label] = mean
                self.network.head.bias[label] = -mean.square().sum() / 2


@pytest.mark.parametrize("name", ["wsc", "ema", "wise_ft", "cofima", "ties", "cls_er", "l2_init", "ewc", "si", "mas"])
def test_a_backbone_may_have_parameters_without_dimensions(name, settings):
    """As the gains of timm's NFNets."""

    class Gain(Tiny):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(1.0))

        def forward(self, images):
            return self.gain * super().forward(images)

    registry.backbones.data["gain"] = Gain
    try:
        short = {"init_epoch": 1, "epochs": 1, "init_milestones": [], "milestones": [], "max_tasks": 2}
        finished = run_of(settings, model_name=name, convnet_type="gain", **{"wsc.warmup": 0.5}, **short)
        finished.execute()
    finally:
        del registry.backbones.data["gain"]
    assert finished.learner.network.backbone.gain != 1


def test_a_method_without_training_runs_and_is_nearest_mean(settings, registered):
    name = registered(NearestMean, nme=False)
    run = run_of(settings, model_name=name)
    result = run.execute()
    learner, targets = run.learner, run.manager.train_targets
    features = learner.outputs.features(np.arange(len(targets)))
    means = np.stack([features[targets == label].mean(0) for label in range(6)])
    images = torch.cat([x for x, _ in run.evaluator.source.batches(np.arange(72), run.manager.test_targets, 72)])
    with torch.no_grad():
        tested = learner.eval().extract(images).numpy()
    nearest = np.linalg.norm(tested[:, None] - means, axis=2).argmin(1)
    assert result["curve"][-1] == pytest.approx(100 * (nearest == run.manager.test_targets).mean())
    assert result["images_trained"] == 0 and result["train_loss"] == [[], [], []]


class TwoOptimisers(BaseLearner):
    """An ordinary phase, then the head alone on stored features with Adam."""

    class Plan(BaseLearner.Plan):
        one_phase = False

        def planned_images(self, task, memory, targets):
            return (self.planned_epochs(task) + 2) * (len(task.train_indices) + len(memory))

    def loss(self, batch):
        logits = self.network(batch.images)
        return cross_entropy(logits.float(), batch.targets), logits

    def head_loss(self, batch):
        assert batch.images.shape[1:] == (self.network.head.in_features,)
        logits = self.network.head(batch.images)
        return cross_entropy(logits.float(), batch.targets), logits

    def phases(self, task):
        yield self.main_phase(task)
        indices = self.batches.indices(task)
        source = FeatureSource(torch.from_numpy(self.outputs.features(indices)), self.device)
        targets = self.manager.train_targets[indices]
        optimizer = torch.optim.Adam(self.network.head.parameters())
        rows = np.arange(len(indices))
        yield Phase(
            name="head",
            epochs=2,
            optimizer=optimizer,
            lr=lambda epoch: 0.01,
            indices=rows,
            loss=self.head_loss,
            network=self.network.head,
            source=source,
            targets=targets,
        )


def test_a_phase_over_stored_features_with_its_own_optimiser_resumes_to_the_bit(settings, registered, tmp_path):
    keys = {"model_name": registered(TwoOptimisers), "max_tasks": 2}
    whole = run_of(settings, **keys, out=str(tmp_path / "whole")).execute()
    with killed_at(lambda calls: calls[-1][0] == {"task": 1, "phase": 1, "epoch": 1}):
        run_of(settings, **keys).execute()
    assert without_measurements(run_of(settings, **keys).execute()) == without_measurements(whole)


def test_views_are_other_augmentations_of_the_same_images(settings, registered, tmp_path):
    seen = []

    class TwoViews(Replay):
        def phases(self, task):
            yield replace(self.main_phase(task), views=3)

        def loss(self, batch):
            seen.append(batch)
            return super().loss(batch)

    run = run_of(settings, model_name=registered(TwoViews), init_epoch=1, max_tasks=1, batch_size=12)
    run.train_source.info = replace(run.train_source.info, padding=0)
    run.learner.learn(run.manager.tasks[0], SILENT)
    ((plain, _),) = run.train_source.batches(np.arange(72), run.manager.train_targets, 72)
    differ = 0
    for batch in seen:
        assert len(batch.views) == 2
        for view in (batch.images, *batch.views):
            for index, image in zip(batch.indices.tolist(), view):
                either = [plain[index], plain[index].flip(-1)]
                assert any(torch.equal(image, each) for each in either)
        differ += (batch.images != batch.views[0]).flatten(1).any(1).sum().item()
    assert 5 < differ < 20, "about half of 24 images are flipped in one of the two"


def test_rotations_are_quarter_turns():
    images = torch.arange(2 * 3 * 4 * 4.0).view(2, 3, 4, 4)
    batch = Batch(images, torch.tensor([1, 0]), torch.arange(2), torch.zeros(2, dtype=torch.bool))
    turned, turns = rotated(batch)
    assert turned.shape == (8, 3, 4, 4) and turns.tolist() == [0, 1, 2, 3] * 2
    assert torch.equal(turned[4], images[1]) and torch.equal(turned[2], images[0].flip(-1).flip(-2))
    assert torch.equal(turned[1], images[0].transpose(1, 2).flip(1))


def test_stages_are_those_of_the_forward_pass():
    """Of a backbone that gives them itself, and of one whose modules are called ``stage1``, ``stage2``, ..."""

    class Foreign(nn.Module):
        def __init__(self):
            super().__init__()
            for name, module in built_in.named_children():
                self.add_module(name, module)

        def forward(self, images):
            return self.pool(self.stage3(self.stage2(self.stage1(self.stem(images)))))

    built_in = make_backbone("resnet20").eval()
    images = torch.randn(2, 3, 32, 32)
    for backbone in (built_in, Foreign().eval()):
        features, stages = with_stages(backbone, images)
        assert torch.equal(features, backbone(images))
        assert [tuple(stage.shape) for stage in stages] == [(2, 16, 32, 32), (2, 32, 16, 16), (2, 64, 8, 8)]
        assert torch.equal(stages[2].mean((2, 3)), features)
        assert not any(module._forward_hooks for module in backbone.modules())
    with pytest.raises(UserError, match="has no stages"):
        with_stages(nn.Sequential(nn.Flatten()), images)


class Staged(nn.Module):
    """As timm's: a container ``stages``, whose parts ``feature_info`` names."""

    def __init__(self, *stages):
        super().__init__()
        self.stages = nn.Sequential(*stages)
        self.feature_info = [{"module": f"stages.{number}"} for number in range(len(stages))]

    def forward(self, images):
        return self.stages(images)


def test_the_stages_of_timms_models_are_those_that_they_name_with_channels_first():
    class Last(nn.Module):
        def forward(self, images):
            return images.permute(0, 2, 3, 1)

    layers = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1), Last()
    images = torch.randn(2, 3, 6, 6)
    _, stages = with_stages(Staged(*layers), images)
    assert [stage.shape[1:] for stage in stages] == [(4, 6, 6), (5, 6, 6), (5, 6, 6)]
    assert torch.equal(stages[1], stages[2])


def test_stages_that_are_no_maps_are_one_line():
    class Pair(nn.Module):
        def forward(self, images):
            return images, images

    class Unused(Staged):
        def forward(self, images):
            return images

    for backbone in (Staged(Pair()), Unused(nn.Identity())):
        with pytest.raises(UserError, match="^convnet_type: the stages of .* give no maps, which this method needs"):
            with_stages(backbone, torch.randn(2, 3, 6, 6))


def test_what_was_done_before_a_stop_is_not_done_again(settings, registered):
    """Neither the beginning of the task, nor a phase that has ended; the state is loaded once, and first."""
    seen = []

    class Watching(Replay):
        class Plan(Replay.Plan):
            one_phase = False
            epoch_keys = ("epochs", "epochs")

        def begin_task(self, task):
            seen.append((task.index, "begins"))

        def phases(self, task):
            for _ in range(2 if task.index else 1):
                yield self.main_phase(task)

        def begin_phase(self, task, run):
            seen.append((task.index, run.number, "from", run.first))

        def end_phase(self, task, run):
            seen.append((task.index, run.number, "ends"))

        def load_state_dict(self, *arguments, **keys):
            seen.append("loaded")
            return super().load_state_dict(*arguments, **keys)

    name = registered(Watching)
    keys = {"model_name": name, "init_epoch": 1, "epochs": 2, "milestones": [], "max_tasks": 2}
    with killed_at(lambda calls: calls[-1][0] == {"task": 1, "phase": 1, "epoch": 1}):
        run_of(settings, **keys).execute()
    first = [(0, "begins"), (0, 0, "from", 0), (0, 0, "ends")]
    assert seen == [*first, (1, "begins"), (1, 0, "from", 0), (1, 0, "ends"), (1, 1, "from", 0)]
    seen.clear()
    run_of(settings, **keys).execute()
    assert seen == ["loaded", (1, 1, "from", 1), (1, 1, "ends")]


def test_quotas_may_differ_from_class_to_class(settings, registered):
    class Uneven(Replay):
        class Plan(Replay.Plan):
            def quotas(self, task, manager):
                return [1 + label for label in range(task.num_seen)]

    result = run_of(settings, model_name=registered(Uneven))
    result.execute()
    assert {label: len(kept) for label, kept in result.learner.memory.classes.items()} == dict(enumerate(range(1, 7)))


# ---- values of exemplars ---------------------------------------------------------------------------------------------


def test_values_follow_their_exemplars_and_the_rest_is_nan():
    values = ExemplarValues(torch.device("cpu"))
    values.put("logits", np.array([7, 2]), torch.tensor([[7.0, 70.0], [2.0, 20.0]]))
    values.put("logits", np.array([4]), torch.tensor([[4.0, 40.0, 400.0]]))
    found = values.of("logits", torch.tensor([4, 7, 0]))
    assert found[0].tolist() == [4, 40, 400] and found[1, :2].tolist() == [7, 70]
    assert found[1, 2].isnan() and found[2].isnan().all()
    assert values.missing("logits", np.array([2, 3, 4])).tolist() == [3]
    values.keep(np.array([7, 9]))
    assert values.of("logits", torch.tensor([4, 2])).isnan().all()
    assert values.of("logits", torch.tensor([7]))[0, :2].tolist() == [7, 70]


class KeepsItsIndex(Replay):
    """Stores with each exemplar the mean of its pixels, and checks it wherever it comes along."""

    def after_memory(self, task):
        new = self.memory.stored.missing("mean", self.memory.indices)
        parts = [x.mean((1, 2, 3)) for x, _ in self.batches.plain(new)]
        self.memory.stored.put("mean", new, torch.cat(parts)[:, None])

    def loss(self, batch):
        stored, own = self.memory.stored.of("mean", batch.indices)[:, 0], batch.images.mean((1, 2, 3))
        torch.testing.assert_close(torch.where(batch.from_memory, stored, own), own, atol=1e-4, rtol=1e-4)
        return super().loss(batch)


def test_values_follow_a_saved_learner(tmp_path, registered):
    """Its images have other numbers there."""
    name = registered(KeepsItsIndex, nme=False)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (80, 8, 8, 3)).astype(np.uint8)
    labels = np.repeat(["a", "b", "c", "d"], 20)
    keys = {"name": name, "convnet_type": "resnet8", "epochs": 1, "memory_per_class": 3, "batch_size": 8}
    keys |= {"padding": 0, "flip": False, "brightness": 0.0, "precision": "fp32"}
    learner = pycil_wsc.Learner(**keys)
    learner.learn((images[:40], labels[:40]))
    learner.save(tmp_path / "saved")
    again = pycil_wsc.Learner.load(tmp_path / "saved")
    again.learn((images[40:], labels[40:]))
    assert again.evaluate((images, labels))["images"] == 80


def test_another_seed_of_the_batches_changes_their_order_after_the_first_task_and_nothing_else(settings, tmp_path):
    learners = [run_of(settings, model_name="replay", batch_seed=seed).learner for seed in (None, 1, 1)]
    first, second, _ = learners[0].manager.tasks
    for task in (first, second):
        orders = []
        for learner in learners:
            samples = Sampling(indices=task.train_indices)
            orders.append(
                torch.cat([batch.indices for batch in learner.batches.of(samples, task.index, 0, 0)]).tolist()
            )
        assert sorted(orders[0]) == sorted(orders[1]) and orders[1] == orders[2]
        assert (orders[0] == orders[1]) == (task.index == 0)
    assert learners[0].manager.class_order == learners[1].manager.class_order
    one, other = (learner.state_dict() for learner in learners[:2])
    assert all(torch.equal(value, other[name]) for name, value in one.items() if torch.is_tensor(value))
