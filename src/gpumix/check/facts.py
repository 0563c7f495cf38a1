"""What is known of a cluster before a run: facts of each rank, host and pair, as plain values.

They are gathered in ranks (`probe`), travel as JSON, and are judged elsewhere (`judge`). What
cannot be known is None, what does not apply is empty.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpumix.hardware.gpu_health import GpuHealth
from gpumix.spec.base import Value
from gpumix.spec.network import Network


class Software(Value):
    """Versions; `arches` is what the wheel has kernels for, as torch says it: sm_80, compute_90;
    `rocm` and `xpu` are of builds for AMD's and Intel's GPUs."""

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
    """A folder that a run writes into, or the nearest one above that is there.

    Attributes:
        role: what for: "output" or "cache".
        refusal: why nothing can be written there; empty if it can.
    """

    role: str
    path: str
    refusal: str = ""
    free_bytes: int = 0


class Limits(Value):
    """What the system lets one process have; None is no limit."""

    open_files: int | None = None
    most_open_files: int | None = None
    processes: int | None = None
    locked_bytes: int | None = None


class HostFacts(Value):
    """One host.

    Attributes:
        cores: that this process may use.
        shm_bytes: of /dev/shm; None where there is none.
        rdma: network cards that can write into memory of other hosts.
        interfaces: names of network interfaces.
        address: what the host's own name stands for; empty if for nothing.
        settings: environment variables of NCCL, gloo and torch.
        compiler: whether there is one for C++.
    """

    software: Software
    memory_bytes: int
    available_bytes: int
    cores: float
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    limits: Limits = Limits()
    rdma: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    address: str = ""
    settings: Mapping[str, str] = {}
    compiler: bool = True
    folders: tuple[FolderFacts, ...] = ()


class Speed(Value):
    """What a GPU reaches, and how it was while it did.

    Attributes:
        dtype: of the matrix product.
        memory_bytes_per_s: read and written, by copies in its own memory.
        reasons: NVML's bits for what held its clocks down.
        link: generation and width of its PCIe link.
    """

    dtype: str
    flops_per_s: float
    memory_bytes_per_s: float
    reasons: int = 0
    link: tuple[int, int] = (0, 0)
    host_bytes_per_s: float | None = None


class RankFacts(Value):
    """One rank and its device.

    Attributes:
        host, device: empty for a rank that did not come.
        memory_bytes: that an emulated device may take of its host's.
        job: a digest of the job as this rank has read it.
        gpumix: the version that it runs.
        trouble: why nothing more is known of it; empty if all is.
        fix: of that trouble.
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
    speed: Speed | None = None

    @property
    def on_gpu(self) -> bool:
        return self.accelerator not in ("", "cpu")

    @property
    def look(self) -> str:
        """Where to look if it does not do what it should: a rank without a GPU may only wait for
        its host."""
        if self.on_gpu or not self.device:
            return "look at that device and process there: nvidia-smi, dmesg | tail"
        return "see whether its host is busy, and what became of its process: top, dmesg | tail"


class PairFacts(Value):
    """Two ranks that were to exchange tensors.

    Attributes:
        trouble: why they did not; empty if they did.
        silent: those of the two whose process had to be ended.
        latency_s: of one small message; None: not measured.
        message_bytes, message_s: of a large one, in one direction.
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


class ClockFacts(Value):
    """How far a host's clock is ahead of the first one's, give or take."""

    host: str
    ahead_s: float
    give_or_take_s: float


class JobOnHost(Value):
    """What one host has of a job.

    Attributes:
        missing: packages that the job needs and the host has not, with the reason.
        data: that says which data it is; two hosts with other data have other ones.
        data_bytes: of text files, 0 for what is no text.
        trouble: what is wrong by check ("data", "model"): what, and the fix.
        shared: whether it sees what the first host wrote beside the output; None: not tried.
        slow: what took too long to be looked at.
    """

    missing: Mapping[str, str] = {}
    data: str = ""
    data_bytes: int = 0
    trouble: Mapping[str, tuple[str, str]] = {}
    shared: bool | None = None
    slow: str = ""


class JobFacts(Value):
    """What a job needs, by itself.

    Attributes:
        checkpoint_bytes: of one, at the most; None: not known.
        checkpoints: how many are there at once.
        copies: how many of the state the hosts are to keep in memory.
        saved_bytes: of the checkpoints that the output holds.
        named_cluster: whether it names its devices, or takes those that are found.
    """

    checkpoint_bytes: int | None = None
    checkpoints: int = 1
    copies: int = 0
    saved_bytes: int = 0
    named_cluster: bool = False
    on_hosts: Mapping[str, JobOnHost] = {}


class Survey(Value):
    """All that is known.

    Attributes:
        ranks: in their order.
        hosts: by name, the first rank's first.
        untried: how many pairs were not tried, for want of time.
        network: links as the cluster file states them.
        job: None without one.
    """

    ranks: tuple[RankFacts, ...]
    hosts: Mapping[str, HostFacts]
    pairs: tuple[PairFacts, ...] = ()
    untried: int = 0
    clocks: tuple[ClockFacts, ...] = ()
    network: Network | None = None
    job: JobFacts | None = None

    @property
    def gpus(self) -> tuple[RankFacts, ...]:
        return tuple(rank for rank in self.ranks if rank.on_gpu)

    @property
    def emulated(self) -> tuple[RankFacts, ...]:
        """If there are some, all hosts are this machine, whatever their names."""
        return tuple(rank for rank in self.ranks if rank.emulated)

    def on(self, host: str) -> tuple[RankFacts, ...]:
        """The ranks of a host."""
        return tuple(rank for rank in self.ranks if rank.host == host)
