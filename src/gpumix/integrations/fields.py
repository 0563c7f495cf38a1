"""What becomes of the fields of another library's settings: none is ignored.

A field is gone by, is left to the library, or is refused. One that is in none of the three lists is
of a version that gpumix does not know, and is refused too where it is set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpumix.spec.errors import InputError


@dataclass(frozen=True)
class Fields:
    """Of one class of settings.

    Attributes:
        heard: what gpumix goes by, and what is so in any case.
        theirs: what the library does by itself, with gpumix as without.
        refused: what has no meaning, and what to do instead.
    """

    heard: frozenset[str]
    theirs: frozenset[str]
    refused: Mapping[str, str]

    @classmethod
    def of(cls, heard: str, theirs: str, refused: Mapping[str, str]) -> Fields:
        """The names of each list with spaces between them."""
        return cls(frozenset(heard.split()), frozenset(theirs.split()), refused)

    @property
    def known(self) -> frozenset[str]:
        return self.heard | self.theirs | frozenset(self.refused)

    def and_of(self, other: Fields) -> Fields:
        """Those of a class that derives from another one's; it has its own word on the other's."""
        rest = {name: fix for name, fix in other.refused.items() if name not in self.known}
        return Fields(
            self.heard | (other.heard - self.known),
            self.theirs | (other.theirs - self.known),
            {**rest, **self.refused},
        )

    def check(self, name: str, value: Any, default: Any, *, where: str) -> None:
        """
        Raises:
            InputError: a field is set, and has no meaning here.
        """
        if name in self.heard or name in self.theirs or _same(value, default):
            return
        unknown = "leave it out: this version of gpumix does not know it"
        raise no_meaning(f"{name}={value!r}", self.refused.get(name, unknown), where=where)

    def check_all(self, settings: Any, kind: type) -> None:
        """The fields that `kind` has of a dataclass like it, which may have more of its own.

        Raises:
            InputError: as `check`.
        """
        for field in dataclasses.fields(kind):
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            self.check(field.name, getattr(settings, field.name), default, where=kind.__name__)


def no_meaning(what: str, fix: str, *, where: str) -> InputError:
    return InputError(f"{what} has no meaning with gpumix", where=where, fix=fix)


def _same(value: Any, default: Any) -> bool:
    """Whether nothing is said: nothing, no and none are the same, but where yes is the default."""
    return value is default or (not value and not default) or bool(value == default)
