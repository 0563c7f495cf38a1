"""A replica group of torchft, of one process; or its lighthouse. Run with torchft on the path.

Gradients are averaged in one piece by `Manager.allreduce`. The wrapper of DDP in torchft 0.2.0 ends
those that have lost a peer under gloo too, by an assertion in its hook.

    python replica.py lighthouse HEARTBEAT_TIMEOUT_MS JOIN_TIMEOUT_MS
    python replica.py NUMBER REPLICAS SAMPLES FOLDER ADDRESS
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

PATIENCE_S = 20.0


def lighthouse(heartbeat_timeout_ms: int, join_timeout_ms: int) -> None:
    """Tells its address, and serves until it is ended."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=join_timeout_ms,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
    )
    print(server.address(), flush=True)
    time.sleep(1e6)


def train(number: int, replicas: int, samples: int, folder: Path, address: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.utils import parameters_to_vector
    from torchft import Manager, Optimizer, ProcessGroupGloo

    from kept.paced import Told, model, tokens

    torch.set_num_threads(1)
    torch.manual_seed(0)
    inner = model()
    weights = list(inner.parameters())
    adamw = torch.optim.AdamW(weights, lr=1e-3)

    def state() -> dict[str, Any]:
        return {"model": inner.state_dict(), "optimizer": adamw.state_dict()}

    def load(told: dict[str, Any]) -> None:
        inner.load_state_dict(told["model"])
        adamw.load_state_dict(told["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=PATIENCE_S)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=timedelta(seconds=PATIENCE_S),
        quorum_timeout=timedelta(seconds=3 * PATIENCE_S),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"replica-{number}",
        hostname="127.0.0.1",
        init_sync=False,
    )
    optimizer = Optimizer(manager, adamw)
    every, told = tokens(), Told(folder, number)
    while True:
        optimizer.zero_grad()
        first = (manager.batches_committed() + number) * samples
        picked = [every[(first + n) % len(every)] for n in range(samples)]
        batch = {key: torch.stack([one[key] for one in picked]) for key in picked[0]}
        loss, count = inner(**batch)
        (loss / count).backward()
        gradient = parameters_to_vector([weight.grad for weight in weights])
        manager.allreduce(gradient).wait()
        for weight, part in zip(weights, gradient.split([w.numel() for w in weights]), strict=True):
            weight.grad = part.view_as(weight)
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() != before:
            told.step(manager.current_step(), manager.batches_committed() / replicas)


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        lighthouse(*map(int, sys.argv[2:]))
    else:
        train(*map(int, sys.argv[1:4]), Path(sys.argv[4]), sys.argv[5])
