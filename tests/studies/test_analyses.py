"""Analyses: each against its definition written out, and the run that records them against one that does not."""

import copy
import json
import re
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.small_runs import killed_at, results, small_data, without_measurements, write
from torch import nn
from torch.nn.functional import cross_entropy

import pycil_wsc
from main import main
from pycil_wsc import registry, report
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.images.datasets import load_dataset
from pycil_wsc.runs.run import Run
from pycil_wsc.state import load_state
from pycil_wsc.studies.dormant import Dormant, mean_activations
from pycil_wsc.studies.flatness import Flatness, filter_normalised
from pycil_wsc.studies.observer import Observer
from pycil_wsc.studies.records import unrecorded
from pycil_wsc.training.processes import SINGLE_PROCESS

ALL = ["gradients", "drift", "flatness", "dormant"]


@pytest.fixture(autouse=True)
def few_directions(monkeypatch):
    monkeypatch.setattr(Flatness, "directions", 2)
    monkeypatch.setattr(Flatness, "distances", (-0.5, 0.0, 0.5))


def run_of(settings, **keys):
    config = resolve(settings | {"analyse": ALL} | keys)
    return Run(config, load_dataset(config.dataset, "."))


def recorded(run):
    return [json.loads(line) for line in (run.folder / "analyses.jsonl").read_text().splitlines()]


# ---- each analysis against its definition ----------------------------------------------------------------------------


class Snapshots(Observer):
    """Records what the other observers see: the learner at the start of each task, and its weights at every hook."""

    watches_epochs = True

    def __init__(self, learner):
        super().__init__(learner)
        self.started, self.weights, self.trained, self.memory = [], [], [], []

    def task_started(self, task):
        self.started.append(copy.deepcopy(self.learner.network))
        self.memory.append(self.learner.memory.indices)
        self.weights.append([self.named()])

    def epoch_ended(self, task):
        self.weights[-1].append(self.named())

    def task_trained(self, task):
        self.trained.append(copy.deepcopy(self.learner.network))
        return {}

    def named(self):
        return {name: p.detach().double().numpy().copy() for name, p in self.learner.network.named_parameters()}


@pytest.fixture
def observed(monkeypatch, settings):
    """name -> (a finished run with all analyses, its records, the recorded learner and weights)."""
    monkeypatch.setitem(registry.analyses, "snapshots", Snapshots)

    def observe(name, **keys):
        run = run_of(settings, model_name=name, analyse=[*ALL, "snapshots"], **keys)
        run.execute()
        return run, recorded(run), run.records.observers["snapshots"]

    return observe


def raw_gradient(run, network, indices):
    """Mean of each sample's own gradient, from the raw pixels."""
    info, total = run.dataset.info, 0
    for index in indices:
        pixels = torch.from_numpy(np.array(run.dataset.train.images[index])).float() / 255
        image = ((pixels - torch.tensor(info.mean)) / torch.tensor(info.std)).permute(2, 0, 1)[None].float()
        network.zero_grad()
        cross_entropy(network(image), torch.tensor([int(run.manager.train_targets[index])])).backward()
        total = total + torch.cat([p.grad.flatten() for p in network.parameters()]).double()
    return (total / len(indices)).numpy()


