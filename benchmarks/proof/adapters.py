"""Stage `adapters`: LoRA beside a plain loop, on a base in NF4 where bitsandbytes is installed, and
beside RoundPipe where that is."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from compared.setting import Batch, Setting
from compared.systems import System
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.schema.errors import GpumixError
from proof import systems
from proof.bench import Bench
from proof.lines import Bar
from proof.models import Llama
from proof.outcome import Outcome
from proof.speed import shape_of
from proof.timing import fresh_memory, timed_steps

SAMPLES, RANK, ALPHA = 8, 16, 32
STEPS, WARM_UP_STEPS = 6, 2
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LARGE = Llama(width=4096, layers=32, vocabulary=128_256, sequence=2048, mlp=14_336, kv_heads=8)
LARGE_GIB, LARGE_S = 70, 25.0


def run(bench: Bench) -> Outcome:
    study = _Adapters(bench)
    found: dict[str, Any] = {}
    found |= bench.measured("lora", study.lora)
    if importlib.util.find_spec("bitsandbytes") is not None and bench.place == "gpu":
        found |= bench.measured("nf4", study.nf4)
    if importlib.util.find_spec("roundpipe") is not None and bench.place == "gpu":
        found |= bench.measured("roundpipe", partial(study.roundpipe, study.spec, lora=False))
        memory_gib = bench.card.memory_bytes / 2**30 if bench.card is not None else 0
        if memory_gib >= LARGE_GIB and bench.left_s > LARGE_S:
            found |= bench.measured("large_lora", study.large_lora)
            found |= bench.measured("large_roundpipe", partial(study.roundpipe, LARGE, lora=True))
    bars = (
        Bar("lora_loss_off", most=5e-3),
        Bar("lora_vs_plain", least=0.95, judges="gpu"),
        Bar("lora_trained_parameters", least=1),
    )
    return Outcome(found, bars)


class _Adapters:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.spec, at_once = shape_of(bench)
        self.setting = Setting(
            self.spec,
            1,
            SAMPLES,
            SAMPLES // at_once,
            dtype="fp32" if bench.rehearses else "bf16",
            rates=systems.TINY_LLAMA_RATES,
        )
        self._steps = 2 if bench.rehearses else STEPS
        self._batches = systems.batches(self.spec, self.setting, bench, STEPS + WARM_UP_STEPS)

    def lora(self) -> tuple[dict[str, Any], Sequence[Bar]]:
        """Adapters of a model whose other weights are frozen, by peft."""
        model = self._with_adapters(self.spec.build_on(self.bench.device))
        plain = self._run(systems.plain(self.setting, model, self.bench))
        del model
        fresh_memory(self.bench)
        model = self._with_adapters(self.spec.build_on(self.bench.device))
        ours = self._run(systems.engine(self.setting, model, self.bench))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        off = max(abs(a / b - 1) for a, b in zip(ours["losses"], plain["losses"], strict=True))
        figures = {
            "lora_loss_off": off,
            "lora_tokens_per_s": ours["tokens_per_s"],
            "lora_plain_tokens_per_s": plain["tokens_per_s"],
            "lora_vs_plain": ours["tokens_per_s"] / plain["tokens_per_s"],
            "lora_peak_bytes": ours["peak_bytes"],
            "lora_plain_peak_bytes": plain["peak_bytes"],
            "lora_trained_parameters": trained,
        }
        return figures, ()

    def nf4(self) -> tuple[dict[str, Any], Sequence[Bar]]:
        """The same on a base in four bits: plain, and by the engine if it takes such weights."""
        model = self._with_adapters(_in_four_bits(self.spec.build_on(self.bench.device)))
        plain = self._run(systems.plain(self.setting, model, self.bench))
        del model
        fresh_memory(self.bench)
        figures = {
            "nf4_plain_tokens_per_s": plain["tokens_per_s"],
            "nf4_plain_peak_bytes": plain["peak_bytes"],
        }
        model = self._with_adapters(_in_four_bits(self.spec.build_on(self.bench.device)))
        try:
            ours = self._run(systems.engine(self.setting, model, self.bench))
        except (GpumixError, RuntimeError, AttributeError, TypeError) as error:
            return {**figures, "nf4_engine": f"{type(error).__name__}: {str(error)[:300]}"}, ()
        off = max(abs(a / b - 1) for a, b in zip(ours["losses"], plain["losses"], strict=True))
        return {
            **figures,
            "nf4_engine": "trains",
            "nf4_loss_off": off,
            "nf4_tokens_per_s": ours["tokens_per_s"],
            "nf4_peak_bytes": ours["peak_bytes"],
        }, (Bar("nf4_loss_off", most=5e-3),)

    def large_lora(self) -> tuple[dict[str, Any], Sequence[Bar]]:
        """A Llama of 8 billion parameters, frozen in bf16, by the engine."""
        fresh_memory(self.bench)
        spec = LARGE
        setting = replace(self.setting, model=spec, samples=4, micro_batches=4, recompute=True)
        self._batches = systems.batches(spec, setting, self.bench, STEPS + WARM_UP_STEPS)
        model = self._with_adapters(_half(spec, self.bench.device))
        ours = self._run(systems.engine(setting, model, self.bench), setting)
        return {
            "large_lora_tokens_per_s": ours["tokens_per_s"],
            "large_lora_peak_bytes": ours["peak_bytes"],
        }, ()

    def roundpipe(self, spec: Llama, *, lora: bool) -> tuple[dict[str, Any], Sequence[Bar]]:
        """RoundPipe, whose weights lie on the host, on the same model and batches."""
        from roundpipe import RoundPipeRunConfig, optim, wrap_model_to_roundpipe

        fresh_memory(self.bench)
        samples = 4 if lora else SAMPLES
        setting = replace(self.setting, model=spec, samples=samples)
        made = _half(spec, self.bench.device).to("cpu")
        wrapped = wrap_model_to_roundpipe(
            self._with_adapters(made) if lora else made,
            use_sequential_preset=None if lora else True,
            optim_dtype=torch.float32,
            model_run_config=RoundPipeRunConfig(num_microbatch=4 if lora else 2),
        )
        rates = systems.TINY_LLAMA_RATES
        optimizer = optim.Adam(
            wrapped.optim_parameters(),
            lr=rates.learning_rate,
            betas=rates.betas,
            weight_decay=rates.weight_decay,
            decoupled_weight_decay=True,
        )
        batches = [setting.batch(step, 0) for step in range(4)]
        count = 0

        def step() -> None:
            nonlocal count
            batch: Batch = batches[count % len(batches)]
            count += 1
            if hasattr(wrapped, "forward_backward"):
                wrapped.forward_backward(input_kwargs=batch, loss_fn=lambda out, _: out.loss)
            else:
                wrapped(**batch).loss.backward()
            wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()))

        timed = timed_steps(self.bench, step, steps=4, warm_up=2)
        wrapped.synchronize()
        name = "roundpipe_large_lora" if lora else "roundpipe"
        return {
            f"{name}_tokens_per_s": setting.tokens / timed.step_s,
            f"{name}_peak_bytes": timed.peak_bytes,
        }, ()

    def _with_adapters(self, model: nn.Module) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM")
        made: nn.Module = get_peft_model(model, config)  # type: ignore[arg-type]
        return made.train()

    def _run(self, system: System, setting: Setting | None = None) -> dict[str, Any]:
        losses: list[torch.Tensor] = []

        def step() -> None:
            losses.append(system.step(self._batches[len(losses)]))

        timed = timed_steps(self.bench, step, steps=self._steps, warm_up=WARM_UP_STEPS)
        return {
            "losses": torch.stack(losses).tolist(),
            "tokens_per_s": (setting or self.setting).tokens / timed.step_s,
            "peak_bytes": timed.peak_bytes,
        }


def _half(spec: Llama, device: torch.device) -> nn.Module:
    """The model in bf16, made in it: 8 billion parameters in fp32 are half of a card."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return spec.build_on(device, keep_dtype=True)
    finally:
        torch.set_default_dtype(before)


def _in_four_bits(model: nn.Module) -> nn.Module:
    """Linear layers of the blocks in NF4, which their first use on the GPU makes."""
    import bitsandbytes

    for unit in split_into_units(model).units:
        for name, layer in list(unit.module.named_modules()):
            if not isinstance(layer, nn.Linear):
                continue
            four = bitsandbytes.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=False,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
            )
            four.weight = bitsandbytes.nn.Params4bit(
                layer.weight.data.cpu(), requires_grad=False, quant_type="nf4"
            )
            owner, _, last = name.rpartition(".")
            setattr(unit.module.get_submodule(owner), last, four.to(layer.weight.device))
    return model
