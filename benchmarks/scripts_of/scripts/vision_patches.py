"""Qwen2-VL: the patches of all pictures of a batch lie in one tensor."""

import torch
import transformers
from transformers import Trainer

from scripts_of.parts import arguments, outcome

transformers.set_seed(3)
config = transformers.Qwen2VLConfig(
    text_config={
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    },
    vision_config={
        "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "mlp_ratio": 2,
    },
    image_token_id=90, vision_start_token_id=91, vision_end_token_id=92, video_token_id=93,
)  # fmt: skip
draw = torch.Generator().manual_seed(2)
rows = []
for n in range(26):
    wide = 1 + n % 2  # pictures of two sizes
    words = torch.randint(1, 89, (12,), generator=draw)
    words[1 : 3 + wide] = torch.tensor([91, *[90] * wide, 92])[: 2 + wide]
    patches = torch.randn(4 * wide, 3 * 2 * 16, generator=draw)
    rows.append({"input_ids": words, "patches": patches, "grid": [1, 2, 2 * wide]})


def collate(batch):
    words = torch.stack([row["input_ids"] for row in batch])
    return {
        "input_ids": words,
        "labels": words.clone(),
        "attention_mask": torch.ones_like(words),
        "pixel_values": torch.cat([row["patches"] for row in batch]),
        "image_grid_thw": torch.tensor([row["grid"] for row in batch]),
        "mm_token_type_ids": (words == 90).int(),
    }


trainer = Trainer(
    model=transformers.Qwen2VLForConditionalGeneration(config),
    args=arguments(remove_unused_columns=False),
    train_dataset=rows,
    eval_dataset=rows[:7],
    data_collator=collate,
)
trainer.train()
outcome(trainer, evaluated=trainer.evaluate()["eval_loss"])