def test_without_anything_to_train_there_is_no_gradient(settings):
    run = run_of(settings, model_name="ncm", analyse=["gradients", "flatness"], freeze=["backbone"], max_tasks=2)
    run.execute()
    for line in recorded(run):
        assert {loss for losses in line["flatness"]["loss"] for loss in losses} == {line["flatness"]["loss"][0][0]}
    nothing = {"cosine": None, "norm_new": 0.0, "norm_past": None, "norm": 0.0}
    assert [line["gradients"] for line in recorded(run)] == [nothing, nothing]


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [None, 0.25])
def test_gradients_are_the_means_over_samples_written_out(ratio, observed):
    run, records, seen = observed("wsc", precision="fp32", replay_ratio=ratio)
    for task, record, network, past in zip(run.manager.tasks, records, seen.started, seen.memory, strict=True):
        network.eval()
        new = raw_gradient(run, network, task.train_indices)
        gradients, share = (
            record["gradients"],
            ratio if ratio and len(past) else len(task.train_indices) / (len(task.train_indices) + len(past)),
        )
        assert gradients["norm_new"] == pytest.approx(np.linalg.norm(new), rel=1e-4) and record["share_new"] == share
        if not task.index:
            assert (
                len(past) == 0
                and gradients["cosine"] is None
                and gradients["norm_past"] is None
                and gradients["norm"] == gradients["norm_new"]
            )
            continue
        assert len(past) == 4 * task.num_old
        old = raw_gradient(run, network, past)
        assert gradients["cosine"] == pytest.approx(new @ old / np.linalg.norm(new) / np.linalg.norm(old), abs=1e-5)
        assert gradients["norm_past"] == pytest.approx(np.linalg.norm(old), rel=1e-4)
        assert gradients["norm"] == pytest.approx(np.linalg.norm(share * new + (1 - share) * old), rel=1e-4)


def test_exemplars_that_a_task_chose_before_training_are_no_past_data(settings):
    run = run_of(settings, model_name="gdumb", analyse=["gradients"], max_tasks=2)
    run.execute()
    first, second = recorded(run)
    assert (first["share_new"], first["gradients"]["cosine"]) == (1, None)
    old = [len(run.learner.memory.classes[label]) for label in range(run.manager.tasks[1].num_old)]
    new = len(run.manager.tasks[1].train_indices)
    assert second["share_new"] == new / (new + sum(old)) and second["gradients"]["cosine"] is not None


@pytest.mark.parametrize("name", ["der", "memo", "tagfex", "beef", "podnet"])
def test_parts_that_each_task_makes_anew_do_not_drift(name, settings):
    """At rates too small to change a weight, nothing else differs after a task from what was before."""
    rates = {"init_lr": 1e-30, "lrate": 1e-30} | ({"ft_lrate": 0.0} if name == "podnet" else {})
    run = run_of(settings, model_name=name, analyse=["drift"], max_tasks=2, **rates)
    before = {}
    whole = run.learner.begin_task

    def begin(task):
        before[task.index] = {name: p.detach().clone() for name, p in run.learner.network.named_parameters()}
        return whole(task)

    run.learner.begin_task = begin
    run.execute()
    record = recorded(run)[1]["drift"]
    assert record["between"]["norm"] < 1e-6 and record["between"]["layers"], record["between"]
    first, second = before[0], before[1]
    common = {name: tuple(map(min, first[name].shape, second[name].shape)) for name in first.keys() & second.keys()}
    parts = {name: tuple(map(slice, shape)) for name, shape in common.items()}
    assert max((first[name][part] - second[name][part]).norm() for name, part in parts.items()) > 0.01, "some are new"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replay", "wsc"])
def test_the_training_accuracy_is_that_of_the_trained_weights_on_the_plain_images(name, settings):
    config = resolve(
        settings
        | {"model_name": name, "analyse": ["training_accuracy"], "save_weights": "every", "memory_per_class": 12}
        | {"precision": "fp32"}  # in which saved weights predict
    )
    run = Run(config, load_dataset(config.dataset, "."))
    result = run.execute()
    train = run.dataset.train
    lines = [line["training_accuracy"] for line in recorded(run)]
    for task, line in enumerate(lines):
        right = pycil_wsc.load(run.folder, task=task).predict(train.images) == train.targets
        new = np.isin(train.targets, result["class_order"][2 * task : 2 * task + 2])
        assert line["new"] == pytest.approx(100 * right[new].mean())
        seen = np.isin(train.targets, result["class_order"][: 2 * task + 2])  # all of their images are exemplars
        assert line["all"] == pytest.approx(100 * right[seen].mean())
    assert len(lines) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wsc", "joint"])
