"""Speech to text: Whisper, whose encoder is frozen in one variant."""

# variants: whole frozen generated
import torch
import transformers
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from scripts_of.parts import VARIANT, WORDS, arguments, collate, outcome, texts

transformers.set_seed(3)
config = transformers.WhisperConfig(
    vocab_size=WORDS, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
    max_source_positions=20, max_target_positions=24, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, decoder_start_token_id=3, dropout=0.0, suppress_tokens=None,
    begin_suppress_tokens=None,
)  # fmt: skip
model = transformers.WhisperForConditionalGeneration(config)
if VARIANT == "frozen":
    model.freeze_encoder()
sounds = torch.randn(26, 8, 40, generator=torch.Generator().manual_seed(2))
rows = [{"input_features": s, "labels": t} for s, t in zip(sounds, texts(26, most=9))]
args = arguments(
    Seq2SeqTrainingArguments,
    eval_strategy="steps",
    eval_steps=4,
    predict_with_generate=VARIANT == "generated",
    generation_max_length=6,
)
trainer = Seq2SeqTrainer(
    model=model, args=args, train_dataset=rows, eval_dataset=rows[:5], data_collator=collate
)
trainer.train()
more = {}
if VARIANT == "generated":
    more["predicted"] = trainer.predict(rows[:5]).predictions
outcome(trainer, **more)
