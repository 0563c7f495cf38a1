"""Jobs and training functions on a Ray cluster: a worker per device, of any mix of GPU types.

    from gpumix.integrations.ray import train

    train("job.yaml", workers={"A100": 2, "T4": 4})

Workers are actors in a placement group. Ray Train's `TorchTrainer` does not serve: it gives all
workers equal resources, makes the process group itself, and calls the training function in a
thread, unfit for signals and for ranks that restart. Called inside Ray Train or Tune, `train`
reports metrics by `ray.train.report`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from gpumix.integrations.common.optional_dependency import require_packages

require_packages(__name__, "ray", extra="ray")

import ray  # noqa: E402 - a missing package is reported first
from ray.exceptions import RayActorError, RayTaskError  # noqa: E402
from ray.util.placement_group import (  # noqa: E402
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402

from gpumix.integrations.ray.placement import (  # noqa: E402
    RankPlace,
    WantedWorker,
    Workers,
    assign_ranks,
    choose_error,
    list_wanted_workers,
    make_placement_error,
)
from gpumix.integrations.ray.worker import (  # noqa: E402
    SHUTDOWN_TIMEOUT_S,
    FunctionRank,
    JobRank,
    ProcessState,
    select_numbers,
)
from gpumix.schema.errors import GpumixError, Interrupted, RankLost, rebuild_error  # noqa: E402
from gpumix.schema.reading.read import read_job  # noqa: E402
from gpumix.train.run_log import run_files  # noqa: E402

__all__ = ["Workers", "run", "train"]

POLL_INTERVAL_S = 0.5
GRACE_S = 20.0  # for ranks to report their errors after the first failure
BUILTIN_RESOURCES = ("CPU", "GPU", "memory")


def train(
    job: str | Path,
    workers: Mapping[str, int | Workers],
    *,
    overrides: Sequence[str] = (),
    plan: str | Path | None = None,
    resume: bool = False,
    allow: Sequence[str] = (),
    on_metrics: Callable[[dict[str, Any]], None] | None = None,
    timeout_s: float = 120.0,
) -> dict[str, Any]:
    """Run `gpumix train JOB` with a rank on each worker.

    Args:
        job: its file, and all files it names, are visible to all nodes.
        workers: numbers of workers by accelerator type, with a GPU each; or `Workers`, with any
            labels and resources, under any name.
        overrides: as of `--set`.
        plan, resume, allow: as of `--plan`, `--resume` and `--allow`.
        on_metrics: receives each line of the run's metrics; by default Ray Train or Tune receives
            its numbers, if calling.
        timeout_s: how long Ray may look for places.

    Returns:
        The summary of the run, as `gpumix train --json` prints it.

    Raises:
        MachineError: Ray has no such places.
        GpumixError: the error of the failed run.
    """
    folder, tell = Path.cwd(), on_metrics or _reporter()
    metrics = read_job(Path(job), list(overrides)).output_dir / run_files.METRICS
    arguments = ["train", str(job), "--json", *_options(overrides, allow)]
    arguments += [*(["--plan", str(plan)] if plan else []), *(["--resume"] if resume else [])]
    with _start_ranks(JobRank, list_wanted_workers(workers), timeout_s) as ranks:
        begun = [
            actor.begin.remote(
                place, arguments, str(folder), str(metrics) if place.rank == 0 else None
            )
            for actor, place in ranks
        ]
        _wait_for_results(dict(enumerate(begun)), GRACE_S)
        try:
            looks = _watch_ranks([actor for actor, _ in ranks], tell)
        except KeyboardInterrupt:
            raise _interrupt_ranks([actor for actor, _ in ranks]) from None
        finally:
            for actor, _ in ranks:
                with suppress(RayActorError):
                    ray.get(actor.end.remote())
    errors = {
        rank: error for rank, look in looks.items() if (error := _make_exit_error(rank, look))
    }
    if errors:
        raise choose_error(errors)
    summary: dict[str, Any] = looks[0].told
    return summary


def run(
    function: Callable[..., Any],
    workers: Mapping[str, int | Workers],
    *,
    args: Sequence[Any] = (),
    timeout_s: float = 120.0,
) -> list[Any]:
    """Call a training function on each worker, as torchrun calls a script. RANK, WORLD_SIZE and the
    rest are set in the environment, so gpumix in the function finds the other ranks.

    Args:
        function: a loop with `gpumix.prepare`, for example, or with `Trainer` of
            `gpumix.integrations.transformers`.
        workers, timeout_s: as of `train`.

    Returns:
        The results of the function, in the order of ranks.

    Raises:
        MachineError: Ray has no such places.
        GpumixError: the error of the rank that failed first; its cause is the function's own error.
    """
    with _start_ranks(FunctionRank, list_wanted_workers(workers), timeout_s) as ranks:
        calls = {place.rank: actor.call.remote(place, function, args) for actor, place in ranks}
        found = _wait_for_results(calls, GRACE_S)
        return [found[rank] for rank in range(len(ranks))]


@contextmanager
def _start_ranks(
    kind: type[Any], asked: Sequence[WantedWorker], timeout_s: float
) -> Iterator[list[tuple[Any, RankPlace]]]:
    """Yield an actor and a place for each rank, in order; kill the actors on exit."""
    if not ray.is_initialized():
        ray.init()
    group = placement_group(
        [dict(one.workers.resources) for one in asked],
        strategy="PACK",
        bundle_label_selector=[dict(one.workers.labels) for one in asked],
    )
    actors: list[Any] = []
    try:
        if not group.wait(timeout_s):
            raise make_placement_error(asked, ray.nodes(), timeout_s)
        actors += [_start_actor(kind, group, number, one) for number, one in enumerate(asked)]
        arrived = ray.get([actor.arrived.remote() for actor in actors])
        order = assign_ranks(arrived)
        first, place = order[0]
        port = ray.get(actors[first].free_port.remote(place.address))
        yield [(actors[number], replace(place, port=port)) for number, place in order]
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def _start_actor(kind: type[Any], group: PlacementGroup, number: int, one: WantedWorker) -> Any:
    own = dict(one.workers.resources)
    return (
        ray.remote(kind)
        .options(
            num_cpus=own.get("CPU", 0),
            num_gpus=own.get("GPU", 0),
            memory=own.get("memory"),
            resources={name: n for name, n in own.items() if name not in BUILTIN_RESOURCES},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=number
            ),
        )
        .remote()
    )


def _wait_for_results(calls: Mapping[int, Any], grace_s: float) -> dict[int, Any]:
    """Wait for results of calls by rank. After the first failure other calls have `grace_s` to
    fail.

    Raises:
        GpumixError: the most informative error of the failed calls.
    """
    waiting = {call: rank for rank, call in calls.items()}
    found: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    deadline: float | None = None
    while waiting:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, _ = ray.wait(list(waiting), timeout=left_s)
        if not done:
            break
        rank = waiting.pop(done[0])
        try:
            found[rank] = ray.get(done[0])
        except RayTaskError as error:
            errors[rank] = error.cause
        except RayActorError as error:
            errors[rank] = _make_lost_error(rank, error)
        if errors and deadline is None:
            deadline = time.monotonic() + grace_s
    if errors:
        told = choose_error(errors)
        raise told from next((e for e in errors.values() if not isinstance(e, GpumixError)), None)
    return found


def _watch_ranks(
    actors: Sequence[Any], tell: Callable[[dict[str, Any]], None]
) -> dict[int, ProcessState]:
    """Return the final look at each rank. After the first failure other ranks have a while to
    end."""
    looks: dict[int, ProcessState] = {}
    deadline: float | None = None
    while len(looks) < len(actors) and (deadline is None or time.monotonic() < deadline):
        time.sleep(POLL_INTERVAL_S)
        for rank, actor in enumerate(actors):
            if rank in looks:
                continue
            try:
                look: ProcessState = ray.get(actor.look.remote())
            except RayActorError as error:
                look = ProcessState(RankLost.exit_code, _make_lost_error(rank, error).as_dict())
            for event in look.metrics:
                tell(event)
            if look.code is not None:
                looks[rank] = look
            if look.code and deadline is None:
                deadline = time.monotonic() + GRACE_S
    return looks


def _interrupt_ranks(actors: Sequence[Any]) -> GpumixError:
    """Ask the ranks to save and end; return the first rank's report."""
    for actor in actors:
        actor.interrupt.remote()
    deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            looks: list[ProcessState] = ray.get([actor.look.remote() for actor in actors])
        except RayActorError as error:
            return Interrupted(
                "a worker was lost before all ranks had ended",
                code="ray-worker-lost-early",
                why=str(error),
            )
        if all(look.code is not None for look in looks):
            return _make_exit_error(0, looks[0]) or Interrupted(
                "the run had just come to its end", code="run-at-its-end"
            )
        time.sleep(POLL_INTERVAL_S)
    return Interrupted(
        f"ranks that did not end within {SHUTDOWN_TIMEOUT_S:.0f} s were ended",
        code="ranks-ended-by-force",
    )


