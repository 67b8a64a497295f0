"""The learner of a run: its method's class, consolidated if the run is."""

from typing_extensions import Unpack

from pycil_wsc import registry
from pycil_wsc.methods.closed_form.closed_form import ClosedForm
from pycil_wsc.methods.consolidation.wsc import consolidated
from pycil_wsc.networks.nets import Backbone
from pycil_wsc.training.learner import BaseLearner, Given
from pycil_wsc.training.learner_config import LearnerConfig


def configured_learner(config: LearnerConfig) -> type[BaseLearner]:
    """The learner's class of the run with this ``config``."""
    learner = registry.learners[config.model_name]
    return consolidated(learner) if config.consolidate else learner


def new_learner(config: LearnerConfig, *arguments: Unpack[Given], lent: Backbone | None = None) -> BaseLearner:
    """A new learner of the run with this ``config``; ``arguments``: the others of its constructor.

    ``lent``: the backbone of another learner, which a method that leaves it as it is may use
    (:class:`~pycil_wsc.methods.closed_form.closed_form.ClosedForm`).
    """
    learner = configured_learner(config)
    if lent is None:
        return learner(config, *arguments)
    assert issubclass(learner, ClosedForm)
    return learner(config, *arguments, lent=lent)
