"""The least that a rank can hold in a step by a plan, in bytes, computed and not measured.

What a step needs at once, whoever runs it, if the next unit is gathered while one is computed and
one gradient is reduced while the next is made. In fp32, with AdamW:

* state: of each element that a rank owns its weight, its gradient and two moments, 16 bytes; below
  ZeRO stage 3 every rank has all weights, below stage 2 all gradients, at stage 0 all moments;
* stage 3: the root unit's weights, in use throughout, and those of two units;
* stage 2 and 3: the root's whole gradient, and those of two units in the backward pass;
* with recompute: the inputs of all calls (in layers: of all micro-batches; one after the other: of
  one), the gradients at one boundary, and what autograd saves inside one unit for one micro-batch;
* with graphs kept: what autograd saves inside all units, of as many samples;
* in the head instead: logits of one micro-batch and their gradient.

Not in it, though nobody does without: temporaries of kernels, buffers in which gradients arrive,
tokens, tables of positions. What autograd saves is counted on a plain model, without gpumix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from compared.setting import Model
from gpumix.engine.units import dissect
from gpumix.spec.plan import Plan, Worker, cut_sizes

ELEMENT = 4  # bytes of a number in fp32
MOMENTS = 2  # AdamW's, for each element


@dataclass(frozen=True)
class Sizes:
    """Of a model: elements of the root and of one of its `layers` units, and bytes of one sample at
    a boundary between units, saved inside one unit, and as logits."""

    root: int
    unit: int
    layers: int
    boundary_bytes: int
    saved_bytes: int
    logits_bytes: int

    @classmethod
    def of(cls, model: Model) -> Sizes:
        plain = model.build()
        anatomy = dissect(plain)
        return cls(
            root=anatomy.root.trainable,
            unit=anatomy.units[0].trainable,
            layers=model.layers,
            boundary_bytes=ELEMENT * model.sequence * model.width,
            saved_bytes=_saved_inside(plain, anatomy.units[0].module, model),
            logits_bytes=ELEMENT * model.sequence * model.vocabulary,
        )

    @property
    def elements(self) -> int:
        return self.root + self.layers * self.unit


def least_bytes(sizes: Sizes, plan: Plan, rank: int) -> int:
    """The least peak of `rank` in a step of `plan`."""
    worker, stage = plan.workers[rank], plan.zero_stage
    owned = _owned(sizes, plan, rank)
    state = ELEMENT * MOMENTS * (owned if stage else sizes.elements)
    state += ELEMENT * (owned if stage >= 2 else sizes.elements)  # gradients
    state += ELEMENT * (owned if stage == 3 else sizes.elements)  # weights
    if stage >= 2:
        state += ELEMENT * sizes.root  # its gradient, in the head and in the backward pass
    if stage == 3:
        state += ELEMENT * (sizes.root + sizes.unit)
    return state + max(_head(sizes, worker), _backward(sizes, worker, plan))


def _owned(sizes: Sizes, plan: Plan, rank: int) -> int:
    """Elements that a rank stores."""
    shares = plan.stages[0].shares
    unit, root = (cut_sizes(numel, shares)[rank] for numel in (sizes.unit, sizes.root))
    return root + sizes.layers * unit


def _head(sizes: Sizes, worker: Worker) -> int:
    return _kept(sizes, worker, sizes.layers) + 2 * worker.micro_batch * sizes.logits_bytes


def _backward(sizes: Sizes, worker: Worker, plan: Plan) -> int:
    """In the last unit, or in the one before, when the last one's gradient is on its way."""
    sharded = ELEMENT * sizes.unit if plan.zero_stage >= 2 else 0
    ahead = ELEMENT * sizes.unit if plan.zero_stage == 3 else 0
    working = _together(worker) * sizes.boundary_bytes
    if worker.mode.recompute:
        working += worker.micro_batch * sizes.saved_bytes
    return max(
        _kept(sizes, worker, sizes.layers - done) + ahead + (1 + done) * sharded + working
        for done in range(min(2, sizes.layers))
    )


def _kept(sizes: Sizes, worker: Worker, calls: int) -> int:
    """What `calls` calls leave until their backward."""
    of_call = sizes.boundary_bytes if worker.mode.recompute else sizes.saved_bytes
    return _together(worker) * calls * of_call


def _together(worker: Worker) -> int:
    """Samples that are under way at the same time."""
    return worker.samples if worker.mode.order == "layered" else worker.micro_batch


def _saved_inside(model: nn.Module, block: nn.Module, setting: Model) -> int:
    """Bytes of one sample that autograd saves inside `block`, its inputs and parameters apart."""
    saved: dict[int, int] = {}
    given: set[int] = {p.untyped_storage().data_ptr() for p in model.parameters()}
    forward = block.forward

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def noting(*args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        given.update(t.untyped_storage().data_ptr() for t in leaves if torch.is_tensor(t))
        with saved_tensors_hooks(note, lambda tensor: tensor):
            return forward(*args, **kwargs)

    block.forward = noting
    loss = model(**setting.rows(0, 1)).loss  # while it lives, no address is used twice
    found = sum(size for place, size in saved.items() if place not in given)
    del loss
    return found
