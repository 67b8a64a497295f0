"""The configuration: PyCIL's files run, sweeps expand, and every error is one clear line."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.small_runs import suited

import pycil_wsc.llm.config  # noqa: F401  # with it, files of language models are loaded
from pycil_wsc import registry
from pycil_wsc.classifier.store.settings import OF_EXPERIMENTS
from pycil_wsc.config.dropped import DROPPED
from pycil_wsc.config.image_config import INCIDENTAL, KEYS
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.config.loading import load, parse_override, resolve, resolve_recorded
from pycil_wsc.errors import UserError
from pycil_wsc.keys import DECIDES, declared, key
from pycil_wsc.methods.configured import configured_learner
from pycil_wsc.networks.backbone_options import BackboneOptions
from pycil_wsc.training.learner import configured_backbone
from utils.factory import OF_WHOLE_RUNS

ROOT = Path(__file__).parents[2]
EXPS = ROOT / "exps"
SHIPPED = sorted({*EXPS.rglob("*.json")} - {*(EXPS / "data").rglob("*.json")})

STOCK_REPLAY = {
    "prefix": "reproduce",
    "dataset": "cifar100",
    "memory_size": 2000,
    "memory_per_class": 20,
    "fixed_memory": False,
    "shuffle": True,
    "init_cls": 10,
    "increment": 10,
    "model_name": "replay",
    "convnet_type": "resnet32",
    "device": ["0", "1", "2", "3"],
    "seed": [1993],
}


def write(tmp_path, values):
    path = tmp_path / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def test_a_stock_pycil_file_is_one_run_with_pycils_schedule(tmp_path):
    (run,) = load(write(tmp_path, STOCK_REPLAY))
    assert (run.seed, run.fixed_memory, run.memory_size, run.device) == (1993, False, 2000, "gpu:0")
    assert (run.init_epoch, run.init_milestones, run.init_weight_decay) == (200, (60, 120, 170), 5e-4)
    assert (run.epochs, run.milestones, run.weight_decay, run.lrate, run.batch_size) == (70, (30, 50), 2e-4, 0.1, 128)
    (run,) = load(write(tmp_path, STOCK_REPLAY | {"model_name": "finetune"}))
    assert (run.epochs, run.milestones) == (80, (40, 70))


STOCK = {
    "icarl": {"convnet_type": "resnet32"},
    "foster": {
        "fixed_memory": True,
        "init_cls": 50,
        "device": ["0"],
        "beta1": 0.96,
        "beta2": 0.97,
        "oofc": "ft",
        "is_teacher_wa": False,
        "is_student_wa": False,
        "lambda_okd": 1,
        "wa_value": 1,
        "init_epochs": 200,
        "init_lr": 0.1,
        "init_weight_decay": 5e-4,
        "boosting_epochs": 170,
        "compression_epochs": 130,
        "lr": 0.1,
        "batch_size": 128,
        "weight_decay": 5e-4,
        "num_workers": 8,
        "T": 2,
    },
    "memo": {
        "convnet_type": "memo_resnet32",
        "train_base": True,
        "train_adaptive": False,
        "debug": False,
        "skip": False,
        "scheduler": "steplr",
        "init_epoch": 200,
        "t_max": None,
        "init_lr": 0.1,
        "init_weight_decay": 5e-4,
        "init_lr_decay": 0.1,
        "init_milestones": [60, 120, 170],
        "milestones": [80, 120, 150],
        "epochs": 170,
        "lrate": 0.1,
        "batch_size": 128,
        "weight_decay": 2e-4,
        "lrate_decay": 0.1,
        "alpha_aux": 1.0,
    },
}


@pytest.mark.parametrize("name", STOCK)
def test_stock_files_with_hyper_parameters_give_the_methods_own_defaults(name, tmp_path):
    stock = STOCK_REPLAY | {"model_name": name} | STOCK[name]
    (run,) = load(write(tmp_path, stock))
    plain = resolve(
        {key: stock[key] for key in ("memory_size", "fixed_memory", "init_cls", "model_name")}
        | {"device": "gpu:0", "prefix": "reproduce"}
    )
    assert run.identity() == plain.identity()


@pytest.mark.parametrize("name, ours", [("lr", "lrate"), ("init_epochs", "init_epoch"), ("boosting_epochs", "epochs")])
def test_fosters_own_names_are_keys_of_its_file_alone(name, ours, tmp_path):
    (run,) = load(write(tmp_path, {"model_name": "foster", name: 2, "milestones": []}))
    assert getattr(run, ours) == 2
    with pytest.raises(UserError, match=f"{name}: is accepted in PyCIL's .*foster.json.* only"):
        load(write(tmp_path, {"model_name": "wsc", name: 2}))
    with pytest.raises(UserError, match=f"{name}: is PyCIL's name of {ours}, which is given, too"):
        load(write(tmp_path, {"model_name": "foster", name: 2, ours: 3}))


def test_what_only_consolidation_reads_is_no_concern_of_other_methods(tmp_path):
    finetune, wsc = load(write(tmp_path, {"model_name": ["finetune", "wsc"], "wsc.trigger": "held_out"}))
    assert not finetune.memory_per_class and wsc.memory_per_class > 1
    with pytest.raises(UserError, match="wsc.trigger: 'held_out' needs at least two exemplars"):
        load(write(tmp_path, {"model_name": "wsc", "wsc.trigger": "held_out", "memory_per_class": 1}))


def test_schedules_are_pycils():
    first, usual = (200, (60, 120, 170), 5e-4), {}
    for name in ("replay", "wsc", "icarl", "bic", "wa", "der", "foster", "memo"):
        run = resolve({"model_name": name})
        usual[name] = (run.epochs, run.milestones, run.weight_decay)
        assert (run.init_epoch, run.init_milestones, run.init_weight_decay) == (
            (170, (60, 100, 140), 2e-4) if name == "bic" else first
        )
        assert run.scheduler == ("cosine" if name == "foster" else "steplr") and (
            run.lrate,
            run.lrate_decay,
            run.momentum,
            run.batch_size,
        ) == (0.1, 0.1, 0.9, 128)
    assert usual["replay"] == usual["wsc"] == (70, (30, 50), 2e-4)
    assert usual["icarl"] == (170, (80, 120), 2e-4) and usual["bic"] == usual["wa"] == (170, (60, 100, 140), 2e-4)
    assert usual["der"] == usual["memo"] == (170, (80, 120, 150), 2e-4) and usual["foster"][::2] == (170, 5e-4)
    assert resolve({"model_name": "foster"}).options.compression_epochs == 130


@pytest.mark.parametrize("name", ["icarl", "bic", "wa", "der", "foster", "memo", "joint", "finetune", "replay"])
@pytest.mark.parametrize("given, first, later", [({}, 200, 70), ({"epochs": 7, "init_epoch": 20}, 20, 7)])
def test_a_budget_gives_every_method_as_many_passes_in_each_task(name, given, first, later):
    run = resolve({"model_name": name, "budget": {"updates_like": "replay"}} | given)
    learner, tasks = registry.learners[name], [SimpleNamespace(index=index) for index in (0, 1)]
    assert [learner.Plan(run).planned_epochs(task) for task in tasks] == [first, later]
    usual = resolve({"model_name": name})
    assert [m / run.epochs for m in run.milestones] == pytest.approx(
        [m / usual.epochs for m in usual.milestones], abs=0.5 / run.epochs
    )


@pytest.mark.parametrize(
    "name, first, later",
    [("pass", (100, 64), (35, 64)), ("ssre", (100, 64), (70, 128)), ("gdumb", (25, 16), (9, 16))],
)
def test_with_smaller_batches_a_budget_makes_as_many_steps_in_fewer_passes(name, first, later):
    run = resolve({"model_name": name, "budget": {"updates_like": "replay"}})
    assert (run.init_epoch, getattr(run.options, "init_batch_size", run.batch_size)) == first
    assert (run.epochs, run.batch_size) == later
    assert run.init_epoch / first[1] == 200 / 128 and run.epochs / later[1] == pytest.approx(70 / 128, rel=0.04)
    given = resolve({"model_name": name, "budget": {"updates_like": "replay"}, "batch_size": 32, "init_batch_size": 32})
    assert (given.init_epoch, given.epochs) == (200, 70), "both have the given batches"


@pytest.mark.parametrize("name", ["bic", "foster", "wa", "joint", "finetune", "replay"])
@pytest.mark.parametrize("factor", [0.1, 0.5, 2])
def test_a_factor_scales_each_methods_own_schedule(name, factor):
    usual, scaled = (resolve({"model_name": name} | keys) for keys in ({}, {"budget": {"epochs_times": factor}}))
    for epochs, milestones in (("init_epoch", "init_milestones"), ("epochs", "milestones")):
        assert getattr(scaled, epochs) == round(factor * getattr(usual, epochs))
        exact = [factor * milestone for milestone in getattr(usual, milestones)]
        assert getattr(scaled, milestones) == pytest.approx(exact, abs=0.51)
    if name == "foster":
        assert scaled.options.compression_epochs == round(130 * factor)
    given = resolve({"model_name": name, "budget": {"epochs_times": factor}, "epochs": 10})
    assert (given.epochs, given.init_epoch) == (10, scaled.init_epoch)


@pytest.mark.parametrize("name, key", [("podnet", "ft_epochs"), ("beef", "fusion_epochs")])
def test_a_warm_up_is_longer_than_no_phase_that_has_one(name, key):
    """The second phases of these methods have a schedule of their own, without a warm-up."""
    run = resolve({"model_name": name, "epochs": 4, "warmup_epochs": 2, key: 1})
    assert getattr(run.options, key) == 1
    with pytest.raises(UserError, match="warmup_epochs: 4 must be less than the 4 epochs of 'epochs'"):
        resolve({"model_name": name, "epochs": 4, "warmup_epochs": 4})


def test_a_phase_that_a_budget_sets_is_not_given_too():
    with pytest.raises(UserError, match="compression_epochs: is set by 'budget', in proportion to 'epochs'"):
        resolve({"model_name": "foster", "budget": {"updates_like": "replay"}, "compression_epochs": 5})


def test_a_budget_is_an_axis_and_leaves_its_mark_in_the_epochs_alone(tmp_path):
    shipped, matched = load(write(tmp_path, {"model_name": "foster", "budget": ["pycil", {"updates_like": "replay"}]}))
    assert shipped == resolve({"model_name": "foster"}) and run_folder(shipped) != run_folder(matched)
    assert (matched.epochs, matched.options.compression_epochs) == (40, 30)
    (again,) = load(write(tmp_path, matched.to_dict()))
    assert again == matched


def test_fosters_second_phase_keeps_its_share_when_only_the_epochs_are_given():
    assert resolve({"model_name": "foster", "epochs": 17}).options.compression_epochs == 13
    assert resolve({"model_name": "foster", "epochs": 17, "compression_epochs": 2}).options.compression_epochs == 2


@pytest.mark.parametrize(
    "given, device",
    [(["0"], "gpu:0"), ([1, 0], "gpu:1"), ([-1], "cpu"), (["-1"], "cpu"), (2, "gpu:2"), ("cuda:1", "cuda:1")],
)
def test_pycils_device_lists_are_understood(given, device, tmp_path):
    (run,) = load(write(tmp_path, {"device": given}))
    assert run.device == device


@pytest.mark.parametrize(
    "keys, more, gpus",
    [
        ({"device": ["0", "1", "2", "3"]}, {}, 4),
        ({"device": ["1", "0"], "model_name": "icarl"}, {}, 2),
        ({"device": ["0"]}, {}, None),
        ({"device": ["-1", "0"]}, {}, None),
        ({"device": "cuda:0"}, {}, None),
        ({"device": ["0", "1"], "batch_norm_parts": 1}, {}, None),
        ({"device": ["0", "1"]}, {"batch_norm_parts": 2}, None),
        ({"device": ["0", "1"]}, {"device": "cpu"}, None),
        ({"device": ["0", "1"], "runs": [{"batch_norm_parts": 2}, {"memory_per_class": 5}]}, {}, 2),
        ({"device": ["0", "1"], "runs": [{"batch_norm_parts": 2}, {"batch_norm_parts": 1}]}, {}, None),
        ({"runs": [{"device": ["0", "1"]}]}, {}, 2),
        ({"device": ["0"]}, {"device": [0, 1, 2]}, 3),
        ({"device": ["0", "1", "2", "3"]}, {"device": [0]}, None),
    ],
)
def test_a_list_of_gpus_brings_a_line_on_batch_norm(keys, more, gpus, tmp_path, caplog):
    load(write(tmp_path, keys), more)
    lines = [line for line in caplog.messages if "batch norm" in line]
    assert len(lines) == bool(gpus)
    assert not gpus or f"of the {gpus} GPUs" in lines[0] and lines[0].endswith(f"batch_norm_parts to {gpus}")


def test_an_axis_has_pycils_values_too(tmp_path):
    """Of the backbones of ``cifar100_aa``, and of its augmentation, which the command line may replace."""
    path = write(
        tmp_path, {"model_name": "replay", "dataset": "cifar100_aa", "convnet_type": ["resnet18", "memo_resnet32"]}
    )
    assert [run.convnet_type for run in load(path)] == ["resnet18_cifar", "resnet32"]
    assert {(run.dataset, run.augmentation) for run in load(path)} == {("cifar100", "autoaugment")}
    assert {run.augmentation for run in load(path, {"augmentation": ["pycil", "timm"]})} == {
        "pycil",
        "timm",
    }


def test_a_list_of_other_devices_is_not_pycils(tmp_path):
    with pytest.raises(UserError, match='device: "cpu" and "cuda" for one run|device: "cuda" and "cpu" for one run'):
        load(write(tmp_path, {"device": ["cpu", "cuda"]}))


def test_the_one_rate_of_pycils_files_is_no_axis(tmp_path):
    with pytest.raises(UserError, match="lr: is one value in PyCIL's file of pass; give init_lr and lrate in 'runs'"):
        load(write(tmp_path, {"model_name": "pass", "lr": [0.001, 0.0005]}))


def test_lists_are_axes_with_seeds_outermost(tmp_path):
    runs = load(write(tmp_path, {"model_name": ["replay", "wsc"], "memory_per_class": [20, 200], "seed": [1, 2]}))
    assert [(r.seed, r.model_name, r.memory_per_class) for r in runs] == [
        (s, n, m) for s in (1, 2) for n in ("replay", "wsc") for m in (20, 200)
    ]
    assert len({run_folder(r) for r in runs}) == 8


def test_keys_that_are_lists_become_axes_as_lists_of_lists(tmp_path):
    (run,) = load(write(tmp_path, {"milestones": [10, 20]}))
    assert run.milestones == (10, 20)
    assert [r.milestones for r in load(write(tmp_path, {"milestones": [[10, 20], [30]]}))] == [(10, 20), (30,)]


def test_nested_and_dotted_keys_are_the_same(tmp_path):
    (nested,) = load(write(tmp_path, {"wsc": {"retain": 0.3}}))
    (dotted,) = load(write(tmp_path, {"wsc.retain": 0.3}))
    assert nested == dotted and nested.wsc.retain == 0.3
    assert len(load(write(tmp_path, {"wsc": {"retain": [0.1, 0.2, 0.5]}}))) == 3


def test_overrides_win_over_the_file(tmp_path):
    path = write(tmp_path, {"seed": [1, 2], "wsc": {"retain": 0.3}})
    (run,) = load(path, dict(map(parse_override, ["seed=7", "wsc.retain=1", "dataset=npz:my=data.npz"])))
    assert (run.seed, run.wsc.retain, run.dataset) == (7, 1.0, "npz:my=data.npz")


def test_points_that_are_the_same_run_are_done_once(tmp_path):
    """Finetune has no memory, and Replay no ``wsc`` keys: sweeping over those is one run."""
    assert len(load(write(tmp_path, {"model_name": "finetune", "memory_per_class": [20, 200]}))) == 1
    assert len(load(write(tmp_path, {"model_name": ["replay", "wsc"], "wsc.retain": [0.1, 0.2]}))) == 3


def test_runs_lists_irregular_sets_over_the_files_keys(tmp_path):
    """Each entry may have axes of its own; all first seeds come before the second, then the file's order;
    the same run comes once.
    """
    entries = [
        {"model_name": "wsc", "wsc": {"retain": [0.1, 0.5]}, "epochs": 60},
        {"model_name": ["finetune", "replay"]},
        {"model_name": "replay"},
        {"seed": 9},
    ]
    runs = load(write(tmp_path, {"seed": [1, 2], "memory_per_class": 30, "epochs": 50, "runs": entries}))
    methods = [("wsc", 0.1, 60), ("wsc", 0.5, 60), ("finetune", 0.2, 50), ("replay", 0.2, 50)]
    expected = [(1, *m) for m in methods] + [(9, "wsc", 0.2, 50)] + [(2, *m) for m in methods]
    assert [(r.seed, r.model_name, r.wsc.retain, r.epochs) for r in runs] == expected
    assert {r.memory_per_class for r in runs if r.model_name != "finetune"} == {30}


def test_overrides_win_over_the_entries_of_runs(tmp_path):
    (run,) = load(write(tmp_path, {"runs": [{"epochs": 60}, {"epochs": 70}]}), {"epochs": 5})
    assert run.epochs == 5


def test_milestones_keep_their_place_when_only_the_epochs_are_given():
    run = resolve({"model_name": "replay", "epochs": 7, "init_epoch": 20})
    assert (run.milestones, run.init_milestones) == ((3, 5), (6, 12, 17))
    assert resolve({"model_name": "replay", "epochs": 1}).milestones == ()


def test_the_rate_after_the_reset_is_that_of_the_task_unless_it_is_given():
    assert resolve({"model_name": "wsc"}).wsc.average_lr == 0.1
    assert resolve({"model_name": "wsc", "lrate": 0.02}).wsc.average_lr == 0.02
    assert resolve({"model_name": "icarl", "consolidate": True, "lrate": 2.0}).wsc.average_lr == 2.0
    assert resolve({"model_name": "wsc", "lrate": 0.02, "wsc.average_lr": 0.1}).wsc.average_lr == 0.1
    assert resolve({"model_name": "wsc", "lrate": 0.02, "wsc.average_lr": None}).wsc.average_lr is None
    assert resolve({"model_name": "wsc", "optimizer": "adam", "lrate": 0.02}).wsc.average_lr is None
    known = resolve({"model_name": "wsc", "lrate": 0.02})
    assert resolve(known.to_dict()) == known


def test_a_runs_own_config_file_gives_the_same_run(tmp_path):
    run = resolve({"model_name": "wsc", "wsc.retain": 0.5, "epochs": 9, "wsc.average_lr": None})
    (again,) = load(write(tmp_path, run.to_dict()))
    assert again == run and run_folder(again) == run_folder(run)


@pytest.mark.parametrize(
    "keys",
    [
        {"analyse": [["drift"], ["gradients"]]},
        {"threads": [1, 2]},
        {"runs": [{"save_weights": True}, {"save_weights": False}]},
        {"llm": {"method": "wsc"}, "threads": [1, 2]},
    ],
)
def test_several_values_of_a_key_that_makes_no_run_are_refused(keys, tmp_path):
    """Otherwise one of them would be taken without a word."""
    with pytest.raises(UserError, match="for one run, .*; this key does not distinguish runs, so give a single value"):
        load(write(tmp_path, keys))


@pytest.mark.parametrize("group", ["wsc", "convnet_options", "llm"])
def test_an_empty_group_is_one_without_keys_and_a_wrong_one_is_refused(group, tmp_path):
    keys = {"llm": {}} if group == "llm" else {}
    assert load(write(tmp_path, keys | {group: {}})) == load(write(tmp_path, keys))
    with pytest.raises(UserError, match="unknown key 'wcs'"):
        load(write(tmp_path, keys | {"wcs": {}}))


@pytest.mark.parametrize(
    "name, options, other, counts",
    [
        ("replay", {}, "memory_size", False),
        ("replay", {"fixed_memory": False}, "memory_per_class", False),
        ("bic", {}, "memory_size", True),
        ("bic", {"validation": "per_class"}, "memory_size", False),
        ("bic", {"validation": "per_class", "fixed_memory": False}, "memory_per_class", True),
        ("bic", {"fixed_memory": False}, "memory_per_class", False),
    ],
)
def test_bics_held_out_samples_make_the_other_memory_key_count(name, options, other, counts):
    plain, changed = (resolve({"model_name": name} | options | more) for more in ({}, {other: 500}))
    assert [run_folder(plain) != run_folder(changed), plain.identity() != changed.identity()] == [counts, counts]


def test_a_memory_in_bytes_is_a_run_of_its_own_whatever_the_other_keys_are():
    runs = [{}, {"memory_bytes": 0}, {"memory_bytes": 9}, {"fixed_memory": False}]
    assert len({run_folder(resolve(keys)) for keys in runs}) == 4
    usual = resolve({"memory_bytes": 9})
    for keys in ({"memory_size": 7}, {"memory_per_class": 7}, {"fixed_memory": True}):
        assert run_folder(resolve(keys | {"memory_bytes": 9})) == run_folder(usual), keys
        assert resolve(keys | {"memory_bytes": 9}).identity() == usual.identity(), keys
    assert run_folder(usual).parent.name == "bytes9"
    assert resolve({"model_name": "finetune", "memory_bytes": 9}) == resolve({"model_name": "finetune"})


def test_a_checkpoint_of_a_version_that_lacked_a_key_is_resumed():
    config = resolve({"model_name": "wsc"})
    identity = config.identity()
    for name in ("memory_bytes", "betas", "wsc.retain"):
        older = {key: value for key, value in identity.items() if key != name}
        assert config.continues(older) and name in identity
        assert not config.continues(older | {"lrate": 7.0})
    assert not resolve({"model_name": "wsc", "memory_bytes": 9}).continues(identity)


def test_only_what_decides_the_result_makes_a_new_run():
    usual = run_folder(resolve({}))
    assert run_folder(resolve({"model_name": "replay"})) == Path("runs/run/cifar100-b10-inc10/replay/m20/seed1993")
    for name, value in {
        "device": "cpu",
        "num_workers": 1,
        "threads": 1,
        "data_root": "/elsewhere",
        "save_weights": "every",
        "tensorboard": True,
        "analyse": ["drift"],
    }.items():
        assert run_folder(resolve({name: value})) == usual
    for name, value in {
        "lrate": 0.05,
        "precision": "fp32",
        "wsc.blend": 0.4,
        "nme": False,
        "convnet_type": "resnet20",
        "shuffle": False,
    }.items():
        assert run_folder(resolve({name: value})) != usual
        assert run_folder(resolve({name: value})).parent == usual.parent


def test_a_changed_default_leaves_finished_runs_their_folders():
    """A run under the values that were the default has the name that it had then; one under those of now another."""
    before = run_folder(resolve({"wsc.average_every": 5, "wsc.average_count": "since_reset"}))
    assert before == Path("runs/run/cifar100-b10-inc10/wsc/m20/seed1993")
    assert run_folder(resolve({})).name.startswith("seed1993-")


BAD = {
    "unknown key 'memory_per_clas'; did you mean 'memory_per_class'?": {"memory_per_clas": 20},
    "unknown key 'wsc.retian'; did you mean 'wsc.retain'?": {"wsc": {"retian": 0.2}},
    "unknown model_name 'repaly'; did you mean 'replay'?": {"model_name": "repaly"},
    "unknown convnet_type 'resnet23'; did you mean": {"convnet_type": "resnet23"},
    "unknown dataset 'cifar1000'; did you mean 'cifar100'?": {"dataset": "cifar1000"},
    "memory_per_class: -1 is below 0": {"memory_per_class": -1},
    "increment: 0 is below 1": {"increment": 0},
    "std: 0.0 is not above 0": {"std": [0.2, 0.2, 0.0]},
    "mean: expected three numbers, one of each channel, got [0.5]": {"mean": [0.5]},
    "increments: 0 is below 1": {"increments": [3, 0]},
    "init_cls: cannot be combined with 'increments', which has every task": {"increments": [3, 1], "init_cls": 3},
    "increments: cannot be combined with 'tasks'": {"increments": [3, 1], "tasks": ["npz:a.npz"]},
    "wsc.retain: 1.2 is above 1": {"wsc.retain": 1.2},
    "wsc.warmup: 1 leaves no step": {"wsc.warmup": 1},
    "wsc.betas: expected two numbers": {"wsc.betas": [0.9]},
    "wsc.betas: 1.0 is not below 1": {"wsc.betas": [0.9, 1]},
    "epochs: expected a whole number, got 7.5": {"epochs": 7.5},
    "epochs: expected a whole number, got true": {"epochs": True},
    "lrate: expected a number, got NaN": '{"lrate": NaN}',
    "'epochs' is given twice; leave one of the two out": '{"epochs": 7, "lrate": 0.1, "epochs": 8}',
    "wsc.retain: is given twice, in a group and with a dot": {"wsc": {"retain": 0.1}, "wsc.retain": 0.2},
    'shuffle: expected true or false, got "yes"': {"shuffle": "yes"},
    "milestones: expected a list of whole numbers, got 30": {"milestones": 30},
    "milestones: [30, 70] must be increasing and within the 70 epochs": {"milestones": [30, 70]},
    "milestones: [50, 30] must be increasing": {"milestones": [50, 30]},
    "unknown exemplars 'herd'; did you mean 'herding'": {"exemplars": "herd"},
    "save_weights: 'last' is not one of false, true, every": {"save_weights": "last"},
    "save_weights: expected true or false or a string, got 1": {"save_weights": 1},
    "seed: an empty list has no runs": {"seed": []},
    "timeout_minutes: 3e+38 is above 10080": {"timeout_minutes": 3e38},
    "unknown analysis 'drifts'; did you mean 'drift'?": {"analyse": ["drifts"]},
    'analyse: expected a list of strings, got "drift"': {"analyse": "drift"},
    "device: 'cuda 0' is not": {"device": "cuda 0"},
    "prefix: '../up' must be a folder name": {"prefix": "../up"},
    "budget: expected": {"budget": "half"},
    "unknown model_name 'repaly'": {"budget": {"updates_like": "repaly"}},
    'got {"epochs_times": 0}': {"budget": {"epochs_times": 0}},
    "unknown key 'skip'": {"model_name": "memo", "skip": True},
    "validation: 'none' is not one of pycil, per_class": {"model_name": "bic", "validation": "none"},
    "oofc: 'no' is not one of ft, az": {"model_name": "foster", "oofc": "no"},
    "T: -2.0 is not above 0": {"model_name": "icarl", "T": -2},
    "T: 0.0 is not above 0": {"model_name": "wa", "T": 0},
    "distill: -1.0 is below 0": {"model_name": "icarl", "distill": -1},
    "split_ratio: 2.0 is not below 1": {"model_name": "bic", "split_ratio": 2},
    "split_ratio: 0.0 is not above 0": {"model_name": "bic", "split_ratio": 0},
    "alpha_aux: -1.0 is below 0": {"model_name": "der", "alpha_aux": -1},
    "compression_epochs: -3 is below 1": {"model_name": "foster", "compression_epochs": -3},
    "beta1: 2.0 is not below 1": {"model_name": "foster", "beta1": 2},
    "beta1: 1.0 is not below 1": {"model_name": "foster", "beta1": 1},
    "threads: 1000000 is above 1024": {"threads": 1_000_000},
    "padding: 1000000 is above 1024": {"padding": 10**6},
    "lrate_decay: 1e+300 is too large": {"lrate_decay": 1e300},
    "lrate_decay: 10.0 is above 1": {"lrate_decay": 10},
    "seed: 4294967296 is above 4294967295": {"seed": 2**32},
    "seed: 100000000": {"seed": 10**400},
    "epochs: 1000000000000000000000000000000 is too large": {"epochs": 10**30},
    "memory_per_class: 1000000000000000000 is too large": {"memory_per_class": 10**18},  # for the schema of a result
    "lrate: 100000000": {"lrate": 10**400},
    "scheduler: 'constant' is not one of steplr, cosine": {"scheduler": "constant"},
    "runs[1]: unknown key 'memory_per_clas'; did you mean": {"runs": [{"seed": 1}, {"memory_per_clas": 20}]},
    "runs[0]: seed: an empty list has no runs": {"runs": [{"seed": []}]},
    "runs[0]: runs: stands only at the top level of the file": {"runs": [{"runs": 1}]},
    "prefix: 'first_tasks' is the folder of shared first tasks": {"prefix": "first_tasks"},
    "out: is empty; give the folder of the results": {"out": ""},
    "unknown key 'xyzxyz'; known: IL_batch_size, T, adapt, ": {"xyzxyz": 1},
    "unknown dataset 'svhn'; known: cifar10, cifar100, cifar100_16, cifar224, cub, digits, ": {"dataset": "svhn"},
    "runs: expected a list of objects": {"runs": []},
    "runs: expected a list of objects of keys and values, at least one": {"runs": [1]},
    "runs: expected a list of objects of keys": {"runs": {"seed": 1}},
    "leave out the comma after the last item": '{"seed": 1,}',
    "); leave out the comma after the last item": '{"milestones": [1,]}',
    "; write a decimal point: 0.1": '{"lrate": 0,1}',
    "; write a decimal point: 0.05": '{"epochs": 3, "wsc.betas": [0,05, 1]}',
    "; write strings in double quotes": "{'seed': 1}",
    "; leave out the comment": '{"seed": 1 // the first\n}',
    "; write true": '{"shuffle": True}',
    "; write null": '{"replay_ratio": None}',
    "; correct the file": '{"seed": [1 2]}',
    "unknown model_name 'der++plus'; did you mean 'derpp'?": {"model_name": "der++plus"},
    "unknown model_name 'ER-ACED'; did you mean 'er_ace'?": {"model_name": "ER-ACED"},
    "memory_update: 'icarl' chooses its exemplars by task, not by step; leave the key out, or use another method (": {
        "model_name": "icarl",
        "memory_update": "step",
    },
    "memory_update: 'agem' chooses its exemplars by step, not by task; leave the key out": {
        "model_name": "agem",
        "memory_update": "task",
    },
    "convnet_type: 'l2p' tunes a vision transformer of timm; set it to one, such as timm:vit_base_patch16_224, ": {
        "model_name": "l2p",
        "convnet_type": "resnet8",
    },
    "head: 'bic' needs a head that grows; leave the key out": {"model_name": "bic", "head": "all"},
    "online: 'bic' needs several passes over its images; use another method": {"model_name": "bic", "online": True},
    "online: each image is seen once, but 'epochs' is not 1; leave it out": {"online": True, "epochs": 2},
    "blurry: 'wsc' needs to know the tasks; use another method with memory_update 'step' (cls_er, dark_er, ": {
        "blurry": 0.1
    },
    "blurry: 'er_ace' needs to know the tasks; set task_free, or use another method with memory_update 'step' (": {
        "model_name": "er_ace",
        "blurry": 0.1,
    },
    "blurry: a task has images of all classes of the run; leave 'max_tasks' out": {
        "model_name": "er",
        "blurry": 0.1,
        "max_tasks": 2,
    },
    "unknown model_name 'l2'; did you mean 'l2p'?": {"model_name": "l2"},
    "unknown model_name 'codaprompt'; did you mean 'coda_prompt'?": {"model_name": "codaprompt"},
    "... (1000000 characters)'; known: IL_batch_size": {"k" * 1_000_000: 1},
    "... (1000000 characters)'; known: acil": {"model_name": "k" * 1_000_000},
    "... (1000000 characters)'; known: cifar10": {"dataset": "k" * 1_000_000},
    "not valid JSON (maximum recursion depth exceeded": "[" * 100_000,
    "999... (5005 characters)' is not auto, cpu": {"device": "cuda:" + "9" * 5000},
    "device: 'cuda:\u0663' is not auto, cpu": {"device": "cuda:\u0663"},  # a digit, but not one of torch's
    "999... (5000 characters)' is not auto, cpu": {"device": "9" * 5000},
    "0... (401 characters) is too large": {"device": 10**400},
    "has a name of 300 bytes; the limit is 255": {"prefix": "a" * 300},
    "out: 'x/bbb": {"out": "x/" + "b" * 300},
    r"out: 'a\udcff' is not UTF-8": {"out": "a\udcff"},
    r"out: 'a\x00b' has a zero byte": {"out": "a\0b"},
    r"unknown key 'a\nb'": {"a\nb": 1},
    r"device: 'a\nb' is not auto": {"device": "a\nb"},
    "wsc: is a group of keys; set one of them (wsc.KEY)": {"wsc": 0.3},
    "init_cls: is missing, as in PyCIL's rmm-pretrain.json": {"model_name": "rmm-icarl", "memory_size": 2000},
    "expected a JSON object": "[1]",
}


@pytest.mark.parametrize("message", BAD)
def test_bad_configuration_is_one_line_that_names_file_and_key(message, tmp_path):
    path = write(tmp_path, BAD[message])
    with pytest.raises(UserError) as error:
        load(path)
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < 5000


OVERRIDES = {
    "json only; use init_lr (first task) or lrate (later tasks)": "lr=0.2",
    "boosting_epochs: is accepted in PyCIL's foster.json, rmm-foster.json only; use epochs": "boosting_epochs=3",
    'seed: expected a whole number, got "1993,1994"; several values are a list: [1993,1994]': "seed=1993,1994",
    'lrate: expected a number, got "0,1"; write a decimal point: 0.1; two values are a list: [0, 1]': "lrate=0,1",
    'lrate: expected a number, got "0,05"; write a decimal point: 0.05; two values are a list: [0, 5]': "lrate=0,05",
    'memory_per_class: expected a whole number, got "[20,200"; close the list with ]': "memory_per_class=[20,200",
    'lrate: expected a number, got "0.1,0.01"; several values are a list: [0.1,0.01]': "lrate=0.1,0.01",
    "unknown model_name 'replay,wsc'; several values are a list: [replay,wsc]": "model_name=replay,wsc",
    "wsc: is a group of keys": "wsc=0.3",
    'seed: expected a whole number, got "[[[': "seed=" + "[" * 100_000,
}


@pytest.mark.parametrize("message", OVERRIDES)
def test_bad_overrides_say_what_to_write(message, tmp_path):
    with pytest.raises(UserError) as error:
        load(write(tmp_path, {}), dict([parse_override(OVERRIDES[message])]))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, value",
    [
        ("model_name=[replay,wsc]", ["replay", "wsc"]),
        ("model_name=[ replay, wsc ]", ["replay", "wsc"]),
        ('a=["x,y", z, 1.5, true]', ["x,y", "z", 1.5, True]),
        ("milestones=[[1,2],[3]]", [[1, 2], [3]]),
        ("dataset=npz:a,b.npz", "npz:a,b.npz"),
        ("milestones=[1,", "[1,"),
        ("seed=[]", []),
    ],
)
def test_bare_words_in_a_list_are_strings(text, value):
    assert parse_override(text)[1] == value


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere.json: cannot be read"):
        load(tmp_path / "nowhere.json")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.relative_to(EXPS).as_posix())
def test_every_shipped_experiment_loads(path):
    if "timm:" in path.read_text():
        pytest.importorskip("timm")
    assert load(path)


@dataclass(frozen=True)
class Warm:
    temperature: float = key(2.0, "of the softmax", above=0, decides="later tasks")


@pytest.fixture
def warm(monkeypatch):
    """A learner with an option of its own."""
    monkeypatch.setitem(registry.learners, "warm", type("Warm", (registry.learners["replay"],), {"Options": Warm}))
    monkeypatch.setitem(registry.learner_defaults, "warm", {"nme": False})


def test_a_learners_own_option_is_read_checked_and_part_of_the_run(warm):
    usual, other = resolve({"model_name": "warm"}), resolve({"model_name": "warm", "temperature": 3})
    assert (usual.options, other.options, other.nme) == (Warm(), Warm(3.0), False)
    assert run_folder(usual) != run_folder(other) and resolve(other.to_dict()) == other
    with pytest.raises(UserError, match='temperature: expected a number, got "warm"'):
        resolve({"model_name": "warm", "temperature": "warm"})
    with pytest.raises(UserError, match="temperature: 0.0 is not above 0"):
        resolve({"model_name": "warm", "temperature": 0})


def test_options_are_declared_in_one_place_and_under_names_of_their_own(warm, monkeypatch):
    """Errors for the learner's author."""
    monkeypatch.setitem(registry.learner_defaults, "warm", {"warmth": 1.0})
    with pytest.raises(UserError, match=r'register_learner\("warm", warmth=...\): not a key shared by all learners'):
        resolve({"model_name": "warm"})

    @dataclass(frozen=True)
    class Shared:
        epochs: int = key(1, "a shared key")

    monkeypatch.setattr(registry.learners["warm"], "Options", Shared)
    with pytest.raises(UserError, match="'epochs' is a key of all learners"):
        resolve({"model_name": "warm"})


