"""The same sequence of gradients gives the same weights in every host: a plain loop,
PyCIL's path and the Hugging Face callback.
"""

import pytest
import torch
from torch import nn

from pycil_wsc.consolidation import Average, Blend, WeightSpaceConsolidation, moment_score
from pycil_wsc.plugins import pycil

epochs = 8  # where a learner of PyCIL's has it
GRADIENTS = torch.randn(
    3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64
)  # the gradient of each step of an epoch
OPTIONS = dict(retain=0.3, importance=moment_score(), reset=Blend(0.4))


class Dictated(nn.Module):
    """Its gradient is the batch, regardless of its weights; it also computes the loss,
    as Trainer wants it.
    """

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 40, dtype=torch.float64))

    def forward(self, gradient):
        return {"loss": (self.weight * gradient).sum()}


def step_all(network, optimizer):
    for gradient in GRADIENTS:
        optimizer.zero_grad()
        network(gradient)["loss"].backward()
        optimizer.step()


def make_optimizer(network):
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)


def plain_loop(tmp_path):
    network = Dictated()
    optimizer = make_optimizer(network)
    wsc = WeightSpaceConsolidation(network.named_parameters(), warmup_steps=6, average=Average(every=3), **OPTIONS)
    wsc.attach(optimizer)
    for _ in range(epochs):
        step_all(network, optimizer)
    wsc.finish()
    return network


class Learner:
    """The part of PyCIL's learners that the plugin uses."""

    _cur_task, _known_classes, _total_classes, _device = 1, 2, 4, torch.device("cpu")

    def __init__(self):
        self._network = Dictated()

    def _update_representation(self, train_loader, test_loader, optimizer, scheduler):
        for _ in range(epochs):
            step_all(self._network, optimizer)
            scheduler.step()


def pycils_path(tmp_path):
    settings = pycil.PyCILOptions(retain=0.3, blend=0.4, average_every=1, average_lr=None)
    learner = Learner()
    learner.__class__ = pycil.consolidated(Learner, settings)
    optimizer = make_optimizer(learner._network)
    learner._update_representation(GRADIENTS, None, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
    return learner._network


def hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from pycil_wsc.plugins.huggingface import WSCCallback

    network = Dictated()
    optimizer = make_optimizer(network)
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=1,
        num_train_epochs=epochs,
        max_grad_norm=0,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        remove_unused_columns=False,
    )
    rows = [{"gradient": row} for row in GRADIENTS]
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    callback = WSCCallback(warmup=0.25, average=Average(every=3), **OPTIONS)
    trainer = transformers.Trainer(
        network, arguments, train_dataset=rows, optimizers=(optimizer, constant), callbacks=[callback]
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
    trainer.train()
    return network


@pytest.mark.parametrize("host", [pycils_path, hugging_face])
def test_the_same_gradients_give_the_same_weights_in_every_host(tmp_path, host):
    torch.testing.assert_close(host(tmp_path).weight, plain_loop(tmp_path).weight, rtol=0, atol=0)
    assert not torch.equal(plain_loop(tmp_path).weight, trained_without())


def trained_without():
    network = Dictated()
    optimizer = make_optimizer(network)
    for _ in range(epochs):
        step_all(network, optimizer)
    return network.weight
