"""WSC whose average is also taken with other weights of the samples, in the same training.

    STUDY=results/studies/which_average
    OMP_NUM_THREADS=1 python $STUDY/powers.py --config $STUDY/config.json --workers 2

The k-th sample weighs about k ** p. After each task the network is tested with the average of each p; the next task
goes on from that of ``wsc.average_power``. So all p share their steps, and a difference between them is that of the
average.
"""

import copy
import sys
from pathlib import Path

from torch import nn
from typing_extensions import Unpack

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pycil_wsc.consolidation import Average, WeightSpaceConsolidation
from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.launch.command import main
from pycil_wsc.methods.consolidation.wsc import WSC, ConsolidatedPhase
from pycil_wsc.registry import register_learner
from pycil_wsc.state import State
from pycil_wsc.training.learner import Arguments
from pycil_wsc.training.phase import PhaseRun

POWERS = (0, 1, 3, 8, 32)
LAST = "last"  # the last weights, without an average


@register_learner("wsc_powers", epochs=70, milestones=[30, 50])
class WSCPowers(WSC):
    def __init__(self, *arguments: Unpack[Arguments]):
        super().__init__(*arguments)
        self.others: dict[str, WeightSpaceConsolidation] = {}  # averages of the current task, by the name of their p
        self.averaged: dict[str, nn.Module] = {}  # copies of the network with them, to be tested

    def begin_phase(self, task: Task, run: PhaseRun) -> None:
        super().begin_phase(task, run)
        if self.consolidation is None:
            return
        assert isinstance(self.consolidation, ConsolidatedPhase)
        for power in POWERS:
            average = Average(every=self.config.wsc.average_every, power=power)
            other = WeightSpaceConsolidation(
                self.network.named_parameters(),
                warmup_steps=self.consolidation.wsc.warmup_steps,
                reset=None,
                average=average,
            )
            self.others[f"power_{power}"] = other.attach(run.phase.optimizer)  # after the consolidation, which resets

    def end_task(self, task: Task) -> None:
        weights = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}
        self.averaged = {LAST: copy.deepcopy(self.network)}
        for name, other in self.others.items():
            with other.applied():
                self.averaged[name] = copy.deepcopy(self.network)
            other.detach()
        self.others = {}
        for network in self.averaged.values() if task.index else ():
            self.network.load_state_dict(network.state_dict())
            self.outputs.recompute_batch_norm(task)
            network.load_state_dict(self.network.state_dict())
        self.network.load_state_dict(weights)
        super().end_task(task)

    def also_tested(self) -> dict[str, nn.Module]:
        names = (LAST, *(f"power_{power}" for power in POWERS))
        return {name: self.averaged.get(name, self.network) for name in names}

    def get_extra_state(self) -> State:
        return super().get_extra_state() | {"others": {name: each.state_dict() for name, each in self.others.items()}}

    def set_extra_state(self, state: State) -> None:
        super().set_extra_state(state)
        for name, other in self.others.items():
            other.load_state_dict(state["others"][name])


if __name__ == "__main__":
    sys.exit(main())
