"""Weight Space Consolidation in a training loop of your own: python examples/wsc_in_a_loop.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from pycil_wsc.consolidation import WeightSpaceConsolidation, recompute_batch_norm

EPOCHS, MEMORY = 20, 20  # exemplars per class
torch.manual_seed(0)
images = torch.tensor(load_digits().images / 16, dtype=torch.float32).unsqueeze(1)
labels = torch.tensor(load_digits().target)
test = torch.arange(len(labels)) % 5 == 0
model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10))
memory = torch.empty(0, dtype=torch.int64)

for task, classes in enumerate(torch.arange(10).split(2)):
    new = (torch.isin(labels, classes) & ~test).nonzero().flatten()
    data = torch.cat([new, memory])
    batches = DataLoader(TensorDataset(images[data], labels[data]), 32, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    wsc = WeightSpaceConsolidation(model.named_parameters(), warmup_steps=EPOCHS * len(batches) // 4)
    if task > 0:  # before the first task the weights are random
        wsc.attach(optimizer)
    for _ in range(EPOCHS):
        for inputs, targets in batches:
            optimizer.zero_grad()
            cross_entropy(model(inputs)[:, : classes[-1] + 1], targets).backward()
            optimizer.step()
    if task > 0:
        wsc.finish()  # the average becomes the weights
        recompute_batch_norm(model, batches)
    memory = torch.cat([memory, *(new[labels[new] == label][:MEMORY] for label in classes)])
    seen = test & (labels <= classes[-1])
    right = model.eval()(images[seen]).argmax(1) == labels[seen]
    model.train()
    print(f"{classes[-1] + 1} classes: {100 * right.float().mean():.1f} %")
