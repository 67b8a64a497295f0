"""LoRA: merging, costs and saved folders."""

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
from safetensors.torch import load_file
from small_llm import configured
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pycil_wsc.consolidation.merging import slerp
from pycil_wsc.errors import UserError
from pycil_wsc.llm.adapters import adapted_layers
from pycil_wsc.llm.generation import answers
from pycil_wsc.llm.merging import Merging, models_resident
from pycil_wsc.llm.model import load_model
from pycil_wsc.llm.trainer import LanguageRun

CPU = torch.device("cpu")


def dense(model):
    """{layer: the weight W with which it computes W x}."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    with torch.no_grad():
        return {name: layer(torch.eye(layer.in_features)).T for name, layer in layers.items()}


@torch.no_grad()
def randomise(model, seed):
    """New factors of the adapters, of full rank."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in (each for each in model.parameters() if each.requires_grad):
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)


def largest(one, two):
    return torch.where(two.abs() >= one.abs(), two, one)


OF_DENSE = {  # what each method makes of the start and the models after two tasks
    "avg_offline": lambda start, one, two: (one + two) / 2,
    "task_arithmetic": lambda start, one, two: start + 0.3 * ((one - start) + (two - start)),
    "magmax": lambda start, one, two: start + 0.5 * largest(one - start, two - start),
    "avg_online": lambda start, one, two: (one + two) / 2,
    "slerp": lambda start, one, two: slerp(one, two, 0.5),
}


@pytest.mark.parametrize("method", OF_DENSE)
def test_adapters_of_rank_8_are_merged_as_the_dense_updates_are(method, llm_settings):
    config, corpus = configured(llm_settings, llm__method=method, llm__lora_rank=8)
    model = load_model(config, corpus.tokenizer)
    merging, online, states = Merging(config, model), method in ("avg_online", "slerp"), [dense(model)]
    for task in range(2):
        randomise(model, seed=task)
        states.append(dense(model))
        merging.end_task()
        if not online:
            assert all(torch.equal(now, then) for now, then in zip(dense(model).values(), states[-1].values()))
    with merging.tested():
        tested = dense(model)
    for layer in tested:
        torch.testing.assert_close(tested[layer], OF_DENSE[method](*(state[layer] for state in states)))
    assert len(tested) == 14, "seven linear layers in each of two blocks"
    if online:  # the next task goes on from the merge
        assert all(torch.equal(dense(model)[layer], tested[layer]) for layer in tested)


def test_an_adapter_that_is_not_of_a_linear_layer_cannot_be_merged(llm_settings):
    changes = {"llm__lora_rank": 2, "llm__lora_targets": "embed_tokens"}
    config, corpus = configured(llm_settings, llm__method="magmax", **changes)
    with pytest.raises(UserError, match="llm.lora_targets: '.*model.embed_tokens' is not a linear layer"):
        Merging(config, load_model(config, corpus.tokenizer))


def test_a_merge_into_a_weight_that_another_layer_shares_is_refused(llm_settings):
    changes = {"llm__lora_rank": 2, "llm__lora_targets": "q_proj, lm_head"}
    config, corpus = configured(llm_settings, llm__method="magmax", **changes)
    with pytest.raises(UserError, match="lm_head' shares its weight with '.*model.embed_tokens.weight'"):
        Merging(config, load_model(config, corpus.tokenizer))


def test_every_named_layer_has_an_adapter(llm_settings):
    config, corpus = configured(llm_settings, llm__lora_rank=2, llm__lora_targets="q_proj, v_proj")
    layers = adapted_layers(load_model(config, corpus.tokenizer))
    assert {layer.split(".")[-1] for layer in layers} == {"q_proj", "v_proj"}
    config, corpus = configured(llm_settings, llm__lora_rank=2, llm__lora_targets="q_proj,v_prj")
    with pytest.raises(UserError, match="llm.lora_targets: no layer is called 'v_prj'"):
        load_model(config, corpus.tokenizer)


