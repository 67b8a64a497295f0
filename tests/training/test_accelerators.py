"""On any accelerator the package does what it does on the CPU, bit for bit, and no step of training waits for it.

The accelerator is simulated (``tests/simulated_device``): torch refuses operands of two devices and generators of other
devices, and each wait of the host and each copy from it is counted.
"""

import contextlib
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import simulated_device
import torch
from PIL import Image
from safetensors.torch import load_file
from support.course import Course, Steps, tensors_of
from support.processes import nearly
from support.small_llm import small_settings
from support.small_runs import ROOT, killed_at, small_data, without_measurements
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves

from pycil_wsc import devices, registry
from pycil_wsc.classifier.learner import Learner
from pycil_wsc.config.kinds import kinds, run_folder
from pycil_wsc.config.loading import resolve
from pycil_wsc.consolidation import Average, Blend, WeightSpaceConsolidation
from pycil_wsc.data.batches.loader import ArraySource, DeviceSource, FolderSource
from pycil_wsc.data.configured import for_training
from pycil_wsc.data.types import DatasetInfo, ImageMap, Split
from pycil_wsc.errors import UserError
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.plugins.pycil import PyCILOptions, consolidated
from pycil_wsc.runs.device_check import check_device
from pycil_wsc.runs.run import Run
from pycil_wsc.seeding import seeded
from pycil_wsc.studies.flatness import Flatness

SKIPPED = simulated_device.reason_to_skip()
pytestmark = [
    pytest.mark.skipif(SKIPPED is not None, reason=str(SKIPPED)),
    pytest.mark.usefixtures("undrawn", "accelerator"),
]
SHORT = {"init_epoch": 1, "epochs": 2, "batch_size": 8, "precision": "fp32", "wsc.warmup": 0.5}
SHORT |= {"cache_first_task": False, "checkpoint_seconds": 3600}


@pytest.fixture(autouse=True)
def composed_attention():
    """Torch composes attention of its parts, on the CPU too, which has an operator for it that rounds otherwise. The
    simulated device has none: ``aten::_scaled_dot_product_flash_attention_for_cpu``.
    """
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture(autouse=True)
def without_device_check(request, monkeypatch):
    """Runs begin without the device check, which takes as long as they, but in tests with ``with_device_check``."""
    if "with_device_check" not in request.fixturenames:
        monkeypatch.setattr("pycil_wsc.runs.run.check_device", lambda *arguments: None)


@pytest.fixture
def with_device_check():
    """In tests with this, runs begin with their device check."""


@pytest.fixture
def accelerator():
    with simulated_device.present():
        yield


@contextlib.contextmanager
def without(*operators, **lacking):
    """Within, the accelerator lacks these, and what was found out about it before is forgotten."""
    answers = (devices.computes_bf16, devices.computes_bf16_natively, devices.widest_float)
    with simulated_device.without(*operators, **lacking):
        for answer in answers:
            answer.cache_clear()
        yield
    for answer in answers:
        answer.cache_clear()


class CountedRun(Run):
    """Counts what each step of training does to the device."""

    def __init__(self, *arguments, **keys):
        super().__init__(*arguments, **keys)
        self.steps = Steps()

    def step(self, images):
        super().step(images)
        if self.device.type != "cpu":
            self.steps.ended()

    def phase_started(self, *arguments):
        super().phase_started(*arguments)
        self.steps.interrupted()

    def epoch_ended(self, *arguments):
        super().epoch_ended(*arguments)
        self.steps.interrupted()


def run_on(device, settings, **keys):
    config = resolve(settings | SHORT | {"out": f"{settings['out']}-{device}"} | keys | {"device": device})
    return CountedRun(config, for_training(Datasets().of(config), config), lambda progress: None)


def same_on_both(settings, **keys):
    """The run on the device, whose results and weights must be those of the run on the CPU."""
    on_cpu, on_device = (run_on(device, settings, **keys) for device in ("cpu", "sim"))
    expected, result = on_cpu.execute(), on_device.execute()
    assert lasting(result) == lasting(expected)
    assert_same_state(on_device.learner, on_cpu.learner)
    assert_nothing_on_the_host(on_device.learner)
    return on_device


def lasting(result):
    return {name: value for name, value in without_measurements(result).items() if name not in ("config", "device")}


def tensors(learner):
    return [value for value in learner.state_dict().values() if isinstance(value, torch.Tensor)]


