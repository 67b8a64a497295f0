"""A toolbox for continual learning with abundant memory, built around Weight Space Consolidation.

Importing the package does not import its modules, so that ``pycil_wsc.consolidation`` can be used in any code base.
Imported on first use are ``load``, ``load_exported``, ``Learner`` and ``Accept``, from ``pycil_wsc.classifier``, and
``UserError``, which invalid input raises, and ``TrainingDiverged``.
"""

from typing import TYPE_CHECKING

from pycil_wsc.version import __version__ as __version__

if TYPE_CHECKING:
    from pycil_wsc.classifier.export.folder import load_exported as load_exported
    from pycil_wsc.classifier.learner import Learner as Learner
    from pycil_wsc.classifier.predict.load import load as load
    from pycil_wsc.classifier.update.gate import Accept as Accept
    from pycil_wsc.errors import TrainingDiverged as TrainingDiverged
    from pycil_wsc.errors import UserError as UserError


def __getattr__(name: str) -> object:
    if name == "load":
        from pycil_wsc.classifier.predict.load import load

        return load
    if name == "load_exported":
        from pycil_wsc.classifier.export.folder import load_exported

        return load_exported
    if name == "Learner":
        from pycil_wsc.classifier.learner import Learner

        return Learner
    if name == "UserError":
        from pycil_wsc.errors import UserError

        return UserError
    if name == "TrainingDiverged":
        from pycil_wsc.errors import TrainingDiverged

        return TrainingDiverged
    if name == "Accept":
        from pycil_wsc.classifier.update.gate import Accept

        return Accept
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
