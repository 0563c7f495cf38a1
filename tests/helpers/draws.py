"""How many examples a property is tried on."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

USUAL = 20  # where nothing else is said


def examples(number: int) -> settings:
    """So many, and as many times more as a profile draws more."""
    number = number * settings.default.max_examples // USUAL
    return settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))