def test_what_is_frozen_costs_once(llm_settings):
    """Relative memory: a copy beside the model is one of the adapters alone; a running merge one of their layers."""
    expected = {
        "replay": (1, 1),
        "wsc": (1.2, 1.2),
        "slerp": (1.2, 1.5),
        "magmax": (1.8, 2.0),
        "avg_offline": (1.8, 1.5),
    }
    for method, (paper, streamed) in expected.items():
        residents = models_resident(method, 5, trained=0.2, merged=0.5)
        assert (residents.paper, residents.streamed) == pytest.approx((paper, streamed)), method
    config, corpus = configured(llm_settings, llm__method="wsc", llm__lora_rank=2)
    result = LanguageRun(config, corpus).execute()
    share = result["parameters_trained"] / result["parameters"]
    assert 0 < share < 0.2 and result["models_resident"] == pytest.approx(1 + share)
    assert result["relative_vram_minutes"] == pytest.approx(result["train_minutes"] * (1 + share))


class Casts(TorchDispatchMode):
    """Counts the casts of tensors of at least ``size`` elements, weights rather than activations."""

    def __init__(self, size):
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default and args[0].numel() >= self.size
        return func(*args, **(kwargs or {}))


def test_in_bf16_each_frozen_weight_is_cast_once_for_all_tokens_of_a_batch(llm_settings):
    counts, texts = [], []
    for tokens in (2, 12):
        config, corpus = configured(
            llm_settings, llm__lora_rank=2, llm__hidden_size=64, llm__mlp_size=256, llm__max_new_tokens=tokens
        )
        model = load_model(config, corpus.tokenizer).eval()
        with Casts(64 * 64) as casts, torch.autocast("cpu", torch.bfloat16):
            texts += answers(model, corpus.tokenizer, corpus.test_prompts[0][:1], config, CPU)
        counts.append(casts.count)
        assert {name for name, p in model.named_parameters() if p.requires_grad} == set(adapters_of(model))
    assert counts[0] == counts[1] > 10 and len(texts[1]) > len(texts[0])


def adapters_of(model):
    return [name for name, _ in model.named_parameters() if "lora_" in name]


def kept_answers(run, name="colours"):
    lines = (run.folder / "predictions" / "after-2" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["prediction"] for line in lines]


@pytest.mark.parametrize("method", ["replay", "slerp"])
def test_a_saved_model_with_adapters_needs_nothing_else(method, llm_settings):
    config, corpus = configured(
        llm_settings, llm__method=method, llm__lora_rank=4, save_weights=True, llm__epochs=[8, 1]
    )
    run = LanguageRun(config, corpus)
    run.execute()
    folder = run.folder / "models" / "after-2"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert answers(model, tokenizer, corpus.test_prompts[0], config, CPU) == kept_answers(run)
    assert len(set(kept_answers(run))) > 1
    if method == "slerp":
        assert not (folder / "adapter").exists(), "the adapter alone is not the merge"
        return
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")
    assert answers(adapted, tokenizer, corpus.test_prompts[0], config, CPU) == kept_answers(run)
    base = AutoModelForCausalLM.from_pretrained(run.folder / "models" / "base")
    start = load_model(configured(llm_settings)[0], corpus.tokenizer)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(base.parameters(), start.parameters(), strict=True))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_model_is_saved_in_its_own_type(rank, llm_settings, tmp_path):
    config, corpus = configured(llm_settings)
    load_model(config, corpus.tokenizer).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    corpus.tokenizer.save_pretrained(tmp_path / "model")
    changes = {"llm__model": str(tmp_path / "model"), "save_weights": True, "llm__lora_rank": rank}
    config, corpus = configured(llm_settings, **changes)
    run = LanguageRun(config, corpus)
    run.execute()
    folder = run.folder / "models" / "after-2"
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16} and "lm_head.weight" not in tensors
    assert AutoConfig.from_pretrained(folder).dtype == torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    if rank:
        options = json.loads((folder / "adapter" / "adapter_config.json").read_text())
        assert options["base_model_name_or_path"] == str((tmp_path / "model").resolve())
    else:
        state = run.trainer.model.state_dict()
        assert all(torch.equal(tensor, state[name].bfloat16()) for name, tensor in tensors.items())
