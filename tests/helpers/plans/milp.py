"""The planner's problem as a mixed-integer programme, for a solver that is not ours: HiGHS.

For one setting: ZeRO-3 over all ranks, by collectives for unequal intervals. What an option takes
and holds is counted by `naive`, one at a time; the solver is told nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from gpumix.cost.loading_memory import find_room_on_host
from gpumix.schema.plan.dtypes import choose_communication_dtype
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode, Stage, Worker
from gpumix.schema.profile.profile import ClassProfile, Profile
from helpers.plans.naive import moments_bytes, worker_seconds

RESERVE = {"cuda": 0.06, "cpu": 0.02}


@dataclass(frozen=True)
class Option:
    """What a device may do, and the largest share of the state that it then has room for."""

    samples: int
    forward_s: float
    backward_s: float
    share: float


@dataclass(frozen=True)
class Group:
    """Like devices with their options; `update_s` is what one would take for the whole state."""

    devices: int
    update_s: float
    options: tuple[Option, ...]


def least_step_s(groups: Sequence[Group], batch: int) -> float | None:
    """The least sum of the longest forward, the longest backward and the longest update.

    Unknowns: how many devices of a group take an option, whether any does, the share that each
    group stores, and the three limits. In a group of several devices the update takes no time.
    """
    problem = _Problem()
    forward, backward, update = (problem.variable(cost=1) for _ in range(3))
    shares, samples = {}, {}
    for group in groups:
        taken = {problem.variable(most=group.devices, whole=True): o for o in group.options}
        share = problem.variable(most=1)
        shares[share] = 1
        samples |= {devices: o.samples for devices, o in taken.items()}
        problem.constrain(dict.fromkeys(taken, 1), group.devices, group.devices)
        problem.constrain({share: 1} | {devices: -o.share for devices, o in taken.items()}, most=0)
        if group.devices == 1:
            longest = (forward, lambda o: o.forward_s), (backward, lambda o: o.backward_s)
            for limit, of in longest:
                problem.constrain({limit: -1} | {d: of(o) for d, o in taken.items()}, most=0)
            problem.constrain({share: group.update_s, update: -1}, most=0)
            continue
        assert group.update_s == 0
        for devices, option in taken.items():
            any_does = problem.variable(most=1, whole=True)
            problem.constrain({devices: 1, any_does: -group.devices}, most=0)
            problem.constrain({any_does: option.forward_s, forward: -1}, most=0)
            problem.constrain({any_does: option.backward_s, backward: -1}, most=0)
    problem.constrain(shares, 1, 1)
    problem.constrain(samples, least=batch)
    return problem.solved()


class _Problem:
    """Variables by number, and linear constraints on them."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._most: list[float] = []
        self._whole: list[int] = []
        self._rows: list[tuple[dict[int, float], float, float]] = []

    def variable(self, *, cost: float = 0, most: float = inf, whole: bool = False) -> int:
        self._costs.append(cost)
        self._most.append(most)
        self._whole.append(int(whole))
        return len(self._costs) - 1

    def constrain(
        self, coefficients: dict[int, float], least: float = -inf, most: float = inf
    ) -> None:
        self._rows.append((coefficients, least, most))

    def solved(self) -> float | None:
        """The least cost; None if there is no solution."""
        matrix = lil_array((len(self._rows), len(self._costs)))
        for row, (coefficients, _, _) in enumerate(self._rows):
            for column, value in coefficients.items():
                matrix[row, column] = value
        _, least, most = zip(*self._rows)
        found = milp(
            self._costs,
            constraints=LinearConstraint(matrix.tocsr(), least, most),
            bounds=Bounds(0, self._most),
            integrality=self._whole,
            options={"mip_rel_gap": 1e-7},
        )
        assert found.status in (0, 2), found.message  # solved, or proven to have no solution
        return float(found.fun) if found.status == 0 else None


def groups_of(
    profile: Profile, batch: int, modes: Sequence[Mode], *, within_s: float, alone: bool
) -> list[Group]:
    """The devices of each class, or each `alone`, with options whose passes take no longer than
    `within_s`: what takes longer is in no plan that is faster than that."""
    groups = []
    for of in profile.classes:
        count = len([d for d in profile.cluster.devices if d.device_class == of.device_class])
        update_s = of.optimizer_s_per_element * profile.model.parameters
        options = tuple(_options(profile, of, batch, modes, within_s))
        if alone:
            groups += [Group(1, update_s, options)] * count
        else:
            groups.append(Group(count, update_s, options))
    return groups


