"""Two processes on one run, whole and sharded: they stop, resume and fail together. Gloo on the CPU."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from unittest.mock import patch

import pytest
import torch
from support.small_llm import configured
from support.small_processes import commanded, in_two_processes, shard_on_the_processor, sharded
from support.small_runs import ROOT, Killed, results, write

pytest.importorskip("transformers")

from safetensors.torch import load_file

from pycil_wsc.config.kinds import run_folder
from pycil_wsc.llm.model import load_model
from pycil_wsc.llm.trainer import LanguageRun


def stopped(settings_file, checkpoints):
    """Begin the run, and stop all processes at the same checkpoint; returns where."""
    shard_on_the_processor()
    save, calls = LanguageRun.on_save, []

    def save_and_stop(run, args, state, control, **others):
        calls.append(state.global_step)
        if len(calls) == checkpoints:
            run._test = killed
        save(run, args, state, control, **others)
        if len(calls) == checkpoints:
            raise Killed

    with patch.object(LanguageRun, "on_save", save_and_stop), contextlib.suppress(Killed):
        commanded("--config", settings_file)
    return calls[-1]


def killed(*_, **__):
    raise Killed


def weights_of(settings):
    (folder,) = results(settings)
    return load_file(folder / "models" / "after-2" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes, step",
    [
        ({"llm.method": "replay"}, 4),
        ({"llm.method": "wsc", "wsc.covers": "all", "wsc.average_every": 1}, 6),
        ({"llm.method": "replay", "llm.lora_rank": 3}, 5),
        ({"llm.method": "magmax"}, 3),
    ],
    ids=["in-a-task", "after-the-reset", "adapters", "before-a-test"],
)
def test_a_sharded_run_resumes_in_as_many_processes(changes, step, llm_settings, tmp_path):
    """With exactly the weights of two that never stopped, and, up to rounding, those of one."""
    short = {"llm.epochs": [1, 1], "llm.pool": None, "llm.max_new_tokens": 1, "save_weights": True}
    settings = llm_settings | short | changes | {"llm.shard": True, "llm.checkpoint_minutes": 0}
    path = write(tmp_path, settings)
    assert in_two_processes(stopped, path, step) == [step, step]
    assert in_two_processes(sharded, "--config", path) == [0, 0]
    (folder,) = results(settings)
    assert f"resuming at step {step + 1}" in (folder / "log.txt").read_text()
    through = settings | {"out": str(tmp_path / "through")}
    assert in_two_processes(sharded, "--config", write(tmp_path, through)) == [0, 0]
    undisturbed = settings | {"out": str(tmp_path / "undisturbed"), "llm.shard": False}
    config, corpus = configured(undisturbed)
    LanguageRun(config, corpus).execute()
    one, two, other = weights_of(undisturbed), weights_of(settings), weights_of(through)
    assert two.keys() == other.keys() and all(torch.equal(two[name], other[name]) for name in two)
    assert one.keys() == two.keys() and all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


@pytest.mark.slow
def test_a_sharded_model_with_adapters_is_trained_and_tested(llm_settings, tmp_path):
    settings = llm_settings | {"llm.method": "wsc", "llm.lora_rank": 4, "llm.batch_size": 7}
    config, corpus = configured(settings)
    one = LanguageRun(config, corpus).execute()
    both = settings | {"out": str(tmp_path / "both"), "llm.shard": True}
    assert in_two_processes(sharded, "--config", write(tmp_path, both)) == [0, 0]
    ((folder, two),) = results(both).items()
    assert (two["processes"], two["sharded"]) == (2, True) and two["scores"] == one["scores"]
    assert {key: two[key] for key in ("parameters", "parameters_trained", "models_resident", "tokens_trained")} == {
        key: one[key] for key in ("parameters", "parameters_trained", "models_resident", "tokens_trained")
    }


def sharded_in_bf16(settings):
    """What is kept after a run in bf16, what layers are computed in, and the losses of its epochs."""
    shard_on_the_processor()
    run, computed = LanguageRun(*configured(settings)), []
    begin = run.on_train_begin

    def on_train_begin(*arguments, model=None, **others):
        layer = model.model.layers[0].mlp
        layer.register_forward_hook(lambda *parts: computed.append(str(parts[2].dtype)))
        begin(*arguments, model=model, **others)

    run.on_train_begin = on_train_begin
    run.execute()
    moments = [state[name] for state in run.trainer.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    kept = {str(tensor.dtype) for tensor in (*run.trainer.model.parameters(), *moments)}
    losses = [loss for row in run.journal.history for loss in row["train_loss"]]
    return {"kept": sorted(kept), "computed": sorted(set(computed)), "losses": losses}


@pytest.mark.slow
def test_bf16_is_for_computing_alone(llm_settings, tmp_path):
    changes = {"precision": "bf16", "llm.max_new_tokens": 1}
    one = sharded_in_bf16(llm_settings | changes)
    both = llm_settings | changes | {"llm.shard": True, "out": str(tmp_path / "both")}
    for part in (one, *in_two_processes(sharded_in_bf16, both)):
        assert part["losses"] == pytest.approx(one["losses"], rel=2e-2)
        assert (part["kept"], part["computed"]) == (["torch.float32"], ["torch.bfloat16"])


def set_up_late(settings):
    """Set up a run, the first process five seconds after the other; returns what is raised."""
    run = LanguageRun(*configured(settings))

    def late(name):
        time.sleep(0 if run.processes.rank else 5)
        return torch.device(name)

    try:
        with patch("pycil_wsc.llm.trainer.resolved_device", late):
            run._set_up()
    except RuntimeError as error:
        return [str(error)]
    return []


def test_a_process_waits_for_the_others_no_longer_than_the_configuration_says(llm_settings):
    _, raised = in_two_processes(set_up_late, llm_settings | {"llm.timeout_minutes": 0.02}, seconds=40)
    assert raised and "timed out" in raised[0].lower()


def saved_model(folder, settings):
    """The model of ``settings`` before any task, and its tokeniser, saved in ``folder``."""
    config, corpus = configured(settings)
    model = load_model(config, corpus.tokenizer)
    model.generation_config.eos_token_id = [corpus.tokenizer.eos_token_id, 7]
    model.save_pretrained(folder)
    corpus.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_weights_that_cannot_be_read_end_the_run_in_all_processes(llm_settings, tmp_path):
    sound, damaged = (saved_model(tmp_path / name, llm_settings) for name in ("sound", "damaged"))
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    short = {"llm.epochs": [1, 1], "llm.max_new_tokens": 1, "llm.shard": True}
    settings = llm_settings | short | {"llm.model": str(damaged)}
    assert in_two_processes(sharded, "--config", write(tmp_path, settings)) == [1, 0]  # the first one says why
    assert not results(settings)
    settings["llm.model"] = str(sound)
    assert in_two_processes(sharded, "--config", write(tmp_path, settings)) == [0, 0]
    ((_, result),) = results(settings).items()
    assert result["config"]["llm.model"] == str(sound) and result["sharded"]


def accelerated(path):
    """``accelerate launch`` of the run in two processes on the processor, in a process group of its own."""
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    options += ["--dynamo_backend", "no", "--main_process_port", "0"]
    script = str(ROOT / "tests" / "support" / "sharded_main.py")
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, script, "--config", path]
    return subprocess.Popen(command, start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def killed_before(settings_file, checkpoint):
    """Begin the run, and kill each process where it would begin to write this checkpoint."""
    shard_on_the_processor()
    save, calls = LanguageRun.on_save, []

    def save_or_die(run, *arguments, **others):
        calls.append(run)
        if len(calls) == checkpoint:
            os.kill(os.getpid(), signal.SIGKILL)
        save(run, *arguments, **others)

    with patch.object(LanguageRun, "on_save", save_or_die):
        commanded("--config", settings_file)


@pytest.mark.slow
def test_a_killed_sharded_run_ends_under_accelerate_launch_like_one_never_stopped(llm_settings, tmp_path):
    keys = {"llm.method": "wsc", "wsc.covers": "all", "llm.shard": True, "llm.checkpoint_minutes": 0}
    settings = llm_settings | keys | {"llm.epochs": [1, 2], "llm.max_new_tokens": 1, "save_weights": True}
    config, _ = configured(settings)
    killed_at = 6  # a step of the second task
    assert in_two_processes(killed_before, write(tmp_path, settings), killed_at, check=False) == []
    assert json.loads((run_folder(config) / "checkpoint.json").read_text())["counts"]["steps"] == killed_at - 1 > 3
    assert not results(settings)
    assert accelerated(write(tmp_path, settings)).wait(300) == 0
    assert "resuming at step" in (run_folder(config) / "log.txt").read_text()
    through = settings | {"out": str(tmp_path / "through")}
    assert in_two_processes(sharded, "--config", write(tmp_path, through), seconds=100) == [0, 0]
    ((_, one),), ((_, two),) = results(settings).items(), results(through).items()
    assert (one["scores"], one["tokens_trained"], one["processes"], one["sharded"]) == (
        two["scores"],
        two["tokens_trained"],
        2,
        True,
    )
    weights, others = weights_of(settings), weights_of(through)
    assert all(torch.equal(weights[name], others[name]) for name in others)
