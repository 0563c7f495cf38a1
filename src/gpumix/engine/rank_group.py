"""Ranks of a run: identity, communication, and diagnosis of missing ranks.

Tensors go through process groups (`data` for the engine's collectives, another for checkpoints).
Text goes through the rendezvous store and stays there, so a rank waiting in vain can name the rank
that sent nothing. Each rank's heartbeat is in the store too.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from gpumix.engine.comm.collective_progress import (
    ActivityScope,
    begin_collective,
    describe_main_thread,
    get_main_progress,
)
from gpumix.engine.comm.communicator import CommunicationError, Communicator, leave_groups
from gpumix.engine.comm.hang_attribution import AwaitedCollective, drop_unknown, find_blocking_ranks
from gpumix.engine.comm.heartbeat import (
    ENDED,
    HEARTBEAT_INTERVAL_S,
    SilenceDetector,
    format_heartbeat,
    parse_heartbeat,
)
from gpumix.engine.comm.process_groups import make_communicator
from gpumix.engine.comm.thread_shutdown import join_threads
from gpumix.engine.comm.version_check import check_equal_versions, own_versions
from gpumix.engine.sharding.state_dict import join_some_names
from gpumix.hardware.runtime import choose_backend, is_gpu
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.errors import (
    DeviceFailure,
    GpumixError,
    InputError,
    Interrupted,
    MachineError,
    NoFeasiblePlanError,
    OutOfMemory,
    PlanOutdated,
    RankLost,
    StoreGone,
    TrainingError,
    convert_error,
    format_in_one_line,
    get_first_line,
    rebuild_error,
)
from gpumix.schema.plan.plan import Plan

# Seconds without a heartbeat after which a rank is dead or stopped.
SILENCE_S = 3.0
# Seconds within which each rank has reported its progress again.
NOTICE_S = 2 * HEARTBEAT_INTERVAL_S
# Set by a rank that waits in vain: asks all ranks for their positions.
POSITIONS_REQUEST = "asked"
# Errors raised by torch when the process with the store is gone.
STORE_ERRORS = (dist.DistStoreError, dist.DistNetworkError)
# Seconds that a rank with a lost peer waits for another rank's own account.
ACCOUNT_S = 5.0
# Local class of another rank's error, by exit code.
KINDS = {
    kind.exit_code: kind
    for kind in (
        GpumixError,
        InputError,
        MachineError,
        NoFeasiblePlanError,
        TrainingError,
        Interrupted,
    )
}
# A run may continue by itself after these errors, so all ranks keep the class.
RECOVERABLE_ERRORS = tuple(
    kind.__name__ for kind in (OutOfMemory, RankLost, DeviceFailure, PlanOutdated)
)


class RankGroup:
    """View of all ranks of a run from one rank.

    Args:
        store: the rendezvous store; None for a single process.
        rank, world: this rank, and the number of ranks.
        device: device of the engine's tensors.
        timeout_s: seconds that a rank waits for others.
        seat: this rank's device and host, for messages.
    """

    def __init__(
        self,
        store: dist.Store | None,
        *,
        rank: int,
        world: int,
        device: torch.device,
        timeout_s: float,
        seat: Device | None = None,
    ) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self.timeout_s = timeout_s
        self._seats: list[Device | None] = [None] * world
        self._store = store
        self._told: dict[str, int] = {}
        self._begun: dict[str, AwaitedCollective] = {}  # latest wait, by topic
        self._claims: dict[str, str] = {}  # of a single process
        self._heart: HeartbeatThread | None = None
        self._owns_groups = False
        if store is not None and world > 1:
            on_gpu = device.type != "cpu"
            self._heart = HeartbeatThread(store.clone(), rank, runs_ahead=on_gpu)  # type: ignore[attr-defined]
            try:
                check_equal_versions(self.gather("versions", own_versions()))
            except InputError:
                self._heart.stop()
                raise
            if not dist.is_initialized():
                self._connect(store)
                self._owns_groups = True
            told = self.gather("seats", "" if seat is None else seat.model_dump_json())
            self._seats = [Device.model_validate_json(one) if one else None for one in told]

    def _connect(self, store: dist.Store) -> None:
        backend = choose_backend(self.device)
        if not dist.is_backend_available(backend):
            raise MachineError(
                f"this torch has no {backend.upper()}, by which GPUs exchange tensors",
                code="backend-missing",
                why=f"torch {torch.__version__}",
                fix="install a build of torch that has it: https://pytorch.org/get-started/locally",
            )
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("data", store),
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=self.timeout_s),
            device_id=self.device if is_gpu(self.device) else None,
        )

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if (
            error is not None
            and self._store is not None
            and not isinstance(error, CommunicationError)
            and type(error) is not DeviceFailure  # other ranks may know the cause
        ):
            with suppress(*STORE_ERRORS):  # no listener is left
                report_failure(self._store, self.rank, error)
        if self._heart is not None:
            self._heart.stop()
        if self._owns_groups and error is None:
            leave_groups()

    @property
    def names(self) -> list[str]:
        """Names of all ranks, for messages."""
        return [
            f"rank {r}" + (f" (device '{seat.id}' on {seat.host})" if seat else "")
            for r, seat in enumerate(self._seats)
        ]

    # -- tensors -----------------------------------------------------------------------------------

    def communicator(self, plan: Plan | None = None) -> Communicator:
        """Return the engine's collectives over all ranks, in the forms of `plan`."""
        return make_communicator(self.device, plan.collectives if plan is not None else None)

    def checkpoint_group(self, *, patience_s: float = 0.0) -> dist.ProcessGroup | None:
        """Create a group of CPU tensors for checkpoints, so saving never blocks training's group.

        Args:
            patience_s: seconds beyond the usual timeout allowed to the slowest rank.
        """
        if self.world == 1:
            return None
        self.gather("checkpoint group", "")  # `new_group` would not notice a failed rank
        timeout = timedelta(seconds=self.timeout_s + patience_s)
        return dist.new_group(backend="gloo", timeout=timeout)

    # -- words -------------------------------------------------------------------------------------

    def gather(self, topic: str, text: str, *, patience_s: float = 0.0) -> list[str]:
        """Return every rank's text on `topic`, in rank order. Collective; the n-th calls of all
        ranks on a topic belong together.

        Args:
            patience_s: seconds beyond the usual timeout allowed to the slowest rank.

        Raises:
            CommunicationError: a rank sent nothing within the timeout; see `explain`.
        """
        if self._store is None or self.world == 1:
            return [text]
        key = self._next(topic)
        self._store.set(f"{key}/{self.rank}", text)
        return [self._hear(f"{key}/{r}", r, topic, patience_s) for r in range(self.world)]

    def collect(self, topic: str, text: str) -> list[str]:
        """Gather on rank 0; other ranks return an empty list without waiting."""
        if self._store is None or self.rank == 0:
            return self.gather(topic, text)
        self._store.set(f"{self._next(topic)}/{self.rank}", text)
        return []

    def share(self, topic: str, text: str | None) -> str:
        """Return rank 0's text on `topic`, on all ranks. Collective."""
        if self._store is None or self.world == 1:
            return text or ""
        key = self._next(topic)
        if self.rank == 0:
            self._store.set(key, text or "")
        return self._hear(key, 0, topic)

    def agree(self, topic: str, error: GpumixError | None, *, patience_s: float = 0.0) -> None:
        """Raise any rank's first error on all ranks, own errors first. Collective; see `gather`."""
        text = "" if error is None else _serialize_error(error)
        accounts = self.gather(topic, text, patience_s=patience_s)
        if error is not None:
            raise error
        for account in accounts:
            if account:
                raise _deserialize_error(account)

    def claim(self, topic: str, text: str) -> str:
        """Claim a topic; return the text of the first rank to claim it. Not collective; callable
        from any thread."""
        if self._store is None or self.world == 1:
            return self._claims.setdefault(topic, text)
        return str(self._store.compare_set(f"claimed/{topic}", "", text).decode())

    def claimed(self, topic: str) -> str:
        """Return the text of a claimed topic; empty if unclaimed."""
        if self._store is None or self.world == 1:
            return self._claims.get(topic, "")
        key = f"claimed/{topic}"
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _next(self, topic: str) -> str:
        self._told[topic] = self._told.get(topic, 0) + 1
        self._begun[topic] = begin_collective(f"'{topic}'")
        return f"{topic}/{self._told[topic]}"

    def _hear(self, key: str, rank: int, topic: str, patience_s: float = 0.0) -> str:
        assert self._store is not None
        allowed_s = self.timeout_s + patience_s
        deadline = time.monotonic() + allowed_s
        wait = self._begun[topic]._replace(members=(rank,))
        with ActivityScope(f"waiting for '{topic}' of rank {rank}", wait):
            while not self._store.check([key]):
                failed = self._account_of_failure()
                if failed is not None:
                    raise failed
                if time.monotonic() > deadline:
                    raise CommunicationError(
                        f"{self.names[rank]} did not come to '{topic}' within {allowed_s:.0f} s",
                        code="agreement-timeout",
                        where=self.names[self.rank],
                        fix="look at that rank's host, then run the same command with --resume; a "
                        "longer `advanced.timeout` in the job waits longer",
                        wait=wait,
                    )
                time.sleep(0.005)
        return str(self._store.get(key).decode())

    # -- who is missing ----------------------------------------------------------------------------

    def explain(self, error: Exception) -> GpumixError:
        """Return why a collective (`CommunicationError`) or the store (`STORE_ERRORS`) failed:
        another rank's own account, else silent ranks, else ranks holding up the rest."""
        try:
            if isinstance(error, CommunicationError):
                with ActivityScope(f"after {error.what}", error.wait):
                    return self._explained(error)
            return self._account_of_failure() or self._alone(get_first_line(error))
        except STORE_ERRORS as gone:
            others = join_some_names([name for name in self.names if name != self.names[self.rank]])
            what = error.what if isinstance(error, CommunicationError) else "nothing is heard"
            return self._alone(f"{what}, with {others}; {get_first_line(gone)}")

    def _explained(self, error: CommunicationError) -> GpumixError:
        assert self._store is not None
        pulse = SilenceDetector(self._beat, self.world, SILENCE_S)
        self._store.set(POSITIONS_REQUEST, "")
        time.sleep(NOTICE_S)
        late = self._late(error.wait) if error.wait is not None else []
        silent: list[int] = []
        deadline = time.monotonic() + ACCOUNT_S
        while not silent and time.monotonic() < deadline:
            account = self._account_of_failure()
            if account is not None:
                return account
            time.sleep(0.1)
            silent = sorted(pulse.silent())
        if silent or late:
            return self._lost(silent or late, error, silent=bool(silent))
        if error.wait is None:
            return error
        return convert_error(error, DeviceFailure, where=self.names[self.rank])

    def _late(self, wait: AwaitedCollective) -> list[int]:
        """Return the ranks holding up this rank, which waits in vain."""
        stands = {rank: parse_heartbeat(self._beat(rank)) for rank in range(self.world)}
        return find_blocking_ranks(drop_unknown(stands), self.rank, wait)

    def _lost(self, ranks: list[int], error: CommunicationError, *, silent: bool) -> RankLost:
        assert self._store is not None
        places = {} if silent else read_positions(self._store, ranks)
        stands = [f"{self.names[r]} stands at {place}" for r, place in places.items()]
        only = self._seats[ranks[0]] if len(ranks) == 1 else None
        return RankLost(
            f"{' and '.join(self.names[r] for r in ranks)} "
            + ("stopped answering" if silent else "did not take part"),
            code="rank-silent" if silent else "rank-absent",
            where=self.names[self.rank],
            why="; ".join([": ".join(filter(None, [error.what, error.why])), *stands]),
            fix="look at that process: it was killed, stopped, is slow, or its host is gone; then "
            "run the same command with --resume",
            device=only.id if only else "",
            device_class=only.device_class if only else "",
        )

    def _account_of_failure(self) -> GpumixError | None:
        assert self._store is not None
        for rank in range(self.world):
            if rank != self.rank and self._store.check([f"failed/{rank}"]):
                return _deserialize_error(
                    self._store.get(f"failed/{rank}").decode(), self.names[rank]
                )
        return None

    def _alone(self, why: str) -> GpumixError:
        return store_gone(self.names[self.rank], why)

    def _beat(self, rank: int) -> str:
        assert self._store is not None
        return beat_of(self._store, rank)


