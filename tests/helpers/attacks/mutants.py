"""Files spoilt by chance: their text, or what they say; for fuzzing whatever reads them.

A change of the text may leave anything. A change of the value is written as YAML or JSON again, so
that what is wrong is the content. Drawn from a `random.Random`, so a seed gives the same again.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from typing import Any

import yaml

Key = str | int
Keys = tuple[Key, ...]

NAN, INFINITY = math.nan, math.inf


@dataclass(frozen=True)
class Mutant:
    """A spoilt file: its bytes, and in words what was done."""

    content: bytes
    change: str


# -- places in what a file says --------------------------------------------------------------------


def at(value: Any, keys: Keys) -> Any:
    return reduce(lambda v, key: v[key], keys, value)


def with_value(keys: Keys, value: Any, of: Any) -> Any:
    """A copy of a document with another value at `keys`."""
    if not keys:
        return value
    changed = deepcopy(of)
    at(changed, keys[:-1])[keys[-1]] = value
    return changed


def without(keys: Keys, of: Any) -> Any:
    changed = deepcopy(of)
    del at(changed, keys[:-1])[keys[-1]]
    return changed


def places(value: Any, keys: Keys = ()) -> list[Keys]:
    """The keys of everything in there."""
    inside: list[tuple[Key, Any]] = []
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = list(enumerate(value))
    below = [place for key, item in inside for place in places(item, (*keys, key))]
    return [keys, *below] if keys else below


def _some(value: Any, rng: random.Random, fits: Callable[[Any], bool]) -> Keys | None:
    """A place whose value fits; places that differ in their numbers only count as one, or nothing
    but the points of curves would be drawn."""
    alike: dict[Keys, list[Keys]] = {}
    for keys in places(value):
        if fits(at(value, keys)):
            alike.setdefault(tuple("" if isinstance(k, int) else k for k in keys), []).append(keys)
    return rng.choice(rng.choice(list(alike.values()))) if alike else None


def shown(keys: Keys) -> str:
    return ".".join(map(str, keys))


# -- what a file says ------------------------------------------------------------------------------


ODD = (
    None, True, False, -1, 0, 1, 3, 0.5, -0.5, 1e-300, 1e300, 10**12, 10**30, 2**53 + 1, 2**63,
    NAN, INFINITY, -INFINITY, "", " ", "x", "1", "-1", "auto", "none", "NaN", "1e999 GiB", "8 GB",
    "x" * 5000, "é\u2028", "\ud800", "\0", "[red]x[/red]", "[/]", "%s{}", "../..", "~no-user/x",
    "/dev/null", [], {}, [[]], [None], {"x": 1}, {"": None}, ["x"] * 2000, list(range(2000)),
)  # fmt: skip


def of_value(value: Any, rng: random.Random) -> tuple[Any, str]:
    """The value with one thing in it changed."""
    while True:
        change = rng.choice(VALUE_CHANGES)
        if (changed := change(value, rng)) is not None:
            what, said = changed
            return what, f"{change.__name__}: {said}"


Changed = tuple[Any, str] | None


def odd_value(value: Any, rng: random.Random) -> Changed:
    keys = _some(value, rng, lambda v: True)
    odd = rng.choice(ODD)
    return keys and (with_value(keys, odd, value), f"{shown(keys)} is {odd!r:.60}")


def odd_all(value: Any, rng: random.Random) -> Changed:
    odd = rng.choice(ODD)
    return odd, f"all is {odd!r:.60}"


def removed(value: Any, rng: random.Random) -> Changed:
    keys = _some(value, rng, lambda v: True)
    return keys and (without(keys, value), shown(keys))


def renamed(value: Any, rng: random.Random) -> Changed:
    """A key with a typing error."""
    keys = _some(value, rng, lambda v: True)
    if keys is None or not isinstance(keys[-1], str):
        return None
    name = _misspelt(keys[-1], rng)
    holder = {name if k == keys[-1] else k: v for k, v in at(value, keys[:-1]).items()}
    return with_value(keys[:-1], holder, value), f"{shown(keys)} to {name!r}"


def added(value: Any, rng: random.Random) -> Changed:
    keys = _some(value, rng, lambda v: isinstance(v, dict)) or ()
    if not isinstance(at(value, keys), dict):
        return None
    name = rng.choice(["extra", "", "x" * 300, "\ud800", "[/b]", "kind", "name", "1"])
    holder = {**at(value, keys), name: rng.choice(ODD)}
    return with_value(keys, holder, value), f"{shown(keys)}.{name!r:.40}"


def moved(value: Any, rng: random.Random) -> Changed:
    """A key into another mapping."""
    source = _some(value, rng, lambda v: True)
    target = _some(value, rng, lambda v: isinstance(v, dict))
    if source is None or target is None or not isinstance(source[-1], str):
        return None
    if target[: len(source)] == source:
        return None
    holder = {**at(value, target), source[-1]: at(value, source)}
    changed = with_value(target, holder, value)
    return without(source, changed), f"{shown(source)} to {shown(target)}"


def swapped(value: Any, rng: random.Random) -> Changed:
    """Two values, each in the other's place."""
    one, other = (_some(value, rng, lambda v: True) for _ in range(2))
    if one is None or other is None or one[: len(other)] == other or other[: len(one)] == one:
        return None
    changed = with_value(one, at(value, other), value)
    return with_value(other, at(value, one), changed), f"{shown(one)} and {shown(other)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(value: Any, rng: random.Random) -> Changed:
    """Another number, most often a little off."""
    keys = _some(value, rng, _is_number)
    if keys is None:
        return None
    old = at(value, keys)
    new = rng.choice(
        [old + 1, old - 1, old + 1, old - 1, -old, 0, old * 2, old * 10**6, old * 10**15,
         old / 3, old + 0.5, float(old), str(old), 10**12, 2**31, 2**53, 1e308, NAN, INFINITY]
    )  # fmt: skip
    return with_value(keys, new, value), f"{shown(keys)} from {old!r} to {new!r}"