def test_every_key_says_what_it_decides():
    """The one place where a key's decision is listed again:
    a change here changes the names of finished runs' folders.
    """
    by_decision = {what: {name for name, key in KEYS.items() if key.decides == what} for what in DECIDES}
    assert by_decision["files"] == {"data_root", "out", "save_weights", "tensorboard", "wandb", "analyse"}
    assert by_decision["speed"] == {"num_workers", "cache_first_task", "checkpoint_seconds", "timeout_minutes"}
    assert by_decision["rounding"] == {"device", "threads", "compile", "channels_last"}
    assert by_decision["name"] == {"prefix", "label"}
    assert set.union(*(by_decision[what] for what in ("files", "speed", "rounding", "name"))) == INCIDENTAL
    with pytest.raises(ValueError, match="decides='nothing' is not one of"):
        key(1, "a key", decides="nothing")


EVERYWHERE = """
memory_size memory_per_class fixed_memory convnet_type consolidate device seed replay_ratio exemplars nme precision
init_epoch init_lr init_milestones init_lr_decay init_weight_decay epochs lrate milestones lrate_decay weight_decay
scheduler momentum batch_size pretrained grad_checkpointing channels_last optimizer betas clip_norm label_smoothing
warmup_epochs min_lr schedule_unit backbone_lr_factor layer_decay freeze batch_norm_parts timeout_minutes compile
num_workers data_root checkpoint_seconds operations_like batch_seed class_balance
memory_update replay_batch_size steps_per_batch head online"""


