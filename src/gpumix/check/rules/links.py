"""Checks of links between all pairs of ranks, of link speed per class, and of clocks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Literal

from gpumix.check.facts.cluster import PairFacts, RankFacts, Survey
from gpumix.check.finding import Finding, Severity
from gpumix.check.rules.gpus import card_of
from gpumix.hardware.estimates.cluster_shorthand import make_links_inside
from gpumix.schema.cluster.network import Link
from gpumix.schema.units import format_count, format_rate, show_seconds

OF_STATED = 0.5  # fraction of a link's stated rate
OF_LIKE = 0.5  # fraction of the median rate of pairs of the same classes
SKEW_S = 1.0
LOOPBACK = "127."


def check_links(survey: Survey) -> Iterator[Finding]:
    """Check each pair for a correct sum, and for its rate against the stated link and its class."""
    ranks = {rank.rank: rank for rank in survey.ranks}
    failed = [pair for pair in survey.pairs if pair.trouble]
    alone = _find_isolated_ranks(survey.pairs)
    for rank in alone:
        yield _rank_fails(ranks[rank], [pair for pair in failed if rank in pair.ranks])
    for pair in failed:
        if set(alone) & set(pair.ranks):
            continue
        one, other = (ranks[rank] for rank in pair.ranks)
        yield _pair_fails(one, other, pair)
    for pair in survey.pairs:
        yield from _slow(survey, pair, ranks)
    yield from _check_host_names(survey)
    if survey.untried:
        tried = len(survey.pairs)
        yield Finding(
            severity=Severity.NOTE,
            what=f"{survey.untried} of {survey.untried + tried} pairs were not tried: no time left",
            fix="mend what else is told, and run it again; or test some of the hosts at a time",
            measured={"untried": survey.untried, "tried": tried},
        )


def _find_isolated_ranks(pairs: tuple[PairFacts, ...]) -> list[int]:
    """Return ranks failing with every peer, unless all ranks fail."""
    all_of = Counter(rank for pair in pairs for rank in pair.ranks)
    failed = Counter(rank for pair in pairs if pair.trouble for rank in pair.ranks)
    silent = {rank for pair in pairs for rank in pair.silent}
    lost = [r for r in all_of if failed[r] == all_of[r] and (all_of[r] > 1 or r in silent)]
    return lost if len(lost) < len(all_of) else []


def _rank_fails(rank: RankFacts, pairs: list[PairFacts]) -> Finding:
    silent = any(rank.rank in pair.silent for pair in pairs)
    what = "its process does not answer once it talks to" if silent else "it does not reach"
    return Finding(
        severity=Severity.ERROR,
        what=f"rank {rank.rank}: {what} any other ({pairs[0].trouble})",
        fix=f"{rank.look}; and look at its network",
        host=rank.host,
        device=rank.device,
    )


def _pair_fails(one: RankFacts, other: RankFacts, pair: PairFacts) -> Finding:
    if len(pair.silent) == 1:
        hung = one if pair.silent[0] == one.rank else other
        said = f"rank {hung.rank} does not answer ({pair.trouble})"
    else:
        said = f"they do not reach each other ({pair.trouble})"
    apart = one.host != other.host
    gpus = one.has_gpu
    # Checkpoints use gloo, whatever the backend of training.
    names = "NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0" if gpus else "GLOO_SOCKET_IFNAME=eth0"
    inside = "NCCL_P2P_DISABLE=1 tells whether it is the link between the cards: export it, and "
    inside = f"{inside}run the check again" if gpus else "see what ended or stopped their processes"
    return Finding(
        severity=Severity.ERROR,
        what=f"{_named(one)} and {_named(other)}: {said}",
        fix=f"open all ports between the two hosts, and name the interface that both have: "
        f"export {names}"
        if apart
        else inside,
        host=one.host if not apart else "",
    )


def _slow(survey: Survey, pair: PairFacts, ranks: dict[int, RankFacts]) -> Iterator[Finding]:
    rate = pair.bytes_per_s
    if rate is None:
        return
    one, other = (ranks[rank] for rank in pair.ranks)
    stated = stated_link(survey, one, other)
    found = ""
    if stated is not None and rate < OF_STATED * _rate_at(stated, pair.message_bytes):
        found = f"{stated.name or 'its link'} should give {format_rate(_rate_at(stated, 2**26))}"
    like = [
        p.bytes_per_s
        for p in survey.pairs
        if p is not pair and p.bytes_per_s and _kind(ranks, p) == _kind(ranks, pair)
    ]
    # Rates between processes of one CPU vary with the machine's load.
    real = one.has_gpu or one.host != other.host
    if not found and real and not one.emulated and len(like) > 1 and rate < OF_LIKE * median(like):
        found = f"pairs of the same classes {format_rate(median(like))}"
    if found:
        apart = one.host != other.host
        yield Finding(
            severity=Severity.WARNING,
            what=f"{_named(one)} and {_named(other)} move {format_rate(rate)}, {found}",
            fix="ethtool and ibstat show what the card agreed on with the switch; name the fast "
            "interface: export NCCL_SOCKET_IFNAME=eth0, NCCL_IB_HCA=mlx5_0"
            if apart
            else "nvidia-smi topo -m shows how they are joined; look at slots, bridges, and IOMMU "
            "(off for direct copies)",
            host="" if apart else one.host,
            measured={"bytes_per_s": rate, "latency_s": pair.latency_s or 0.0},
        )


def stated_link(survey: Survey, one: RankFacts, other: RankFacts) -> Link | None:
    """Return the link stated in the cluster file, or else by the datasheets; None if unknown or if
    a device is emulated, and uses the links of this machine."""
    if one.emulated or other.emulated:
        return None
    where: Literal["inside", "between"] = "inside" if one.host == other.host else "between"
    if survey.network is not None:
        link = survey.network.of(where, one.device_class, other.device_class)
        if link is not None:
            return link
    cards = {rank.device_class: card_of(rank.product) for rank in (one, other)}
    known = {name: card for name, card in cards.items() if card is not None}
    if where == "between" or len(known) < len(cards):
        return None
    pair = sorted((one.device_class, other.device_class))
    return next((e.link for e in make_links_inside(known) if sorted(e.classes) == pair), None)


def _rate_at(link: Link, size: int) -> float:
    """Return a message's bytes per second on a link, including the link's startup time."""
    begin_s = link.times.values[0]
    return size / (begin_s + size / link.largest_bytes_per_s) if size else 0.0


def _kind(ranks: dict[int, RankFacts], pair: PairFacts) -> tuple[object, ...]:
    one, other = (ranks[rank] for rank in pair.ranks)
    return one.host == other.host, *sorted((one.device_class, other.device_class))


def _check_host_names(survey: Survey) -> Iterator[Finding]:
    """Check that host names resolve to reachable addresses, unless a gloo interface is set."""
    if len(survey.hosts) < 2 or survey.emulated:
        return
    for host, facts in survey.hosts.items():
        loops = not facts.address or facts.address.startswith(LOOPBACK)
        if loops and "GLOO_SOCKET_IFNAME" not in facts.settings:
            stands = f"stands for {facts.address}" if facts.address else "stands for no address"
            yield Finding(
                severity=Severity.WARNING,
                what=f"its own name {stands}, which other hosts do not reach",
                fix="mend its line in /etc/hosts, or export GLOO_SOCKET_IFNAME=eth0",
                host=host,
            )


def describe_links(survey: Survey) -> str:
    """Describe the number of pairs and the slowest pair of each kind."""
    ranks = {rank.rank: rank for rank in survey.ranks}
    kinds: dict[str, list[PairFacts]] = {"inside hosts": [], "between hosts": []}
    for pair in survey.pairs:
        if pair.bytes_per_s:
            kinds["inside hosts" if _kind(ranks, pair)[0] else "between hosts"].append(pair)
    if survey.emulated:
        kinds = {"inside this machine": [pair for some in kinds.values() for pair in some]}
    return "; ".join(_slowest(name, some) for name, some in kinds.items() if some)


def _slowest(name: str, pairs: list[PairFacts]) -> str:
    rate = format_rate(min(pair.bytes_per_s or 0.0 for pair in pairs))
    latency = show_seconds(max(pair.latency_s or 0.0 for pair in pairs))
    return f"{format_count(len(pairs), 'pair')} {name}, the slowest {rate} and {latency}"


def collect_rates(survey: Survey) -> dict[str, float]:
    """Return the rate and latency of each pair."""
    found: dict[str, float] = {}
    for pair in survey.pairs:
        name = "ranks {} and {}".format(*pair.ranks)
        found |= {f"{name} bytes_per_s": pair.bytes_per_s} if pair.bytes_per_s else {}
        found |= {f"{name} latency_s": pair.latency_s} if pair.latency_s else {}
    return found


def check_clocks(survey: Survey) -> Iterator[Finding]:
    """Check clocks, because logs, files and caches of several hosts are compared by time."""
    for clock in survey.clocks:
        if abs(clock.ahead_s) - clock.give_or_take_s > SKEW_S:
            way = "ahead of" if clock.ahead_s > 0 else "behind"
            first = next(iter(survey.hosts), "the first host")
            yield Finding(
                severity=Severity.WARNING,
                what=f"its clock is {abs(clock.ahead_s):.1f} s {way} that of {first}, give or take "
                f"{show_seconds(clock.give_or_take_s)}",
                fix="sudo timedatectl set-ntp true, or sudo chronyc makestep",
                host=clock.host,
                measured={"ahead_s": clock.ahead_s, "give_or_take_s": clock.give_or_take_s},
            )


def describe_clocks(survey: Survey) -> str:
    if not survey.clocks:
        return ""
    worst = max(survey.clocks, key=lambda one: abs(one.ahead_s))
    return (
        f"those of {len(survey.clocks) + 1} hosts agree within {show_seconds(abs(worst.ahead_s))}, "
        f"give or take {show_seconds(worst.give_or_take_s)}"
    )


def collect_clock_skews(survey: Survey) -> dict[str, float]:
    return {f"{clock.host} ahead_s": clock.ahead_s for clock in survey.clocks}


def _named(rank: RankFacts) -> str:
    return f"rank {rank.rank} on {rank.host}"