def listed(value: Any, rng: random.Random) -> Changed:
    """A list with items lost, doubled or in another order."""
    keys = _some(value, rng, lambda v: isinstance(v, list) and v)
    if keys is None:
        return None
    old = at(value, keys)
    how, new = rng.choice(
        [("empty", []), ("doubled", old * 2), ("reversed", old[::-1]), ("first alone", old[:1]),
         ("last twice", [*old, old[-1]]), ("without last", old[:-1]), ("inside", [old]),
         ("an item alone", old[0]), ("many times", old * 3000)]
    )  # fmt: skip
    return with_value(keys, new, value), f"{shown(keys)} {how}"


def word(value: Any, rng: random.Random) -> Changed:
    """A name that is none, or that of something else."""
    keys = _some(value, rng, lambda v: isinstance(v, str))
    if keys is None:
        return None
    old = at(value, keys)
    others = [at(value, k) for k in places(value) if isinstance(at(value, k), str)]
    new = rng.choice(
        [
            _misspelt(old, rng),
            old.upper(),
            old[:-1],
            f" {old}",
            old * 2,
            rng.choice(others),
            "other",
        ]
    )
    return with_value(keys, new, value), f"{shown(keys)} from {old!r:.40} to {new!r:.40}"


def switched(value: Any, rng: random.Random) -> Changed:
    """The other of two, or text for it."""
    keys = _some(value, rng, lambda v: isinstance(v, bool))
    if keys is None:
        return None
    new = rng.choice([not at(value, keys), str(at(value, keys)), int(at(value, keys))])
    return with_value(keys, new, value), f"{shown(keys)} to {new!r}"


def deep(value: Any, rng: random.Random) -> Changed:
    keys = _some(value, rng, lambda v: True)
    if keys is None:
        return None
    levels, new = rng.choice([10, 45, 60, 150]), at(value, keys)
    for _ in range(levels):
        new = rng.choice([[new], {"x": new}])
    return with_value(keys, new, value), f"{shown(keys)} {levels} levels deeper"


VALUE_CHANGES = (
    odd_value, odd_value, odd_value, removed, removed, renamed, added, moved, swapped, number,
    number, number, listed, listed, word, word, switched, deep, odd_all,
)  # fmt: skip


def _misspelt(text: str, rng: random.Random) -> str:
    if not text:
        return "x"
    n = rng.randrange(len(text))
    return rng.choice([text[:n] + text[n + 1 :], text[:n] + text[n] * 2 + text[n + 1 :],
                       text[:n] + "_" + text[n:], text.upper(), f"{text}s"])  # fmt: skip


def written(value: Any, form: str) -> bytes:
    """A value as YAML or JSON; what UTF-8 cannot hold is escaped."""
    if form == "json":
        return json.dumps(value, indent=1).encode()
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False).encode("utf-8", "backslashreplace")


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