class HeartbeatThread:
    """Thread moving this rank's heartbeat in the store, with the main thread's progress. Once asked
    (`POSITIONS_REQUEST`), reports the main thread's position."""

    def __init__(self, store: dist.Store, rank: int, *, runs_ahead: bool) -> None:
        self._store = store
        self._runs_ahead = runs_ahead
        self._rank = rank
        self._key = f"beat/{rank}"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpumix-heart", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for beat in itertools.count():
            try:
                stand = get_main_progress(runs_ahead=self._runs_ahead)
                self._store.set(self._key, format_heartbeat(beat, stand))
                if self._store.check([POSITIONS_REQUEST]):
                    self._store.set(f"stands/{self._rank}", describe_main_thread())
            except RuntimeError:  # the store is gone, and with it all listeners
                return
            if self._stopped.wait(HEARTBEAT_INTERVAL_S):
                return

    def stop(self) -> None:
        self._stopped.set()
        join_threads([self._thread])
        if self._thread.is_alive():  # the store does not answer
            return
        with suppress(RuntimeError):
            self._store.set(self._key, ENDED)


def store_gone(where: str, why: str) -> StoreGone:
    """Return the error of a rank that no longer reaches the store."""
    return StoreGone(
        "the process that holds the ranks together is gone",
        code="store-gone",
        where=where,
        why=why,
        fix="look at the launcher's host and the link to it, then run the same command with "
        "--resume",
    )


