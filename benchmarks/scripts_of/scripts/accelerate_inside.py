"""A loop whose model computes the loss: accumulated, clipped, with a schedule, saved and loaded."""

# variants: plain accumulated resumed adapters
import peft
import torch
import transformers
from accelerate import Accelerator
from torch.utils.data import DataLoader

from scripts_of.parts import BATCH, PROCESSES, VARIANT, collate, folder, language, llama, report

accelerator = Accelerator(gradient_accumulation_steps=2 if VARIANT == "accumulated" else 1)
model = llama()
if VARIANT == "adapters":
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)
loader = DataLoader(language(40), batch_size=BATCH // PROCESSES, collate_fn=collate)
schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2 * PROCESSES, 12 * PROCESSES)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
losses, norms, rates = [], [], []


def epoch(number):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.7)
                norms.append(float(norm))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            rates.append(schedule.get_last_lr()[0])


epoch(0)
if VARIANT == "resumed":
    accelerator.save_state(f"{folder()}/state")
    epoch(1)
    accelerator.load_state(f"{folder()}/state")
epoch(1)
weights = accelerator.get_state_dict(model)
weights = weights if accelerator.is_main_process else {}
report(losses=losses, norms=norms, rates=rates, weights=weights)
