"""What samples hold at each moment of a step, named but not yet counted in bytes.

All else that the engine holds lies where it was laid out before the first step (`cost.buckets`), so
only samples make one moment's memory differ from another's. `phases` follows a step and lists the
moments at which the peak can lie. Of moments that differ only in how many calls' outputs are kept,
the one that keeps the most is listed. So the list is as long as the model has kinds of units,
however many calls it has; but where more gradients wait at earlier calls, and for workers that keep
some graphs, where each call differs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from gpumix.spec.profile import ROOT, ModelProfile

Names = tuple[str, ...]
Pass = Literal["forward", "backward", "head"]


@dataclass(frozen=True)
class Phase:
    """What samples hold at one moment; units are named by kind, the root is `ROOT`.

    `kept` counts the calls of each kind that wait for their backward, `calls` of them in all.
    `boundary` is the kind of the call between whose gradients, those of its outputs and those of
    its inputs, the micro-batches stand; `waiting` are bytes by sample of gradients beside these.
    `working` is what is computed. `again` are units that a backward pass has come to, and will come
    to again. `standing` are calls whose outputs the model itself has, in all micro-batches.
    """

    kept: tuple[tuple[str, int], ...]
    boundary: str | None
    working: tuple[str, Pass]
    again: Names = ()
    standing: Names = ()
    waiting: float = 0.0

    @property
    def calls(self) -> int:
        return sum(count for _, count in self.kept) - 1  # the root's is no call


def phases(model: ModelProfile, *, every_call: bool = False) -> tuple[Phase, ...]:
    """The moments of a step at which its peak can lie, in the order of a step.

    The ends of a step and the optimizer's moment hold only what all others hold too, and so are
    never the peak.
    """
    waiting = model.waiting or (0.0,) * len(model.calls)
    found = _phases(model.calls, model.kind_of_call, waiting, every_call)
    if model.root.backward is None:
        return found
    kind = model.kind_of_call[0]
    return (*found, Phase(((ROOT, 1),), kind, (ROOT, "backward"), waiting=waiting[0]))


@lru_cache(maxsize=64)  # a search asks for the same few models, thousands of times
def _phases(
    calls: Names, kinds: Names, waiting: tuple[float, ...], every_call: bool
) -> tuple[Phase, ...]:
    moments = list(_step(calls, kinds, waiting))
    if every_call:
        return tuple(moments)
    most: dict[Phase, list[Phase]] = defaultdict(list)
    for phase in sorted(moments, key=lambda phase: (phase.calls, phase.waiting), reverse=True):
        alike = most[replace(phase, kept=(), standing=(), waiting=0.0)]
        if all(phase.waiting > other.waiting for other in alike):
            alike.append(phase)
    listed = {id(phase) for alike in most.values() for phase in alike}
    return tuple(phase for phase in moments if id(phase) in listed)


def _step(calls: Names, kinds: Names, waiting: tuple[float, ...]) -> Iterator[Phase]:
    """All moments of a step."""
    kept = _kept_before(kinds)
    kind_of = dict(zip(calls, kinds))
    first = {name: number for number, name in reversed([*enumerate(calls)])}
    last = {name: number for number, name in enumerate(calls)}
    for k, kind in enumerate(kinds):
        # The model is not resumed after its last call before its head is computed.
        standing = kinds[-2:] if k == len(kinds) - 1 else (kind,)
        yield Phase(kept[k + 1], None, (kind, "forward"), standing=standing)
    head: tuple[str, Pass] = (ROOT, "head")
    yield Phase(kept[-1], kinds[-1], head, waiting=waiting[-1], standing=kinds[-2:-1])
    for k in reversed(range(len(kinds))):
        again = tuple(kind_of[name] for name in first if first[name] <= k < last[name])
        yield Phase(kept[k + 1], kinds[k], (kinds[k], "backward"), again, waiting=waiting[k])


def _kept_before(kinds: Names) -> list[tuple[tuple[str, int], ...]]:
    """What is kept before each call, and after the last: of the root, and of each call before."""
    count = Counter({ROOT: 1})
    kept = [tuple(count.items())]
    for kind in kinds:
        count[kind] += 1
        kept.append(tuple(count.items()))
    return kept
