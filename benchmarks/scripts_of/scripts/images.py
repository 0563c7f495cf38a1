"""What a picture shows: a vision transformer, and a network of convolutions without batch norm."""

# variants: vit convnext resnet
import transformers
from transformers import Trainer

from scripts_of.parts import NO_DROPOUT, SIZES, VARIANT, arguments, outcome, pictures

transformers.set_seed(3)
if VARIANT == "vit":
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=16, patch_size=8, num_labels=3, **SIZES, **NO_DROPOUT)
    )
elif VARIANT == "convnext":
    model = transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(
            hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, num_labels=3, image_size=16
        )
    )
else:
    model = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], num_labels=3
        )
    )
rows = [{"pixel_values": p, "labels": int(p.sum() > 0)} for p in pictures(26)]
trainer = Trainer(model=model, args=arguments(), train_dataset=rows, eval_dataset=rows[:7])
trainer.train()
evaluated = trainer.evaluate()["eval_loss"]
outcome(trainer, evaluated=evaluated, predicted=trainer.predict(rows[:7]).predictions)
