"""The environment variables that this package reads or sets, all of them, in one place; and what
the system says of the host.

`CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` are CUDA's own, `HIP_VISIBLE_DEVICES` and
`ROCR_VISIBLE_DEVICES` AMD's, `ZE_AFFINITY_MASK` Intel's; `CXX` and `XDG_CACHE_HOME` have
their usual meaning; torchrun sets the others. Nothing here imports torch.
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
from typing import Literal, NoReturn

from gpumix.hardware.control_groups import let_have_bytes, memory_groups
from gpumix.hardware.efficiency import Installed
from gpumix.spec.errors import InputError
from gpumix.spec.files import private_folder, read_log

# Of what is free of it, copies of a run's state may take this part.
COPIES_PART = 0.5
STARTS = "GPUMIX_STARTS"
STOP_ASKED = "GPUMIX_STOP_ASKED_AT"
APART = "GPUMIX_APART"  # what started a rank listens where it was told, and nowhere else
GRACE = "GPUMIX_GRACE_S"  # how long ranks may go on that are asked to end
ALLOW = "GPUMIX_ALLOW"  # as --allow, for all commands of a shell
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
CLUSTER = "GPUMIX_CLUSTER"  # the devices of programs that name none: a cluster file
OWN_RUN = "gpumix"  # the name of runs that `gpumix launch` starts
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
# Settings of torch's allocator: since 2.9 by the first name, in all versions by the last, which
# counts where both are set.
PREFERRED = "expandable_segments:True"
ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Libraries of trackers tell their makers how they are used, unless they are told not to.
UNTOLD = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
}
# Where a run is told is for its job to say; these would say otherwise.
ELSEWHERE = (
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
    """The entries of `CUDA_VISIBLE_DEVICES`, or None if it is not set (all are visible)."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


@dataclass(frozen=True)
class DeviceChoice:
    """A variable of a maker's driver that says which GPUs programs see.

    Attributes:
        entries: the GPUs it names; empty: none.
        numbers_all: whether no other variable takes of what it leaves, so that programs see as many
            GPUs as it names.
    """

    name: str
    entries: tuple[str, ...]
    numbers_all: bool

    @property
    def hides_all(self) -> bool:
        return not self.entries or self.entries[0] == "-1"


def device_choices(toolkit: str) -> tuple[DeviceChoice, ...]:
    """The variables that are set, of those that "CUDA", "ROCm" or "XPU" reads. Of AMD's,
    ROCR_VISIBLE_DEVICES is read first, and HIP_VISIBLE_DEVICES (or CUDA_VISIBLE_DEVICES, which HIP
    reads too) numbers what it leaves. Parts of Intel's GPUs are left to the driver."""
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
    """The variable that hides all GPUs from this process, such as "CUDA_VISIBLE_DEVICES="; empty:
    none does."""
    choices = (one for toolkit in _CHOICES for one in device_choices(toolkit))
    hiding = (one for one in choices if one.hides_all)
    return next((f"{one.name}={','.join(one.entries)}" for one in hiding), "")


def cuda_counts_by_bus() -> bool:
    """Whether CUDA numbers devices as NVML does; its default is the fastest first."""
    return os.environ.get("CUDA_DEVICE_ORDER", "") == "PCI_BUS_ID"


def hide_gpus() -> None:
    """Keep this process, which computes on the CPU, from opening a context on a GPU: libraries do
    so wherever they see one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def use_expandable_segments() -> None:
    """Let torch's allocator of this process, which has used no GPU yet, grow its segments."""
    os.environ[ALLOCATORS[-1]] = "expandable_segments:True"


def prefer_expandable_segments() -> None:
    """As `use_expandable_segments`, unless the user has set something of the allocator: memory that
    lies in pieces ends runs whose plans fill the device."""
    if not any(name in os.environ for name in ALLOCATORS):
        os.environ[ALLOCATORS[0]] = PREFERRED


def drop_preferred_segments() -> bool:
    """Take back what `prefer_expandable_segments` set, here and for processes that are started from
    now on; False if the user chose."""
    if os.environ.get(ALLOCATORS[0]) != PREFERRED:
        return False
    os.environ[ALLOCATORS[0]] = "expandable_segments:False"
    return True


def count_gpus_by_nvml() -> None:
    """Let torch in this process, and in those that it starts, find out by NVML whether there are
    NVIDIA GPUs. Its other way makes a CUDA context, and a process that has one cannot fork ranks.
    What the user has set stays."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def chosen_compiler() -> str | None:
    """The C++ compiler that the user asked for, possibly with arguments."""
    return os.environ.get("CXX") or None


def has_cpp_compiler() -> bool:
    """Whether there is a C++ compiler: the chosen one, else one on the path."""
    chosen = chosen_compiler()
    names = COMPILERS if chosen is None else shlex.split(chosen)[:1]
    return any(shutil.which(name) is not None for name in names)


def cache_folder() -> Path:
    """Where things that can be made again are kept; never the source tree."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gpumix"


