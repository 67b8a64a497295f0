"""A toolbox for continual learning with abundant memory, built around Weight Space Consolidation.

Importing the package imports nothing else of it, so that ``pycil_wsc.consolidation`` fits into any code base.
``pycil_wsc.load`` (of ``pycil_wsc.runs.weights``) and ``pycil_wsc.Learner`` (of ``pycil_wsc.runs.learner``) are there
when they are asked for.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "load":
        from pycil_wsc.runs.weights import load

        return load
    if name == "Learner":
        from pycil_wsc.runs.learner import Learner

        return Learner
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
