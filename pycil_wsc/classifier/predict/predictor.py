"""The network that a learner predicts with, apart from the learner."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from pycil_wsc.classifier.predict.familiarity import Familiarity
from pycil_wsc.networks.closed_form_nets import ComputedHead
from pycil_wsc.training.learner import BaseLearner


class Model(nn.Module):
    """The network of a learner: (B, 3, side, side) normalised float images -> (B, classes) float32 logits.

    It has the weights of the learner, which predicts with them too, without the sums that :func:`for_prediction` drops.
    ``classes``: the name of each column of the logits. :class:`~pycil_wsc.classifier.predict.images.Transform` makes
    its images. It is in evaluation mode, and computes in the precision of its weights, as ``predict`` of a learner does
    unless ``precision`` is ``"bf16"``.
    """

    def __init__(self, learner: BaseLearner, classes: Sequence[str]) -> None:
        super().__init__()
        self.network = predictor(learner)
        self.classes = list(classes)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        return self.network.classify(self.network.extract(images)).float()


class FamiliarityModel(nn.Module):
    """A :class:`Model` that also tells how familiar images are: -> its logits, and (B,) float32.

    ``known``: the measure of it.
    """

    def __init__(self, model: Model, known: Familiarity) -> None:
        super().__init__()
        self.model = model
        self.known = known
        self.eval()

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.model.network.extract(images)
        return self.model.network.classify(features).float(), self.known(features.float())


def for_prediction(learner: BaseLearner) -> BaseLearner:
    """``learner`` without the sums that a computed classifier needs only to learn more."""
    for module in list(learner.modules()):
        if isinstance(module, ComputedHead):
            module.for_prediction()
    return learner


class Predictor(Protocol):
    """A module that predicts."""

    def extract(self, images: Tensor) -> Tensor: ...

    def classify(self, features: Tensor) -> Tensor: ...


def predictor(learner: BaseLearner) -> Predictor:
    """The module whose ``extract`` and ``classify`` predict: the network, or the learner if it has its own ones."""
    methods = (getattr(type(learner), name) for name in ("extract", "classify"))
    inherited = all(method in (BaseLearner.extract, BaseLearner.classify) for method in methods)
    return learner.network if inherited else learner
