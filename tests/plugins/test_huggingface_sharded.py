"""The Hugging Face callback in two processes, with copies of the model (DDP) and with its parts (FSDP2): as in one."""

import json
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from support.small_processes import in_two_processes, shard_on_the_processor  # noqa: E402

from pycil_wsc.consolidation import Average  # noqa: E402
from pycil_wsc.plugins.huggingface import WSCCallback  # noqa: E402

pytestmark = pytest.mark.usefixtures("collected")
COPIES = {}
PARTS = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}


def tiny_model():
    torch.manual_seed(0)
    sizes = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, vocab_size=14)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=True, **sizes))


def train(folder, batch_size, resume=None, **options):
    """Losses and weights of a task of ten steps, evaluated every four, saved every five, reset after the third."""
    rows = torch.randint(13, (40, 8), generator=torch.Generator().manual_seed(3))
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        max_steps=10,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=4,
        save_steps=5,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    callback = WSCCallback(warmup=0.3, average=Average(every=2), evaluate_average=True)
    trainer = transformers.Trainer(
        tiny_model(), arguments, train_dataset=dataset, eval_dataset=dataset[:8], callbacks=[callback]
    )
    trainer.train(resume_from_checkpoint=resume and str(Path(folder, resume)))
    trainer.save_model()
    parameters = dict(trainer.model.named_parameters())
    weights = {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in parameters.items()}
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    return {
        "losses": [*losses, trainer.evaluate()["eval_loss"]],
        "weights": {name: tensor.tolist() for name, tensor in weights.items()},
        "sharded": sorted(name for name, p in parameters.items() if hasattr(p, "full_tensor")),
    }


def in_a_process(folder, options):
    """Its results of the task, and of the same task resumed after the reset."""
    shard_on_the_processor()
    return [train(folder, 2, resume, **options) for resume in (None, "checkpoint-5")]


def saved(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def assert_close(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(torch.as_tensor(tensor), torch.as_tensor(right[name]), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [COPIES, PARTS], ids=["ddp", "fsdp2"])
def test_training_evaluation_and_what_is_saved_are_those_of_one_process(options, tmp_path):
    whole = train(tmp_path / "whole", 4)
    for through, resumed in in_two_processes(in_a_process, str(tmp_path / "parts"), options, seconds=170):
        assert through["sharded"] == (sorted(whole["weights"]) if options else [])
        for result in (through, resumed):
            assert result["losses"] == pytest.approx(whole["losses"], rel=1e-3)
            assert_close(result["weights"], whole["weights"])
    for folder in ("", "checkpoint-5/average", "checkpoint-10/average"):
        assert_close(saved(tmp_path / "parts" / folder), saved(tmp_path / "whole" / folder))
    assert json.loads((tmp_path / "parts" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
