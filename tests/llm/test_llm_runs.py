"""Whole runs of language models through the command line: the matrix, forgetting, a kill, several processes."""

import json
import os
import re
import signal
import sys
import time

import numpy as np
import pytest
import torch
from support.damage import a_bit_flipped
from support.small_llm import configured, write_rows
from support.small_processes import in_two_processes, sharded
from support.small_runs import ROOT, command, killed_at, results, wait_until, without_measurements, write

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from main import main
from pycil_wsc.config.kinds import run_folder
from pycil_wsc.config.loading import load, resolve
from pycil_wsc.llm.config import KEYS, METHODS
from pycil_wsc.llm.generation import answers, stops_alone
from pycil_wsc.llm.kind import LanguageModel
from pycil_wsc.llm.trainer import LanguageRun

pytestmark = pytest.mark.usefixtures("unreported")
TIMES = {"train_minutes", "relative_vram_minutes", "relative_vram_minutes_streamed", "tokens_per_second"}


def lasting(result):
    """The values that a repetition must reproduce."""
    return {key: value for key, value in without_measurements(result).items() if key not in TIMES}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_and_writes_a_whole_result(method, llm_settings, tmp_path, capsys):
    assert main(["--config", write(tmp_path, llm_settings | {"llm.method": method})]) == 0
    ((folder, result),) = results(llm_settings).items()
    for version in ("trace", "fixed"):
        scores = result["scores"][version]
        assert [len(row) for row in scores["matrix"]] == [1, 2] and np.ravel(scores["matrix"][1]).min() >= 0
        assert (
            scores["last_average"] == pytest.approx(np.mean(scores["matrix"][-1]))
            and len(scores["op"]) == len(scores["bwt"]) == 2
        )
        assert result["trivial"][version]["colours"]["majority"] == pytest.approx(1 / 3)
    config = resolve(llm_settings | {"llm.method": method})
    single = ("zero_shot", "finetune", "replay")
    assert result["tokens_trained"] == LanguageModel().plan(config, configured(llm_settings)[1])
    assert result["padding"] < 0.1 and result["models_resident"] == (1 if method in single else 2)
    assert result["relative_vram_minutes"] == pytest.approx(result["models_resident"] * result["train_seconds"] / 60)
    if method == "zero_shot":
        assert (result["steps"], result["scores"]["trace"]["bwt"]) == (0, [0, 0])
    for after in (1, 2):
        for number, name in enumerate(["colours", "shapes"][:after]):
            rows = [
                json.loads(line)
                for line in (folder / "predictions" / f"after-{after}" / f"{name}.jsonl").read_text().splitlines()
            ]
            assert np.mean([row["prediction"] == row["answer"] for row in rows]) == pytest.approx(
                result["scores"]["trace"]["matrix"][after - 1][number]
            )
    assert [json.loads(line)["trace"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == result[
        "scores"
    ]["trace"]["matrix"]
    assert (
        not (folder / "checkpoint.json").exists()
        and not (folder / "checkpoints").exists()
        and "test prompts are training prompts too" in (folder / "log.txt").read_text()
    )
    assert "forgetting" in capsys.readouterr().out
    assert json.loads((folder / "config.json").read_text()).items() >= result["config"].items()


@pytest.mark.slow
def test_the_time_to_save_is_no_training_time(llm_settings, monkeypatch):
    seconds = [0.0]

    def save(run, folder, state):
        seconds[0] += 100

    def now():
        seconds[0] += 0.001
        return seconds[0]

    monkeypatch.setattr("pycil_wsc.runs.journal.time.perf_counter", now)
    monkeypatch.setattr("pycil_wsc.llm.trainer_checkpoint.record", save)
    result = LanguageRun(*configured(llm_settings, llm__checkpoint_minutes=0, llm__max_new_tokens=1)).execute()
    assert result["train_seconds"] < 10 and result["total_seconds"] > 400


def test_the_time_to_check_the_weights_is_no_training_time(llm_settings, monkeypatch):
    seconds, check = [0.0], LanguageRun._check_weights

    def check_slowly(run):
        seconds[0] += 100
        check(run)

    def now():
        seconds[0] += 0.001
        return seconds[0]

    monkeypatch.setattr("pycil_wsc.runs.journal.time.perf_counter", now)
    monkeypatch.setattr(LanguageRun, "_check_weights", check_slowly)
    result = LanguageRun(*configured(llm_settings, llm__max_new_tokens=1)).execute()
    assert result["train_minutes"] > 0
    assert result["train_seconds"] < 10 and result["total_seconds"] > 200


@pytest.mark.slow
def test_forgetting_shows_and_replay_reduces_it(llm_settings, tmp_path):
    learned = llm_settings | {
        "llm.epochs": [25, 25],
        "llm.method": ["finetune", "replay"],
        "llm.replay_ratio": 1.0,
        "llm.replay_epochs": 5,
    }
    assert main(["--config", write(tmp_path, learned)]) == 0
    finetune, replay = (
        next(r for r in results(llm_settings).values() if r["config"]["llm.method"] == name)["scores"]["trace"]
        for name in ("finetune", "replay")
    )
    assert finetune["matrix"][0][0] > 0.9 and finetune["matrix"][1][1] > 0.9, "both tasks are learned"
    assert finetune["forgetting"] > 0.3 and finetune["bwt"][1] == pytest.approx(-finetune["forgetting"] / 2)
    assert replay["forgetting"] < finetune["forgetting"] / 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["replay", "wsc", "avg_online", "magmax"])
def test_a_run_stopped_again_and_again_ends_like_one_never_stopped(method, llm_settings, tmp_path):
    """Within epochs, before and after the reset, before a test, and between the tasks; a checkpoint after each step.

    What a stop loses, the checkpoint of the next stop lacks too, so the end shows it.
    """
    changes = {"llm.method": method, "llm.checkpoint_minutes": 0, "llm.replay_epochs": 4, "wsc.average_every": 2}
    config, corpus = configured(llm_settings | changes)
    undisturbed = LanguageRun(resolve(config.to_dict() | {"out": str(tmp_path / "undisturbed")}), corpus).execute()
    for number, saves in enumerate([1, 5, 5, 2, 2, 1, 4, 2]):
        with killed_at(saves, LanguageRun):
            LanguageRun(config, corpus).execute()
        torch.manual_seed(number)  # the global generator must not matter
    assert lasting(LanguageRun(config, corpus).execute()) == lasting(undisturbed)
    predictions = [
        {path.relative_to(folder): path.read_text() for path in folder.rglob("*.jsonl") if "predictions" in path.parts}
        for folder in (
            run_folder(config),
            run_folder(resolve(config.to_dict() | {"out": str(tmp_path / "undisturbed")})),
        )
    ]
    assert predictions[0] == predictions[1] and len(predictions[0]) == 3
    losses = [
        [json.loads(line)["train_loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (run_folder(config), tmp_path / "undisturbed" / run_folder(config).relative_to(config.out))
    ]
    assert losses[0] == losses[1] and list(map(len, losses[0])) == [6, 6], "of whole epochs, whatever was stopped"


@pytest.mark.slow
def test_a_checkpoint_with_a_flipped_bit_is_named(llm_settings, tmp_path, capsys):
    config, corpus = configured(llm_settings, llm__method="wsc")
    with killed_at(2, LanguageRun):
        LanguageRun(config, corpus).execute()
    (folder,) = (run_folder(config) / "checkpoints").iterdir()
    arguments = ["--config", write(tmp_path, llm_settings | {"llm.method": "wsc"})]
    for name in ("model.safetensors", "optimizer.pt", "wsc.pt", "trainer_state.json"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(a_bit_flipped(whole, len(whole) // 2))
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert f"{folder}: is damaged" in error and error.count("\n") == 1 and not results(llm_settings)
        (folder / name).write_bytes(whole)
    assert main(arguments) == 0 and not folder.parent.exists()


def test_a_checkpoint_that_was_not_finished_is_none(llm_settings):
    """Killed while the Trainer writes, the run resumes from the checkpoint before."""
    config, corpus = configured(llm_settings, llm__checkpoint_minutes=0)
    with killed_at(3, LanguageRun, saved=False):
        LanguageRun(config, corpus).execute()
    assert len(list((run_folder(config) / "checkpoints").iterdir())) == 2
    LanguageRun(config, corpus).execute()
    assert "resuming at step 3" in (run_folder(config) / "log.txt").read_text()


@pytest.mark.slow
def test_kill_9_costs_nothing_and_the_finished_is_skipped(llm_settings, tmp_path, capsys):
    longer = llm_settings | {
        "llm.epochs": [30, 3],
        "llm.method": "wsc",
        "llm.checkpoint_minutes": 0,
        "out": str(tmp_path / "runs"),
    }
    config, corpus = configured(longer)
    process = command(tmp_path, longer)
    wait_until((run_folder(config) / "checkpoint.json").exists, process)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (run_folder(config) / "result.json").exists()
    again = command(tmp_path, longer)
    _, errors = again.communicate()
    assert again.returncode == 0, errors
    assert "resuming at step" in (run_folder(config) / "log.txt").read_text()
    undisturbed = LanguageRun(resolve(config.to_dict() | {"out": str(tmp_path / "undisturbed")}), corpus).execute()
    assert lasting(results(longer)[run_folder(config)]) | {"device": None} == lasting(undisturbed) | {"device": None}
    written = (run_folder(config) / "result.json").stat().st_mtime_ns
    assert main(["--config", write(tmp_path, longer)]) == 0
    assert "1 of 1 runs finished before" in capsys.readouterr().out
    assert (run_folder(config) / "result.json").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    "shard, methods", [(False, ["wsc", "slerp"]), (True, ["wsc", "magmax", "slerp"])], ids=["whole", "sharded"]
)
@pytest.mark.slow
def test_two_processes_give_what_one_gives(shard, methods, llm_settings, tmp_path):
    """Gloo on the CPU: the same batches in all, weights equal up to rounding."""
    settings = llm_settings | {
        "llm.method": methods,
        "save_weights": True,
        "threads": 1,
        "llm.batch_size": 7,
        "llm.shard": shard,
    }
    assert main(["--config", write(tmp_path, settings)]) == 0
    one = results(settings)
    both = settings | {"out": str(tmp_path / "both")}
    for method in methods:
        path = write(tmp_path, both | {"llm.method": method})
        assert in_two_processes(sharded, "--config", path, seconds=100) == [0, 0]
    two = results(both)
    assert len(one) == len(two) == len(methods)
    for folder, result in one.items():
        other = tmp_path / "both" / folder.relative_to(settings["out"])
        assert (two[other]["processes"], two[other]["sharded"], result["sharded"]) == (2, shard, False)
        assert {key: two[other][key] for key in ("tokens_trained", "steps", "padding")} == {
            key: result[key] for key in ("tokens_trained", "steps", "padding")
        }
        weights, others = (load_file(place / "models" / "after-2" / "model.safetensors") for place in (folder, other))
        assert weights.keys() == others.keys() and all(
            torch.allclose(weights[name], others[name], atol=1e-5) for name in weights
        )
        assert two[other]["scores"] == result["scores"]


@pytest.mark.slow
def test_a_run_does_not_resume_with_other_items_and_its_result_is_not_theirs(llm_settings, tmp_path, capsys):
    path, (config, corpus) = write(tmp_path, llm_settings), configured(llm_settings)
    train = tmp_path / "data" / "small" / "shapes" / "train.json"
    own = train.read_text()
    with killed_at(1, LanguageRun):
        LanguageRun(config, corpus).execute()
    for file in ("checkpoint.json", "result.json"):
        train.write_text(own.replace("red", "reddish"))
        assert main(["--config", path]) == 1
        error = capsys.readouterr().err
        assert f"{file}: was made with other data (then 48 training and 24 test samples" in error, error
        train.write_text(own)
        assert main(["--config", path]) == 0


@pytest.mark.slow
def test_a_run_does_not_resume_with_other_weights_of_the_model(llm_settings, tmp_path, capsys):
    config, corpus = configured(llm_settings | {"save_weights": True, "prefix": "before"})
    LanguageRun(config, corpus).execute()
    model = run_folder(config) / "models" / "after-2"
    path = write(tmp_path, llm_settings | {"llm.model": str(model)})
    with killed_at(1, LanguageRun):
        LanguageRun(*configured(llm_settings | {"llm.model": str(model)})).execute()
    weights = model / "model.safetensors"
    own = load_file(weights)
    save_file({name: tensor + 1e-3 for name, tensor in own.items()}, weights, {"format": "pt"})
    assert main(["--config", path]) == 1
    assert "checkpoint.json: the weights of llm.model" in capsys.readouterr().err
    save_file(own, weights, {"format": "pt"})
    assert main(["--config", path]) == 0


def test_the_saved_model_is_the_one_that_was_tested(llm_settings, tmp_path):
    config, corpus = configured(llm_settings | {"llm.method": "magmax", "save_weights": True})
    LanguageRun(config, corpus).execute()
    folder = run_folder(config) / "models" / "after-2"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    stops_alone(model, tokenizer)
    texts = answers(model, tokenizer, corpus.test_prompts[0], config, torch.device("cpu"))
    kept = (run_folder(config) / "predictions" / "after-2" / "colours.jsonl").read_text().splitlines()
    assert texts == [json.loads(line)["prediction"] for line in kept]


@pytest.mark.slow
def test_a_loss_that_is_no_number_fails_its_run_alone(llm_settings, tmp_path, capsys):
    assert main(["--config", write(tmp_path, llm_settings | {"llm.lr": [0.005, 1e30], "llm.epochs": [3, 3]})]) == 1
    assert len(results(llm_settings)) == 1 and "the loss became nan" in capsys.readouterr().err


def test_a_dry_run_tells_the_cost_in_tokens(llm_settings, tmp_path, capsys):
    assert main(["--config", write(tmp_path, llm_settings), "--dry-run"]) == 0
    config, corpus = configured(llm_settings)
    assert f"{LanguageModel().plan(config, corpus):,} training tokens to go" in capsys.readouterr().out


WRONG = [
    ({"llm.metod": "wsc"}, "unknown key 'llm.metod'; did you mean 'llm.method'"),
    ({"memory_per_class": 20}, "unknown key 'memory_per_class'"),
    ({"llm.method": "wcs"}, "llm.method: 'wcs' is not one of"),
    ({"llm.replay_ratio": 1.5}, "llm.replay_ratio: 1.5 is above 1"),
    ({"llm.batch_size": "many"}, "llm.batch_size: expected a whole number"),
    ({"llm.epochs": [[1, 2, 3]]}, "llm.epochs: 3 numbers for 2 tasks"),
    ({"llm.tasks": [["colours", "colours"]]}, "llm.tasks: expected different tasks"),
    ({"llm.heads": 5}, "llm.heads: must divide"),
    ({"llm.lora_rank": 2, "llm.method": "slerp"}, "llm.lora_rank: 'slerp' merges whole weights"),
    ({"llm": 5}, "llm: is a group of keys"),
    ({"llm.betas": [[0.9, 1]]}, "llm.betas: 1.0 is not below 1"),
    ({"llm.packing": True}, "llm.packing: is no longer a key; use llm.padding"),
    ({"llm.replay_choice": "random"}, "llm.replay_choice: is no longer a key; use a train.json"),
    ({"wsc.warmup": 1}, "wsc.warmup: 1 leaves no step"),
    ({"llm.method": "wsc", "wsc.warmup": 1, "wsc.reset": "none"}, "wsc.warmup: 1 leaves no step to average"),
    ({"llm.tasks": [["colours", "shape"]]}, "did you mean 'shapes'"),
    ({"llm.tasks": [["../small/colours", "shapes"]]}, "llm.tasks: '../small/colours' is not a name"),
    ({"llm.tasks": [[os.path.abspath("colours"), "shapes"]]}, "colours' is not a name; give that of a folder"),
    ({"llm.tasks": [["", "shapes"]]}, "llm.tasks: '' is not a name"),
    ({"llm.pool": "Lisa"}, "llm.pool to null"),
    ({"llm.data": "nowhere"}, "no such folder"),
]


@pytest.mark.parametrize("changes, line", WRONG)
def test_wrong_settings_are_one_clear_line(changes, line, llm_settings, tmp_path, capsys):
    assert main(["--config", write(tmp_path, llm_settings | changes)]) == 2
    error = capsys.readouterr().err.strip()
    assert line in error and "\n" not in error and not (tmp_path / "runs").exists()


def test_wsc_without_a_replay_epoch_is_refused_before_training(llm_settings, tmp_path, capsys):
    keys = {"llm.method": "wsc", "llm.replay_ratio": 0, "llm.pool": None}
    for arguments in ([], ["--dry-run"]):
        assert main(["--config", write(tmp_path, llm_settings | keys), *arguments]) == 2
        assert "wsc.covers: no task has a replay epoch for WSC to cover" in capsys.readouterr().err
    assert not results(llm_settings)
    assert main(["--config", write(tmp_path, llm_settings | keys | {"wsc.covers": "all"})]) == 0


def test_a_first_task_without_a_replay_epoch_cannot_be_consolidated(llm_settings, tmp_path, capsys):
    keys = {"llm.method": "wsc", "wsc.first_task": True}
    assert main(["--config", write(tmp_path, llm_settings | keys | {"llm.pool": None})]) == 2
    assert "wsc.first_task: the first task has no replay epoch for WSC to cover" in capsys.readouterr().err
    for more in ({"wsc.covers": "all", "llm.pool": None}, {}):
        assert main(["--config", write(tmp_path, llm_settings | keys | more), "--dry-run"]) == 0


def test_finetuning_has_no_replay_epochs_to_vary(llm_settings):
    runs = [run_folder(resolve(llm_settings | {"llm.method": "finetune", "llm.replay_epochs": n})) for n in (1, 2)]
    assert runs[0] == runs[1]


def test_a_finished_run_without_the_weights_asked_for_is_named(llm_settings, tmp_path, capsys):
    said = "finished without recording save_weights; --redo runs it again"
    path = write(tmp_path, llm_settings)
    for weights, named in (("true", False), ("true", False), ('"every"', True)):
        assert main(["--config", path, "--set", f"save_weights={weights}"]) == 0
        assert (said in capsys.readouterr().out) == named


def test_a_row_without_an_answer_is_named(llm_settings, tmp_path, capsys):
    write_rows(
        tmp_path / "data" / "small" / "mine",
        [{"prompt": "a", "answer": "b"}, {"prompt": "c"}],
        [{"prompt": "a", "answer": "b"}],
    )
    assert main(["--config", write(tmp_path, llm_settings | {"llm.tasks": ["mine"], "llm.epochs": [1]})]) == 2
    assert "train.json, row 2" in capsys.readouterr().err


def test_every_key_has_a_description_and_a_valid_default():
    assert all(key.doc for key in KEYS.values())
    config = resolve({"llm.method": "wsc"})
    assert resolve(config.to_dict()) == config and run_folder(config).name == "seed1234"
    assert (config.lr, config.betas, config.weight_decay, config.clip, config.batch_size) == (
        1e-5,
        (0.9, 0.95),
        0,
        1,
        256,
    )
    assert (config.wsc.average_every, config.wsc.warmup, config.wsc.retain, config.wsc.blend, config.wsc.covers) == (
        20,
        0.25,
        0.2,
        0.5,
        "replay",
    )


def test_a_package_that_lacks_is_named_before_anything_is_trained(llm_settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rapidfuzz.fuzz", None)
    for name in ("trainer", "corpus", "data", "metrics"):
        monkeypatch.delitem(sys.modules, f"pycil_wsc.llm.{name}")
    write_rows(
        tmp_path / "data" / "small" / "Py150", [{"prompt": "a", "answer": "b"}], [{"prompt": "a", "answer": "b"}]
    )
    assert main(["--config", write(tmp_path, llm_settings | {"llm.tasks": ["Py150"], "llm.epochs": [1]})]) == 2
    assert "language models need rapidfuzz" in capsys.readouterr().err


def test_the_docs_table_is_the_keys():
    rows = re.findall(
        r"^\| `((?:llm\.|wsc\.)?\w+)` \| `(.+?)` \| [^|]*\| (.+) \|$",
        (ROOT / "docs" / "configuration.md").read_text().partition("## Language models")[2],
        re.MULTILINE,
    )
    assert {name: (json.loads(default), doc) for name, default, doc in rows} == {
        name: (_plain(key.default), key.doc) for name, key in KEYS.items()
    }


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


COUNTS = {  # the runs of each file
    "paper/trace": 5 * (1 + 7 * 4),
    "studies/trace_quickstart": 2 * 2 * 2,
    "studies/trace_small_model": 8,
    "studies/trace_smollm2": 9,
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_experiments_of_the_repository_are_valid(name):
    runs = load(ROOT / "exps" / f"{name}.json")
    assert runs and all(run.kind == "llm" for run in runs) and len({run_folder(run) for run in runs}) == len(runs)
    assert len(runs) == COUNTS[name]
