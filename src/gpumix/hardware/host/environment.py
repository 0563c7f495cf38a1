"""All environment variables read or set by this package, and the operating system's information
about the host.

`CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` are CUDA's own, `HIP_VISIBLE_DEVICES` and
`ROCR_VISIBLE_DEVICES` AMD's, `ZE_AFFINITY_MASK` Intel's; `CXX` and `XDG_CACHE_HOME` have their
usual meaning; torchrun sets the rest. Never imports torch.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from gpumix.hardware.host.cgroups import limit_host_bytes, read_memory_groups
from gpumix.schema.errors import InputError
from gpumix.schema.files import make_private_folder, read_log

if TYPE_CHECKING:
    from gpumix.hardware.estimates.kernel_choice import InstalledPackages

# Part of the free host memory available to copies of a run's state.
COPIES_PART = 0.5
STARTS = "GPUMIX_STARTS"
STOP_ASKED = "GPUMIX_STOP_ASKED_AT"
APART = "GPUMIX_APART"  # the launcher of a rank listens on the given address only
GRACE = "GPUMIX_GRACE_S"  # time limit for ranks asked to end
ALLOW = "GPUMIX_ALLOW"  # same as --allow, for all commands of a shell
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
TRACEBACK = "GPUMIX_TRACEBACK"  # tracebacks of errors that end a script
CLUSTER = "GPUMIX_CLUSTER"  # cluster file for programs that name no devices
OWN_RUN = "gpumix"  # run name set by `gpumix launch`
STDERR = 2
_CHOICES = {
    "CUDA": ("CUDA_VISIBLE_DEVICES",),
    "ROCm": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "XPU": ("ZE_AFFINITY_MASK",),
}
NICENESS = 10
LOOPBACKS = ("lo", "lo0")
Launcher = Literal["gpumix launch", "torchrun", "Ray"]
COMPILERS = ("g++", "c++", "clang++")
# Settings of torch's allocator: the first name since 2.9, the last in all versions, which takes
# precedence if both are set.
PREFERRED = "expandable_segments:True"
ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Opt-outs: tracker libraries report usage to their makers by default.
TELEMETRY_OPT_OUTS = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
}
# Variables that would redirect tracking, which is up to the job.
TRACKING_REDIRECTS = (
    "MLFLOW_RUN_ID",
    "TRACKIO_BUCKET_ID",
    "TRACKIO_DATASET_ID",
    "TRACKIO_SERVER_URL",
    "TRACKIO_SPACE_ID",
    "TRACKIO_WEBHOOK_URL",
    "WANDB_RUN_ID",
    "WANDB_RESUME",
)


def visible_cuda_devices() -> tuple[str, ...] | None:
    """Return the entries of `CUDA_VISIBLE_DEVICES`, or None if unset (all are visible)."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


@dataclass(frozen=True)
class DeviceChoice:
    """A driver variable that selects the GPUs visible to programs.

    Attributes:
        entries: the selected GPUs; empty for none.
        numbers_all: True if no further variable reduces the selection: programs see as many GPUs
            as selected.
    """

    name: str
    entries: tuple[str, ...]
    numbers_all: bool

    @property
    def hides_all(self) -> bool:
        return not self.entries or self.entries[0] == "-1"


def device_choices(toolkit: str) -> tuple[DeviceChoice, ...]:
    """Return the variables set for "CUDA", "ROCm" or "XPU". For AMD, ROCR_VISIBLE_DEVICES is read
    first, and HIP_VISIBLE_DEVICES (or CUDA_VISIBLE_DEVICES, read by HIP too) numbers the remaining
    GPUs. Sub-devices of Intel GPUs are left to the driver."""
    found = []
    for name in _CHOICES.get(toolkit, ()):
        text = os.environ.get(name)
        if text is None:
            continue
        entries = tuple(entry.strip() for entry in text.split(",") if entry.strip())
        if any("." in entry for entry in entries):
            continue
        last = name != "ROCR_VISIBLE_DEVICES" or not {
            "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
        } & set(os.environ)  # fmt: skip
        found.append(DeviceChoice(name, entries, last))
    return tuple(found)


def hiding_variable() -> str:
    """Return the variable hiding all GPUs, such as "CUDA_VISIBLE_DEVICES=", or an empty string."""
    choices = (one for toolkit in _CHOICES for one in device_choices(toolkit))
    hiding = (one for one in choices if one.hides_all)
    return next((f"{one.name}={','.join(one.entries)}" for one in hiding), "")