def beat_of(store: dist.Store, rank: int) -> str:
    """Return a rank's last heartbeat; empty before the first, `ENDED` after the rank has left."""
    key = f"beat/{rank}"
    return str(store.get(key).decode()) if store.check([key]) else ""


def request_positions(store: dist.Store, ranks: Sequence[int]) -> dict[int, str]:
    """Ask `ranks` for their positions; return the answers given within two heartbeats."""
    store.set(POSITIONS_REQUEST, "")
    deadline = time.monotonic() + 2 * HEARTBEAT_INTERVAL_S
    while len(told := read_positions(store, ranks)) < len(ranks) and time.monotonic() < deadline:
        time.sleep(HEARTBEAT_INTERVAL_S / 10)
    return told


def read_positions(store: dist.Store, ranks: Sequence[int]) -> dict[int, str]:
    """Return the positions reported by `ranks`, by rank; ranks report once `POSITIONS_REQUEST` is
    set."""
    return {
        rank: store.get(key).decode() for rank in ranks if store.check([key := f"stands/{rank}"])
    }


def report_failure(store: dist.Store, rank: int, error: BaseException) -> None:
    """Report the failure of `rank` to all ranks, so none needs to wait for it."""
    store.set(f"failed/{rank}", _serialize_error(error))


def _serialize_error(error: BaseException) -> str:
    """Serialize an error as text for other ranks."""
    if not isinstance(error, GpumixError):
        error = GpumixError(format_in_one_line(error), code="unexpected-error")
    return json.dumps(error.as_dict())


def _deserialize_error(account: str, who: str = "") -> GpumixError:
    """Deserialize another rank's error, as a class that callers on this rank know."""
    told = json.loads(account)
    told["where"] = told["where"] or who
    if told["error"] not in RECOVERABLE_ERRORS:
        words = {name: told[name] for name in ("what", "where", "why", "fix")}
        told = {"error": KINDS[told["exit_code"]].__name__, **words}
    return rebuild_error(told)