def assert_same_state(mine, other):
    for ours, theirs in zip(tensors(mine), tensors(other), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())


def assert_nothing_on_the_host(learner):
    """Each tensor that the learner holds, whether or not it is part of its state, is on the device."""
    elsewhere = [path for path, tensor in tensors_of(learner) if tensor.device != torch.device("sim", 0)]
    # the rows of exemplars, which are saved from there; `stored.tables` is on the device
    assert not [path for path in elsewhere if not path.startswith("learner.memory.stored.rows.")], "left on the host"
    assert tensors(learner)


# ---- every learner ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(registry.learners))
def test_every_learner_is_that_of_the_cpu_with_every_optimiser(name, tmp_path):
    data = small_data(tmp_path / "data.npz", per_class=6)
    on_cpu, on_device = (Course(name, data, device) for device in ("cpu", "sim"))
    expected = on_cpu.take()
    simulated_device.take_launched()
    assert on_device.take() == expected
    assert_same_state(on_device.learner, on_cpu.learner)
    assert_nothing_on_the_host(on_device.learner)
    launched = {operator for operator in simulated_device.take_launched() if not operator.startswith(OPTIMISERS)}
    with without(float64=False):  # as on MPS
        check_device(on_device.learner)
    assert launched <= simulated_device.take_launched(), "the device check tries each operator"
    assert on_device.counted == on_device.phases
    steps = on_device.steps
    if steps:
        waits, uploads = (max(of_step) for of_step in zip(*steps))
        print(f"{name}: {sum(steps.values())} steps, at most {waits} waits and {uploads} uploads in one")
    others = OTHER_STEPS.get(name, set())
    assert others <= steps.keys() <= {(0, 0)} | others


OPTIMISERS = ("aten::_fused_sgd_", "aten::_fused_adam")  # of all optimisers; the device check tries its own
OTHER_STEPS = {
    "gss": {(10, 8)},  # which images enter the memory depends on gradients, and is decided on the host
    "gem": {(2, 1)},  # the products of the gradients go to the host, and the weights of the projection to the device
    "wsc": {(6, 0)},  # a reset: four waits to check and rank the parameters, two for the time that this takes
}


def test_the_device_check_tests_in_the_batches_of_the_run(settings):
    """Distances of more than 25 features are computed by other operators than those of fewer."""
    run = run_on("sim", settings, model_name="replay", batch_size=32, max_tasks=2)
    simulated_device.take_launched()
    run.execute()
    launched = simulated_device.take_launched()
    check_device(run.learner)
    assert launched <= simulated_device.take_launched()


def test_the_page_on_gpus_has_these_numbers():
    rows = re.findall(r"\| .*?`(\w+)`.* \| (\d+) \| (\d+) \|", (ROOT / "docs/gpu.md").read_text())
    assert {name: {(int(waits), int(uploads))} for name, waits, uploads in rows} == OTHER_STEPS


def test_a_reset_waits_six_times_and_no_other_step_waits(settings):
    run = run_on("sim", settings)
    run.execute()
    assert {pair: number for pair, number in run.steps.items() if pair != (0, 0)} == {(6, 0): 2}


@pytest.mark.parametrize(
    "keys",
    [
        {"wsc.importance": "first_moment", "wsc.reset_every": "epoch"},
        {"wsc.importance": "moment", "wsc.reset_every": "iteration"},
        {"wsc.importance": "second_moment", "wsc.rank_scope": "tensor", "wsc.reset": "revert"},
        {"wsc.reset": "random"},
        {"wsc.reset": "shrink_perturb"},
        {"wsc.reset": "continual_backprop", "wsc.maturity": 2, "wsc.replacement_rate": 0.05},
        {"wsc.importance": "fisher", "wsc.trigger": "training_loss"},
        {"wsc.importance": "hessian", "wsc.trigger": "held_out"},
        {"wsc.importance": "drift", "wsc.average_count": "since_reset", "wsc.average_every": 0.5},
        {"wsc.average_lr": 0.05, "wsc.average": False},
        {"model_name": "der", "consolidate": True},
    ],
    ids=lambda keys: " ".join(map(str, keys.values())),
)
def test_options_of_the_consolidation_are_those_of_the_cpu(keys, settings):
    same_on_both(settings, max_tasks=2, **keys)