def cuda_counts_by_bus() -> bool:
    """Return True if CUDA numbers devices like NVML; its default is fastest first."""
    return os.environ.get("CUDA_DEVICE_ORDER", "") == "PCI_BUS_ID"


def hide_gpus() -> None:
    """Hide GPUs from this CPU process: libraries open a context on every visible GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def use_expandable_segments() -> None:
    """Enable expandable segments in torch's allocator, before the first GPU use of this process."""
    os.environ[ALLOCATORS[-1]] = "expandable_segments:True"


def prefer_expandable_segments() -> None:
    """Enable expandable segments unless the user has configured the allocator: fragmentation ends
    runs whose plans fill the device."""
    if not any(name in os.environ for name in ALLOCATORS):
        os.environ[ALLOCATORS[0]] = PREFERRED


def drop_preferred_segments() -> bool:
    """Undo `prefer_expandable_segments`, here and for processes started from now on; return False
    if the user chose the setting."""
    if os.environ.get(ALLOCATORS[0]) != PREFERRED:
        return False
    os.environ[ALLOCATORS[0]] = "expandable_segments:False"
    return True


def count_gpus_by_nvml() -> None:
    """Let torch detect NVIDIA GPUs through NVML, in this process and its children. Otherwise torch
    creates a CUDA context, after which a process cannot fork ranks. User settings are kept."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def chosen_compiler() -> str | None:
    """Return the C++ compiler requested by the user, possibly with arguments."""
    return os.environ.get("CXX") or None


def has_cpp_compiler() -> bool:
    """Return True if the requested C++ compiler exists, or, without a request, any on the path."""
    chosen = chosen_compiler()
    names = COMPILERS if chosen is None else shlex.split(chosen)[:1]
    return any(shutil.which(name) is not None for name in names)


def cache_folder() -> Path:
    """Return the folder of reproducible files; never inside the source tree."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gpumix"


def keep_compiled_code() -> None:
    """Store torch's compiled code where only this user can write. The default is a predictable name
    in the temporary folder, which torch makes as soon as parts of it are imported: call before.
    User settings are kept."""
    if _COMPILED not in os.environ:
        os.environ[_COMPILED] = str(make_private_folder(cache_folder() / "inductor"))


def cluster_file() -> Path | None:
    """Return the cluster file for programs that name no devices."""
    name = os.environ.get(CLUSTER)
    return Path(name) if name else None


def allowed_by_environment() -> list[str]:
    """Return the code that jobs of all commands may run."""
    return os.environ.get(ALLOW, "").split()


def shows_tracebacks() -> bool:
    """Return True if the user wants tracebacks of all errors."""
    return os.environ.get(TRACEBACK, "0") not in ("", "0")


