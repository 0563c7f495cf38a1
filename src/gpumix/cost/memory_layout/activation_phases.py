"""Phases of a step by the samples' memory, named but not yet counted in bytes.

All other memory of the engine is laid out before the first step (`cost.network.buckets`), so only
samples make memory differ between phases. `list_peak_phases` follows a step and lists the phases at
which the peak can occur. Of phases that differ only in the number of kept outputs, the phase
keeping the most is listed: an entry per kind of unit, however many calls the model has. Exceptions:
more gradients waiting at earlier calls, and workers that keep some graphs, where each call differs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from gpumix.schema.profile.profile import ROOT, ModelProfile

Names = tuple[str, ...]
Pass = Literal["forward", "backward", "head"]


@dataclass(frozen=True)
class Phase:
    """Memory of samples in one phase; units are named by kind, the root is `ROOT`.

    `kept` counts the calls of each kind waiting for their backward, `calls` counts all of them.
    `boundary` is the kind of the call being crossed by the backward pass: each micro-batch has the
    gradient of either its outputs or its inputs. `waiting` is the bytes per sample of further
    gradients. `computation` is the current computation. `again` lists units already reached by a
    backward pass that will reach them again. `referenced_by_model` lists calls with outputs
    referenced by the model itself, in all micro-batches.
    """

    kept: tuple[tuple[str, int], ...]
    boundary: str | None
    computation: tuple[str, Pass]
    again: Names = ()
    referenced_by_model: Names = ()
    waiting: float = 0.0

    @property
    def calls(self) -> int:
        return sum(count for _, count in self.kept) - 1  # the root is not a call


def list_peak_phases(model: ModelProfile, *, every_call: bool = False) -> tuple[Phase, ...]:
    """Return the phases of a step at which the peak can occur, in the order of a step.

    The ends of a step and the optimizer update need only memory needed in all phases, so they are
    never the peak.
    """
    waiting = model.waiting or (0.0,) * len(model.calls)
    found = _select_peak_phases(model.calls, model.kind_of_call, waiting, every_call)
    if model.root.backward is None:
        return found
    kind = model.kind_of_call[0]
    return (*found, Phase(((ROOT, 1),), kind, (ROOT, "backward"), waiting=waiting[0]))


@lru_cache(maxsize=64)  # a search asks for the same few models, thousands of times
def _select_peak_phases(
    calls: Names, kinds: Names, waiting: tuple[float, ...], every_call: bool
) -> tuple[Phase, ...]:
    moments = list(_iterate_phases(calls, kinds, waiting))
    if every_call:
        return tuple(moments)
    most: dict[Phase, list[Phase]] = defaultdict(list)
    for phase in sorted(moments, key=lambda phase: (phase.calls, phase.waiting), reverse=True):
        alike = most[replace(phase, kept=(), referenced_by_model=(), waiting=0.0)]
        if all(phase.waiting > other.waiting for other in alike):
            alike.append(phase)
    listed = {id(phase) for alike in most.values() for phase in alike}
    return tuple(phase for phase in moments if id(phase) in listed)


def _iterate_phases(calls: Names, kinds: Names, waiting: tuple[float, ...]) -> Iterator[Phase]:
    """Yield all phases of a step."""
    kept = _count_kept_calls(kinds)
    kind_of = dict(zip(calls, kinds))
    first = {name: number for number, name in reversed([*enumerate(calls)])}
    last = {name: number for number, name in enumerate(calls)}
    for k, kind in enumerate(kinds):
        # The model does not resume after its last call before its head is computed.
        standing = kinds[-2:] if k == len(kinds) - 1 else (kind,)
        yield Phase(kept[k + 1], None, (kind, "forward"), referenced_by_model=standing)
    head: tuple[str, Pass] = (ROOT, "head")
    yield Phase(kept[-1], kinds[-1], head, waiting=waiting[-1], referenced_by_model=kinds[-2:-1])
    for k in reversed(range(len(kinds))):
        again = tuple(kind_of[name] for name in first if first[name] <= k < last[name])
        yield Phase(kept[k + 1], kinds[k], (kinds[k], "backward"), again, waiting=waiting[k])


def _count_kept_calls(kinds: Names) -> list[tuple[tuple[str, int], ...]]:
    """Return the kept calls by kind, with the root, before each call and after the last."""
    count = Counter({ROOT: 1})
    kept = [tuple(count.items())]
    for kind in kinds:
        count[kind] += 1
        kept.append(tuple(count.items()))
    return kept
