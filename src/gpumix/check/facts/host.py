"""Facts of the local host: versions, memory, limits, folders, networks. Uses no GPU."""

from __future__ import annotations

import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

import gpumix
from gpumix.check.facts.cluster import FolderFacts, HostFacts, ProcessLimits, Software
from gpumix.hardware import runtime
from gpumix.hardware.discovery.gpu_health import driver_versions
from gpumix.hardware.host.cpu import count_cores
from gpumix.hardware.host.environment import (
    available_host_bytes,
    get_communication_variables,
    has_cpp_compiler,
    host_memory_bytes,
)
from gpumix.train.run_manifest import get_versions

_SHM = Path("/dev/shm")
_RDMA = Path("/sys/class/infiniband")


def gather_host_facts(folders: Mapping[str, Path]) -> HostFacts:
    """Return the facts of this host; `folders` maps roles ("output", "cache") to paths."""
    shm = shutil.disk_usage(_SHM) if _SHM.is_dir() else None
    return HostFacts(
        software=get_software(),
        memory_bytes=host_memory_bytes(),
        available_bytes=available_host_bytes(),
        cores=count_cores(),
        shm_free_bytes=None if shm is None else shm.free,
        limits=get_process_limits(),
        rdma=tuple(sorted(path.name for path in _RDMA.glob("*"))),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        address=_resolve_own_address(),
        settings=get_communication_variables(),
        compiler=has_cpp_compiler(),
        folders=tuple(check_folder(role, path) for role, path in folders.items()),
    )


def get_software() -> Software:
    """Return the installed versions."""
    nccl = ""
    if dist.is_nccl_available():
        nccl = runtime.nccl_version()
    driver, driver_cuda = driver_versions()
    return Software(
        gpumix=gpumix.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        cuda=torch.version.cuda or "",
        rocm=torch.version.hip or "",
        xpu=getattr(torch.version, "xpu", None) or "",
        nccl=nccl,
        transformers=get_versions(["transformers"]).get("transformers", ""),
        driver=driver,
        driver_cuda=driver_cuda,
        arches=runtime.built_architectures(),
    )


def check_folder(role: str, path: Path) -> FolderFacts:
    """Test writing to a folder; a missing folder is tested at its nearest existing parent."""
    there = find_existing_parent(path)
    refusal = ""
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".gpumix-check-") as file:
            file.write(b"can be written")
            file.flush()
    except OSError as error:
        refusal = error.strerror or str(error)
    free = 0
    with suppress(OSError):
        free = shutil.disk_usage(there).free
    return FolderFacts(role=role, path=str(path), refusal=refusal, free_bytes=free)


def find_existing_parent(path: Path) -> Path:
    """Return the path itself or its nearest existing parent."""
    path = path.absolute()
    return next((one for one in (path, *path.parents) if one.exists()), path)


def get_process_limits() -> ProcessLimits:
    """Return the resource limits of this process, as reported by `ulimit`."""
    most_locked = getattr(resource, "RLIMIT_MEMLOCK", None)
    most_processes = getattr(resource, "RLIMIT_NPROC", None)
    return ProcessLimits(
        open_files=_get_limit(resource.RLIMIT_NOFILE),
        most_open_files=_get_limit(resource.RLIMIT_NOFILE, 1),
        processes=None if most_processes is None else _get_limit(most_processes),
        locked_bytes=None if most_locked is None else _get_limit(most_locked),
    )


def _get_limit(which: int, place: int = 0) -> int | None:
    found = resource.getrlimit(which)[place]
    return None if found == resource.RLIM_INFINITY else found


def _resolve_own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
