"""`gpumix init`: a first job that runs, or a first script that trains LoRA adapters.

Five questions on a terminal, or their options; what is neither asked nor given has a default.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpumix.cli.common import Json, print_result, refuse_names_of_cards
from gpumix.schema.errors import InputError, format_install_command

if TYPE_CHECKING:
    from gpumix.hardware.estimates.decoder_shapes import Decoder

BYTES_VOCABULARY = 264  # 256 bytes, the end of a text, rounded up
SCRATCH_MODEL = "20M"
SCRATCH = {"sequence_length": 256, "global_batch_size": 32, "max_steps": 200}
TUNING = {"sequence_length": 1024, "global_batch_size": 16, "max_steps": 200}
LORA_RANK = 16
SCRIPT = '''\
"""LoRA on a pretrained model, by gpumix: start it with `gpumix launch`."""

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from gpumix.integrations.trl import SFTTrainer

WEIGHTS = {weights!r}
DATA = {data!r}


def texts() -> Dataset:
    return Dataset.from_text(DATA, sample_by="paragraph", keep_in_memory=True)


trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype="auto"),
    args=SFTConfig(
        output_dir={output!r},
        max_steps={max_steps},
        per_device_train_batch_size={global_batch_size},  # times the number of GPUs: a step
        max_length={sequence_length},
        learning_rate=2e-4,
        logging_steps=10,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    ),
    train_dataset=texts(),
    processing_class=AutoTokenizer.from_pretrained(WEIGHTS),
    peft_config=LoraConfig(r={rank}, target_modules="all-linear"),
)
trainer.train()
trainer.save_model()
'''


@dataclass(frozen=True)
class Answers:
    """Answers to the five questions.

    Attributes:
        model: a folder of weights, or a size, name or config.json of a model to train from scratch.
        data: text files, or a folder of them.
        cluster: `auto`, or a cluster file.
        lora: whether adapters are trained, and not the whole model.
        output: folder of the run.
    """

    model: str
    data: Path
    cluster: str
    lora: bool
    output: Path

    @property
    def weights(self) -> Path | None:
        """Folder of pretrained weights, if the model is one."""
        return _find_weights(self.model)


def init(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Written here; job.yaml, or train.py with LoRA."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="A folder with config.json and weights to fine-tune; or a size such as 20M, "
            "llama-3.2-1b, a config.json to train from scratch.",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Text files: one, or a folder of them.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="A cluster file; default: the GPUs found here.")
    ] = None,
    lora: Annotated[
        bool | None, typer.Option("--lora/--full", help="Train adapters, or the whole model.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Folder of the run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a first job that runs: five questions, or their options.

    Example: gpumix init --data my-texts/
    Example: gpumix init --model my-llama/ --data my-texts/ --lora
    """
    asks = sys.stdin.isatty() and sys.stderr.isatty() and not as_json
    asked = "Model (folder of weights, or a size)"
    named = _answer(model, asked, SCRATCH_MODEL, asks=asks, check=_check_model)
    asked = "Text file, or folder of text files"
    text = None if data is None else str(data)
    texts = _answer(text, asked, "", asks=asks, check=_check_data)
    asked = "GPUs (auto, or a cluster file)"
    devices = _answer(cluster, asked, "auto", asks=asks, check=_check_cluster)
    if lora is None:
        lora = (
            asks
            and _find_weights(named) is not None
            and typer.confirm("Train LoRA adapters only?", default=False, err=True)
        )
    wanted = None if output is None else str(output)
    folder = _answer(wanted, "Folder of the run", "runs/first", asks=asks)
    found = Answers(named, Path(texts), devices, lora, Path(folder))
    path = file or Path("train.py" if found.lora else "job.yaml")
    if path.exists():
        raise InputError(
            "this file is there already",
            code="file-exists",
            where=str(path),
            fix="name another: gpumix init FILE",
        )
    written = _script(found) if found.lora else _job(found)
    from gpumix.schema.files import write_text_atomically

    write_text_atomically(path, written)
    there = "" if found.cluster == "auto" else f" --cluster {quote(found.cluster)}"
    word = quote(str(path))
    then = f"gpumix launch{there} {word}" if found.lora else f"gpumix train {word}"
    ask = [format_install_command("trl", "peft")] if found.lora else [f"gpumix plan {word}"]
    commands = [*ask, then, f"gpumix report {quote(str(found.output))}"]
    told = "\n".join([f"Wrote {path}. Next:", *(f"  {command}" for command in commands)])
    print_result(lambda: {"file": str(path), "next": commands}, lambda: told, as_json)


