"""What tests of language models share: two tasks that a tiny Llama learns in seconds,
and two processes to learn them.
"""

import contextlib
import json
import multiprocessing
import os
import time
import traceback

import torch
from torch.distributed import TCPStore

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
    from pycil_wsc.llm.corpus import load_corpus  # an extra

    config = resolve(settings | {name.replace("__", "."): value for name, value in changes.items()})
    return config, load_corpus(config)


# ---- two processes, as torchrun starts them, without waiting for its imports -----------------------------------------

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch.distributed.fsdp", "peft", "pycil_wsc.llm.torchrun", "pycil_wsc.runs.sweep"])


def in_two_processes(work, *arguments, seconds=60, check=True):
    """Let ``work(*arguments)`` run in two processes that find each other; returns what each returned, in their order.

    ``work`` is a function of a module. Processes that take longer than ``seconds`` are killed, and the test fails.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parent = [SERVER.Pipe(duplex=False) for _ in range(2)]
    processes = [
        SERVER.Process(target=_work, args=(rank, store.port, sender, work, arguments), daemon=True)
        for rank, (_, sender) in enumerate(parent)
    ]
    for process in processes:
        process.start()
    end, results = time.monotonic() + seconds, []
    for process, (receiver, sender) in zip(processes, parent):
        sender.close()
        answered = receiver.poll(max(0, end - time.monotonic()))
        with contextlib.suppress(EOFError):  # it was ended from outside
            results.append(receiver.recv() if answered else "hangs")
    for process in processes:
        process.join(max(0, end - time.monotonic()))
        process.kill()
    assert not check or all(not isinstance(result, str) for result in results), "\n".join(map(str, results))
    return results


def _work(rank, port, sender, work, arguments):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"TORCHELASTIC_RESTART_COUNT": "0"}
    torch.set_num_threads(1)
    try:
        sender.send(work(*arguments))
    except BaseException:
        sender.send(traceback.format_exc())


def commanded(*arguments):
    """The exit code of ``main.py`` with these arguments."""
    from main import main

    return main(list(arguments))
