"""Reasons why no plan fits, in bytes: the missing memory, the place, and the remedies.

Counted at the micro-batches and modes of least memory, at the nearest ZeRO stage. All amounts are
per device unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal, TypeVar

import numpy as np

from gpumix.cost.loading_memory import find_room_on_host
from gpumix.cost.memory_layout.curves import FloatArray, MicroBatches
from gpumix.cost.peak_memory import (
    Activations,
    MemoryDemands,
    compute_free_bytes,
    compute_usable_bytes,
)
from gpumix.cost.step_time import can_keep_state_on_host
from gpumix.planner.common.device_pool import Fleet
from gpumix.planner.common.sharding_setting import (
    ShardingSetting,
    can_keep_parameters_on_hosts,
    iterate_offloaded_classes,
    iterate_settings,
    make_setting,
    make_setting_on_hosts,
)
from gpumix.planner.data_parallel.knapsack import Staircase, Undecided, select_steps
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.curve import Curve
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.stage import Mode, Place
from gpumix.schema.profile.profile import ModelProfile, Profile, RootUnit, UnitKind
from gpumix.schema.units import show_bytes, show_exact_bytes

U = TypeVar("U", UnitKind, RootUnit)

Explained = Literal["nothing", "bytes", "fully"]

UNREACHABLE = 2**62  # more memory than any device has
FIRST_TRIED_BYTES = 2**24  # for a shortage, then twice as much

# Divisors of the sequence length to try, if the batch does not fit at full length.
SEQUENCE_LENGTH_DIVISORS = (2, 4, 8, 16)

# Up to `SIZES` micro-batch sizes all are tried, beyond only `FEW_SIZES`; of numbers of samples at
# most `MAX_SAMPLE_COUNTS`.
SIZES, FEW_SIZES = 96, 24
MAX_SAMPLE_COUNTS = 512


def make_no_fit_error(
    profile: Profile,
    devices: tuple[Device, ...],
    space: Space,
    batch: int,
    *,
    explains: Explained = "fully",
) -> NoFeasiblePlanError:
    """Return the error stating the missing bytes for state and batch; or the reason why state
    cannot be divided or placed as the space says.

    Args:
        explains: what to find out, each of which takes longer than the one before: nothing, the
            missing bytes, or causes and remedies too.
    """
    fleet = Fleet.of(profile, devices)
    if next(iterate_settings(fleet, space), None) is None:
        return _no_setting(fleet, space)
    if explains == "nothing":
        return NoFeasiblePlanError(f"no plan fits a global batch of {batch}", code="no-plan-fits")
    return _Shortage(profile, devices, space, batch).error(explains=explains == "fully")


def _no_setting(fleet: Fleet, space: Space) -> NoFeasiblePlanError:
    if space.parameters_on == ("host",):
        return NoFeasiblePlanError(
            "no plan is possible: hosts cannot keep all parameters",
            code="parameters-exceed-hosts",
            why="this needs ZeRO stage 3, state on hosts and measured speeds of hosts; several "
            "hosts also need measured or stated links, since each has a copy of the state",
            fix="allow `techniques: {parameters_on: [device, host]}`, or profile again",
        )
    if not list(iterate_offloaded_classes(fleet, space)):
        able = (name for name in fleet.classes if can_keep_state_on_host(fleet.profile, name))
        unable = sorted(set(fleet.classes).difference(able))
        return NoFeasiblePlanError(
            f"no plan is possible: what class '{unable[0]}' takes to keep state on its host was "
            "not measured",
            code="host-state-not-measured",
            fix="allow `techniques: {state_on: [device, host]}`, or profile again",
        )
    return NoFeasiblePlanError(
        "no plan is possible: state cannot be sharded inside each host",
        code="state-not-shardable-in-hosts",
        why="this needs several hosts, one with several devices, known links, "
        "and a ZeRO stage of 1 to 3",
        fix="allow `techniques: {shardings: [all, host]}`",
    )


class _Shortage:
    """Memory needs of each class, tabulated once for all amounts of memory tried."""

    def __init__(
        self, profile: Profile, devices: tuple[Device, ...], space: Space, batch: int
    ) -> None:
        self.profile = profile
        self.devices = devices
        self.space = space
        self.batch = batch
        self.needs = [
            _SettingDemands(setting, batch) for setting in _settings(profile, devices, space)
        ]
        self.counts = {
            name: len(devices) for name, devices in self.needs[0].setting.classes.items()
        }

    def error(self, *, explains: bool) -> NoFeasiblePlanError:
        if self._unmeasured():
            return self._nothing_measured()
        what = f"no plan fits a global batch of {self.batch}: {self._short()}"
        if not explains:
            return NoFeasiblePlanError(what, code="no-plan-fits", where=self._where())
        setting = self.needs[0].setting
        states = [setting.memory.state(setting.profile.model_of(name)) for name in self.counts]
        state = show_bytes(max(s.sharded_bytes + s.replicated_bytes for s in states))
        reasons = [
            f"with ZeRO-{setting.zero_stage} the state takes {state} "
            + ("over all devices" if setting.zero_stage else "on each device"),
            *map(self._of_class, self.counts),
        ]
        return NoFeasiblePlanError(
            what,
            code="no-plan-fits",
            where=self._where(),
            why="; ".join(reasons),
            fix=self._fix(),
        )

    def fits(self, batch: int, extra: Mapping[str, int], on_host: int = 0) -> bool:
        """Return True if state and batch fit with `extra` more bytes by class and `on_host` more
        bytes of host memory for each device."""
        return any(needs.can_fit(batch, extra, on_host) for needs in self.needs)

    def can_fit_idle(self, name: str, extra: int) -> bool:
        """Return True if a device of class `name` with `extra` more bytes can take part at all."""
        return any(bool(needs.capacity(name, extra)[0] >= 0) for needs in self.needs)

    def _unmeasured(self) -> list[str]:
        """Return classes without a measurement of any allowed mode."""
        settings = [needs.setting for needs in self.needs]
        return [name for name in self.counts if not any(s.modes[name] for s in settings)]

    def _nothing_measured(self) -> NoFeasiblePlanError:
        stages = self.space.zero_stages
        every = [mode for stage in stages for mode in self.space.modes(stage)]
        modes = {mode.describe() for mode in every if mode.head == self.space.cross_entropy[0]}
        missing = self._find_saving_technique()
        return NoFeasiblePlanError(
            f"no plan is possible: what class '{self._unmeasured()[0]}' takes to "
            f"{' or '.join(sorted(modes))} was not measured",
            code="modes-not-measured",
            where=self._where(),
            fix=f"allow {missing}: with it the batch fits" if missing else "profile again",
        )

    def _where(self) -> str:
        return ", ".join(f"{number} x {name}" for name, number in self.counts.items())

    def _short(self) -> str:
        """Describe the shortage, spread equally over all devices, or their hosts, or both."""
        count, batch = sum(self.counts.values()), self.batch

        def more(extra: int) -> Mapping[str, int]:
            return dict.fromkeys(self.counts, extra)

        short = _bisect_least_bytes(lambda extra: self.fits(batch, more(extra)))
        if short < UNREACHABLE:
            if count == 1:
                return f"the device is short of {show_exact_bytes(short)}"
            return (
                f"the {count} devices are short of {show_exact_bytes(short * count)} in all, "
                f"{show_exact_bytes(short)} each"
            )
        short = _bisect_least_bytes(lambda extra: self.fits(batch, {}, extra))
        if short < UNREACHABLE:
            return f"hosts are short of {show_exact_bytes(short)} for each device"
        short = _bisect_least_bytes(lambda extra: self.fits(batch, more(extra), extra))
        return f"devices, and hosts for each device, are short of up to {show_exact_bytes(short)}"

    def _of_class(self, name: str) -> str:
        """Describe a class's memory and needs, and the extra memory needed on the class alone."""
        usable = compute_usable_bytes(self.profile.cluster.class_named(name))
        text = f"{name} can use {show_bytes(usable)}"
        idle = _bisect_least_bytes(lambda extra: self.can_fit_idle(name, extra))
        if idle:
            text += f" and is short of {show_exact_bytes(idle)} even without samples and state"
        alone = _bisect_least_bytes(lambda extra: self.fits(self.batch, {name: extra}))
        if alone >= UNREACHABLE:
            return f"{text}; more memory there alone would not help"
        return f"{text}; {show_exact_bytes(alone)} more on each {name} would do"

    def _fix(self) -> str:
        """Describe the remedies, first without a purchase."""
        if missing := self._find_saving_technique():
            return f"allow {missing}: with it the batch fits"
        too_small = [name for name in self.counts if not self.can_fit_idle(name, 0)]
        if len(too_small) == len(self.counts):
            return "train a smaller model"
        if too_small:
            rest = tuple(d for d in self.devices if d.device_class not in too_small)
            fits = can_fit_devices(self.profile, rest, self.space, self.batch)
            return f"leave {', '.join(too_small)} out of the cluster" + (
                ": the rest fits" if fits else ", or train a smaller model"
            )
        low, high = 0, self.batch
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle, {}) else (low, middle)
        which = "the largest that fits" if self.batch <= MAX_SAMPLE_COUNTS else "which fits"
        ways = [f"set `global_batch_size: {low}`, {which}"] if low else []
        if shorter := self._find_shorter_sequence():
            ways.append(f"set `sequence_length: {shorter}`, at which it should fit")
        return ", or ".join(
            [*ways, "add devices" if ways else "add devices, or train a smaller model"]
        )

    def _find_saving_technique(self) -> str:
        """Name a memory-saving technique outside the space with which the batch fits."""
        recompute: dict[str, object] = {"gradient_checkpointing": (True,)}
        sharded: dict[str, object] = {"zero_stages": (3,)}
        on_hosts: dict[str, object] = {"state_on": ("device", "host")}
        in_chunks: dict[str, object] = {"cross_entropy": ("chunked",)}
        for name, change in (
            ("gradient checkpointing", recompute),
            ("chunked cross-entropy", in_chunks),
            ("ZeRO-3", sharded),
            ("gradient checkpointing and ZeRO-3", recompute | sharded),
            (
                "gradient checkpointing, chunked cross-entropy and ZeRO-3",
                recompute | in_chunks | sharded,
            ),
            ("state on hosts", on_hosts),
        ):
            wider = self.space.model_copy(update=change)
            if can_fit_devices(self.profile, self.devices, wider, self.batch):
                return name
        return ""

    def _find_shorter_sequence(self) -> int | None:
        """Return a shorter sequence at which the batch fits, if activations grow with its length
        (attention keeping its scores needs even less)."""
        for part in SEQUENCE_LENGTH_DIVISORS:
            length = self.profile.sequence_length // part
            profile = _with_shorter_samples(self.profile, part)
            if length > 0 and can_fit_devices(profile, self.devices, self.space, self.batch):
                return length
        return None