def test_every_key_is_also_one_of_learners_and_pycils_scripts_or_refused_there():
    """A new key is added here, or where it has no effect: to ``OF_EXPERIMENTS``, to ``OF_WHOLE_RUNS``, or to both."""
    shared = {name for name in KEYS if not name.startswith("wsc.")}
    assert shared - OF_EXPERIMENTS - OF_WHOLE_RUNS == set(EVERYWHERE.split())
    assert OF_EXPERIMENTS | OF_WHOLE_RUNS <= shared


@pytest.mark.parametrize("name", sorted(registry.learners))
def test_every_key_that_a_backbone_reads_makes_it_another_one_to_check(name):
    read = set()

    class Recorder:
        def __getattr__(self, attribute):
            read.add(attribute)
            return getattr(config, attribute)

    config = resolve({"model_name": name, "convnet_type": "resnet8", "pretrained": False} | suited(name))
    configured_learner(config).Plan(Recorder()).check_backbone(configured_backbone(Recorder(), 32, False))
    assert "convnet_type" in read and read <= {"convnet_options", "options", *declared(BackboneOptions)}


# of results in the repository, what names their runs' folders: the hash is of all that differs from the defaults
FINISHED = {
    "cifar100_short/replay-m20": "replay/m20/seed1993-5de4e937",
    "cifar100_short_all/bic-m20": "bic/m20/seed1993-41f30391",
    "cifar100_short_all/der-m200": "der/m200/seed1993-d773f0ff",
    "cifar100_short_all/finetune-m0": "finetune/m0/seed1993-669618e8",
    "cifar100_short_all/foster-m20": "foster/m20/seed1993-4c2cff44",
    "cifar100_short_all/icarl-m20": "icarl/m20/seed1993-d773f0ff",
    "cifar100_short_all/joint-m20": "joint/m20/seed1993-68b87121",
    "cifar100_short_all/memo-m20": "memo/m20/seed1993-d773f0ff",
    "cifar100_short_all/wa-m20": "wa/m20/seed1993-68b87121",
    "cifar100_short_precision/replay-bf16-seed1994": "replay/m20/seed1994-503dd546",
    "trace_small_model/avg_offline": "avg_offline/r0.2/seed1234-4e297c0d",
}


