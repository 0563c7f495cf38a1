"""The ways in which a user of torch can train: DDP or FSDP2 in one of its forms, or a plain loop;
in how many micro-batches, with or without recompute.

Compiled code is none of them: it runs past the dispatch mode that holds emulated devices to their
speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from compared.systems import Ddp, Fsdp, recomputing
from emulated.setting import Setting
from emulated.systems import Loop, System, labels_of
from gpumix.hardware.device import DeviceRuntime

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Way:
    """One way. `form` None: by itself, a plain loop; `micro_batches`: of each rank in a
    step; of one with fewer samples, as many as it has."""

    form: Ddp | Fsdp | None = None
    micro_batches: int = 1
    recompute: bool = False

    @property
    def name(self) -> str:
        form = "plain loop" if self.form is None else self.form.name
        kept = "recompute" if self.recompute else "graphs kept"
        return f"{form}, {self.micro_batches} micro-batch(es), {kept}"

    @property
    def exchanges(self) -> tuple[int, int, int]:
        """How often a block's weights are gathered and its gradient is reduced in a step, and
        whether gathers are waited for."""
        if not isinstance(self.form, Fsdp):
            return 0, 1, 0
        gathers = 2 * self.micro_batches if self.form.reshard else 1
        reduces = 1 if self.form.whole_gradients else self.micro_batches
        return gathers, reduces, int(not self.form.ahead)

    @property
    def exchanges_once(self) -> bool:
        """Whether a step's exchanges do not depend on the number of its micro-batches."""
        gathers, reduces, _ = self.exchanges
        return gathers <= 1 and reduces == 1

    def covers(self, other: Way) -> bool:
        """Of the same system, a way that recomputes no more, in no more micro-batches and with no
        more exchanges, is as fast."""
        if type(self.form) is not type(other.form):
            return False
        ours = (self.recompute, self.micro_batches, *self.exchanges)
        theirs = (other.recompute, other.micro_batches, *other.exchanges)
        return all(a <= b for a, b in zip(ours, theirs))

    def model(self, setting: Setting) -> Any:
        """The model, before it is distributed."""
        model = setting.build()
        if self.recompute:
            recomputing(model)
        return model

    def system(self, model: Any, setting: Setting, runtime: DeviceRuntime) -> System:
        """The loop around `model`. Collective, unless it is by itself."""
        labels = labels_of(setting)
        if self.form is None:
            return Loop(model, labels=labels, micro_batches=self.micro_batches)
        distributed, exchanging = self.form.distribute(model, CPU)
        return Loop(
            distributed,
            labels=labels,
            micro_batches=self.micro_batches,
            ranks=len(setting.devices),
            exchanging=exchanging,
            # DDP waits for its exchange in C++, where pacing cannot see it.
            after_backward=runtime.idle if isinstance(self.form, Ddp) else lambda: None,
        )


def ways_of(samples: Sequence[int]) -> list[Way]:
    """All ways to train by DDP and FSDP2, those that take much memory and little time first.

    Args:
        samples: of each rank in a step. Ranks that exchange something in each micro-batch run the
            same number of them, at most as many as the rank with the fewest samples has; else a
            rank with few samples runs fewer.
    """
    ways = [
        Way(form, count, recompute)
        for recompute, count in product((False, True), _powers_of_two(max(samples)))
        for form in _forms(count)
        if count <= min(samples) or Way(form, count).exchanges_once
    ]
    return sorted(ways, key=lambda way: (way.recompute, way.micro_batches, sum(way.exchanges)))


def thriftiest(samples: Sequence[int]) -> Way:
    """The way that takes the least memory."""
    (*_, most) = _powers_of_two(min(samples))
    return Way(Fsdp(reshard=True, ahead=False), most, recompute=True)


def _forms(micro_batches: int) -> Iterator[Ddp | Fsdp]:
    yield Ddp()
    # Where weights are kept, all are gathered at once: only with shards do late gathers spare room.
    for reshard, ahead in ((False, True), (True, True), (True, False)):
        yield Fsdp(reshard, ahead=ahead)
        if micro_batches > 1:
            yield Fsdp(reshard, whole_gradients=True, ahead=ahead)


def _powers_of_two(most: int) -> Iterator[int]:
    count = 1
    while count <= most:
        yield count
        count *= 2
