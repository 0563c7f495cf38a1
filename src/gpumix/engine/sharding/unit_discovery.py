"""Detection of a model's units, each gathered and scheduled as a whole.

A unit is a transformer block; all the rest is the root unit. `transformers` models name their
blocks in `_no_split_modules`. In other models a block is a member of a list of modules of one
class; without any list, each child module of the model is a unit. A model without child modules
with parameters is a single unit, with an empty name.
A parameter used by more than one unit belongs to the root, which is gathered throughout a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gpumix.engine.quantised.quantised_parameter import QuantisedParameter
from gpumix.engine.quantised.weight_formats import to_quantised_parameter
from gpumix.engine.sequence_parallel.positions import PositionSharding
from gpumix.engine.sharding.parameter_slice import ParameterSlice
from gpumix.schema.errors import InputError
from gpumix.schema.profile.profile import ROOT


@dataclass(frozen=True)
class ParameterSlot:
    """Parameter with all places (module, attribute) of use; tied parameters have several.

    Attributes:
        parameter: the model's; a quantised one as bytes.
        window: the part that this rank computes with.
        parts: the window, in as many parts as other ranks divide it into, if this rank has several.
        summed: True if each rank of a tensor-parallel group has only a partial gradient.
    """

    name: str
    parameter: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]
    window: ParameterSlice
    summed: bool = False
    parts: tuple[ParameterSlice, ...] = ()

    @property
    def original(self) -> nn.Parameter:
        """The parameter that modules hold."""
        packed = isinstance(self.parameter, QuantisedParameter)
        return self.parameter.original if packed else self.parameter  # type: ignore[attr-defined]

    @property
    def divided(self) -> bool:
        """True if a tensor-parallel group divides the parameter, with or without this rank."""
        return bool(self.parts) or not self.window.whole


@dataclass(frozen=True)
class Unit:
    """Unit: module name (`ROOT` for the root unit), module and own parameters.

    Attributes:
        positions: division of the positions over a tensor-parallel group, if any.
    """

    name: str
    module: nn.Module
    kind: str
    slots: tuple[ParameterSlot, ...]
    positions: PositionSharding | None = None

    @property
    def trainable(self) -> int:
        """Number of elements with a gradient on this rank."""
        return sum(s.window.numel for s in self.slots if s.parameter.requires_grad)

    def uses(self, slots: Iterable[ParameterSlot]) -> list[str]:
        """Return the names of parameters inside the unit, owned or not."""
        inside = set(self.module.modules())
        return [slot.name for slot in slots if any(owner in inside for owner, _ in slot.places)]


@dataclass(frozen=True)
class ModelUnits:
    """Model taken apart: units in the order of registration, and the root unit."""

    units: tuple[Unit, ...]
    root: Unit

    @property
    def all(self) -> tuple[Unit, ...]:
        """The root unit, followed by all units."""
        return (self.root, *self.units)

    def of_kinds(self, kinds: Mapping[str, str]) -> ModelUnits:
        """Return a copy with new kinds, by names of units; the rest keep theirs."""
        units = (replace(unit, kind=kinds.get(unit.name, unit.kind)) for unit in self.units)
        return ModelUnits(tuple(units), self.root)

    def fingerprint(self) -> str:
        """Return twelve hex digits for all names, kinds, shapes, dtypes and `requires_grad`."""
        digest = hashlib.sha256()
        for unit in self.all:
            digest.update(f"{unit.name}|{unit.kind}\n".encode())
            for slot in unit.slots:
                p = slot.parameter
                looks = [slot.name, tuple(p.shape), p.dtype, p.requires_grad]
                if isinstance(p, QuantisedParameter):
                    looks.append(p.format.kind)
                digest.update(("|".join(map(str, looks)) + "\n").encode())
        return digest.hexdigest()[:12]


def has_trainable_parameters(model: nn.Module) -> bool:
    """Return True if any parameter requires a gradient."""
    return any(parameter.requires_grad for parameter in model.parameters())


def check_trainable(model: nn.Module) -> None:
    """Refuse a model with nothing to train.

    Raises:
        InputError: no parameter of the model requires a gradient.
    """
    if not has_trainable_parameters(model):
        raise make_untrainable_error()


def make_untrainable_error() -> InputError:
    return InputError(
        "there is nothing to train: no parameter of the model requires a gradient",
        code="nothing-to-train",
        fix="set requires_grad of those parameters that are to be trained",
    )


def split_into_units(model: nn.Module, wanted: Sequence[str] = ()) -> ModelUnits:
    """Take `model` apart into units.

    Args:
        model: any module, with parameters real or on the meta device.
        wanted: class names or module names of the units; default: detected.

    Raises:
        InputError: a wanted unit does not exist, or a parameter cannot be sharded.
    """
    _refuse_unfit(model)
    found = _outermost(_select_units(model, wanted) if wanted else _detect_units(model))
    found = [(name, module) for name, module in found if any(True for _ in module.parameters())]
    found = found or [("", model)]
    slots = _slots(model)
    owner = _owners(found, slots)
    kinds: dict[str, str] = {}
    units = []
    for name, module in found:
        own = tuple(s for s in slots if owner[s.name] == name)
        units.append(Unit(name, module, _kind(module, own, kinds), own))
    root = Unit(ROOT, model, ROOT, tuple(s for s in slots if owner[s.name] == ROOT))
    return ModelUnits(tuple(units), root)


def _refuse_unfit(model: nn.Module) -> None:
    """Refuse parameters that cannot be sharded.

    Raises:
        InputError: a parameter has complex values or sparse gradients, or forward changes it by
            itself.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise InputError(
                f"parameter '{name}' has complex values ({parameter.dtype})",
                code="parameters-complex",
                why="shards, and sums of gradients, are of real numbers",
                fix="keep it as real numbers with a last dimension of 2, and use "
                "torch.view_as_complex in forward",
            )
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.sparse:
            raise InputError(
                f"module '{name}' has sparse=True: its gradients are sparse",
                code="embedding-sparse",
                why="gradients are added up in dense memory, and reduced over ranks from there",
                fix="leave sparse=True out",
            )
        if module.max_norm is not None:
            raise InputError(
                f"module '{name}' has max_norm={module.max_norm:g}: its forward changes its weight",
                code="embedding-max-norm",
                why="a rank computes with a copy of a weight, which is not what is updated",
                fix="leave max_norm out, and limit norms in a callback or by weight decay",
            )


