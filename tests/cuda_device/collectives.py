"""Collectives of tensors on the devices by gloo, under the name of NCCL.

As with NCCL, a collective runs on a stream of its group, after what the current stream was given
before it; the host goes on, and `Work.wait` holds back the current stream alone. It is not NCCL:
how fast it is, what it does when a rank is lost, and its own memory are not shown.
"""

from __future__ import annotations

import ctypes
import datetime
import itertools
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from cuda_device.library import CALL, call

Tensors = Sequence[torch.Tensor]
_CALLS: dict[int, Callable[[], None]] = {}
_NUMBERS = itertools.count()


def install() -> None:
    """Make "nccl" a backend of `torch.distributed`."""
    found: Any = c10d
    found._NCCL_AVAILABLE = True
    found.ProcessGroupNCCL = GlooOnDevices
    if found.default_pg_nccl_timeout is None:
        found.default_pg_nccl_timeout = datetime.timedelta(minutes=10)


class Options:
    """As of NCCL's process group: what is used of them."""

    def __init__(self) -> None:
        self._timeout = datetime.timedelta(minutes=10)
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


class OnStream(dist._Work):
    """A collective that a stream runs.

    Args:
        tensors: are kept until it is waited for.
    """

    def __init__(self, tensors: Tensors, done: torch.cuda.Event) -> None:
        super().__init__()
        self._tensors: Tensors = tensors
        self._done = done

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        torch.cuda.current_stream(self._tensors[0].device).wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        return self._done.query()

    def is_success(self) -> bool:
        return self._done.query()

    def synchronize(self) -> None:
        self.wait()


