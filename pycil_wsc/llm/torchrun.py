"""Several processes on one run: the first works on the sweep, the others follow it from run to run."""

import contextlib

from pycil_wsc.errors import UnusableRun
from pycil_wsc.llm.corpus import load_corpus
from pycil_wsc.llm.parallel import Processes
from pycil_wsc.llm.trainer import Run
from pycil_wsc.runs.run import TrainingDiverged

STOPPED = 130  # by Ctrl-C, in the middle of what the processes do together


def together(work):
    """Do ``work()`` in the first process that ``torchrun`` started, and each of its runs in all. Returns the exit code."""
    processes = Processes()
    if not processes.first:
        return follow(processes)
    code = work()
    if code != STOPPED:
        processes.tell(None)
    return code


def follow(processes):
    """Take part in each run that the first process tells of, until there are no more."""
    while config := processes.tell(None):
        with contextlib.suppress(TrainingDiverged, UnusableRun):  # the first process tells the user
            Run(config, load_corpus(config), lambda progress: None).execute()
    return 0
