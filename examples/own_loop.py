"""Use gpumix in your own training loop: profile, plan, shard, train, evaluate, save.

    torchrun --nproc-per-node 3 examples/own_loop.py     # three devices of two classes
    python examples/own_loop.py                          # a single process is a run of one rank

Both print the same losses: the plan does not change the result. The devices are emulated, so the
script runs anywhere: `CLASSES` states their speed and memory, and `gpumix.open_device` limits a
process to them. On your own GPUs leave out `cluster`, call
`torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` first, and use "nccl" instead of "gloo".
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import gpumix

LENGTH = 64
GLOBAL_BATCH = 12
STEPS = 8

DEVICES = (
    gpumix.Device(id="fast-0", device_class="fast"),
    gpumix.Device(id="slow-0", device_class="slow"),
    gpumix.Device(id="slow-1", device_class="slow"),
)
CLASSES = (  # four times as fast, with a third of the memory
    gpumix.DeviceClass(
        name="fast", accelerator="cpu", memory_bytes=22 * 2**20, emulate_flops_per_s=8e9
    ),
    gpumix.DeviceClass(
        name="slow", accelerator="cpu", memory_bytes=64 * 2**20, emulate_flops_per_s=2e9
    ),
)


class Text(torch.utils.data.Dataset):
    """A file's bytes in samples of `LENGTH` tokens: any map-style dataset of dictionaries does."""

    def __init__(self, path: Path) -> None:
        tokens = np.fromfile(path, dtype=np.uint8)  # numpy's memory is the host's, not the device's
        self.samples = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self.samples[index].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


def text() -> Text:
    return Text(Path(torch.__file__))


def build() -> torch.nn.Module:
    """Any function that returns a model; blocks of `transformers` models are found as such."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def some_batch(samples: int) -> dict[str, torch.Tensor]:
    """What the profiler runs: the right shapes are enough."""
    tokens = torch.randint(256, (samples, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    if "RANK" in os.environ:  # torchrun sets it
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    devices = DEVICES[:world]
    used = {device.device_class for device in devices}
    cluster = gpumix.Cluster(classes=[c for c in CLASSES if c.name in used], devices=devices)

    profile = gpumix.profile(
        build,
        some_batch,
        sequence_length=LENGTH,
        global_batch_size=GLOBAL_BATCH,
        cluster=cluster,
        dataset=text(),
    )
    plan = gpumix.plan(profile, global_batch_size=GLOBAL_BATCH)
    if rank == 0:
        for worker in plan.workers:
            print(
                f"{worker.device}: {worker.samples} samples, {worker.state_share:.0%} of the state"
            )

    with gpumix.open_device(cluster):
        train(plan, rank)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(plan: gpumix.Plan, rank: int) -> None:
    model = gpumix.build(build, seed=0)  # no rank ever holds the whole model
    engine = gpumix.prepare(model, plan)  # shards it in place
    optimizer = torch.optim.AdamW(engine.parameters(), lr=3e-3)
    held_out = next(gpumix.Loader(Text(Path(__file__).parents[1] / "README.md"), engine.plan, rank))

    with gpumix.Loader(text(), engine.plan, rank) as loader:
        for step, batch in zip(range(STEPS), loader):
            loss = engine.step(batch)
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and step % 4 == 3:
                print(f"step {step + 1}: loss {loss.item():.3f}")

    loss = engine.evaluate(held_out)  # collective: every rank has its share of the batch
    state = engine.state_dict(rank0_only=True)  # collective too: the names of the unsharded model
    if rank == 0:
        build().load_state_dict(state)  # an ordinary model again; torch.save it as ever
        print(f"held-out loss {loss.item():.3f}; {len(state)} tensors in the state dict")


if __name__ == "__main__":
    main()
