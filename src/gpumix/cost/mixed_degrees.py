"""Cost model of one stage with workers of different tensor-parallel degrees.

The leader of each tensor-parallel group counts as a device of a class computing a smaller model, as
in `cost.tensor_parallel_groups`; here the smaller models differ in size. All leaders together
gather and reduce the largest of these models: between them, a group's ranks do as much, at the same
time.

Undivided parameters are sharded over all ranks of all groups and reduced separately
(`engine.sharding.shard_layout`).
"""

from __future__ import annotations

from typing import TypeVar

from gpumix.schema.profile.profile import (
    EndParameters,
    ModelProfile,
    Profile,
    RootParameter,
    RootUnit,
    UnitKind,
)

Sized = TypeVar("Sized", UnitKind, RootUnit, RootParameter, EndParameters)


class RankModelProfile(ModelProfile):
    """Part of a model computed by a rank, for tensor-parallel groups of different sizes.

    Attributes:
        in_parts: divided parameters are gathered and reduced in several parts, because other groups
            divide them into more.
        undivided: a model of the parameters that no group divides.
        degree: the number of parts into which the rest is divided.
    """

    in_parts: bool
    undivided: ModelProfile
    degree: int


class MixedDegreeProfile(Profile):
    """Profile of leaders, with tensor-parallel groups of one size per class.

    Attributes:
        models: by class.
    """

    models: dict[str, RankModelProfile]

    def model_of(self, name: str) -> ModelProfile:
        """Return a rank's part of the model, by class; raises KeyError for an unknown class."""
        return self.models[name]


def extract_undivided_model(
    most: ModelProfile, least: ModelProfile, sizes: tuple[int, int]
) -> ModelProfile:
    """Return a model of the parameters that no tensor-parallel group divides. With u undivided and
    v divided elements, a rank in a group of n has u + v / n.

    Args:
        most, least: a rank's part in groups of few and of many ranks, of sizes `sizes`.
    """
    few, many = sizes

    def left(one: Sized, other: Sized) -> Sized:
        def of(field: str) -> int:
            more, fewer = int(getattr(one, field)), int(getattr(other, field))
            return max(0, round((many * fewer - few * more) / (many - few)))

        sizes = ("trainable", "frozen_bytes", "packed_bytes")
        return one.model_copy(update={field: of(field) for field in sizes})

    fewer = {parameter.name: parameter for parameter in least.root.parameters}
    root = left(most.root, least.root).model_copy(
        update={
            "parameters": tuple(left(one, fewer[one.name]) for one in most.root.parameters),
            "before": left(most.root.before, least.root.before),
            "after": left(most.root.after, least.root.after),
        }
    )
    kinds = tuple(left(kind, least.kind(kind.name)) for kind in most.kinds)
    return most.model_copy(update={"kinds": kinds, "root": root})
