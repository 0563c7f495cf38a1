"""What every rank imports; the process that ranks are forked from imports it once."""

import torch
import torch.distributed.checkpoint

import gpumix.data.loader
import gpumix.engine.prepare
import gpumix.hardware.runtime
import gpumix.profiler.measure  # noqa: F401

# Forked processes must not inherit the threads of a pool.
torch.set_num_threads(1)
