"""What every window's process imports; the process that they are forked from imports it once."""

import torch._dynamo  # noqa: F401

import gpumix.doctor.function.child  # noqa: F401