def _make_exit_error(rank: int, look: ProcessState) -> GpumixError | None:
    if not look.code:
        return None
    if isinstance(look.told, dict) and "error" in look.told:
        return rebuild_error(look.told)
    return RankLost(
        f"the process of rank {rank} ended with code {look.code}",
        code="rank-process-ended",
        why=look.said or "it said nothing of why",
        fix="look at what Ray keeps of its output: ray logs cluster",
    )


def _make_lost_error(rank: int, error: RayActorError) -> RankLost:
    return RankLost(
        f"the worker of rank {rank} is gone",
        code="ray-worker-gone",
        why=str(error).strip().splitlines()[0],
        fix="start again with resume=True; `ray status` shows which nodes are there",
    )


def _options(overrides: Sequence[str], allow: Sequence[str]) -> list[str]:
    named = [("--set", one) for one in overrides] + [("--allow", one) for one in allow]
    return [word for pair in named for word in pair]


def _reporter() -> Callable[[dict[str, Any]], None]:
    """Return a reporter of a step's numbers to Ray Train or Tune, if called inside either."""
    for name in ("ray.train", "ray.tune"):
        # Train's raises DeprecationWarning inside Tune.
        with suppress(ImportError, RuntimeError, DeprecationWarning):
            library = import_module(name)
            library.get_context()
            return partial(_report, library)
    return lambda _: None


def _report(library: Any, event: dict[str, Any]) -> None:
    if "loss" in event:
        library.report(select_numbers(event))
