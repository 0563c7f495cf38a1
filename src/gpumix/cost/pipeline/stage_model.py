"""Pipeline stage of a plan as a model of its own: the cost model of a model applies unchanged.

The first stage computes the code before the first unit, the last stage the head and loss. Root
parameters used by several stages belong to no single stage: `SharedParameters`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from gpumix.cost.identity import ByIdentity
from gpumix.cost.mixed_degrees import MixedDegreeProfile
from gpumix.cost.network.buckets import UnitSize
from gpumix.schema.curve import Curve
from gpumix.schema.errors import InputError
from gpumix.schema.plan.stage import group_shared_names
from gpumix.schema.profile.profile import (
    ROOT,
    CallInputs,
    ClassProfile,
    EndParameters,
    ModelProfile,
    Profile,
    RootParameter,
    UnitTimes,
)


@dataclass(frozen=True)
class SharedParameters:
    """Root parameters used by several stages.

    Attributes:
        stages: the numbers of the stages.
    """

    stages: tuple[int, ...]
    parameters: tuple[RootParameter, ...]

    @property
    def trainable(self) -> int:
        return sum(p.trainable for p in self.parameters)

    def frozen_buffers(self, model: ModelProfile) -> tuple[int, int]:
        """Return the bytes of the buffers of frozen parameters, in the dtype of `model`."""
        names = {p.name for p in self.parameters}
        used = [p for p in model.root.parameters if p.name in names]
        frozen, packed = sum(p.frozen_bytes for p in used), sum(p.packed_bytes for p in used)
        return UnitSize(0, frozen, packed).frozen_buffers


@dataclass(frozen=True)
class StagedModel:
    """Model cut into pipeline stages.

    Args:
        ends: the number of the call after each stage's last one.
    """

    model: ModelProfile
    ends: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.ends)

    def calls(self, stage: int) -> range:
        """Return the numbers of a stage's unit calls."""
        return range(self.ends[stage - 1] if stage else 0, self.ends[stage])

    @cached_property
    def needs(self) -> tuple[CallInputs, ...]:
        """Needs of each stage.

        Raises:
            InputError: the profile lacks them.
        """
        if not self.model.needs:
            raise InputError(
                "the profile does not say what the model's units need of each other",
                code="profile-without-dataflow",
                fix="measure again: `gpumix profile JOB.yaml --fresh`",
            )
        every = map(self.calls, range(self.count))
        return tuple(self.model.needs_of(calls.start, calls.stop) for calls in every)

    @cached_property
    def shared(self) -> tuple[SharedParameters, ...]:
        """Root parameters used by several stages, grouped by stages."""
        together = group_shared_names([needs.root for needs in self.needs])
        return tuple(
            SharedParameters(stages, tuple(self._parameters[name] for name in names))
            for stages, names in together.items()
        )

    @cached_property
    def _parameters(self) -> dict[str, RootParameter]:
        return {p.name: p for p in self.model.root.parameters}

    def get_stage_profile(self, profile: Profile, stage: int) -> Profile:
        """Return a stage as a profile of its own."""
        calls = self.calls(stage)
        shared = {p.name for one in self.shared for p in one.parameters}
        alone = tuple(name for name in self.needs[stage].root if name not in shared)
        last = stage == self.count - 1
        part = _StageOfModel(calls.start, calls.stop, alone, first=stage == 0, last=last)
        return _get_profile(ByIdentity(profile), part)


@dataclass(frozen=True)
class _StageOfModel:
    """Calls [begin, end) as a model, with the root's parameters that are used there `alone`."""

    begin: int
    end: int
    alone: tuple[str, ...]
    first: bool
    last: bool

    def of(self, model: ModelProfile) -> ModelProfile:
        """Return the stage as a model, in the dtype of `model`."""
        sizes = {p.name: p for p in model.root.parameters}
        nothing = None if self.last else _make_zero_curve(model.root.head)
        root = model.root.model_copy(
            update={
                "trainable": sum(sizes[name].trainable for name in self.alone),
                "frozen_bytes": sum(sizes[name].frozen_bytes for name in self.alone),
                "packed_bytes": sum(sizes[name].packed_bytes for name in self.alone),
                "before": EndParameters(),
                "after": EndParameters(),
                "parameters": tuple(sizes[name] for name in self.alone),
                "backward": model.root.backward if self.first else None,
                "head": nothing or model.root.head,
                "chunked_cross_entropy": nothing or model.root.chunked_cross_entropy,
            }
        )
        calls = slice(self.begin, self.end)
        return model.model_copy(
            update={
                "calls": model.calls[calls],
                "kind_of_call": model.kind_of_call[calls],
                "needs": (),
                "waiting": model.waiting[calls],
                "root": root,
            }
        )

    def profile(self, profile: Profile) -> Profile:
        """Return the stage as a profile."""
        update: dict[str, Any] = {
            "model": self.of(profile.model),
            "other_models": tuple(map(self.of, profile.other_models)),
            "classes": tuple(
                _restrict_root_times(c, first=self.first, last=self.last) for c in profile.classes
            ),
        }
        if isinstance(profile, MixedDegreeProfile):
            update["models"] = {
                name: self.of(model).model_copy(update={"undivided": self.of(model.undivided)})
                for name, model in profile.models.items()
            }
        return profile.model_copy(update=update)


@lru_cache(maxsize=256)  # candidates of a search have the same few stages
def _get_profile(of: ByIdentity[Profile], part: _StageOfModel) -> Profile:
    return part.profile(of.value)


def cut_into_stages(model: ModelProfile, units: Sequence[tuple[str, ...]]) -> StagedModel:
    """Cut the model into stages with the given units."""
    ends, end = [], 0
    for of_stage in units:
        end += len(of_stage)
        ends.append(end)
    return StagedModel(model, tuple(ends))


def _restrict_root_times(device: ClassProfile, *, first: bool, last: bool) -> ClassProfile:
    """Return a class profile with only the times of the root that a stage computes."""
    root = device.units[ROOT]
    nothing = _make_zero_curve(root.backward)
    before = nothing if root.gradient is None else root.gradient

    def backward(whole: Curve | None) -> Curve | None:
        if whole is None or (first and last):
            return whole
        if last:
            return whole if root.gradient is None else whole.less(root.gradient)
        return before if first else nothing

    times = UnitTimes(
        forward=root.forward if first else nothing,
        backward=backward(root.backward) or nothing,
        gradient=before if first else nothing,
    )
    return device.model_copy(
        update={
            "units": device.units | {ROOT: times},
            "chunked_cross_entropy": backward(device.chunked_cross_entropy),
        }
    )


def _make_zero_curve(curve: Curve) -> Curve:
    return curve.model_copy(update={"values": (0.0,) * len(curve.sizes)})