def test_analyses_are_those_of_the_cpu(settings, monkeypatch, with_device_check):
    monkeypatch.setattr(Flatness, "directions", 1)
    monkeypatch.setattr(Flatness, "distances", (-0.5, 0.0))
    run = same_on_both(settings, max_tasks=2, analyse=sorted(registry.analyses))
    on_cpu = Path(str(run.folder).replace("-sim/", "-cpu/"))
    mine, other = ((folder / "analyses.jsonl").read_text() for folder in (run.folder, on_cpu))
    assert mine == other and mine


def test_a_backbone_of_timm_is_that_of_the_cpu(settings):
    pytest.importorskip("timm")
    options = {"channels": (8, 8, 8, 8), "stem_width": 8, "layers": (1, 1, 1, 1)}
    keys = {f"convnet_options.{name}": value for name, value in options.items()}
    run = same_on_both(settings, convnet_type="timm:resnet18", image_size=32, max_tasks=2, model_name="replay", **keys)
    assert set(run.steps) == {(0, 0)}


def test_a_vision_transformer_is_that_of_the_cpu(settings):
    pytest.importorskip("timm")
    options = {"patch_size": 8, "depth": 1, "embed_dim": 16, "num_heads": 2}
    keys = {f"convnet_options.{name}": value for name, value in options.items()}
    keys |= {"convnet_type": "timm:vit_tiny_patch16_224", "image_size": 32, "max_tasks": 2, "model_name": "replay"}
    assert set(same_on_both(settings, **keys).steps) == {(0, 0)}


def test_in_bf16_a_run_computes_in_bf16(settings):
    """Which operators autocast runs in bf16 differs between devices, so losses are near those of the CPU, not equal."""
    on_device = run_on("sim", settings, max_tasks=2, model_name="replay", precision="bf16")
    dtypes = set()
    for module in on_device.learner.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    losses = on_device.execute()["train_loss"]
    assert dtypes == {torch.bfloat16}
    plain = run_on("cpu", settings, max_tasks=2, model_name="replay").execute()["train_loss"]
    assert np.allclose(np.concatenate(losses), np.concatenate(plain), rtol=0.1)


# ---- stopping, sharing, saving ---------------------------------------------------------------------------------------


def test_a_run_killed_within_a_task_ends_like_the_undisturbed_one(settings):
    keys = {"model_name": "wsc", "checkpoint_seconds": 0, "max_tasks": 2}
    expected = run_on("cpu", settings, **keys).execute()
    for checkpoint in (1, 3):
        with killed_at(checkpoint):
            run_on("sim", settings, prefix=f"killed{checkpoint}", **keys).execute()
        resumed = run_on("sim", settings, prefix=f"killed{checkpoint}", **keys)
        assert lasting(resumed.execute()) == lasting(expected)


def test_a_first_task_made_on_one_device_is_taken_on_another(settings):
    keys = {"cache_first_task": True, "max_tasks": 2, "out": settings["out"]}
    first = run_on("sim:0", settings, model_name="replay", **keys).execute()
    second = run_on("sim:1", settings, model_name="wsc", **keys)
    taken = second.execute()
    assert taken["train_seconds_spent"] < taken["train_seconds"] and taken["train_loss"][0] == first["train_loss"][0]
    assert {tensor.device for tensor in tensors(second.learner)} == {torch.device("sim", 1)}
    alone = run_on("cpu", settings, model_name="wsc", max_tasks=2).execute()
    assert lasting(taken) == lasting(alone)


def test_a_learner_learns_is_saved_loaded_and_predicts_as_on_the_cpu(tmp_path):
    keys = {"memory_per_class": 4, "convnet_type": "tiny", "quiet": True, "precision": "fp32", "batch_size": 8}
    content = np.load(small_data(tmp_path / "data.npz"))
    images, labels = content["train_x"], content["train_y"]
    told, states = {}, {}
    for device in ("cpu", "sim:1"):
        learner = Learner("wsc", device=device, init_epoch=1, epochs=2, **keys)
        for task in (labels < 2, (labels >= 2) & (labels < 4)):
            learner.learn((images[task], labels[task]))
        learner.save(tmp_path / "saved")
        again = Learner.load(tmp_path / "saved", device=device)
        again.learn((images[labels >= 4], labels[labels >= 4]))
        told[device] = learner.predict(images[:30]), again.predict(content["test_x"])
        states[device] = [*numbers_of(learner._state), *numbers_of(again._state)]
    for mine, other in zip(told["sim:1"], told["cpu"], strict=True):
        assert np.array_equal(mine, other)
    assert len(states["cpu"]) > 20
    for mine, other in zip(states["sim:1"], states["cpu"], strict=True):
        assert np.array_equal(mine, other)