def _options(
    profile: Profile, of: ClassProfile, batch: int, modes: Sequence[Mode], within_s: float
) -> list[Option]:
    """Every way to run 0 to `batch` samples, but for those that another one beats: who can do more
    samples can do fewer."""
    found: list[Option] = []
    for samples in range(batch + 1):
        cuts = range(1, min(samples, of.largest_micro_batch or batch) + 1) if samples else (0,)
        parts = []
        for micro_batch, mode in product(cuts, modes):
            part = (samples, micro_batch, mode)
            seconds = worker_seconds(profile, *_plan_with(profile, of.device_class, *part))
            if sum(seconds) <= within_s:
                parts.append((part, seconds))
        if not parts:
            break
        shares = [_capacity(profile, of, *part) for part, _ in parts]
        found += [Option(part[0], *s, share) for (part, s), share in zip(parts, shares)]
    fitting = [o for o in found if o.share >= 0]
    return [o for o in fitting if not any(_covers(other, o) for other in fitting)]


def _covers(one: Option, other: Option) -> bool:
    """Whether `one` is another option that is nowhere worse."""
    return (
        one != other
        and one.samples >= other.samples
        and one.forward_s <= other.forward_s
        and one.backward_s <= other.backward_s
        and one.share >= other.share
    )


def _plan_with(
    profile: Profile, name: str, samples: int, micro_batch: int, mode: Mode, share: float = 0.0
) -> tuple[Plan, int]:
    """A plan in which one device of the class has this part, and others have all the rest."""
    devices = profile.cluster.in_rank_order()
    rank = next(r for r, d in enumerate(devices) if d.device_class == name)
    other = (rank + 1) % len(devices)
    workers = [
        Worker(
            device=device.id,
            device_class=device.device_class,
            host=device.host,
            samples=samples if r == rank else 1 if r == other else 0,
            micro_batch=micro_batch if r == rank else int(r == other),
            state_share=share if r == rank else 1 - share if r == other else 0,
            mode=mode,
            compute_dtype=profile.of_class(device.device_class).compute_dtype,
        )
        for r, device in enumerate(devices)
    ]
    plan = Plan(
        strategy="one option",
        model=profile.model.fingerprint,
        sequence_length=profile.sequence_length,
        global_batch=samples + 1,
        communication_dtype=choose_communication_dtype(w.compute_dtype for w in workers),
        stages=(Stage(units=profile.model.calls, workers=tuple(workers)),),
        collectives=profile.collectives,
    )
    return plan, rank


def _capacity(
    profile: Profile, of: ClassProfile, samples: int, micro_batch: int, mode: Mode
) -> float:
    """The largest share with which every moment fits, for what a moment holds grows evenly with it;
    room is left for what the rounding of a cut may add. -1 if nothing fits."""
    device_class = next(c for c in profile.cluster.classes if c.name == of.device_class)
    usable = int(device_class.memory_bytes * (1 - RESERVE[device_class.accelerator]))
    none, whole = (
        moments_bytes(
            profile, *_plan_with(profile, of.device_class, samples, micro_batch, mode, share)
        )
        for share in (0.0, 1.0)
    )
    room = find_room_on_host(profile, of.device_class)
    if room is not None and max(host for _, host in none) > room:
        return -1.0
    ends = [(empty, full) for (empty, _), (full, _) in zip(none, whole)]
    if max(empty for empty, _ in ends) > usable:
        return -1.0
    room = usable - _rounding(profile)
    most = [(room - empty) / (full - empty) for empty, full in ends if full > empty]
    return max(0.0, min([1.0, *most]))


def _rounding(profile: Profile) -> int:
    """Two elements a unit, with all that is kept of them; and where parts of all ranks arrive, two
    more for every rank."""
    units = len(set(profile.model.calls)) + 1
    kept = 2 * units * (8 + profile.optimizer_bytes_per_element + 1)
    return kept + 2 * 4 * len(profile.cluster.devices)
