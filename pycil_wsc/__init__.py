"""A toolbox for continual learning with abundant memory, built around Weight Space Consolidation.

Importing the package does not import its modules, so that ``pycil_wsc.consolidation`` can be used in any code base.
``pycil_wsc.load`` and ``pycil_wsc.Learner`` (from ``pycil_wsc.classifier``) are imported on first use.
"""

from typing import Any

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name == "load":
        from pycil_wsc.classifier.inference import load

        return load
    if name == "Learner":
        from pycil_wsc.classifier.learner import Learner

        return Learner
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
