"""What each pixel shows: Segformer, whose head normalises over the batch; and one that does not."""

# variants: batchnorm layernorm
import torch
import transformers
from torch import nn
from transformers import Trainer

from scripts_of.parts import VARIANT, arguments, outcome, pictures

transformers.set_seed(3)
config = transformers.SegformerConfig(
    num_encoder_blocks=2, depths=[2, 2], sr_ratios=[2, 1], hidden_sizes=[16, 32],
    patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 2], mlp_ratios=[2, 2],
    decoder_hidden_size=16,
    num_labels=4, hidden_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0,
)  # fmt: skip
model = transformers.SegformerForSemanticSegmentation(config)
if VARIANT == "layernorm":
    model.decode_head.batch_norm = nn.GroupNorm(4, 16)
draw = torch.Generator().manual_seed(4)
rows = [
    {"pixel_values": p, "labels": torch.randint(0, 4, (32, 32), generator=draw)}
    for p in pictures(26, size=32)
]
rows[3]["labels"][:20] = 255  # not told
trainer = Trainer(model=model, args=arguments(), train_dataset=rows, eval_dataset=rows[:7])
trainer.train()
evaluated = trainer.evaluate()["eval_loss"]
outcome(trainer, evaluated=evaluated, predicted=trainer.predict(rows[:7]).predictions)
