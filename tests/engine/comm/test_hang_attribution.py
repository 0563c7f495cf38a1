"""Who holds up the others, of ranks that stand still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumix.engine.comm.hang_attribution import AwaitedCollective, RankProgress, find_blocking_ranks
from gpumix.engine.comm.heartbeat import ENDED, format_heartbeat, parse_heartbeat

ALL = "all"


def waiting(begun: dict[str, int], group: str, *members: int) -> RankProgress:
    """For the last collective that it has begun."""
    return RankProgress(begun, (AwaitedCollective(group, begun[group], members),))


def test_who_has_not_come_to_what_all_wait_for():
    stands = {0: waiting({ALL: 7}, ALL), 1: RankProgress({ALL: 6}), 2: waiting({ALL: 7}, ALL)}
    assert find_blocking_ranks(stands, 0) == find_blocking_ranks(stands, 2) == [1]
    assert find_blocking_ranks(stands, 1) == []


def test_several_are_late():
    stands = {0: waiting({ALL: 7}, ALL), 1: RankProgress({ALL: 6}), 2: RankProgress({})}
    assert find_blocking_ranks(stands, 0) == [1, 2]


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_in_a_row_of_stages_it_is_the_one_at_the_end_of_the_waits(culprit):
    """Each waits for its neighbour on the side of the one that hangs, which has begun one message
    less on the line between them."""
    stands = {}
    for rank in range(3):
        lines = {line: min(line, line + 1, key=lambda end: abs(end - culprit)) for line in (0, 1)}
        begun = {
            f"{line}": 2 if rank == nearer else 3
            for line, nearer in lines.items()
            if rank in (line, line + 1)
        }
        towards = rank if culprit > rank else rank - 1
        ends = towards, towards + 1
        stands[rank] = (
            RankProgress(begun) if rank == culprit else waiting(begun, f"{towards}", *ends)
        )
    for rank in {0, 1, 2} - {culprit}:
        assert find_blocking_ranks(stands, rank) == [culprit]


def test_who_has_begun_to_receive_what_it_does_not_wait_for_yet_is_not_held_up():
    """A stage expects the next message early, and hangs over what it has."""
    stands = {0: waiting({"0-1": 4}, "0-1", 0, 1), 1: RankProgress({"0-1": 3, "1-2": 9})}
    stands[2] = waiting({"1-2": 8}, "1-2", 1, 2)
    assert find_blocking_ranks(stands, 0) == [1]


def test_of_ranks_that_wait_for_each_other_the_one_that_is_waited_for():
    """A bug of the program: there is no end to the waits."""
    stands = {0: waiting({"a": 2, "b": 1}, "a"), 1: waiting({"a": 1, "b": 2}, "b")}
    assert find_blocking_ranks(stands, 0) == [1]
    assert find_blocking_ranks(stands, 1) == [0]


def test_where_all_have_come_nobody_is_named():
    stands = {rank: waiting({ALL: 7}, ALL) for rank in range(3)}
    assert find_blocking_ranks(stands, 0) == []


def test_who_failed_waits_for_what_failed():
    stands = {0: RankProgress({ALL: 7}), 1: RankProgress({ALL: 6})}
    assert find_blocking_ranks(stands, 0, AwaitedCollective(ALL, 7)) == [1]


def test_a_rank_that_runs_ahead_of_its_device_waits_for_all_that_it_has_begun():
    """On NCCL: the hosts of those that wait went on to the end of the step."""
    ahead = RankProgress(
        {ALL: 9, "0-1": 2}, (AwaitedCollective(ALL, 9), AwaitedCollective("0-1", 2, (0, 1)))
    )
    hung = RankProgress(
        {ALL: 4, "0-1": 2}, (AwaitedCollective(ALL, 4), AwaitedCollective("0-1", 2, (0, 1)))
    )
    stands = {0: ahead, 1: hung, 2: RankProgress({ALL: 9}, (AwaitedCollective(ALL, 9),))}
    assert find_blocking_ranks(stands, 0) == find_blocking_ranks(stands, 2) == [1]
    assert find_blocking_ranks(stands, 1) == []


def test_a_heartbeat_tells_it():
    stand = replace(waiting({ALL: 7, "0-1": 2}, "0-1", 0, 1), activity="in the reduction")
    assert parse_heartbeat(format_heartbeat(3, stand)) == stand
    assert format_heartbeat(3, stand) != format_heartbeat(4, stand)
    assert parse_heartbeat("") is parse_heartbeat(ENDED) is None
