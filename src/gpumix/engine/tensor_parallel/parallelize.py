"""Tensor parallelism: the ranks of a group compute each unit together.

A linear layer is divided by outputs (`colwise`) or by inputs (`rowwise`). Between a `colwise` and a
`rowwise` layer, each rank computes its part of the heads, or of the inner width
(`engine.sequence_parallel.collective_regions`). In all other code of the model, values and
gradients are equal on all ranks of the group: a plan affects only the modules it names, and no
unit's inputs or outputs change. Alternatively, each rank has a part of the positions there
(`engine.sequence_parallel.positions`).

A parameter of a divided module has a smaller shape, a `ParameterSlice` of the full parameter. For
shards, checkpoints and the optimizer it is a parameter like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.quantised.quantised_parameter import QuantisedParameter
from gpumix.engine.sequence_parallel.module_inputs import RegionBoundary, wrap_parent_forward
from gpumix.engine.sequence_parallel.positions import PositionSharding
from gpumix.engine.sharding.parameter_slice import ParameterSlice
from gpumix.engine.sharding.unit_discovery import ModelUnits, ParameterSlot, Unit
from gpumix.engine.tensor_parallel.plans import find_style
from gpumix.engine.tensor_parallel.styles import (
    STYLES,
    PartIndex,
    Rowwise,
    Style,
    get_unbound_forward,
)
from gpumix.schema.errors import InputError
from gpumix.schema.profile.profile import ROOT


@dataclass
class ModuleChanges:
    """Changes made to a model's modules for tensor parallelism."""

    _changes: list[tuple[nn.Module, str, Any]] = field(default_factory=list)

    def make(self, module: nn.Module, attribute: str, value: Any) -> None:
        """Set an attribute, except inside of `undo_temporarily`."""
        self._changes.append((module, attribute, vars(module).get(attribute)))
        setattr(module, attribute, value)

    @contextmanager
    def undo_temporarily(self) -> Iterator[None]:
        """Restore the behavior of modules on a single rank inside."""
        now = [
            (module, attribute, getattr(module, attribute))
            for module, attribute, _ in self._changes
        ]
        self._restore_attributes()
        try:
            yield
        finally:
            for module, attribute, value in now:  # the forward of a unit may stop by now
                setattr(module, attribute, value)

    def undo(self) -> None:
        """Undo all changes permanently."""
        self._restore_attributes()
        self._changes.clear()

    def _restore_attributes(self) -> None:
        for module, attribute, before in reversed(self._changes):
            if before is None:
                delattr(module, attribute)
            else:
                setattr(module, attribute, before)


@dataclass(frozen=True)
class ModelPart:
    """Part of a model: names of units, and of root parameters."""

    units: frozenset[str]
    root: frozenset[str]


def select_whole_model(anatomy: ModelUnits) -> ModelPart:
    """Return a part with all of a model."""
    root = frozenset(slot.name for slot in anatomy.root.slots)
    return ModelPart(frozenset(unit.name for unit in anatomy.units), root)