def shared_memory_folder() -> Path | None:
    """Return a folder in memory shared by all processes of the host, or None."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else None


_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_NO_PLACE = f"mend the launcher that set it; or start it without one: unset {' '.join(_PLACE)}"


@dataclass(frozen=True)
class TorchrunPlace:
    """The position of this process in a run, as set by torchrun.

    `elastic`: failed processes may be replaced. `has_agent`: started by torchrun itself, not by a
    compatible launcher without restarts. `starts`: number of `restart_process` restarts since then.
    `stop_asked_at`: time (`time.monotonic()`) of a stop request received before the restart and not
    yet answered. `restarted`: the agent started an earlier process here, which failed.
    `agents_open`: agents use torch's own rendezvous, and listen on all addresses.
    """

    rank: int
    world: int
    local_rank: int
    master_address: str
    master_port: int
    agent_has_store: bool
    elastic: bool
    starts: int = 0
    stop_asked_at: float | None = None
    restarted: bool = False
    has_agent: bool = False
    one_host: bool = False
    agents_open: bool = False


def torchrun_place() -> TorchrunPlace | None:
    """Return the place of this process in a run started by torchrun or a compatible launcher.

    Raises:
        InputError: the variables are invalid.
    """
    if any(name not in os.environ for name in _PLACE):
        return None
    rank, world = _number("RANK"), _number("WORLD_SIZE")
    if rank >= world:
        raise InputError(
            f"RANK is {rank}, of WORLD_SIZE {world}", code="rank-out-of-range", fix=_NO_PLACE
        )
    return TorchrunPlace(
        rank=rank,
        world=world,
        local_rank=_number("LOCAL_RANK"),
        master_address=os.environ["MASTER_ADDR"],
        master_port=_number("MASTER_PORT"),
        agent_has_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        elastic=os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0",
        starts=_number(STARTS) if STARTS in os.environ else 0,
        stop_asked_at=_seconds(STOP_ASKED),
        restarted=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0",
        has_agent=launcher() == "torchrun",
        one_host=os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"],
        agents_open="TORCHELASTIC_RUN_ID" in os.environ and APART not in os.environ,
    )


def check_rendezvous_variables() -> None:
    """Refuse to run as one of several processes without rendezvous variables. A single process, and
    a `WORLD_SIZE` without `RANK`, may have incomplete variables.

    Raises:
        InputError: this is one of several processes, which cannot find each other.
    """
    missing = [name for name in _PLACE if name not in os.environ]
    if not missing or "RANK" not in os.environ or world_size() == 1:
        return
    raise InputError(
        f"this is one of {world_size()} processes, and nothing says how they meet",
        code="rendezvous-unknown",
        where="environment",
        why=f"RANK and WORLD_SIZE are set, {' and '.join(missing)} not: each would train alone",
        fix="start it with gpumix launch or torchrun, which set them; or, for a run of this "
        "process alone: unset RANK WORLD_SIZE",
    )


def _number(name: str) -> int:
    value = os.environ[name]
    if not (value.isascii() and value.isdigit()):
        what = f"the environment's {name} is '{value}', not a whole number of 0 or more"
        raise InputError(what, code="environment-number-invalid", fix=_NO_PLACE)
    return int(value)


def _seconds(name: str) -> float | None:
    text = os.environ.get(name)
    try:
        return float(text) if text else None
    except ValueError as error:
        what = f"the environment's {name} is '{text}', not a number of seconds"
        raise InputError(what, code="environment-number-invalid", fix=f"unset {name}") from error


def place_settings(
    *,
    rank: int,
    local_rank: int,
    local_world: int,
    world: int,
    address: str,
    port: int,
    gpus: Sequence[str] = (),
) -> dict[str, str]:
    """Return the torchrun variables of a rank. `gpus` are the GPUs of all ranks on the host, by
    default all of the host's; the rank uses the one at its local rank."""
    place = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    return {name: str(value) for name, value in place.items()} | visible


def rank_settings(place: Mapping[str, str], *, grace_s: float) -> dict[str, str]:
    """Return the environment of a rank started by this process: its own variables, and those of its
    `place_settings`. The store at the address exists already, so no rank creates one. Ranks asked
    to end may continue for `grace_s`."""
    agent = {
        "ROLE_RANK": place["RANK"],
        "ROLE_WORLD_SIZE": place["WORLD_SIZE"],
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_RUN_ID": OWN_RUN,
        APART: 1,
        GRACE: grace_s,
    }
    threads = {"OMP_NUM_THREADS": "1"} if place["LOCAL_WORLD_SIZE"] != "1" else {}
    told = {name: str(value) for name, value in agent.items()}
    return {**threads, **os.environ, **place, **told}


def grace_of_launcher() -> float:
    """Return the grace period in seconds after the launcher's request to end; 0 if unknown."""
    with suppress(ValueError):
        return float(os.environ.get(GRACE, "0"))
    return 0.0


def unbuffer_output() -> None:
    """Make Python programs started by this process flush each line, also into pipes."""
    os.environ["PYTHONUNBUFFERED"] = "1"


def use_settings(settings: Mapping[str, str]) -> None:
    """Set variables for processes started by this process."""
    os.environ.update(settings)


def settings_named(names: Iterable[str]) -> dict[str, str]:
    """Return the values of the given variables, if set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def restart_process(starts: int, stop_asked_at: float | None = None) -> NoReturn:
    """Restart this process with an unchanged command, process id and parent. All resources are
    released.

    Args:
        starts: number of restarts including this one.
        stop_asked_at: see `TorchrunPlace`.
    """
    os.environ[STARTS] = str(starts)
    os.environ[STOP_ASKED] = "" if stop_asked_at is None else str(stop_asked_at)
    exec_python(sys.orig_argv[1:])


def exec_python(words: Sequence[str]) -> NoReturn:
    """Replace this process by the Python interpreter with `words` as arguments. Process id and
    parent are kept, all resources are released."""
    sys.stdout.flush()
    sys.stderr.flush()
    for file in [int(file.name) for file in Path("/dev/fd").iterdir()]:
        with suppress(OSError):  # the descriptor of the listing itself
            # Closed by exec: library threads abort a process that closes their descriptors.
            os.set_inheritable(file, file <= STDERR)
    os.execv(sys.executable, [sys.executable, *words])


def world_size() -> int:
    """Return the number of processes reported by the launcher; 1 without a launcher."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1


