"""Stage `smoke`: the engine trains as a plain loop does in all its modes, and never waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from compared.setting import Order, Setting
from compared.systems import System
from gpumix.engine.engine import Engine
from gpumix.schema.cluster.kernels import KernelSettings
from gpumix.schema.plan.plan import ZeroStage
from gpumix.schema.plan.stage import ComputeDtype
from proof import systems, waits
from proof.bench import Bench
from proof.lines import Bar
from proof.models import REHEARSED, SMALL, Llama
from proof.outcome import Outcome
from proof.timing import fresh_memory

STEPS = 20
REHEARSED_STEPS = 6
SAMPLES, MICRO_BATCHES = 8, 2
COMPILING_S = 12.0  # less is not enough for it
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """One way in which the engine computes."""

    name: str
    zero_stage: ZeroStage = 3
    order: Order = "layered"
    mode: dict[str, Any] = field(default_factory=dict)
    worker: dict[str, Any] = field(default_factory=dict)
    dtype: ComputeDtype = "bf16"

    @property
    def on_device(self) -> bool:
        """Whether its whole state is there."""
        return self.worker.get("state_on") != "host"


VARIANTS = (
    Variant("fp32_layered", mode={"recompute": True}, dtype="fp32"),
    Variant("layered_recompute", mode={"recompute": True}),
    Variant("graphs_kept", mode={"recompute": False}),
    Variant("sequential", zero_stage=0, order="sequential"),
    Variant("chunked_cross_entropy", mode={"head": "chunked"}),
    Variant(
        "chunked_cross_entropy_triton",
        mode={"head": "chunked"},
        worker={"efficiency": KernelSettings(loss="triton")},
    ),
    Variant("inputs_on_host", mode={"recompute": True, "boundary": "host"}),
    Variant("state_on_host", worker={"state_on": "host"}),
    Variant("compile", worker={"compile": True}),
)


@dataclass
class Trained:
    """The losses of all steps, and the weights after them."""

    losses: list[float]
    weights: Weights


def run(bench: Bench) -> Outcome:
    proof = _Smoke(bench)
    found: dict[str, Any] = {}
    found |= bench.measured("plain_fp32", partial(proof.plain, "fp32"))
    found |= bench.measured("plain_bf16", partial(proof.plain, "bf16"))
    if not {"fp32", "bf16"} <= proof.plains.keys():
        return Outcome(found)
    by_variant, left_out = {}, []
    for variant in VARIANTS:
        if variant.worker.get("compile") and not _compiles(bench):
            left_out.append(variant.name)
            continue
        by_variant[variant.name] = bench.measured(variant.name, partial(proof.variant, variant))
    found["left_out"] = ", ".join(left_out)
    for figure in ("loss_off", "weights_off", "waits_in_step"):
        found[figure] = {v: f[figure] for v, f in by_variant.items() if figure in f}
        found[f"worst_{figure}"] = max(found[figure].values(), default=None)
    found["loss_off_fp32"] = by_variant["fp32_layered"].get("loss_off")
    return Outcome(found)


def _compiles(bench: Bench) -> bool:
    """Whether there is time for it; the CUDA device of the tests has no compiler at all."""
    return bench.place != "test device" and bench.left_s > COMPILING_S


class _Smoke:
    """One model, trained by plain loops, and then by the engine in each of its ways."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.spec: Llama = REHEARSED if bench.rehearses else SMALL
        self.steps = REHEARSED_STEPS if bench.rehearses else STEPS
        self.setting = Setting(self.spec, 1, SAMPLES, MICRO_BATCHES, rates=systems.TINY_LLAMA_RATES)
        self.plains: dict[ComputeDtype, Trained] = {}
        self._batches = systems.batches(self.spec, self.setting, bench, self.steps + 1)
        torch.set_float32_matmul_precision("highest")
        self._begin = self._weights_of(self.spec.build_on(bench.device))

    def plain(self, dtype: ComputeDtype) -> tuple[dict[str, Any], Sequence[Bar]]:
        """The truth: a plain loop in fp32, or in bf16 by autocast."""
        fresh_memory(self.bench)
        model = self.spec.build_on(self.bench.device)
        loop = systems.plain(replace(self.setting, dtype=dtype), model, self.bench)
        self.plains[dtype] = self._train(loop, lambda: self._weights_of(model))
        figures = {
            f"plain_{dtype}_first_loss": self.plains[dtype].losses[0],
            f"plain_{dtype}_last_loss": self.plains[dtype].losses[-1],
        }
        if dtype == "bf16":
            figures["plain_bf16_off_fp32"] = self._loss_off(self.plains["bf16"], "fp32")
        return figures, ()

    def variant(self, variant: Variant) -> tuple[dict[str, Any], Sequence[Bar]]:
        """The engine in one of its ways, beside the plain loop in its dtype."""
        fresh_memory(self.bench)
        systems.forget_compiled(self.bench)
        setting = replace(self.setting, dtype=variant.dtype)
        worker = self._possible(variant.worker)
        model = self.spec.build_on(self.bench.device)
        trainer = systems.engine(
            setting,
            model,
            self.bench,
            zero_stage=variant.zero_stage,
            order=variant.order,
            mode=variant.mode,
            worker=worker,
        )
        trained = self._train(trainer, lambda: self._pieces_of(trainer.engine))
        with waits.watched(self.bench) as seen:
            trainer.engine.step(self._batches[-1])
        waits.tell(seen)
        figures = {
            "loss_off": self._loss_off(trained, variant.dtype),
            "weights_off": self._weights_off(trained, variant.dtype),
            "waits_in_step": seen.ours.total(),
            "waits_of_others": seen.others.total(),
            "waiting_lines": dict(seen.ours),
            "others_waiting_lines": dict(seen.others),
        }
        return figures, self._bars(variant, figures)

    def _bars(self, variant: Variant, figures: dict[str, Any]) -> Sequence[Bar]:
        bars = [Bar("waits_in_step", most=0, judges="gpu")] if variant.on_device else []
        if variant.dtype == "fp32":
            return (*bars, Bar("loss_off", most=1e-4))
        trained_off = self._loss_off(self.plains["bf16"], "fp32")
        figures["loss_off_over_plain_off"] = figures["loss_off"] / max(trained_off, 1e-12)
        over = Bar("loss_off_over_plain_off", most=1.5, judges="gpu")
        return (*bars, Bar("loss_off", most=5e-3), over)

    def _possible(self, worker: dict[str, Any]) -> dict[str, Any]:
        """In a rehearsal torch computes what is Triton's part on a GPU."""
        if self.bench.rehearses and "efficiency" in worker:
            return {**worker, "efficiency": KernelSettings()}
        return worker

    def _train(self, system: System, weights: Callable[[], Weights]) -> Trained:
        losses = [system.step(batch) for batch in self._batches[: self.steps]]
        return Trained(torch.stack(losses).tolist(), weights())

    def _loss_off(self, trained: Trained, dtype: ComputeDtype) -> float:
        """The worst relative difference of a step's loss to the plain loop's."""
        truth = self.plains[dtype].losses
        return max(abs(a / b - 1) for a, b in zip(trained.losses, truth, strict=True))

    def _weights_off(self, trained: Trained, dtype: ComputeDtype) -> float:
        """The norm of the difference to the plain loop's weights, relative to how far those have
        come from their beginning."""
        truth = self.plains[dtype].weights
        off = torch.stack([(trained.weights[n] - w).norm() for n, w in truth.items()]).norm()
        moved = torch.stack([(self._begin[n] - w).norm() for n, w in truth.items()]).norm()
        return (off / moved).item()

    @staticmethod
    def _weights_of(model: torch.nn.Module) -> Weights:
        return {name: p.detach().flatten().clone() for name, p in model.named_parameters()}

    def _pieces_of(self, engine: Engine) -> Weights:
        """Of one rank a piece is a whole parameter."""
        return {n: p.detach().flatten().to(self.bench.device) for n, p in engine.named_parameters()}
