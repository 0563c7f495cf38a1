"""Plans written by hand, to test a model under an uneven split on a CPU: `plan_for` and `Share`."""

from gpumix.testing.plans import Share, plan_for

__all__ = ["Share", "plan_for"]
