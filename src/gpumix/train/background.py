"""Work that a rank does beside training, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """`work`, which runs until it returns or raises.

    Whoever leaves by an error does not wait for it: it may never end. So it ends with the process.
    """

    def __init__(self, work: Callable[[], T], *, name: str) -> None:
        self._work = work
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result.append(self._work())
        except BaseException as error:
            self._error = error

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether `result` will raise, as far as it is known."""
        return self._error is not None

    def result(self) -> T:
        """What the work returned, once it has; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result[0]
