"""Do scripts of other libraries, with their import alone changed, train to the same losses, and
what does their loop cost beside the bare engine?

    python benchmarks/integrations.py [--json] [--rounds 7]
                                      [--only losses trainer adapters accelerator lightning]

*Losses*: `examples/run_clm.py` and `examples/run_classification.py` (transformers' Trainer),
`examples/sft_lora.py` (TRL's SFTTrainer, adapters) and `examples/clm_no_trainer.py` (Accelerate) as
their libraries run them in one process, beside what they do by `gpumix launch` on two emulated
devices of unlike speed, by a plan that is measured and made there. `scripts` is how many,
`worst_relative_error` the largest difference of a step's loss.

*Overhead*: two ranks, nothing emulated, train the same GPT-2 by the same plan through Trainer (also
adapters of PEFT on it, its own weights frozen), through Accelerator and through Lightning, in turns
with a plain loop over an engine of its own. `trainer_overhead`, `adapters_overhead`,
`accelerator_overhead` and `lightning_overhead` are medians over rounds of a step's time over that
of the plain loop just after, less one; `worst_overhead` is the largest.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import gpumix
from common import Figures, make_parser, print_figures
from gpumix.integrations.common.plan_and_shard import own_device

LENGTH, WIDTH, BLOCKS, VOCABULARY = 128, 192, 4, 512
BATCH, STEPS = 8, 12  # of each rank; of a round


def losses(folder: Path) -> Figures:
    from helpers.scripts.changed_imports import SCRIPTS, launched, losses_before

    worst = 0.0
    for name in SCRIPTS:
        before = losses_before(name, folder)
        after = launched(name, folder).losses
        errors = [abs(found / wanted - 1) for found, wanted in zip(after, before, strict=True)]
        print(f"{name}: {max(errors):.1e} over {len(errors)} steps")
        worst = max(worst, *errors)
    return {"scripts": len(SCRIPTS), "worst_relative_error": worst}


def overhead(folder: Path, rounds: int, wanted: Sequence[str]) -> Figures:
    from helpers.processes.harness import run_ranks

    figures: Figures = {}
    for name in wanted:
        ratios = run_ranks(MEASURED[name], 2, folder, rounds, timeout_s=900)[0]
        print(f"{name}: " + ", ".join(f"{ratio - 1:+.1%}" for ratio in ratios))
        figures[f"{name}_overhead"] = median(ratios) - 1
    if wanted:
        figures["worst_overhead"] = max(float(value) for value in figures.values())
    return figures


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return STEPS * BATCH * 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": WIDTH, "n_layer": BLOCKS, "n_head": 4, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes))


def adapted() -> nn.Module:
    """The same with adapters, which alone are trained."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    network: nn.Module = get_peft_model(model(), config)
    return network


def plan(network: nn.Module | None = None) -> Any:
    from helpers.training.reference import Share, plan_for

    shares = [Share(BATCH, 4, 1)] * 2
    return plan_for(network or model(), shares, sequence_length=LENGTH, zero_stage=3)


class Plain:
    """A loop over the engine alone, its batches made while they are wanted."""

    def __init__(self, made: Callable[[], nn.Module] = model) -> None:
        self._engine = gpumix.prepare(made(), plan(made()))
        self._optimizer = torch.optim.AdamW(self._engine.parameters())

    def step_s(self) -> float:
        """A step's time, on the device as the integrations open it."""
        own_device().use()
        engine, dataset, times = self._engine, Tokens(), []
        for step in range(STEPS):
            begun = time.perf_counter()
            first = (2 * step + engine.comm.rank) * BATCH
            samples = [dataset[n] for n in range(first, first + BATCH)]
            batch = {key: torch.stack([one[key] for one in samples]) for key in samples[0]}
            engine.step(batch).item()
            engine.clip_grad_norm_(1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            times.append(time.perf_counter() - begun)
        return median(times[2:])


@contextmanager
def ticks() -> Iterator[tuple[Callable[[], None], Callable[[], float]]]:
    """What is called after each step, and what then tells a step's time."""
    seen: list[float] = []
    yield (
        lambda: seen.append(time.perf_counter()),
        lambda: median(b - a for a, b in pairwise(seen[2:])),
    )


def through_trainer(folder: Path, rounds: int, of: Callable[[], nn.Module] = model) -> list[float]:
    from transformers import TrainerCallback, TrainingArguments

    from gpumix.integrations.transformers import Trainer
    from helpers.scripts.programs import as_launched

    as_launched(folder)
    made: list[Callable[[], None]] = []

    class Tick(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            made[-1]()

    args = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=of(), args=args, train_dataset=Tokens(), callbacks=[Tick()], plan=plan(of())
    )
    ratios: list[float] = []
    plain: Plain | None = None  # it joins the ranks that the script has brought together
    for _ in range(rounds + 1):
        with ticks() as (tick, step_s):
            made.append(tick)
            trainer.train()
            plain = plain or Plain(of)
            ratios.append(step_s() / plain.step_s())
    return ratios[1:]


def adapters_through_trainer(folder: Path, rounds: int) -> list[float]:
    return through_trainer(folder, rounds, adapted)


def through_accelerator(folder: Path, rounds: int) -> list[float]:
    from gpumix import Accelerator
    from helpers.scripts.programs import as_launched

    as_launched(folder)
    accelerator = Accelerator(plan=plan())
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    loader = torch.utils.data.DataLoader(Tokens(), batch_size=BATCH, shuffle=True)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    ratios, plain = [], Plain()
    for _ in range(rounds + 1):
        with ticks() as (tick, step_s):
            network.train()
            for batch in loader:
                loss = network(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                loss.item()
                tick()
            ratios.append(step_s() / plain.step_s())
    return ratios[1:]


def through_lightning(folder: Path, rounds: int) -> list[float]:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from gpumix.integrations.lightning import GpumixStrategy
    from helpers.scripts.programs import as_launched

    as_launched(folder)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = model()

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.network(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    def step_s_of_a_fit() -> float:
        with ticks() as (tick, step_s):

            class Tick(Callback):
                def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
                    trainer.callback_metrics  # noqa: B018 - as a script that looks at its losses
                    tick()

            trainer = Trainer(
                accelerator="cpu",
                devices=2,
                strategy=GpumixStrategy(plan=plan(Module())),
                max_steps=STEPS,
                gradient_clip_val=1.0,
                callbacks=[Tick()],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            loader = torch.utils.data.DataLoader(Tokens(), batch_size=BATCH, shuffle=True)
            trainer.fit(Module(), loader)
            return step_s()

    ratios = []
    plain: Plain | None = None
    for _ in range(rounds + 1):
        mine = step_s_of_a_fit()
        plain = plain or Plain()
        ratios.append(mine / plain.step_s())
    return ratios[1:]


MEASURED = {
    "trainer": through_trainer,
    "adapters": adapters_through_trainer,
    "accelerator": through_accelerator,
    "lightning": through_lightning,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=("losses", *MEASURED))
    args = parser.parse_args()
    wanted = args.only or ("losses", *MEASURED)
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as name:
        if "losses" in wanted:
            figures |= losses(Path(name))
        figures |= overhead(Path(name), args.rounds, [one for one in MEASURED if one in wanted])
    print_figures(figures, as_json=args.json)


if __name__ == "__main__":
    main()
