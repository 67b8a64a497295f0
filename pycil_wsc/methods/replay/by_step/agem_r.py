from dataclasses import dataclass, replace

import numpy as np
from typing_extensions import Unpack

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.keys import key
from pycil_wsc.methods.replay.by_step.agem import AGEM
from pycil_wsc.methods.replay.by_step.pixels import Pixels
from pycil_wsc.registry import register_learner
from pycil_wsc.training.batches import Batch
from pycil_wsc.training.learner import Arguments
from pycil_wsc.training.replay_plan import Draw


@register_learner("agem_r", epochs=70, milestones=[30, 50])
class AGEMR(AGEM):
    """A-GEM with a reservoir, as Mammoth has it.

    As there, the drawn images are neither augmented nor normalised, unlike those of the batch (``transformed``).
    """

    @dataclass(frozen=True)
    class Options:
        transformed: bool = key(
            False, "augment and normalise the drawn images; `false`: pixels on the 0..1 scale, as in Mammoth"
        )

    class Plan(AGEM.Plan):
        fills_by_step = True

        def draws(self, task: Task) -> tuple[Draw, ...]:
            return (Draw(augmented=self.config.options.transformed),)

        def presented(self, task: Task) -> np.ndarray:
            return super(AGEM.Plan, self).presented(task)

    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.pixels = Pixels(self.batches.source.info, self.device)

    def reference(self, drawn: Batch) -> Batch:
        return drawn if self.config.options.transformed else replace(drawn, images=self.pixels(drawn.images))

    def end_task(self, task: Task) -> None:
        super(AGEM, self).end_task(task)
