"""The least that a rank can hold in a step by a plan, in bytes, computed and not measured.

What must be there at once, whoever runs the plan, if the next unit is gathered while one is
computed. In fp32, with AdamW:

* weights: those that a rank owns; at stage 3 beside them the root unit's, in use throughout, and
  those of the unit that is computed and of the next one; below stage 3 all of them;
* moments: two numbers for each element that it owns, at stage 0 for all;
* gradients, which come to be in the backward pass and are gone after the update: of what is done,
  its own elements (below stage 2 all elements); of the root and of the unit that is computed,
  whole ones. Where micro-batches run one after the other, all remain in between;
* with recompute: the inputs of all calls that wait for their backward (in layers: of all
  micro-batches; one after the other: of one), the gradients at one boundary, and what autograd
  saves inside one unit for one micro-batch;
* with graphs kept: what autograd saves inside all units that wait, of as many samples;
* in the head: logits of one micro-batch and their gradient.

Not in it, though hardly anybody does without: a gradient that is reduced while the next is made,
buffers in which gradients arrive, temporaries of kernels, tokens, tables of positions. What
autograd saves is counted on a plain model, without gpumix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from compared.setting import Model
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.splitting import compute_shard_sizes
from gpumix.schema.plan.stage import Worker

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
        anatomy = split_into_units(plain)
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
    return max(_Rank(sizes, plan, plan.workers[rank], rank).moments())


@dataclass(frozen=True)
class _Rank:
    """What one rank holds; amounts are bytes."""

    sizes: Sizes
    plan: Plan
    worker: Worker
    rank: int

    def moments(self) -> Iterator[int]:
        """All that is held in the head, in the backward of each unit, and at the end."""
        sizes, stage = self.sizes, self.plan.zero_stage
        yield self._state(ahead=1) + self._gradients(0, now=0) + self._head()
        for done in range(sizes.layers):
            state = self._state(ahead=2 if done + 1 < sizes.layers else 1)
            yield state + self._gradients(done, now=1) + self._backward(done)
        whole = ELEMENT * (self._owned() if stage >= 2 else sizes.elements)
        yield self._state(ahead=0) + whole + (ELEMENT * sizes.root if stage >= 2 else 0)

    def _state(self, ahead: int) -> int:
        """Weights and moments; `ahead`: units whose weights are gathered."""
        stage, sizes = self.plan.zero_stage, self.sizes
        weights = sizes.elements
        if stage == 3:
            weights = self._owned() + sizes.root + ahead * sizes.unit
        return ELEMENT * (weights + MOMENTS * (self._owned() if stage else sizes.elements))

    def _gradients(self, done: int, now: int) -> int:
        """While `now` units are computed, after `done` others."""
        sizes = self.sizes
        if self.plan.zero_stage >= 2:
            return ELEMENT * (sizes.root + now * sizes.unit + done * self._part(sizes.unit))
        again = self.worker.mode.order == "sequential" and len(self.worker.micro_batches) > 1
        return ELEMENT * (sizes.elements if again else sizes.root + (done + now) * sizes.unit)

    def _head(self) -> int:
        logits = self.worker.micro_batch * self.sizes.logits_bytes
        return self._kept(self.sizes.layers) + 2 * logits

    def _backward(self, done: int) -> int:
        """Of activations, in the unit after `done` others."""
        working = self._together() * self.sizes.boundary_bytes
        if self.worker.mode.recompute:
            working += self.worker.micro_batch * self.sizes.saved_bytes
        return self._kept(self.sizes.layers - done) + working

    def _kept(self, calls: int) -> int:
        """What `calls` calls leave until their backward."""
        sizes = self.sizes
        of_call = sizes.boundary_bytes if self.worker.mode.recompute else sizes.saved_bytes
        return self._together() * calls * of_call

    def _together(self) -> int:
        """Samples that are under way at the same time."""
        worker = self.worker
        return worker.samples if worker.mode.order == "layered" else worker.micro_batch

    def _owned(self) -> int:
        return self._part(self.sizes.root) + self.sizes.layers * self._part(self.sizes.unit)

    def _part(self, numel: int) -> int:
        """Of a unit's elements those that the rank owns."""
        return compute_shard_sizes(numel, self.plan.stages[0].shares)[self.rank]


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
