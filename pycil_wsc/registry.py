"""Registries of learners, backbones and data sets: a name in the JSON becomes an object here.

A leaf: it imports nothing of ours but the error type. What registers itself does so with a decorator where it is defined::

    @register_learner("replay", epochs=70, milestones=[30, 50])
    class Replay(BaseLearner): ...
"""

from pycil_wsc.errors import UserError, did_you_mean


class Registry(dict):
    """A dict whose look-up failure is a :class:`UserError` that names the nearest known key."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def __missing__(self, name):
        raise UserError(f"unknown {self.kind} '{name}'{did_you_mean(name, self)}")

    def add(self, name, entry):
        if name in self:
            raise ValueError(f"{self.kind} '{name}' is registered twice")
        self[name] = entry
        return entry


learners = Registry("model_name")
learner_defaults = Registry("model_name")
backbones = Registry("convnet_type")
datasets = Registry("dataset")
importances = Registry("wsc.importance")
analyses = Registry("analysis")


def register_learner(name, **defaults):
    """Register a learner class under ``name``, with the values its configuration keys have when the JSON is silent.

    A default for a key that ``Config`` does not know declares an option of this learner alone: it is read from the JSON
    like any other key, checked against the default's type, and found in ``config.options``.
    """

    def decorate(cls):
        learner_defaults.add(name, defaults)
        return learners.add(name, cls)

    return decorate


def register_backbone(name):
    """Register ``build(**keywords) -> nn.Module`` whose output is a batch of features and which has ``out_dim``."""
    return lambda build: backbones.add(name, build)


def register_dataset(name):
    """Register ``load(root) -> Dataset``, where ``root`` is the ``data_root`` of the configuration."""
    return lambda load: datasets.add(name, load)


def register_importance(name):
    """Register ``score(network, params, previous, batches, options) -> {name: scores}``, what ``wsc.importance`` ranks weights by.

    ``network`` is in evaluation mode and gives logits; ``params`` and ``previous`` are {name: tensor}, the weights to rank now and
    before the task; ``batches`` the task's training data with the memory, a list-like of (images, targets) without augmentation;
    ``options`` the keys ``wsc.*``. The higher a score, the rather the element is kept.
    """
    return lambda score: importances.add(name, score)


def register_analysis(name):
    """Register a class like :class:`pycil_wsc.analysis.observer.Observer`, which a run has where ``analyse`` has its name."""
    return lambda observer: analyses.add(name, observer)