class _SettingDemands:
    """Memory needs of a setting: bytes by number of samples (rows) and micro-batch size (columns),
    for each class and mode."""

    def __init__(self, setting: ShardingSetting, batch: int) -> None:
        self.setting = setting
        self.batch = batch
        most = 1 if setting.memory.is_size_one_smallest(batch) else batch
        largest = max(setting.largest_micro_batch(name, most) for name in setting.classes)
        self._sizes = np.arange(1, largest + 1)
        if largest > SIZES:
            self._sizes = np.unique(np.geomspace(1, largest, FEW_SIZES).astype(np.int64))
        self._samples = np.unique(
            np.linspace(0, batch, min(batch, MAX_SAMPLE_COUNTS) + 1).astype(np.int64)
        )
        micro = MicroBatches.of(self._samples[:, None], self._sizes)
        profile = setting.profile
        alike: dict[tuple[int, Mode, Place], MemoryDemands] = {}
        self._tables: dict[tuple[str, Mode], MemoryDemands] = {}
        for name in setting.classes:
            model, state_on = profile.model_of(name), setting.state_on(name)
            for mode in setting.modes[name]:
                key = (id(model), mode, state_on)
                if key not in alike:
                    held = Activations(model, micro, mode)
                    alike[key] = setting.memory.demands(held, state_on=state_on)
                self._tables[name, mode] = alike[key]

    def can_fit(self, batch: int, extra: Mapping[str, int], on_host: int = 0) -> bool:
        """Return True if state and batch fit with `extra` more bytes by class and `on_host` more
        bytes of host memory for each device."""
        stairs = [
            Staircase.of(
                len(devices), self._samples, self.capacity(name, extra.get(name, 0), on_host)
            )
            for name, devices in self.setting.classes.items()
        ]
        try:
            return select_steps(stairs, batch) is not None
        except Undecided:
            return False

    def capacity(self, name: str, extra: int, on_host: int = 0) -> FloatArray:
        """Return the largest share by samples, with `extra` more bytes on each device."""
        profile = self.setting.profile
        free = compute_free_bytes(profile, name) + extra
        host_bytes = find_room_on_host(profile, name)
        allowed = self._sizes <= self.setting.largest_micro_batch(name, int(self._sizes[-1]))
        best: FloatArray = np.full(len(self._samples), -1.0)
        for mode in self.setting.modes[name]:
            table = self._tables[name, mode]
            on = None if host_bytes is None else host_bytes + on_host
            by_size = table.capacity(free, on)
            best = np.maximum(best, by_size[:, allowed].max(axis=1))
        if self.setting.parameters_on == "host":  # shares are equal
            equal = 1.0 / self.setting.fleet.size
            best = np.where(best >= equal, equal, -1.0)
        return np.where(best >= 0, 1.0, -1.0) if self.setting.zero_stage == 0 else best


