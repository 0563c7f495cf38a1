"""Stage `speed`: tokens a second of a Llama of 1.1 billion parameters, beside a plain loop and
FSDP2 on the same card, as it is and compiled."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from compared.setting import Order, Setting
from compared.systems import System
from gpumix.hardware.estimates.gpu_catalogue import find_card
from gpumix.schema.errors import InputError
from proof import systems
from proof.bench import Bench
from proof.lines import Bar
from proof.models import MIDDLE, REHEARSED, SMALL, TINY_LLAMA, Llama
from proof.outcome import Outcome
from proof.timing import Timed, fresh_memory, kernels_of, timed_steps

STEPS, WARM_UP_STEPS = 8, 3
SAMPLES = 8
FLASH = re.compile("flash|cudnn", re.IGNORECASE)
MOST_DRIFT = 0.02
# Memory that the comparison takes on a card: parameters of 18 bytes, and what autograd keeps.
SIZES = ((70, TINY_LLAMA, 8), (38, TINY_LLAMA, 2), (14, MIDDLE, 2), (0, SMALL, 2))
Make = Callable[[Setting, Any], System]


def shape_of(bench: Bench) -> tuple[Llama, int]:
    """The model, and the samples of a micro-batch, for the memory of this card."""
    if bench.rehearses:
        return REHEARSED, SAMPLES
    memory_gib = bench.card.memory_bytes / 2**30 if bench.card is not None else 0
    return next((spec, samples) for least, spec, samples in SIZES if memory_gib >= least)


def peak_flops(bench: Bench) -> float | None:
    """Dense bf16 of this card, by its datasheet."""
    try:
        return find_card(bench.card.name).flops.bf16 if bench.card is not None else None
    except InputError:
        return None


def run(bench: Bench) -> Outcome:
    study = _Study(bench)
    systems.join_alone(bench)
    with systems.without_search_for_packs():
        study.eager()
        study.in_micro_batches()
        study.again_after_drift()
        study.compiled()
    return Outcome(*study.told())


class _Study:
    """The systems in their order, each alone on the card."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.spec, at_once = shape_of(bench)
        self.peak_flops = peak_flops(bench)
        self.steps = 2 if bench.rehearses else STEPS
        self.warm_up = 1 if bench.rehearses else WARM_UP_STEPS
        self.setting = Setting(
            self.spec,
            1,
            SAMPLES,
            SAMPLES // at_once,
            dtype="bf16",
            rates=systems.TINY_LLAMA_RATES,
        )
        self.found: dict[str, dict[str, Any]] = {}
        self.left_out: list[str] = []
        self._longest_s = 0.0
        self._batches = systems.batches(self.spec, self.setting, bench, 4)

    def eager(self) -> None:
        self._measure("plain", self._plain())
        self._measure("fsdp2_keeps", self._fsdp2(reshard=False))
        self._measure("fsdp2_reshards", self._fsdp2(reshard=True))
        self._measure("gpumix", self._engine())
        self._measure("gpumix_chunked_cross_entropy", self._engine(head="chunked"))
        self._measure("plain_again", self._plain())

    def in_micro_batches(self) -> None:
        """The same batch in twice as many micro-batches."""
        halves = replace(self.setting, micro_batches=2 * self.setting.micro_batches)
        self._measure("halves_fsdp2_keeps", self._fsdp2(reshard=False), halves)
        self._measure("halves_gpumix", self._engine(), halves)
        self._measure("halves_gpumix_layered", self._engine(order="layered"), halves)

    def again_after_drift(self) -> None:
        """Where the plain loop has drifted: what is compared again, next to each other."""
        if not self.bench.rehearses and abs(self.drift or 0.0) > MOST_DRIFT:
            self._measure("plain", self._plain())
            self._measure("fsdp2_keeps", self._fsdp2(reshard=False))
            self._measure("gpumix", self._engine())
            self._measure("plain_again", self._plain())

    def compiled(self) -> None:
        self._measure("compiled_plain", self._plain(compiled=True))
        self._measure("compiled_fsdp2_keeps", self._fsdp2(reshard=False, compiled=True))
        self._measure("compiled_gpumix", self._engine(worker={"compile": True}))

    @property
    def drift(self) -> float | None:
        """By how much the plain loop is faster at the end than at the beginning."""
        return self._ratio("plain_again", "plain", minus=1.0)

    def told(self) -> tuple[dict[str, Any], tuple[Bar, ...]]:
        ours = ("gpumix", "gpumix_chunked_cross_entropy")
        fsdp2 = ("fsdp2_keeps", "fsdp2_reshards")
        figures: dict[str, Any] = {
            "model_parameters": self.spec.parameters,
            "tokens_per_step": self.setting.tokens,
            "drift": self.drift,
            "gpumix_tokens_per_s": self._best(ours),
            "gpumix_vs_fsdp2": self._ratio(ours, fsdp2),
            "gpumix_vs_plain": self._ratio(ours, "plain"),
            "halves_vs_fsdp2": self._ratio(
                ("halves_gpumix", "halves_gpumix_layered"), "halves_fsdp2_keeps"
            ),
            "compiled_vs_fsdp2": self._ratio("compiled_gpumix", "compiled_fsdp2_keeps"),
            "compiled_vs_plain": self._ratio("compiled_gpumix", "compiled_plain"),
            "peak_vs_fsdp2": self._ratio("gpumix", "fsdp2_keeps", figure="peak_bytes"),
            "host_vs_fsdp2": self._ratio("gpumix", "fsdp2_keeps", figure="host_s"),
            "plain_mfu": self.found.get("plain", {}).get("mfu"),
            "compiled_plain_mfu": self.found.get("compiled_plain", {}).get("mfu"),
            "flash_attention": self.found.get("plain", {}).get("flash_attention"),
            "left_out": ", ".join(self.left_out),
        }
        bars = (
            Bar("gpumix_vs_fsdp2", least=0.98, judges="gpu"),
            Bar("gpumix_vs_plain", least=0.97, judges="gpu"),
            Bar("halves_vs_fsdp2", least=1.0, judges="gpu"),
            Bar("compiled_vs_fsdp2", least=0.98, judges="gpu"),
            Bar("compiled_vs_plain", least=0.97, judges="gpu"),
            Bar("peak_vs_fsdp2", most=1.05, judges="gpu"),
            Bar("drift", least=-MOST_DRIFT, most=MOST_DRIFT, judges="gpu"),
            Bar("flash_attention", 1, 1, judges="gpu"),
            # Anchors: whether the baselines themselves are as fast as others have them.
            Bar("plain_mfu", least=0.33, judges="hopper"),
            Bar("compiled_plain_mfu", least=0.39, judges="hopper"),
        )
        return figures, bars

    def _plain(self, *, compiled: bool = False) -> Make:
        return lambda setting, model: systems.plain(setting, model, self.bench, compiled=compiled)

    def _fsdp2(self, *, reshard: bool, compiled: bool = False) -> Make:
        return lambda setting, model: systems.fsdp2(
            setting, model, self.bench, reshard=reshard, compiled=compiled
        )

    def _engine(
        self, *, head: str = "whole", order: Order = "sequential", worker: Any = None
    ) -> Make:
        return lambda setting, model: systems.engine(
            setting, model, self.bench, order=order, mode={"head": head}, worker=worker
        )

    def _measure(self, name: str, make: Make, setting: Setting | None = None) -> None:
        """One system, unless it would not be done before the stage is ended. The CUDA device of the
        tests neither compiles nor resizes storages, as FSDP2 does."""
        unable = self.bench.place == "test device" and ("compiled" in name or "fsdp2" in name)
        if unable or self.bench.left_s < 1.3 * self._longest_s + 1.0:
            self.left_out.append(name)
            return
        begun = time.monotonic()
        figures = self.bench.measured(name, partial(self._alone, make, setting or self.setting))
        fresh_memory(self.bench)
        if figures:
            self.found[name] = dict(figures)
        self._longest_s = max(self._longest_s, time.monotonic() - begun)

    def _alone(self, make: Make, setting: Setting) -> tuple[dict[str, Any], Sequence[Bar]]:
        systems.forget_compiled(self.bench)
        fresh_memory(self.bench)
        system = make(setting, self.spec.build_on(self.bench.device))
        fresh_memory(self.bench)
        number = 0

        def step() -> None:
            nonlocal number
            system.step(self._batches[number % len(self._batches)])
            number += 1

        begun = time.perf_counter()
        step()  # the first one compiles
        first_s = time.perf_counter() - begun
        timed = timed_steps(self.bench, step, steps=self.steps, warm_up=self.warm_up)
        kernels = kernels_of(self.bench, step)
        return self._figures(timed, setting, kernels) | {"first_step_s": first_s}, ()

    def _figures(self, timed: Timed, setting: Setting, kernels: list[str]) -> dict[str, Any]:
        tokens_per_s = setting.tokens / timed.step_s
        reached = tokens_per_s * self.spec.flops_per_token
        attention = sorted({name for name in kernels if FLASH.search(name)})
        return {
            "tokens_per_s": round(tokens_per_s, 1),
            "mfu": reached / self.peak_flops if self.peak_flops else None,
            "step_s": timed.step_s,
            "host_s": timed.host_s,
            "peak_bytes": timed.peak_bytes,
            "reserved_bytes": timed.reserved_bytes,
            "kernels": len(kernels),
            "flash_attention": None if self.bench.rehearses else bool(attention),
            "attention_kernels": [name[:80] for name in attention[:4]],
        }

    def _best(self, names: Sequence[str], figure: str = "tokens_per_s") -> float | None:
        values = [self.found[n][figure] for n in names if self.found.get(n, {}).get(figure)]
        return max(values, default=None)

    def _ratio(
        self,
        ours: str | Sequence[str],
        theirs: str | Sequence[str],
        *,
        figure: str = "tokens_per_s",
        minus: float = 0.0,
    ) -> float | None:
        """Of the best of each; None where one was not measured."""
        both = [self._best((n,) if isinstance(n, str) else n, figure) for n in (ours, theirs)]
        return None if None in both else both[0] / both[1] - minus  # type: ignore[operator]
