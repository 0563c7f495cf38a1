"""Lines about tests, and the verdicts that they come to."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from common import BENCHMARKS, Figures

Line = dict[str, Any]
DOCS = BENCHMARKS.parent / "docs"
NO_NETWORK = re.compile(
    r"OfflineMode|[Oo]ffline mode|outgoing traffic|LocalEntryNotFound|couldn't connect|"
    r"Couldn't reach|not a valid model identifier|nodename nor servname|"
    r"Temporary failure in name resolution|doesn't exist on the Hub|Cannot find the requested files"
)
# Patterns of refusals: the page that tells of each, and its words there.
TRAINER, LOOPS, LIGHTNING = "guides/hugging-face.md", "guides/accelerate.md", "lightning.md"
REFUSED: dict[str, tuple[str, str]] = {
    r"^InputError: AcceleratorConfig: (split_batches|dispatch_batches|non_blocking|"
    r"gradient_accumulation_kwargs)=": (TRAINER, "`accelerator_config` `split_batches`"),
    r"^InputError: TrainingArguments: eval_use_gather_object=": (
        TRAINER,
        "`eval_use_gather_object`",
    ),
    r"^InputError: TrainingArguments: auto_find_batch_size=": (TRAINER, "`auto_find_batch_size`"),
    r"RegressionRandomPreTrainedModel draws random numbers in evaluation": (
        "design/losses.md",
        "A model that draws random numbers in evaluation too is refused",
    ),
    r"(Qwen3Moe|GptOss)ForCausalLM: the loss of a batch is not made of": (
        TRAINER,
        "a loss that couples samples of\na batch is refused",
    ),
    r"the weights of \w+ are quantised by": (
        "guides/quantised-base.md",
        "weights quantised in any other way",
    ),
    r"forward changes buffers of module '', a DummyModel": (
        "design/losses.md",
        "buffers change in training. Such a model is refused",
    ),
    r"get_train_dataloader of CustomDataloaderTrainer: a MultiLoader gives the batches": (
        TRAINER,
        "of another class than torch's `DataLoader` is refused",
    ),
    r"Adafactor cannot update a sharded model": (TRAINER, "others are [refused]"),
    r"the model is called before the loader": (LOOPS, "prepare the three one by one"),
    r"the model cannot be measured with the loader's batches": (
        LOOPS,
        "matched to `forward`'s arguments by name",
    ),
    r"save_state with \d+ prepared optimizers": (LOOPS, "A saved\nstate is that of one optimizer"),
    r"several models cannot be trained by one": (LOOPS, "**One model** per Accelerator"),
    r"^InputError: DataLoaderConfiguration: (dispatch_batches|split_batches|non_blocking|"
    r"use_stateful_dataloader)=": (LOOPS, "`split_batches`, `dispatch_batches`, `non_blocking`"),
    r"^InputError: Accelerator: (split_batches|rng_types|device_placement|fsdp_plugin|"
    r"deepspeed_plugin|kwargs_handlers)=": (LOOPS, "are refused, because\nthe plan decides"),
    r"has a batch sampler of its own": (LOOPS, "a loader whose own batch sampler does"),
    r"^InputError: Trainer: manual optimization has no": (LIGHTNING, "Manual optimization"),
    r"^InputError: Trainer: \w+\.backward has no meaning": (LIGHTNING, "an own `backward`"),
    r"_step\(dataloader_iter\) has no meaning": (LIGHTNING, "steps that take a `dataloader_iter`"),
    r"cannot update a sharded model": ("design/optimizers.md", "LBFGS"),
    r"configure_optimizers returned several": (LIGHTNING, "several optimizers"),
    r"configure_optimizers returned no optimizer": (LIGHTNING, "configure_optimizers"),
    r"training_step returned no loss": (LIGHTNING, "a `training_step` that returns no loss"),
    r"predict_step returned an? ": (LIGHTNING, "returns no row per sample"),
    r"is not in a file system": (LIGHTNING, "needs a file system"),
    r"this strategy has another module already": (LIGHTNING, "a second module for a strategy"),
    r"Trainer, \w+: precision '[^']*' has no meaning": (
        LIGHTNING,
        "precision other than `32-true`",
    ),
    r"batches come from several loaders at once": (LIGHTNING, "several training loaders at once"),
    r"^InputError: an? \w+ gives the batches": (LIGHTNING, "loaders of another class than torch's"),
    r"^InputError: Trainer: the callback \w+ has no meaning": (
        LIGHTNING,
        "`StochasticWeightAveraging`",
    ),
    r"a model that is sharded over ranks cannot be pickled": (LIGHTNING, "cannot be pickled"),
    r"batches are read before the devices were measured": (
        LIGHTNING,
        "`trainer.estimated_stepping_batches` of a stream",
    ),
    r"forward changes the values of parameter '\S*base_layer": (TRAINER, "`target_parameters`"),
    r"^InputError: SFTConfig: (activation_offloading|padding_free)=": (
        TRAINER,
        "`activation_offloading` and `padding_free`",
    ),
    r"^InputError: SFTConfig: use_liger_kernel=": (TRAINER, "`use_liger_kernel`"),
}
VERDICTS = (
    "passed_by_ours", "refused_as_documented", "differs_as_documented", "failed",
)  # fmt: skip


def read(path: Path) -> list[Line]:
    """All lines of a file, which need not be there; of a test and side the last."""
    if not path.exists():
        return []
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return list({(one["suite"], one["test"], one["side"]): one for one in lines}.values())


def add(path: Path, line: Line) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


# A failed assertion that shows the folder of a checkpoint's state, which Lightning alone has not.
STATE_FOLDER = re.compile(r"^E .*\.gpumix'", re.MULTILINE)


@cache
def differences() -> dict[str, str]:
    """Why tests cannot pass, by their names: the tables of docs/suites.md."""
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", (DOCS / "suites.md").read_text("utf-8"), re.M)
    return dict(rows)


def verdict_of(stock: Line, ours: Line | None) -> str:
    """What became of a test on both sides."""
    if stock["outcome"] == "skipped":
        return "skipped"
    if stock["outcome"] != "passed":
        lacks = NO_NETWORK.search(stock.get("why", ""))
        return "needs_network" if lacks else "failed_by_stock"
    if ours is None:
        return "not_tried"
    if ours["outcome"] == "passed":
        return "passed_by_ours"
    refusal = ours.get("refusal", "")
    if any(re.search(pattern, refusal) for pattern in REFUSED if refusal):
        return "refused_as_documented"
    told = any(name in stock["test"] for name in differences())
    told = told or bool(STATE_FOLDER.search(ours.get("why", "")))
    return "differs_as_documented" if told else "failed"


def verdicts(lines: list[Line]) -> dict[tuple[str, str], str]:
    """By suite and test."""
    ours = {(one["suite"], one["test"]): one for one in lines if one["side"] == "ours"}
    stock = {(one["suite"], one["test"]): one for one in lines if one["side"] == "stock"}
    return {key: verdict_of(line, ours.get(key)) for key, line in stock.items()}


def figures_of(lines: list[Line], suites: list[str]) -> Figures:
    """Counts of all suites, then of each."""
    found = verdicts(lines)
    used = {(one["suite"], one["test"]) for one in lines if one.get("used")}
    figures: Figures = {}
    for prefix in ("", *suites):
        own = {key: told for key, told in found.items() if prefix in ("", key[0])}
        counts = Counter(own.values())
        tried = {key for key, told in own.items() if told in (*VERDICTS, "not_tried")}
        named = {
            "tests": len(own) - counts["skipped"],
            "passed_by_stock": len(tried),
            "with_our_classes": len(tried & used),
            **{verdict: counts[verdict] for verdict in VERDICTS},
            "not_tried": counts["not_tried"],
            "needs_network": counts["needs_network"],
            "failed_by_stock": counts["failed_by_stock"],
            "skipped_by_stock": counts["skipped"],
        }
        figures |= {f"{prefix}_{name}".lstrip("_"): value for name, value in named.items()}
    return figures
