"""Model sharded over ranks: the pieces of one rank, and operations on all ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.model import extra_state, module_buffers
from gpumix.engine.model.frozen_base import FrozenBase
from gpumix.engine.optimizers import elementwise_check
from gpumix.engine.optimizers.block_cuts import check_block_cuts
from gpumix.engine.sharding import state_dict as state
from gpumix.engine.sharding.bucket import Bucket
from gpumix.engine.sharding.flat_group import FlatGroup
from gpumix.engine.sharding.parameter_index import ParameterIndex, Stored
from gpumix.engine.sharding.shard import Piece, Shard
from gpumix.engine.sharding.state_dict import OptimizerState


class ShardedModel:
    """One rank's part of a model, with state and gradients.

    Attributes:
        trains: True if any parameter of the model is trained, on any rank.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        buckets: Sequence[Bucket],
        inventory: ParameterIndex,
    ) -> None:
        self.model = model
        self.comm = comm
        self.device = comm.device
        self.base: FrozenBase | None = None
        """The frozen base of adapters, which checkpoints refer to instead of holding it."""
        self._buckets = buckets
        self._buckets_on_host = [
            bucket for bucket in buckets if any(group.on_host for group in bucket.groups)
        ]
        self._inventory = inventory
        self.trains = inventory.trains
        self._nothing = nn.Parameter(torch.empty(0, device=comm.device))
        is_whole = comm.world == 1 or self._is_replicated()
        for piece in self.pieces():
            if piece.exposed is not None:
                piece.exposed.is_whole = is_whole

    def groups(self) -> Iterator[FlatGroup]:
        """Yield the flat groups of all buckets, the root's first, then the units' in order."""
        for bucket in self._buckets:
            yield from bucket.groups

    def trained_shards(self) -> Iterator[Shard]:
        """Yield this rank's shards of trained parameters."""
        for group in self.groups():
            if group.trainable:
                yield from group.shards

    def pieces(self) -> Iterator[Piece]:
        """Yield this rank's part of every parameter, in the order of `groups`."""
        for group in self.groups():
            yield from group.pieces

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters for the optimizer: this rank's trainable pieces, some of them
        without elements (`engine.model.piece_parameter`). A rank without any has one empty
        parameter, because optimizers require some."""
        return iter([p for _, p in self.named_parameters()] or [self._nothing])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield trainable pieces by the model's own parameter names, for parameter groups."""
        return ((p.name, p.parameter) for p in self._trained_pieces())

    def _trained_pieces(self) -> Iterator[Piece]:
        return (piece for piece in self.pieces() if piece.local.requires_grad)

    def _is_replicated(self) -> bool:
        """Return True if each rank has all elements of all parameters, by the plan."""
        layouts = (group.layout for group in self.groups())
        return self._inventory.is_single_stage and all(
            d.replicated and d.tp_group is None for d in layouts
        )

    def trained_names(self) -> list[str]:
        """Return the names of all trained parameters, on any rank."""
        return [name for name, one in self._inventory.parameters.items() if one.trained]

    @property
    def parameter_names(self) -> Mapping[str, str]:
        """Piece name of a parameter, by each name of the parameter in the model."""
        return self._inventory.names

    @property
    def stored_parameters(self) -> Mapping[str, Stored]:
        """All parameters, on any rank, by the names of their pieces."""
        return self._inventory.parameters

    @property
    def is_whole(self) -> bool:
        """True if this rank has all values of the model, in ordinary parameters between steps."""
        return self._inventory.is_single_stage and all(group.is_whole for group in self.groups())

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of all parameters by name, as in the unsharded model."""
        return {name: one.shape for name, one in self._inventory.parameters.items()}

    def frozen_intervals(self) -> Iterator[tuple[str, int, int]]:
        """Yield the intervals of frozen parameters of which this rank has the first copy, by name,
        as they were read: each rank of a tensor-parallel group reads all of a parameter."""
        for piece in self.pieces():
            if piece.local.requires_grad or not piece.first or piece.start == piece.end:
                continue
            if piece.window.whole:
                yield piece.name, piece.start, piece.end
            elif piece.has_begin:
                yield piece.name, 0, piece.shape.numel()

    def is_saved(self, name: str) -> bool:
        """Return True for a parameter that checkpoints hold; they refer to a frozen base."""
        return self.base is None or self._inventory.parameters[name].trained

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of all gradients together, equal on every rank. One collective."""
        # The first of several copies counts for all.
        pieces = [piece for bucket in self._buckets for piece in bucket.pieces if piece.first]
        gradients = [piece.local.grad for piece in pieces if piece.local.grad is not None]
        square = nn.utils.get_total_norm(gradients).to(self.device) ** 2
        return self.comm.all_reduce(square, "all-reduce of the gradient norm").sqrt()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients to a global norm of at most `max_norm`; return the norm before."""
        norm = self.gradient_norm()
        pieces = [p.local for p in self._trained_pieces() if p.local.grad is not None]
        nn.utils.clip_grads_with_norm_(pieces, max_norm, norm)
        return norm

    def drop_overflowed(self) -> bool:
        """Drop all fp16 gradients if any overflowed on any rank; return True if so. Optimizers pass
        over absent gradients. Collective."""
        finite = [torch.isfinite(shard.gradient).all() for shard in self.trained_shards()]
        bad = (~torch.stack(finite)).sum().float().to(self.device)
        overflowed = bool(self.comm.all_reduce(bad, "exchange of overflows").item())
        for parameter in self.parameters() if overflowed else ():
            parameter.grad = None
        return overflowed

    def finite(self) -> bool:
        """Return True if all trained parameters are finite. Collective."""
        masters = [shard.master for shard in self.trained_shards()]
        bad = torch.stack([~torch.isfinite(m).all() for m in masters]).sum().float().to(self.device)
        return not self.comm.all_reduce(bad, "check of the weights").item()

    def state_dict(
        self, *, rank0_only: bool = False, quantised: bool = True
    ) -> dict[str, torch.Tensor]:
        """Return the unsharded model's state dict, on the CPU, by its own names. Collective.

        Args:
            rank0_only: other ranks take part, but get an empty dict.
            quantised: with quantised weights; without, less is gathered.
        """
        values = self.gather_values(rank0_only=rank0_only, quantised=quantised)
        return state.expand_quantised(values, self._inventory)

    def gather_values(
        self, *, rank0_only: bool = False, quantised: bool = True
    ) -> dict[str, torch.Tensor]:
        """Return `state_dict` with quantised weights as bytes. Collective."""
        self.agree_on_buffers()
        skipped = frozenset() if quantised else self._inventory.packed_names
        return state.gather_full_state(
            self.model,
            self.groups(),
            self.comm,
            self._inventory,
            rank0_only=rank0_only,
            skipped=skipped,
        )

    @property
    def has_whole_state(self) -> bool:
        """True if `state_dict` needs no other rank: each rank has the full state, without
        statistics to agree on."""
        return self._is_replicated() and not module_buffers.find_buffer_owners(self.model)

    def agree_on_buffers(self) -> None:
        """Make running statistics and modules' extra states equal on all ranks: all get the values
        of the first rank training on samples, in the stage that computes them. Collective.
        """
        module_buffers.broadcast_buffers(self.model, self.comm, self._inventory.find_training_rank)
        extra_state.broadcast_extra_state(self.model, self.comm, self._inventory.find_training_rank)

    def load_state_dict(self, values: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """Load this rank's part of an unsharded model's state dict.

        Args:
            strict: True if all names must be present; without, missing values stay as is.

        Raises:
            InputError: names or shapes differ; nothing was changed.
        """
        state.load_full_state(self.model, self.groups(), self._inventory, values, strict=strict)
        self.values_changed()

    def round_ahead(self) -> None:
        """Begin a step: prepare masters on the host for their gather."""
        for bucket in self._buckets_on_host:
            bucket.round_ahead()

    def values_changed(self) -> None:
        """Report writes into pieces, including frozen ones. Collective in effect: the next step
        gathers all buckets."""
        for bucket in self._buckets:
            bucket.values_changed()

    def check_optimizer(self, optimizer: Optimizer) -> bool:
        """Check that `optimizer` can update this plan's pieces; return whether it updates any.

        Raises:
            InputError: it has other results on pieces, or the plan's cuts go through its blocks.
        """
        is_ours = elementwise_check.check_optimizer(optimizer, self.parameters())
        check_block_cuts(self.trained_shards(), optimizer)
        return is_ours

    def optimizer_state(self, optimizer: Optimizer) -> OptimizerState:
        """Return the state of `optimizer` for this rank's pieces by name; see
        `engine.sharding.state_dict`."""
        self.check_optimizer(optimizer)
        return state.collect_optimizer_state(self.pieces(), optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, values: OptimizerState) -> None:
        """Replace the state of `optimizer`; its hyperparameters stay."""
        self.check_optimizer(optimizer)
        state.load_optimizer_state(self.pieces(), optimizer, values)
