"""What samples hold at each moment of a step, named but not yet counted in bytes.

All else that the engine holds lies where it was laid out before the first step (`cost.buckets`), so
only samples make one moment's memory differ from another's. `phases` follows a step and lists the
moments at which the peak can lie. Of moments that differ only in how many calls' outputs are kept,
the one that keeps the most is listed. So the list is as long as the model has kinds of units,
however many calls it has; but for workers that keep some graphs, where each call differs.
"""

from __future__ import annotations

from collections import Counter
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
    its inputs, the micro-batches stand. `working` is what is computed. `again` are units that a
    backward pass has come to, and will come to again.
    """

    kept: tuple[tuple[str, int], ...]
    boundary: str | None
    working: tuple[str, Pass]
    again: Names = ()

    @property
    def calls(self) -> int:
        return sum(count for _, count in self.kept) - 1  # the root's is no call


def phases(model: ModelProfile, *, every_call: bool = False) -> tuple[Phase, ...]:
    """The moments of a step at which its peak can lie, in the order of a step.

    The ends of a step and the optimizer's moment hold only what all others hold too, and so are
    never the peak.
    """
    return _phases(model.calls, model.kind_of_call, every_call)


@lru_cache(maxsize=64)  # a search asks for the same few models, thousands of times
def _phases(calls: Names, kinds: Names, every_call: bool) -> tuple[Phase, ...]:
    moments = list(_step(calls, kinds))
    if every_call:
        return tuple(moments)
    most: dict[Phase, Phase] = {}
    for phase in moments:
        alike = replace(phase, kept=())
        if alike not in most or phase.calls > most[alike].calls:
            most[alike] = phase
    return tuple(most.values())


def _step(calls: Names, kinds: Names) -> Iterator[Phase]:
    """All moments of a step."""
    kept = _kept_before(kinds)
    kind_of = dict(zip(calls, kinds))
    first = {name: number for number, name in reversed([*enumerate(calls)])}
    last = {name: number for number, name in enumerate(calls)}
    for k, kind in enumerate(kinds):
        yield Phase(kept[k + 1], None, (kind, "forward"))
    yield Phase(kept[-1], kinds[-1], (ROOT, "head"))
    for k in reversed(range(len(kinds))):
        again = tuple(kind_of[name] for name in first if first[name] <= k < last[name])
        yield Phase(kept[k + 1], kinds[k], (kinds[k], "backward"), again)


def _kept_before(kinds: Names) -> list[tuple[tuple[str, int], ...]]:
    """What is kept before each call, and after the last: of the root, and of each call before."""
    count = Counter({ROOT: 1})
    kept = [tuple(count.items())]
    for kind in kinds:
        count[kind] += 1
        kept.append(tuple(count.items()))
    return kept