# -- its text --------------------------------------------------------------------------------------

BITS = (
    b"", b" ", b"\n", b"\t", b"  \t", b":", b"- ", b"[", b"]", b"{", b"}", b",", b"'", b'"', b"#",
    b"&a ", b"*a", b"!!int ", b"!!python/object:os.system ", b"? ", b"|", b">", b"<<: ", b"~",
    b"null", b"-1", b"0", b"1e999", b".nan", b"NaN", b"Infinity", b"0x", b"1:30", b"9" * 400,
    b"9" * 5000, b"\0", b"\x07", b"\x1b[31m", b"\x85", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80",
    "é\u2028".encode(), b"\xef\xbb\xbf", b"[" * 300, b"{" * 100_000, b"{a: " * 300, b"---\n",
    b"...\n", b"%YAML 9.9\n", b"\\", b"//",
)  # fmt: skip


def of_text(text: bytes, rng: random.Random) -> Mutant:
    """The text with something done to it."""
    change = rng.choice(TEXT_CHANGES)
    return Mutant(change(text, rng), change.__name__)


def cut_off(text: bytes, rng: random.Random) -> bytes:
    return text[: rng.randrange(len(text))]


def flipped(text: bytes, rng: random.Random) -> bytes:
    found = bytearray(text)
    for _ in range(rng.choice([1, 1, 3, 30])):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def other_bytes(text: bytes, rng: random.Random) -> bytes:
    """Something put in, or in the place of what was there."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        begin = rng.randrange(len(text) + 1)
        text = text[:begin] + rng.choice(BITS) + text[begin + rng.choice([0, 0, 1, 5, 20]) :]
    return text


def other_value(text: bytes, rng: random.Random) -> bytes:
    """Behind a key of a line."""
    lines = text.split(b"\n")
    n = rng.choice([n for n, line in enumerate(lines) if b":" in line] or [0])
    lines[n] = lines[n].partition(b":")[0] + b": " + rng.choice(BITS)
    return b"\n".join(lines)


def other_lines(text: bytes, rng: random.Random) -> bytes:
    """Lines lost, doubled, moved, or pushed to the right."""
    lines = text.split(b"\n")
    n, m = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(6):
        case 0:
            del lines[n]
        case 1:  # of a mapping: a key twice
            lines.insert(n, lines[n])
        case 2:
            lines[n], lines[m] = lines[m], lines[n]
        case 3:
            lines[n] = b" " * rng.randrange(1, 9) + lines[n]
        case 4:
            lines[n] = b"\t" + lines[n].lstrip()
        case _:
            del lines[min(n, m) : max(n, m)]
    return b"\n".join(lines)


def emptied(text: bytes, rng: random.Random) -> bytes:
    return rng.choice([b"", b"\n", b"#\n", b" " * 1000, b"---\n", b"null", b"\0" * 100])


def huge(text: bytes, rng: random.Random) -> bytes:
    """With more than any such file can have to say."""
    more = rng.choice(
        [b"# nothing\n" * 1_200_000, b"x" * 11_000_000, b" " * 3_000_000, b"[" + b"1," * 200_000,
         b'{"a":' * 2000]
    )  # fmt: skip
    return rng.choice([text + more, more + text, more])


def bomb(text: bytes, rng: random.Random) -> bytes:
    """Aliases that stand for ever more, or for what they are in."""
    levels = [b"a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [b"a%d: &a%d [%s]" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 9)]
    circle = b"a: &a {b: *a}"
    merged = b"a: &a {b: 1}\nc: {<<: *a}"
    begun = rng.choice([b"\n".join(levels), circle, merged, b"x: *nowhere"])
    return begun + b"\n" + text if rng.random() < 0.5 else text.rstrip() + b"\n" + begun + b"\n"


TEXT_CHANGES = (
    cut_off, cut_off, flipped, flipped, other_bytes, other_bytes, other_bytes, other_value,
    other_value, other_lines, other_lines, other_lines, emptied, huge, bomb,
)  # fmt: skip


def mutants(text: str, form: str, rng: random.Random, content: float) -> Iterator[Mutant]:
    """Spoilt files without end, a part `content` of them valid YAML or JSON."""
    value = json.loads(text) if form == "json" else yaml.safe_load(text)
    while True:
        if rng.random() >= content:
            yield of_text(text.encode(), rng)
            continue
        changed, said = of_value(value, rng)
        yield Mutant(written(changed, form), said)
