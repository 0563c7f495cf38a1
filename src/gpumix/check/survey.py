"""Survey of a cluster: sends tasks to ranks one after another, within a fixed time."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress

from pydantic import ValidationError

import gpumix
from gpumix.check.facts.cluster import (
    ClockOffset,
    GpuSpeed,
    HostFacts,
    JobFacts,
    JobHostFacts,
    PairFacts,
    RankFacts,
    Survey,
)
from gpumix.check.probes.pair_rounds import Pair, schedule_rounds, split_into_turns
from gpumix.check.probes.probe import JsonDict
from gpumix.check.probes.requests import RankClients, TaskAnswer
from gpumix.check.probes.worker import START_S
from gpumix.hardware.discovery.gpu_health import GpuHealth
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.job.job import Job
from gpumix.train.memory_checkpoint.memory_folder import count_copies

HELLO_S = START_S + 2.0  # limit for all ranks to arrive
FACTS_S, COPY_S = 12.0, 3.0
SPEED_S = 20.0  # may include loading the driver, which is slow with many cards
CONNECT_S, TRANSFER_S, PART_S = 8.0, 5.0, 2.0
EARLIER_S = 1.0  # margin by which forming a group times out before its processes are killed
JOB_S = 16.0
DATA_S, MODEL_S = 10.0, 10.0  # limit of each
CLOCK_LOOKS = 5
NO_ANSWER = TaskAnswer(error="no answer", silent=True)
Say = Callable[[str], None]


class Surveyor:
    """The gathering of a `Survey`.

    Args:
        job: to be run; None: only the cluster is tested.
        say: reports progress to the user.
    """

    def __init__(self, crew: RankClients, job: Job | None, say: Say) -> None:
        self._crew = crew
        self._job = job
        self._say = say
        self._ranks: dict[int, RankFacts] = {}
        self._hosts: dict[str, HostFacts] = {}

    def survey(self) -> Survey:
        """Gather all facts, ordered to keep later measurements undisturbed."""
        self._meet()
        hosts = len(self._get_host_speakers())
        self._say(
            f"testing {len(self._ranks)} device{'s' if len(self._ranks) > 1 else ''} on "
            f"{hosts} host{'s' if hosts > 1 else ''}"
        )
        self._facts()
        clocks = self._clocks()
        self._speeds()
        pairs, untried = self._pairs(keep_s=0.0 if self._job is None else JOB_S)
        job = None if self._job is None else self._job_facts(self._job)
        self._record_lost_ranks(pairs)
        named = None if self._job is None else self._job.cluster
        return Survey(
            ranks=tuple(self._ranks.values()),
            hosts=self._hosts,
            pairs=tuple(pairs),
            untried=untried,
            clocks=tuple(clocks),
            network=named.network if isinstance(named, Cluster) else None,
            job=job,
        )

    # -- ranks -------------------------------------------------------------------------------------

    def _meet(self) -> None:
        for rank, told in enumerate(self._crew.collect_hellos(HELLO_S)):
            if told is None:
                trouble = f"it did not come within {HELLO_S:.0f} s"
                fix = "look at its host: was it started there, and does it reach the first host?"
                self._ranks[rank] = RankFacts(rank=rank, trouble=trouble, fix=fix)
            else:
                self._ranks[rank] = _parse_hello(rank, told)

    def _get_healthy_ranks(self) -> list[RankFacts]:
        return [r for r in self._ranks.values() if not r.trouble and r.rank not in self._crew.lost]

    def _get_host_speakers(self) -> dict[str, int]:
        """Return the first answering rank of each host."""
        found: dict[str, int] = {}
        for rank in self._get_healthy_ranks():
            found.setdefault(rank.host, rank.rank)
        return found

    def _record_lost_ranks(self, pairs: Sequence[PairFacts]) -> None:
        """Record ranks lost during the survey, unless a failed pair reports the rank already."""
        told = {rank for pair in pairs if pair.trouble for rank in pair.ranks}
        for rank in sorted(self._crew.lost - told):
            if not self._ranks[rank].trouble:
                self._set(rank, trouble="it stopped answering")

    def _set(self, rank: int, **changes: object) -> None:
        self._ranks[rank] = self._ranks[rank].model_copy(update=changes)

    def _trouble(self, rank: int, answer: TaskAnswer) -> None:
        self._set(rank, trouble=answer.error, fix=answer.fix)

    # -- hosts and devices -------------------------------------------------------------------------

    def _facts(self) -> None:
        speakers = set(self._get_host_speakers().values())
        asked = {r.rank: {"of_host": r.rank in speakers} for r in self._get_healthy_ranks()}
        for rank, answer in self._crew.ask("facts", asked, FACTS_S).items():
            if answer.error:
                self._trouble(rank, answer)
                continue
            if "host" in answer.value:
                host = HostFacts.model_validate(answer.value["host"])
                self._hosts[self._ranks[rank].host] = host
            if "health" in answer.value:
                self._set(rank, health=GpuHealth.model_validate(answer.value["health"]))

    def _clocks(self) -> list[ClockOffset]:
        """Measure clock offsets; each is the sample with the shortest round trip."""
        found: list[ClockOffset] = []
        if any(rank.emulated for rank in self._ranks.values()):  # all hosts are the local machine
            return found
        for host, rank in list(self._get_host_speakers().items())[1:]:
            looks = [self._crew.ahead_s(rank) for _ in range(CLOCK_LOOKS)]
            known = [look for look in looks if look is not None]
            if known:
                ahead_s, sure_s = min(known, key=lambda look: look[1])
                found.append(ClockOffset(host=host, ahead_s=ahead_s, give_or_take_s=sure_s))
        return found

    def _speeds(self) -> None:
        gpus = [rank.rank for rank in self._get_healthy_ranks() if rank.has_gpu]
        for rank, answer in self._crew.ask("speed", gpus, SPEED_S).items():
            if answer.error:
                self._trouble(rank, answer)
            else:
                self._set(rank, speed=GpuSpeed.model_validate(answer.value))
        waiting = [rank for rank in self._get_healthy_ranks() if rank.speed is not None]
        while waiting:  # one device per host at a time: devices share the link to host memory
            now = {rank.host: rank for rank in reversed(waiting)}
            waiting = [rank for rank in waiting if rank not in now.values()]
            asked = [rank.rank for rank in now.values()]
            for number, answer in self._crew.ask("host_copy", asked, COPY_S).items():
                speed = self._ranks[number].speed
                if speed is not None and not answer.error:
                    told = {"host_bytes_per_s": answer.value["bytes_per_s"]}
                    self._set(number, speed=speed.model_copy(update=told))

    # -- pairs -------------------------------------------------------------------------------------

    def _pairs(self, keep_s: float) -> tuple[list[PairFacts], int]:
        """Return the tested pairs and the number of skipped pairs."""
        by_host: dict[str, list[int]] = {}
        for rank in self._get_healthy_ranks():
            by_host.setdefault(rank.host, []).append(rank.rank)
        found: list[PairFacts] = []
        untried = 0
        for number, pairs in enumerate(schedule_rounds(by_host)):
            able = [pair for pair in pairs if not self._crew.lost & set(pair)]
            if self._crew.left_s - keep_s < CONNECT_S + TRANSFER_S:
                untried += len(able)
            elif able:
                found += self._round(number, able)
        return found, untried

    def _round(self, number: int, pairs: Sequence[Pair]) -> list[PairFacts]:
        """Test a round: all pairs form groups at once, then transfers are timed in turns."""
        found: dict[Pair, PairFacts] = {}
        asked = {
            rank: {
                "key": f"round{number}/{pair[0]}",
                "place": place,
                "timeout_s": CONNECT_S - EARLIER_S,
            }
            for pair in pairs
            for place, rank in enumerate(pair)
        }
        answers = self._crew.ask("connect", asked, CONNECT_S)
        for pair in pairs:
            found[pair] = _make_pair_facts(pair, answers)
        host_of = {rank: self._ranks[rank].host for pair in pairs for rank in pair}
        for turn in split_into_turns([p for p in pairs if not found[p].trouble], host_of):
            both = [rank for pair in turn for rank in pair]
            moved = self._crew.ask("transfer", both, TRANSFER_S)
            for pair in turn:
                found[pair] = _add_transfer(found[pair], moved)
        joined = [r for r in asked if r in answers and not answers[r].error]
        self._crew.ask("part", joined, PART_S)
        return list(found.values())

    # -- the job -----------------------------------------------------------------------------------

    def _job_facts(self, job: Job) -> JobFacts:
        self._say("looking at the job's model and data")
        speakers = self._get_host_speakers()
        answers = self._crew.ask("job", speakers.values(), DATA_S)
        on_hosts = {h: _on_host(answers[r]) for h, r in speakers.items() if r in answers}
        for host, shared in self._shared(speakers).items():
            if host in on_hosts:
                on_hosts[host] = on_hosts[host].model_copy(update={"shared": shared})
        size = self._sizes(speakers, on_hosts)
        return JobFacts(
            checkpoint_bytes=size.get("checkpoint_bytes"),
            checkpoints=job.save_total_limit + 1,
            copies=count_copies(len(self._hosts)) if job.memory_save_steps else 0,
            saved_bytes=size.get("saved_bytes", 0),
            named_cluster=job.cluster != "auto",
            on_hosts=on_hosts,
        )

    def _sizes(self, speakers: dict[str, int], on_hosts: dict[str, JobHostFacts]) -> JsonDict:
        """Return checkpoint sizes from the first able host; record a failure in `on_hosts`."""
        able = [host for host in speakers if host in on_hosts and not on_hosts[host].missing]
        if not able or "model" in on_hosts[able[0]].trouble:
            return {}
        host, rank = able[0], speakers[able[0]]
        answer = self._crew.ask("model", [rank], MODEL_S).get(rank, TaskAnswer())
        if answer.silent:
            on_hosts[host] = on_hosts[host].model_copy(update={"slow": answer.error})
        elif answer.error:
            told = {**on_hosts[host].trouble, "model": (answer.error, answer.fix)}
            on_hosts[host] = on_hosts[host].model_copy(update={"trouble": told})
        return answer.value

    def _shared(self, speakers: dict[str, int]) -> dict[str, bool]:
        """Test on each host whether the first host's file next to the output is visible."""
        ranks = list(speakers.values())
        if len(ranks) < 2:
            return {}
        name = f".gpumix-check-{secrets.token_hex(8)}"
        left = self._crew.ask("leave", {ranks[0]: {"name": name, "there": True}}, COPY_S)
        if not left or left[ranks[0]].error:
            return {}
        answers = self._crew.ask("seen", {rank: {"name": name} for rank in ranks[1:]}, COPY_S)
        self._crew.ask("leave", {ranks[0]: {"name": name, "there": False}}, COPY_S)
        told = {rank: answer.value["seen"] for rank, answer in answers.items() if answer.value}
        return {host: told[rank] for host, rank in speakers.items() if rank in told}