def _select_units(model: nn.Module, wanted: Sequence[str]) -> list[tuple[str, nn.Module]]:
    found = []
    for want in wanted:
        match = [
            (name, module)
            for name, module in model.named_modules()
            if name and want in (name, type(module).__name__)
        ]
        if not match:
            classes = sorted({type(m).__name__ for m in model.modules() if list(m.children())})
            raise InputError(
                f"the model has no module called '{want}' and none of that class",
                code="unit-class-unknown",
                where="units",
                fix=f"classes with submodules are: {', '.join(classes)}",
            )
        found += match
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return sorted(dict(found).items(), key=lambda item: order[item[0]])


def _detect_units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    classes = _named_classes(model)
    named = [(n, m) for n, m in model.named_modules() if n and type(m).__name__ in classes]
    table = _find_token_embedding(model)
    named = [(n, m) for n, m in named if table is m or table not in m.modules()]
    return named or list(_repeated(model)) or list(_children(model))


def _find_token_embedding(model: nn.Module) -> nn.Module | None:
    """Return the token embedding table of a `transformers` model with text as one of several parts;
    else None. The model's own code looks up tokens, to insert results for pictures in between."""
    config: Any = getattr(model, "config", None)
    try:
        if config.get_text_config() is config:
            return None
        table = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, ValueError):  # no table, or several
        return None
    return table if isinstance(table, nn.Embedding) else None


def _named_classes(model: nn.Module) -> set[str]:
    """Return the classes named as blocks by the model, or by its children if it names none."""
    own = set(getattr(model, "_no_split_modules", None) or ())
    return own or set().union(*map(_named_classes, model.children()))