def numbers_of(state):
    """Tensors and arrays of a learner's state, on the host."""
    leaves = [leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(state["learner"])]
    return [np.asarray(leaf) for leaf in leaves if isinstance(leaf, (torch.Tensor, np.ndarray))]


# ---- images ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Two classes of six images of different sizes."""
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for label in ("a", "b"):
            (tmp_path / "images" / part / label).mkdir(parents=True)
            for number in range(6):
                pixels = rng.integers(0, 255, (40 + 3 * number, 50, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / part / label / f"{number}.png")
    return tmp_path / "images"


@pytest.mark.parametrize("cached, source", [("device", DeviceSource), ("memory", FolderSource), (False, FolderSource)])
def test_images_of_a_folder_are_those_of_the_cpu_on_the_device_or_pinned(cached, source, folder, settings):
    keys = {"dataset": f"folder:{folder}", "image_size": 32, "cache_images": cached, "init_cls": 2, "batch_size": 4}
    run = same_on_both(settings, data_root=str(folder.parent), num_workers=0, model_name="replay", **keys)
    assert isinstance(run.train_source, source)
    if source is DeviceSource:
        assert run.train_source.pixels.device == torch.device("sim", 0)
    uploads = 0 if source is DeviceSource else 1  # the images, from pinned memory
    assert set(run.steps) == {(0, uploads)}


@pytest.mark.parametrize("augmentation", ["autoaugment", "timm"])
@pytest.mark.parametrize("kind", [ArraySource, DeviceSource])
def test_operations_on_images_are_those_of_the_cpu_and_no_batch_waits(augmentation, kind, tmp_path):
    sizes = np.full((200, 2), 16)
    pixels = np.random.default_rng(0).integers(0, 255, (200, 16, 16, 3), np.uint8)
    pixels.tofile(tmp_path / "pixels")
    decoded = ImageMap(tmp_path / "pixels", 256 * np.arange(200), sizes, (tmp_path / "pixels").stat().st_mtime_ns)
    split = Split(pixels, np.zeros(200, int)) if kind is ArraySource else decoded
    grey = (0.5,) * 3
    info = DatasetInfo("noise", ("a",), 16, grey, grey, "pad", 0, True, 0.0, augmentation=augmentation)
    augmented = {}
    for device in ("cpu", "sim:0"):
        source = kind(info, split, torch.device(device))
        batches = source.batches(np.arange(200), np.zeros(200, int), 100, train=True)
        first, _ = next(batches)  # before it, all choices are copied to the device
        with simulated_device.counted() as counts:
            second, _ = next(batches)
        augmented[device] = torch.cat([first, second]).cpu()
    assert torch.equal(augmented["cpu"], augmented["sim:0"])
    assert (counts.waits, counts.uploads) == (0, 0)
    plain = kind(replace(info, augmentation="pycil"), split, torch.device("cpu"))
    (images, _), *_ = plain.batches(np.arange(200), np.zeros(200, int), 200, train=True)
    assert not torch.equal(images, augmented["cpu"])


def test_images_that_take_more_than_half_of_the_free_memory_stay_on_the_host(folder, settings, caplog):
    keys = {"dataset": f"folder:{folder}", "image_size": 32, "cache_images": "device", "init_cls": 2}
    with without(free=1000):
        run = run_on("sim", settings, data_root=str(folder.parent), num_workers=0, **keys)
    assert isinstance(run.train_source, FolderSource) and "more than half of the 0.0 GB free on sim" in caplog.text


# ---- other people's loops, language models ---------------------------------------------------------------------------


def test_attached_to_any_loop_it_is_that_of_the_cpu_and_waits_for_the_reset_alone():
    weights, waits = {}, []
    for device in ("cpu", "sim:1"):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        images, targets = torch.randn(16, 8), torch.randint(3, (16,))
        network, images, targets = network.to(device), images.to(device), targets.to(device)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
        wsc = WeightSpaceConsolidation(
            network.named_parameters(), warmup_steps=4, average=Average(every=2), reset=Blend()
        ).attach(optimizer)
        for _ in range(8):
            with simulated_device.counted() as counts:
                cross_entropy(network(images), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            if device != "cpu":
                waits.append(counts.waits)
        wsc.finish()
        weights[device] = [parameter.detach().cpu() for parameter in network.parameters()]
    assert all(torch.equal(mine, other) for mine, other in zip(*weights.values()))
    assert [step for step, number in enumerate(waits, 1) if number] == [4]


class Later:
    """What the plugin needs of a learner of PyCIL: the second task of one network, trained by a plain loop."""

    def __init__(self, network, device):
        self._network, self._device, self._cur_task, self._epoch_num = network.to(device), device, 1, 4

    def _train_function(self, train_loader, test_loader, optimizer, scheduler):
        for _ in range(self._epoch_num):
            for _, images, targets in train_loader:
                loss = cross_entropy(self._network(images.to(self._device)), targets.to(self._device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            scheduler.step()


def test_the_plugin_for_pycil_consolidates_as_on_the_cpu():
    states = {}
    consolidation = {"cpu": PyCILOptions(), "sim:1": PyCILOptions(), "plain": None}
    for name, settings in consolidation.items():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        batches = [(torch.arange(16), torch.randn(16, 8), torch.randint(3, (16,))) for _ in range(3)]
        kind = consolidated(Later, settings) if settings else Later
        learner = kind(network, torch.device("cpu" if name == "plain" else name))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        learner._train_function(batches, None, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2]))
        states[name] = [value.cpu() for value in network.state_dict().values()]
    assert all(map(torch.equal, states["sim:1"], states["cpu"]))
    assert not all(map(torch.equal, states["plain"], states["cpu"])), "the consolidation does nothing here"


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, inputs, labels):
        outputs = self.layers(inputs)
        return {"loss": (outputs - labels).square().mean(), "outputs": outputs}


def test_the_callback_in_a_plain_trainer_consolidates_as_on_the_cpu(tmp_path):
    transformers = pytest.importorskip("transformers")
    huggingface = pytest.importorskip("pycil_wsc.plugins.huggingface")
    usual = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "learning_rate": 0.01, "report_to": []}
    usual |= {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}
    weights = {}
    for device in ("cpu", "sim:0"):
        torch.manual_seed(0)
        rows = [{"inputs": torch.randn(8), "labels": torch.randn(1)} for _ in range(24)]
        arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=device == "cpu", **usual)
        if device != "cpu":  # accelerate itself finds the kinds of devices that it knows
            vars(arguments)["_setup_devices"] = arguments.distributed_state.device = torch.device(device)
        callback = huggingface.WSCCallback(warmup=0.25, average=Average(2), reset=Blend())
        trainer = transformers.Trainer(Regression(), arguments, train_dataset=rows, callbacks=[callback])
        trainer.train()
        assert callback.wsc.resets == 1
        assert {parameter.device for parameter in trainer.model.parameters()} == {torch.device(device)}
        weights[device] = [parameter.detach().cpu() for parameter in trainer.model.parameters()]
    assert all(map(torch.equal, weights["sim:0"], weights["cpu"]))


