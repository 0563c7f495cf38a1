"""What every rank imports; the process that ranks are forked from imports it once."""

import torch
import torch.distributed.checkpoint

import gpumix.train.work  # noqa: F401

# Forked processes must not inherit the threads of a pool.
torch.set_num_threads(1)
