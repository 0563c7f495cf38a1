"""YAML as plain values: every place is known, every error names its line and column."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpumix.schema.errors import InputError
from gpumix.schema.reading.yaml_locations import (
    MAX_DEPTH,
    YamlSource,
    load_yaml,
    parse_yaml,
    show_keys,
    show_value,
)
from helpers.errors import raises
from helpers.extended import left_out

SOURCE = YamlSource("f.yaml", Path("/"))


def value_of(text):
    return parse_yaml(text, SOURCE).value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4), ("1E5", 1e5), (".5e+1", 5.0), ("-2.e1", -20.0), ("'3e-4'", "3e-4"),
        ("3", 3), ("1_000", 1000), ("0x10", 16), ("-.inf", float("-inf")), ("1.5", 1.5),
        ("true", True), ("no", False), ("~", None), ("null", None), ("''", ""), ("e4", "e4"),
        ("2024-01-01", "2024-01-01"), ("8 GFLOP/s", "8 GFLOP/s"), ("=", "="), ("<<", "<<"),
        ("{1: a, on: b, ~: c}", {"1": "a", "on": "b", "~": "c"}),
        ("[&a {x: 1}, *a]", [{"x": 1}, {"x": 1}]), ("\ufeffa: 1", {"a": 1}), ("!!str 3", "3"),
    ],
)  # fmt: skip
def test_values(text, value):
    found = value_of(text)
    assert found == value
    assert type(found) is type(value)


def test_nothing():
    assert parse_yaml(" # only a comment\n", SOURCE) is None


def test_places():
    tree = parse_yaml("\na: 1\nb:\n  - x\n  - {c: 2,\n     d: 3}\n", SOURCE)
    lines = {show_keys(keys): place.line for keys, place in tree.places.items()}
    assert lines == {"": 2, "a": 2, "b": 3, "b[0]": 4, "b[1]": 5, "b[1].c": 5, "b[1].d": 6}
    assert str(tree.place(("b", 1, "missing", 0))) == "f.yaml:5"
    assert str(tree.place(("missing",))) == "f.yaml:2"


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("a: [1, 2", "1:9", "this is not YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\n b: 2", "2:3", "this is not YAML: mapping values are not allowed here"),
        ("a:\n\tb: 1", "2:1", "this is not YAML: found character '\\t'"),
        ("a: b\n--- \nc: d", "2:1", "this is not YAML: but found another document"),
        ("a: *b", "1:4", "this is not YAML: found undefined alias 'b'"),
        ("ok: 1\na: \x07", "2:4", "this is not YAML: the character '\\x07' may not stand here"),
        ("a: 1\nb:\n  c: 1\n  c: 2", "4:3", "key 'b.c' is given twice, at f.yaml:3"),
        ("a: !!python/object:os.system x", "1:4", "the tag 'tag:yaml.org,2002:python/object:os.s"),
        ("a: !!set {x}", "1:4", "the tag 'tag:yaml.org,2002:set' is not read"),
        ("a: !mine x", "1:4", "the tag '!mine' is not read"),
        ("a: !!int x", "1:4", "'x' is not a value"),
        ("a: !!bool x", "1:4", "'x' is not a value"),
        ("a: 0b_", "1:4", "'0b_' is not a value"),
        ("a: " + "9" * 5000, "1:4", f"'{'9' * 40}' is not a value"),
        ("a: 0x" + "9" * 5000, "1:4", f"'0x{'9' * 38}' is not a value"),
        ("? [a]\n: 1", "1:3", "a key must be text"),
        ("a: 1\n<<: {b: 1}", "2:1", "merge keys '<<' are not read"),
        ('a: "\\0"', "1:4", "\"\\u0000\" holds a character that is no text"),
        ('a: "\\ud800"', "1:4", "\"\\ud800\" holds a character that is no text"),
        ("&a [*a]", "1:1", f"this is nested deeper than {MAX_DEPTH} levels"),
        ("[" * 60 + "]" * 60, "1:52", f"this is nested deeper than {MAX_DEPTH} levels"),
    ],
)  # fmt: skip
def test_errors_name_line_and_column(text, where, what):
    with pytest.raises(InputError) as caught:
        parse_yaml(text, SOURCE)
    assert str(caught.value).startswith(f"f.yaml:{where}: {what}")


PLACELESS = ["[" * 100_000, 'a: "\\UFFFFFFFF"', "%YAML 1." + "9" * 5000]


@pytest.mark.parametrize("text", left_out(PLACELESS, PLACELESS[:1]))
def test_what_yaml_itself_cannot_place(text):
    with pytest.raises(InputError) as caught:
        parse_yaml(text, SOURCE)
    assert caught.value.where == "f.yaml"


def test_aliases_do_not_explode():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with raises(InputError, code="yaml-too-many-values", what=100000):
        parse_yaml("\n".join(lines), SOURCE)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "empty"), ([], "empty"), ({}, "empty"), ([1], "a list of 1"), ({"a": 1}, "a mapping"),
     (True, "true"), (3, "3"), (3e-4, "0.0003"), (float("inf"), "inf"), ("a", "'a'"), ("", "''"),
     ("x" * 99, f"'{'x' * 56}...")],
)  # fmt: skip
def test_values_as_a_person_says_them(value, shown):
    assert show_value(value) == shown


def test_a_file_that_is_too_long_is_not_read(tmp_path):
    path = tmp_path / "job.yaml"
    path.touch()
    os.truncate(path, 2**40)
    with raises(InputError, code="file-too-long", what=10):
        load_yaml(path, "job")
