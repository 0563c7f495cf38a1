"""Small models and data sets in the place of those that tests take from the hub.

Models and their tokenizers are laid into a folder as `huggingface_hub` keeps what it has fetched;
`load_dataset` is replaced for the data sets that are made here, and asks the hub for others.
"""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What tests import, without need, that the library has no more.
GONE = {
    "transformers": {
        "transformers": (
            "GlueDataset", "GlueDataTrainingArguments", "DataCollatorForWholeWordMask",
        ),
    },
    "trl": {
        "trl.import_utils": ("is_joblib_available",),
        "trl.trainer.sft_trainer": (
            "_chunked_cross_entropy_loss", "_patch_chunked_ce_lm_head", "dft_loss",
        ),
    },
}  # fmt: skip
OF_TRL, REVISION = "trl-internal-testing", "0" * 40
# Models of TRL's tests by what follows `tiny-`; the name of their chat template, and what ends a
# message in it.
TINY = {
    "Qwen2ForCausalLM-2.5": ("qwen2_5", "<|im_end|>"),
    "Qwen3ForCausalLM": ("qwen3", "<|im_end|>"),
    "Qwen3MoeForCausalLM": ("qwen3", "<|im_end|>"),
    "LlamaForCausalLM-3": ("llama3", "<|eot_id|>"),
    "LlamaForCausalLM-3.1": ("llama3_1", "<|eot_id|>"),
    "LlamaForCausalLM-3.2": ("llama3_2", "<|eot_id|>"),
    "MistralForCausalLM-0.1": ("", "</s>"),
    "MistralForCausalLM-0.2": ("", "</s>"),
    "GPTNeoXForCausalLM": ("", "<|endoftext|>"),
    "GptOssForCausalLM": ("gptoss", "<|return|>"),
    "CohereForCausalLM": ("cohere", "<|END_OF_TURN_TOKEN|>"),
    "GemmaForCausalLM": ("gemma", "<end_of_turn>"),
    "Gemma2ForCausalLM": ("gemma", "<end_of_turn>"),
    "Phi3ForCausalLM": ("phi3", "<|end|>"),
    "Lfm2ForCausalLM": ("lfm2", "<|im_end|>"),
    "Glm4MoeForCausalLM": ("glm4moe", "<|endoftext|>"),
}
OTHERS = {
    "openai-community/gpt2": "GPT2LMHeadModel",
    "hf-internal-testing/tiny-random-LlamaForCausalLM": "LlamaForCausalLM",
    "bert-base-cased": "BertForSequenceClassification",
    "bert-base-uncased": "BertForSequenceClassification",
    "nickypro/tinyllama-15M": "LlamaForCausalLM",
}
SMALL: dict[str, Any] = {
    "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 32, "n_embd": 8, "n_head": 4, "n_layer": 2, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_routed_experts": 4, "head_dim": 8, "first_k_dense_replace": 1, "decoder_sparse_step": 1,
    "layer_types": None, "max_position_embeddings": 4096, "n_positions": 1024,
}  # fmt: skip
SENTENCES = [
    f"{whom} {does} better than {than}, {why}."
    for whom, does in (("Beautiful", "is"), ("Simple", "looks"), ("Flat code", "reads"))
    for than in ("ugly", "complicated", "nested")
    for why in ("as everyone says", "although rarely at first")
] + ["Now is better than never."]  # 19: so many has the data set of TRL


def provide(suite: str) -> None:
    """Before the tests are imported."""
    for module, names in GONE.get(suite, {}).items():
        library = importlib.import_module(module)
        for name in names:
            if not hasattr(library, name):
                setattr(library, name, type(name, (), {}))
    if suite in ("transformers", "trl"):
        _lay_out(Path(os.environ["HF_HOME"]) / "hub", trl=suite == "trl")
        _give_datasets()


def _lay_out(hub: Path, *, trl: bool) -> None:
    """All models that are not there yet."""
    if trl:
        for name, (template, end) in TINY.items():
            made = _folder(hub, f"{OF_TRL}/tiny-{name}")
            if made is not None:
                _save(made, name.split("-")[0], _template(template), end, dtype="bfloat16")
    else:
        for name, kind in OTHERS.items():
            made = _folder(hub, name)
            if made is not None:
                _save(made, kind, "", "[SEP]" if "bert" in name else "</s>", dtype="float32")


