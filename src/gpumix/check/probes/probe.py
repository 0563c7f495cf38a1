"""Tasks of a rank's probe process: inspect the host, test the device, and test links to peers.

Any task may hang, since hangs are among the problems tested for. The asking side (`worker`) then
kills the process and starts another, which opens its device again on demand.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpumix.check.facts.cluster import GpuSpeed
from gpumix.check.facts.host import find_existing_parent, gather_host_facts
from gpumix.check.facts.job import check_job_on_host, estimate_checkpoint_bytes, saved_bytes
from gpumix.engine.comm.communicator import leave_groups
from gpumix.engine.comm.process_groups import make_communicator
from gpumix.hardware.device import DeviceRuntime, open_device
from gpumix.hardware.discovery.amd_health import find_amd_handle, open_amdsmi, read_amd_health
from gpumix.hardware.discovery.discover import discover_cluster
from gpumix.hardware.discovery.gpu_health import (
    GpuHealth,
    GpuReading,
    find_handle,
    open_nvml,
    read_gpu,
    read_health,
)
from gpumix.hardware.host.environment import cache_folder, hide_gpus
from gpumix.hardware.runtime import capability, choose_backend
from gpumix.profiler.compute.peak_flops import measure_peak
from gpumix.profiler.network import time_message
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.errors import InputError, MachineError, get_first_line
from gpumix.schema.files import open_lock_file, remove_quietly
from gpumix.schema.job.job import Job
from gpumix.train.processes.local_launcher import RankAddress
from gpumix.train.processes.store import connect_store

SMALL_BYTES, TRIAL_BYTES = 4 * 1024, 2**20
LEAST_BYTES, MOST_BYTES = 2**20, 64 * 2**20  # of a large message
MESSAGE_S = 0.05  # target duration of a large message
COPIED_BYTES = 2**28
PINNED_BYTES = 2**26
LOADED_ROWS = 4096  # of matrices in the products used as load
LOADED_S = 0.4  # duration of the load while the driver is queried
REPEATS = 4
NCCL_TIMEOUT_S = 600  # NCCL's watchdog would end the process; the asking side times out first
JsonDict = dict[str, Any]
TASKS = (
    "facts", "speed", "host_copy", "connect", "transfer", "part", "job", "model", "leave", "seen",
)  # fmt: skip


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of a rank's probe processes.

    Attributes:
        job: None where a cluster is tested without a job.
        folder: of the job file.
        debug: whether processes print each error's traceback and the output of libraries.
    """

    device_class: DeviceClass
    job: Job | None = None
    folder: Path = Path()
    debug: bool = False


