"""A loop that computes its loss itself, a mean over samples, and gathers what it predicts."""

# plan: B
import torch
from accelerate import Accelerator
from torch.nn import functional
from torch.utils.data import DataLoader

from scripts_of.parts import BATCH, PROCESSES, bert, collate, labelled, report

accelerator = Accelerator()
model = bert("SequenceClassification", num_labels=3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
rows = labelled(lambda text: sum(text) % 3)
train = DataLoader(rows, batch_size=BATCH // PROCESSES, collate_fn=collate)
held_out = DataLoader(rows[:10], batch_size=6 // PROCESSES, collate_fn=collate)
model, optimizer, train, held_out = accelerator.prepare(model, optimizer, train, held_out)
losses, accuracy, predicted = [], [], []
for _ in range(2):
    model.train()
    for batch in train:
        labels = batch.pop("labels")
        logits = model(**batch).logits
        loss = functional.cross_entropy(logits, labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        each = functional.cross_entropy(logits, labels, reduction="none")
        losses.append(accelerator.gather_for_metrics(each).mean().item())
    model.eval()
    right, of = 0, 0
    for batch in held_out:
        labels = batch.pop("labels")
        with torch.no_grad():
            best = model(**batch).logits.argmax(-1)
        best, labels = accelerator.gather_for_metrics((best, labels))
        right, of = right + (best == labels).sum().item(), of + len(labels)
        predicted.extend(best.tolist())
    accuracy.append(right / of)
weights = accelerator.get_state_dict(model)
weights = weights if accelerator.is_main_process else {}
report(losses=losses, accuracy=accuracy, predicted=predicted, weights=weights)
