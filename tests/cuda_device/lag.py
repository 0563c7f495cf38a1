"""How far streams run behind; see the package."""

from __future__ import annotations

from cuda_device.library import call

# Of the default stream and of the others: 0 at once, 1 at random, 2 when somebody waits.
LAGS = {"": (0, 0), "side-late": (0, 2), "side-early": (2, 0), "random": (1, 1)}
LONGEST_US = 2000
_CURRENT = [""]


def set_lag(text: str) -> None:
    """Let the streams of this process, and of ranks that tests start from now on, run behind.

    Raises:
        ValueError: there is no such lag.
    """
    kind, _, seed = text.partition(":")
    if kind not in LAGS:
        raise ValueError(f"{text}: streams can lag {', '.join(filter(None, LAGS))}")
    call("set_lag")(*LAGS[kind], int(seed or 0), LONGEST_US, bool(kind))
    _CURRENT[0] = text


def current_lag() -> str:
    """As it was set; empty where there is none, or no such device."""
    return _CURRENT[0]
