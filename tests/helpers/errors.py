"""Expected errors: by their code and the values that they name. Their words may change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from gpumix.schema.errors import GpumixError

E = TypeVar("E", bound=GpumixError)


@contextmanager
def raises(
    kind: type[E] | tuple[type[E], ...], *, code: str, **named: object
) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error with `code`.

    Args:
        named: by field (`what`, `where`, `why`, `fix`), the value that it names, or several.
    """
    __tracebackhide__ = True
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    if error.code != code:
        pytest.fail(f"the code is '{error.code}', not '{code}': {error}")
    for field, values in named.items():
        for value in values if isinstance(values, tuple) else (values,):
            if not names(getattr(error, field), value):
                pytest.fail(f"'{field}' does not name '{value}': {error}")


def names(text: str, value: object) -> bool:
    """Return whether a text names a value, not only as a part of a longer word or number."""
    return re.search(rf"(?<!\w)(?<!\d\.){re.escape(str(value))}(?!\w)(?!\.\d)", text) is not None
