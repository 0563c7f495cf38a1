"""Where things are in a picture: YOLOS; a picture's labels are a dictionary."""

import torch
import transformers
from transformers import Trainer

from scripts_of.parts import NO_DROPOUT, SIZES, arguments, outcome, pictures

transformers.set_seed(3)
config = transformers.YolosConfig(
    image_size=[16, 16], patch_size=4, num_detection_tokens=5, num_labels=3, **SIZES, **NO_DROPOUT
)
draw = torch.Generator().manual_seed(4)


def things(number):
    places = torch.rand(number, 4, generator=draw) * 0.4 + 0.1
    kinds = torch.randint(0, 3, (number,), generator=draw)
    return {"class_labels": kinds, "boxes": places}


rows = [{"pixel_values": p, "labels": things(1 + n % 3)} for n, p in enumerate(pictures(26))]


def collate(batch):
    stacked = torch.stack([row["pixel_values"] for row in batch])
    return {"pixel_values": stacked, "labels": [row["labels"] for row in batch]}


trainer = Trainer(
    model=transformers.YolosForObjectDetection(config),
    args=arguments(remove_unused_columns=False),
    train_dataset=rows,
    data_collator=collate,
)
trainer.train()
outcome(trainer)