def parallelize_model(
    anatomy: ModelUnits,
    tp_group: Communicator,
    plan: Mapping[str, str],
    *,
    part: ModelPart,
    whole: Collection[nn.Module] = (),
    sequence: Collection[str] = (),
    degree: int | None = None,
) -> tuple[ModelUnits, ModuleChanges]:
    """Divide parts of a model over the ranks of a tensor-parallel group, according to a plan.

    Args:
        plan: style by pattern of module names.
        part: the part computed by this group, and by no other.
        whole: modules of the root that are not divided.
        sequence: units in which each rank has a part of the positions between divided modules, if
            there are any.
        degree: number of parts into which other groups divide the modules that this group divides
            or has whole; default: the number of this group's ranks.

    Returns:
        The anatomy with the windows of this rank, and the changes made.

    Raises:
        InputError: a style is unknown or not for its module, something cannot be divided by the
            number of ranks, or nothing of the units is divided.
    """
    model = anatomy.root.module
    degree = degree or tp_group.world
    check_heads(getattr(model, "config", None), degree)
    names = {id(module): name for name, module in model.named_modules()}
    inside = {id(module): unit.name for unit in anatomy.units for module in unit.module.modules()}
    own = _own_modules(anatomy, part, inside, whole)
    styles = {id(m): (m, s) for n, m in own if (s := _style(n, find_style(n, plan))) is not None}
    slots = [slot for unit in anatomy.all for slot in unit.slots]
    first = PartIndex(tp_group.rank * (degree // tp_group.world), degree)
    windows = _windows(styles, slots, first, names, inside)
    # A stage may have nothing to divide: BERT's embeddings are a unit.
    others = (n for n, m in model.named_modules() if inside.get(id(m), "") not in {"", *part.units})
    divided = any(
        number in inside and s.windows(m, PartIndex(0, degree)) for number, (m, s) in styles.items()
    )
    if not divided and not any(find_style(name, plan) for name in others):
        raise InputError(
            f"the tensor plan divides nothing of the units of a {type(model).__name__}",
            code="tensor-plan-divides-nothing",
            why=f"its patterns are {', '.join(plan) or 'none'}",
            fix="give patterns of the names of linear layers inside of the units",
        )
    changes = ModuleChanges()
    found = _with_windows(anatomy, windows, styles, tp_group)
    units = (tp_group, found, sequence, styles, names)
    apart = _SequenceParallelUnits.of(*units) if sequence else None
    if tp_group.world == 1:
        return (found if apart is None else apart.mark_partial_gradients(found)), changes
    for name, module in own if "divided" in plan.values() else ():
        for key in [key for key, value in vars(module).items() if type(value) is int]:
            if find_style(f"{name}.{key}", plan) == "divided":
                changes.make(module, key, _divide_attribute(module, key, tp_group, name))
    entrances: dict[str, RegionBoundary] = {}
    for number, (module, style) in styles.items():
        parent = names[number].rpartition(".")[0]
        if parent not in entrances:
            divided = apart is not None and inside.get(number) in apart.units
            entrances[parent] = RegionBoundary(
                tp_group,
                shared=number in inside,
                positions=apart.positions if apart is not None and divided else None,
                early=apart is not None and parent in apart.early,
            )
        changes.make(module, "forward", style.forward(module, entrances[parent], tp_group))
        for attribute, value in style.attributes(module, tp_group).items():
            changes.make(module, attribute, value)
    for parent, of_parent in entrances.items():
        if of_parent.shared:
            module = model.get_submodule(parent)
            forward = wrap_parent_forward(get_unbound_forward(module), of_parent)
            changes.make(module, "forward", forward)
    return (found if apart is None else apart.made(found, changes)), changes


@dataclass(frozen=True)
class _SequenceParallelUnits:
    """Units with positions divided between their divided modules.

    Attributes:
        early: parents of the modules that begin a region; a parent's own code before the region
            runs with all positions.
    """

    positions: PositionSharding
    units: frozenset[str]
    early: frozenset[str]

    @classmethod
    def of(
        cls,
        tp_group: Communicator,
        anatomy: ModelUnits,
        units: Collection[str],
        styles: Mapping[int, tuple[nn.Module, Style]],
        names: Mapping[int, str],
    ) -> _SequenceParallelUnits:
        """Select the units with divided modules, and check their parameters.

        Raises:
            InputError: for some parameter, it is not clear whether each rank has a partial gradient
                or the full gradient.
        """
        parents = {names[n].rpartition(".")[0] for n, (_, s) in styles.items() if s.begins}
        early = frozenset(parents - {unit.name for unit in anatomy.units})
        # A unit without divided modules is computed whole by all ranks of the group.
        divided = {name for name in units if any(_is_in(parent, name) for parent in parents)}
        found = cls(PositionSharding(tp_group), frozenset(divided), early)
        for unit in anatomy.all:
            for slot in unit.slots:
                found._refuse_unclear(unit, slot, styles, names)
        return found

    def _refuse_unclear(
        self,
        unit: Unit,
        slot: ParameterSlot,
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
                code="parameter-forbids-sequence-parallel",
                why=why,
                fix="make a plan without: `techniques: {sequence_parallel: false}`",
            )

    def mark_partial_gradients(self, anatomy: ModelUnits) -> ModelUnits:
        """Return the anatomy with partial gradients noted: the units compute a part of the
        positions, so each rank has a partial gradient of undivided parameters."""

        def changed(unit: Unit) -> Unit:
            if unit.name not in self.units:
                return unit
            slots = tuple(
                replace(slot, summed=not slot.divided and slot.parameter.requires_grad)
                for slot in unit.slots
            )
            return replace(unit, slots=slots)

        return ModelUnits(tuple(map(changed, anatomy.units)), anatomy.root)

    def made(self, anatomy: ModelUnits, changes: ModuleChanges) -> ModelUnits:
        """Make units compute parts of the positions; return the `mark_partial_gradients`
        anatomy."""

        def changed(before: Unit, unit: Unit) -> Unit:
            if unit.name not in self.units:
                return unit
            # Inside of regions, each rank has a partial gradient anyway.
            parts = [
                now.name.removeprefix(f"{unit.name}.")
                for slot, now in zip(before.slots, unit.slots)
                if now.summed and not slot.summed
            ]
            inner = get_unbound_forward(unit.module)
            forward = self.positions.make_forward(unit.module, unit.name, unit.kind, inner, parts)
            changes.make(unit.module, "forward", forward)
            return replace(unit, positions=self.positions)

        marked = self.mark_partial_gradients(anatomy)
        return ModelUnits(tuple(map(changed, anatomy.units, marked.units)), marked.root)


def _own_modules(
    anatomy: ModelUnits, part: ModelPart, inside: Mapping[int, str], whole: Collection[nn.Module]
) -> list[tuple[str, nn.Module]]:
    """Return the modules in a part: in its units, or of the root with parameters in the part."""
    left = {id(module) for module in whole}
    root = {id(m) for s in anatomy.root.slots if s.name in part.root for m, _ in s.places}
    return [
        (name, module)
        for name, module in anatomy.root.module.named_modules()
        if id(module) not in left
        and (inside[id(module)] in part.units if id(module) in inside else id(module) in root)
    ]


def check_heads(config: Any, degree: int) -> None:
    """Raise an InputError if the model's heads, by the configuration if any, cannot be divided by
    `degree` ranks."""
    of_text = getattr(config, "get_text_config", None)
    config = of_text() if callable(of_text) else config
    for what, said in (("num_attention_heads", "heads"), ("num_key_value_heads", "key heads")):
        heads = getattr(config, what, None)
        if isinstance(heads, int) and heads % degree:
            raise InputError(
                f"the model's {heads} {said if heads > 1 else said.removesuffix('s')} cannot be "
                f"divided over {degree} ranks",
                code="heads-not-divisible",
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
            code="tensor-style-unknown",
            fix=f"known ones are {', '.join(STYLES)} and divided; or leave it out: what is not "
            "named is computed whole by every rank",
        )
    return STYLES[wanted]


def _windows(
    styles: dict[int, tuple[nn.Module, Style]],
    slots: list[ParameterSlot],
    seat: PartIndex,
    names: Mapping[int, str],
    inside: Mapping[int, str],
) -> dict[str, ParameterSlice]:
    """Return the window of each divided parameter, by name. Parameters outside of units that cannot
    be divided, and parameters also used in another way, stay whole: modules lose their styles."""
    while True:
        found: dict[tuple[int, str], ParameterSlice] = {}
        undone: set[int] = set()
        for key, (module, style) in styles.items():
            try:
                windows = style.windows(module, seat)
            except ValueError as error:
                if key in inside:
                    raise InputError(
                        f"module '{names[key]}' cannot be divided over {seat.parts} ranks",
                        code="module-not-divisible",
                        why=str(error),
                        fix="take another tensor parallel degree, or leave it out of the plan",
                    ) from error
                undone.add(key)
                continue
            found |= {(key, attribute): window for attribute, window in windows.items()}
        of_slots: dict[str, ParameterSlice] = {}
        for slot in slots:
            wanted = {found.get((id(module), attribute)) for module, attribute in slot.places}
            if len(wanted) > 1:
                undone |= {id(module) for module, _ in slot.places} & styles.keys()
            elif (window := next(iter(wanted))) is not None:
                _refuse_packed(slot, seat.parts)
                of_slots[slot.name] = window
        if not undone:
            return of_slots
        for key in undone:
            del styles[key]


def _refuse_packed(slot: ParameterSlot, parts: int) -> None:
    """Raise an InputError for a quantised weight: its bytes cannot be cut by rows or columns."""
    if isinstance(slot.parameter, QuantisedParameter):
        raise InputError(
            f"the quantised weight '{slot.name}' cannot be divided over {parts} ranks that compute "
            "together",
            code="quantised-weight-not-divisible",
            why="its values are packed, and share constants",
            fix="take tensor parallel degree 1: `techniques: {tensor_parallel_size: 1}`",
        )


def _with_windows(
    anatomy: ModelUnits,
    windows: Mapping[str, ParameterSlice],
    styles: Mapping[int, tuple[nn.Module, Style]],
    tp_group: Communicator,
) -> ModelUnits:
    """Return the anatomy with windows, and with the styles' partial gradients noted.

    Args:
        windows: the first of the parts on this rank.
    """
    parts = {(k, name) for k, (module, style) in styles.items() for name in style.summed(module)}

    def in_window(slot: ParameterSlot) -> ParameterSlot:
        first = windows.get(slot.name)
        if first is None:
            return slot
        each = first.parts // tp_group.world
        if each == 1:
            return replace(slot, window=first)
        own = replace(first, parts=tp_group.world, part=tp_group.rank)
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

    return ModelUnits(tuple(map(changed, anatomy.units)), changed(anatomy.root))


def _is_in(name: str, outer: str) -> bool:
    """Return True if a module equals `outer` or is inside of `outer`, by names."""
    return name == outer or name.startswith(f"{outer}.")


def _divide_attribute(module: nn.Module, key: str, tp_group: Communicator, name: str) -> int:
    value = int(vars(module)[key])
    if value % tp_group.world:
        raise InputError(
            f"'{key}' of module '{name}' is {value}, which {tp_group.world} ranks cannot divide",
            code="heads-not-divisible",
            fix="take another tensor parallel degree",
        )
    return value // tp_group.world
