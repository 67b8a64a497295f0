"""What L2P, DualPrompt and CODA-Prompt share: prompts by each image's own features."""

import pytest
import torch
from support.prompts import prompted, random_batch

from pycil_wsc.config.loading import resolve
from pycil_wsc.errors import UserError
from pycil_wsc.training.step.cost import Operations

pytest.importorskip("timm")


@pytest.mark.parametrize("name", ["l2p", "dualprompt", "coda_prompt"])
@torch.no_grad()
def test_a_prediction_does_not_depend_on_the_other_images_unless_asked_for(name, tmp_path):
    learner = prompted(name, tmp_path)
    images = random_batch(learner, count=9).images
    together = learner.predict(images)
    alone = torch.cat([learner.predict(image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    if name != "coda_prompt":
        voting = prompted(name, tmp_path, batchwise_test=True)
        assert (voting.predict(images) - alone).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["l2p", "dualprompt", "coda_prompt"])
def test_a_step_counts_the_query_pass_and_images_that_stay_the_same_are_asked_once(name, tmp_path):
    keys = {"prompt_param": [6, 4, 0]} if name == "coda_prompt" else {}  # the penalty's cost is one per batch
    learner = prompted(name, tmp_path, **keys)
    task, given = learner.manager.tasks[1], random_batch(learner)
    with Operations() as of_query:
        learner.network.queries(given.images)
    (phase,) = learner.phases(task)
    with Operations() as whole:
        learner.loss(given)
    keys |= {"padding": 0, "flip": False, "brightness": 0.0}
    asked_once = prompted(name, tmp_path, **keys)
    (phase,) = asked_once.phases(task)
    drawn = next(iter(asked_once.batches.of(phase, 1, 0, 0)))
    with Operations() as without:
        loss, _ = asked_once.loss(drawn)
    per_query = of_query.total / len(given)
    assert asked_once.spent.operations == pytest.approx(len(phase.indices) * per_query)
    saved = whole.total / len(given) - without.total / len(drawn)
    assert saved == pytest.approx(per_query)
    asked_once.query_table = None
    torch.testing.assert_close(asked_once.loss(drawn)[0], loss, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name, keys, says",
    [
        ("l2p", {"size": 4, "top_k": 5}, "top_k: 5 prompts cannot be chosen from 4; raise size"),
        ("coda_prompt", {"prompt_param": [100, 7, 0]}, r"prompt_param: is \[components, an even length"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(name, keys, says):
    with pytest.raises(UserError, match=f"^{says}"):
        resolve({"model_name": name} | keys)
