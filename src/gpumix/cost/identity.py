"""Keys for caches by identity: hashing or comparing a large value takes long."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ByIdentity(Generic[T]):
    """A value equal only to itself, which a cache keeps alive."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.value is self.value
