from torch import optim

from models.base import BaseLearner
from utils.inc_net import BiasedNet

epochs = 8


class BiC(BaseLearner):
    net = BiasedNet

    def _train(self, train_loader, test_loader):
        head = [*self._network.convnet.parameters(), *self._network.fc.parameters()]
        groups = [{"params": head}, {"params": self._network.bias_layer.parameters(), "lr": 0}]
        self._stage(optim.SGD(groups, lr=0.1), train_loader, test_loader, "training")
        if self._cur_task:
            self._stage(
                optim.SGD(self._network.bias_layer.parameters(), lr=0.1), train_loader, test_loader, "bias_correction"
            )

    def _stage(self, optimizer, train_loader, test_loader, stage):
        scheduler = optim.lr_scheduler.MultiStepLR(optimizer, milestones=[6], gamma=0.1)
        self._run(train_loader, test_loader, optimizer, scheduler, stage=stage)

    def _run(self, train_loader, test_loader, optimizer, scheduler, stage):
        for _ in range(epochs):
            self._epoch(train_loader, optimizer, scheduler)
        print("end of", stage)
