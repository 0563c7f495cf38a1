"""Pictures and text: LLaVA, where one of three samples has no picture in one variant."""

# variants: all some
import torch
import transformers
from transformers import Trainer

from scripts_of.parts import SIZES, VARIANT, WORDS, arguments, collate, outcome, pictures, texts

transformers.set_seed(3)
picture = 96
config = transformers.LlavaConfig(
    text_config=transformers.LlamaConfig(vocab_size=WORDS, pad_token_id=0, **SIZES),
    vision_config=transformers.CLIPVisionConfig(
        **SIZES, image_size=16, patch_size=8, projection_dim=32
    ),
    image_token_index=picture,
    image_seq_length=4,
    vision_feature_layer=-1,
)
model = transformers.LlavaForConditionalGeneration(config)
rows = []
for n, (pixels, text) in enumerate(zip(pictures(26), texts(26))):
    words = [min(word, 90) for word in text]
    shown = VARIANT == "all" or n % 3
    tokens = [picture] * 4 * bool(shown) + words
    labels = [-100] * 4 * bool(shown) + words
    mask = [1] * len(tokens)
    row = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    rows.append(row | ({"pixel_values": pixels} if shown else {}))


def with_pictures(batch):
    seen = [row["pixel_values"] for row in batch if "pixel_values" in row]
    made = collate([{k: v for k, v in row.items() if k != "pixel_values"} for row in batch])
    return made | ({"pixel_values": torch.stack(seen)} if seen else {})


trainer = Trainer(
    model=model,
    args=arguments(remove_unused_columns=False),
    train_dataset=rows,
    eval_dataset=rows[:7],
    data_collator=with_pictures,
)
trainer.train()
outcome(trainer, evaluated=trainer.evaluate()["eval_loss"])
