"""How property tests draw: the same examples every time, so that a failure is no matter of luck.

`pytest --hypothesis-profile=explore` draws new and many more.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Examples that start processes take as long as they take.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=20,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore", settings.get_profile("ci"), derandomize=False, max_examples=200
)
settings.load_profile("ci")
