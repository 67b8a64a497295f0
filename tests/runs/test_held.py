"""What a learner keeps between tasks is counted in bytes, and ``memory_bytes`` is kept to."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import synthetic
from support.methods import SILENT
from support.small_runs import SETTINGS, run_of, undrawn

from pycil_wsc import report
from pycil_wsc.config.loading import resolve
from pycil_wsc.data.configured import with_memory_size
from pycil_wsc.errors import UserError
from pycil_wsc.launch.attempt import Datasets
from pycil_wsc.runs.held import held
from pycil_wsc.runs.planning import plan_of
from pycil_wsc.runs.run import Run
from pycil_wsc.training.learner_state import memory_of, stored_of, tensors_of, without_memory

# the network of the small runs: convolutions 3 -> 8 -> 16 -> 16, batch norms of 8, 16 and 16 channels, 64 features
WEIGHTS = 9 * (3 * 8 + 8 * 16 + 16 * 16)
CHANNELS = 8 + 16 + 16
COUNTERS = 3 * 8  # batch norm's numbers of steps, int64
TRAINED = 4 * (WEIGHTS + 2 * CHANNELS)  # float32
BACKBONE = TRAINED + 4 * 2 * CHANNELS + COUNTERS


def head(classes):
    return 4 * (64 + 1) * classes


IMAGE = 8 * 8 * 3
EXEMPLARS = 6 * 4  # four of each of six classes
STATISTICS = 8 * 6 * 64 + 8 * 6  # sums of features and numbers of images of each class, in float64 and int64
HAND_WORKED = {
    "replay": (BACKBONE + head(6), 0, EXEMPLARS * IMAGE, 0),
    # the weights that are trained, two averages; the tested network is one of them, as are the averages' counters
    "cls_er": (BACKBONE + head(6), 2 * (BACKBONE + head(6)) - COUNTERS, EXEMPLARS * IMAGE, 0),
    "derpp": (BACKBONE + head(6), 0, EXEMPLARS * IMAGE, EXEMPLARS * 6 * 4),
    "icarl": (BACKBONE + head(6), BACKBONE + head(4), EXEMPLARS * IMAGE, 0),  # the teacher has four classes
    "wa": (BACKBONE + head(6), BACKBONE + head(4), EXEMPLARS * IMAGE, 0),
    "ewc": (BACKBONE + head(6), TRAINED + head(6), 0, 0),  # the weights that it is drawn to are the network's
    "mas": (BACKBONE + head(6), TRAINED + head(6), 0, 0),
    "si": (BACKBONE + head(6), TRAINED + head(6), 0, 0),
    "ema": (BACKBONE + head(6), 0, EXEMPLARS * IMAGE, 0),
    "wsc": (BACKBONE + head(6), 0, EXEMPLARS * IMAGE, 0),
    "ncm": (BACKBONE + head(6) + STATISTICS, 0, 0, 0),
    "slda": (BACKBONE + head(6) + STATISTICS + 8 * 64 * 64, 0, 0, 0),  # and a covariance in float64
}


@pytest.mark.parametrize("name", HAND_WORKED)
def test_the_bytes_that_a_method_holds_are_those_of_its_networks_statistics_exemplars_and_logits(name, undisturbed):
    own = {"memory_update": "task"} if name in ("cls_er", "derpp") else {}
    folder, result = undisturbed(model_name=name, exemplars="random", epochs=2, init_epoch=1, **own)
    parts = dict(zip(("network", "further", "exemplars", "values"), HAND_WORKED[name], strict=True))
    assert result["held"] == parts and result["held_bytes"] == sum(parts.values())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["held"]["exemplars"] for line in lines] == [IMAGE * line["exemplars"] for line in lines]
    assert lines[-1]["held_bytes"] == result["held_bytes"]


def test_the_parts_of_a_saved_learner_are_found_where_it_put_them(settings):
    learner = run_of(settings | {"model_name": "derpp", "memory_update": "task"}).learner
    learner.memory.stored.put("logits", np.arange(2), torch.ones(2, 3))
    state = learner.state_dict()
    assert memory_of(state) == learner.memory.state_dict()
    assert stored_of(state)["logits"]["values"].tolist() == [[1.0] * 3] * 2
    names = tensors_of(state).keys() | without_memory(state).keys()
    tensors = {name for name, value in state.items() if torch.is_tensor(value)}
    assert names == (tensors | learner.get_extra_state().keys()) - {"memory", "stored"}


def learner_of(modules, extra, exemplars):
    """What :func:`held` reads of a learner."""
    extra = {"memory": {}, "stored": {}, **extra}
    memory = SimpleNamespace(indices=np.array(exemplars, int))
    return SimpleNamespace(state_dict=lambda: {**modules, "_extra_state": extra}, memory=memory)


def test_what_is_the_same_twice_is_held_once():
    shared, other = torch.ones(5), torch.arange(5.0)
    modules = {"network.a": shared, "network.tied": shared, "network.alike": torch.ones(5)}
    modules |= {"teacher.a": torch.ones(5), "teacher.b": other, "teacher.doubles": other.double()}
    extra = {"averages": {"b": [other.clone()], "c": (torch.ones(6), None)}, "steps": 3}
    learner = learner_of(modules, extra, [])
    parts = held(learner, np.zeros((2, 4, 4, 3), np.uint8))
    assert parts["network"] == 2 * 20, "tied weights once; equal ones of two layers twice"
    assert parts["further"] == 20 + 40 + 24, "b, in doubles, and c"


def test_image_files_count_by_their_size_and_a_lost_one_leaves_the_number_out(tmp_path):
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes(10**number))
    images = np.array([str(path) for path in paths])
    learner = learner_of({"network.a": torch.ones(1)}, {}, [0, 2])
    assert held(learner, images) == {"network": 4, "further": 0, "exemplars": 1 + 100, "values": 0}
    paths[2].unlink()
    assert held(learner, images) is None


# ---- a budget in bytes -----------------------------------------------------------------------------------------------


def in_bytes(settings, **keys):
    """The run with ``memory_bytes``, which has not begun."""
    config = resolve(settings | keys)
    data = Datasets().of(config)
    return Run(with_memory_size(config, data.train.images), data)


@pytest.mark.parametrize("exemplars", ["random", "reservoir"])
def test_a_budget_in_bytes_pays_for_logits_too(exemplars, settings):
    """With N classes known, an exemplar of DER++ takes its pixels and N float32."""
    budget = 20 * IMAGE
    keys = {"model_name": "derpp", "memory_bytes": budget, "exemplars": exemplars, "epochs": 1, "init_epoch": 1}
    keys |= {"memory_update": "task"}
    run = in_bytes(settings, **keys)
    for task in run.manager.tasks:
        run.learner.learn(task, SILENT)
        parts, number, classes = held(run.learner, run.dataset.train.images), len(run.learner.memory), task.num_seen
        assert parts["exemplars"] == number * IMAGE and parts["values"] == number * 4 * classes
        fit = budget // (IMAGE + 4 * classes)
        assert number == (fit if exemplars == "reservoir" else fit // classes * classes) < 20
    assert run.learner.spent.images == sum(plan_of(run.config, run.manager))


def test_a_method_stores_what_it_says(undisturbed):
    """A method that stored values without ``stored_bytes`` would exceed ``memory_bytes``; all others store nothing."""
    _, result = undisturbed(model_name="derpp", memory_update="task", exemplars="random", epochs=2, init_epoch=1)
    run = run_of(SETTINGS | {"dataset": result["config"]["dataset"]}, model_name="derpp")
    assert result["held"]["values"] == EXEMPLARS * run.learner.plan.stored_bytes(6)


def test_too_few_bytes_for_an_exemplar_of_each_class_and_its_logits_are_one_line(settings):
    """Four images fit, but not four with their logits."""
    assert in_bytes(settings, model_name="replay", memory_bytes=4 * IMAGE).plan
    with pytest.raises(UserError, match="model_name: 'derpp' needs exemplars, but the memory cannot hold one of each"):
        in_bytes(settings, model_name="derpp", memory_update="task", memory_bytes=4 * IMAGE)


# ---- the report ------------------------------------------------------------------------------------------------------


def cost_table(folder, sizes):
    """{method: (MiB, whether it is marked)} in the cost table of a report of runs with these sizes and accuracies."""
    results = []
    for name, (size, accuracy) in sizes.items():
        contents = synthetic.result(name, 20)
        contents |= {} if size is None else {"held_bytes": size * 2**20, "held": {"network": size * 2**20}}
        results.append(contents | {"avg_acc": accuracy})
    synthetic.write(folder, *results)
    with undrawn():
        path = report.write_report(folder).parent
    lines = synthetic.lines_of(path, f"cost-{synthetic.HERE}")
    held_lines = [line for line in lines if line["column"] == "held, MiB"]
    return {line["method"]: (float(line["mean"]), line["best"] == "1") for line in held_lines}


def test_the_table_of_costs_marks_the_methods_that_are_best_for_what_they_hold(tmp_path):
    sizes = {"replay": (2, 40.0), "wa": (4, 39.0), "icarl": (4, 45.0), "bic": (5, 44.0), "der": (9, 60.0)}
    marked = {"replay": True, "wa": False, "icarl": True, "bic": False, "der": True}
    assert cost_table(tmp_path, sizes) == {name: (size, marked[name]) for name, (size, _) in sizes.items()}


def test_results_without_the_bytes_stay_readable_and_show_nothing_there(tmp_path):
    assert cost_table(tmp_path / "old", {"replay": (None, 40.0), "wa": (None, 39.0)}) == {}
    mixed = cost_table(tmp_path / "mixed", {"replay": (None, 40.0), "wa": (3, 39.0)})
    assert mixed == {"wa": (3, False)}, "one row is not compared with any"
