"""A short text for a long one: T5, with the loss alone, smoothed, or with what it generates."""

# variants: loss smoothed generated
import numpy as np
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from scripts_of.parts import VARIANT, arguments, collate, labelled, outcome, t5

rows = labelled(lambda text: text[: 2 + len(text) // 3])


def metrics(predicted):
    return {"words": int(np.maximum(predicted.predictions, 0).sum())}


def shifted(batch):
    """Adds decoder inputs, which label smoothing needs as the model then computes no loss."""
    made = collate(batch)
    if VARIANT == "smoothed":
        made["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(made["labels"])
    return made


model = t5()
args = arguments(
    Seq2SeqTrainingArguments,
    eval_strategy="steps",
    eval_steps=2,
    predict_with_generate=VARIANT == "generated",
    generation_max_length=7,
    generation_num_beams=2,
    label_smoothing_factor=0.1 if VARIANT == "smoothed" else 0.0,
)
trainer = Seq2SeqTrainer(
    model=model,
    args=args,
    train_dataset=rows,
    eval_dataset=rows[:9],
    data_collator=shifted,
    compute_metrics=metrics if VARIANT == "generated" else None,
)
trainer.train()
more = {}
if VARIANT == "generated":
    more["predicted"] = trainer.predict(rows[:5], max_length=6).predictions
outcome(trainer, **more)
