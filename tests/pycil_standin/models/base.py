import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from utils.inc_net import IncrementalNet


class BaseLearner:
    net = IncrementalNet

    def __init__(self, args):
        self.args = args
        self._cur_task, self._known_classes, self._total_classes = -1, 0, 0
        self._memory_per_class = args["memory_per_class"]
        self._device, self._multiple_gpus = args["device"][0], args["device"]
        self._memory = None
        self._network = self.net(args, False)

    def incremental_train(self, data_manager):
        self._cur_task += 1
        self._total_classes = self._known_classes + data_manager.get_task_size(self._cur_task)
        self._network.update_fc(self._total_classes)
        new, seen = np.arange(self._known_classes, self._total_classes), np.arange(self._total_classes)
        train_dataset = data_manager.get_dataset(new, source="train", mode="train", appendent=self._memory)
        self.train_loader = DataLoader(train_dataset, batch_size=16, shuffle=True)
        self.test_loader = DataLoader(data_manager.get_dataset(seen, source="test", mode="test"), batch_size=16)
        self._train(self.train_loader, self.test_loader)
        self.seen_at_exemplars = sum(p.double().abs().sum().item() for p in self._network.parameters())
        first = [np.flatnonzero(train_dataset.targets == c)[: self._memory_per_class] for c in seen]
        self._memory = train_dataset.data[np.concatenate(first)], train_dataset.targets[np.concatenate(first)]

    def after_task(self):
        self._known_classes = self._total_classes

    @torch.no_grad()
    def eval_task(self):
        self._network.eval()
        right = [self._network(inputs)["logits"].argmax(1) == targets for _, inputs, targets in self.test_loader]
        return 100 * torch.cat(right).double().mean().item()

    def _epoch(self, train_loader, optimizer, scheduler):
        self._network.train()
        for _, inputs, targets in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(self._network(inputs.to(self._device))["logits"], targets).backward()
            optimizer.step()
        scheduler.step()
        print("rate", [group["lr"] for group in optimizer.param_groups])
