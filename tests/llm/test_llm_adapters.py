"""LoRA: costs and saved folders."""

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
from safetensors.torch import load_file
from support.small_llm import configured
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pycil_wsc.errors import UserError
from pycil_wsc.llm.generation import answers, stops_alone
from pycil_wsc.llm.model import load_model
from pycil_wsc.llm.trainer import LanguageRun

CPU = torch.device("cpu")


def test_every_named_layer_has_an_adapter(llm_settings):
    config, corpus = configured(llm_settings, llm__lora_rank=2, llm__lora_targets="q_proj, v_proj")
    adapters = adapters_of(load_model(config, corpus.tokenizer))
    assert {name.split(".")[-4] for name in adapters} == {"q_proj", "v_proj"}
    config, corpus = configured(llm_settings, llm__lora_rank=2, llm__lora_targets="q_proj,v_prj")
    with pytest.raises(UserError, match="llm.lora_targets: no layer is called 'v_prj'"):
        load_model(config, corpus.tokenizer)


def test_what_is_frozen_costs_once(llm_settings):
    """Relative memory: a copy beside the model is one of the adapters alone."""
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
        stops_alone(model, corpus.tokenizer)
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


@pytest.mark.slow
def test_a_saved_model_with_adapters_needs_nothing_else(llm_settings, tmp_path):
    config, corpus = configured(llm_settings)
    load_model(config, corpus.tokenizer).save_pretrained(tmp_path / "model")
    corpus.tokenizer.save_pretrained(tmp_path / "model")
    changes = {"llm__model": str(tmp_path / "model"), "save_weights": True, "llm__lora_rank": 4, "llm__epochs": [8, 1]}
    config, corpus = configured(llm_settings, **changes)
    run = LanguageRun(config, corpus)
    run.execute()
    folder = run.folder / "models" / "after-2"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    stops_alone(model, tokenizer)
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert answers(model, tokenizer, corpus.test_prompts[0], config, CPU) == kept_answers(run)
    assert len(set(kept_answers(run))) > 1
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")
    stops_alone(adapted, tokenizer)
    assert answers(adapted, tokenizer, corpus.test_prompts[0], config, CPU) == kept_answers(run)


def test_the_tiny_model_is_saved_without_its_adapters(llm_settings):
    run = LanguageRun(*configured(llm_settings, save_weights=True, llm__lora_rank=2))
    run.execute()
    folder = run.folder / "models" / "after-2"
    assert (folder / "model.safetensors").exists() and not (folder / "adapter").exists()


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