def _repeated(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield members of lists and dictionaries of one class, with submodules of their own. Lists of
    lists have blocks inside, because a list itself is never called."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        members = list(module.named_children())
        same = len({type(child) for _, child in members}) == 1
        if same and isinstance(members[0][1], nn.ModuleList | nn.ModuleDict):
            continue
        if same and all(list(child.children()) for _, child in members):
            for key, child in members:
                yield (f"{name}.{key}" if name else key), child


def _children(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the child modules of a model without repeated blocks; of a list, which is never called,
    the members."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _children(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def _outermost(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    names = {name for name, _ in found}

    def inside_another(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:i]) in names for i in range(1, len(parts)))

    return [(name, module) for name, module in found if not inside_another(name)]


def _slots(model: nn.Module) -> list[ParameterSlot]:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, attribute))
    slots = []
    for name, parameter in model.named_parameters():
        used = tuple(places[id(parameter)])
        packed = to_quantised_parameter(parameter, used[0][0])
        seen = parameter if packed is None else packed
        slots.append(ParameterSlot(name, seen, used, ParameterSlice(seen.shape)))
    return slots


def _owners(found: list[tuple[str, nn.Module]], slots: list[ParameterSlot]) -> dict[str, str]:
    """Return the name of the owning unit of each parameter."""
    inside: dict[int, str] = {}
    for name, unit in found:
        for module in unit.modules():
            # A module shared by two units makes its parameters the root's.
            inside[id(module)] = ROOT if id(module) in inside else name
    owner = {}
    for slot in slots:
        users = {inside.get(id(module), ROOT) for module, _ in slot.places}
        owner[slot.name] = users.pop() if len(users) == 1 else ROOT
    return owner


def _kind(module: nn.Module, own: Sequence[ParameterSlot], kinds: dict[str, str]) -> str:
    """Return a name shared by units with the same structure and ownership; `kinds` maps structures
    to names so far."""
    structure = _structure(module, {id(slot.original) for slot in own})
    if structure not in kinds:
        base = type(module).__name__
        same = sum(name.split("#")[0] == base for name in kinds.values())
        kinds[structure] = f"{base}#{same + 1}" if same else base
    return kinds[structure]


def _structure(module: nn.Module, own: Set[int]) -> str:
    lines = [
        f"{name}|{tuple(p.shape)}|{p.dtype}|{p.requires_grad}|{id(p) in own}"
        for name, p in module.named_parameters(remove_duplicate=False)
    ]
    for name, part in module.named_modules():
        lines.append(f"{name}|{type(part).__qualname__}")
        # Settings decide what a block computes (a sliding window, say); its number does not.
        lines += [
            f"{name}.{key}={value}"
            for key, value in sorted(vars(part).items())
            if _is_setting(value)
            and not key.startswith("_")
            and not any(word in key for word in ("idx", "index", "layer_id", "training"))
        ]
    return "\n".join(lines)


def _is_setting(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, (bool, int, float, str))


def count_frozen_bytes(slots: Sequence[ParameterSlot], compute_dtype: torch.dtype) -> int:
    """Count the bytes of frozen parameters, stored as gathered: floats in the compute dtype."""
    frozen = [(s.window.numel, s.parameter) for s in slots if not s.parameter.requires_grad]
    return sum(
        numel * (compute_dtype.itemsize if p.is_floating_point() else p.element_size())
        for numel, p in frozen
    )


def count_packed_bytes(slots: Sequence[ParameterSlot]) -> int:
    """Count the bytes of quantised parameters with their constants, equal in any compute dtype."""
    return sum(s.window.numel for s in slots if isinstance(s.parameter, QuantisedParameter))


def count_buffer_bytes(model: nn.Module) -> int:
    """Count the bytes of all buffers, which every rank holds in full."""
    unique: dict[int, torch.Tensor] = {id(b): b for b in model.buffers()}
    return sum(b.numel() * b.element_size() for b in unique.values())
