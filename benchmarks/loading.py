"""How much memory and time loading takes: ranks of one host that read weights from files.

A Llama with random weights in bf16, a file a block, is made in a temporary folder. Ranks of unlike
shares load it by `gpumix.from_pretrained` and shard it by a plan, with adapters on a base that
computes in bf16, and train a part of it in fp32; then as programs do without gpumix: each process
makes the whole model, which is sharded afterwards. Nothing is emulated.

    python benchmarks/loading.py [--json] [--ranks 3] [--small]

Figures:

- `peak_ram_over_model`: by how much the processes' resident memory grows together until the engine
  is ready, at its peak, over the bytes that the plan keeps there (shards, gradients, buffers of
  gathers); the worst of the cases `adapters`, `full` and, where bitsandbytes is installed, `nf4`.
  What Python and its libraries take is not counted. `stock_peak_ram_over_model` is the same where
  each process makes the whole model.
- `start_s`: seconds from the call that loads to the engine, on the slowest rank, with `gigabytes`
  of weights in files, in the case `adapters`; `stock_start_s` is that of stock loading. The
  files were just written, so they are in the host's cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpumix
from common import Figures, make_parser, print_figures

MOST_RAM = {False: 1.2, True: 1.5}  # small models: a dozen MB of Python's weigh more
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 17}
SMALL = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 13}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
VOCABULARIES = {2048: 32000, 512: 8000, 64: 64}
HEADS = 16


@dataclass(frozen=True)
class Case:
    """How a model is loaded and trained.

    Attributes:
        folder: of the weights.
        tiny: of a model of the same kind: what loads it is in memory before anything is measured.
        adapters, nf4: on a frozen base; in 4 bits.
        lazily: by gpumix, or by each process in full.
    """

    folder: Path
    tiny: Path
    adapters: bool = True
    nf4: bool = False
    lazily: bool = True


def main() -> int:
    arguments = _arguments()
    begun = time.perf_counter()
    figures: Figures = {"ranks": arguments.ranks}
    with tempfile.TemporaryDirectory() as name:
        large = _save(Path(name) / "large", SMALL if arguments.small else LARGE)
        small = _save(Path(name) / "small", SMALL)
        tiny = _save(Path(name) / "tiny", TINY)
        figures["gigabytes"] = round(_bytes_in(large) / 1e9, 3)
        cases = {"adapters": Case(large, tiny), "full": Case(small, tiny, adapters=False)}
        if find_spec("bitsandbytes") is not None:
            cases["nf4"] = Case(large, tiny, nf4=True)
        for name_of_case, case in cases.items():
            figures |= _measure(name_of_case, case, arguments.ranks)
        figures |= _measure("stock", Case(large, tiny, lazily=False), arguments.ranks)
    over = "peak_ram_over_model"
    worst = max(float(str(figures[f"{case}_{over}"])) for case in cases)
    figures[over] = worst
    figures["start_s"] = figures["adapters_start_s"]
    figures["seconds"] = round(time.perf_counter() - begun, 1)
    print_figures(figures, as_json=arguments.json)
    if worst <= (most := MOST_RAM[arguments.small]):
        return 0
    print(f"{over} is {worst}, more than {most}", file=sys.stderr)
    return 1


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=3, help="processes, of unlike shares")
    parser.add_argument("--small", action="store_true", help="100 MB in files instead of 2 GB")
    return parser.parse_args()


def _save(folder: Path, sizes: dict[str, int]) -> Path:
    """Write a Llama with random weights, a file for each block, without making the model."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    if folder.exists():
        return folder
    folder.mkdir()
    settings: dict[str, Any] = {**sizes}
    config = LlamaConfig(
        **settings,
        vocab_size=VOCABULARIES[sizes["hidden_size"]],
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in LlamaForCausalLM(config).state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(1 << 20, generator=generator).mul_(0.02).to(torch.bfloat16)
    places: dict[str, str] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name in shapes:
        parts.setdefault(".".join(name.split(".")[:3]), {})[name] = None
    for number, names in enumerate(parts.values()):
        file = f"model-{number:05}.safetensors"
        tensors = {}
        for name in names:
            count = shapes[name].numel()
            tensors[name] = draws.repeat(-(-count // len(draws)))[:count].view(shapes[name]).clone()
            places[name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": _bytes_in(folder)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _measure(name: str, case: Case, ranks: int) -> Figures:
    from helpers.processes.harness import run_ranks

    told = run_ranks(_load, ranks, case, timeout_s=1800, group_timeout_s=900)
    grown, kept, seconds = (list(column) for column in zip(*told))
    shown = ", ".join(f"{g / 1e6:.0f} of {k / 1e6:.0f}" for g, k in zip(grown, kept))
    print(f"{name}: {max(seconds):.1f} s; MB of RAM by rank, of what is kept: {shown}")
    return {
        f"{name}_peak_ram_over_model": round(sum(grown) / sum(kept), 3),
        f"{name}_start_s": round(max(seconds), 2),
    }


def _load(case: Case) -> tuple[int, int, float]:
    """Load and shard in a rank: growth of its memory at the peak, what it keeps, seconds."""
    import torch
    import torch.distributed as dist

    from gpumix.hardware.host.resident_memory import PeakMemory
    from gpumix.testing import Share, plan_for

    torch.set_num_threads(1)
    _make_model(case, case.tiny)
    dist.barrier()
    with PeakMemory() as memory:
        begun = time.perf_counter()
        model = _make_model(case, case.folder)
        shares = [Share(1, 1, 1 + rank) for rank in range(dist.get_world_size())]
        plan = plan_for(model, shares, compute_dtype="bf16" if case.adapters else "fp32")
        engine = gpumix.prepare(model, plan)
        seconds = time.perf_counter() - begun
    return memory.grown_bytes, _kept_bytes(engine), seconds


def _make_model(case: Case, folder: Path) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    more: dict[str, Any] = {}
    if case.nf4:
        settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        more = {"quantization_config": settings, "device_map": {"": "cpu"}}
    load = gpumix.from_pretrained if case.lazily else AutoModelForCausalLM.from_pretrained
    model = load(folder, **more)
    if not case.adapters:
        return model
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))


def _kept_bytes(engine: Any) -> int:
    """Bytes of shards, gradients and buffers, each storage counted once."""
    tensors = [shard.gradient for shard in engine.trained_shards()]
    for group in engine.groups():
        tensors += [shard.master for shard in group.shards]
        tensors += [one for one in (group.full, group.gradient) if one is not None]
    tensors += [memory for pool in engine.comm._pools.values() for memory in pool]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(held.values())


if __name__ == "__main__":
    sys.exit(main())
