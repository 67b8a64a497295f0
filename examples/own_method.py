"""A method of your own: Replay with the focal loss (Lin et al., 2017), compared with Replay.

python examples/own_method.py --config exps/quickstart.json --set 'model_name=["replay","focal"]' --set prefix=focal

It takes the options of main.py. A checkpoint, a saved learner and the report know the method as any other.
"""

import sys
from dataclasses import dataclass

from torch.nn.functional import cross_entropy

from pycil_wsc.keys import key
from pycil_wsc.launch.command import main
from pycil_wsc.registry import register_learner
from pycil_wsc.training.learner import BaseLearner


@register_learner("focal", epochs=70, milestones=[30, 50])  # its defaults of keys that all methods share
class Focal(BaseLearner):
    @dataclass(frozen=True)
    class Options:
        gamma: float = key(2.0, "how much less an image counts that is recognised already", low=0)

    def loss(self, batch):
        logits = self.network(batch.images).float()  # (B, classes)
        errors = cross_entropy(logits, batch.targets, reduction="none")  # (B,)
        recognised = (-errors).exp()  # the probability of the true class
        return ((1 - recognised) ** self.config.options.gamma * errors).mean(), logits


if __name__ == "__main__":
    sys.exit(main())
