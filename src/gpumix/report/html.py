"""HTML construction with escaping of all text, whatever its source.

A run's folder may contain any text: device names, errors, paths. Text enters a page only as a child
or an attribute of `el`, hence never as markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

# Not allowed in HTML, or able to reverse the direction of surrounding text.
_UNSHOWABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_VOID = {"br", "hr", "meta", "link"}
_NAME = re.compile(r"^[a-zA-Z][a-zA-Z0-9-]*$")


class Markup(str):
    """Text already in markup form."""

    __slots__ = ()


Child = str | Iterable["Child"] | None
Attribute = str | float | None


def escape_text(value: str) -> Markup:
    """Escape text for display."""
    return Markup(escape(_UNSHOWABLE.sub("\ufffd", value), quote=True))


def el(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Return an element. Underscores in attribute names become hyphens, a trailing underscore
    avoids Python's keywords; None attributes are omitted."""
    told = "".join(
        f' {_format_attribute_name(key)}="{escape_text(_format_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{told}>")
    return Markup(f"<{name}{told}>{join_children(children)}</{name}>")


def join_children(children: Iterable[Child]) -> Markup:
    """Concatenate children."""
    return Markup("".join(_render_child(child) for child in children))


def _render_child(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    return escape_text(child) if isinstance(child, str) else join_children(child)


def _format_attribute_name(key: str) -> str:
    name = key.rstrip("_").replace("_", "-")
    assert _NAME.match(name), f"{name} is no attribute"
    return name


def _format_value(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
