"""A plan of several stages trains like one process."""

from __future__ import annotations

import pytest

from gpumix.spec.plan import Mode, Plan, Stage, Taken, Worker
from models import ARCHITECTURES
from harness import run_ranks
import reference
from reference import SEED, batches, initialised, joined, optimizer_for, own_rows, pieces_of, train_alone, worst_error, Trained, tensor_errors

STEPS = 3
