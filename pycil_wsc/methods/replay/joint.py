from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.methods.replay.replay import Replay
from pycil_wsc.registry import register_learner


@register_learner("joint", epochs=200, milestones=[60, 120, 170], weight_decay=5e-4)
class Joint(Replay):
    """Full retraining: new initial weights before each task, trained with the first task's schedule."""

    class Plan(Replay.Plan):
        starts_anew = True

    def grow(self, task: Task) -> None:
        if task.index:
            self.network = self.build()
        super().grow(task)
