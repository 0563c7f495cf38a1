"""A plain loop: more steps than calls may nest; nothing may grow by a call in each step."""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from scripts_of.parts import BATCH, PROCESSES, collate, language, llama, report

CALLS, STEPS, EVERY = 400, 450, 50
sys.setrecursionlimit(CALLS)
accelerator = Accelerator()
model = llama(hidden_size=16, intermediate_size=16, num_hidden_layers=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows = language(BATCH * STEPS // 10)
loader = DataLoader(rows, batch_size=BATCH // PROCESSES, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(10):
    for place, batch in enumerate(loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if place % EVERY == 0:
            counted = (batch["labels"][:, 1:] != -100).sum().float()
            both = accelerator.gather(torch.stack([loss.detach() * counted, counted])[None]).sum(0)
            losses.append((both[0] / both[1]).item())
report(losses=losses)
