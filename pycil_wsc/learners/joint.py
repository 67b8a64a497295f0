from pycil_wsc.learners.replay import Replay
from pycil_wsc.registry import register_learner


@register_learner("joint", epochs=200, milestones=[60, 120, 170], weight_decay=5e-4)
class Joint(Replay):
    """Full retraining: fresh weights before each task, trained on its data and the memory with the first task's schedule."""

    def grow(self, task):
        if task.index:
            self.network = self.build()
        super().grow(task)