class GlooOnDevices(dist.ProcessGroup):
    """A process group of tensors on devices, and of those on the host."""

    Options = Options

    def __init__(
        self, store: dist.Store, rank: int, size: int, options: Options | None = None
    ) -> None:
        super().__init__(rank, size)
        self.options = options or Options()
        groups = [
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, self.options._timeout)
            for name in ("devices", "host")
        ]
        self._gloo, self._host = groups
        self._name = self._description = ""
        self._streams: dict[int, torch.cuda.Stream] = {}
        self.supports_coalescing = self.supports_splitting = False

    def _get_backend(self, device: torch.device) -> Any:
        return self if torch.device(device).type == "cuda" else self._host

    def _set_sequence_number_for_group(self) -> None:
        self._gloo._set_sequence_number_for_group()
        self._host._set_sequence_number_for_group()

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupName(self) -> str:
        return self._name

    def name(self) -> str:
        return "nccl"

    def getBackendName(self) -> str:
        return "nccl"

    def eager_connect_single_device(self, device: torch.device) -> None:
        pass

    def abort(self) -> None:
        pass

    def shutdown(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    # -- collectives --

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        options = options or dist.AllreduceOptions()
        if tensors[0].device.type == "cpu":
            return self._host.allreduce(tensors, options)
        mine = _host_views(tensors)
        return self._begin(tensors, lambda: self._reduce(mine, options.reduceOp))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        given = dist.AllreduceOptions()
        given.reduceOp = options.reduceOp
        return [self.allreduce([tensor], given) for tensor in tensors][-1]

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        if tensors[0].device.type == "cpu":
            return self._host.broadcast(tensors, options)
        mine, root = _host_views(tensors), options.rootRank
        return self._begin(tensors, lambda: self._broadcast(mine[0], root))

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        if tensors[0].device.type == "cpu":
            return self._host.reduce(tensors, options)
        mine = _host_views(tensors)
        return self._begin(tensors, lambda: self._gloo.reduce(mine, options).wait())

    def allgather(self, into: list[Any], tensors: list[torch.Tensor], options: Any = None) -> Any:
        if tensors[0].device.type == "cpu":
            return self._host.allgather(into, tensors, options or dist.AllgatherOptions())
        places, mine = _host_views(into[0]), _host_views(tensors)[0]
        return self._begin([*into[0], *tensors], lambda: self._gather(places, mine))

    def _allgather_base(self, into: torch.Tensor, tensor: torch.Tensor, options: Any = None) -> Any:
        if tensor.device.type == "cpu":
            return self._host._allgather_base(into, tensor, options or dist.AllgatherOptions())
        places, mine = _host_views([into])[0].chunk(self.size()), _host_views([tensor])[0]
        return self._begin([into, tensor], lambda: self._gather(places, mine))

    def reduce_scatter(self, into: list[torch.Tensor], tensors: list[Any], options: Any) -> Any:
        if into[0].device.type == "cpu":
            return self._host.reduce_scatter(into, tensors, options)
        mine, parts = _host_views(into)[0], _host_views(tensors[0])
        return self._begin(
            [*into, *tensors[0]], lambda: self._scatter(mine, parts, options.reduceOp)
        )

    def _reduce_scatter_base(self, into: torch.Tensor, tensor: torch.Tensor, options: Any) -> Any:
        if into.device.type == "cpu":
            return self._host._reduce_scatter_base(into, tensor, options)
        mine, parts = _host_views([into])[0], _host_views([tensor])[0].chunk(self.size())
        return self._begin([into, tensor], lambda: self._scatter(mine, parts, options.reduceOp))

    def alltoall_base(
        self,
        into: torch.Tensor,
        tensor: torch.Tensor,
        into_sizes: list[int],
        sizes: list[int],
        options: Any = None,
    ) -> Any:
        options = options or dist.AllToAllOptions()
        if tensor.device.type == "cpu":
            return self._host.alltoall_base(into, tensor, into_sizes, sizes, options)
        there, mine = _host_views([into, tensor])

        def exchange() -> None:
            received = there.clone()  # the views of a stream are read while others write
            self._gloo.alltoall_base(received, mine, into_sizes, sizes, options).wait()
            there.copy_(received)

        return self._begin([into, tensor], exchange)

    # The names of torch 2.13.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def barrier(self, options: Any = None) -> Any:
        return self._host.barrier(options or dist.BarrierOptions())

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        if tensors[0].device.type == "cpu":
            return self._host.send(tensors, to, tag)
        mine = _host_views(tensors)
        return self._begin(tensors, lambda: self._gloo.send(mine, to, tag).wait())

    def recv(self, tensors: list[torch.Tensor], origin: int, tag: int) -> Any:
        if tensors[0].device.type == "cpu":
            return self._host.recv(tensors, origin, tag)
        mine = _host_views(tensors)
        return self._begin(tensors, lambda: self._gloo.recv(mine, origin, tag).wait())

    def gather(self, into: list[Any], tensors: list[torch.Tensor], options: Any) -> Any:
        return self._host.gather(into, tensors, options)

    def scatter(self, into: list[torch.Tensor], tensors: list[Any], options: Any) -> Any:
        return self._host.scatter(into, tensors, options)

    # -- by the thread of a stream, on memory of the devices --

    def _reduce(self, tensors: Tensors, op: Any) -> None:
        options = dist.AllreduceOptions()
        averages = op == dist.ReduceOp.AVG
        options.reduceOp = dist.ReduceOp.SUM if averages else op
        for tensor in tensors:
            if tensor.numel():
                self._gloo.allreduce([tensor], options).wait()
                if averages:
                    tensor.div_(self.size())

    def _broadcast(self, tensor: torch.Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        if tensor.numel():
            self._gloo.broadcast([tensor], options).wait()

    def _gather(self, places: Tensors, mine: torch.Tensor) -> None:
        """Of parts of any sizes, each by its owner."""
        if places[self.rank()].data_ptr() != mine.data_ptr():
            places[self.rank()].copy_(mine)
        for owner, place in enumerate(places):
            self._broadcast(place, owner)

    def _scatter(self, mine: torch.Tensor, parts: Tensors, op: Any) -> None:
        whole = torch.cat(list(parts))
        self._reduce([whole], op)
        mine.copy_(whole.split([len(part) for part in parts])[self.rank()])

    def _begin(self, tensors: Tensors, act: Callable[[], None]) -> OnStream:
        """Let the group's stream do it when the current one has come to it."""
        device = tensors[0].device
        stream = self._streams.setdefault(device.index, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        number = next(_NUMBERS)
        _CALLS[number] = act
        call("call")(device.index, stream.stream_id, _RUN, number)
        return OnStream(tensors, stream.record_event())


def _run(number: int) -> None:
    """An error here is a rank that is gone, or a bug; NCCL's watchdog would end the process."""
    try:
        with torch.no_grad():
            _CALLS.pop(number)()
    except Exception:
        traceback.print_exc(file=sys.stderr)


_RUN = CALL(_run)


def _host_views(tensors: Tensors) -> list[torch.Tensor]:
    """The same memory as 1-D tensors of the host, for the thread of a stream."""
    return [_host_view(tensor) for tensor in tensors]


def _host_view(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    if tensor.numel() == 0:
        return torch.empty(0, dtype=tensor.dtype)
    memory = (ctypes.c_byte * (tensor.numel() * tensor.element_size())).from_address(
        tensor.data_ptr()
    )
    return torch.frombuffer(memory, dtype=tensor.dtype)
