"""Processes of ranks that come to harm while a cluster is tested; found by name in their own."""

from __future__ import annotations

import os
import time

from gpumix.check.probes.probe import JsonDict, RankProbe

FOREVER_S = 60


class Sleepy(RankProbe):
    """Rank 1 sleeps once it is to form a group with another."""

    def connect(self, **given: object) -> JsonDict:
        if self.seat.rank == 1:
            time.sleep(FOREVER_S)
        return super().connect(**given)


class Apart(RankProbe):
    """Ranks 0 and 1 do not reach each other, as behind a firewall: each waits in a place of its
    own."""

    def connect(self, *, key: str, place: int, timeout_s: float) -> JsonDict:
        if key == "round0/0":
            key = f"{key}/{place}"
        return super().connect(key=key, place=place, timeout_s=timeout_s)


class Dying(RankProbe):
    """Rank 2 ends as soon as it looks at anything."""

    def facts(self, *, of_host: bool) -> JsonDict:
        if self.seat.rank == 2:
            print("free(): invalid pointer", flush=True)
            os._exit(9)
        return super().facts(of_host=of_host)


class NotShared(RankProbe):
    """Each host has an output folder of its own."""

    def seen(self, *, name: str) -> JsonDict:
        return super().seen(name=f"{name}-elsewhere")


class Stuck(RankProbe):
    """Nobody ever answers, as on a file system that is gone."""

    def facts(self, *, of_host: bool) -> JsonDict:
        time.sleep(FOREVER_S)
        return super().facts(of_host=of_host)
