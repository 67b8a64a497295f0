"""Scripts that run as in a new interpreter, in forks of this process, which need not import torch again."""

import os
import sys

from support.small_runs import ROOT, Command

TOP_LEVEL = ("pycil_wsc", "main", "utils", "convs", "models", "trainer")  # ours and PyCIL's


def printed(script, path, *arguments, cwd=ROOT, forgotten=()):
    """What ``script`` prints, saved at ``path``; no module of the project, nor of ``forgotten``, is imported yet."""
    path.write_text(script)

    def prepare():
        os.chdir(cwd)
        forget((*TOP_LEVEL, *forgotten))

    return Command(arguments, path, prepare).printed()


def forget(packages):
    """Import these packages anew when they are asked for."""
    for name in list(sys.modules):
        if name.partition(".")[0] in packages:
            del sys.modules[name]