def _settings(
    profile: Profile, devices: tuple[Device, ...], space: Space
) -> Iterator[ShardingSetting]:
    """Yield the settings of least memory, and of least host memory, of each ZeRO stage."""
    for zero_stage in sorted(set(space.zero_stages), reverse=True):
        modes = tuple(space.modes(zero_stage))
        setting = make_setting(profile, devices, zero_stage=zero_stage, modes=modes)
        for on_host in list(iterate_offloaded_classes(setting.fleet, space)) or [frozenset()]:
            yield replace(setting, on_host=on_host)
    fleet = Fleet.of(profile, devices)
    may = space.parameters_on != ("device",) and len(fleet.per_host) == 1
    if may and can_keep_parameters_on_hosts(fleet, space):
        yield make_setting_on_hosts(fleet, space)


def can_fit_devices(
    profile: Profile, devices: tuple[Device, ...], space: Space, batch: int
) -> bool:
    """Return True if state and batch fit some devices by a plan of one stage and one wave."""
    return any(
        _SettingDemands(s, batch).can_fit(batch, {}) for s in _settings(profile, devices, space)
    )


def _with_shorter_samples(profile: Profile, part: int) -> Profile:
    """Return the profile with a `part`-th of the memory for each sample."""

    def less(unit: U) -> U:
        curves = {name: curve.scaled(1 / part) for name, curve in unit if isinstance(curve, Curve)}
        return unit.model_copy(update=curves)

    def shorter(model: ModelProfile) -> ModelProfile:
        kinds = tuple(map(less, model.kinds))
        return model.model_copy(update={"kinds": kinds, "root": less(model.root)})

    others = tuple(map(shorter, profile.other_models))
    return profile.model_copy(update={"model": shorter(profile.model), "other_models": others})


def _bisect_least_bytes(enough: Callable[[int], bool]) -> int:
    """Return the least sufficient number of bytes; `UNREACHABLE` if no number suffices."""
    if enough(0):
        return 0
    low, high = 0, FIRST_TRIED_BYTES
    while high < UNREACHABLE and not enough(high):
        low, high = high, 2 * high
    if high >= UNREACHABLE:
        return UNREACHABLE
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
