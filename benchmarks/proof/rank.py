"""A rank of the stage `unequal`: a process that is told what to do, line by line, by the stage.

It answers each line of its input, a JSON object, with one line. It touches the device only when it
is told to open it, and how: with what part of its memory, and of its processors.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gpumix
from compared.setting import Batch, Setting
from compared.systems import Loop, OnEngine, optimizer_of
from gpumix.engine.comm.process_groups import make_communicator
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode, Stage, Worker
from proof.lines import last_lines
from proof.models import Llama
from proof.systems import TINY_LLAMA_RATES

GROUP_TIMEOUT = timedelta(seconds=60)
Told = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """Steps of one plan, as all ranks are told them.

    Attributes:
        shares: of each rank its samples, its micro-batch and its share of the state.
    """

    model: dict[str, Any]
    shares: tuple[tuple[int, int, float], ...]
    zero_stage: Any
    dtype: Any
    recompute: bool = True

    @property
    def spec(self) -> Llama:
        return Llama(**self.model)

    @property
    def global_batch(self) -> int:
        return sum(samples for samples, _, _ in self.shares)

    def plan(self, model: nn.Module) -> Plan:
        anatomy = split_into_units(model)
        order = "sequential" if self.zero_stage == 0 else "layered"
        workers = tuple(
            Worker(
                device=f"rank-{rank}",
                device_class=f"class-{rank}",
                samples=samples,
                micro_batch=micro_batch,
                state_share=state_share,
                mode=Mode(recompute=self.recompute, order=order),
                compute_dtype=self.dtype,
            )
            for rank, (samples, micro_batch, state_share) in enumerate(self.shares)
        )
        return Plan(
            strategy="uneven",
            model=anatomy.fingerprint(),
            sequence_length=self.spec.sequence,
            global_batch=self.global_batch,
            communication_dtype=self.dtype,
            stages=(Stage(units=tuple(u.name for u in anatomy.units), workers=workers),),
            zero_stage=self.zero_stage,
        )

    def batch(self, step: int, rank: int, device: torch.device) -> Batch:
        """The samples of a rank in a step; they are the same whatever the shares."""
        begin = sum(samples for samples, _, _ in self.shares[:rank])
        rows = self.spec.rows(step * self.global_batch, self.global_batch)
        own = slice(begin, begin + self.shares[rank][0])
        return {name: values[own].to(device) for name, values in rows.items()}


class Rank:
    """What one process can be told to do; the names of its methods are those of orders."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._context: Any = None  # a green context, which lives as long as it is used
        self._systems: dict[str, tuple[OnEngine, list[Batch]]] = {}

    def open(self, *, on_cuda: bool, fraction: float, threads: int, processors: int = 0) -> Told:
        """Use the device, with part of its memory, and with so many of its processors if told."""
        torch.set_num_threads(threads)
        found = self._confine(processors) if on_cuda and processors else ""
        if on_cuda:
            self.device = torch.device("cuda", 0)
            torch.cuda.set_device(self.device)
            torch.cuda.set_per_process_memory_fraction(fraction, self.device)
        return {"sum": torch.ones(4, device=self.device).sum().item(), "green_context": found}

    def _confine(self, processors: int) -> str:
        """Compute on so many of the GPU's processors, as a green context; what came of it."""
        try:
            from torch.cuda.green_contexts import GreenContext

            torch.cuda.init()
            self._context = GreenContext.create(processors, 0)
            self._context.set_context()
        except Exception as error:  # without it ranks take turns on all processors
            return f"refused: {type(error).__name__}: {error}"
        return "made"

    def take(self, *, leave_bytes: int) -> Told:
        """Take all memory of the GPU that is free, but so much."""
        free, _ = torch.cuda.mem_get_info()
        taken = max(0, free - leave_bytes)
        self._taken = torch.empty(taken, dtype=torch.uint8, device="cuda")
        return {"taken_bytes": taken, "free_bytes": torch.cuda.mem_get_info()[0]}

    def copy_out(self, *, size_bytes: int) -> Told:
        """Copy so much state as copies in memory are made: into a file in memory, registered."""
        from gpumix.train.checkpoint.dcp_storage import BoxedTensor
        from gpumix.train.checkpoint.host_copy import HostCopy
        from gpumix.train.memory_checkpoint.checkpointer import _create_memory

        on_cuda = self.device.type == "cuda"
        value = torch.randn(size_bytes // 4, device=self.device)
        tensors = {"state": BoxedTensor(value.shape, {(0,): value})}
        file = Path("/dev/shm") / f"gpu-proof-copy-{os.getpid()}"
        try:
            memory = _create_memory(file, size_bytes, pinned=on_cuda)
            copy = HostCopy(tensors, pinned=False, memory=memory)
            stream = torch.cuda.Stream() if on_cuda else None
            seconds = []
            for _ in range(4):
                begun = time.perf_counter()
                copy.fill(tensors, stream)
                seconds.append(time.perf_counter() - begun)
            return {
                "copy_bytes_per_s": size_bytes / min(seconds[1:]),
                "host_memory_pinned": bool(memory.is_pinned()) if on_cuda else False,
                "copy_exact": bool((memory.view(torch.float32) == value.cpu()).all()),
            }
        finally:
            file.unlink(missing_ok=True)

    def join(self, *, rank: int, world: int, port: int) -> Told:
        """Meet the other ranks, over gloo."""
        self.rank, self.world = rank, world
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=GROUP_TIMEOUT)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=GROUP_TIMEOUT
        )
        return {}

    def product(self, *, side: int, times: int) -> Told:
        """Seconds of one matrix product, after some to warm up."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        left = torch.randn(side, side, device=self.device, dtype=dtype)
        seconds = 0.0
        for number in (times, times):  # the first warms up
            self._synchronize()
            begun = time.perf_counter()
            for _ in range(number):
                left @ left
            self._synchronize()
            seconds = (time.perf_counter() - begun) / number
        return {"seconds": seconds}

    def unit(self, *, run: Told, samples: int, times: int) -> Told:
        """Seconds of forward and backward of one block for a micro-batch: how fast this rank is."""
        spec = Run(**run).spec
        block = split_into_units(spec.build_on(self.device)).units[0].module
        shape = (samples, spec.sequence, spec.width)
        inputs = torch.randn(shape, device=self.device, requires_grad=True)
        positions = torch.arange(spec.sequence, device=self.device)[None]
        angles = torch.zeros(1, spec.sequence, spec.width // spec.heads, device=self.device)
        around = (angles.cos(), angles.sin())

        def once() -> None:
            with torch.autocast(self.device.type, torch.bfloat16):
                made = block(inputs, position_ids=positions, position_embeddings=around)
            (made[0] if isinstance(made, tuple) else made).float().sum().backward()

        once()
        self._synchronize()
        begun = time.perf_counter()
        for _ in range(times):
            once()
        self._synchronize()
        return {"seconds": (time.perf_counter() - begun) / times}

    def alone(self, *, run: Told, steps: int) -> Told:
        """The losses of a plain loop over the same batches, in this process alone."""
        of = Run(**run)
        setting = Setting(of.spec, 1, of.global_batch, 2, dtype=of.dtype, rates=TINY_LLAMA_RATES)
        loop = Loop(of.spec.build_on(self.device), setting, autocast=True)
        whole = Run(**{**run, "shares": ((of.global_batch, 1, 1.0),)})
        losses = [loop.step(whole.batch(step, 0, self.device)) for step in range(steps)]
        return {"losses": torch.stack(losses).tolist()}

    def prepare(self, *, name: str, run: Told, steps: int) -> Told:
        """Make the engine of a plan, and its batches. Collective."""
        of = Run(**run)
        model = of.spec.build_on(self.device)
        plan = of.plan(model)
        engine = gpumix.prepare(model, plan, comm=make_communicator(self.device, plan.collectives))
        system = OnEngine(engine, optimizer_of(engine.parameters(), TINY_LLAMA_RATES))
        batches = [of.batch(step, self.rank, self.device) for step in range(steps)]
        self._systems[name] = (system, batches)
        return {"communicator": type(engine.comm).__name__}

    def steps(self, *, name: str, steps: int) -> Told:
        """Train: losses, seconds of a step, and the share of them in which this rank waited for
        others. Collective; it begins and ends together with the others."""
        system, batches = self._systems[name]
        clock = system.engine.comm.clock
        self._meet()
        waited, begun = clock.total_s(), time.perf_counter()
        losses = [system.step(batches[number % len(batches)]) for number in range(steps)]
        self._synchronize()
        own_s = time.perf_counter() - begun
        self._meet()
        took_s = time.perf_counter() - begun
        return {
            "losses": torch.stack(losses).tolist(),
            "step_s": took_s / steps,
            "waiting_share": (clock.total_s() - waited + took_s - own_s) / took_s,
            "peak_bytes": self._peak_bytes(),
        }

    def drop(self, *, name: str) -> Told:
        """Free a system."""
        del self._systems[name]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {}

    def _meet(self) -> None:
        self._synchronize()
        dist.barrier()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0


def main() -> None:
    """Do what the lines of the input say, until they end."""
    orders = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 as long as the process
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    rank = Rank()

    def answer(**told: Any) -> None:
        answers.write(json.dumps(told) + "\n")
        answers.flush()

    answer(ok=True, value={"pid": os.getpid()})
    for line in orders:
        order = json.loads(line)
        act: Callable[..., Told] = getattr(rank, order["do"])
        try:
            answer(ok=True, value=act(**order["with"]))
        except Exception as error:
            told = last_lines("".join(traceback.format_exception(error)))
            print(told, file=sys.stderr, flush=True)
            answer(ok=False, error=told)
    os._exit(0)


if __name__ == "__main__":
    main()
