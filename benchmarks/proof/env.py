"""Stage `env`: what the machine has, and four facts without which nothing else makes sense."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch.nn.functional import cross_entropy

from gpumix.engine.cross_entropy.fused_cross_entropy import compute_fused_losses
from proof.bench import Bench
from proof.entry import STARTED_BY
from proof.lines import Bar, is_true
from proof.outcome import Outcome
from proof.service import mps_control

LAG_CYCLES = 2_000_000  # a millisecond of a GPU's time
COPIES = 100
LOSSES = 50
IMPORTED = (
    "torch._dynamo",
    "transformers.modeling_utils",
    "gpumix.train.rank_tasks",
    "proof.preload",
)


def run(bench: Bench) -> Outcome:
    first = bench.measured("fork", lambda: _forked_child(bench))
    if bench.place == "gpu" and not first.get("fork_ok"):
        return Outcome({"fork_ok": False}, (is_true("fork_ok"),))
    found = dict(first)
    facts = {"threads": _threads, "pinned": _pinned_copies, "fused_loss": _fused_loss}
    for name, fact in facts.items():
        found |= bench.measured(name, lambda fact=fact: (fact(bench), ()))
    found |= bench.measured("machine", lambda: (_machine(bench), ()))
    bars = tuple(is_true(f"{name}_ok") for name in ("fork", *facts))
    return Outcome(found, bars)


def _forked_child(bench: Bench) -> tuple[dict[str, Any], tuple[Bar, ...]]:
    """This process makes a tensor on the device. It was forked, if the proof forks."""
    figures: dict[str, Any] = {
        "missing_imports": ", ".join(one for one in IMPORTED if one not in sys.modules),
        "started_by": os.environ.get(STARTED_BY, "exec"),
        "bad_fork": bool(torch.cuda._is_in_bad_fork()),
    }
    try:
        figures["fork_ok"] = int(torch.arange(4, device=bench.device).sum()) == 6
    except Exception as error:
        figures |= {"fork_ok": False, "fork_error": f"{type(error).__name__}: {error}"}
    return figures, (is_true("fork_ok"),)


def _threads(bench: Bench) -> dict[str, Any]:
    """Backward of a device runs in autograd's own thread, and greenlets may switch there, while one
    of this thread sleeps."""
    asleep = greenlet(_switched)
    asleep.switch(getcurrent(), 1.0)
    seen: list[int] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return 2 * value

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(threading.get_ident())
            inside = greenlet(_switched)
            inside.switch(getcurrent(), 1.0)
            return gradient * inside.switch(1.0)

    leaf = torch.ones(8, device=bench.device, requires_grad=True)
    Doubled.apply(leaf).sum().backward()
    right = leaf.grad is not None and leaf.grad.tolist() == [2.0] * 8
    other = seen != [threading.get_ident()]
    right = right and asleep.switch(2.0) == 3.0
    return {
        "backward_in_another_thread": other,
        "greenlets_ok": right,
        "threads_ok": right and (other or not bench.on_cuda),
    }


def _switched(back: Any, value: float) -> float:
    """A greenlet that sleeps once, and gives the sum of what it was given."""
    more: float = back.switch()
    return value + more


def _pinned_copies(bench: Bench) -> dict[str, Any]:
    """Copies of pinned batches on a stream of their own, whose memory is dropped while the stream
    that computes lags behind: each sum is exact."""
    if not bench.on_cuda:
        sums = [torch.full((1000,), float(n)).clone().sum().item() for n in range(COPIES)]
        return {"pinned_ok": sums == [1000.0 * n for n in range(COPIES)]}
    side, computing = torch.cuda.Stream(), torch.cuda.current_stream()
    totals = torch.zeros(COPIES, device=bench.device, dtype=torch.float64)
    sizes = 1_000_000 if bench.place == "gpu" else 1000
    for number in range(COPIES):
        batch = torch.full((sizes,), float(number)).pin_memory()
        with torch.cuda.stream(side):
            moved = batch.to(bench.device, non_blocking=True)
        computing.wait_stream(side)
        moved.record_stream(computing)
        if bench.place == "gpu":
            torch.cuda._sleep(LAG_CYCLES)
        totals[number] += moved.double().sum()
        del moved, batch
    wrong = [n for n, total in enumerate(totals.tolist()) if total != float(sizes) * n]
    return {"pinned_ok": not wrong, "pinned_wrong": len(wrong)}


def _fused_loss(bench: Bench) -> dict[str, Any]:
    """The fused loss is torch's, and the same each time: a race would show as another loss. In a
    rehearsal, where there is no Triton, torch's own arithmetic takes its place."""
    real = bench.place == "gpu"
    rows, classes = (300, 32_001) if real else (30, 1001)
    figures: dict[str, Any] = {}
    differing, right = 0, True
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(1)
        logits = (3 * torch.randn(rows, classes, device=bench.device)).to(dtype)
        targets = torch.randint(classes, (rows,), device=bench.device)
        factors = torch.ones(rows, device=bench.device)
        expected = cross_entropy(logits.double(), targets, reduction="none")
        losses, gradients = [], []
        for _ in range(LOSSES if real else 3):
            given = logits.clone()
            losses.append(_losses(bench, given, targets, factors))
            gradients.append(given)
        differing += sum(not torch.equal(losses[0], one) for one in losses)
        differing += sum(not torch.equal(gradients[0], one) for one in gradients)
        error = ((losses[0].double() - expected).abs() / expected.abs()).max().item()
        figures[f"fused_loss_off_{str(dtype).removeprefix('torch.')}"] = error
        right = right and error < 1e-5
    return figures | {"fused_loss_differing": differing, "fused_loss_ok": right and not differing}


def _losses(
    bench: Bench, logits: torch.Tensor, targets: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    if bench.place == "gpu":
        return compute_fused_losses(logits, targets, factors, 0.0)
    chosen = logits.float().gather(1, targets[:, None])[:, 0]
    return factors * (logits.float().logsumexp(1) - chosen)


def _machine(bench: Bench) -> dict[str, Any]:
    """Versions, memory and tools."""
    import transformers

    print(_said("nvidia-smi", "-q", "-d", "CLOCK,POWER,MEMORY"), file=sys.stderr)
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return {
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda or "",
        "transformers": transformers.__version__,
        "triton": _version("triton"),
        "bitsandbytes": _version("bitsandbytes"),
        "peft": _version("peft"),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cores": len(os.sched_getaffinity(0)),
        "shared_memory_free_gib": round(shared / 2**30, 1),
        "memory_gib": round((bench.card.memory_bytes if bench.card else 0) / 2**30, 1),
        "mps_control": mps_control() or "",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if bench.place == "gpu" else "",
    }


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return done.stdout.strip()


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""
