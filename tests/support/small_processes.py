"""Starts two connected processes like ``torchrun``, as forks of this one, which need import nothing."""

import contextlib
import gc
import multiprocessing
import os
import sys
import time
import traceback

import torch
from torch.distributed import TCPStore

FORK = multiprocessing.get_context("fork")


def in_two_processes(work, *arguments, seconds=300, check=True):
    """Run ``work(*arguments)`` in two connected processes; returns their results, in order.

    Processes that take longer than ``seconds`` are killed, and the test fails.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parent = [FORK.Pipe(duplex=False) for _ in range(2)]
    processes = [
        FORK.Process(target=_work, args=(rank, store.port, sender, work, arguments), daemon=True)
        for rank, (_, sender) in enumerate(parent)
    ]
    for process in processes:
        process.start()
    end, results = time.monotonic() + seconds, []
    for receiver, sender in parent:
        sender.close()
        answered = receiver.poll(max(0, end - time.monotonic()))
        with contextlib.suppress(EOFError):  # the process was killed
            results.append(receiver.recv() if answered else "hangs")
    for process in processes:
        process.join(max(0, end - time.monotonic()))
        process.kill()
    answers = [result for result in results if not isinstance(result, str)]
    assert not check or len(answers) == 2, f"{len(results)} of 2 processes answered:\n" + "\n".join(map(str, results))
    return results


def _work(rank, port, sender, work, arguments):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"TORCHELASTIC_RESTART_COUNT": "0"}
    torch.set_num_threads(1)
    gc.freeze()  # see the fixture `collected`
    if "accelerate" in sys.modules:  # what it has found out about this process as the only one
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    try:
        sender.send(work(*arguments))
    except BaseException:
        sender.send(traceback.format_exc())


def shard_on_the_processor():
    """accelerate shards on devices other than the processor alone; let it do so here too."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    made = AcceleratorState.__init__

    def make(self, *arguments, fsdp_plugin=None, **options):
        made(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    AcceleratorState.__init__ = make


def commanded(*arguments):
    """The exit code of ``main.py`` with these arguments. Its report has no figures."""
    from support.small_runs import main, undrawn

    with undrawn():
        return main(list(arguments))


def sharded(*arguments):
    """:func:`commanded` where accelerate shards on the processor too."""
    shard_on_the_processor()
    return commanded(*arguments)


def forked_unseen(sender, ending):
    """Fork a process that multiprocessing does not know, tell its number and wait; both end with ``ending``."""
    from pycil_wsc.launch.workers import end_with

    end_with(ending)
    child = os.fork()
    if child:
        sender.send(child)
    time.sleep(600)
