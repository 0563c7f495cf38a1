"""Who holds up the others, of ranks that stand still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumix.engine.comm.hang_attribution import Stand, Wait, held_up_by
from gpumix.engine.comm.heartbeat import ENDED, beat_with, stand_in

ALL = "all"


def waiting(begun: dict[str, int], group: str, *members: int) -> Stand:
    """For the last collective that it has begun."""
    return Stand(begun, (Wait(group, begun[group], members),))


def test_who_has_not_come_to_what_all_wait_for():
    stands = {0: waiting({ALL: 7}, ALL), 1: Stand({ALL: 6}), 2: waiting({ALL: 7}, ALL)}
    assert held_up_by(stands, 0) == held_up_by(stands, 2) == [1]
    assert held_up_by(stands, 1) == []


def test_several_are_late():
    stands = {0: waiting({ALL: 7}, ALL), 1: Stand({ALL: 6}), 2: Stand({})}
    assert held_up_by(stands, 0) == [1, 2]


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
        stands[rank] = Stand(begun) if rank == culprit else waiting(begun, f"{towards}", *ends)
    for rank in {0, 1, 2} - {culprit}:
        assert held_up_by(stands, rank) == [culprit]


def test_who_has_begun_to_receive_what_it_does_not_wait_for_yet_is_not_held_up():
    """A stage expects the next message early, and hangs over what it has."""
    stands = {0: waiting({"0-1": 4}, "0-1", 0, 1), 1: Stand({"0-1": 3, "1-2": 9})}
    stands[2] = waiting({"1-2": 8}, "1-2", 1, 2)
    assert held_up_by(stands, 0) == [1]


def test_of_ranks_that_wait_for_each_other_the_one_that_is_waited_for():
    """A bug of the program: there is no end to the waits."""
    stands = {0: waiting({"a": 2, "b": 1}, "a"), 1: waiting({"a": 1, "b": 2}, "b")}
    assert held_up_by(stands, 0) == [1]
    assert held_up_by(stands, 1) == [0]


def test_where_all_have_come_nobody_is_named():
    stands = {rank: waiting({ALL: 7}, ALL) for rank in range(3)}
    assert held_up_by(stands, 0) == []


def test_who_failed_waits_for_what_failed():
    stands = {0: Stand({ALL: 7}), 1: Stand({ALL: 6})}
    assert held_up_by(stands, 0, Wait(ALL, 7)) == [1]


def test_a_rank_that_runs_ahead_of_its_device_waits_for_all_that_it_has_begun():
    """On NCCL: the hosts of those that wait went on to the end of the step."""
    ahead = Stand({ALL: 9, "0-1": 2}, (Wait(ALL, 9), Wait("0-1", 2, (0, 1))))
    hung = Stand({ALL: 4, "0-1": 2}, (Wait(ALL, 4), Wait("0-1", 2, (0, 1))))
    stands = {0: ahead, 1: hung, 2: Stand({ALL: 9}, (Wait(ALL, 9),))}
    assert held_up_by(stands, 0) == held_up_by(stands, 2) == [1]
    assert held_up_by(stands, 1) == []


def test_a_heartbeat_tells_it():
    stand = replace(waiting({ALL: 7, "0-1": 2}, "0-1", 0, 1), doing="in the reduction")
    assert stand_in(beat_with(3, stand)) == stand
    assert beat_with(3, stand) != beat_with(4, stand)
    assert stand_in("") is stand_in(ENDED) is None
