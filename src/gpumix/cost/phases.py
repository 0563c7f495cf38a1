"""What the engine holds at each moment of a step, named but not yet counted in bytes.

`phases` lists the moments at which the peak can lie. Of unit calls with equal neighbours only the
last is listed: it keeps the inputs of the most calls and is otherwise the same. So the list is as
long as the model has kinds of neighbourhood, however many calls it has.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from gpumix.spec.profile import ROOT, ModelProfile

Pass = Literal["forward", "backward", "head"]


@dataclass(frozen=True)
class Phase:
    """What is held at one moment; units are named by kind, the root is `ROOT`.

    `gathered` and `gradients` are units whose whole buffers exist. `kept` counts the calls of each
    kind whose inputs are kept. `boundary` is the kind of the call whose input gradients exist.
    `reduced` is the unit whose gradient is on its way to its owners.
    """

    gathered: tuple[str, ...]
    kept: tuple[tuple[str, int], ...]
    gradients: tuple[str, ...] = ()
    boundary: str | None = None
    working: tuple[str, Pass] | None = None
    reduced: str | None = None


def phases(model: ModelProfile) -> tuple[Phase, ...]:
    """The moments of a step at which its peak can lie, in the order of a step.

    The optimizer's moment holds only what all others hold too, and so is never the peak.
    """
    forward: dict[tuple[str, str], Phase] = {}
    backward: dict[tuple[str, str, str], Phase] = {}
    kept = Counter({ROOT: 1})
    around = ("", *model.kind_of_call, "")
    for before, kind, after in zip(around, around[1:], around[2:]):
        kept[kind] += 1
        held = tuple(kept.items())
        forward[kind, after] = Phase(_units(ROOT, kind, after), held, working=(kind, "forward"))
        backward[before, kind, after] = Phase(
            _units(ROOT, kind, before),
            held,
            gradients=_units(ROOT, kind, after),
            boundary=kind,
            working=(kind, "backward"),
            reduced=after or None,
        )
    return (
        *forward.values(),
        _head(model, tuple(kept.items())),
        *reversed(backward.values()),
        *_ending(model),
    )


def _head(model: ModelProfile, kept: tuple[tuple[str, int], ...]) -> Phase:
    """Head and loss of the last micro-batch; the last call stays gathered for its backward."""
    last = model.kind_of_call[-1]
    return Phase((ROOT, last), kept, (ROOT,), boundary=last, working=(ROOT, "head"))


def _ending(model: ModelProfile) -> tuple[Phase, Phase]:
    """The first call's gradient is reduced while the code before it runs back; then the root's."""
    first = model.kind_of_call[0]
    return (
        Phase((ROOT,), ((ROOT, 1),), (ROOT, first), boundary=first, reduced=first),
        Phase((ROOT,), (), (ROOT,), reduced=ROOT),
    )


def _units(*names: str) -> tuple[str, ...]:
    """Leave out the '' that stands for no call."""
    return tuple(name for name in names if name)