def test_drift_between_tasks_is_the_difference_of_the_saved_weights(name, settings):
    run = run_of(settings, model_name=name, save_weights="every")
    run.execute()
    saved = [load_state(run.folder / f"weights-task{task}.pt")["learner"] for task in range(3)]
    trainable = {name for name, _ in run.learner.network.named_parameters()}
    weights = [
        {
            key.removeprefix("network."): value.double().numpy()
            for key, value in state.items()
            if key.removeprefix("network.") in trainable
        }
        for state in saved
    ]
    records = [record["drift"]["between"] for record in recorded(run)]
    assert records[0] is None
    for before, after, record in zip(weights[:-1], weights[1:], records[1:], strict=True):
        squares, norms = defaultdict(float), defaultdict(float)
        for key, old in before.items():
            layer = key.rpartition(".")[0]
            squares[layer] += np.sum((after[key][: len(old)] - old) ** 2)  # the head's old rows
            norms[layer] += np.sum(old**2)
        assert record["layers"] == pytest.approx({layer: value**0.5 for layer, value in squares.items()})
        assert record["relative"] == pytest.approx(
            {layer: (value / norms[layer]) ** 0.5 for layer, value in squares.items()}
        )
        assert record["norm"] == pytest.approx(sum(squares.values()) ** 0.5)


@pytest.mark.slow
def test_drift_within_a_task_is_the_way_from_epoch_to_epoch(observed):
    _, records, seen = observed("wsc")
    for record, path in zip(records, seen.weights, strict=True):
        steps = [{key: after[key] - before[key] for key in after} for before, after in zip(path, path[1:])]
        assert record["drift"]["within"]["norm"] == pytest.approx(
            [np.sqrt(sum(np.sum(d**2) for d in step.values())) for step in steps]
        )
        head = sum(np.sqrt(np.sum(step["head.weight"] ** 2) + np.sum(step["head.bias"] ** 2)) for step in steps)
        assert record["drift"]["within"]["layers"]["head"] == pytest.approx(head)
    assert [len(record["drift"]["within"]["norm"]) for record in records] == [3, 4, 4]


def test_every_filter_of_a_direction_has_its_weights_norm_and_scales_and_biases_stay():
    weights = [torch.randn(5, 3, 3, 3) * torch.arange(5).view(5, 1, 1, 1), torch.randn(4, 7), torch.randn(6)]
    first, again = (filter_normalised(weights, torch.Generator().manual_seed(3)) for _ in range(2))
    for weight, direction in zip(weights[:2], first):
        for row, moved in zip(weight, direction):
            assert moved.norm().item() == pytest.approx(row.norm().item(), rel=1e-5)
            cosine = torch.nn.functional.cosine_similarity(row.flatten(), moved.flatten(), dim=0)
            assert row.norm() == 0 or abs(cosine) < 0.99, "a direction of its own"
    assert torch.equal(first[2], torch.zeros(6)) and all(map(torch.equal, first, again))


def test_the_loss_around_a_solution_is_that_of_the_moved_network(observed, monkeypatch):
    directions = []

    def noted(weights, generator):
        directions.append(filter_normalised(weights, generator))
        return directions[-1]

    monkeypatch.setattr("pycil_wsc.studies.flatness.filter_normalised", noted)
    run, records, seen = observed("replay", precision="fp32")
    network, task, record = seen.trained[-1].eval(), run.manager.tasks[-1], records[-1]["flatness"]
    exemplars = np.concatenate([run.learner.memory.classes[c] for c in range(task.num_old)])
    images, targets = next(
        run.train_source.batches(np.concatenate([task.train_indices, exemplars]), run.manager.train_targets, 1000)
    )
    assert record["distance"] == [-0.5, 0, 0.5] and len(record["loss"]) == Flatness.directions == len(directions) / 3
    for losses, direction in zip(record["loss"], directions[-2:]):
        for distance, loss in zip(record["distance"], losses):
            moved = copy.deepcopy(network)
            with torch.no_grad():
                for parameter, way in zip(moved.parameters(), direction):
                    parameter += distance * way
                assert loss == pytest.approx(cross_entropy(moved(images), targets).item(), rel=1e-4)
    assert record["loss"][0][1] == record["loss"][1][1], "at the solution itself"