def _parse_hello(rank: int, told: JsonDict) -> RankFacts:
    """Read a rank's hello message; another version of gpumix may use another format."""
    version = told.get("gpumix", "")
    with suppress(ValidationError):
        facts = RankFacts.model_validate(told)
        if version == gpumix.__version__:
            return facts
    return RankFacts(
        rank=rank,
        host=str(told.get("host", "")),
        trouble=f"it runs gpumix {version}, the first rank {gpumix.__version__}"
        if version != gpumix.__version__
        else f"it runs another copy of gpumix {version}",
        fix="install the same gpumix on all hosts",
    )


def _make_pair_facts(pair: Pair, answers: dict[int, TaskAnswer]) -> PairFacts:
    """Return the result of forming a group. A hang takes precedence over the peer's timeout."""
    both = {rank: answers.get(rank, NO_ANSWER) for rank in pair}
    failed = [answer for answer in both.values() if answer.error]
    if not failed:
        latency_s = max(answer.value["latency_s"] for answer in both.values())
        return PairFacts(ranks=pair, latency_s=latency_s)
    hung = [answer for answer in failed if answer.silent]
    return PairFacts(
        ranks=pair,
        trouble=(hung or failed)[0].error,
        silent=tuple(rank for rank, answer in both.items() if answer.silent),
    )


def _add_transfer(found: PairFacts, answers: dict[int, TaskAnswer]) -> PairFacts:
    both = [answers.get(rank, NO_ANSWER) for rank in found.ranks]
    failed = [answer for answer in both if answer.error]
    if failed:
        silent = tuple(r for r, answer in zip(found.ranks, both) if answer.silent)
        return found.model_copy(update={"trouble": failed[0].error, "silent": silent})
    # Both ranks agree on the measured values.
    told = {"message_bytes": both[0].value["bytes"], "message_s": both[0].value["seconds"]}
    return found.model_copy(update=told)


def _on_host(answer: TaskAnswer) -> JobHostFacts:
    if answer.silent:
        return JobHostFacts(slow=answer.error)
    if answer.error:
        return JobHostFacts(trouble={"data": (answer.error, answer.fix)})
    return JobHostFacts.model_validate(answer.value)