@pytest.mark.parametrize("name", FINISHED)
def test_finished_runs_keep_their_folders(name):
    path = ROOT / "results" / "studies" / f"{name}.json"
    config = resolve_recorded(json.loads(path.read_text())["config"], path)
    assert "/".join(run_folder(config).parts[-3:]) == FINISHED[name]


FOLDERS = {  # of files in exps: the folder of the last of their runs, seeds outermost
    "paper/cifar100_paper_schedule": "cifar100-b10-inc10/foster/m20/seed1993-d184ccb7",
    "paper/table1_imagenet100": "imagenet100-b10-inc10/wsc/m600/seed1997-5b105654",
    "paper/imagenet100": "imagenet100-b10-inc10/finetune/m0/seed1997-ae21e5be",
    "studies/trace_smollm2": "trace-500-data-models-SmolLM2-135M-Instruct/magmax/r0.2/seed1234-d6170e8c",
    "paper/wsc_literal": "cifar100-b10-inc10/wsc/m500/seed1997-3611126a",
    "studies/tune_wsc": "cifar100-b10-inc10/wsc/m200/seed1993-837deb3f",
    "paper/table_importance": "cifar100-b10-inc10/wsc/m500/seed1997-2aeb267e",
    "paper/table_reset_rule": "cifar100-b10-inc10/wsc/m500/seed1997-f1742fc9",
    "paper/figure_retain": "cifar100-b10-inc10/wsc/m500/seed1997-7227dda8",
    "foster": "cifar100-b10-inc10/foster/m500/seed1997",
}