def test_dormant_units_by_hand(monkeypatch):
    """Units of 8, 0.2, 0 and 1 on average: the layer's mean is 2.3, and 0.025 of it 0.0575. Then 4.1 and 0.5: 2.3."""
    network = nn.Sequential(nn.Linear(1, 4, bias=False), nn.ReLU(inplace=True), nn.Unflatten(1, (2, 2, 1)), nn.ReLU())
    network[0].weight.data = torch.tensor([[4.0], [0.1], [-3.0], [0.5]])
    first, second = mean_activations(network, [torch.tensor([[1.0]]), torch.tensor([[2.0], [3.0]])])
    assert first.tolist() == pytest.approx([8, 0.2, 0, 1]) and second.tolist() == pytest.approx([4.1, 0.5])
    monkeypatch.setattr(Dormant, "sample", lambda *_: np.arange(3))
    monkeypatch.setattr(Dormant, "shared_batches", lambda *_: [(torch.tensor([[1.0], [2.0], [3.0]]), None)])
    learner = SimpleNamespace(predict=network, processes=SINGLE_PROCESS)
    record = Dormant(learner).task_trained(None)
    assert record == {"threshold": 0.025, "units": 6, "share": pytest.approx(1 / 6), "layers": [1 / 4, 0]}
    monkeypatch.setattr(Dormant, "threshold", 0.3)  # at most 0.69
    record = Dormant(learner).task_trained(None)
    assert record == {"threshold": 0.3, "units": 6, "share": pytest.approx(3 / 6), "layers": [2 / 4, 1 / 2]}


def test_the_units_of_a_transformer_are_its_features_over_all_places():
    network = nn.Sequential(nn.Linear(1, 3, bias=False), nn.ReLU())
    network[0].weight.data = torch.tensor([[1.0], [2.0], [-1.0]])
    (means,) = mean_activations(network, [torch.tensor([[[1.0], [3.0]]]), torch.tensor([[[2.0], [6.0]]])])
    assert means.tolist() == [3, 6, 0]


@pytest.mark.slow
def test_the_share_of_dormant_units_is_over_all_layers(observed, monkeypatch):
    monkeypatch.setattr(Dormant, "threshold", 0.8)  # so that there are some
    run, records, seen = observed("replay", precision="fp32", convnet_type="resnet8")
    network, kept = seen.trained[0].eval(), []
    batches = list(run.train_source.batches(run.manager.tasks[0].train_indices, run.manager.train_targets, 8))
    hooks = [
        module.register_forward_hook(lambda module, args, output: kept.append(output.detach().clone().relu()))
        for name, module in network.named_modules()
        if name == "backbone.stem.2"
    ]
    with torch.no_grad():
        for images, _ in batches:
            network(images)
    means = torch.cat(kept).mean((0, 2, 3))
    share = (means <= 0.8 * means.mean()).float().mean().item()
    assert hooks and 0 < share < 1 and records[0]["dormant"]["layers"][0] == share
    units = [16, 16, 16, 32, 32, 64, 64]  # resnet8: the stem, and two in each block
    for record in records:
        dormant = record["dormant"]
        assert len(dormant["layers"]) == 7 and dormant["units"] == sum(units)
        assert dormant["share"] == pytest.approx(np.dot(dormant["layers"], units) / sum(units))
        assert 0 < dormant["share"] < 1 and len(set(dormant["layers"])) > 1


# ---- nothing but the records -----------------------------------------------------------------------------------------


class Meddler(Observer):
    """Draws random numbers and leaves the learner in training mode."""

    def task_started(self, task):
        torch.rand(3)
        self.learner.train()

    epoch_ended = task_started

    def task_trained(self, task):
        self.task_started(task)
        return {"seen": int(task.num_seen)}