def keep_compiled_code() -> None:
    """Let torch keep the code that it compiles where only this user can write it. Its own choice is
    a name in the temporary folder that everybody can tell. What the user has set stays."""
    if _COMPILED not in os.environ:
        os.environ[_COMPILED] = str(private_folder(cache_folder() / "inductor"))


def cluster_file() -> Path | None:
    """The cluster file that is named for programs which name no devices themselves."""
    name = os.environ.get(CLUSTER)
    return Path(name) if name else None


def shared_memory_folder() -> Path | None:
    """A file system in this host's memory, which all its processes see; None if there is none."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else None


_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_NO_PLACE = f"mend the launcher that set it; or start it without one: unset {' '.join(_PLACE)}"


@dataclass(frozen=True)
class TorchrunPlace:
    """What torchrun tells a process that it starts; `elastic`: it may start others in its place.
    `has_agent`: it was torchrun, not something that speaks like it and starts nothing again.
    `starts`: how often the process has begun anew since. `stop_asked_at`: when it was asked to stop
    before that, by `time.monotonic()`, and has yet to answer. `restarted`: it is not the first in
    that place, one that its agent started before has failed. `agents_open`: its agents meet by
    torch's own ways, and listen on all addresses."""

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
    """This process's place in a run that torchrun, or anything that speaks like it, started.

    Raises:
        InputError: what it says is no place.
    """
    if any(name not in os.environ for name in _PLACE):
        return None
    rank, world = _number("RANK"), _number("WORLD_SIZE")
    if rank >= world:
        raise InputError(f"RANK is {rank}, of WORLD_SIZE {world}", fix=_NO_PLACE)
    return TorchrunPlace(
        rank=rank,
        world=world,
        local_rank=_number("LOCAL_RANK"),
        master_address=os.environ["MASTER_ADDR"],
        master_port=_number("MASTER_PORT"),
        agent_has_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        elastic=os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0",
        starts=int(os.environ.get(STARTS, "0")),
        stop_asked_at=float(asked) if (asked := os.environ.get(STOP_ASKED)) else None,
        restarted=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0",
        has_agent=launcher() == "torchrun",
        one_host=os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"],
        agents_open="TORCHELASTIC_RUN_ID" in os.environ and APART not in os.environ,
    )


def refuse_part_of_a_place() -> None:
    """See that nothing started several processes here without telling each how they meet. Of one
    process of one, and of a number that has no `RANK` beside it, a part may be told.

    Raises:
        InputError: this is one of several, and cannot find the others.
    """
    missing = [name for name in _PLACE if name not in os.environ]
    if not missing or "RANK" not in os.environ or world_size() == 1:
        return
    raise InputError(
        f"this is one of {world_size()} processes, and nothing says how they meet",
        where="environment",
        why=f"RANK and WORLD_SIZE are set, {' and '.join(missing)} not: each would train alone",
        fix="start it with gpumix launch or torchrun, which set them; or, for a run of this "
        "process alone: unset RANK WORLD_SIZE",
    )


def _number(name: str) -> int:
    value = os.environ[name]
    if not (value.isascii() and value.isdigit()):
        what = f"the environment's {name} is '{value}', not a whole number of 0 or more"
        raise InputError(what, fix=_NO_PLACE)
    return int(value)


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
    """What torchrun would tell a rank of its place. Of `gpus`, those of all ranks on its host, it
    computes on the one of its number there; by default of those that the host has."""
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


def rank_settings(
    *,
    rank: int,
    local_rank: int,
    local_world: int,
    world: int,
    address: str,
    port: int,
    grace_s: float,
) -> dict[str, str]:
    """The environment of a rank that this process starts: its own, and what torchrun would say. The
    store at that address is there already, so no rank makes one. Ranks that are asked to end may
    go on for `grace_s`."""
    place = place_settings(
        rank=rank,
        local_rank=local_rank,
        local_world=local_world,
        world=world,
        address=address,
        port=port,
    )
    agent = {
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_RUN_ID": OWN_RUN,
        APART: 1,
        GRACE: grace_s,
    }
    threads = {"OMP_NUM_THREADS": "1"} if local_world > 1 else {}
    told = {name: str(value) for name, value in agent.items()}
    return threads | dict(os.environ) | place | told


def grace_of_launcher() -> float:
    """How long the launcher of this process lets it go on that is asked to end, s; 0 where it does
    not say."""
    with suppress(ValueError):
        return float(os.environ.get(GRACE, "0"))
    return 0.0


def print_at_once() -> None:
    """Let Python programs that this process starts print each line when it is there, into pipes
    too."""
    os.environ["PYTHONUNBUFFERED"] = "1"


def use_settings(settings: Mapping[str, str]) -> None:
    """Let what this process starts find these variables."""
    os.environ.update(settings)