def _folder(hub: Path, name: str) -> Path | None:
    """Where a model goes, unless it is there."""
    of_model = hub / f"models--{name.replace('/', '--')}"
    snapshot = of_model / "snapshots" / REVISION
    if snapshot.exists():
        return None
    snapshot.mkdir(parents=True)
    (of_model / "refs").mkdir()
    (of_model / "refs" / "main").write_text(REVISION, encoding="utf-8")
    return snapshot


def _template(name: str) -> str:
    if not name:
        return ""
    import trl

    path = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    return path.read_text(encoding="utf-8")


def _save(folder: Path, kind: str, template: str, end: str, *, dtype: str) -> None:
    """A model of this class with random weights, and a tokenizer."""
    import torch
    import transformers

    tokenizer = tokenizer_of(template, end)
    tokenizer.save_pretrained(folder)
    model_class = getattr(transformers, kind)
    known = vars(model_class.config_class())
    settings = {name: value for name, value in SMALL.items() if name in known}
    config = model_class.config_class(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **settings,
    )
    torch.manual_seed(0)
    model_class(config).to(getattr(torch, dtype)).save_pretrained(folder)


def tokenizer_of(template: str, end: str) -> Any:
    """One of bytes, with the special tokens that a chat template writes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "[CLS]", "[MASK]", end]
    special += re.findall(r"<\|?[A-Za-z_]+\|?>", template)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(dict.fromkeys(special)),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(SENTENCES, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token=end, pad_token="<pad>",
        cls_token="[CLS]", sep_token=end, mask_token="[MASK]", model_max_length=1024,
    )  # fmt: skip
    tokenizer.chat_template = template or None
    return tokenizer


def _give_datasets() -> None:
    import datasets

    load = datasets.load_dataset

    def given(path: str, name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        rows = _rows(path, name)
        if rows is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return load(path, name, *args, **kwargs)
        last = len(rows) - max(1, len(rows) // 8)
        parts = {"train": rows[:last], "test": rows[last:]}
        every = datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in parts.items()})
        split = kwargs.get("split")
        if split is None:
            return every
        which, cut = re.fullmatch(r"(\w+)(?:\[:?(\d+)%?\])?", str(split)).groups()  # type: ignore[union-attr]
        found = every["test" if which == "validation" else which]
        found = found if cut is None else found.select(range(min(int(cut), len(found))))
        return found.to_iterable_dataset() if kwargs.get("streaming") else found

    datasets.load_dataset = given


def _rows(path: str, name: str | None) -> list[dict[str, Any]] | None:
    """Of a data set; None of one that is not made here."""
    if path == f"{OF_TRL}/zen":
        return list(_zen(name or "standard_language_modeling"))
    if path in ("Salesforce/wikitext", "wikitext", "stanfordnlp/imdb"):
        return [{"text": text, "label": n % 2} for n, text in enumerate(SENTENCES * 10)]
    return None


def _zen(name: str) -> Iterator[dict[str, Any]]:
    """Rows of one of the forms of TRL's data set."""
    form, _, kind = name.partition("_")
    for text in SENTENCES:
        first, rest = text.split(" better ")
        turns: dict[str, Any] = {"asked": first, "answered": f" better {rest}", "worse": " worse"}
        if form == "conversational":
            roles = {"asked": "user", "answered": "assistant", "worse": "assistant"}
            turns = {k: [{"role": roles[k], "content": v}] for k, v in turns.items()}
        asked, answered, worse = turns.values()
        if kind == "language_modeling":
            yield {"text": text} if form == "standard" else {"messages": asked + answered}
        elif kind == "prompt_only":
            yield {"prompt": asked}
        elif kind == "prompt_completion":
            yield {"prompt": asked, "completion": answered}
        elif kind == "preference":
            yield {"prompt": asked, "chosen": answered, "rejected": worse}
        else:  # implicit prompt
            yield {"chosen": asked + answered, "rejected": asked + worse}
