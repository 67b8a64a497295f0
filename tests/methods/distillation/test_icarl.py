"""iCaRL with the paper's losses and class means, as Mammoth has it. PyCIL's loss: ``test_distilling.py``."""

import math

import numpy as np
import pytest
import torch
from support.methods import BATCH, TARGETS, after, grown
from support.small_runs import batch_of

from pycil_wsc.config.loading import resolve
from pycil_wsc.errors import UserError

SIGMOID = {"probabilities": "sigmoid", "convnet_type": "mlp", "convnet_options.side": 8}


def entropy(logit, wanted):
    right = 1 / (1 + math.exp(-logit))
    return -wanted * math.log(right) - (1 - wanted) * math.log(1 - right)


@pytest.mark.parametrize("tasks, known", [(1, 0), (2, 4)])
def test_the_loss_is_the_mean_binary_cross_entropy_with_the_teachers_outputs_for_old_classes(
    tasks, known, digits, tmp_path
):
    learner, _ = grown("icarl", tasks, digits, tmp_path, **SIGMOID)
    learner.eval()
    targets = TARGETS if known else TARGETS % 4
    loss, logits = learner.loss(batch_of(BATCH, targets))
    soft = learner.teacher(BATCH).tolist() if known else None
    terms = []
    for row, (own, target) in enumerate(zip(logits.tolist(), targets.tolist())):
        for label, logit in enumerate(own):
            wanted = float(label == target)
            if label < known:  # the label of an exemplar is not used
                wanted = 1 / (1 + math.exp(-soft[row][label]))
            terms.append(entropy(logit, wanted))
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)
    assert not learner.plan.plain_first_task, "its first task is its own"


def test_class_means_are_those_of_exemplars_and_their_mirror_images(digits, tmp_path):
    learner, tasks = after("icarl", 1, digits, tmp_path, **SIGMOID, mirrored_means=True)
    images = {label: learner.memory.classes[label] for label in range(4)}
    means = learner.class_means(4)
    network = learner.network.eval()
    for label, indices in images.items():
        shown, _ = next(learner.batches.source.batches(indices, learner.manager.train_targets, len(indices)))
        parts = []
        for view in (shown, shown.flip(3)):
            features = network.extract(view).detach().double().numpy()
            parts.append((features / np.linalg.norm(features, axis=1, keepdims=True)).mean(0))
        mean = (parts[0] + parts[1]) / 2
        assert means[label] == pytest.approx(mean / np.linalg.norm(mean), rel=1e-4, abs=1e-6)
    assert torch.equal(learner.extract(BATCH), network.extract(BATCH)), "answers are of the image itself"
    assert learner.plan.epoch_keys == ("epochs",) and tasks[1].index == 1


def test_label_smoothing_is_refused_where_it_has_no_part():
    with pytest.raises(UserError, match="^label_smoothing: has no part in the loss with probabilities 'sigmoid'"):
        resolve({"model_name": "icarl", "probabilities": "sigmoid", "label_smoothing": 0.1})
