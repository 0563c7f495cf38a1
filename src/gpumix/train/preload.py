"""Imports of every rank, done once in the process from which ranks are forked."""

import torch
import torch.distributed.checkpoint

import gpumix.train.rank_tasks  # noqa: F401

# Forked processes must not inherit the threads of a pool.
torch.set_num_threads(1)