class RankProbe:
    """A rank's probe; `answer` runs a task by name."""

    def __init__(self, seat: RankAddress, setting: ProbeSettings) -> None:
        self.seat = seat
        self.setting = setting
        self._runtime: DeviceRuntime | None = None
        if setting.device_class.accelerator == "cpu":
            hide_gpus()

    def answer(self, task: str, given: JsonDict) -> JsonDict:
        """Run a task and return its result, in JSON types."""
        if task not in TASKS:
            raise KeyError(task)
        found: JsonDict = getattr(self, task)(**given)
        return found

    # -- this host and device ----------------------------------------------------------------------

    def facts(self, *, of_host: bool) -> JsonDict:
        """Gather facts before ranks use GPUs, so memory in use belongs to foreign processes."""
        found: JsonDict = {}
        if of_host:
            job = self.setting.job
            folders = {"output": job.output_dir} if job is not None else {}
            found["host"] = gather_host_facts(folders | {"cache": cache_folder()}).model_dump()
        if self._on_gpu:
            told = self._health()
            found |= {} if told is None else {"health": told.model_dump()}
        return found

    @property
    def _on_gpu(self) -> bool:
        return self.setting.device_class.is_gpu

    @property
    def _device(self) -> torch.device:
        """Device of test tensors. A CPU is not opened, since its memory is not under test."""
        if not self._on_gpu:
            return torch.device("cpu")
        return self._opened().torch_device

    def _opened(self) -> DeviceRuntime:
        if self._runtime is None:
            device = self.seat.device
            self._runtime = open_device(
                self.setting.device_class, device.ordinal, device_id=device.id
            )
        return self._runtime

    def _uuid(self) -> str:
        device = self.seat.device
        if device.id.startswith("GPU-"):
            return device.id
        there = discover_cluster().devices
        if device.ordinal >= len(there):
            raise InputError(
                f"there is no device {device.ordinal}, this host has {len(there)}",
                code="device-not-on-host",
                fix="gpumix devices shows what is here; mend the ordinals of the cluster",
            )
        return there[device.ordinal].id

    def _health(self) -> GpuHealth | None:
        """Query the GPU vendor's driver; return None for vendors without support."""
        maker, device = self.setting.device_class.maker, self.seat.device
        if maker == "NVIDIA":
            return self._nvidia_health()
        if maker == "AMD":
            with open_amdsmi() as smi:
                handle = None if smi is None else find_amd_handle(smi, device.id, device.ordinal)
                return None if handle is None else read_amd_health(smi, handle, device.ordinal)
        return None

    def _nvidia_health(self) -> GpuHealth:
        with open_nvml() as nvml:
            if nvml is None:
                raise MachineError(
                    "there is no NVIDIA driver, or it does not answer",
                    code="nvidia-driver-silent",
                    fix="run nvidia-smi there",
                )
            try:
                return read_health(nvml, find_handle(nvml, self._uuid(), self.seat.device.ordinal))
            except nvml.NVMLError as error:
                raise MachineError(
                    f"the driver does not find the GPU: {error}",
                    code="gpu-not-found-by-driver",
                    fix="compare nvidia-smi -L with the cluster; a lost GPU needs a restart",
                ) from error

    def speed(self) -> JsonDict:
        """Measure matrix products and memory copies, and query the GPU under load."""
        runtime = self._opened()
        try:
            return self._speed(runtime).model_dump()
        except torch.OutOfMemoryError as error:
            raise MachineError(
                "there is too little free memory on it to try it",
                code="gpu-memory-full",
                why=get_first_line(error),
                fix="nvidia-smi shows who uses it",
            ) from error

    def _speed(self, runtime: DeviceRuntime) -> GpuSpeed:
        major = capability(runtime.torch_device)[0]
        dtype = torch.bfloat16 if major >= 8 else torch.float16 if major >= 7 else torch.float32
        peak = measure_peak(runtime, dtype).flops_per_s
        seen = self._under_load(runtime, dtype, peak)
        size = min(COPIED_BYTES, runtime.memory_limit_bytes // 16)
        one = torch.empty(size, dtype=torch.uint8, device=runtime.torch_device)
        copied_s = _fastest_s(runtime, one, torch.empty_like(one))
        return GpuSpeed(
            dtype=str(dtype).removeprefix("torch."),
            flops_per_s=peak,
            memory_bytes_per_s=2 * size / copied_s,
            reasons=0 if seen is None else seen.reasons,
            link=(0, 0) if seen is None else seen.link,
        )

    def _under_load(
        self, runtime: DeviceRuntime, dtype: torch.dtype, flops_per_s: float
    ) -> GpuReading | None:
        """Query the driver while the GPU computes; return None without an answer."""
        size = LOADED_ROWS
        square = torch.zeros(size, size, dtype=dtype, device=runtime.torch_device)
        into = torch.empty_like(square)
        for _ in range(max(1, int(LOADED_S * flops_per_s / (2 * size**3)))):
            torch.mm(square, square, out=into)
        time.sleep(LOADED_S / 2)
        with open_nvml() as nvml:
            if nvml is None:
                return None
            with suppress(nvml.NVMLError):
                handle = find_handle(nvml, self._uuid(), self.seat.device.ordinal)
                return read_gpu(nvml, handle, 0.0)
        return None

    def host_copy(self) -> JsonDict:
        """Measure copies from pinned host memory; devices of a host run in turn."""
        runtime = self._opened()
        here = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(PINNED_BYTES, dtype=torch.uint8, device=runtime.torch_device)
        return {"bytes_per_s": PINNED_BYTES / _fastest_s(runtime, here, there)}

    # -- two ranks ---------------------------------------------------------------------------------

    def connect(self, *, key: str, place: int, timeout_s: float) -> JsonDict:
        """Form a group of two on the training backend, and sum a few numbers."""
        try:
            return self._form_group(key, place, timeout_s)
        except dist.DistStoreError as error:
            raise MachineError(
                f"it waited {timeout_s:.0f} s for the other in vain", code="pair-timeout"
            ) from error
        except RuntimeError as error:  # network errors of the backends
            raise MachineError(get_first_line(error), code="pair-backend-failed") from error

    def _form_group(self, key: str, place: int, timeout_s: float) -> JsonDict:
        guest = replace(self.seat, holds_store=False)
        dist.init_process_group(
            choose_backend(self._device),
            store=dist.PrefixStore(key, connect_store(guest, timeout_s)),
            rank=place,
            world_size=2,
            timeout=timedelta(seconds=NCCL_TIMEOUT_S if self._on_gpu else timeout_s),
            device_id=self._device if self._on_gpu else None,
        )
        value = torch.full((1024,), 1.0 + place, device=self._device)
        dist.all_reduce(value)
        if not bool((value == 3.0).all()):
            raise MachineError(
                "a sum over both came out wrong",
                code="pair-sum-wrong",
                fix="test their memory (dcgmi diag -r 3) and the network between them",
            )
        if self._on_gpu:
            self._meet_over_gloo(timeout_s)
        comm = make_communicator(self._device)
        return {"latency_s": time_message(comm, SMALL_BYTES, agree=comm)}

    def _meet_over_gloo(self, timeout_s: float) -> None:
        """Run a barrier over gloo, used by checkpoints in addition to NCCL."""
        try:
            dist.barrier(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))
        except RuntimeError as error:
            raise MachineError(
                "NCCL works between them, gloo, over which checkpoints go, does not",
                code="pair-gloo-failed",
                why=get_first_line(error),
            ) from error

    def transfer(self) -> JsonDict:
        """Time a large message in both directions, sized to take `MESSAGE_S` on the link."""
        comm = make_communicator(self._device)
        rate = TRIAL_BYTES / max(1e-6, time_message(comm, TRIAL_BYTES, agree=comm))
        size = int(min(MOST_BYTES, max(LEAST_BYTES, rate * MESSAGE_S)))
        return {"bytes": size, "seconds": time_message(comm, size, agree=comm)}

    def part(self) -> JsonDict:
        """Leave the process group."""
        if dist.is_initialized():
            leave_groups()
        return {}

    # -- the job -----------------------------------------------------------------------------------

    @property
    def _job(self) -> Job:
        assert self.setting.job is not None, "asked with a job only"
        return self.setting.job

    def job(self) -> JsonDict:
        return check_job_on_host(self._job, self.setting.folder).model_dump()

    def model(self) -> JsonDict:
        """Return the bytes of a checkpoint and of saved checkpoints."""
        size = estimate_checkpoint_bytes(self._job, self.setting.folder)
        return {"checkpoint_bytes": size, "saved_bytes": saved_bytes(self._job.output_dir)}

    def leave(self, *, name: str, there: bool) -> JsonDict:
        """Create or remove a marker file next to the output."""
        file = self._beside_output(name)
        if there:
            os.close(open_lock_file(file))
        else:
            remove_quietly(file)
        return {}

    def seen(self, *, name: str) -> JsonDict:
        return {"seen": self._beside_output(name).exists()}

    def _beside_output(self, name: str) -> Path:
        return find_existing_parent(self._job.output_dir) / name


def _fastest_s(runtime: DeviceRuntime, source: torch.Tensor, into: torch.Tensor) -> float:
    """Return the seconds of the fastest of several copies."""
    seconds = []
    for _ in range(1 + REPEATS):
        runtime.synchronize()
        begun = time.perf_counter()
        into.copy_(source, non_blocking=True)
        runtime.synchronize()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