WATCHED = ["replay", "memo", "ssre", "fecam"]  # networks: plain, expanding, with adapters, and a closed form
WATCHED += ["foster", "beef", "podnet"]  # with phases: a student, an energy, a balanced one
WATCHED += ["wsc", "cls_er", "redo", "si"]  # that watch their steps: for an average, idle units, an importance


@pytest.mark.parametrize("name", WATCHED)
def test_results_are_equal_to_the_bit_with_and_without(name, settings, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.analyses, "meddler", Meddler)
    settings |= {"cache_first_task": False, "exemplars": "random", "init_epoch": 1, "epochs": 2, "wsc.warmup": 0.5}
    settings |= {"dataset": f"npz:{small_data(tmp_path / 'six.npz', per_class=6)}", "checkpoint_seconds": 3600}
    settings |= {"max_tasks": 2}
    with_all = run_of(settings, model_name=name, analyse=[*ALL, "meddler"], save_weights=True)
    without = run_of(settings, model_name=name, analyse=[], save_weights=True, out=str(tmp_path / "without"))
    assert without_measurements(with_all.execute()) == without_measurements(without.execute())
    states = [load_state(run.folder / "weights.pt")["learner"] for run in (with_all, without)]
    tensors = [{key: value for key, value in state.items() if isinstance(value, torch.Tensor)} for state in states]
    assert tensors[0].keys() == tensors[1].keys() and all(
        torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0]
    )
    assert not (without.folder / "analyses.jsonl").exists()
    lines = recorded(with_all)
    assert [line["task"] for line in lines] == [0, 1] and [line["meddler"]["seen"] for line in lines] == [2, 4]
    assert all(set(line) == {"task", "share_new", "meddler", *ALL} for line in lines)


@pytest.mark.slow
def test_a_poisoned_test_set_changes_no_record(settings, tmp_path):
    clean = run_of(settings, model_name="replay")
    clean.execute()
    with np.load(settings["dataset"].removeprefix("npz:")) as arrays:
        poisoned = dict(arrays)
    poisoned["test_x"] = 255 - poisoned["test_x"]
    np.savez(tmp_path / "poisoned.npz", **poisoned)
    other = run_of(settings, model_name="replay", dataset=f"npz:{tmp_path / 'poisoned.npz'}")
    other.execute()
    assert recorded(clean) == recorded(other)


@pytest.mark.slow
@pytest.mark.parametrize("name, saves", [("wsc", [2, 4, 6, 9]), ("foster", [10])])
def test_a_stopped_run_goes_on_with_the_same_records(name, saves, settings, tmp_path):
    """Stopped within the first task, at its end, within the others and between them,
    each time after the stop before.
    """
    undisturbed = run_of(settings, model_name=name, out=str(tmp_path / "undisturbed"))
    undisturbed.execute()
    for save in np.diff([0, *saves]):
        with killed_at(save):
            run_of(settings, model_name=name).execute()
    again = run_of(settings, model_name=name)
    again.execute()
    assert recorded(again) == recorded(undisturbed)


