"""Teams in the cost model: the ranks that compute each unit together count as one worker.

To each rank of a team the model is a smaller one, of its parts of the divided modules, and its
passes are longer by what the team's ranks tell each other meanwhile: nothing hides it. So a plan
with teams is counted as that of their first workers, on such a profile; the others do the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpumix.cost.curves import bytes_at
from gpumix.cost.wire import team_seconds
from gpumix.spec.curve import Curve
from gpumix.spec.errors import InputError
from gpumix.spec.plan import Plan, Prediction, Worker
from gpumix.spec.profile import (
    ROOT,
    ClassProfile,
    Profile,
    TeamCollective,
    TeamProfile,
    TeamTraffic,
    UnitTimes,
)


def in_team(profile: Profile, degree: int) -> Profile:
    """The profile of a rank that computes together with others, `degree` in all.

    Raises:
        InputError: such teams were not measured.
    """
    if degree == 1:
        return profile
    team = team_of(profile, degree)
    cluster, network = profile.cluster, profile.network
    if len({device.host for device in cluster.devices}) > 1:
        # All members of teams divide state with their likes at once, over the same links.
        network = tuple(
            one
            if one.group == "inside"
            else one.model_copy(update={"times": one.times.shared_by(degree)})
            for one in network
        )
        if cluster.network is not None:
            beside = cluster.network.between_slower(degree)
            cluster = cluster.model_copy(update={"network": beside})
    return profile.model_copy(
        update={
            "model": team.model,
            "other_models": team.other_models,
            "classes": tuple(_with_waits(profile, team, of_class) for of_class in team.classes),
            "teams": (),
            "cluster": cluster,
            "network": network,
        }
    )


def team_of(profile: Profile, degree: int) -> TeamProfile:
    """What was measured of teams of so many ranks; see `in_team`."""
    for team in profile.teams:
        if team.degree == degree:
            return team
    known = ", ".join(str(team.degree) for team in profile.teams) or "none"
    raise InputError(
        f"the profile does not say how {degree} ranks compute units together",
        why=f"tensor parallel degrees that were measured: {known}",
        fix="profile again with `techniques: {tensor: [1, ...]}`, or take another degree",
    )


def of_members(profile: Profile, plan: Plan, found: Prediction) -> Prediction:
    """A prediction of `plan.of_leaders` for all workers of the plan."""
    leaders = {w.device: expected for w, expected in zip(plan.of_leaders.workers, found.workers)}
    for number, stage in enumerate(plan.stages):
        for worker in stage.workers[:: stage.tensor] if stage.tensor > 1 else ():
            expected = leaders[worker.device]
            memory = expected.memory_bytes | {"team": buffer_bytes(profile, plan, number, worker)}
            leaders[worker.device] = expected.model_copy(update={"memory_bytes": memory})
    leader = {
        member.device: team[0].device
        for stage in plan.stages
        for team in stage.teams
        for member in team
    }
    return found.model_copy(
        update={
            "workers": tuple(
                leaders[leader[worker.device]].model_copy(update={"device": worker.device})
                for worker in plan.workers
            )
        }
    )


def told_in(profile: Profile, plan: Plan, stage: int, name: str) -> list[TeamTraffic]:
    """What a team of a class tells each other, by the unit calls of a stage; then of the root, as
    far as the stage computes it."""
    team, first = team_of(profile, plan.stages[stage].tensor), plan.first_call(stage)
    calls = profile.model.kind_of_call[first : first + len(plan.stages[stage].units)]
    of_class, nothing = team.told[name], TeamTraffic()
    root, left = of_class.get(ROOT, nothing), {}
    if stage > 0:
        left["forward"] = ()
    if stage < len(plan.stages) - 1:
        left["backward"] = ()
    return [*(of_class.get(kind, nothing) for kind in calls), root.model_copy(update=left)]


def buffer_bytes(profile: Profile, plan: Plan, stage: int, worker: Worker) -> int:
    """What a worker keeps to tell its team things in: over gloo, which CPUs use."""
    if profile.cluster.class_named(worker.device_class).accelerator != "cpu":
        return 0
    degree, largest = plan.stages[stage].tensor, {"all_reduce": 0, "exchange": 0}
    for told in told_in(profile, plan, stage, worker.device_class):
        for one in (*told.forward, *told.backward):
            size = int(float(bytes_at(one.bytes, worker.micro_batch))) // max(1, one.times)
            largest[one.operation] = max(largest[one.operation], size)
    return largest["all_reduce"] + (degree + 1) * largest["exchange"]


def _with_waits(profile: Profile, team: TeamProfile, device: ClassProfile) -> ClassProfile:
    nothing = TeamTraffic()

    def lengthened(name: str, times: UnitTimes) -> UnitTimes:
        told = team.told[device.device_class].get(name, nothing)

        def by(curve: Curve, of_pass: Iterable[TeamCollective]) -> Curve:
            waits = [_seconds(profile, team, device, size, of_pass) for size in curve.sizes]
            values = tuple(v + wait for v, wait in zip(curve.values, waits))
            return curve.model_copy(update={"values": values})

        update = {
            "forward": by(times.forward, told.forward),
            "backward": by(times.backward, told.backward),
        }
        if times.gradient is not None:
            update["gradient"] = by(times.gradient, told.gradient)
        if times.inputs is not None:
            update["inputs"] = by(times.inputs, told.gradient)
        return times.model_copy(update=update)

    units = {name: lengthened(name, times) for name, times in device.units.items()}
    return device.model_copy(update={"units": units})


def _seconds(
    profile: Profile,
    team: TeamProfile,
    device: ClassProfile,
    samples: float,
    of_pass: Iterable[TeamCollective],
) -> float:
    """That a micro-batch waits in a pass."""
    return sum(
        one.times
        * team_seconds(
            profile,
            one.operation,
            device.device_class,
            team.degree,
            float(bytes_at(one.bytes, samples)) / one.times,
        )
        for one in of_pass
        if one.times
    )
