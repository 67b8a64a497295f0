"""Several processes on one run: the first works on the sweep, the others follow it from run to run."""

import sys
from collections.abc import Callable

from pycil_wsc.errors import UnusableRun, UserError
from pycil_wsc.llm.config import resolve
from pycil_wsc.llm.corpus import load_corpus
from pycil_wsc.llm.parallel import announcements, rank_and_count
from pycil_wsc.llm.trainer import Run
from pycil_wsc.runs.run import TrainingDiverged


def together(work: Callable[[], int]) -> int:
    """Call ``work()`` in ``torchrun``'s first process, and do each of its runs in all processes; the exit code."""
    rank, _ = rank_and_count()
    if rank:
        return follow()
    code = work()
    announcements().announce(None)
    return code


def follow() -> int:
    """Take part in each run that the first process announces, until there are no more. Returns the exit code."""
    rank, count = rank_and_count()
    for settings in announcements().listen():
        config = resolve(settings)
        try:
            Run(config, load_corpus(config), lambda progress: None).execute()
        except (TrainingDiverged, UnusableRun):  # of this run, in all processes: the first tells the user and goes on
            continue
        except UserError as error:
            print(f"error: process {rank + 1} of {count}: {error}", file=sys.stderr)
            return 2
    return 0
