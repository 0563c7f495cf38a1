"""Room for the state of stages of calls [begin, end): how many elements they train, and whether
the workers of a group can hold them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from gpumix.cost.curves import FloatArray, IntArray
from gpumix.cost.memory import element_bytes, free_bytes
from gpumix.planner.manner import Teams
from gpumix.spec.plan import ZeroStage
from gpumix.spec.profile import Profile


class StageRoom:
    """For devices of a profile: those that compute alone, or the ranks of a team's."""

    def __init__(self, profile: Profile) -> None:
        model = profile.model
        numel = np.array([model.kind(kind).trainable for kind in model.kind_of_call])
        first = [unit not in model.calls[:number] for number, unit in enumerate(model.calls)]
        once = [model.calls.count(unit) == 1 for unit in model.calls]
        self._profile = profile
        self._before = np.cumsum([0.0, *(numel * first)])
        self._sure_before = np.cumsum([0.0, *(numel * once)])
        sizes = {parameter.name: parameter.trainable for parameter in model.root.parameters}
        self._first, self._last = (
            sum(sizes[name] for name in needs.root) for needs in (model.needs[0], model.needs[-1])
        )

    def elements(self, begin: IntArray, end: IntArray) -> FloatArray:
        """Trained elements of stages: of units, where they are called first, and of the root, as
        far as the first and the last call need it."""
        of_root = (begin == 0) * self._first + (end == len(self._before) - 1) * self._last
        return np.asarray(self._before[end] - self._before[begin] + of_root)

    def least_elements(self, begin: IntArray, end: IntArray) -> FloatArray:
        """Those that no other stage can hold a part of: of units that are called once."""
        return np.asarray(self._sure_before[end] - self._sure_before[begin])

    def fits(
        self,
        workers: Teams,
        elements: FloatArray,
        zero_stage: ZeroStage,
        held: Mapping[str, FloatArray] | None = None,
        rounds: int = 1,
    ) -> npt.NDArray[np.bool_]:
        """Whether they have room, each for what nobody divides, and all together for the rest.

        Args:
            held: bytes of something else, by class.
            rounds: stages of each worker, of which each has its part of the memory.
        """
        fits = np.ones(1, dtype=bool)
        room, needed = np.zeros(1), np.zeros(1)
        for name, count in workers:
            whole, owned = element_bytes(self._profile, name, zero_stage)
            left = free_bytes(self._profile, name) / rounds - elements * whole
            left = left - held[name] if held else left
            fits = fits & (left >= 0)
            room = room + count * left
            needed = np.maximum(needed, elements * owned)
        return np.asarray(fits & (room >= needed))
