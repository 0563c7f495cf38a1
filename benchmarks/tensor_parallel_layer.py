"""A transformer layer that two ranks compute together: ours against torch's `parallelize_module`.

The same layer, the same division of the same modules, forward and backward without recompute, in
alternating rounds in the same processes (gloo, loopback, one thread each).

    python benchmarks/tensor_parallel_layer.py [--json] [--rounds 32]

Figures, by hidden size: `dtensor_vs_ours_128` and `dtensor_vs_ours_512`, how many times as long
torch's takes (medians), and `collectives_ours`, `collectives_dtensor` of one pass of each.
"""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from common import Figures, make_parser, print_figures
from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.engine.tensor_parallel.parallelize import parallelize_model, select_whole_model
from helpers.processes.harness import run_ranks

HIDDEN = (128, 512)
SAMPLES, LENGTH = 2, 128
WARM_UP = 4
COLWISE = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROWWISE = ("self_attn.o_proj", "mlp.down_proj")


class Layers(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=32)
    arguments = parser.parse_args()
    figures: Figures = {}
    for hidden in HIDDEN:
        ours_s, theirs_s, ours, theirs = run_ranks(_timed, 2, hidden, arguments.rounds)[0]
        figures[f"dtensor_vs_ours_{hidden}"] = theirs_s / ours_s
        figures["collectives_ours"], figures["collectives_dtensor"] = ours, theirs
    print_figures(figures, as_json=arguments.json)


def _timed(hidden: int, rounds: int) -> tuple[float, float, int, int]:
    """On a rank: median seconds of both, and collectives of both."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_hidden_layers=1,
        vocab_size=64,
    )
    config._attn_implementation = "sdpa"
    tp_group = Communicator(dist.group.WORLD, rank=dist.get_rank(), world=2)
    ours, theirs = _ours(config, tp_group), _theirs(config)
    x = torch.randn(SAMPLES, LENGTH, hidden, requires_grad=True)
    positions = LlamaRotaryEmbedding(config)(x, torch.arange(LENGTH)[None])

    def run(model: Layers) -> None:
        found = model.layers[0](x, position_embeddings=positions)
        (found[0] if isinstance(found, tuple) else found).sum().backward()

    seconds: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(WARM_UP + rounds):
        for number, model in enumerate((ours, theirs)):
            dist.barrier()
            begun = time.perf_counter()
            run(model)
            seconds[number].append(time.perf_counter() - begun)
    before = tp_group.counts.total()
    run(ours)
    with CommDebugMode() as watched:
        run(theirs)
    return (
        median(seconds[0][WARM_UP:]),
        median(seconds[1][WARM_UP:]),
        tp_group.counts.total() - before,
        watched.get_total_counts(),
    )


def _ours(config: LlamaConfig, tp_group: Communicator) -> Layers:
    model = Layers(config)
    plan = {f"layers.*.{name}": "colwise" for name in COLWISE}
    plan |= {f"layers.*.{name}": "rowwise" for name in ROWWISE}
    anatomy = split_into_units(model, ["LlamaDecoderLayer"])
    divided, _ = parallelize_model(anatomy, tp_group, plan, part=select_whole_model(anatomy))
    for slot in (slot for unit in divided.units for slot in unit.slots):
        for module, name in slot.places:
            own = slot.window.of(slot.parameter.detach()).clone()
            module._parameters[name] = nn.Parameter(own)
    return model


def _theirs(config: LlamaConfig) -> Layers:
    model = Layers(config)
    plan = {f"layers.*.{name}": ColwiseParallel() for name in COLWISE}
    plan |= {f"layers.*.{name}": RowwiseParallel() for name in ROWWISE}
    parallelize_module(model, DeviceMesh("cpu", [0, 1]), plan)
    return model


if __name__ == "__main__":
    main()
