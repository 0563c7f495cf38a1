"""Place of this process among launched processes, in Lightning's interface."""

from __future__ import annotations

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from gpumix.hardware.host.environment import TorchrunPlace, torchrun_place


class LaunchedEnvironment(ClusterEnvironment):
    """Place by the process group, or by torchrun's variables; otherwise a single process."""

    @property
    def _place(self) -> TorchrunPlace | None:
        return torchrun_place()

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._place.master_address if self._place else "127.0.0.1"

    @property
    def main_port(self) -> int:
        return self._place.master_port if self._place else 0

    @staticmethod
    def detect() -> bool:
        return torchrun_place() is not None

    def world_size(self) -> int:
        if dist.is_initialized():
            return dist.get_world_size()
        return self._place.world if self._place else 1

    def global_rank(self) -> int:
        if dist.is_initialized():
            return dist.get_rank()
        return self._place.rank if self._place else 0

    def local_rank(self) -> int:
        return self._place.local_rank if self._place else 0

    def node_rank(self) -> int:
        """Return 0 or 1: Lightning only asks if the node is the first."""
        return int(self.global_rank() != self.local_rank())

    def set_world_size(self, size: int) -> None:
        return

    def set_global_rank(self, rank: int) -> None:
        return