def launcher() -> Launcher | None:
    """Return the launcher of this process, or None if unknown."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is not None:
        return "gpumix launch" if run == OWN_RUN else "torchrun"
    return "Ray" if "RAY_JOB_ID" in os.environ else None


def get_local_world_size() -> int:
    """Return the number of processes on this host reported by the launcher; 1 without a
    launcher."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1


def get_local_rank() -> int:
    """Return the index of this process on the host, from 0."""
    text = os.environ.get("LOCAL_RANK", "0")
    return int(text) if text.isdecimal() else 0


def use_one_tokenizer_thread() -> None:
    """Disable tokenizer threads in this process, because several processes tokenize."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def restrict_to_loopback() -> None:
    """Restrict gloo and NCCL to loopback, before their first use in this process. By default they
    listen on the address of the host's name. User settings are kept."""
    loopback = [name for _, name in socket.if_nameindex() if name in LOOPBACKS]
    for setting in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback else ():
        os.environ.setdefault(setting, loopback[0])


def disable_agent_store() -> None:
    """Prevent torchrun's agent in this process from creating the ranks' store, which the first rank
    creates. The ranks are informed."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[APART] = "1"


def record_collectives(prefix: Path) -> None:
    """Let NCCL's flight recorder write the last collectives to files named `prefix` plus the rank,
    when one fails or times out. Call before the first use of NCCL. User settings are kept."""
    settings = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # the older name
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(prefix),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(prefix),
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def tracker_environment() -> dict[str, str]:
    """Return the environment of a tracker process, without telemetry, redirection and GPUs."""
    kept = {name: value for name, value in os.environ.items() if name not in TRACKING_REDIRECTS}
    return kept | TELEMETRY_OPT_OUTS | {"CUDA_VISIBLE_DEVICES": ""}


def keep_trackio_in(folder: Path) -> None:
    """Set the folder of Trackio's databases; call before Trackio is imported."""
    os.environ["TRACKIO_DIR"] = str(folder)


def lower_cpu_priority() -> None:
    """Lower the CPU priority of this process."""
    with suppress(OSError):
        os.nice(NICENESS)


def get_communication_variables() -> dict[str, str]:
    """Return the variables affecting communication of ranks or compute speed."""
    named = ("GLOO_SOCKET_IFNAME", "CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING")
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("NCCL_") or name in (*named, "TORCH_DISTRIBUTED_DEBUG")
    }


def is_stopped(process: int) -> bool:
    """Return True if a process was stopped (SIGSTOP), but not by a debugger; False if unknown."""
    return _stat_of(process)[:1] == ["T"]


def read_start_time(process: int) -> str:
    """Return the start time of a process as text, which identifies it if its number is reused;
    empty if unknown."""
    return next(iter(_stat_of(process)[19:20]), "")


def _stat_of(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; see proc_pid_stat(5)."""
    with suppress(OSError):
        told = read_log(Path(f"/proc/{process}/stat"))
        return told.rpartition(")")[2].split()
    return []


def installed() -> InstalledPackages:
    """Return the optional kernel packages present, without importing them."""
    from gpumix.hardware.estimates.kernel_choice import InstalledPackages

    return InstalledPackages(
        **{f.name: find_spec(f.name) is not None for f in fields(InstalledPackages)}
    )


def available_host_bytes() -> int:
    """Return the memory available now on this host or in this container, before swapping or
    out-of-memory kills."""
    free = [host_memory_bytes()]
    with suppress(OSError, StopIteration):
        told = read_log(Path("/proc/meminfo")).splitlines()
        kib = next(line for line in told if line.startswith("MemAvailable:")).split()[1]
        free.append(int(kib) * 1024)
    free += [group.limit_bytes - group.used_bytes for group in read_memory_groups()]
    return max(0, min(free))


def host_memory_bytes() -> int:
    """Return the memory of this host, or the limit of the container."""
    return limit_host_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
