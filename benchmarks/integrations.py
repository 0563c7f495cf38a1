"""Do scripts of other libraries, with their import alone changed, train to the same losses, and
what does their loop cost beside the bare engine?

    python benchmarks/integrations.py [--json] [--rounds 7] [--only losses overhead]

*Losses*: `examples/run_clm.py` (transformers' Trainer), `examples/sft_lora.py` (TRL's SFTTrainer,
adapters) and `examples/clm_no_trainer.py` (Accelerate) as their libraries run them in one process,
beside what they do on two emulated devices of unlike speed, by a plan that is measured and made
there. `scripts` is how many, `worst_relative_error` the largest difference of a step's loss.

*Overhead*: two ranks, nothing emulated, train the same GPT-2 by the same plan through Trainer and
through Accelerator, in turns with a plain loop over the engine. `trainer_overhead` and
`accelerator_overhead` are medians over rounds of a step's time over that of the plain loop just
before, less one; `worst_overhead` is the larger one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from common import Figures, print_figures

LENGTH, WIDTH, BLOCKS, VOCABULARY = 128, 192, 4, 512
BATCH, STEPS = 8, 12  # of each rank; of a round


def losses(folder: Path) -> Figures:
    from changed_imports import SCRIPTS, losses_of

    worst = 0.0
    for name in SCRIPTS:
        before = losses_of(name, folder, changed=False)
        after = losses_of(name, folder, changed=True)
        errors = [abs(found / wanted - 1) for found, wanted in zip(after, before, strict=True)]
        print(f"{name}: {max(errors):.1e} over {len(errors)} steps")
        worst = max(worst, *errors)
    return {"scripts": len(SCRIPTS), "worst_relative_error": worst}


def overhead(folder: Path, rounds: int) -> Figures:
    from harness import run_ranks

    figures: Figures = {}
    for name, measure in (("trainer", through_trainer), ("accelerator", through_accelerator)):
        ratios = run_ranks(measure, 2, folder, rounds, timeout_s=900)[0]
        print(f"{name}: " + ", ".join(f"{ratio - 1:+.1%}" for ratio in ratios))
        figures[f"{name}_overhead"] = median(ratios) - 1
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


def plan() -> Any:
    from reference import Share, plan_for

    return plan_for(model(), [Share(BATCH, 4, 1)] * 2, length=LENGTH, zero_stage=3)


def plain_step_s(
    engine: Any, optimizer: torch.optim.Optimizer, as_given: Callable[[dict[str, Any]], Any] = dict
) -> float:
    """A step's time in a loop over the engine alone, its batches made while they are wanted.

    Args:
        as_given: makes of a batch what the engine's loss is computed of.
    """
    dataset, times = Tokens(), []
    for step in range(STEPS):
        begun = time.perf_counter()
        first = (2 * step + engine.comm.rank) * BATCH
        samples = [dataset[n] for n in range(first, first + BATCH)]
        batch = {key: torch.stack([one[key] for one in samples]) for key in samples[0]}
        engine.step(as_given(batch)).item()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
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


def through_trainer(folder: Path, rounds: int) -> list[float]:
    from transformers import TrainerCallback, TrainingArguments

    from gpumix.integrations.transformers import Trainer
    from programs import as_launched

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
        model=model(), args=args, train_dataset=Tokens(), callbacks=[Tick()], plan=plan()
    )
    ratios: list[float] = []
    for _ in range(rounds + 1):
        with ticks() as (tick, step_s):
            made.append(tick)
            trainer.train()
            engine = trainer._engine
            assert engine is not None
            ratios.append(step_s() / plain_step_s(engine, trainer.optimizer))
    return ratios[1:]


def through_accelerator(folder: Path, rounds: int) -> list[float]:
    from gpumix import Accelerator
    from programs import as_launched

    as_launched(folder)
    accelerator = Accelerator(plan=plan())
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    loader = torch.utils.data.DataLoader(Tokens(), batch_size=BATCH, shuffle=True)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    engine = accelerator._engine
    assert engine is not None
    ratios: list[float] = []
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
            plain = plain_step_s(
                engine, optimizer.optimizer, lambda batch: {"args": (), "kwargs": batch}
            )
            ratios.append(step_s() / plain)
    return ratios[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=("losses", "overhead"))
    args = parser.parse_args()
    wanted = args.only or ("losses", "overhead")
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as name:
        if "losses" in wanted:
            figures |= losses(Path(name))
        if "overhead" in wanted:
            figures |= overhead(Path(name), args.rounds)
    print_figures(figures, as_json=args.json)


if __name__ == "__main__":
    main()
