"""Context of a rank before training: device, peers, and data."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpumix.data.core.read_policy import Reading
from gpumix.data.core.source import Source
from gpumix.data.sources.open_data import open_data, require_held_out
from gpumix.data.workers.fetch import fetch_with_timeout
from gpumix.engine.comm.communicator import CommunicationError
from gpumix.engine.rank_group import STORE_ERRORS, RankGroup
from gpumix.hardware.device import DeviceRuntime, is_device_error, open_device
from gpumix.hardware.host.environment import cache_folder, hide_gpus, record_collectives
from gpumix.hardware.memory_limit import count_as_host_memory, is_fragmented, is_out_of_memory
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.errors import InputError, OutOfMemory, RankLost, get_first_line
from gpumix.schema.files import make_library_folder
from gpumix.schema.job.job import Job
from gpumix.schema.units import show_bytes
from gpumix.train.console.terminal import get_stderr_console
from gpumix.train.processes.error_translation import translate_error
from gpumix.train.processes.local_launcher import RankAddress
from gpumix.train.processes.store import connect_store
from gpumix.train.rank_setup.model import check_model_fits_data, get_vocabulary_size
from gpumix.train.run_log import run_files


@dataclass(frozen=True)
class Task:
    """The task given to all ranks of a run."""

    job: Job
    cluster: Cluster
    folder: Path
    debug: bool = False


@dataclass(frozen=True)
class RankContext:
    """A rank of a run, ready to work."""

    task: Task
    device: Device
    runtime: DeviceRuntime
    ranks: RankGroup
    train_data: Source
    held_out: Source

    @property
    def job(self) -> Job:
        return self.task.job

    @property
    def reading(self) -> Reading:
        return Reading(self.job.data.bad_samples, self.job.advanced.timeout)

    @property
    def first(self) -> bool:
        """True if this rank speaks for the run."""
        return self.ranks.rank == 0

    def batch(self, samples: int) -> dict[str, torch.Tensor]:
        """Return some batch of `samples` samples, for measurements."""
        indices = np.arange(samples) % len(self.train_data)
        return fetch_with_timeout(self.train_data, indices, self.reading, specimen=True)[0]


@contextmanager
def join_run(seat: RankAddress, task: Task) -> Iterator[RankContext]:
    """Take `seat`: open the device, join the group of ranks, open the data.

    Raises:
        TrainingError: also for errors inside the context: out of memory, a lost rank.
    """
    device_class = task.cluster.class_named(seat.device.device_class)
    store = connect_store(seat, task.job.advanced.timeout)
    if device_class.accelerator == "cpu":
        hide_gpus()
    else:
        _record_collectives(task.job.output_dir / run_files.COLLECTIVES)
    with _open_device(seat.device, device_class) as runtime:
        ranks = RankGroup(
            store,
            rank=seat.rank,
            world=seat.world,
            device=runtime.torch_device,
            timeout_s=task.job.advanced.timeout,
            seat=seat.device,
        )
        with ranks:
            try:
                if ranks.rank == 0 and runtime.uncounted:
                    get_stderr_console().print(
                        f"memory is neither counted nor limited here: {runtime.uncounted}; a C++ "
                        "compiler (apt-get install g++, xcode-select --install) makes limits real"
                    )
                _check_same_job(task.job, ranks)
                check_model_fits_data(task.job, task.folder)
                train_data, held_out = _open_same_data(task, ranks)
                yield RankContext(task, seat.device, runtime, ranks, train_data, held_out)
            except (CommunicationError, *STORE_ERRORS) as error:
                raise ranks.explain(error) from error
            except Exception as error:
                if is_out_of_memory(error):
                    raise _out_of_memory(error, seat.device, runtime, ranks) from error
                if is_device_error(error):
                    name = ranks.names[ranks.rank]
                    raise _make_device_lost_error(error, seat.device, name) from error
                raise translate_error(error, ranks.names[ranks.rank]) from error


def _record_collectives(folder: Path) -> None:
    with suppress(OSError):  # of a host not sharing the run's folder
        make_library_folder(folder)
        record_collectives(folder / "rank_")


def _check_same_job(job: Job, ranks: RankGroup) -> None:
    """Raise InputError if hosts were started with different job files; only paths may differ."""
    told = ranks.gather("job", json.dumps(mask_paths(job.model_dump())))
    first = json.loads(told[0])
    for rank, other in enumerate(map(json.loads, told)):
        for key in first:
            if other[key] != first[key]:
                raise InputError(
                    f"ranks disagree about the job: '{key}' is {first[key]} on {ranks.names[0]}, "
                    f"{other[key]} on {ranks.names[rank]}",
                    code="job-differs-by-rank",
                    fix="start every host with the same job and the same --set",
                )


def mask_paths(value: Any) -> Any:
    """Return a job's values to compare across hosts: paths may differ."""
    if isinstance(value, dict):
        return {key: mask_paths(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [mask_paths(item) for item in value]
    return "a path" if isinstance(value, Path) else value


def _open_same_data(task: Task, ranks: RankGroup) -> tuple[Source, Source]:
    """Open the data, checking that all hosts have equal files: a run would train on a mixture."""
    with count_as_host_memory():  # where a device is a CPU too
        train, held_out = open_data(
            task.job,
            task.folder,
            cache_folder() / "tokens",
            vocabulary=get_vocabulary_size(task.job.model),
        )
    require_held_out(task.job, held_out)
    told = ranks.gather("data", f"{len(train)} samples, fingerprint {train.fingerprint}")
    others = [rank for rank, text in enumerate(told) if text != told[0]]
    if others:
        raise InputError(
            f"ranks see different data: {ranks.names[0]} has {told[0]}, {ranks.names[others[0]]} "
            f"has {told[others[0]]}",
            code="data-differs-by-rank",
            fix="give every host the same data files",
        )
    return train, held_out


def _out_of_memory(
    error: Exception, device: Device, runtime: DeviceRuntime, ranks: RankGroup
) -> OutOfMemory:
    return OutOfMemory(
        "out of memory",
        code="out-of-memory",
        where=f"{ranks.names[ranks.rank]}, host {socket.gethostname()}, limit "
        f"{show_bytes(runtime.memory_limit_bytes)}",
        why=get_first_line(error),
        fix="profile again (`gpumix profile JOB.yaml --fresh`), or give the class a smaller "
        "`memory` in the cluster file, so that the plan leaves more room",
        device=device.id,
        device_class=device.device_class,
        fragmented=is_fragmented(error),
        obtainable=runtime.obtainable_bytes() / runtime.memory_limit_bytes,
    )


def _open_device(device: Device, device_class: DeviceClass) -> DeviceRuntime:
    try:
        return open_device(device_class, device.ordinal, device_id=device.id)
    except Exception as error:
        if is_device_error(error):
            raise _make_device_lost_error(error, device, f"device '{device.id}'") from error
        raise


def _make_device_lost_error(error: Exception, device: Device, name: str) -> RankLost:
    return RankLost(
        f"device '{device.id}' failed",
        code="device-failed",
        where=f"{name}, host {socket.gethostname()}",
        why=get_first_line(error),
        fix="look at `dmesg | grep -i xid` and `nvidia-smi -q -d ECC` there, then run the same "
        "command with --resume",
        device=device.id,
        device_class=device.device_class,
    )
