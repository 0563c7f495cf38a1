"""Tensor parallelism: the ranks of a team compute each unit together.

A linear layer is divided by its outputs (`colwise`) or by its inputs (`rowwise`). From the first to
the second each rank computes its part of the heads, or of the inner width (`engine.regions`).
Wherever else the model's code runs, values and gradients are the same on all ranks of the team: so
nothing but the modules that a plan names knows of it, and no unit's inputs or outputs change. Or
each has its part of the positions there (`engine.sequence`).

A parameter of a divided module is one of a smaller shape, a `Window` of the whole one. To all that
comes after, shards and checkpoints and the optimizer, it is a parameter like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from gpumix.engine.comm import Communicator
from gpumix.engine.entrances import Entrances, entering
from gpumix.engine.sequence import Positions
from gpumix.engine.tensor_plans import style_of
from gpumix.engine.tensor_styles import STYLES, Rowwise, Seat, Style, plain_forward
from gpumix.engine.units import Anatomy, Slot, Unit
from gpumix.engine.window import Window
from gpumix.spec.errors import InputError
from gpumix.spec.profile import ROOT


@dataclass
class Changes:
    """What was changed of a model's modules so that a team computes it together."""

    _changes: list[tuple[nn.Module, str, Any]] = field(default_factory=list)

    def make(self, module: nn.Module, attribute: str, value: Any) -> None:
        """Set an attribute, but inside of `undone`."""
        self._changes.append((module, attribute, vars(module).get(attribute)))
        setattr(module, attribute, value)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Inside, modules do what they do on one rank alone."""
        now = [
            (module, attribute, getattr(module, attribute))
            for module, attribute, _ in self._changes
        ]
        self._take_back()
        try:
            yield
        finally:
            for module, attribute, value in now:  # a unit's stops at its boundary by now
                setattr(module, attribute, value)

    def undo(self) -> None:
        """For good."""
        self._take_back()
        self._changes.clear()

    def _take_back(self) -> None:
        for module, attribute, before in reversed(self._changes):
            if before is None:
                delattr(module, attribute)
            else:
                setattr(module, attribute, before)


@dataclass(frozen=True)
class Part:
    """Of a model: names of units, and of parameters of the root."""

    units: frozenset[str]
    root: frozenset[str]


def all_of(anatomy: Anatomy) -> Part:
    """All of a model."""
    root = frozenset(slot.name for slot in anatomy.root.slots)
    return Part(frozenset(unit.name for unit in anatomy.units), root)


def divide(
    anatomy: Anatomy,
    team: Communicator,
    plan: Mapping[str, str],
    *,
    part: Part,
    whole: Collection[nn.Module] = (),
    sequence: Collection[str] = (),
    degree: int | None = None,
) -> tuple[Anatomy, Changes]:
    """Make a team's ranks compute parts of a model together, as a plan says.

    Args:
        plan: style by pattern of names of modules.
        part: what this team computes, and nobody else does.
        whole: modules of the root that are not divided.
        sequence: units between whose divided modules, if they have any, each rank has its part of
            the positions.
        degree: into so many parts other teams divide what this one does, or has whole; default: as
            many as it has ranks.

    Returns:
        The anatomy with the windows of this rank, and what was changed.

    Raises:
        InputError: a style is unknown or not for its module, something cannot be divided by the
            number of ranks, or nothing of the units is divided.
    """
    model = anatomy.root.module
    degree = degree or team.world
    check_heads(getattr(model, "config", None), degree)
    names = {id(module): name for name, module in model.named_modules()}
    inside = {id(module): unit.name for unit in anatomy.units for module in unit.module.modules()}
    own = _own_modules(anatomy, part, inside, whole)
    styles = {id(m): (m, s) for n, m in own if (s := _style(n, style_of(n, plan))) is not None}
    slots = [slot for unit in anatomy.all for slot in unit.slots]
    each = degree // team.world
    windows = _windows(styles, slots, Seat(team.rank * each, degree), names, inside)
    # A stage may have nothing that can be divided: BERT's embeddings are a unit.
    others = (n for n, m in model.named_modules() if inside.get(id(m), "") not in {"", *part.units})
    divided = any(
        number in inside and s.windows(m, Seat(0, degree)) for number, (m, s) in styles.items()
    )
    if not divided and not any(style_of(name, plan) for name in others):
        raise InputError(
            f"the tensor plan divides nothing of the units of a {type(model).__name__}",
            why=f"its patterns are {', '.join(plan) or 'none'}",
            fix="give patterns of the names of linear layers inside of the units",
        )
    changes = Changes()
    found = _with_windows(anatomy, windows, styles, team)
    apart = _Apart.of(team, found, sequence, styles, names) if sequence else None
    if team.world == 1:
        return (found if apart is None else apart.marked(found)), changes
    for name, module in own if "divided" in plan.values() else ():
        for key in [key for key, value in vars(module).items() if type(value) is int]:
            if style_of(f"{name}.{key}", plan) == "divided":
                changes.make(module, key, _divided(module, key, team, name))
    entrances: dict[str, Entrances] = {}
    for number, (module, style) in styles.items():
        parent = names[number].rpartition(".")[0]
        if parent not in entrances:
            divided = apart is not None and inside.get(number) in apart.units
            entrances[parent] = Entrances(
                team,
                shared=number in inside,
                positions=apart.positions if apart is not None and divided else None,
                early=apart is not None and parent in apart.early,
            )
        changes.make(module, "forward", style.forward(module, entrances[parent], team))
        for attribute, value in style.attributes(module, team).items():
            changes.make(module, attribute, value)
    for parent, of_parent in entrances.items():
        if of_parent.shared:
            module = model.get_submodule(parent)
            changes.make(module, "forward", entering(plain_forward(module), of_parent))
    return (found if apart is None else apart.made(found, changes)), changes


@dataclass(frozen=True)
class _Apart:
    """Units between whose divided modules positions are divided.

    Attributes:
        early: parents of the modules that begin a region: what they do with hidden states before,
            they do with all positions.
    """

    positions: Positions
    units: frozenset[str]
    early: frozenset[str]

    @classmethod
    def of(
        cls,
        team: Communicator,
        anatomy: Anatomy,
        units: Collection[str],
        styles: Mapping[int, tuple[nn.Module, Style]],
        names: Mapping[int, str],
    ) -> _Apart:
        """
        Raises:
            InputError: of some parameter it is not clear whether each rank comes to a part of its
                gradient or to all of it.
        """
        parents = {names[n].rpartition(".")[0] for n, (_, s) in styles.items() if s.begins}
        early = frozenset(parents - {unit.name for unit in anatomy.units})
        # Of which nothing is divided, all ranks of the team compute the whole.
        divided = {name for name in units if any(_is_in(parent, name) for parent in parents)}
        found = cls(Positions(team), frozenset(divided), early)
        for unit in anatomy.all:
            for slot in unit.slots:
                found._refuse_unclear(unit, slot, styles, names)
        return found

    def _refuse_unclear(
        self,
        unit: Unit,
        slot: Slot,
        styles: Mapping[int, tuple[nn.Module, Style]],
        names: Mapping[int, str],
    ) -> None:
        if slot.summed or slot.divided or not slot.parameter.requires_grad:
            return
        for module, attribute in slot.places:
            name = names[id(module)]
            if unit.name == ROOT and any(_is_in(name, of_unit) for of_unit in self.units):
                why = "several units have it, or the code outside of them"
            elif any(_is_in(name, parent) for parent in self.early) and not (
                id(module) in styles and isinstance(styles[id(module)][1], Rowwise)
            ):
                why = "it lies beside divided modules, and the tensor plan does not say how it is"
            else:
                continue
            raise InputError(
                f"positions cannot be divided beside parameter '{slot.name}': {attribute} of "
                f"module '{name}'",
                why=why,
                fix="make a plan without: `techniques: {sequence: false}`",
            )

    def marked(self, anatomy: Anatomy) -> Anatomy:
        """The same anatomy, of which these units compute a part of the positions: each rank comes
        to a part of the gradient of what is not divided."""

        def changed(unit: Unit) -> Unit:
            if unit.name not in self.units:
                return unit
            slots = tuple(
                replace(slot, summed=not slot.divided and slot.parameter.requires_grad)
                for slot in unit.slots
            )
            return replace(unit, slots=slots)

        return Anatomy(tuple(map(changed, anatomy.units)), anatomy.root)

    def made(self, anatomy: Anatomy, changes: Changes) -> Anatomy:
        """Make units do so; the anatomy that is `marked`."""

        def changed(before: Unit, unit: Unit) -> Unit:
            if unit.name not in self.units:
                return unit
            # Inside of regions each rank has a part of a gradient anyway.
            parts = [
                now.name.removeprefix(f"{unit.name}.")
                for slot, now in zip(before.slots, unit.slots)
                if now.summed and not slot.summed
            ]
            inner = plain_forward(unit.module)
            forward = self.positions.forward_of(unit.module, unit.name, unit.kind, inner, parts)
            changes.make(unit.module, "forward", forward)
            return replace(unit, positions=self.positions)

        marked = self.marked(anatomy)
        return Anatomy(tuple(map(changed, anatomy.units, marked.units)), marked.root)


def _own_modules(
    anatomy: Anatomy, part: Part, inside: Mapping[int, str], whole: Collection[nn.Module]
) -> list[tuple[str, nn.Module]]:
    """Those of the units of a part, and of the root those that have parameters of it."""
    left = {id(module) for module in whole}
    root = {id(m) for s in anatomy.root.slots if s.name in part.root for m, _ in s.places}
    return [
        (name, module)
        for name, module in anatomy.root.module.named_modules()
        if id(module) not in left
        and (inside[id(module)] in part.units if id(module) in inside else id(module) in root)
    ]


def check_heads(config: Any, degree: int) -> None:
    """Raise an InputError where the heads of a model, by its configuration if it has one, cannot be
    divided by so many ranks."""
    of_text = getattr(config, "get_text_config", None)
    config = of_text() if callable(of_text) else config
    for what, said in (("num_attention_heads", "heads"), ("num_key_value_heads", "key heads")):
        heads = getattr(config, what, None)
        if isinstance(heads, int) and heads % degree:
            raise InputError(
                f"the model's {heads} {said if heads > 1 else said.removesuffix('s')} cannot be "
                f"divided over {degree} ranks",
                where="tensor parallel degree",
                fix=f"take a degree that divides {heads}, or none"
                if heads > 1
                else "use no tensor parallelism",
            )


def _style(name: str, wanted: str | None) -> Style | None:
    if wanted is None:
        return None
    if wanted not in STYLES:
        raise InputError(
            f"the tensor plan says '{wanted}' of module '{name}', which is no known style",
            fix=f"known ones are {', '.join(STYLES)} and divided; or leave it out: what is not "
            "named is computed whole by every rank",
        )
    return STYLES[wanted]


def _windows(
    styles: dict[int, tuple[nn.Module, Style]],
    slots: list[Slot],
    seat: Seat,
    names: Mapping[int, str],
    inside: Mapping[int, str],
) -> dict[str, Window]:
    """Of each parameter that is divided, by its name. What cannot be divided outside of units, or
    is used elsewhere in another way, stays whole: its modules lose their styles."""
    while True:
        found: dict[tuple[int, str], Window] = {}
        undone: set[int] = set()
        for key, (module, style) in styles.items():
            try:
                windows = style.windows(module, seat)
            except ValueError as error:
                if key in inside:
                    raise InputError(
                        f"module '{names[key]}' cannot be divided over {seat.parts} ranks",
                        why=str(error),
                        fix="take another tensor parallel degree, or leave it out of the plan",
                    ) from error
                undone.add(key)
                continue
            found |= {(key, attribute): window for attribute, window in windows.items()}
        of_slots: dict[str, Window] = {}
        for slot in slots:
            wanted = {found.get((id(module), attribute)) for module, attribute in slot.places}
            if len(wanted) > 1:
                undone |= {id(module) for module, _ in slot.places} & styles.keys()
            elif (window := next(iter(wanted))) is not None:
                of_slots[slot.name] = window
        if not undone:
            return of_slots
        for key in undone:
            del styles[key]


def _with_windows(
    anatomy: Anatomy,
    windows: Mapping[str, Window],
    styles: Mapping[int, tuple[nn.Module, Style]],
    team: Communicator,
) -> Anatomy:
    """
    Args:
        windows: the first of the parts that this rank has.
    """
    parts = {(k, name) for k, (module, style) in styles.items() for name in style.summed(module)}

    def in_window(slot: Slot) -> Slot:
        first = windows.get(slot.name)
        if first is None:
            return slot
        each = first.parts // team.world
        if each == 1:
            return replace(slot, window=first)
        own = replace(first, parts=team.world, part=team.rank)
        of_parts = tuple(first.of_member(first.part + number) for number in range(each))
        return replace(slot, window=own, parts=of_parts)

    def changed(unit: Unit) -> Unit:
        slots = tuple(
            replace(
                in_window(slot),
                summed=any((id(module), name) in parts for module, name in slot.places),
            )
            for slot in unit.slots
        )
        return replace(unit, slots=slots)

    return Anatomy(tuple(map(changed, anatomy.units)), changed(anatomy.root))


def _is_in(name: str, outer: str) -> bool:
    """Whether a module is another one or in it, by their names."""
    return name == outer or name.startswith(f"{outer}.")


def _divided(module: nn.Module, key: str, team: Communicator, name: str) -> int:
    value = int(vars(module)[key])
    if value % team.world:
        raise InputError(
            f"'{key}' of module '{name}' is {value}, which {team.world} ranks cannot divide",
            fix="take another tensor parallel degree",
        )
    return value // team.world
