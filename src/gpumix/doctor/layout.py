"""Edits of values in a YAML file's text, keeping the rest of the text unchanged."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.nodes import CollectionNode, MappingNode, Node


def set_yaml_value(text: str, path: list[str], value: Any) -> str:
    """Return the text with one value changed, or appended to a section.

    Raises:
        ValueError: the layout is not supported, for example a value over several lines.
    """
    section = yaml.compose(text, Loader=yaml.SafeLoader)
    for done, key in enumerate(path):
        if not isinstance(section, MappingNode):
            raise ValueError(f"'{'.'.join(path[:done])}' is no section")
        found = {name.value: node for name, node in section.value}.get(key)
        if found is None:
            for inner in reversed(path[done + 1 :]):
                value = {inner: value}
            return _append_entry(text, section, f"{key}: {_dump_value(value)}")
        section = found
    assert section is not None, "a path has a key"
    if section.start_mark.line != section.end_mark.line:
        raise ValueError(f"'{'.'.join(path)}' has several lines")
    return text[: section.start_mark.index] + _dump_value(value) + text[section.end_mark.index :]


def _append_entry(text: str, section: MappingNode, entry: str) -> str:
    if section.flow_style:
        end = section.end_mark.index - 1  # the closing bracket
        kept = text[:end].rstrip()
        return f"{kept}{', ' if section.value else ''}{entry}{text[end:]}"
    last = _find_last_node(section)
    line_end = text.find("\n", last.end_mark.index)
    place = len(text) if line_end < 0 else line_end
    return f"{text[:place]}\n{' ' * section.start_mark.column}{entry}{text[place:]}"


def _find_last_node(node: Node) -> Node:
    """Return the last node in the text of a section."""
    while isinstance(node, CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return node


def _dump_value(value: Any) -> str:
    dumped = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return dumped.removesuffix("...\n").strip()
