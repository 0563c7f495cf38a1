"""Imports of every window's process, done once in the fork server."""

import torch._dynamo  # noqa: F401

import gpumix.doctor.function.child  # noqa: F401