@pytest.mark.parametrize("name", FOLDERS)
def test_runs_of_the_shipped_files_keep_their_folders(name):
    last = load(EXPS / f"{name}.json")[-1]
    assert "/".join(run_folder(last).parts[-4:]) == FOLDERS[name]


@pytest.mark.parametrize("name", sorted(name for name, dropped in DROPPED.items() if dropped.decided))
def test_a_removed_key_is_refused_with_what_to_use_unless_it_says_what_applies_now(name):
    value = DROPPED[name].now
    settings = {"llm.method": "replay"} if name.startswith("llm.") else {"model_name": "wsc"}
    assert resolve(settings | {name: value}) == resolve(settings)
    other = "first" if isinstance(value, str) else not value
    with pytest.raises(UserError, match=f"^{name}: is no longer a key; use "):
        resolve(settings | {name: other})


def test_a_run_of_an_earlier_version_is_continued_if_its_removed_keys_say_what_applies_now():
    config = resolve({"model_name": "wsc"})
    earlier = config.identity() | {name: dropped.now for name, dropped in DROPPED.items() if dropped.decided}
    assert config.continues(earlier)
    assert not config.continues(earlier | {"wsc.reset_head": False})


def test_keys_that_no_run_of_the_file_reads_are_told(tmp_path, caplog):
    """Such as a key of another method, or those of WSC where ``consolidate`` is missing."""

    def told(**keys):
        caplog.clear()
        path = tmp_path / "exp.json"
        path.write_text(json.dumps({"dataset": "digits", **keys}))
        return load(path), [record.message.partition("exp.json: ")[2] for record in caplog.records]

    runs, lines = told(model_name="icarl", **{"wsc.retain": [0.1, 0.9], "alpha": 0.8})
    assert len(runs) == 1
    assert lines == [
        "alpha: has no effect; it is a key of dark_er, derpp, ease, fdr, xder, which no run of this file uses",
        "wsc.retain: has no effect; it is a key of Weight Space Consolidation (model_name wsc, or consolidate), which "
        "no run of this file uses",
    ]
    assert told(model_name="icarl", consolidate=True, **{"wsc.retain": [0.1, 0.9]})[1] == []
    assert told(model_name=["icarl", "derpp"], alpha=0.8)[1] == []
    assert told(alpha=0.8, runs=[{"model_name": "wsc"}, {"model_name": "derpp"}])[1] == []


@pytest.mark.slow
def test_no_shipped_file_has_keys_that_none_of_its_runs_reads(caplog):
    for path in SHIPPED:
        if "llm" not in path.read_text():
            try:
                load(path)
            except UserError as error:
                assert "timm is not installed" in str(error)
    assert "has no effect" not in caplog.text


def test_runs_cannot_be_overridden(tmp_path):
    path = tmp_path / "exp.json"
    path.write_text("{}")
    with pytest.raises(UserError, match="runs: belongs to the file, and cannot be overridden"):
        load(path, {"runs": [{"seed": 3}]})