def test_an_analysis_that_is_asked_for_on_going_on_starts_with_the_next_task(settings):
    with killed_at(lambda calls: (calls[-1][0]["task"], calls[-1][0]["epoch"]) == (1, 2)):
        run_of(settings, analyse=["gradients"]).execute()
    again = run_of(settings, analyse=["dormant", "gradients", "drift"])
    again.execute()
    assert [sorted(set(line) - {"task", "share_new"}) for line in recorded(again)] == [
        ["gradients"],
        ["gradients"],
        ["dormant", "drift", "gradients"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("analyse", [["gradients", "flatness", "dormant"], ["drift"]])
def test_a_first_task_that_another_run_trained_gives_the_same_records(analyse, settings, tmp_path):
    settings |= {"model_name": "wsc"}
    alone = run_of(settings, analyse=analyse, cache_first_task=False, out=str(tmp_path / "alone"))
    expected = alone.execute()
    run_of(settings, model_name="replay", analyse=[]).execute()
    shared = run_of(settings, analyse=analyse)
    result = shared.execute()
    assert recorded(shared) == recorded(alone) and result["curve"] == expected["curve"]
    assert (result["train_seconds_spent"] < result["train_seconds"]) is ("drift" not in analyse), (
        "what watches epochs must see them"
    )


# ---- the command and the report --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_report_draws_what_was_recorded_and_a_broken_record_is_named(settings, tmp_path, capsys, unrendered):
    assert main(["--config", write(tmp_path, settings | {"analyse": ALL})]) == 0
    page = (tmp_path / "runs" / "run" / "report" / "index.html").read_text()
    assert all(
        f'<figure id="figure-{name}-' in page
        for name in ("gradients", "drift", "drift-layers", "drift-within", "flatness", "dormant")
    )
    ((run, _),) = results(settings).items()
    lines = (run / "analyses.jsonl").read_text().splitlines()
    for spoilt, said in (
        ("{", "line 2 is incomplete"),
        ('{"task": 1, "share_new": 0.5, "drift": 3}', "line 2 is of another version (no task, or an analysis"),
    ):
        (run / "analyses.jsonl").write_text("\n".join([lines[0], spoilt, lines[2]]))
        ((path, flaw),) = report.find_runs([run]).problems
        assert path == run / "analyses.jsonl" and said in flaw


@pytest.mark.slow
def test_seeds_whose_classes_differ_in_size_are_averaged_task_by_task(settings):
    """The fractions of new data are not the same then."""
    settings |= {"model_name": "replay", "analyse": ["gradients"], "init_epoch": 1, "epochs": 1, "dataset": "digits"}
    settings |= {"init_cls": 4, "increment": 3, "shuffle": True, "memory_per_class": 20}
    runs = [run_of(settings, seed=seed) for seed in (1, 2, 3)]
    for run in runs:
        run.execute()
    fractions = [sorted(100 * line["share_new"] for line in recorded(run)[1:]) for run in runs]
    assert len({of_seed[0] for of_seed in fractions}) > 1
    axes = drawn(report.find_runs([run.folder for run in runs]).records)["gradients"]
    assert list(axes[0].lines[0].get_xdata()) == pytest.approx(np.mean(fractions, axis=0))


def drawn(records):
    from pycil_wsc.report.figures.plots import figures
    from pycil_wsc.report.groups import group_runs

    return {plot.slug: plot.figure.axes for group in group_runs(records)[0] for plot in figures(group)}


@pytest.mark.slow
def test_tasks_with_the_same_share_of_new_data_are_one_point_their_mean(settings):
    run = run_of(settings, model_name="replay", replay_ratio=0.5)
    run.execute()
    past = [line["gradients"]["cosine"] for line in recorded(run)[1:]]
    (similarity,) = drawn(report.find_runs([run.folder]).records)["gradients"][0].lines
    assert len(past) > 1 and list(similarity.get_xdata()) == [50]
    assert list(similarity.get_ydata()) == pytest.approx([np.mean(past)])


@pytest.mark.slow
def test_figures_show_the_recorded_numbers(settings):
    run = run_of(settings, model_name="replay")
    run.execute()
    lines, plots = recorded(run), drawn(report.find_runs([run.folder]).records)
    past = [line["gradients"] for line in lines[1:]]
    (similarity,), (ratio,) = (plots[slug][0].lines for slug in ("gradients", "gradient-norm"))
    assert list(similarity.get_xdata()) == pytest.approx([100 * 24 / 40, 100 * 24 / 32])
    assert list(similarity.get_ydata()) == [line["cosine"] for line in reversed(past)]
    assert list(ratio.get_ydata()) == pytest.approx([line["norm"] / line["norm_new"] for line in reversed(past)])
    between = [line["drift"]["between"] for line in lines[1:]]
    assert list(plots["drift"][0].lines[0].get_ydata()) == [line["norm"] for line in between]
    assert list(plots["drift"][0].lines[0].get_xdata()) == [2, 3]
    relative = [np.mean([line["relative"][layer] for line in between]) for layer in between[0]["relative"]]
    assert list(plots["drift-layers"][0].lines[0].get_ydata()) == pytest.approx(relative)
    assert list(plots["drift-within"][0].lines[0].get_ydata()) == pytest.approx(
        sum((line["drift"]["within"]["norm"] for line in lines), [])
    )
    assert list(plots["flatness"][0].lines[0].get_ydata()) == pytest.approx(
        np.mean(lines[-1]["flatness"]["loss"], axis=0)
    )
    assert list(plots["dormant"][0].lines[0].get_ydata()) == pytest.approx(
        [100 * line["dormant"]["share"] for line in lines]
    )
    labels = {
        label
        for slug in ("gradients", "drift", "drift-layers", "drift-within", "flatness", "dormant")
        for axes in plots[slug]
        for label in (axes.get_xlabel(), axes.get_ylabel())
    }
    assert all(
        re.search(r"\(.+\)", label)
        for label in labels - {"", "task", "tasks learned", "layer, from the input", "exemplars per class"}
    )


@pytest.mark.slow
def test_a_finished_run_without_the_record_is_named_and_not_done_again(settings, tmp_path, capsys, undrawn):
    settings |= {"model_name": "replay", "analyse": ["gradients"]}
    path = write(tmp_path, settings)
    assert main(["--config", path]) == 0
    capsys.readouterr()
    assert main(["--config", path]) == 0 and "without recording" not in capsys.readouterr().out
    assert main(["--config", path, "--set", 'analyse=["gradients","drift"]']) == 0
    assert "finished without recording drift; --redo runs it again" in capsys.readouterr().out
    for weights in ("true", '"every"'):
        assert main(["--config", path, "--set", f"save_weights={weights}"]) == 0
        assert "finished without recording save_weights; --redo runs it again" in capsys.readouterr().out
    for _ in range(2):
        assert main(["--config", path, "--set", "save_weights=true", "--set", "prefix=other"]) == 0
        assert "without recording" not in capsys.readouterr().out
    assert len(results(settings)) == 2


def test_analyses_that_lack_a_task_are_named(tmp_path):
    """The report needs every task. A run that was stopped went on with a further analysis."""
    (tmp_path / "analyses.jsonl").write_text(
        "".join(
            json.dumps({"task": task, "gradients": {}} | ({"drift": {}} if task else {})) + "\n" for task in range(3)
        )
    )
    assert unrecorded(["gradients", "drift", "flatness"], tmp_path) == ["drift", "flatness"]


@pytest.mark.slow
def test_the_training_loss_figure_of_the_paper_has_a_line_with_and_one_without_a_fresh_start(
    settings, tmp_path, undrawn
):
    """exps/paper/figure_training_loss.json, on less data."""
    data = small_data(tmp_path / "hundred.npz", classes=100, per_class=2)
    options = {key: value for key, value in settings.items() if key in ("out", "device", "convnet_type")} | {
        "dataset": f"npz:{data}",
        "init_epoch": 1,
        "epochs": 2,
        "milestones": [1],
    }
    arguments = [
        part
        for key, value in options.items()
        for part in ("--set", f"{key}={json.dumps(value) if isinstance(value, list) else value}")
    ]
    assert main(["--config", "exps/paper/figure_training_loss.json", "--set", "seed=1993", *arguments]) == 0
    records = report.find_runs([settings["out"]]).records
    lines = drawn(records)["training-loss"][0].lines
    assert len(records) == 2 and [len(line.get_xdata()) for line in lines] == [1 + 19 * 2] * 2
    by_method = {record.method: np.concatenate(record.data["train_loss"]) for record in records}
    assert [list(line.get_ydata()) for line in lines] == [
        pytest.approx(by_method[name]) for name in ("replay", "joint")
    ]