def settings_named(names: Iterable[str]) -> dict[str, str]:
    """The values of the variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def begin_anew(starts: int, stop_asked_at: float | None = None) -> NoReturn:
    """Become a new process with the command of this one, its number and its parent; what this one
    holds is given back.

    Args:
        starts: how often that has happened then.
        stop_asked_at: see `TorchrunPlace`.
    """
    os.environ[STARTS] = str(starts)
    os.environ[STOP_ASKED] = "" if stop_asked_at is None else str(stop_asked_at)
    become(sys.orig_argv[1:])


def become(words: Sequence[str]) -> NoReturn:
    """Become what the interpreter of this process makes of these words, with its number and its
    parent; what it holds is given back."""
    sys.stdout.flush()
    sys.stderr.flush()
    for file in [int(file.name) for file in Path("/dev/fd").iterdir()]:
        with suppress(OSError):  # that of the list itself
            # Closed by the change itself: threads of libraries abort a process that closes theirs.
            os.set_inheritable(file, file <= STDERR)
    os.execv(sys.executable, [sys.executable, *words])


def world_size() -> int:
    """How many processes a launcher says that it started; 1 where there is none."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1


def launcher() -> Launcher | None:
    """What started this process as one of several, where it says so."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is not None:
        return "gpumix launch" if run == OWN_RUN else "torchrun"
    return "Ray" if "RAY_JOB_ID" in os.environ else None


def ranks_here() -> int:
    """How many processes a launcher says that it started on this host; 1 where there is none."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1


def place_here() -> int:
    """Which of them this one is, counted from 0."""
    text = os.environ.get("LOCAL_RANK", "0")
    return int(text) if text.isdecimal() else 0


def use_one_tokenizer_thread() -> None:
    """In this process, which is one of several that tokenise."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def talk_inside_of_host() -> None:
    """Let gloo and NCCL of this process, which has not used them yet, listen on loopback alone; by
    default they do on whatever address the host's name stands for. What the user has set stays."""
    loopback = [name for _, name in socket.if_nameindex() if name in LOOPBACKS]
    for setting in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback else ():
        os.environ.setdefault(setting, loopback[0])


def keep_ranks_store_apart() -> None:
    """Let torchrun's agent in this process make no store for ranks: the first of them has it. The
    ranks are told."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[APART] = "1"


def record_collectives(prefix: Path) -> None:
    """Let NCCL's flight recorder of this process, which has not used it yet, write what it knows of
    the last collectives to `prefix` and the rank, when one of them fails or takes too long. What
    the user has set stays."""
    settings = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # its older name
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(prefix),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(prefix),
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def tracker_environment() -> dict[str, str]:
    """That of a process which tells a tracker of the run: nothing in it sends anything anywhere."""
    kept = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    return kept | UNTOLD | {"CUDA_VISIBLE_DEVICES": ""}


def keep_trackio_in(folder: Path) -> None:
    """Let Trackio of this process, which has not imported it yet, have its databases there."""
    os.environ["TRACKIO_DIR"] = str(folder)


def step_aside() -> None:
    """Let other processes have this host's cores before this one."""
    with suppress(OSError):
        os.nice(NICENESS)


def talking_settings() -> dict[str, str]:
    """What is set of NCCL, gloo and torch that changes how ranks talk, or how fast they compute."""
    named = ("GLOO_SOCKET_IFNAME", "CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING")
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("NCCL_") or name in (*named, "TORCH_DISTRIBUTED_DEBUG")
    }


def is_stopped(process: int) -> bool:
    """Whether a process was stopped (SIGSTOP), and not by a debugger; False where the system does
    not say."""
    return _stat_of(process)[:1] == ["T"]


def begun(process: int) -> str:
    """When a process began, in a word that another one of the same number does not have; empty
    where the system does not say."""
    return next(iter(_stat_of(process)[19:20]), "")


def _stat_of(process: int) -> list[str]:
    """What Linux says of a process, from its state on; see proc_pid_stat(5)."""
    with suppress(OSError):
        told = read_log(Path(f"/proc/{process}/stat"))
        return told.rpartition(")")[2].split()
    return []


def installed() -> Installed:
    """The packages with kernels that are here; none is imported."""
    return Installed(**{f.name: find_spec(f.name) is not None for f in fields(Installed)})


def available_host_bytes() -> int:
    """What may be taken of this host's memory now, or of that of a container, before it swaps or
    ends a process."""
    free = [host_memory_bytes()]
    with suppress(OSError, StopIteration):
        told = read_log(Path("/proc/meminfo")).splitlines()
        kib = next(line for line in told if line.startswith("MemAvailable:")).split()[1]
        free.append(int(kib) * 1024)
    free += [group.most_bytes - group.used_bytes for group in memory_groups()]
    return max(0, min(free))


def host_memory_bytes() -> int:
    """What this host has, or lets a container have."""
    return let_have_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
