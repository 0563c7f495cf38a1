"""BERT as it was pre-trained: masked words, and whether a sentence follows; or only the latter."""

# variants: PreTraining NextSentencePrediction
from transformers import Trainer

from scripts_of.parts import VARIANT, arguments, bert, collate, labelled, outcome

rows = labelled(lambda text: [word if n % 3 == 0 else -100 for n, word in enumerate(text)])
for row in rows:
    after = sum(row["input_ids"]) % 2
    row |= {"labels": after} if VARIANT.startswith("Next") else {"next_sentence_label": after}
trainer = Trainer(model=bert(VARIANT), args=arguments(), train_dataset=rows, data_collator=collate)
trainer.train()
outcome(trainer)
