"""A small network without blocks, of pairs in tuples; texts of each sample are gathered."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scripts_of.parts import BATCH, PROCESSES, pictures, report

torch.manual_seed(3)
accelerator = Accelerator()
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU(), nn.Flatten(),
    nn.Linear(72, 3),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
shown = pictures(26)
data = TensorDataset(shown, (shown.sum((1, 2, 3)) > 0).long())
loader = DataLoader(data, batch_size=BATCH // PROCESSES)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses, names = [], []
for _ in range(2):
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach().repeat(len(labels))).shape[0])
        names.extend(accelerator.gather_for_metrics([f"kind {n}" for n in labels.tolist()]))
weights = accelerator.get_state_dict(model)
weights = weights if accelerator.is_main_process else {}
report(samples=losses, names=names, weights=weights)
