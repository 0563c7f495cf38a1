"""Classification of the fields of another library's settings: none is ignored.

gpumix uses, leaves to the library, or refuses a field. A field in none of the three lists comes
from an unknown version, and is refused if set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpumix.schema.errors import InputError


@dataclass(frozen=True)
class FieldSupport:
    """Fields of a class of settings.

    Attributes:
        heard: fields that gpumix uses, or that hold in any case.
        delegated: fields that the library handles by itself, with gpumix as without.
        refused: fields without a meaning, each with the alternative.
    """

    heard: frozenset[str]
    delegated: frozenset[str]
    refused: Mapping[str, str]

    @classmethod
    def of(cls, heard: str, theirs: str, refused: Mapping[str, str]) -> FieldSupport:
        """Build from lists of names separated by spaces."""
        return cls(frozenset(heard.split()), frozenset(theirs.split()), refused)

    @property
    def known(self) -> frozenset[str]:
        return self.heard | self.delegated | frozenset(self.refused)

    def merge_base(self, other: FieldSupport) -> FieldSupport:
        """Return the fields merged with `other` of the base class; own fields take precedence."""
        rest = {name: fix for name, fix in other.refused.items() if name not in self.known}
        return FieldSupport(
            self.heard | (other.heard - self.known),
            self.delegated | (other.delegated - self.known),
            {**rest, **self.refused},
        )

    def check(self, name: str, value: Any, default: Any, *, where: str) -> None:
        """Raise InputError if a field without a meaning here is set."""
        if name in self.heard or name in self.delegated or _is_default(value, default):
            return
        unknown = "leave it out: this version of gpumix does not know it"
        raise make_no_meaning_error(
            f"{name}={value!r}", self.refused.get(name, unknown), where=where
        )

    def check_all(self, settings: Any, kind: type) -> None:
        """Check the fields of dataclass `kind`, as `check` does; `settings` may have further
        ones."""
        for field in dataclasses.fields(kind):
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            self.check(field.name, getattr(settings, field.name), default, where=kind.__name__)


def make_no_meaning_error(what: str, fix: str, *, where: str) -> InputError:
    return InputError(
        f"{what} has no meaning with gpumix", code="argument-without-meaning", where=where, fix=fix
    )


def _is_default(value: Any, default: Any) -> bool:
    """Return True if a value is the default; falsy values (empty, False, None) are equal."""
    return value is default or (not value and not default) or bool(value == default)
