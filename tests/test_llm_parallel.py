"""Two processes on one run, whole and sharded: they stop, resume and fail together. Gloo on the CPU."""

import contextlib
import time
from unittest.mock import patch

import pytest
import torch
from small_llm import configured
from small_processes import commanded, in_two_processes
from small_runs import Killed, results, write

pytest.importorskip("transformers")

from safetensors.torch import load_file

from pycil_wsc.engine.processes import Processes
from pycil_wsc.llm.generation import stop_tokens
from pycil_wsc.llm.model import load_model
from pycil_wsc.llm.trainer import Run
from pycil_wsc.llm.training import Training


def stopped(settings_file, checkpoints):
    """Begin the run, and stop all processes at the same checkpoint; returns where."""
    checkpoint, calls = Run._checkpoint, []

    def checkpoint_and_stop(run, position):
        checkpoint(run, position)
        calls.append(position)
        if len(calls) == checkpoints:
            raise Killed

    with patch.object(Run, "_checkpoint", checkpoint_and_stop), contextlib.suppress(Killed):
        commanded("--config", settings_file)
    return {name: calls[-1][name] for name in ("task", "stage", "step")}


def weights_of(settings):
    (folder,) = results(settings)
    return load_file(folder / "models" / "after-2" / "model.safetensors")


@pytest.mark.parametrize(
    "changes, checkpoints, place",
    [
        ({"llm.method": "replay"}, 4, {"task": 1, "stage": "train", "step": 0}),
        (
            {"llm.method": "wsc", "wsc.covers": "all", "wsc.average_every": 1},
            6,
            {"task": 1, "stage": "train", "step": 2},
        ),
        ({"llm.method": "avg_online", "llm.lora_rank": 3}, 5, {"task": 1, "stage": "train", "step": 1}),
        ({"llm.method": "magmax"}, 3, {"task": 0, "stage": "test", "step": 0}),
    ],
    ids=["after-a-task", "after-the-reset", "merged-adapters", "before-a-test"],
)
def test_a_sharded_run_resumes_in_as_many_processes(changes, checkpoints, place, llm_settings, tmp_path):
    """With the weights of one process that never stopped."""
    short = {"llm.epochs": [1, 1], "llm.pool": None, "llm.max_new_tokens": 1, "save_weights": True}
    settings = llm_settings | short | changes | {"llm.shard": True, "llm.checkpoint_minutes": 0}
    path = write(tmp_path, settings)
    assert in_two_processes(stopped, path, checkpoints) == [place, place]
    assert in_two_processes(commanded, "--config", path) == [0, 0]
    (folder,) = results(settings)
    assert f"resuming at task {place['task'] + 1}, {place['stage']}" in (folder / "log.txt").read_text()
    undisturbed = settings | {"out": str(tmp_path / "undisturbed"), "llm.shard": False}
    config, corpus = configured(undisturbed)
    Run(config, corpus).execute()
    one, two = weights_of(undisturbed), weights_of(settings)
    assert one.keys() == two.keys() and all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


def test_a_sharded_model_with_adapters_is_trained_and_tested(llm_settings, tmp_path):
    settings = llm_settings | {"llm.method": "wsc", "llm.lora_rank": 4, "llm.batch_size": 7}
    config, corpus = configured(settings)
    one = Run(config, corpus).execute()
    both = settings | {"out": str(tmp_path / "both"), "llm.shard": True}
    assert in_two_processes(commanded, "--config", write(tmp_path, both)) == [0, 0]
    ((folder, two),) = results(both).items()
    assert (two["processes"], two["sharded"]) == (2, True) and two["scores"] == one["scores"]
    assert {key: two[key] for key in ("parameters", "parameters_trained", "models_resident", "tokens_trained")} == {
        key: one[key] for key in ("parameters", "parameters_trained", "models_resident", "tokens_trained")
    }


def sharded_in_bf16(settings):
    """A step in bf16; and where each process's model was made, what is kept, and in what layers are computed."""
    config, corpus = configured(settings)
    places, computed = [], []

    def load(config, tokenizer, empty=False):
        model = load_model(config, tokenizer, empty)
        places.append(sorted({parameter.device.type for parameter in model.parameters()}))
        model.model.layers[0].mlp.register_forward_hook(lambda *parts: computed.append(str(parts[2].dtype)))
        return model

    with patch("pycil_wsc.llm.training.load_model", load):
        training = Training(config, corpus.tokenizer, Processes(timeout_minutes=1), torch.device("cpu"))
    epoch = corpus.epochs(config, 0)[0]
    training.begin_task(0, [epoch])
    loss = training.placing.processes.sum_(training.step(epoch.examples[:8])).item()
    state = training.optimizer.state_dict()["state"][0]
    kept = {str(tensor.dtype) for tensor in (*training.parameters.values(), state["exp_avg"], state["exp_avg_sq"])}
    return {"places": places, "kept": sorted(kept), "computed": sorted(set(computed)), "loss": loss}


def test_of_a_sharded_model_one_process_alone_reads_the_weights_and_bf16_is_for_computing_alone(llm_settings):
    changes = {"precision": "bf16"}
    one = sharded_in_bf16(llm_settings | changes)
    parts = in_two_processes(sharded_in_bf16, llm_settings | changes | {"llm.shard": True})
    assert [part.pop("places") for part in parts] == [[["cpu"]], [["meta"]]]
    for part in parts:
        assert part["loss"] == pytest.approx(one["loss"], rel=2e-2)
        assert (part["kept"], part["computed"]) == (["torch.float32"], ["torch.bfloat16"])


def set_up_late(settings):
    """Set up a run, the first process five seconds after the other; returns what is raised."""
    run = Run(*configured(settings))

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


def test_weights_that_cannot_be_read_fail_their_run_in_all_processes_and_the_next_run_is_whole(llm_settings, tmp_path):
    sound, damaged = (saved_model(tmp_path / name, llm_settings) for name in ("sound", "damaged"))
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    short = {"llm.epochs": [1, 1], "llm.max_new_tokens": 1, "llm.shard": True}
    settings = llm_settings | short | {"llm.model": [str(damaged), str(sound)]}
    assert in_two_processes(commanded, "--config", write(tmp_path, settings)) == [1, 0]
    ((_, result),) = results(settings).items()
    assert result["config"]["llm.model"] == str(sound) and result["sharded"]


def test_answers_end_at_the_same_tokens_in_all_processes(llm_settings, tmp_path):
    """The others read no weights, but they do read the model's generation settings."""
    config, corpus = configured(llm_settings | {"llm.model": str(saved_model(tmp_path / "model", llm_settings))})
    first, other = (load_model(config, corpus.tokenizer, empty) for empty in (False, True))
    stop = {corpus.tokenizer.eos_token_id, 7}
    assert stop_tokens(first, corpus.tokenizer) == stop_tokens(other, corpus.tokenizer) == stop
    (tmp_path / "model" / "generation_config.json").unlink()
    assert stop_tokens(load_model(config, corpus.tokenizer, empty=True), corpus.tokenizer) < stop
