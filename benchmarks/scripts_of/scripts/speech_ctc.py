"""Speech to letters: Wav2Vec2 with a frozen encoder of sound."""

# variants: mean sum
import random

import torch
import transformers
from torch.nn.functional import pad
from transformers import Trainer

from scripts_of.parts import SIZES, VARIANT, arguments, outcome

transformers.set_seed(3)
silent = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout")
config = transformers.Wav2Vec2Config(
    vocab_size=20, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), layerdrop=0.0,
    num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
    mask_time_prob=0.0, final_dropout=0.0, pad_token_id=0, ctc_zero_infinity=True,
    ctc_loss_reduction=VARIANT, **SIZES, **dict.fromkeys(silent, 0.0),
)  # fmt: skip
model = transformers.Wav2Vec2ForCTC(config)
model.freeze_feature_encoder()
draw, values = random.Random(2), torch.Generator().manual_seed(2)
rows = [
    (torch.randn(600 + 40 * draw.randrange(7), generator=values), draw.choices(range(1, 20), k=k))
    for k in (draw.randint(3, 6) for _ in range(26))
]


def collate(batch):
    longest, most = (max(len(row[n]) for row in batch) for n in (0, 1))
    sounds = [pad(sound, (0, longest - len(sound))) for sound, _ in batch]
    masks = [pad(torch.ones(len(s), dtype=torch.long), (0, longest - len(s))) for s, _ in batch]
    letters = [[*said, *[-100] * (most - len(said))] for _, said in batch]
    return {
        "input_values": torch.stack(sounds),
        "attention_mask": torch.stack(masks),
        "labels": torch.tensor(letters),
    }


trainer = Trainer(
    model=model,
    args=arguments(learning_rate=1e-3, remove_unused_columns=False),
    train_dataset=rows,
    eval_dataset=rows[:7],
    data_collator=collate,
)
trainer.train()
outcome(trainer, evaluated=trainer.evaluate()["eval_loss"])
