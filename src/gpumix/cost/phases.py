"""What the engine holds at each moment of a step, named but not yet counted in bytes.

`phases` follows `engine.layered` through a step and lists the moments at which the peak can lie. Of
moments that differ only in how many calls' outputs are kept, the one that keeps the most is listed.
So the list is as long as the model has kinds of neighbourhood, however many calls it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from gpumix.spec.profile import ROOT, ModelProfile

Names = tuple[str, ...]
Pass = Literal["forward", "backward", "head"]


@dataclass(frozen=True)
class Phase:
    """What is held at one moment; units are named by kind, the root is `ROOT`.

    `gathered` and `gradients` are units whose whole buffers exist. `kept` counts the calls of each
    kind that wait for their backward. `boundary` is the kind of the call between whose gradients,
    those of its outputs and those of its inputs, the micro-batches stand. `reduced` are units whose
    gradients are on their way to their owners.
    """

    gathered: tuple[str, ...]
    kept: tuple[tuple[str, int], ...]
    gradients: tuple[str, ...] = ()
    boundary: str | None = None
    working: tuple[str, Pass] | None = None
    reduced: tuple[str, ...] = ()


def phases(model: ModelProfile) -> tuple[Phase, ...]:
    """The moments of a step at which its peak can lie, in the order of a step.

    The optimizer's moment holds only what all others hold too, and so is never the peak.
    """
    return _phases(model.calls, model.kind_of_call)


@lru_cache(maxsize=64)  # a search asks for the same few models, thousands of times
def _phases(calls: Names, kinds: Names) -> tuple[Phase, ...]:
    most: dict[Phase, Phase] = {}
    for phase in _step(calls, kinds):
        alike = replace(phase, kept=())
        if alike not in most or _calls(phase) > _calls(most[alike]):
            most[alike] = phase
    return tuple(most.values())


def _calls(phase: Phase) -> int:
    return sum(count for _, count in phase.kept)


def _step(calls: Names, kinds: Names) -> Iterator[Phase]:
    """All moments of a step."""
    kept = _kept_before(kinds)
    for k, kind in enumerate(kinds):
        more = k + 1 < len(calls) and calls[k + 1] != calls[k]
        gathered = (ROOT, kind, kinds[k + 1]) if more else (ROOT, kind)
        yield Phase(gathered, kept[k + 1], working=(kind, "forward"))
    last = kinds[-1]
    yield Phase((ROOT, last), kept[-1], (ROOT,), boundary=last, working=(ROOT, "head"))
    yield from _backward(calls, kinds, kept)


def _backward(
    calls: Names, kinds: Names, kept: list[tuple[tuple[str, int], ...]]
) -> Iterator[Phase]:
    """Two moments a call: while it is computed, and when its reduction has begun and the one
    before it is waited for. A unit's gradient lives from its last call to that wait."""
    first_call = {name: k for k, name in reversed(list(enumerate(calls)))}
    gradients: dict[str, str] = {}  # kind by name of the unit
    reducing: tuple[str, ...] = ()  # name of the unit
    for k in reversed(range(len(calls))):
        name, kind = calls[k], kinds[k]
        more = k > 0 and calls[k - 1] != name
        ahead = (kinds[k - 1],) if more else ()
        gradients[name] = kind
        full = _sorted(gradients.values())
        moving = tuple(gradients[n] for n in reducing)
        yield Phase(
            (ROOT, kind, *ahead), kept[k + 1], full, kind, (kind, "backward"), reduced=moving
        )
        if k == first_call[name]:
            yield Phase((ROOT, *ahead), kept[k], full, kind, reduced=(*moving, kind))
            for done in reducing:
                del gradients[done]
            reducing = (name,)
    moving = tuple(gradients[n] for n in reducing)
    yield Phase((ROOT,), kept[0], _sorted(gradients.values()), reduced=(*moving, ROOT))


def _kept_before(kinds: tuple[str, ...]) -> list[tuple[tuple[str, int], ...]]:
    """What is kept before each call, and after the last: of the root, and of each call before."""
    count = Counter({ROOT: 1})
    kept = [tuple(count.items())]
    for kind in kinds:
        count[kind] += 1
        kept.append(tuple(count.items()))
    return kept


def _sorted(kinds: Iterable[str]) -> tuple[str, ...]:
    """The root's gradient exists throughout the backward."""
    return (ROOT, *sorted(kinds))
