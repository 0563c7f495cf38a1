"""Room for the state of stages of calls [begin, end): trained elements, and the workers' memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpumix.cost.memory_layout.curves import FloatArray, IntArray
from gpumix.cost.peak_memory import compute_free_bytes, get_element_bytes
from gpumix.planner.pipeline_parallel.stage_modes import WorkerCounts
from gpumix.schema.plan.plan import ZeroStage
from gpumix.schema.profile.profile import ModelProfile, Profile


class StageMemory:
    """Room on devices of a profile: on single devices, or on the ranks of tensor-parallel groups.

    Args:
        model: that the devices compute, if not that of the profile.
    """

    def __init__(self, profile: Profile, model: ModelProfile | None = None) -> None:
        model = model or profile.model
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
        """Return the trained elements of stages: of units first called there, and of the root's
        parameters needed by the first and the last call."""
        of_root = (begin == 0) * self._first + (end == len(self._before) - 1) * self._last
        return np.asarray(self._before[end] - self._before[begin] + of_root)

    def count_exclusive_elements(self, begin: IntArray, end: IntArray) -> FloatArray:
        """Return the trained elements surely in a single stage only: of units called once."""
        return np.asarray(self._sure_before[end] - self._sure_before[begin])

    def fits(
        self,
        workers: WorkerCounts,
        elements: FloatArray,
        zero_stage: ZeroStage,
    ) -> npt.NDArray[np.bool_]:
        """Return a mask of room: each worker for undivided state, all together for the rest."""
        fits = np.ones(1, dtype=bool)
        room, needed = np.zeros(1), np.zeros(1)
        for name, count in workers:
            whole, owned = get_element_bytes(self._profile, name, zero_stage)
            left = compute_free_bytes(self._profile, name) - elements * whole
            fits = fits & (left >= 0)
            room = room + count * left
            needed = np.maximum(needed, elements * owned)
        return np.asarray(fits & (room >= needed))
