"""WSC in the Hugging Face Trainer: a language model learns two tasks one after another.

pip install -e '.[hf]' && python examples/huggingface_trainer.py

The model is tiny and random, and so are the texts: put yours in their place.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from pycil_wsc.consolidation import Blend
from pycil_wsc.plugins.huggingface import WSCCallback


def rows(vocabulary, count=64, length=16):
    """Texts of some words: rows of a data set."""
    texts = torch.tensor(vocabulary)[torch.randint(len(vocabulary), (count, length))]
    return [{"input_ids": text, "labels": text} for text in texts]


if __name__ == "__main__":
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    first, second = rows(range(0, 12)), rows(range(8, 20))
    tasks = [first, second + first[:16]]  # new data and memory
    for number, dataset in enumerate(tasks):
        arguments = TrainingArguments(f"runs/task{number}", lr_scheduler_type="constant", report_to=[], use_cpu=True)
        # after a warm-up of fewer than 50 steps only Blend() resets; longer tasks need no `reset`
        callbacks = [WSCCallback(warmup=0.25, reset=Blend())] if number > 0 else []
        trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=callbacks)
        trainer.train()
        trainer.save_model()  # the average
        print(f"task {number + 1}: loss on the first task {trainer.evaluate(first)['eval_loss']:.3f}")
