"""Facts of a cluster before a run, as plain values: ranks, hosts and pairs of ranks.

Ranks gather the facts (`probe`), send them as JSON, and `judge` evaluates them. None means unknown,
empty means not applicable.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpumix.hardware.discovery.gpu_health import GpuHealth
from gpumix.schema.cluster.network import Network
from gpumix.schema.value import Value


class Software(Value):
    """Installed versions. `arches` are the architectures compiled into torch's wheel (sm_80,
    compute_90); `rocm` and `xpu` are set in builds for AMD's and Intel's GPUs."""

    gpumix: str
    torch: str
    python: str
    cuda: str = ""
    rocm: str = ""
    xpu: str = ""
    nccl: str = ""
    transformers: str = ""
    driver: str = ""
    driver_cuda: str = ""
    arches: tuple[str, ...] = ()


class FolderFacts(Value):
    """An output folder of a run, or its nearest existing parent.

    Attributes:
        role: purpose, "output" or "cache".
        refusal: reason why writing fails; empty if writing works.
    """

    role: str
    path: str
    refusal: str = ""
    free_bytes: int = 0


class ProcessLimits(Value):
    """Resource limits of a process; None means unlimited."""

    open_files: int | None = None
    most_open_files: int | None = None
    processes: int | None = None
    locked_bytes: int | None = None


class HostFacts(Value):
    """Facts of one host.

    Attributes:
        cores: CPU cores usable by this process.
        rdma: names of RDMA network cards.
        interfaces: names of network interfaces.
        address: resolved from the host's own name; empty if resolution fails.
        settings: environment variables of NCCL, gloo and torch.
        compiler: whether a C++ compiler is installed.
    """

    software: Software
    memory_bytes: int
    available_bytes: int
    cores: float
    shm_free_bytes: int | None = None
    limits: ProcessLimits = ProcessLimits()
    rdma: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    address: str = ""
    settings: Mapping[str, str] = {}
    compiler: bool = True
    folders: tuple[FolderFacts, ...] = ()


class GpuSpeed(Value):
    """Measured speed of a GPU, and its state under load.

    Attributes:
        dtype: of the matrix product.
        memory_bytes_per_s: bytes read and written by copies in device memory.
        reasons: NVML's bit mask of clock throttling reasons.
        link: generation and width of the PCIe link.
    """

    dtype: str
    flops_per_s: float
    memory_bytes_per_s: float
    reasons: int = 0
    link: tuple[int, int] = (0, 0)
    host_bytes_per_s: float | None = None


class RankFacts(Value):
    """Facts of one rank and its device.

    Attributes:
        host, device: empty for an absent rank.
        memory_bytes: memory limit of an emulated device, taken from its host.
        job: digest of the job as read by this rank.
        gpumix: installed version.
        trouble: reason for missing facts; empty if complete.
        fix: of `trouble`.
    """

    rank: int
    host: str = ""
    device: str = ""
    device_class: str = ""
    accelerator: str = ""
    product: str = ""
    capability: str = ""
    emulated: bool = False
    memory_bytes: int = 0
    job: str = ""
    gpumix: str = ""
    trouble: str = ""
    fix: str = ""
    health: GpuHealth | None = None
    speed: GpuSpeed | None = None

    @property
    def has_gpu(self) -> bool:
        return self.accelerator not in ("", "cpu")

    @property
    def look(self) -> str:
        """Advice on where to look after a failure; a rank without a GPU may only be waiting for its
        host."""
        if self.has_gpu or not self.device:
            return "look at that device and process there: nvidia-smi, dmesg | tail"
        return "see whether its host is busy, and what became of its process: top, dmesg | tail"


class PairFacts(Value):
    """Result of exchanging tensors between two ranks.

    Attributes:
        trouble: reason of a failed exchange; empty on success.
        silent: ranks of the pair whose process was killed after hanging.
        latency_s: of one small message; None: not measured.
        message_bytes, message_s: of a large message, in one direction.
    """

    ranks: tuple[int, int]
    trouble: str = ""
    silent: tuple[int, ...] = ()
    latency_s: float | None = None
    message_bytes: int = 0
    message_s: float | None = None

    @property
    def bytes_per_s(self) -> float | None:
        return None if not self.message_s else self.message_bytes / self.message_s


class ClockOffset(Value):
    """Offset of a host's clock ahead of the first host's clock, with the uncertainty."""

    host: str
    ahead_s: float
    give_or_take_s: float


class JobHostFacts(Value):
    """State of a job on one host.

    Attributes:
        missing: packages required by the job but absent on the host, with install commands.
        data: mark identifying the data; equal on all hosts with equal data.
        data_bytes: size of text files, 0 for other data.
        trouble: problem and fix by check ("data", "model").
        shared: whether the host sees the first host's file next to the output; None: not tried.
        slow: message about a task exceeding its time limit.
    """

    missing: Mapping[str, str] = {}
    data: str = ""
    data_bytes: int = 0
    trouble: Mapping[str, tuple[str, str]] = {}
    shared: bool | None = None
    slow: str = ""


class JobFacts(Value):
    """Requirements of a job.

    Attributes:
        checkpoint_bytes: upper bound of one checkpoint; None: unknown.
        checkpoints: number of checkpoints existing at once.
        copies: number of copies of the state kept in host memory.
        saved_bytes: size of the checkpoints already in the output folder.
        named_cluster: whether the job names its devices, instead of using discovered devices.
    """

    checkpoint_bytes: int | None = None
    checkpoints: int = 1
    copies: int = 0
    saved_bytes: int = 0
    named_cluster: bool = False
    on_hosts: Mapping[str, JobHostFacts] = {}


class Survey(Value):
    """All facts of a cluster.

    Attributes:
        ranks: in rank order.
        hosts: by name, the host of rank 0 first.
        untried: number of pairs skipped for lack of time.
        network: links as declared in the cluster file.
        job: None without a job.
    """

    ranks: tuple[RankFacts, ...]
    hosts: Mapping[str, HostFacts]
    pairs: tuple[PairFacts, ...] = ()
    untried: int = 0
    clocks: tuple[ClockOffset, ...] = ()
    network: Network | None = None
    job: JobFacts | None = None

    @property
    def gpus(self) -> tuple[RankFacts, ...]:
        return tuple(rank for rank in self.ranks if rank.has_gpu)

    @property
    def emulated(self) -> tuple[RankFacts, ...]:
        """Emulated ranks; if any exist, all hosts are the local machine, whatever their names."""
        return tuple(rank for rank in self.ranks if rank.emulated)

    def on(self, host: str) -> tuple[RankFacts, ...]:
        """Return the ranks of a host."""
        return tuple(rank for rank in self.ranks if rank.host == host)