def test_a_language_model_learns_as_on_the_cpu(tmp_path):
    pytest.importorskip("transformers")
    weights = {}
    for device in ("cpu", "sim"):
        keys = {"device": device, "llm.method": "wsc", "llm.epochs": [1, 1], "save_weights": True}
        config = resolve(small_settings(tmp_path / device) | keys)
        kinds["llm"].execute(config, Datasets().of(config), lambda progress: None)
        (file,) = run_folder(config).rglob("model.safetensors")
        weights[device] = load_file(file)
    assert len(weights["cpu"]) > 10 and weights["sim"].keys() == weights["cpu"].keys()
    assert all(torch.equal(value, weights["cpu"][name]) for name, value in weights["sim"].items())


# ---- what a device cannot do -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lacks, keys, message",
    [
        ({"bf16": False}, {"precision": "bf16"}, "precision: torch has no bf16 on 'sim:0'; use fp32 or auto"),
        ({"operators": ["aten::native_batch_norm"]}, {}, "device: 'sim:0' cannot train 'wsc' on 'tiny' in fp32 (the"),
        (
            {"operators": ["aten::_fused_sgd_"]},
            {},
            "has no 'aten::_fused_sgd_', in loop.py line ",
        ),
        ({"operators": ["aten::nan_to_num"]}, {"model_name": "derpp"}, "in dark_er.py line "),  # of its second task
    ],
)
def test_what_a_device_lacks_is_one_line_before_training(lacks, keys, message, settings, with_device_check):
    operators = lacks.pop("operators", ())
    with without(*operators, **lacks), pytest.raises(UserError) as error:
        run_on("sim", settings, **keys).execute()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_method_that_cannot_learn_the_small_tasks_is_trained_all_the_same(settings, monkeypatch, with_device_check):
    def demand(learner, task):
        assert len(task.train_indices) > 20

    monkeypatch.setattr(Replay, "begin_task", demand)
    run_on("sim", settings, model_name="replay", max_tasks=1).execute()


