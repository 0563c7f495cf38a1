"""Detection of gradients scaled by a rank's own factor before an update.

`torch.nn.utils.clip_grad_norm_` takes the norm of the gradients that it is given. Given a rank's
pieces, it scales them by that rank's factor, and the update depends on the plan. So a few gradients
are compared before each update with those left by the step, if a program changes gradients at all;
ranks share their factors in the next step's exchange of losses.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gpumix.engine.comm.async_read import AsyncRead
from gpumix.engine.comm.step_exchange import StepTable
from gpumix.schema.errors import InputError

SAMPLED_PIECES, SAMPLED_NUMEL = 8, 256
MIN_MAGNITUDE = 1e-3  # of compared elements, relative to the greatest in the sample
TOLERANCE = 1e-4  # relative, of factors


class GradientScalingCheck:
    """A rank's comparison of gradients left by steps with gradients used by updates.

    Factors that keep their ratio to those of other ranks are accepted: a program may scale the
    gradients of some parameters, which only some ranks store.

    Args:
        pieces: this rank's trained pieces; they may become empty and be filled again.
    """

    def __init__(self, pieces: Sequence[nn.Parameter]) -> None:
        self._pieces = pieces
        self._is_changed = True  # whether updates use changed gradients; True to sample at first
        self._left: list[tuple[Tensor, int]] = []  # by the step, with the versions
        self._sample: Tensor | None = None
        self._factor: Tensor | None = None
        self._told: deque[tuple[int, AsyncRead]] = deque()
        self._factors: list[float] = []  # of all ranks, the last ones in which any was known

    def begin(self) -> None:
        """Begin to look for changes of gradients: a step has left them, or the engine has scaled
        them itself."""
        gradients = self._gradients()
        self._left = [(gradient, gradient._version) for gradient in gradients]
        self._sample = _sample(gradients) if self._is_changed else None

    def before_update(self) -> None:
        """Find the factor between the gradients left by the last step and those of an update."""
        if not self._left:
            return
        gradients = self._gradients()
        self._is_changed = len(gradients) != len(self._left) or any(
            now is not gradient or now._version != version
            for now, (gradient, version) in zip(gradients, self._left)
        )
        if self._is_changed and self._sample is not None:
            self._factor = _compute_common_factor(self._sample, _sample(gradients))
        self._left, self._sample = [], None

    def take(self) -> Tensor | float:
        """Return the factor of the last update, 0 if there is none; and reset."""
        factor, self._factor = self._factor, None
        if factor is None:
            return 0.0
        return factor if factor.device.type != "cpu" else factor.item()

    def note(self, step: int, table: Tensor) -> None:
        """Note the factors of all ranks that came with a step, and check those of the step before.

        Raises:
            InputError: ranks scaled gradients by unlike factors.
        """
        self._told.append((step, AsyncRead([table])))
        if len(self._told) < 2:
            return
        step, reading = self._told.popleft()
        [told] = reading.tensors()
        factors = StepTable(told).gradient_factors
        if not any(factors):
            return
        before, self._factors = self._factors, factors
        known = [r for r, both in enumerate(zip(before, factors)) if all(both)]
        ratios = {rank: factors[rank] / before[rank] for rank in known}
        if known and max(ratios.values()) - min(ratios.values()) > TOLERANCE * max(ratios.values()):
            raise _make_unlike_factors_error(step - 1, {rank: factors[rank] for rank in known})

    def _gradients(self) -> list[Tensor]:
        some = (piece.grad for piece in self._pieces if piece.numel() and piece.grad is not None)
        return list(itertools.islice(some, SAMPLED_PIECES))


def _sample(gradients: Sequence[Tensor]) -> Tensor | None:
    if not gradients:
        return None
    return torch.cat([one.detach()[:: one.numel() // SAMPLED_NUMEL + 1] for one in gradients])


def _compute_common_factor(before: Tensor, after: Tensor | None) -> Tensor | None:
    """Return the factor from `before` to `after`, a scalar; 0 if elements have no common factor."""
    if after is None or before.shape != after.shape:
        return None
    before, after = before.float(), after.float()
    compared = before.abs() > MIN_MAGNITUDE * before.abs().amax()
    ratios = torch.where(compared, after / before, torch.nan)
    low = torch.where(compared, ratios, torch.inf).amin()
    high = torch.where(compared, ratios, -torch.inf).amax()
    is_common = (low > 0) & (high - low <= TOLERANCE * high) & torch.isfinite(high)
    return torch.where(is_common, (low + high) / 2, 0.0)


def _make_unlike_factors_error(step: int, factors: dict[int, float]) -> InputError:
    by_rank = ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in factors.items())
    return InputError(
        f"gradients were scaled by unlike factors before the update of step {step}: {by_rank}",
        why="each rank has a piece of the gradients; torch.nn.utils.clip_grad_norm_, or a norm "
        "taken of `engine.parameters()`, goes by that piece",
        fix="clip with engine.clip_grad_norm_(max_norm); engine.gradient_norm() is the norm of all",
    )
