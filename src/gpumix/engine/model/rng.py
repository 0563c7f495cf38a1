"""Generators of random numbers: which there are, and their states.

`forward_coroutine.Randomness` seeds them, so that a second run of the same code draws the same.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from gpumix.hardware import runtime


class OtherGenerators:
    """Generators of Python and numpy, by which some models draw masks. Seeding takes as long as
    many a layer, so only a model observed to draw from these generators has them seeded.

    Attributes:
        are_used: True once the model was observed to draw.
        looks: True while the model is observed.
    """

    are_used = False

    def __init__(self) -> None:
        self.looks = False
        self._seeded: object = None  # states after seeding

    @contextlib.contextmanager
    def of_step(self, *, looks: bool) -> Iterator[None]:
        """Restore the program's generators after a step, as if nothing had been drawn.

        Args:
            looks: observe whether the model draws.
        """
        if not (looks or self.are_used):
            yield
            return
        self.looks, self._seeded = looks, None
        with _preserve_other_rng():
            try:
                yield
            finally:
                self._look()
                self.looks = False

    def seed(self, seed: int) -> None:
        """Seed the generators, if the model may draw from them."""
        self._look()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._seeded = _other_states() if self.looks and not self.are_used else None

    def _look(self) -> None:
        self.are_used |= self._seeded is not None and self._seeded != _other_states()


@contextlib.contextmanager
def _preserve_other_rng() -> Iterator[None]:
    """Restore the generators of Python and numpy on exit."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _other_states() -> object:
    _, words, *rest = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(words).tobytes(), rest


class RankRandomness:
    """Draws of ranks with the same seed: different on each rank from here on, except in code that
    draws alike. Reproducible after the same seed.

    Args:
        number: number of this rank.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        self._device = device
        self._alike = False
        self._other = _states(device)
        # `number + 1`: no rank draws alone the numbers that all draw together.
        seed = torch.default_generator.initial_seed() + (number + 1) * 0xD1B54A32D192ED03
        for generator in get_generators(device):
            generator.manual_seed(seed % 2**63)

    def draw_alike(self) -> None:
        self._switch(True)

    def draw_apart(self) -> None:
        self._switch(False)

    def _switch(self, alike: bool) -> None:
        if alike != self._alike:
            self._alike = alike
            now = _states(self._device)
            for generator, state in zip(get_generators(self._device), self._other):
                generator.set_state(state)
            self._other = now


def preserve_torch_rng(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Restore the caller's torch generators on exit, as if nothing inside had been drawn."""
    return torch.random.fork_rng(**choose_forked_generators(device))


def choose_forked_generators(device: torch.device) -> dict[str, Any]:
    """Return the arguments of `torch.random.fork_rng` for programs on a device."""
    gpu = runtime.is_gpu(device)
    # Without devices, any type will do.
    return {"devices": [device] if gpu else [], "device_type": device.type if gpu else "cuda"}


@contextlib.contextmanager
def preserve_all_rng(device: torch.device | None = None) -> Iterator[None]:
    """Restore all random state of the program on exit: `preserve_torch_rng`, and the generators of
    Python and numpy.

    Args:
        device: default: the current device, which a forked process must not query.
    """
    if device is None:
        device = runtime.current_device() if runtime.is_available() else torch.device("cpu")
    with _preserve_other_rng(), preserve_torch_rng(device):
        yield


def use_eval_mode(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Switch off dropout and all other training behavior inside."""
    return use_training_mode(model, False)


@contextlib.contextmanager
def use_training_mode(model: nn.Module, which: bool | Sequence[nn.Module]) -> Iterator[None]:
    """Put all, some or no modules in training mode inside, and the rest in evaluation mode."""
    before = {module: module.training for module in model.modules()}
    model.train(which is True)
    for module in which if not isinstance(which, bool) else ():
        module.training = True
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _states(device: torch.device) -> list[torch.Tensor]:
    return [generator.get_state() for generator in get_generators(device)]


def get_generators(device: torch.device) -> list[torch.Generator]:
    """Return torch's generators for programs on a device: the CPU's, and the device's own."""
    if runtime.is_gpu(device):
        return [torch.default_generator, runtime.default_generator(device)]
    return [torch.default_generator]