def test_bf16_is_not_chosen_where_there_is_none(settings):
    with without(bf16=False):
        assert run_on("sim", settings, precision="auto").learner.precision.name == "fp32"
    assert run_on("sim", settings, precision="auto").learner.precision.name == "bf16"


def test_analyses_without_float64_say_so_and_are_near_those_with_it(settings, monkeypatch, caplog, with_device_check):
    monkeypatch.setattr(Flatness, "directions", 1)
    keys = {"max_tasks": 2, "analyse": sorted(registry.analyses)}
    analyses = []
    for name, lacking in (("in32", {"float64": False}), ("in64", {})):
        caplog.clear()
        with without(**lacking):
            analysed = run_on("sim", settings, prefix=name, **keys)
            analysed.execute()
        assert ("analyse: 'sim:0' has no float64; sums are in float32" in caplog.text) == bool(lacking)
        analyses.append(analysed.records.lines)
    assert nearly(*analyses) and analyses[0]


# ---- deliberate mistakes ---------------------------------------------------------------------------------------------


def with_cpu_index(learner, loss, logits):
    return loss + logits[torch.tensor([0])].sum()


def with_generator_of_the_cpu(learner, loss, logits):
    return loss + 0 * torch.empty_like(logits).normal_(generator=torch.Generator()).sum()


def with_item(learner, loss, logits):
    return loss * (1.0 if loss.item() else 2.0)


def with_float64(learner, loss, logits):
    return loss + 0 * logits.double().sum()


def with_numbers(learner, loss, logits):
    return loss * torch.tensor([1.0], device=learner.device).sum()


def mistaken(mistake, settings, monkeypatch):
    plain = Replay.loss

    def loss(learner, batch):
        loss, logits = plain(learner, batch)
        return mistake(learner, loss, logits), logits

    monkeypatch.setattr(Replay, "loss", loss)
    return run_on("sim", settings, model_name="replay", max_tasks=1)


@pytest.mark.parametrize(
    "mistake, message",
    [
        (with_cpu_index, "expected all tensors on the same device, but found cpu and sim:0"),
        (with_generator_of_the_cpu, "expected a generator of sim:0, but found one of cpu"),
    ],
)
def test_a_mistake_in_a_loss_raises(mistake, message, settings, monkeypatch):
    with pytest.raises(RuntimeError, match=message):
        mistaken(mistake, settings, monkeypatch).execute()


def test_a_loss_in_float64_is_found_before_training_where_there_is_none(settings, monkeypatch, with_device_check):
    with without(float64=False), pytest.raises(UserError, match=r"no float64, in test_accelerators.py line \d+\)"):
        mistaken(with_float64, settings, monkeypatch).execute()


@pytest.mark.parametrize("mistake, counted", [(with_item, (1, 0)), (with_numbers, (1, 1))])
def test_a_loss_that_waits_or_uploads_is_counted(mistake, counted, settings, monkeypatch):
    run = mistaken(mistake, settings, monkeypatch)
    run.execute()
    assert set(run.steps) == {counted}


def test_a_tensor_left_on_the_host_is_found(settings, monkeypatch):
    def keep(learner, task):
        learner.kept = {"means": [torch.zeros(2)]}

    monkeypatch.setattr(Replay, "end_task", keep)
    run = run_on("sim", settings, model_name="replay", max_tasks=1)
    run.execute()
    with pytest.raises(AssertionError, match="learner.kept.means.0"):
        assert_nothing_on_the_host(run.learner)


def test_numbers_of_each_device_are_seeded_by_address_and_leave_no_trace():
    drawn = {}
    for device in ("cpu", "sim:0", "sim:1"):
        torch.manual_seed(1)
        expected = torch.rand(2, device=device)
        torch.manual_seed(1)
        with seeded(7, "weights", device=torch.device(device)):
            drawn[device] = torch.rand(3, device=device).cpu()
        assert torch.equal(torch.rand(2, device=device), expected)
    assert all(torch.equal(numbers, drawn["cpu"]) for numbers in drawn.values())
