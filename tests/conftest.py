"""Where tests run, and how property tests draw.

All tests run on the CPU, but those that `pytest -m gpu` chooses. Properties are tried on the same
examples every time, so that a failure is no matter of luck; `--hypothesis-profile=explore` draws
new and many more.
"""

from __future__ import annotations

import os

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


def pytest_configure(config):
    if "gpu" not in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything looks; ranks inherit it
