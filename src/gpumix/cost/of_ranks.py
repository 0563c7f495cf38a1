"""Workers of one stage that differ in their tensor parallel degree, in the cost model.

Each leader of a team counts as a device of a class that computes a smaller model, as in
`cost.teams`; here the smaller models are of unlike sizes. All leaders together gather and reduce
what the largest of these models has: a team's ranks do as much between them, at the same time.

What no team divides is divided among all ranks of all teams, and reduced apart (`engine.division`).
"""

from __future__ import annotations

from typing import TypeVar

from gpumix.spec.profile import End, ModelProfile, Profile, RootParameter, RootUnit, UnitKind

Sized = TypeVar("Sized", UnitKind, RootUnit, RootParameter, End)


class ModelOfRank(ModelProfile):
    """What a rank computes of a model of which others compute other parts.

    Attributes:
        in_parts: what is divided is gathered and reduced in several parts, for others divide it
            into more.
        undivided: a model of what no team divides; of its parameters alone.
        degree: into so many parts the rest is divided.
    """

    in_parts: bool
    undivided: ModelProfile
    degree: int


class ProfileOfRanks(Profile):
    """A profile of leaders whose teams are of one size for each class.

    Attributes:
        models: by class.
    """

    models: dict[str, ModelOfRank]

    def model_of(self, name: str) -> ModelProfile:
        """What ranks of a class have of the model; raises KeyError if the class is not known."""
        return self.models[name]


def undivided(most: ModelProfile, least: ModelProfile, teams: tuple[int, int]) -> ModelProfile:
    """What no team divides of a model: of u and v elements that are not divided and that are, a
    rank of a team of n has u + v / n.

    Args:
        most, least: what a rank has in teams of so many, of few and of many ranks.
    """
    few, many = teams

    def left(one: Sized, other: Sized) -> Sized:
        def of(field: str) -> int:
            more, fewer = int(getattr(one, field)), int(getattr(other, field))
            return max(0, round((many * fewer - few * more) / (many - few)))

        update = {"trainable": of("trainable"), "frozen_bytes": of("frozen_bytes")}
        return one.model_copy(update=update)

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