def _answer(
    given: str | None,
    question: str,
    default: str,
    *,
    asks: bool,
    check: Callable[[str], None] = lambda text: None,
) -> str:
    """Return what is given, or the default where nobody can be asked, or an answer; a wrong answer
    is asked for again."""
    if given is not None or not asks:
        answer = default if given is None else given
        check(answer)
        return answer
    from gpumix.train.console.terminal import print_error

    while True:
        answer = str(typer.prompt(question, default=default or None, err=True))
        try:
            check(answer)
        except InputError as error:
            print_error(str(error))
        else:
            return answer


def _find_weights(model: str) -> Path | None:
    """Return the folder of pretrained weights, if the model is one."""
    folder = Path(model)
    return folder if folder.is_dir() and (folder / "config.json").is_file() else None


def _check_model(model: str) -> None:
    folder = _find_weights(model)
    if folder is None:
        _config(model)
        return
    for name in ("tokenizer.json", "*.safetensors"):
        if not any(folder.glob(name)):
            raise InputError(
                f"this folder has a config.json, and no {name}",
                code="model-folder-incomplete",
                where=f"--model: {folder}",
                fix="give a folder of save_pretrained; or a size, to train from scratch",
            )


def _check_data(data: str) -> None:
    path = Path(data)
    if path == Path():
        raise InputError(
            "nothing says what to train on",
            code="data-not-named",
            where="--data",
            fix="give --data FOLDER with text files, or a text file",
        )
    if not path.exists():
        raise InputError(
            "there is no such file or folder",
            code="data-path-missing",
            where=f"--data: {path}",
            fix="correct the path",
        )
    if path.is_dir() and not any(one.is_file() for one in path.rglob("*")):
        raise InputError(
            "there are no files to train on",
            code="data-path-empty",
            where=f"--data: {path}",
            fix="put text files there, or give another folder",
        )


def _check_cluster(cluster: str) -> None:
    if cluster == "auto":
        return
    refuse_names_of_cards(cluster)
    if not Path(cluster).is_file():
        raise InputError(
            "there is no such cluster file",
            code="cluster-file-missing",
            where=f"--cluster: {cluster}",
            fix="give a cluster file, or auto for the GPUs of this host",
        )


def _job(found: Answers) -> str:
    import yaml

    weights = found.weights
    model: dict[str, Any]
    if weights is None:
        model, sizes = {"config": _config(found.model)}, SCRATCH
    else:
        model = {"config": str(weights / "config.json"), "weights": str(weights)}
        sizes = TUNING
    rate = 3e-4 if weights is None else 2e-5
    job = {
        "model": model,
        "data": {"text": [str(found.data)], "validation_split": 0.02},
        **sizes,
        "optimizer": {"name": "adamw", "lr": rate},
        "lr_scheduler": {"warmup_steps": 20},
        "eval_steps": 50,
        "cluster": found.cluster,
        "output_dir": str(found.output),
    }
    return yaml.safe_dump(job, sort_keys=False)


def _config(text: str) -> dict[str, Any]:
    """Return the configuration of a model that reads bytes, of the size that `text` names."""
    from gpumix.hardware.estimates.decoder_shapes import make_llama_like
    from gpumix.hardware.estimates.known_models import find_decoder, parse_size

    size = parse_size(text)
    shape = find_decoder(text).shape if size is None else make_llama_like(size, BYTES_VOCABULARY)
    return _as_llama(shape)


def _as_llama(shape: Decoder) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.feed_forward,
        "vocab_size": BYTES_VOCABULARY,
        "bos_token_id": 256,
        "eos_token_id": 256,
    }


def _script(found: Answers) -> str:
    if found.weights is None:
        raise InputError(
            "adapters need pretrained weights",
            code="adapters-without-pretrained",
            where=f"--model: {found.model}",
            fix="give the folder of a model, with its config.json: --model my-llama/",
        )
    texts = [found.data] if found.data.is_file() else sorted(found.data.rglob("*.txt"))
    if not texts:
        raise InputError(
            "there are no .txt files",
            code="no-text-files",
            where=f"--data: {found.data}",
            fix="give a text file, or a folder of .txt files",
        )
    return SCRIPT.format(
        weights=str(found.weights),
        data=[str(text) for text in texts],
        output=str(found.output),
        rank=LORA_RANK,
        **TUNING,
    )
