"""A mixture of experts, without the term that balances them, and with it."""

# variants: plain balanced
import transformers
from transformers import Trainer

from scripts_of.parts import SIZES, VARIANT, WORDS, arguments, collate, language, outcome

transformers.set_seed(3)
config = transformers.MixtralConfig(
    vocab_size=WORDS, num_key_value_heads=2, num_local_experts=4, pad_token_id=0,
    output_router_logits=VARIANT == "balanced", **SIZES,
)  # fmt: skip
trainer = Trainer(
    model=transformers.MixtralForCausalLM(config),
    args=arguments(),
    train_dataset=language(),
    data_collator=collate,
)
trainer.train()
outcome(trainer)
