import numpy as np
import torch

from pycil_wsc.data.tasks.tasks import Task
from pycil_wsc.registry import register_analysis
from pycil_wsc.studies.observer import Observer, Record


@register_analysis("training_accuracy")
class TrainingAccuracy(Observer):
    """The accuracy in percent on a task's training data after training: whether the network fits them.

    The images are those of the task and the exemplars that it was trained with, without augmentation; the network is in
    evaluation mode, with the weights that are tested. ``all``: over all of them; ``new``: over the task's own images.
    The ``train_accuracy`` of a result is another number: that of the training steps, on augmented images, while the
    weights change.
    """

    @torch.no_grad()
    def task_trained(self, task: Task) -> Record:
        return {
            "all": self.accuracy(self.learner.batches.indices(task)),
            "new": self.accuracy(task.train_indices),
        }

    def accuracy(self, indices: np.ndarray) -> float:
        """Accuracy over all classes seen on these training samples, (n,); each process computes its share."""
        correct = 0
        for images, targets in self.shared_batches(indices):
            predicted = self.learner.predict(images).argmax(1)
            correct += int((predicted == targets).sum())
        total = self.learner.processes.sum(torch.tensor(correct, dtype=torch.float64))
        return 100 * total.item() / len(indices)
