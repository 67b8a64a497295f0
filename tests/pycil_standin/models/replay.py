from torch import optim

from models.base import BaseLearner

init_epoch = 4
epochs = 8
lrate = 0.1


class Replay(BaseLearner):
    def _train(self, train_loader, test_loader):
        optimizer = optim.SGD(self._network.parameters(), lr=lrate, momentum=0.9)
        scheduler = optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 6], gamma=0.1)
        train = self._init_train if self._cur_task == 0 else self._update_representation
        train(train_loader, test_loader, optimizer, scheduler)

    def _init_train(self, train_loader, test_loader, optimizer, scheduler):
        for _ in range(init_epoch):
            self._epoch(train_loader, optimizer, scheduler)

    def _update_representation(self, train_loader, test_loader, optimizer, scheduler):
        for _ in range(epochs):
            self._epoch(train_loader, optimizer, scheduler)
