"""What dtype, compiled code, fused optimizer and attention are worth on this device, and what they
change in the result.

A Llama of 4 blocks is trained by the engine, alone, in one way after the other, in turns: plain
fp32 with torch's own attention and the fused AdamW is what all are compared with. On a GPU TF32,
fp16, flash-attn, Liger's kernels and Triton's loss are compared too, as far as they are here.

    python benchmarks/precision.py [--json] [--rounds 9] [--only bf16 compile ...]

Figures, of each way: `_speedup` is the median over rounds of seconds of a plain step over seconds
of its own, taken one after the other; `_spread` half the middle half of those; and
`_loss_difference` the largest relative difference of a loss in the first five steps. With
`--threads` more cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gpumix
from common import Figures, make_parser, print_figures
from gpumix.engine.engine import Engine
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.hardware.host.environment import installed
from gpumix.schema.cluster.kernels import PLAIN_EFFICIENCY, KernelSettings
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import ComputeDtype, Mode, Stage, Worker

BLOCKS, LENGTH, SAMPLES = 4, 128, 4
FIRST_STEPS = 5


@dataclass(frozen=True)
class Way:
    """How a step is computed."""

    name: str
    dtype: ComputeDtype = "fp32"
    compile: bool = False
    efficiency: KernelSettings = PLAIN_EFFICIENCY
    head: str = "whole"


PLAIN = Way("plain")
ANYWHERE = (
    Way("bf16", "bf16"),
    Way("compile", compile=True),
    Way("plain_optimizer", efficiency=KernelSettings(fused_optimizer=False)),
    Way("eager_attention", efficiency=KernelSettings(attention="eager")),
    Way("chunked_cross_entropy", head="chunked"),
)


def ways() -> Iterator[Way]:
    """All that this device can."""
    yield from ANYWHERE
    if not torch.cuda.is_available():
        return
    here = installed()
    yield Way("tf32", efficiency=KernelSettings(tf32=True))
    yield Way("fp16", "fp16")
    yield Way("bf16_compile", "bf16", compile=True)
    if here.flash_attn:
        yield Way("bf16_flash", "bf16", efficiency=KernelSettings(attention="flash"))
    if here.liger_kernel:
        yield Way("bf16_liger", "bf16", efficiency=KernelSettings(kernels="liger"))
    if here.triton:
        fused = KernelSettings(loss="triton")
        yield Way("bf16_chunked_cross_entropy", "bf16", head="chunked")
        yield Way("bf16_triton_loss", "bf16", efficiency=fused, head="chunked")


class Trainer:
    """A model that is trained in one way, from the same start and on the same data as all."""

    def __init__(self, way: Way, width: int) -> None:
        model = gpumix.build(lambda: _llama(width), seed=0)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._engine: Engine = gpumix.prepare(model, _plan(model, way))
        fused = way.efficiency.fused_optimizer
        self._optimizer = torch.optim.AdamW(self._engine.parameters(), lr=1e-3, fused=fused)
        self._steps = 0

    def step(self) -> float:
        """Of the next batch: its loss."""
        generator = torch.Generator().manual_seed(self._steps)
        ids = torch.randint(0, 4096, (SAMPLES, LENGTH), generator=generator)
        loss = self._engine.step({"input_ids": ids, "labels": ids}).item()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        return loss

    def step_s(self) -> float:
        self._synchronize()
        begun = time.perf_counter()
        self.step()
        self._synchronize()
        return time.perf_counter() - begun

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _llama(width: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=BLOCKS,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, vocab_size=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _plan(model: Any, way: Way) -> Plan:
    anatomy = split_into_units(model)
    worker = Worker(
        device="d0",
        device_class="here",
        samples=SAMPLES,
        micro_batch=SAMPLES,
        state_share=1.0,
        mode=Mode(recompute=False, head=way.head),  # type: ignore[arg-type]
        compile=way.compile,
        compute_dtype=way.dtype,
        efficiency=way.efficiency,
    )
    return Plan(
        strategy="by hand",
        model=anatomy.fingerprint(),
        sequence_length=LENGTH,
        global_batch=SAMPLES,
        communication_dtype=way.dtype,
        stages=(Stage(units=tuple(u.name for u in anatomy.units), workers=(worker,)),),
    )


def compare(way: Way, rounds: int, width: int) -> Figures:
    """A way beside the plain one."""
    # TF32 is the process's: what is prepared last would decide for both.
    plain, other = Trainer(PLAIN, width), Trainer(way, width)
    switch = way.efficiency.tf32
    losses: list[tuple[float, float]] = []
    for _ in range(FIRST_STEPS):
        _precision(tf32=False)
        one = plain.step()
        _precision(tf32=switch)
        losses.append((one, other.step()))
    ratios = []
    for number in range(rounds):
        taken = {}
        for trainer in (plain, other) if number % 2 else (other, plain):
            _precision(tf32=switch and trainer is other)
            taken[trainer] = trainer.step_s()
        ratios.append(taken[plain] / taken[other])
    low, _, high = quantiles(ratios, n=4)
    return {
        f"{way.name}_speedup": round(median(ratios), 3),
        f"{way.name}_spread": round((high - low) / 2, 3),
        f"{way.name}_loss_difference": float(f"{max(abs(b / a - 1) for a, b in losses):.2g}"),
    }


def _precision(*, tf32: bool) -> None:
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high" if tf32 else "highest")


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    begun = time.perf_counter()
    cuda = torch.cuda.is_available()
    figures: Figures = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "cpu_has_bf16": bool(torch.cpu._is_avx512_bf16_supported()),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
    }
    for way in ways():
        if not arguments.only or way.name in arguments.only:
            figures |= compare(way, arguments.rounds, arguments.width)
    figures["seconds"] = round(time.perf_counter() - begun, 1)
    print_figures(figures, as_json=arguments.json)


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    main()
