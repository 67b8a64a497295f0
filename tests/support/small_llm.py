"""Helpers for tests of language models: two tasks that a tiny Llama learns in seconds."""

import json

from pycil_wsc.config.loading import resolve

COLOURS = ["red", "blue", "green"]


def write_tasks(root):
    """Tasks ``colours`` and ``shapes``, and a pool, below ``root``: a letter for each colour,
    and another in the other task.
    """
    nouns = ["ball", "box", "hat", "cup", "car", "pen", "key", "bag"]
    for name, letters in (("colours", "ABC"), ("shapes", "BCA")):
        rows = [
            {"prompt": f"A {word} {noun} in the {name}. Which:", "answer": letter}
            for word, letter in zip(COLOURS, letters)
            for noun in nouns
        ]
        write_rows(root / name, rows, rows[::2])
    write_rows(root / "Lima", [{"prompt": f"Say {noun}.", "answer": f"{noun} {noun}"} for noun in nouns[:4]], [])


def write_rows(folder, train, test):
    folder.mkdir(parents=True)
    for split, rows in (("train", train), ("test", test)):
        (folder / f"{split}.json").write_text(json.dumps(rows))


def small_settings(folder):
    """Two tasks, a schedule of a second."""
    write_tasks(folder / "data" / "small")
    return {
        "data_root": str(folder / "data"),
        "out": str(folder / "runs"),
        "device": "cpu",
        "precision": "fp32",
        "llm.model": "tiny-llama",
        "llm.vocab_size": 300,
        "llm.hidden_size": 32,
        "llm.mlp_size": 64,
        "llm.data": "small",
        "llm.tasks": ["colours", "shapes"],
        "llm.epochs": [2, 2],
        "llm.method": "replay",
        "llm.replay_ratio": 0.5,
        "llm.batch_size": 8,
        "llm.lr": 0.005,
        "llm.max_new_tokens": 4,
    }


def configured(settings, **changes):
    """(configuration, corpus) of the settings; ``changes`` are keys, ``__`` for the dot."""
    from pycil_wsc.llm.corpus import Corpus  # an extra

    config = resolve(settings | {name.replace("__", "."): value for name, value in changes.items()})
    return config, Corpus(config)


def watched(settings, **changes):
    """A run that is over, with the ``weights`` before each of its steps, ``stepped`` after each of them, ``tested``
    after each task, and ``last``: flat tensors. It generates no answers.
    """
    from transformers import TrainerCallback  # an extra

    from pycil_wsc.llm.trainer import LanguageRun

    class Watch(TrainerCallback):
        def __init__(self, run):
            self.run = run

        def on_step_begin(self, args, state, control, model=None, **others):
            self.run.weights.append(flat(model))

        def on_optimizer_step(self, args, state, control, model=None, **others):
            self.run.stepped.append(flat(model))

    class Watched(LanguageRun):
        def _set_up(self):
            super()._set_up()
            self.weights, self.stepped, self.tested = [], [], []
            self.trainer.add_callback(Watch(self))

        def _answers(self, index, number):
            if number == index:
                self.tested.append(flat(self.trainer.model))
            return ["" for _ in self.corpus.tasks[number].test]

    run = Watched(*configured(settings, **changes))
    run.execute()
    run.last = flat(run.trainer.model)
    return run


def flat(model):
    """The trained weights as one tensor."""
    import torch

    return torch.cat([parameter.detach().flatten() for parameter in model.parameters() if parameter.requires_grad])
